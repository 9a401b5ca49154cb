"""Backtests: what positions in markets would have earned after costs, and how sure that is."""

from driftproof._requirements import require

require("driftproof.backtest", "rl", "gymnasium")

from driftproof.backtest.account import Account, combine, simulate
from driftproof.backtest.engine import Backtest, Part, backtest
from driftproof.backtest.statistics import Performance, deflated_sharpe, performance

__all__ = [
    "Account",
    "Backtest",
    "Part",
    "Performance",
    "backtest",
    "combine",
    "deflated_sharpe",
    "performance",
    "simulate",
]
