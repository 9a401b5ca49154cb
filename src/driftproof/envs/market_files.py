"""Files of prices: CSV, read with Python's own reader, and Parquet, if pyarrow is installed."""

from __future__ import annotations

import csv
import datetime
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import numpy as np
import numpy.typing as npt

from driftproof.envs._specs import nearest
from driftproof.envs.market_data import (
    COLUMNS,
    PRICES,
    Bars,
    Gap,
    MarketDataError,
    Place,
    Times,
    check_bars,
    from_columns,
)

Rows = npt.NDArray[np.int64]

_STAMP = re.compile(
    r"(\d{4}-\d\d-\d\d(?P<time>[ T]\d\d:\d\d(?::\d\d(?:\.\d{1,6})?)?)?)(?(time)(?P<offset>Z|[+-]\d\d(?::?\d\d)?)?)"
)
_UTC = (None, "Z", "+00:00", "-00:00", "+0000", "-0000", "+00", "-00")


def load_market_data(
    path: str | Path,
    *,
    columns: Mapping[str, str] | None = None,
    timezone: str | None = None,
    max_gap: Gap = None,
) -> dict[str, Bars]:
    """Checked bars by symbol, from a file.

    It has the columns ``timestamp``, ``open``, ``high``, ``low``, ``close`` and ``volume``, and ``symbol`` if it holds
    several markets; upper case or lower, in any order, among others. Without ``symbol``, the market is called after the
    file. Rows of one symbol are in time's order. Timestamps are ISO dates, with or without times, in UTC.

    Args:
        path: ``.csv`` or ``.parquet``.
        columns: What columns are called in the file, for those that are called otherwise:
            ``{"timestamp": "Date"}``.
        timezone: Name of the zone that timestamps without an offset are in, such as ``"America/New_York"``; those with
            an offset are converted. ``None``: all are in UTC, and an offset that says otherwise is an error.
        max_gap: Longest time from one bar to the next, in days, or a timedelta; see
            :func:`driftproof.envs.market_data.check_bars`.

    Raises:
        MarketDataError: The file is not there, or something is wrong with it; the message names the file and the row.
            For CSV it is the line as editors count it.
    """
    path = Path(path)
    if not path.is_file():
        raise MarketDataError(f"{path}: there is no such file")
    readers = {".csv": _read_csv, ".parquet": _read_parquet, ".pq": _read_parquet}
    if path.suffix.lower() not in readers:
        raise MarketDataError(f"{path}: is neither .csv nor .parquet")
    zone = None if timezone is None else _zone(timezone)
    found, rows = readers[path.suffix.lower()](path, dict(columns or {}), zone)
    return from_columns(found, str(path), rows, max_gap, symbol=path.stem)


def read_bars(
    lines: Iterable[str],
    *,
    source: str = "input",
    columns: Mapping[str, str] | None = None,
    timezone: str | None = None,
    max_gap: Gap = None,
    symbol: str = "",
) -> Iterator[Bars]:
    """Checked bars, one at a time, from lines of CSV that may still be coming in.

    Args:
        lines: The header first; see :func:`load_market_data` for columns and timestamps.
        source: What to call it in messages.
        columns: What columns are called, for those that are called otherwise.
        timezone: Name of the zone that timestamps without an offset are in.
        max_gap: Longest time from one bar of a market to the next, in days, or a timedelta; ``None``: a week, since
            what is usual is not known.
        symbol: What the market is called if there is no such column.

    Raises:
        MarketDataError: Something is wrong with a line; the message names it. Those before it have been read.
    """
    zone = None if timezone is None else _zone(timezone)
    limit = 7.0 if max_gap is None else max_gap
    latest: dict[str, tuple[int, Bars]] = {}
    records = _records(source, lines)
    header = next(records, None)
    if header is None:
        raise MarketDataError(f"{source}: is empty")
    header[:1] = [name.removeprefix("\ufeff") for name in header[:1]]  # A mark that some programs begin files with.
    places = _find(source, header, dict(columns or {}))
    for row, cells in enumerate(_full_lines(source, records, len(header)), 2):
        place = Place(source, np.array([row]))
        found = {name: _column(name, [cells[i]], place, zone) for name, i in places.items()}
        name = str(found["symbol"][0]) if "symbol" in found else symbol
        bar = Bars(found["timestamp"], **{each: found[each] for each in (*PRICES, "volume")}, symbol=name)
        if name in latest:
            before, last = latest[name]
            names = ("timestamps", *PRICES, "volume")
            pair: dict[str, Any] = {each: np.append(getattr(last, each), getattr(bar, each)) for each in names}
            check_bars(Bars(**pair), Place(source, np.array([before, row])), limit)
        else:
            check_bars(bar, place, limit)
        latest[name] = row, bar
        yield bar


def _read_csv(path: Path, names: Mapping[str, str], zone: ZoneInfo | None) -> tuple[dict[str, Any], Rows]:
    parts: dict[str, list[Any]] = {}
    last = 1
    with path.open(newline="", encoding="utf-8-sig") as file:
        records = _records(path, file)
        header = next(records, None)
        if header is None:
            raise MarketDataError(f"{path}: is empty")
        places = _find(path, header, names)
        lines = _full_lines(path, records, len(header))
        # A few at a time: text takes many times the memory of numbers.
        while chunk := list(itertools.islice(lines, 4096)):
            place = Place(str(path), np.arange(last + 1, last + len(chunk) + 1))
            cells = list(zip(*chunk, strict=True))
            for name, i in places.items():
                parts.setdefault(name, []).append(_column(name, cells[i], place, zone))
            last += len(chunk)
    if not parts:
        raise MarketDataError(f"{path}: has a header, but no rows")
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}, np.arange(2, last + 1)


def _records(source: Path | str, lines: Iterable[str]) -> Iterator[list[str]]:
    """Cells of every line, the header's first."""
    row = 0
    try:
        for cells in csv.reader(lines, strict=True):
            row += 1
            yield cells
    except csv.Error as error:
        raise MarketDataError(f"{source}, row {row + 1}: is not CSV: {error}") from error
    except UnicodeDecodeError as error:
        # Text is decoded some lines ahead.
        raise MarketDataError(f"{source}, after row {row}: is not CSV in UTF-8: {error}") from error


def _full_lines(path: Path | str, lines: Iterable[list[str]], width: int) -> Iterator[list[str]]:
    """The lines, if all have as many cells; only the last may be empty."""
    empty = None
    for row, line in enumerate(lines, 2):
        if empty is not None and line:
            raise MarketDataError(f"{path}, row {empty}: is empty; remove it")
        if len(line) == width:
            yield line
        elif line:
            raise MarketDataError(f"{path}, row {row}: has {len(line)} columns, and the header {width}")
        else:
            empty = empty or row


def _column(name: str, cells: Sequence[str], place: Place, zone: ZoneInfo | None) -> Any:
    if name == "timestamp":
        return _times(cells, place, zone)
    if name == "symbol":
        if "" in cells:
            raise place.error(cells.index(""), "symbol is empty")
        return np.array(cells, dtype=object)
    return _numbers(name, cells, place)


def _read_parquet(path: Path, names: Mapping[str, str], zone: ZoneInfo | None) -> tuple[dict[str, Any], Rows]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(f'{path}: Parquet needs pyarrow: pip install "driftproof[parquet]"') from error
    try:
        file = pyarrow.parquet.ParquetFile(path)
        header = file.schema_arrow.names
        places = _find(path, header, names)
        table = file.read([header[i] for i in places.values()])
    except pyarrow.ArrowException as error:
        raise MarketDataError(f"{path}: is not a Parquet file: {error}") from error
    if not table.num_rows:
        raise MarketDataError(f"{path}: has columns, but no rows")
    place = Place(str(path), np.arange(1, table.num_rows + 1))
    found: dict[str, Any] = {}
    for name, i in places.items():
        column = table.column(header[i])
        if column.null_count:
            raise place.error(column.is_null().to_numpy().argmax(), f"{name} is empty")
        if name == "timestamp" and not _is_text(column.type):
            found[name] = _arrow_times(column, place, zone)
        elif name != "symbol" and (pyarrow.types.is_integer(column.type) or pyarrow.types.is_floating(column.type)):
            found[name] = column.to_numpy()
        else:
            found[name] = _column(name, [str(cell) for cell in column.to_pylist()], place, zone)
    return found, place.rows


def _arrow_times(column: Any, place: Place, zone: ZoneInfo | None) -> Times:
    from pyarrow import types

    kind = column.type
    if not (types.is_date(kind) or types.is_timestamp(kind)):
        raise MarketDataError(f"{place.source}: timestamp is of type {kind}; it must be a timestamp, a date or text")
    times: Times = column.to_numpy().astype("datetime64[us]")
    known = None if types.is_date(kind) else kind.tz
    if known is None:
        return times if zone is None else _local(times.tolist(), zone)
    if zone is None and known not in ("UTC", "Etc/UTC", *_UTC):
        raise place.error(0, f"times are in {known}, not in UTC; to convert them, pass timezone={known!r}")
    return times


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_string(kind) or types.is_large_string(kind))


def _find(path: Path | str, header: Sequence[str], names: Mapping[str, str]) -> dict[str, int]:
    """Where our columns are."""
    if unknown := set(names) - {*COLUMNS, "symbol"}:
        raise ValueError(f"columns: {', '.join(sorted(unknown))} is none of {', '.join((*COLUMNS, 'symbol'))}")
    found = [name.strip().lower() for name in header]
    places = {}
    for name in (*COLUMNS, "symbol"):
        wanted = names.get(name, name)
        if (count := found.count(wanted.lower())) > 1:
            raise MarketDataError(f"{path}, row 1: the column {wanted!r} is there more than once")
        if count:
            places[name] = found.index(wanted.lower())
        elif name != "symbol" or name in names:
            raise MarketDataError(
                f"{path}, row 1: there is no column {wanted!r}{nearest(wanted, found)}; there are "
                f"{', '.join(map(repr, header))}. If it has another name: columns={{{name!r}: ...}}, "
                f"or --column {name}=..." + ("; values must be separated by commas" if len(header) == 1 else "")
            )
    return places


def _numbers(name: str, cells: Sequence[str], place: Place) -> npt.NDArray[np.float64]:
    try:
        return np.array(list(map(float, cells)))
    except ValueError:
        for i, cell in enumerate(cells):
            try:
                float(cell)
            except ValueError as error:
                what = f"{cell!r} is not a number" if cell.strip() else "is empty"
                raise place.error(i, f"{name} {what}") from error
        raise


def _times(stamps: Sequence[str], place: Place, zone: ZoneInfo | None) -> Times:
    """Times in UTC."""
    matches = [_STAMP.fullmatch(stamp) for stamp in stamps]
    for i, (stamp, match) in enumerate(zip(stamps, matches, strict=True)):
        if match is None:
            raise place.error(i, f"timestamp {stamp!r} is no ISO date such as 2024-01-31 or 2024-01-31T09:30:00Z")
        if zone is None and match["offset"] not in _UTC:
            raise place.error(
                i, f"timestamp {stamp!r} is not in UTC; to convert all of them, pass timezone, as in 'Europe/Berlin'"
            )
    try:
        if zone is None:
            return np.array([match[1] for match in matches if match is not None], "M8[us]")
        return _local([_parsed(stamp) for stamp in stamps], zone)
    except (OverflowError, ValueError):
        for i, stamp in enumerate(stamps):
            try:
                _local([_parsed(stamp)], zone or datetime.timezone.utc)
            except (OverflowError, ValueError) as error:
                raise place.error(i, f"timestamp {stamp!r}: {error}") from error
        raise


def _parsed(stamp: str) -> datetime.datetime:
    # Written out, as Python 3.10 wants it.
    match = _STAMP.fullmatch(stamp)
    assert match is not None
    text, offset = match[1], (match["offset"] or "").replace("Z", "+00:00")
    if "." in text:
        text = f"{text:0<26}"
    if len(offset) == 3:
        offset += ":00"
    elif len(offset) == 5:
        offset = f"{offset[:3]}:{offset[3:]}"
    return datetime.datetime.fromisoformat(text + offset)


def _local(times: Sequence[datetime.datetime], zone: datetime.tzinfo) -> Times:
    """In UTC, of times in a zone, but for those that say which one they are in."""
    utc = datetime.timezone.utc
    aware = [time if time.tzinfo is not None else time.replace(tzinfo=zone) for time in times]
    return np.array([time.astimezone(utc).replace(tzinfo=None) for time in aware], "M8[us]")


def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError) as error:
        raise ValueError(f"Invalid timezone: {name!r}; must be a name such as 'America/New_York'") from error
