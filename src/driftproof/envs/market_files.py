"""Files of prices: CSV, read with Python's own reader, and Parquet, if pyarrow is installed."""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import numpy.typing as npt

from driftproof._requirements import require
from driftproof.envs.market_columns import Columns, find_columns, is_time
from driftproof.envs.market_data import PRICES, Bars, Gap, MarketDataError, Place, check_bars, from_columns
from driftproof.envs.market_numbers import read_numbers
from driftproof.envs.market_times import TimeFormat, parse_times, time_zone, to_utc
from driftproof.envs.periods import frequency_of, is_same_frequency, seconds_of

Rows = npt.NDArray[np.int64]

_DECIMAL = re.compile(r"\s*-?\d+,\d+\s*")
_STEPS_TO_JUDGE = 8
"""Steps of a stream after which its frequency is judged by their median."""


@dataclass(frozen=True)
class Table:
    """Columns of a file, before their values are checked.

    Attributes:
        columns: Arrays by our names ``[N]``.
        rows: Numbers of the rows in the file ``[N]``.
        names: Names of columns in the file by our names.
        unused: Names of columns that are not read.
        time_format: How timestamps were read.
        notes: Decisions that were taken, in words.
    """

    columns: dict[str, Any]
    rows: Rows
    names: dict[str, str]
    unused: tuple[str, ...]
    time_format: TimeFormat
    notes: list[str] = field(default_factory=list)


def load_market_data(
    path: str | Path,
    *,
    columns: Mapping[str, str] | None = None,
    timezone: str | None = None,
    day_first: bool | None = None,
    adjust: bool | None = None,
    frequency: str | None = None,
    max_gap: Gap = None,
) -> dict[str, Bars]:
    """Checked bars by symbol, from a file.

    Columns are recognised by their names (:data:`driftproof.envs.market_columns.SPELLINGS`), in any order, among
    others; ``volume`` may be missing. Without a column of symbols, the market is called after the file. Rows of one
    symbol are in time's order, oldest or newest first. :func:`driftproof.envs.check_market_data` shows how a file is
    read.

    Args:
        path: ``.csv`` or ``.parquet``.
        columns: What columns are called in the file, for those that are not recognised: ``{"timestamp": "Stamp"}``.
        timezone: Name of the zone that timestamps without an offset are in, such as ``"America/New_York"``; those with
            an offset are converted. ``None``: UTC.
        day_first: Whether 02/03/2024 is in March; ``None``: decided from all dates of the file.
        adjust: Whether to scale prices by the adjusted close over the close; ``None``: if there is such a column.
        frequency: Usual time between bars, such as ``"1d"`` or ``"5min"``, which the file's must match; ``None``: any.
        max_gap: Longest time from one bar to the next, in days, or a timedelta; see
            :func:`driftproof.envs.market_data.check_bars`.

    Raises:
        MarketDataError: The file is not there, or something is wrong with it; the message names the file and the row.
            For CSV it is the line as editors count it.
    """
    if frequency is not None:
        seconds_of(frequency)
    table = read_table(path, columns=columns, timezone=timezone, day_first=day_first, adjust=adjust)
    markets = from_columns(table.columns, str(path), table.rows, max_gap, Path(path).stem, table.unused)
    for symbol, bars in markets.items():
        found = frequency_of(bars.timestamps)
        if frequency is not None and found is not None and not is_same_frequency(found, frequency):
            raise MarketDataError(_other_frequency(f"{path}: bars of {symbol!r} are {found} apart", frequency))
    return markets


def _other_frequency(what: str, frequency: str) -> str:
    return (
        f"{what}, but {frequency} is expected, as of the bars that the agent was trained on; to use them all the same, "
        "leave out frequency, or give --any-frequency"
    )


def recorded_load(path: str | Path, load: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of :func:`load_market_data` that read this file, and similar ones, without deciding anything again.

    Args:
        path: The file.
        load: Arguments given.
    """
    given = {name: value for name, value in load.items() if name not in ("frequency", "max_gap")}
    table = read_table(path, **given)
    markets = from_columns(table.columns, str(path), table.rows, load.get("max_gap"), Path(path).stem, table.unused)
    found = {frequency_of(bars.timestamps) for bars in markets.values()} - {None}
    recorded = {name: value for name, value in load.items() if value is not None}
    recorded["columns"] = {ours: theirs for ours, theirs in table.names.items() if theirs}
    if table.time_format.day_first is not None:
        recorded["day_first"] = table.time_format.day_first
    if len(found) == 1:
        recorded.setdefault("frequency", found.pop())
    return recorded


def column_names(path: str | Path) -> list[str]:
    """Names of the columns of a file, of all levels."""
    path = Path(path)
    if path.suffix.lower() == ".csv":
        with path.open(newline="", encoding="utf-8-sig") as file:
            return [name for cells in itertools.islice(_records(path, file), 2) for name in cells]
    import pyarrow.parquet

    return [name for level in _levels(pyarrow.parquet.read_schema(path).names) for name in level]


def read_table(
    path: str | Path,
    *,
    columns: Mapping[str, str] | None = None,
    timezone: str | None = None,
    day_first: bool | None = None,
    adjust: bool | None = None,
) -> Table:
    """Columns of a file, whose values are not checked yet; arguments as of :func:`load_market_data`."""
    path = Path(path)
    if not path.is_file():
        raise MarketDataError(f"{path}: there is no such file")
    readers = {".csv": _read_csv, ".parquet": _read_parquet, ".pq": _read_parquet}
    if path.suffix.lower() not in readers:
        raise MarketDataError(f"{path}: is neither .csv nor .parquet")
    zone = None if timezone is None else time_zone(timezone)
    layout, cells, rows = readers[path.suffix.lower()](path, dict(columns or {}))
    place = Place(str(path), rows)
    stamps = cells[next(iter(layout.markets.values()))["timestamp"]]
    if layout.clock is not None:
        stamps = [f"{date} {time}" for date, time in zip(stamps, cells[layout.clock], strict=True)]
    times, time_format = _read_times(stamps, place, zone, day_first)
    found, kept = _long_columns(layout, cells, times, place)
    notes = _adjusted(found, adjust, path)
    found.pop("adjusted", None)
    if (oldest_first := _oldest_first(found)) is not None:
        found, kept = {name: values[oldest_first] for name, values in found.items()}, kept[oldest_first]
        notes.append("the newest row is first; rows are read in the order of time")
    if "volume" not in found:
        notes.append("no volume: train with env.kwargs.features={volume: false}")
    if time_format.is_guess:
        notes.append(
            f"dates could be day first or month first; read as {time_format.format}. If the day is first: "
            "day_first=True, or --day-first"
        )
    return Table(found, kept, layout.names, layout.unused, time_format, notes)


def _read_times(stamps: Any, place: Place, zone: ZoneInfo | None, day_first: bool | None) -> tuple[Any, TimeFormat]:
    if not isinstance(stamps, _ArrowTimes):
        return parse_times(stamps, place, zone, day_first)
    if stamps.zone is not None:
        return stamps.times, TimeFormat("timestamps", f"{stamps.zone}, converted to UTC")
    if zone is None:
        return stamps.times, TimeFormat("timestamps", "UTC, as no zone is written")
    return to_utc(stamps.times, zone), TimeFormat("timestamps", str(zone))


def _long_columns(layout: Columns, cells: Mapping[int, Any], times: Any, place: Place) -> tuple[dict[str, Any], Rows]:
    """Columns by our names, with the markets below each other where they are side by side in the file."""
    parts: list[dict[str, Any]] = []
    for symbol, places in layout.markets.items():
        which: Any = slice(None)
        names = {name: i for name, i in places.items() if name not in ("timestamp", "symbol")}
        if symbol in layout.adjusted:
            names["adjusted"] = layout.adjusted[symbol]
        if symbol is not None:
            # Markets side by side do not all begin on the same day.
            which = np.flatnonzero([any(row) for row in zip(*(cells[i] for i in names.values()), strict=True)])
        here = Place(place.source, place.rows[which])
        part: dict[str, Any] = {name: read_numbers(name, cells[i], here, which) for name, i in names.items()}
        part |= {"timestamp": times[which], "row": here.rows}
        if symbol is not None:
            part["symbol"] = np.full(len(here.rows), symbol, dtype=object)
        elif "symbol" in places:
            part["symbol"] = _symbols(cells[places["symbol"]], place)
        parts.append(part)
    found = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if len(parts) > 1 else parts[0]
    return found, found.pop("row")


def _oldest_first(found: Mapping[str, Any]) -> Rows | None:
    """The order of rows in which each market's oldest is first, if every market's newest is; else ``None``.

    Two rows could as well be in the wrong order by mistake.
    """
    times = found["timestamp"]
    symbols = found.get("symbol", np.zeros(len(times), dtype=np.int64))
    order = np.arange(len(times))
    for symbol in dict.fromkeys(symbols.tolist()):
        which = np.flatnonzero(symbols == symbol)
        if len(which) < 3 or not (np.diff(times[which]).astype(np.int64) < 0).all():
            return None
        order[which] = which[::-1]
    return order


def _adjusted(found: dict[str, Any], adjust: bool | None, path: Path) -> list[str]:
    """Scale prices to the adjusted close; returns what was done, in words."""
    if "adjusted" not in found:
        if adjust:
            raise MarketDataError(f"{path}: adjust needs a column of adjusted closes such as 'Adj Close'")
        return []
    close, target = found["close"], found["adjusted"]
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = target / close
    differs = ~(np.abs(factor - 1) < 1e-9)
    if not differs.any():
        return []
    if adjust is False:
        return ["prices are not adjusted, as asked, although there are adjusted closes"]
    for name in PRICES:
        found[name] = found[name] * factor
    low = np.nanmin(factor)
    return [f"prices are scaled to the adjusted close, by factors from {low:.4g}; adjust=False, or --raw, keeps them"]


def read_bars(
    lines: Iterable[str],
    *,
    source: str = "input",
    columns: Mapping[str, str] | None = None,
    timezone: str | None = None,
    day_first: bool | None = None,
    frequency: str | None = None,
    max_gap: Gap = None,
    symbol: str = "",
) -> Iterator[Bars]:
    """Checked bars, one at a time, from lines of CSV that may still be coming in.

    Args:
        lines: The header first; see :func:`load_market_data` for columns and timestamps.
        source: What to call it in messages.
        columns: What columns are called, for those that are not recognised.
        timezone: Name of the zone that timestamps without an offset are in.
        day_first: Whether 02/03/2024 is in March; must be given if the first date leaves it open.
        frequency: Usual time between bars, such as ``"1d"``, which the stream's must match; ``None``: any.
        max_gap: Longest time from one bar of a market to the next, in days, or a timedelta; ``None``: a week, since
            what is usual is not known.
        symbol: What the market is called if there is no such column.

    Raises:
        MarketDataError: Something is wrong with a line; the message names it. Those before it have been read.
    """
    zone = None if timezone is None else time_zone(timezone)
    limit = 7.0 if max_gap is None else max_gap
    latest: dict[str, tuple[int, Bars]] = {}
    watch = None if frequency is None else _FrequencyWatch(frequency)
    records = _records(source, lines)
    header = next(records, None)
    if header is None:
        raise MarketDataError(f"{source}: is empty")
    header[:1] = [name.removeprefix("\ufeff") for name in header[:1]]  # A mark that some programs begin files with.
    layout = find_columns(source, [header], dict(columns or {}))
    places = layout.markets[None]
    for row, cells in enumerate(_full_lines(source, records, len(header)), 2):
        place = Place(source, np.array([row]), layout.unused)
        stamp = cells[places["timestamp"]] + ("" if layout.clock is None else f" {cells[layout.clock]}")
        times, time_format = parse_times([stamp], place, zone, day_first)
        if time_format.is_guess:
            raise place.error(0, f"{stamp!r} could be day first or month first; pass day_first, or --day-first")
        day_first = time_format.day_first
        numbers = {
            each: read_numbers(each, [cells[places[each]]], place) for each in (*PRICES, "volume") if each in places
        }
        numbers.setdefault("volume", np.full(1, np.nan))
        name = str(_symbols([cells[places["symbol"]]], place)[0]) if "symbol" in places else symbol
        bar = Bars(times, **numbers, symbol=name)
        if name in latest:
            before, last = latest[name]
            names = ("timestamps", *PRICES, "volume")
            pair: dict[str, Any] = {each: np.append(getattr(last, each), getattr(bar, each)) for each in names}
            check_bars(Bars(**pair), Place(source, np.array([before, row]), layout.unused), limit)
            if watch is not None:
                watch.check(name, (times[0] - last.timestamps[0]) / np.timedelta64(1, "s"), place)
        else:
            check_bars(bar, place, limit)
        latest[name] = row, bar
        yield bar


class _FrequencyWatch:
    """Refuses a stream of bars of another frequency.

    Longer steps are usual, as over weekends, so that only many of them tell; a single step that is too short does.
    """

    def __init__(self, frequency: str) -> None:
        self._frequency, self._usual = frequency, seconds_of(frequency)
        self._steps: dict[str, list[float]] = {}

    def check(self, symbol: str, step: float, place: Place) -> None:
        steps = self._steps.setdefault(symbol, [])
        if len(steps) < _STEPS_TO_JUDGE:
            steps.append(step)
        is_slow = len(steps) == _STEPS_TO_JUDGE and sorted(steps)[_STEPS_TO_JUDGE // 2] > 1.5 * self._usual
        if step < self._usual / 1.5 or is_slow:
            seen = f"the bar is {step:g} seconds after the one before it"
            raise place.error(0, _other_frequency(seen, self._frequency))


def _read_csv(path: Path, names: Mapping[str, str]) -> tuple[Columns, dict[int, Any], Rows]:
    """The layout of a file, its cells by the index of their column, and the numbers of its rows."""
    parts: dict[int, list[Any]] = {}
    with path.open(newline="", encoding="utf-8-sig") as file:
        records = _records(path, file)
        top = list(itertools.islice(records, 3))
        if not top:
            raise MarketDataError(f"{path}: is empty")
        # Tables of pandas with two levels of names have the name of their index alone in the third row.
        levels = 2 if len(top) == 3 and top[2] and is_time(top[2][0]) and not any(top[2][1:]) else 1
        layout = find_columns(path, top[:levels], names)
        first = last = 2 if levels == 1 else 4
        below = itertools.chain(top[1:] if levels == 1 else [], records)
        lines = _full_lines(path, below, len(top[0]), first)
        wanted = {i for places in layout.markets.values() for i in places.values()} | {*layout.adjusted.values()}
        wanted |= set() if layout.clock is None else {layout.clock}
        # A few at a time: lists of whole rows take many times the memory of their columns.
        while chunk := list(itertools.islice(lines, 4096)):
            cells = list(zip(*chunk, strict=True))
            for i in wanted:
                parts.setdefault(i, []).extend(cells[i])
            last += len(chunk)
    if not parts:
        raise MarketDataError(f"{path}: has a header, but no rows")
    return layout, parts, np.arange(first, last)


def _records(source: Path | str, lines: Iterable[str]) -> Iterator[list[str]]:
    """Cells of every line, the header's first.

    Where semicolons separate cells, as in spreadsheets of many countries, commas are decimal points.
    """
    row, rest = 0, iter(lines)
    try:
        top = list(itertools.islice(rest, 1))
        separator = next((mark for mark in ",;\t" for line in top if mark in line), ",")
        for cells in csv.reader(itertools.chain(top, rest), strict=True, delimiter=separator):
            row += 1
            if separator == ";" and row > 1:
                cells = [cell.replace(",", ".") if _DECIMAL.fullmatch(cell) else cell for cell in cells]
            yield cells
    except csv.Error as error:
        raise MarketDataError(f"{source}, row {row + 1}: is not CSV: {error}") from error
    except UnicodeDecodeError as error:
        # Text is decoded some lines ahead.
        raise MarketDataError(f"{source}, after row {row}: is not CSV in UTF-8: {error}") from error


def _full_lines(path: Path | str, lines: Iterable[list[str]], width: int, first: int = 2) -> Iterator[list[str]]:
    """The lines, if all have as many cells; only the last may be empty."""
    empty = None
    for row, line in enumerate(lines, first):
        if empty is not None and line:
            raise MarketDataError(f"{path}, row {empty}: is empty; remove it")
        if len(line) == width:
            yield line
        elif line:
            raise MarketDataError(f"{path}, row {row}: has {len(line)} columns, and the header {width}")
        else:
            empty = empty or row


def _symbols(cells: Sequence[str], place: Place) -> Any:
    if "" in cells:
        raise place.error(list(cells).index(""), "symbol is empty")
    return np.array(cells, dtype=object)


def _read_parquet(path: Path, names: Mapping[str, str]) -> tuple[Columns, dict[int, Any], Rows]:
    """The layout of a file, its cells by the index of their column, and the numbers of its rows."""
    require(f"{path}: Parquet", "parquet", "pyarrow")
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        header = file.schema_arrow.names
        layout = find_columns(path, _levels(header), names)
        wanted = {i for places in layout.markets.values() for i in places.values()} | {*layout.adjusted.values()}
        wanted |= set() if layout.clock is None else {layout.clock}
        table = file.read([header[i] for i in sorted(wanted)])
    except pyarrow.ArrowException as error:
        raise MarketDataError(f"{path}: is not a Parquet file: {error}") from error
    if not table.num_rows:
        raise MarketDataError(f"{path}: has columns, but no rows")
    place = Place(str(path), np.arange(1, table.num_rows + 1))
    is_wide = None not in layout.markets
    ours = {i: name for places in layout.markets.values() for name, i in places.items()}
    cells: dict[int, Any] = {}
    for i in sorted(wanted):
        column, name = table.column(header[i]), ours.get(i, header[i])
        if column.null_count and not (is_wide and name != "timestamp"):
            raise place.error(column.is_null().to_numpy().argmax(), f"{name} is empty")
        if name == "timestamp" and (times := _arrow_times(column, path)) is not None:
            cells[i] = times
        elif name not in ("symbol", "timestamp") and not is_wide and _is_number(column.type):
            cells[i] = column.to_numpy()
        else:
            cells[i] = ["" if cell is None else str(cell) for cell in column.to_pylist()]
    return layout, cells, place.rows


def _levels(header: Sequence[str]) -> list[list[str]]:
    """Rows of names; columns of two levels are called ``('Close', 'AAPL')`` in Parquet files of pandas."""
    pairs = [re.fullmatch(r"\('(.*)', '(.*)'\)", name) for name in header]
    if not any(pairs):
        return [["" if name == "__index_level_0__" else name for name in header]]
    return [[match[level] if match else "" for match in pairs] for level in (1, 2)]


def _is_number(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_integer(kind) or types.is_floating(kind))


@dataclass(frozen=True)
class _ArrowTimes:
    """Times of a column of timestamps or dates.

    Attributes:
        times: In UTC if they have a zone.
        zone: Zone of the column; ``None``: not written.
    """

    times: Any
    zone: str | None


def _arrow_times(column: Any, path: Path) -> _ArrowTimes | None:
    """Times of a column; ``None`` if it is text, or numbers since 1970."""
    from pyarrow import types

    kind = column.type
    if types.is_date(kind) or types.is_timestamp(kind):
        zone = None if types.is_date(kind) else kind.tz
        return _ArrowTimes(column.to_numpy().astype("datetime64[us]"), zone)
    if types.is_string(kind) or types.is_large_string(kind) or types.is_integer(kind):
        return None
    raise MarketDataError(f"{path}: timestamp is of type {kind}; it must be a timestamp, a date, an integer or text")
