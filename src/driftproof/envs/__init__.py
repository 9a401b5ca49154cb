"""Worlds that change: drift for any Gymnasium environment, and markets."""

from driftproof._requirements import require

require("driftproof.envs", "rl", "gymnasium")

from driftproof.envs.changes import (
    ActionGain,
    ActionPermute,
    Change,
    ObservationFlip,
    ObservationNoise,
    ObservationOffset,
    ObservationPermute,
    ObservationScale,
    ObservationShift,
    RewardScale,
    RewardSign,
)
from driftproof.envs.drift import DriftWrapper, change, drifting
from driftproof.envs.dynamics import Dynamics, derives
from driftproof.envs.features import FeatureConfig, compute_features
from driftproof.envs.last_step import LastStep
from driftproof.envs.market import MarketEnv
from driftproof.envs.market_check import DataCheck, check_market_data
from driftproof.envs.market_data import Bars, MarketDataError, from_columns, write_csv
from driftproof.envs.market_files import load_market_data, read_bars
from driftproof.envs.regime_market import RegimeMarketEnv, regime_bars
from driftproof.envs.regime_market_batch import RegimeMarketBatch
from driftproof.envs.regimes import REGIMES, RegimeParameters
from driftproof.envs.schedules import Cyclic, Gradual, RandomWalk, Schedule, Sudden, schedule

__all__ = [
    "REGIMES",
    "ActionGain",
    "ActionPermute",
    "Bars",
    "Change",
    "Cyclic",
    "DataCheck",
    "DriftWrapper",
    "Dynamics",
    "FeatureConfig",
    "Gradual",
    "LastStep",
    "MarketDataError",
    "MarketEnv",
    "ObservationFlip",
    "ObservationNoise",
    "ObservationOffset",
    "ObservationPermute",
    "ObservationScale",
    "ObservationShift",
    "RandomWalk",
    "RegimeMarketBatch",
    "RegimeMarketEnv",
    "RegimeParameters",
    "RewardScale",
    "RewardSign",
    "Schedule",
    "Sudden",
    "change",
    "check_market_data",
    "compute_features",
    "derives",
    "drifting",
    "from_columns",
    "load_market_data",
    "read_bars",
    "regime_bars",
    "schedule",
    "write_csv",
]
