"""Prices of real markets, checked before anything is learned from them."""

from __future__ import annotations

import csv
import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from driftproof._arguments import check_number

Times = npt.NDArray[np.datetime64]
Numbers = npt.NDArray[np.float64]
Gap = float | datetime.timedelta | None

PRICES = ("open", "high", "low", "close")
COLUMNS = ("timestamp", *PRICES, "volume")
"""What files have; ``volume`` may be missing, and ``symbol`` is there if a file holds more than one market."""

_LONGEST_GAP = 1e6
"""Days, which is longer than any market."""
_WEEK: np.timedelta64 = np.timedelta64(7, "D")


class MarketDataError(ValueError):
    """Prices that nothing should be learned from; the message names the file and the row."""


@dataclass(frozen=True)
class Bars:
    """Consecutive bars of one market, ``[T]`` each.

    Attributes:
        timestamps: When they begin, as ``datetime64[us]``, in UTC.
        open: Prices at the beginning.
        high: Highest prices.
        low: Lowest prices.
        close: Prices at the end.
        volume: Traded; all NaN if it is not known.
        symbol: What is traded.
    """

    timestamps: Times
    open: Numbers
    high: Numbers
    low: Numbers
    close: Numbers
    volume: Numbers
    symbol: str = ""

    def __len__(self) -> int:
        return len(self.close)

    def rows(self, which: range | slice) -> Bars:
        """Some of the bars."""
        part = slice(which.start, which.stop)
        numbers = {name: getattr(self, name)[part] for name in (*PRICES, "volume")}
        return Bars(self.timestamps[part], **numbers, symbol=self.symbol)

    @property
    def has_volume(self) -> bool:
        """Whether volumes are known."""
        return not bool(np.isnan(self.volume).all())

    @property
    def prices(self) -> tuple[Numbers, Numbers, Numbers, Numbers, Numbers]:
        """Open, high, low, close and volume: what features are made of."""
        return self.open, self.high, self.low, self.close, self.volume


@dataclass(frozen=True)
class Place:
    """Where numbers came from, for messages.

    Attributes:
        source: Name of the file, or of what else it was.
        rows: What the rows are called there, ``[T]``.
        unused: Names of columns that were not read, one of which may tell markets apart.
    """

    source: str
    rows: npt.NDArray[np.int64]
    unused: tuple[str, ...] = ()

    def error(self, index: int | np.integer[Any], message: str) -> MarketDataError:
        return MarketDataError(f"{self.source}, row {self.rows[index]}: {message}")


def check_bars(bars: Bars, place: Place, max_gap: Gap = None) -> None:
    """Raise unless bars can be believed: numbers that are numbers, prices that fit together, times without gaps.

    Args:
        bars: Of one market.
        place: Where they came from.
        max_gap: Longest time from one bar to the next, in days, or a timedelta; ``None``: three times what is usual,
            but no less than a week in a market without bars on Saturdays and Sundays.

    Raises:
        MarketDataError: They cannot; the first reason.
    """
    for name in (*PRICES, *(["volume"] if bars.has_volume else [])):
        _check_numbers(name, getattr(bars, name), place)
    for name, wrong in (
        ("high is below", bars.high < np.maximum(bars.open, bars.close)),
        ("low is above", bars.low > np.minimum(bars.open, bars.close)),
    ):
        if wrong.any():
            i = int(np.argmax(wrong))
            prices = ", ".join(f"{price} {getattr(bars, price)[i]:g}" for price in PRICES)
            raise place.error(i, f"{name} open or close ({prices})")
    _check_times(bars.timestamps, place, max_gap)


def _check_numbers(name: str, numbers: Numbers, place: Place) -> None:
    wrong = ~np.isfinite(numbers)
    if wrong.any():
        i = int(np.argmax(wrong))
        raise place.error(i, f"{name} is {numbers[i]}; remove the row, or fill in what was really traded")
    wrong = numbers < 0 if name == "volume" else numbers <= 0
    if wrong.any():
        i = int(np.argmax(wrong))
        raise place.error(i, f"{name} is {numbers[i]:g}; it must be {'0 or more' if name == 'volume' else 'above 0'}")


def _check_times(times: Times, place: Place, max_gap: Gap) -> None:
    steps = np.diff(times)
    if (steps <= np.timedelta64(0)).any():
        i = int(np.argmax(steps <= np.timedelta64(0)))
        before, row = _text(times[i]), place.rows[i]
        if steps[i] == np.timedelta64(0):
            raise place.error(i + 1, f"{before} is already in row {row}; {_why_twice(place.unused)}")
        raise place.error(i + 1, f"{_text(times[i + 1])} comes after {before} in row {row}; sort rows by time")
    if not len(steps):
        return
    limit = gap_limit(times, max_gap)
    if (steps > limit).any():
        i = int(np.argmax(steps > limit))
        raise place.error(
            i + 1,
            f"nothing between {_text(times[i])} and {_text(times[i + 1])}, {_span(steps[i])}, and more than "
            f"{_span(limit)} is a gap; fill it, cut the file there, or allow it: max_gap",
        )


def _why_twice(unused: Sequence[str]) -> str:
    """What to do about two bars of the same time; nothing should be deleted before it is known what they are."""
    told = "name the column that tells them apart: columns={'symbol': ...}, or --column symbol=..."
    if not unused:
        return "find out which of the two was really traded"
    others = ", ".join(map(repr, unused[:5]))
    return f"if the file holds several markets, {told}. Columns that are not read: {others}"


def gap_limit(times: Times, max_gap: Gap = None) -> np.timedelta64:
    """Longest time between bars that is no gap; see :func:`check_bars`."""
    if max_gap is not None:
        return _gap(max_gap)
    steps = np.diff(times)
    usual: np.timedelta64 = np.sort(steps)[len(steps) // 2] * 3
    # The first day of 1970 was a Thursday.
    weekdays = (times.astype("datetime64[D]").astype(np.int64) + 3) % 7
    if usual < _WEEK and not np.isin([5, 6], weekdays).all():
        return _WEEK
    return usual


def _gap(max_gap: float | datetime.timedelta) -> np.timedelta64:
    if not isinstance(max_gap, datetime.timedelta):
        check_number("max_gap", max_gap, above=0, at_most=_LONGEST_GAP)
        max_gap = datetime.timedelta(days=max_gap)
    gap: np.timedelta64 = np.timedelta64(max_gap)
    return gap


def split_rows(bars: Bars, fractions: Sequence[float] | None, dates: Sequence[str] | None) -> dict[str, range]:
    """Rows for training, validation and test, in time's order; ``held_out`` is all that training does not see.

    Args:
        bars: Of one market.
        fractions: Of rows, for the three; their sum is 1.
        dates: Or when validation and test begin, in UTC.
    """
    if dates is not None:
        first, second = (np.datetime64(date, "us") for date in dates)
        if not first <= second:
            raise ValueError(f"Invalid dates: {list(dates)}; validation must not begin after the test")
        cuts = [int(np.searchsorted(bars.timestamps, date)) for date in (first, second)]
    else:
        assert fractions is not None
        cuts = [round(len(bars) * fractions[0]), round(len(bars) * (fractions[0] + fractions[1]))]
    ends = {"train": (0, cuts[0]), "validation": (cuts[0], cuts[1]), "test": (cuts[1], len(bars))}
    return {name: range(*pair) for name, pair in {**ends, "held_out": (cuts[0], len(bars))}.items()}


def part_rows(
    bars: Bars,
    split: str,
    fractions: Sequence[float],
    dates: Sequence[str] | None = None,
    period: Sequence[str] | None = None,
) -> range:
    """Rows of a split.

    Args:
        bars: Of one market.
        split: ``"train"``, ``"validation"``, ``"test"`` or ``"all"``.
        fractions: Of rows, for the three; their sum is 1.
        dates: Or when validation and test begin, in UTC.
        period: Start and end of the time that is split, the end not included; ``None``: all.
    """
    whole = range(len(bars))
    if period is not None:
        start, end = (np.datetime64(date, "us") for date in period)
        if not start < end:
            raise ValueError(f"Invalid period: {list(period)}; it must begin before it ends")
        whole = range(*np.searchsorted(bars.timestamps, [start, end]).tolist())
    if split == "all":
        return whole
    part = split_rows(bars.rows(whole), fractions, dates)[split]
    return range(whole.start + part.start, whole.start + part.stop)


def from_columns(
    columns: Mapping[str, Any],
    source: str = "columns",
    rows: npt.NDArray[np.int64] | None = None,
    max_gap: Gap = None,
    symbol: str = "",
    unused: tuple[str, ...] = (),
) -> dict[str, Bars]:
    """Checked bars by symbol.

    Args:
        columns: ``timestamp`` as ``datetime64`` in UTC, ``open``, ``high``, ``low``, ``close``, ``volume`` if known,
            and ``symbol`` if there are several markets; of the same length. Rows of one symbol are in time's order.
        source: What to call it in messages.
        rows: What to call rows in messages; counted from 1 if not given.
        max_gap: See :func:`check_bars`.
        symbol: What the market is called if there is no such column.
        unused: Names of further columns of the file, for messages.

    Raises:
        MarketDataError: Something is wrong with them.
    """
    if missing := [name for name in COLUMNS if name not in columns and name != "volume"]:
        raise MarketDataError(f"{source}: lacks {', '.join(missing)}; has {', '.join(columns)}")
    arrays = {name: np.asarray(columns[name], np.float64) for name in (*PRICES, "volume") if name in columns}
    arrays.setdefault("volume", np.full(len(columns["timestamp"]), np.nan))
    times = np.asarray(columns["timestamp"]).astype("datetime64[us]")
    if not len(times):
        raise MarketDataError(f"{source}: has no rows")
    named = {"symbol": columns["symbol"]} if "symbol" in columns else {}
    if lengths := {name: len(array) for name, array in (arrays | named).items() if len(array) != len(times)}:
        raise MarketDataError(f"{source}: timestamp has {len(times)} rows, but {lengths}")
    if np.isnat(times).any():
        i = int(np.argmax(np.isnat(times)))
        raise MarketDataError(f"{source}, row {i + 1 if rows is None else rows[i]}: timestamp is empty")
    rows = np.arange(1, len(times) + 1) if rows is None else rows
    markets = {}
    for name, which in _by_symbol(named.get("symbol", [symbol])).items():
        numbers = {column: array[which] for column, array in arrays.items()}
        bars = Bars(timestamps=times[which], symbol=name, **numbers)
        check_bars(bars, Place(source, rows[which], unused), max_gap)
        markets[name] = bars
    return markets


def _by_symbol(symbols: Sequence[Any]) -> dict[str, Any]:
    """Rows of each symbol; those of a single market are a slice, which copies nothing."""
    numbers: dict[str, int] = {}
    of_rows = np.fromiter((numbers.setdefault(str(symbol), len(numbers)) for symbol in symbols), np.int64)
    if len(numbers) == 1:
        return dict.fromkeys(numbers, slice(None))
    order = np.argsort(of_rows, kind="stable")
    return dict(zip(numbers, np.split(order, np.cumsum(np.bincount(of_rows))[:-1]), strict=True))


def write_csv(path: str | Path, *markets: Bars) -> None:
    """Write bars to a file that :func:`driftproof.envs.load_market_data` reads to the last digit."""
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["timestamp", "symbol", *PRICES, "volume"])
        for bars in markets:
            unit: Literal["us", "s"] = "us" if _has_fractions(bars.timestamps) else "s"
            times = np.datetime_as_string(bars.timestamps, unit=unit, timezone="UTC").tolist()
            columns = (column.tolist() for column in bars.prices)
            writer.writerows(zip(times, [bars.symbol] * len(bars), *columns, strict=True))


def _has_fractions(times: Times) -> bool:
    return bool((times != times.astype("datetime64[s]")).any())


def _text(time: np.datetime64) -> str:
    return str(time.astype("datetime64[s]")) if time == time.astype("datetime64[s]") else str(time)


def _span(step: np.timedelta64) -> str:
    text = str(datetime.timedelta(microseconds=int(step.astype("timedelta64[us]").astype(np.int64))))
    return text.removesuffix(", 0:00:00")
