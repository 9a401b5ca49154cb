"""Lengths of time in words: ``5min``, ``1d``, ``6mo``, ``3y``; and the usual time between bars."""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

Times = npt.NDArray[np.datetime64]

_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 604800}
_MONTHS = {"mo": 1, "y": 12}
_MONTH = 30.44 * 86400
"""Mean seconds of a month."""
_UNITS = ", ".join((*_SECONDS, *_MONTHS))
_SAME = 1.5
"""Frequencies within this factor are the same: days have 23 to 25 hours, months 28 to 31 days."""


def parse_period(name: str, text: str) -> tuple[int, str]:
    """Number and unit of a period such as ``"6mo"``.

    Args:
        name: Name of the argument, for messages.
        text: The period.
    """
    match = re.fullmatch(r"(\d{1,6}) ?([a-z]+)", str(text).strip().lower())
    if match is None or match[2] not in {**_SECONDS, **_MONTHS} or int(match[1]) < 1:
        raise ValueError(
            f"Invalid {name}: {text!r}; must be a number and a unit such as 5min, 1d, 6mo or 3y ({_UNITS})"
        )
    return int(match[1]), match[2]


def seconds_of(text: str) -> float:
    """Length of a period in seconds; months and years have their mean length."""
    number, unit = parse_period("period", text)
    return number * (_SECONDS[unit] if unit in _SECONDS else _MONTHS[unit] * _MONTH)


def add_period(time: np.datetime64, period: str) -> np.datetime64:
    """The time one period later; months and years are those of the calendar.

    A day that the month does not have becomes its last day.
    """
    number, unit = parse_period("period", period)
    if unit in _SECONDS:
        later: np.datetime64 = time + np.timedelta64(number * _SECONDS[unit], "s").astype("timedelta64[us]")
        return later
    month = time.astype("datetime64[M]")
    since = time.astype("datetime64[us]") - month.astype("datetime64[us]")
    target = month + np.timedelta64(number * _MONTHS[unit], "M")
    last = (target + 1).astype("datetime64[D]").astype("datetime64[us]") - np.timedelta64(1, "D")
    return min(target.astype("datetime64[us]") + since, last + since % np.timedelta64(1, "D"))


def frequency_of(times: Times) -> str | None:
    """The usual time between bars in words, such as ``"5min"`` or ``"1d"``; ``None`` for fewer than two bars."""
    if len(times) < 2:
        return None
    steps = np.diff(times).astype("timedelta64[us]").astype(np.int64) / 1e6
    usual = float(np.sort(steps)[len(steps) // 2])
    if usual <= 0:
        return None
    if usual > 20 * 86400:
        months = max(1, round(usual / _MONTH))
        return f"{months // 12}y" if months % 12 == 0 else f"{months}mo"
    for unit in ("w", "d", "h", "min", "s"):
        if usual >= 0.9 * _SECONDS[unit]:
            return f"{round(usual / _SECONDS[unit])}{unit}"
    return "1s"


def is_same_frequency(one: str, other: str) -> bool:
    """Whether bars of two frequencies can stand for each other."""
    ratio = seconds_of(one) / seconds_of(other)
    return 1 / _SAME < ratio < _SAME
