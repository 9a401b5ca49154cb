"""Equity and trades of a backtest as tables, in CSV or Parquet files."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from driftproof._requirements import require
from driftproof.backtest.account import Numbers, Times, simulate
from driftproof.backtest.engine import AGENT, Backtest
from driftproof.state import write_atomically

Columns = Mapping[str, Any]


def equity_table(result: Backtest) -> dict[str, Any]:
    """Every bar of every part: the agent's account, and the equity of baselines, which are at first 1 in each part."""
    tables = []
    for part in result.parts:
        own = part.accounts[AGENT]
        tables.append(
            {
                "part": np.full(len(own), f"{part.label}, {part.performances[AGENT].first}"),
                "start": own.start,
                "end": own.end,
                "log_return": own.log_returns,
                "simple_return": own.returns,
                "position": own.long - own.short,
                "traded": own.traded,
                "costs": own.costs,
                "financing": own.financing,
                **{f"equity {name}": account.equity for name, account in part.accounts.items()},
            }
        )
    return {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}


def trades_table(result: Backtest) -> dict[str, Any]:
    """Times of holding a long or a short position without a break, in each market, over the whole time."""
    tables = [
        {"symbol": np.full(len(each["entry"]), symbol), **each}
        for symbol, (times, close, targets) in result.targets.items()
        if len(each := _trades(times, close, targets, result.cost, result.financing))
    ]
    return {name: np.concatenate([table[name] for table in tables]) for name in tables[0]} if tables else {}


def _trades(times: Times, close: Numbers, targets: Numbers, cost: float, financing: float) -> dict[str, Any]:
    known = np.flatnonzero(~np.isnan(targets))
    if len(known) < 2:
        return {}
    first = known[0]
    account = simulate(times[first:], close[first:], targets[first:-1], cost, financing)
    side = np.sign(account.long - account.short)
    starts = np.flatnonzero(np.diff(side, prepend=0.0))
    stops = np.append(starts[1:], len(side))
    held = side[starts] != 0
    starts, stops = starts[held], stops[held]
    total = np.concatenate(([0.0], np.cumsum(account.log_returns)))
    share = np.concatenate(([0.0], np.cumsum(account.long + account.short)))
    return {
        "side": np.where(side[starts] > 0, "long", "short"),
        "entry": account.start[starts],
        "exit": account.end[stops - 1],
        "entry_price": close[first:][starts],
        "exit_price": close[first:][stops],
        "bars": stops - starts,
        "mean_position": (share[stops] - share[starts]) / np.maximum(stops - starts, 1),
        "log_return": total[stops] - total[starts],
    }


def write_table(path: Path, columns: Columns) -> Path:
    """Write a ``.csv`` or ``.parquet`` file, atomically."""
    if path.suffix == ".parquet":
        write_atomically(path, [_parquet(columns)])
        return path
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*(_cells(column) for column in columns.values()), strict=True))
    write_atomically(path, [text.getvalue().encode()])
    return path


def _cells(column: Any) -> list[Any]:
    values = np.asarray(column)
    if values.dtype.kind == "M":
        return [f"{text}Z" for text in np.datetime_as_string(values, unit="s").tolist()]
    return values.tolist()  # type: ignore[no-any-return]


def _parquet(columns: Columns) -> memoryview:
    require("Parquet", "parquet", "pyarrow")
    import pyarrow
    import pyarrow.parquet

    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table({name: pyarrow.array(column) for name, column in columns.items()}), sink)
    return memoryview(sink.getvalue())
