"""The rewards that a world usually gives: others tell of another world, also if they return more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from driftproof.learner.episode_returns import LARGEST_RETURN
from driftproof.learner.rollout import Rollout
from driftproof.state.schema import Rule, number, optional, table

Span = tuple[float, float]
"""The smallest and the largest reward of a rollout."""
_MEMORY = 10
"""Updates that are averaged."""
_ALIKE = 2.0
"""How much the change of the largest reward may differ from that of returns, if only the scale has changed."""
_GAP = 0.5
"""Distance of other rewards from the usual ones, at least, as a share of the largest of both."""


def span_of(rollout: Rollout) -> Span | None:
    """The smallest and the largest reward; ``None`` if there is none, or one that is no number."""
    rewards = np.clip(rollout.rewards[rollout.valid], -LARGEST_RETURN, LARGEST_RETURN)
    return None if not rewards.size or np.isnan(rewards).any() else (float(rewards.min()), float(rewards.max()))


@dataclass
class UsualRewards:
    """Averages of the smallest and the largest reward of rollouts; ``None`` before the first."""

    low: float | None = None
    high: float | None = None

    def observe(self, span: Span | None) -> None:
        """Take the rewards of a rollout in the present world."""
        if span is None:
            return
        if self.low is None or self.high is None or self.are_others(span):
            self.low, self.high = span
            return
        self.low += (span[0] - self.low) / _MEMORY
        self.high += (span[1] - self.high) / _MEMORY

    def are_others(self, span: Span | None) -> bool:
        """Whether all rewards of a rollout are far from the usual ones: another sign, say, or another scale."""
        if span is None or self.low is None or self.high is None:
            return False
        gap = max(span[0] - self.high, self.low - span[1])
        width = max(span[1] - span[0], self.high - self.low)
        return gap > width and gap >= _GAP * max(map(abs, (*span, self.low, self.high)))

    def have_scaled(self, span: Span | None, before: float, after: float) -> bool:
        """Whether the largest reward has changed about as much as returns have, from ``before`` to ``after``.

        Mistakes cost returns, too, but do not change the largest reward alike.
        """
        if span is None or self.low is None or self.high is None or before * after <= 0:
            return False
        ratio, expected = _size(*span) * abs(before), _size(self.low, self.high) * abs(after)
        return expected < _ALIKE * ratio < _ALIKE**2 * expected

    def state_dict(self) -> dict[str, Any]:
        """The averages."""
        return asdict(self)

    @staticmethod
    def rule() -> Rule:
        """Schema of :meth:`state_dict`."""
        value = optional(number(at_least=-LARGEST_RETURN, at_most=LARGEST_RETURN))
        return table({"low": value, "high": value})

    @staticmethod
    def of(state_dict: Mapping[str, Any]) -> UsualRewards:
        """The averages of a checked state."""
        return UsualRewards(**state_dict)


def _size(low: float, high: float) -> float:
    return max(abs(low), abs(high))
