"""Schedules of hyper-parameters that files can hold: from what remains of training, 1 to 0, to a value."""

from __future__ import annotations

import math
from dataclasses import dataclass

from driftproof._arguments import check_number


@dataclass(frozen=True)
class Linear:
    """A straight line.

    Args:
        start: Value at the beginning of training.
        end: Value at its end.
    """

    start: float
    end: float = 0.0

    def __post_init__(self) -> None:
        _check(self.start, self.end)

    def __call__(self, progress_remaining: float) -> float:
        return self.end + (self.start - self.end) * progress_remaining


@dataclass(frozen=True)
class Cosine:
    """Half a wave, which is slow at first and at last.

    Args:
        start: Value at the beginning of training.
        end: Value at its end.
    """

    start: float
    end: float = 0.0

    def __post_init__(self) -> None:
        _check(self.start, self.end)

    def __call__(self, progress_remaining: float) -> float:
        return self.end + (self.start - self.end) * (1 - math.cos(math.pi * progress_remaining)) / 2


def _check(start: float, end: float) -> None:
    check_number("start", start, at_least=0)
    check_number("end", end, at_least=0)
