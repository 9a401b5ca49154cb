"""``metrics.jsonl``: logged metrics of members and of the population, read in bounded memory."""

from __future__ import annotations

import json
import math
import os
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias, overload

from driftproof._files import RunFolderError, bounded_int, open_regular, shortened
from driftproof._text import printable
from driftproof.runs.population_state import MAX_COUNT, MAX_MEMBERS

Row: TypeAlias = dict[str, float]
"""Metrics that an agent logged after one update, by name; ``"step"`` is its number of environment steps."""

MAX_LINE = 2**20
MAX_LINES = 2_000_000
MAX_NAMES = 2_000
MAX_NUMBERS = 20_000_000
"""Limits of a file, enough for a long training of a large population: 64 members that log 100 metrics 3,000 times."""


class Rows(Sequence[Row]):
    """Rows of one member by step; dicts are created on access, because storing them would take ten times the memory."""

    def __init__(self, rows: Sequence[tuple[tuple[str, ...], array[float]]]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        if isinstance(index, slice):
            return Rows(self._rows[index])
        names, values = self._rows[index]
        row = dict(zip(names, values, strict=True))
        row["step"] = int(row["step"])
        return row

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


def read_metrics(path: str | os.PathLike[str]) -> dict[int | None, Sequence[Row]]:
    """Logged metrics of a run's ``metrics.jsonl``, by member and in the order of steps; ``None`` is the population.

    Of a slice that was trained again after an interruption, the last rows count; a line that an interruption cut off is
    ignored. Values that are not finite are NaN.

    Raises:
        RunFolderError: A line is JSON, but not a row of metrics, or the file exceeds a limit.
        OSError: The file cannot be read.
    """
    reader = _Reader(path)
    with open_regular(path) as file:
        number = 0
        while line := file.readline(MAX_LINE + 1):
            number += 1
            reader.add(number, line)
    return {member: Rows([rows[step] for step in sorted(rows)]) for member, rows in reader.found.items()}


class _Reader:
    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        self.found: dict[int | None, dict[int, tuple[tuple[str, ...], array[float]]]] = {}
        self._names: dict[str, str] = {}
        self._sets: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._numbers = 0

    def add(self, number: int, line: bytes) -> None:
        if number > MAX_LINES:
            raise self._excess(f"{MAX_LINES:,} lines")
        if len(line) > MAX_LINE:
            raise self._wrong(number, line, f"it has more than {MAX_LINE:,} bytes")
        try:
            row = json.loads(line.decode("utf-8"), parse_int=bounded_int)
        except json.JSONDecodeError:
            return
        except UnicodeDecodeError:
            raise self._wrong(number, line, "it is not text in UTF-8") from None
        except RecursionError:
            raise self._wrong(number, line, "it is nested too deeply") from None
        except ValueError as error:
            raise self._wrong(number, line, str(error)) from None
        try:
            member, step, values = _checked(row)
        except ValueError as error:
            raise self._wrong(number, line, str(error)) from None
        self._keep(member, step, values)

    def _keep(self, member: int | None, step: int, values: dict[str, float]) -> None:
        names = tuple(self._names.setdefault(name, name) for name in values)
        names = self._sets.setdefault(names, names)
        self._numbers += len(names)
        if len(self._names) > MAX_NAMES:
            raise self._excess(f"{MAX_NAMES:,} different names")
        if self._numbers > MAX_NUMBERS:
            raise self._excess(f"{MAX_NUMBERS:,} numbers")
        self.found.setdefault(member, {})[step] = names, array("d", values.values())

    def _wrong(self, number: int, line: bytes, why: str) -> RunFolderError:
        shown = printable(line[:80].decode("utf-8", "replace"), 80)
        return RunFolderError(
            f"{self._path}, line {number}: not a row of metrics ({printable(why, 120)}): '{shown}'; remove the line"
        )

    def _excess(self, what: str) -> RunFolderError:
        return RunFolderError(f"{self._path} cannot be read: it has more than {what}; remove lines")


def _checked(row: Any) -> tuple[int | None, int, dict[str, float]]:
    """Member, step and numbers of a row.

    Raises:
        ValueError: It is not a row of metrics.
    """
    if not isinstance(row, dict):
        raise ValueError("it is not a mapping")
    if missing := [name for name in ("member", "step") if name not in row]:
        raise ValueError(f"{missing[0]!r} is missing")
    member, step = row.pop("member"), row["step"]
    if member is not None and (type(member) is not int or not 0 <= member < MAX_MEMBERS):
        raise ValueError(f"{shortened(member)} is not a member's id")
    if type(step) is float and step.is_integer():
        step = row["step"] = int(step)
    if type(step) is not int or not 0 <= step <= MAX_COUNT:
        raise ValueError(f"{shortened(step)} is not a step")
    values = {}
    for name, value in row.items():
        if value is not None and not isinstance(value, int | float):
            raise ValueError(f"{shortened(name)} is {shortened(value)}, not a number")
        values[name] = math.nan if value is None or not math.isfinite(value) else float(value)
    return member, step, values
