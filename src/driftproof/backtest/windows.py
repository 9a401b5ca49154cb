"""Windows of a walk-forward test: train on some time, test on what follows, move on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from driftproof.backtest.account import Numbers, Times
from driftproof.envs.market_data import Bars
from driftproof.envs.periods import add_period, parse_period

_MOST = 1000
"""Windows of one test."""


@dataclass(frozen=True)
class Window:
    """One window; times are ISO dates in UTC, and ends are not included.

    Attributes:
        train: Start and end of training.
        test: Start and end of the test, which begins where training ends.
    """

    train: tuple[str, str]
    test: tuple[str, str]


def windows(
    markets: Mapping[str, Bars], train: str, test: str, step: str | None = None, expanding: bool = False
) -> list[Window]:
    """Windows over the time of some markets.

    Args:
        markets: Bars by symbol.
        train: Length of training, such as ``"3y"``.
        test: Length of the test, such as ``"6mo"``. The last test ends with the data.
        step: Time from one window to the next; ``None``: the length of the test.
        expanding: Whether training always begins at the first bar, and grows.

    Raises:
        ValueError: The data are too short, or a length is invalid.
    """
    for name, text in (("train", train), ("test", test), ("step", step or test)):
        parse_period(name, text)
    first: np.datetime64 = min(bars.timestamps[0] for bars in markets.values()).astype("datetime64[D]")
    last = max(bars.timestamps[-1] for bars in markets.values())
    after: np.datetime64 = (last.astype("datetime64[D]") + 1).astype("datetime64[us]")
    begin, found = first.astype("datetime64[us]"), []
    while True:
        middle = add_period(begin, train)
        if middle >= last:
            break
        end = min(add_period(middle, test), after)
        start = first.astype("datetime64[us]") if expanding else begin
        if any(_count(bars.timestamps, middle, end) > 0 for bars in markets.values()):
            found.append(Window((_iso(start), _iso(middle)), (_iso(middle), _iso(end))))
        begin = add_period(begin, step or test)
        if len(found) > _MOST:
            raise ValueError(f"more than {_MOST} windows: choose a longer step than {step or test}")
    if not found:
        raise ValueError(f"the data, from {_iso(first)} to {_iso(last)}, end before a test after {train} of training")
    return found


def _count(times: Times, start: np.datetime64, end: np.datetime64) -> int:
    low, high = np.searchsorted(times, [start, end]).tolist()
    return int(high - low)


def _iso(time: np.datetime64) -> str:
    return str(time.astype("datetime64[us]")).removesuffix(".000000").removesuffix("T00:00:00")


def rows_between(bars: Bars, start: str, end: str, before: int = 0) -> slice:
    """Rows of a period, and a given number of rows before them."""
    low, high = np.searchsorted(bars.timestamps, [np.datetime64(start, "us"), np.datetime64(end, "us")]).tolist()
    return slice(max(low - before, 0), high)


def stitched(bars: Bars, parts: Mapping[tuple[str, str], Numbers]) -> Numbers:
    """Positions of consecutive tests as one row ``[T]``; 0 between them, NaN before the first, the latest wins.

    Args:
        bars: Bars of one market.
        parts: Positions at the bars of each test, by its start and end.
    """
    targets = np.full(len(bars), np.nan)
    for (start, end), taken in parts.items():
        rows = rows_between(bars, start, end)
        known = ~np.isnan(taken)
        targets[rows][known] = taken[known]
    known = np.flatnonzero(~np.isnan(targets))
    if len(known):
        targets[known[0] :] = np.nan_to_num(targets[known[0] :])
    return targets
