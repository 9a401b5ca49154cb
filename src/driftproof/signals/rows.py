"""Signals as rows, and their files."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from driftproof._arguments import check_number
from driftproof._requirements import require
from driftproof.state import write_atomically

Texts = npt.NDArray[np.str_]
Numbers = npt.NDArray[np.float64]

_NAMES = np.array(["SELL", "HOLD", "BUY"])
_CHUNK = 4096


@dataclass(frozen=True)
class Thresholds:
    """Thresholds of scores for signals.

    Args:
        buy: Scores from here on up are BUY.
        sell: Scores from here on down are SELL.
        deadzone: Scores closer to 0 than this are HOLD, whatever the other two say.
    """

    buy: float = 0.6
    sell: float = -0.6
    deadzone: float = 0.1

    def __post_init__(self) -> None:
        check_number("sell", self.sell, at_least=-1, at_most=1)
        check_number("buy", self.buy, at_least=-1, at_most=1)
        check_number("deadzone", self.deadzone, at_least=0, at_most=1)
        if self.sell >= self.buy:
            raise ValueError(f"sell is {self.sell:g} and buy is {self.buy:g}: sell must be below buy")

    def signals(self, scores: Numbers) -> Texts:
        """``"SELL"``, ``"HOLD"`` or ``"BUY"``; HOLD where there is no score."""
        certain = np.abs(scores) >= self.deadzone
        names: Texts = _NAMES[1 + (certain & (scores >= self.buy)) - (certain & (scores <= self.sell))]
        return names


@dataclass(frozen=True)
class Signals:
    """Signals of an agent, arrays ``[N]``.

    The first bars of a market, whose features look back farther than there are bars, are HOLD and have NaN for numbers.

    Attributes:
        timestamp: Start of the bars, in UTC.
        symbol: Symbol of the market.
        signal: ``"SELL"``, ``"HOLD"`` or ``"BUY"``.
        close: Price at the end of the bar, when the signal is known.
        score: The mean position, or P(BUY) - P(SELL), from -1 to 1.
        p10: The return that the critics expect to fall below one time in ten.
        p50: The median of returns.
        p90: The return that they expect to exceed one time in ten.
        cvar: The mean of the worst returns.
    """

    timestamp: npt.NDArray[np.datetime64]
    symbol: Texts
    signal: Texts
    close: Numbers
    score: Numbers
    p10: Numbers
    p50: Numbers
    p90: Numbers
    cvar: Numbers

    def __len__(self) -> int:
        return len(self.close)

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """The columns by their names, in their order."""
        return {name: getattr(self, name) for name in COLUMNS}

    def lines(self) -> Iterator[str]:
        """Rows as CSV, without a header."""
        for start in range(0, len(self), _CHUNK):
            columns = {name: column[start : start + _CHUNK] for name, column in self.columns().items()}
            times = np.datetime_as_string(columns.pop("timestamp"), unit="us").tolist()
            symbols, signals, closes, *numbers = (column.tolist() for column in columns.values())
            cells = {symbol: _cell(symbol) for symbol in set(symbols)}
            rows = zip(times, symbols, signals, closes, zip(*numbers, strict=True), strict=True)
            for time, symbol, signal, close, said in rows:
                text = _NUMBERS % said
                if "nan" in text:
                    text = text.replace("nan", "")
                yield f"{time.removesuffix('.000000')}Z,{cells[symbol]},{signal},{close!r},{text}"

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write a ``.csv`` or ``.parquet`` file, atomically."""
        path = Path(path)
        if path.suffix.lower() == ".csv":
            write_atomically(path, (f"{line}\n".encode() for line in itertools.chain([HEADER], self.lines())))
        elif path.suffix.lower() in (".parquet", ".pq"):
            write_atomically(path, [_parquet(self)])
        else:
            raise ValueError(f"{path}: must end in .csv or .parquet")
        return path


COLUMNS = tuple(field.name for field in fields(Signals))
HEADER = ",".join(COLUMNS)
_NUMBERS = ",".join(["%.9g"] * 5)


def _cell(text: str) -> str:
    """A text as a CSV field."""
    if any(mark in text for mark in ',"\r\n'):
        return '"' + text.replace('"', '""') + '"'
    return text


def _parquet(signals: Signals) -> memoryview:
    require("Parquet", "parquet", "pyarrow")
    import pyarrow
    import pyarrow.parquet

    columns = {name: pyarrow.array(column, from_pandas=True) for name, column in signals.columns().items()}
    columns["timestamp"] = columns["timestamp"].cast(pyarrow.timestamp("us", tz="UTC"))
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table(columns), sink)
    return memoryview(sink.getvalue())
