"""Schedules: functions from the remaining progress, 1 to 0, to a value."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from driftproof._arguments import check_number

Schedule: TypeAlias = Callable[[float], float]
"""Function from the remaining progress, 1 to 0, to a value."""

_ROUNDING = 1e-9
"""How far below 0 a schedule may end through rounding."""


@dataclass(frozen=True)
class _FromTo:
    """Schedule between two values.

    Args:
        start: Value at the beginning of training.
        end: Value at its end.
    """

    start: float
    end: float = 0.0

    def __post_init__(self) -> None:
        check_number("start", self.start, at_least=0)
        check_number("end", self.end, at_least=0)

    def _between(self, share: float) -> float:
        """Interpolate: ``end`` at 0, ``start`` at 1."""
        return self.end + (self.start - self.end) * share


class Linear(_FromTo):
    """Linear schedule from ``start`` to ``end``."""

    def __call__(self, progress_remaining: float) -> float:
        return self._between(progress_remaining)


class Cosine(_FromTo):
    """Cosine annealing from ``start`` to ``end``: slow at the beginning and at the end."""

    def __call__(self, progress_remaining: float) -> float:
        return self._between((1 - math.cos(math.pi * progress_remaining)) / 2)


@dataclass(frozen=True)
class Factor:
    """A function of the remaining progress, relative to its base.

    The last rollout may exceed the total number of steps, so that the remaining progress is negative: a schedule then
    keeps its final value. Otherwise a decay would make the learning rate and the clip range negative.
    """

    function: Schedule
    base: float

    def __call__(self, progress_remaining: float) -> float:
        value = float(self.function(min(max(progress_remaining, 0.0), 1.0)))
        # Rounding may leave a decay to 0 slightly below it.
        return max(value, 0.0) / self.base


def base_and_schedule(name: str, value: float | Schedule) -> tuple[float, Factor | None]:
    """Split a number or a schedule, as in Stable-Baselines3, into a base value and a factor.

    The base of a schedule is its largest value: for a decay, its first.
    """
    if not callable(value):
        return value, None
    values = [float(value(i / 100)) for i in range(100, -1, -1)]
    base = max(values)
    if min(values) < -_ROUNDING:
        raise ValueError(
            f"Invalid {name}: the schedule must not be negative, but its smallest value is {min(values):g}"
        )
    # A base of 0 needs no schedule.
    return base, Factor(value, base) if base > 0 else None
