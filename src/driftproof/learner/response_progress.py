"""Where the response to a drift alarm stands: a part of the agent's state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from driftproof.learner.episode_returns import LARGEST_RETURN, Look
from driftproof.state.schema import Rule, count, flag, items, number, optional


@dataclass
class Progress:
    """Where a response stands.

    Attributes:
        level: 0: none; 1: statistics restarted; 2: last layers moved halfway to fresh ones; 3: all weights fresh.
        before: Typical return before the alarm, or before rewards changed.
        floor: What it is compared with: the return of an untrained policy, or, if that was not lower, after the alarm;
            the present return if only rewards have changed.
        untrained: Return of an untrained policy, if it was lower than before the alarm.
        previous: Mean return of the previous window.
        window: Mean returns of rollouts since then.
        waited: Updates since then.
        stuck: Windows in a row without improvement.
        exploration: Share of the additional exploration that has not faded yet.
        checking: Whether it is still to be found out whether the world has changed at all.
        matched: Whether reordered weights have been tried since the suspicion.
        of_rewards: Whether only rewards have changed: no weights are replaced if none of those on trial is better.
        trial: Index of the archived weights that are being tried; ``None``: none.
        steps: Steps of the trial in every environment.
        seen: What was seen in the trial.
        trials: Index behind the last archived weights to try.
        rewired: How many of the first ones to try are the last good weights with sensors or actions reordered.
        earlier: How many of those behind them are not archived, but kept in case that weights are spoiled.
    """

    level: int = 0
    before: float = 0.0
    floor: float = 0.0
    untrained: float | None = None
    previous: float = 0.0
    window: list[float] = field(default_factory=list)
    waited: float = 0.0
    stuck: int = 0
    exploration: float = 0.0
    checking: bool = False
    matched: bool = False
    of_rewards: bool = False
    trial: int | None = None
    steps: int = 0
    seen: Look = field(default_factory=Look)
    trials: int = 0
    rewired: int = 0
    earlier: int = 0

    def state_dict(self) -> dict[str, Any]:
        """All of it as plain values."""
        return asdict(self)

    @staticmethod
    def of(state_dict: Mapping[str, Any]) -> Progress:
        """Where a saved response stood."""
        return Progress(**{**state_dict, "seen": Look(**state_dict["seen"])})

    @staticmethod
    def rules() -> dict[str, Rule]:
        """What is valid in :meth:`state_dict`."""
        value = number(at_least=-LARGEST_RETURN, at_most=LARGEST_RETURN)
        return {
            "level": count(at_most=3),
            "before": value,
            "floor": value,
            "untrained": optional(value),
            "previous": value,
            "window": items(value),
            "waited": number(at_least=0, at_most=LARGEST_RETURN),
            "stuck": count(),
            "exploration": number(at_least=0, at_most=1),
            "checking": flag,
            "matched": flag,
            "of_rewards": flag,
            "trial": optional(count()),
            "steps": count(),
            "seen": Look.rule(),
            "trials": count(),
            "rewired": count(),
            "earlier": count(),
        }
