"""Positions to compare with, and regimes of a market, from bars up to the one at whose close they are taken."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from driftproof.backtest.account import Account, Numbers

WINDOW = 63
"""Bars over which volatility and trends are measured: a quarter of a year of days."""


def buy_and_hold(close: Numbers) -> Numbers:
    """Fully long at all times."""
    return np.ones(len(close))


def flat(close: Numbers) -> Numbers:
    """No position."""
    return np.zeros(len(close))


def volatility_scaled(close: Numbers) -> Numbers:
    """Long, less in turbulent times: the usual volatility so far over that of the last bars, at most 1."""
    volatility = trailing_volatility(np.diff(np.log(close), prepend=np.log(close[0])))
    usual = running_median(volatility)
    with np.errstate(invalid="ignore", divide="ignore"):
        scaled = np.minimum(1.0, usual / volatility)
    return np.where(np.isfinite(scaled), scaled, 1.0)


STRATEGIES: dict[str, Callable[[Numbers], Numbers]] = {
    "buy and hold": buy_and_hold,
    "volatility-scaled": volatility_scaled,
    "flat": flat,
}
"""Positions ``[T]`` at closes ``[T]``, by name."""


def regimes(market: Account) -> npt.NDArray[np.str_]:
    """Regime at the beginning of each bar of an account that buys and holds: its trend and its volatility so far."""
    changes = np.concatenate(([0.0], market.log_returns[:-1]))
    total = np.concatenate(([0.0], np.cumsum(changes)))
    trend = np.full(len(changes), np.nan)
    trend[WINDOW - 1 :] = total[WINDOW:] - total[:-WINDOW]
    volatility = trailing_volatility(changes)
    usual = running_median(volatility)
    names = np.where(trend >= 0, "rising", "falling").astype("<U24")
    names = np.char.add(names, np.where(volatility > usual, ", turbulent", ", calm"))
    unknown = np.isnan(trend) | np.isnan(volatility)
    return np.where(unknown, f"first {WINDOW} bars", names)


def trailing_volatility(changes: Numbers) -> Numbers:
    """Root of the mean square of the last changes, ``[T]``; NaN where there are too few."""
    squares = np.concatenate(([0.0], np.cumsum(changes**2)))
    found = np.full(len(changes), np.nan)
    # The first change is that of the first bar, which is none.
    found[WINDOW:] = np.sqrt(np.maximum(squares[WINDOW + 1 :] - squares[1:-WINDOW], 0) / WINDOW)
    return found


def running_median(values: Numbers) -> Numbers:
    """Median of all values so far, ``[T]``, without those that are NaN."""
    import bisect

    seen: list[float] = []
    medians = np.full(len(values), np.nan)
    for i, value in enumerate(values.tolist()):
        if value == value:
            bisect.insort(seen, value)
            middle = len(seen) // 2
            medians[i] = seen[middle] if len(seen) % 2 else (seen[middle - 1] + seen[middle]) / 2
    return medians
