"""Schedules: how a number of a drifting environment changes over time."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np

from driftproof._arguments import check_count, check_number, check_option
from driftproof._registry import SCHEDULES, Registry
from driftproof._trust import Trust
from driftproof.envs._specs import of_kind, to_plain

Unit = Literal["steps", "episodes"]
Shape = Literal["sine", "triangle", "square"]
_MOST_MOMENTS = 1_000
"""Largest number of moments that stand for a schedule."""


@dataclass(frozen=True)
class Schedule:
    """A number that depends on time, which an environment counts in steps or in episodes, from 0.

    Random schedules draw a new level at each of their *moves*, given the previous level.

    Args:
        unit: Unit of time: steps or episodes of an environment.
    """

    registry: ClassVar[Registry] = SCHEDULES

    unit: Unit = field(default="steps", kw_only=True)

    def __post_init__(self) -> None:
        check_option("unit", self.unit, ("steps", "episodes"))

    @property
    def bounds(self) -> tuple[float, float]:
        """The lowest and the highest value, over all time."""
        raise NotImplementedError

    def phase(self, time: int) -> int:
        """Number of the phase: a period in which the value is constant, or changes in the same way."""
        raise NotImplementedError

    def moves(self, time: int) -> int:
        """Number of levels drawn by that time, after the first."""
        return 0

    def level(self, move: int, last: float | None, generator: np.random.Generator) -> float:
        """The level after a move, given the previous one, which is ``None`` for move 0."""
        return 0.0

    def value(self, time: int, level: float) -> float:
        """The value at that time."""
        return level

    def moments(self, until: int) -> list[int]:
        """Times, beginning with 0, whose values stand for the whole schedule: here, at which its phases begin.

        At most 1,000; of more, some that are evenly spaced.

        Args:
            until: Last time to consider; schedules that end, or repeat, may go on to where they have shown everything.
        """
        first, last = self.phase(0), self.phase(until)
        phases = np.linspace(first, last, min(last - first + 1, _MOST_MOMENTS)).round().tolist()
        return [bisect.bisect_left(range(until + 1), phase, key=self.phase) for phase in phases]

    def to_dict(self) -> dict[str, Any]:
        """The schedule as plain values, for :func:`schedule`."""
        plain: dict[str, Any] = to_plain(self)
        return plain


@dataclass(frozen=True)
class Sudden(Schedule):
    """A value that changes abruptly.

    Values are a list (``values``), or drawn from a range (``low``, ``high``), the first one too. With neither, the
    value is the number of the phase, 0, 1, 2, ...: for permutations, each of which is a new one.

    Args:
        every: Time between changes.
        at: Times of changes, instead of ``every``.
        values: What it changes to, beginning with the first.
        low: Least value that is drawn.
        high: Greatest value that is drawn.
        order: Of ``values``: ``"given"``, over and over again, or ``"random"``, never the same twice in a row.
    """

    every: int | None = None
    at: Sequence[int] | None = None
    values: Sequence[float] | None = None
    low: float | None = None
    high: float | None = None
    order: Literal["given", "random"] = "given"

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.every is None) == (self.at is None):
            raise ValueError("Sudden needs every or at, one of the two")
        if self.every is not None:
            check_count("every", self.every, at_least=1)
        if self.at is not None:
            object.__setattr__(self, "at", tuple(self.at))
            for time in self.at:
                check_count("at", time, at_least=1)
            if list(self.at) != sorted(set(self.at)):
                raise ValueError(f"Invalid at: {list(self.at)}; times must increase")
        self._check_values()

    def _check_values(self) -> None:
        check_option("order", self.order, ("given", "random"))
        if (self.low is None) != (self.high is None):
            raise ValueError("Sudden needs both low and high, or none")
        if self.low is not None and self.high is not None:
            if self.values is not None:
                raise ValueError("Sudden takes values, or low and high, not both")
            check_number("low", self.low)
            check_number("high", self.high, above=self.low)
        if self.order == "random" and (self.values is None or len(set(self.values)) < 2):
            raise ValueError("order='random' needs at least two different values")
        if self.values is not None:
            object.__setattr__(self, "values", tuple(self.values))
            if not self.values:
                raise ValueError("Sudden needs at least one value in values")
            for value in self.values:
                check_number("values", value)

    @property
    def bounds(self) -> tuple[float, float]:
        if self.values is not None:
            return min(self.values), max(self.values)
        if self.low is not None and self.high is not None:
            return self.low, self.high
        return 0.0, math.inf if self.at is None else float(len(self.at))

    def phase(self, time: int) -> int:
        if self.every is not None:
            return time // self.every
        assert self.at is not None
        return bisect.bisect_right(self.at, time)

    def moves(self, time: int) -> int:
        return self.phase(time)

    def moments(self, until: int) -> list[int]:
        if self.at:
            until = max(until, self.at[-1])
        elif self.every is not None and self.values is not None and self.order == "given":
            until = max(until, self.every * len(self.values) - 1)
        return super().moments(until)

    def level(self, move: int, last: float | None, generator: np.random.Generator) -> float:
        if self.low is not None and self.high is not None:
            return float(generator.uniform(self.low, self.high))
        if self.values is None:
            return float(move)
        if self.order == "given":
            return float(self.values[move % len(self.values)])
        if last is None:
            return float(self.values[0])
        others = [value for value in self.values if value != last]
        return float(others[generator.integers(len(others))])


@dataclass(frozen=True)
class Gradual(Schedule):
    """Linear interpolation from one value to another, then constant.

    Phases: 0 before it, 1 on the way, 2 after it.

    Args:
        start: First value.
        end: Last value.
        over: Duration of the change.
        begin: Time at which it begins.
    """

    start: float
    end: float
    over: int
    begin: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("start", self.start)
        check_number("end", self.end)
        check_count("over", self.over, at_least=1)
        check_count("begin", self.begin)

    @property
    def bounds(self) -> tuple[float, float]:
        return min(self.start, self.end), max(self.start, self.end)

    def phase(self, time: int) -> int:
        return int(time > self.begin) + int(time >= self.begin + self.over)

    def moments(self, until: int) -> list[int]:
        """The beginning, the middle of the change, and its end."""
        return [0, self.begin + self.over // 2, self.begin + self.over]

    def value(self, time: int, level: float) -> float:
        share = min(max((time - self.begin) / self.over, 0.0), 1.0)
        return self.start + (self.end - self.start) * share


@dataclass(frozen=True)
class Cyclic(Schedule):
    """A periodic change from one value to another and back.

    Phases are half periods: there, back, there, ...

    Args:
        start: Value at the beginning of a period.
        end: Value in its middle; with a square wave, of all its second half.
        period: Length of a period, at least 2.
        shape: ``"sine"``, slow at the ends; ``"triangle"``, linear; ``"square"``, sudden.
    """

    start: float
    end: float
    period: int
    shape: Shape = "sine"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("start", self.start)
        check_number("end", self.end)
        check_count("period", self.period, at_least=2)
        check_option("shape", self.shape, ("sine", "triangle", "square"))

    @property
    def bounds(self) -> tuple[float, float]:
        return min(self.start, self.end), max(self.start, self.end)

    def phase(self, time: int) -> int:
        return 2 * time // self.period

    def moments(self, until: int) -> list[int]:
        """Where its half periods begin: at both ends of the range."""
        return super().moments(max(until, self.period - 1))

    def value(self, time: int, level: float) -> float:
        share = time % self.period / self.period
        if self.shape == "sine":
            way = (1 - math.cos(2 * math.pi * share)) / 2
        elif self.shape == "triangle":
            way = 1 - abs(1 - 2 * share)
        else:
            way = float(2 * share >= 1)
        return self.start + (self.end - self.start) * way


@dataclass(frozen=True)
class RandomWalk(Schedule):
    """A random walk, reflected at the ends of a range. Has a single phase.

    Args:
        low: Lower end.
        high: Upper end.
        deviation: Standard deviation of one change; at most the length of the range.
        start: First value; ``None``: the middle.
        every: Time between changes.
    """

    low: float
    high: float
    deviation: float
    start: float | None = None
    every: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("low", self.low)
        check_number("high", self.high, above=self.low)
        check_number("deviation", self.deviation, above=0, at_most=self.high - self.low)
        if self.start is not None:
            check_number("start", self.start, at_least=self.low, at_most=self.high)
        check_count("every", self.every, at_least=1)

    @property
    def bounds(self) -> tuple[float, float]:
        return self.low, self.high

    def phase(self, time: int) -> int:
        return 0

    def moments(self, until: int) -> list[int]:
        """The beginning, the quarters of the time, and its end."""
        return [until * quarter // 4 for quarter in range(5)]

    def moves(self, time: int) -> int:
        return time // self.every

    def level(self, move: int, last: float | None, generator: np.random.Generator) -> float:
        if last is None:
            return (self.low + self.high) / 2 if self.start is None else float(self.start)
        # Reflection is a triangle wave of the position on an endless line.
        width = self.high - self.low
        place = (last - self.low + self.deviation * float(generator.normal())) % (2 * width)
        return self.low + (2 * width - place if place > width else place)


def schedule(spec: Any, trust: Trust | None = None, place: str = "") -> Schedule:
    """Build a schedule from plain values, such as ``{"kind": "gradual", "start": 1, "end": 2, "over": 10_000}``.

    Args:
        spec: The values, where ``kind`` may also be ``module:Class``; or a schedule.
        trust: Modules that ``kind`` may name.
        place: Path of the values in a configuration, for messages.
    """
    if isinstance(spec, Schedule):
        return spec
    made: Schedule = of_kind(SCHEDULES, spec, trust, place)
    return made


class Course:
    """The state of a schedule in one environment.

    Args:
        schedule: The schedule.
        seed: Seed of its random levels.
    """

    def __init__(self, schedule: Schedule, seed: Sequence[int]) -> None:
        self.schedule = schedule
        self._generator = np.random.default_rng(seed)
        self._moves = 0
        self._level = schedule.level(0, None, self._generator)
        self.phase, self.value = schedule.phase(0), schedule.value(0, self._level)

    def go_to(self, time: int) -> None:
        """Advance to a time, which must not be before the last one."""
        moves = self.schedule.moves(time)
        while self._moves < moves:
            self._moves += 1
            self._level = self.schedule.level(self._moves, self._level, self._generator)
        self.phase, self.value = self.schedule.phase(time), self.schedule.value(time, self._level)

    def state_dict(self) -> dict[str, Any]:
        """Level, moves so far, and the generator."""
        return {"moves": self._moves, "level": self._level, "generator": self._generator.bit_generator.state}

    def load_state_dict(self, state_dict: dict[str, Any], time: int) -> None:
        """Restore a saved state."""
        self._moves, self._level = int(state_dict["moves"]), float(state_dict["level"])
        self._generator.bit_generator.state = state_dict["generator"]
        self.go_to(time)
