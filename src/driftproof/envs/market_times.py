"""Timestamps of price files, in the formats that programs write them.

Texts are parsed by their template: the text with every digit replaced by 0. Texts of one template have their fields at
the same places, so that one match of a regular expression serves all of them, and fields are read as columns of bytes.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import numpy as np
import numpy.typing as npt

from driftproof.envs.market_data import Place, Times

Integers = npt.NDArray[np.int64]
Stamps = npt.NDArray[np.bytes_]

_CLOCK = r"(?:(?:[ T]|, )(?P<H>\d{1,2}):(?P<M>\d\d)(?::(?P<S>\d\d)(?:[.,](?P<f>\d{1,9}))?)?(?: ?(?P<half>[AaPp][Mm]))?"
_OFFSET = r"(?: ?(?P<offset>Z|UTC|GMT|[+-]\d\d(?::?\d\d)?))?)?"
_FORMATS = {
    "year first": r"(?P<Y>\d{4})(?P<x>[-/.])(?P<m>\d\d)(?P=x)(?P<d>\d\d)",
    "digits": r"(?P<Y>\d{4})(?P<m>\d\d)(?P<d>\d\d)",
    "two first": r"(?P<a>\d{1,2})(?P<x>[-/.])(?P<b>\d{1,2})(?P=x)(?P<Y>\d{4})",
    "month by name": r"(?P<d>\d{1,2})[- ](?P<name>[A-Za-z]{3,9})[- ](?P<Y>\d{4})",
    "month by name first": r"(?P<name>[A-Za-z]{3,9}) (?P<d>\d{1,2}),? (?P<Y>\d{4})",
    "epoch": r"(?P<epoch>\d{9,19})(?:\.(?P<f>\d{1,9}))?",
}
_PATTERNS = {
    name: re.compile(pattern if name == "epoch" else pattern + _CLOCK + _OFFSET) for name, pattern in _FORMATS.items()
}
_MONTHS = (
    *("january", "february", "march", "april", "may", "june"),
    *("july", "august", "september", "october", "november", "december"),
)
_UTC = ("Z", "UTC", "GMT", "+00:00", "-00:00", "+0000", "-0000", "+00", "-00")
_EPOCHS = ((1e11, "seconds", 10**6), (1e14, "milliseconds", 10**3), (1e17, "microseconds", 1))
"""Units of times since 1970, by their size; seconds below 1e11 reach to the year 5138."""
_QUARTER = 15 * 60 * 10**6
"""Microseconds. Zones change their offset at full quarters of an hour."""
_FIRST, _LAST = np.datetime64("0001-01-02", "us"), np.datetime64("9999-12-30", "us")
_LONGEST = 48
"""Characters of a timestamp."""
_EXAMPLES = "2024-01-31, 2024-01-31T09:30:00Z, 31.01.2024, 01/31/2024, Jan 31, 2024 or seconds since 1970"


@dataclass(frozen=True)
class TimeFormat:
    """How timestamps were read.

    Attributes:
        format: Format of the dates, in words.
        zone: Zone, in words.
        day_first: Of dates such as 02/03/2024, whether the day is first; ``None`` for other formats.
        is_guess: Whether the order of day and month could not be decided from the data.
    """

    format: str
    zone: str
    day_first: bool | None = None
    is_guess: bool = False


def parse_times(
    stamps: Sequence[str], place: Place, zone: ZoneInfo | None = None, day_first: bool | None = None
) -> tuple[Times, TimeFormat]:
    """Times in UTC, and how they were read.

    Args:
        stamps: Timestamps.
        place: Where they came from.
        zone: Zone of those without an offset; ``None``: UTC.
        day_first: Whether 02/03/2024 is in March; ``None``: decided from all of them.

    Raises:
        MarketDataError: One of them cannot be read.
    """
    texts = _as_bytes(stamps, place)
    fields, kind = _fields(texts, place)
    if kind == "epoch":
        return _since_1970(fields, texts, place)
    order: tuple[bool | None, bool] = (None, False)
    if kind == "two first":
        order = _order(fields, texts, place, day_first)
        day, month = ("a", "b") if order[0] else ("b", "a")
        fields["d"], fields["m"] = fields[day], fields[month]
    local = _combined(fields, texts, place)
    times, zone_told = _in_utc(local, fields, texts, place, zone)
    mark = chr(fields["x"][0]) if "x" in fields else ""
    written = {
        "year first": f"YYYY{mark}MM{mark}DD",
        "digits": "YYYYMMDD",
        "two first": f"DD{mark}MM{mark}YYYY" if order[0] else f"MM{mark}DD{mark}YYYY",
        "month by name": "DD Mon YYYY",
        "month by name first": "Mon DD, YYYY",
    }[kind]
    return times, TimeFormat(written, zone_told, *order)


def _as_bytes(stamps: Sequence[str], place: Place) -> Stamps:
    # Texts are stored at the length of the longest.
    if long := [i for i, stamp in enumerate(stamps) if len(stamp) > _LONGEST]:
        raise place.error(long[0], _unreadable(stamps[long[0]][:_LONGEST] + "…"))
    try:
        texts: Stamps = np.char.strip(np.array(stamps, dtype=np.bytes_))  # type: ignore[assignment]
        return texts
    except UnicodeEncodeError:
        wrong = next(i for i, stamp in enumerate(stamps) if not stamp.isascii())
        raise place.error(wrong, _unreadable(stamps[wrong])) from None


def _unreadable(stamp: str) -> str:
    if not stamp:
        return "timestamp is empty"
    return f"timestamp {stamp!r} is no date in a format that is known, such as {_EXAMPLES}"


def _fields(texts: Stamps, place: Place) -> tuple[dict[str, Integers], str]:
    """Numbers of the fields of all texts ``[T]``, and the name of their format."""
    width = max(texts.dtype.itemsize, 1)
    table = np.ascontiguousarray(texts).view(np.uint8).reshape(len(texts), width)
    is_digit = (table >= ord("0")) & (table <= ord("9"))
    templates = np.where(is_digit, np.uint8(ord("0")), table).view(f"S{width}").ravel()
    _, first, which = np.unique(templates, return_index=True, return_inverse=True)
    fields: dict[str, Integers] = {}
    known: dict[str, int] = {}
    for number in np.argsort(first):
        row = int(first[number])
        text = texts[row].decode()
        kind, match = _match(text)
        if kind is None or match is None:
            raise place.error(row, _unreadable(text))
        if known and kind not in known:
            before = next(iter(known.values()))
            raise place.error(
                row,
                f"timestamp {text!r} has another format than {texts[before].decode()!r} in row {place.rows[before]}",
            )
        known.setdefault(kind, row)
        rows = np.flatnonzero(which == number)
        for name, value in _values(match, table, rows).items():
            if name not in fields:
                fields[name] = np.zeros(len(texts), np.int64)
            fields[name][rows] = value
    return fields, next(iter(known))


def _match(text: str) -> tuple[str | None, re.Match[str] | None]:
    for kind, pattern in _PATTERNS.items():
        if (match := pattern.fullmatch(text)) is not None:
            return kind, match
    return None, None


def _values(match: re.Match[str], table: npt.NDArray[np.uint8], rows: npt.NDArray[np.intp]) -> dict[str, Any]:
    """Numbers of the fields of some rows, which all have the template of the match."""
    values: dict[str, Any] = {}
    for name, text in match.groupdict().items():
        if text is None:
            continue
        start, stop = match.span(name)
        if name == "x":
            values[name] = ord(text)
        elif name == "name":
            values["m"] = 1 + next((i for i, month in enumerate(_MONTHS) if text.lower() in (month, month[:3])), -1)
        elif name == "half":
            values[name] = 1 if text.lower() == "am" else 2
        elif name == "offset":
            values |= {"has_offset": 1, "offset": _minutes(match, table, rows)}
        else:
            digits = table[rows, start:stop].astype(np.int64) - ord("0")
            number = digits @ 10 ** np.arange(stop - start - 1, -1, -1, dtype=np.int64)
            values[name] = number * 10 ** (9 - len(text)) if name == "f" else number
    return values


def _minutes(match: re.Match[str], table: npt.NDArray[np.uint8], rows: npt.NDArray[np.intp]) -> Any:
    """Offsets from UTC in minutes."""
    text, (start, stop) = match["offset"], match.span("offset")
    if text in ("Z", "UTC", "GMT"):
        return 0
    digits = table[rows, start:stop].astype(np.int64) - ord("0")
    minutes = 60 * (10 * digits[:, 1] + digits[:, 2])
    if len(text) > 3:
        minutes += 10 * digits[:, -2] + digits[:, -1]
    return minutes if text[0] == "+" else -minutes


def _order(fields: dict[str, Integers], texts: Stamps, place: Place, day_first: bool | None) -> tuple[bool, bool]:
    """Whether the day comes first in dates such as 02/03/2024, and whether that is a guess."""
    first, second = fields["a"] > 12, fields["b"] > 12
    if first.any() and second.any():
        i, j = int(np.argmax(first)), int(np.argmax(second))
        raise place.error(
            max(i, j),
            f"timestamps {texts[i].decode()!r} in row {place.rows[i]} and {texts[j].decode()!r} in row {place.rows[j]} "
            "cannot both be day first or both be month first",
        )
    if day_first is not None:
        wrong = second if day_first else first
        if wrong.any():
            i = int(np.argmax(wrong))
            told, number = ("true", "second") if day_first else ("false", "first")
            raise place.error(
                i, f"timestamp {texts[i].decode()!r}: day_first is {told}, but the {number} number is no month"
            )
        return day_first, False
    if first.any() or second.any():
        return bool(first.any()), False
    if (fields["x"] == ord(".")).all():
        return True, False  # Where dates are written with dots, the day is first.
    # Rows are in the order of time: often only one of the two readings is.
    in_order = [
        bool((steps >= 0).all() or (steps <= 0).all())
        for day, month in (("a", "b"), ("b", "a"))
        for steps in (np.diff(fields["Y"] * 10_000 + fields[month] * 100 + fields[day]),)
    ]
    if in_order[0] != in_order[1]:
        return in_order[0], False
    return False, True


def _since_1970(fields: dict[str, Integers], texts: Stamps, place: Place) -> tuple[Times, TimeFormat]:
    numbers = fields["epoch"]
    sizes = np.digitize(numbers, [limit for limit, _, _ in _EPOCHS])
    usual = int(np.sort(sizes)[len(sizes) // 2])
    _, unit, factor = (*_EPOCHS, (0, "nanoseconds", 0))[usual]
    if (sizes != usual).any():
        i = int(np.argmax(sizes != usual))
        raise place.error(i, f"timestamp {texts[i].decode()!r} is not in {unit} since 1970, as the others are")
    micros = numbers * factor if factor else numbers // 1000
    if "f" in fields:
        micros = micros + fields["f"] * factor // 10**9
    return micros.view("M8[us]"), TimeFormat(f"{unit} since 1970", "UTC")


def _combined(fields: dict[str, Integers], texts: Stamps, place: Place) -> Times:
    """Times as written, without their zone."""
    zero = np.zeros(len(texts), np.int64)
    year, month, day = fields["Y"], fields["m"], fields["d"]
    hour, minute, second, half = (fields.get(name, zero) for name in ("H", "M", "S", "half"))
    months = (year - 1970) * 12 + np.clip(month, 1, 12) - 1
    starts, ends = (each.view("M8[M]").astype("M8[D]").astype(np.int64) for each in (months, months + 1))
    for wrong, what in (
        ((year < 1) | (month < 1) | (month > 12), "month must be in 1..12"),
        ((day < 1) | (day > ends - starts), "day is out of range for month"),
        ((hour > 23) | (minute > 59) | (second > 59), "there is no such time of day"),
        ((half > 0) & ((hour < 1) | (hour > 12)), "there is no such time of day"),
    ):
        if wrong.any():
            i = int(np.argmax(wrong))
            raise place.error(i, f"timestamp {texts[i].decode()!r}: {what}")
    hour = np.where(half > 0, hour % 12 + 12 * (half == 2), hour)
    micros = (((starts + day - 1) * 24 + hour) * 60 + minute) * 60 + second
    times: Times = (micros * 10**6 + fields.get("f", zero) // 1000).view("M8[us]")
    return times


def _in_utc(
    local: Times, fields: dict[str, Integers], texts: Stamps, place: Place, zone: ZoneInfo | None
) -> tuple[Times, str]:
    """Times in UTC, and which zone they were in, in words."""
    has_offset = fields.get("has_offset", np.zeros(len(local), np.int64)) > 0
    offset = fields.get("offset", np.zeros(len(local), np.int64))
    if (abs(offset) >= 24 * 60).any():
        i = int(np.argmax(abs(offset) >= 24 * 60))
        raise place.error(i, f"timestamp {texts[i].decode()!r}: offset must be within a day")
    if zone is None and not has_offset.all() and (offset != 0).any():
        i = int(np.argmax(offset != 0))
        raise place.error(
            i,
            f"timestamp {texts[i].decode()!r} is not in UTC, and others have no offset; to convert all of them, pass "
            "timezone, as in 'Europe/Berlin'",
        )
    outside = (local < _FIRST) | (local > _LAST)
    if (zone is not None or (offset != 0).any()) and outside.any():
        i = int(np.argmax(outside))
        raise place.error(i, f"timestamp {texts[i].decode()!r}: year is out of range")
    times: Times = local - offset.view("m8[m]")
    if zone is not None and not has_offset.all():
        times[~has_offset] = to_utc(local[~has_offset], zone)
    if not has_offset.any():
        return times, "UTC, as no zone is written" if zone is None else str(zone)
    written = "UTC" if not (offset != 0).any() else "offsets, converted to UTC"
    return times, written if has_offset.all() or zone is None else f"{written}, otherwise {zone}"


def to_utc(local: Times, zone: ZoneInfo) -> Times:
    """Times of a zone in UTC; of an hour that comes twice, the first."""
    micros = local.astype("datetime64[us]").astype(np.int64)
    quarters, which = np.unique(micros // _QUARTER, return_inverse=True)
    times = (quarters * _QUARTER).view("M8[us]").tolist()
    offsets = [zone.utcoffset(time) // datetime.timedelta(microseconds=1) for time in times]  # type: ignore[operator]
    return (micros - np.array(offsets, np.int64)[which]).view("M8[us]")


def time_zone(name: str) -> ZoneInfo:
    """The zone of this name."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError) as error:
        raise ValueError(f"Invalid timezone: {name!r}; must be a name such as 'America/New_York'") from error
