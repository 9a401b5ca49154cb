"""What a file of prices holds, how it is read, and what looks wrong in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from driftproof.envs.market_data import PRICES, Gap, MarketDataError, Times, from_columns, gap_limit
from driftproof.envs.market_files import read_table
from driftproof.envs.periods import frequency_of

_RATIOS = np.array([1.5, 2, 3, 4, 5, 6, 7, 8, 10, 15, 20, 25, 50, 100])
"""Usual ratios of splits; reverse splits have their inverses."""
_CLOSE_TO = 0.04
"""A change is taken for a split if it is this close to a ratio, on a logarithmic scale."""
_UNUSUAL = 8.0
"""Multiple of the usual change above which a change is suspicious."""
_SHOWN = 3
"""Rows named for each finding."""


@dataclass(frozen=True)
class Finding:
    """Something that looks wrong.

    Attributes:
        severity: ``"error"``: the file cannot be used like this; ``"warning"``: look at it.
        text: What, and in which rows.
    """

    severity: Literal["error", "warning"]
    text: str


@dataclass(frozen=True)
class MarketSummary:
    """One market of a file.

    Attributes:
        symbol: What is traded.
        rows: Number of rows.
        first: Time of the first bar.
        last: Time of the last bar.
        frequency: Usual time between bars.
        findings: What looks wrong.
    """

    symbol: str
    rows: int
    first: str
    last: str
    frequency: str | None
    findings: list[Finding]


@dataclass(frozen=True)
class DataCheck:
    """What a file of prices holds.

    Attributes:
        source: The file.
        names: Names of columns in the file by our names.
        unused: Names of columns that are not read.
        dates: Format of dates, in words.
        zone: Time zone, in words.
        notes: Decisions that were taken, and how to take others.
        markets: Markets, in the order of the file.
        refusal: Why the file would be refused; ``None``: it can be used.
    """

    source: str
    names: dict[str, str]
    unused: tuple[str, ...]
    dates: str
    zone: str
    notes: list[str]
    markets: list[MarketSummary] = field(default_factory=list)
    refusal: str | None = None

    def __str__(self) -> str:
        columns = ", ".join(ours if ours == theirs else f"{ours} ← {theirs!r}" for ours, theirs in self.names.items())
        lines = [self.source, f"  columns   {columns}"]
        if self.unused:
            lines.append(f"  not read  {', '.join(map(repr, self.unused[:12]))}")
        lines.append(f"  dates     {self.dates}; zone: {self.zone}")
        lines += [f"  note      {note}" for note in self.notes]
        for market in self.markets:
            every = "" if market.frequency is None else f", every {market.frequency}"
            lines.append(f"  {market.symbol}: {market.rows:,} bars{every}, {market.first} to {market.last}")
            lines += [f"    {finding.severity}: {finding.text}" for finding in market.findings]
        lines.append("  can be used" if self.refusal is None else f"  REFUSED: {self.refusal}")
        return "\n".join(lines)


def check_market_data(path: str | Path, *, max_gap: Gap = None, **load: Any) -> DataCheck:
    """Show how a file is read, and all that looks wrong in it.

    Args:
        path: ``.csv`` or ``.parquet``.
        max_gap: See :func:`driftproof.envs.load_market_data`.
        load: Further arguments of :func:`driftproof.envs.load_market_data`, but for ``frequency``.

    Raises:
        MarketDataError: The file cannot be read: columns are missing, or cells are not numbers or dates.
    """
    table = read_table(path, **load)
    columns, rows = table.columns, table.rows
    symbols = columns.get("symbol", np.full(len(rows), Path(path).stem, dtype=object))
    names, first = np.unique(symbols.astype(str), return_index=True)
    markets = []
    for name in names[np.argsort(first)]:
        which = np.flatnonzero(symbols == name)
        part = {column: values[which] for column, values in columns.items() if column != "symbol"}
        markets.append(_summary(str(name), part, rows[which], table.unused, max_gap))
    refusal = None
    try:
        from_columns(columns, str(path), rows, max_gap, Path(path).stem, table.unused)
    except MarketDataError as error:
        refusal = str(error).removeprefix(f"{path}, ").removeprefix(f"{path}: ")
    how = table.time_format
    return DataCheck(str(path), table.names, table.unused, how.format, how.zone, table.notes, markets, refusal)


def _summary(
    symbol: str, columns: dict[str, Any], rows: npt.NDArray[np.int64], unused: tuple[str, ...], max_gap: Gap
) -> MarketSummary:
    times: Times = columns["timestamp"].astype("datetime64[us]")
    steps = np.diff(times).astype(np.int64)
    findings: list[Finding] = []

    def find(severity: Literal["error", "warning"], what: str, wrong: npt.NDArray[np.bool_], shift: int = 0) -> None:
        if wrong.any():
            which = np.flatnonzero(wrong) + shift
            shown = ", ".join(str(row) for row in rows[which[:_SHOWN]])
            more = "" if len(which) <= _SHOWN else f" and {len(which) - _SHOWN:,} more"
            findings.append(Finding(severity, f"{what}: {len(which):,}, in row {shown}{more}"))

    twice = "bars of the same time as the one before"
    if unused and "symbol" not in columns:
        twice += f" (several markets? --column symbol=..., one of {', '.join(map(repr, unused[:5]))})"
    find("error", twice, steps == 0, 1)
    find("error", "bars earlier than the one before", steps < 0, 1)
    prices = [columns[name] for name in PRICES]
    find("error", "prices that are not above 0", np.any([~(price > 0) for price in prices], axis=0))
    open_, high, low, close = prices
    find("error", "highs below open or close", high < np.maximum(open_, close))
    find("error", "lows above open or close", low > np.minimum(open_, close))
    if len(times) > 1 and (steps > 0).all():
        limit = gap_limit(times, max_gap).astype("timedelta64[us]").astype(np.int64)
        find("error", f"gaps longer than {limit / 86400e6:g} days", steps > limit, 1)
    if "volume" in columns:
        find("error", "volumes below 0 or not a number", ~(columns["volume"] >= 0))
        find("warning", "bars with a volume of 0", columns["volume"] == 0)
    if (open_ > 0).all() and (close > 0).all():
        find("warning", "changes that look like splits not adjusted for", looks_like_split(open_, close), 1)
    same = (np.diff(close) == 0) & (open_ == close)[1:] & (high == low)[1:]
    find("warning", "bars that only repeat the close before", same, 1)
    first, last = (str(times[i]).removesuffix(".000000").removesuffix("T00:00:00") for i in (0, -1))
    return MarketSummary(symbol, len(times), first, last, frequency_of(times), findings)


def looks_like_split(open_: npt.NDArray[np.float64], close: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """Whether prices change from each close to the next open as in a split, ``[T - 1]``."""
    change = np.log(open_[1:] / close[:-1])
    ratios = np.log(_RATIOS)
    ratio = np.abs(np.abs(change)[:, None] - ratios).min(1)
    usual = np.median(np.abs(np.diff(np.log(close)))) if len(close) > 1 else 0.0
    found: npt.NDArray[np.bool_] = (ratio < _CLOSE_TO) & (np.abs(change) > _UNUSUAL * usual)
    return found
