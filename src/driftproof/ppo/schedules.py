"""Schedules of hyper-parameters that files can hold: from what remains of training, 1 to 0, to a value."""

from __future__ import annotations

import math
from dataclasses import dataclass

from driftproof._arguments import check_number


@dataclass(frozen=True)
class _FromTo:
    """From a value to another.

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
        """``end`` at 0, ``start`` at 1."""
        return self.end + (self.start - self.end) * share


class Linear(_FromTo):
    """A straight line from ``start`` to ``end``."""

    def __call__(self, progress_remaining: float) -> float:
        return self._between(progress_remaining)


class Cosine(_FromTo):
    """Half a wave from ``start`` to ``end``, slow at first and at last."""

    def __call__(self, progress_remaining: float) -> float:
        return self._between((1 - math.cos(math.pi * progress_remaining)) / 2)
