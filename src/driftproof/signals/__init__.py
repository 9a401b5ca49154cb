"""Signals of a trained agent for markets: BUY, HOLD or SELL, with a score and expected returns."""

from driftproof._requirements import require

require("driftproof.signals", "rl", "gymnasium", "stable_baselines3")

from driftproof.signals.batch import infer, positions
from driftproof.signals.rows import Signals, Thresholds
from driftproof.signals.streaming import RunningFeatures, StreamReader, stream

__all__ = ["RunningFeatures", "Signals", "StreamReader", "Thresholds", "infer", "positions", "stream"]
