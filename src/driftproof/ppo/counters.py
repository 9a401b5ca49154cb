"""Counters of training, as a component of the agent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from driftproof.learner.learner import Learner
from driftproof.state.schema import check, count, number, table

_MOST_OVERRUN = 1e9
_COUNTS = ("num_timesteps", "total_timesteps", "n_updates", "episode_num")


class Counters:
    """Steps, updates and progress of training; the agent has them as attributes with Stable-Baselines3's names."""

    learner: Learner
    """Learner, which counts consecutive skipped minibatches."""

    def __init__(self) -> None:
        self.num_timesteps = self.total_timesteps = self.n_updates = self.episode_num = 0
        self.progress_remaining = 1.0

    def state_dict(self) -> dict[str, Any]:
        """All counters."""
        state: dict[str, Any] = {name: int(getattr(self, name)) for name in _COUNTS}
        state["progress_remaining"] = float(self.progress_remaining)
        state["skipped_in_a_row"] = self.learner.skipped_in_a_row
        return state

    def check_state_dict(self, state_dict: Any) -> None:
        """Raise a ``CheckpointError`` unless these are valid counters."""
        rules = {name: count() for name in (*_COUNTS, "skipped_in_a_row")}
        # Below 0 if the last rollout went beyond the planned total.
        rules["progress_remaining"] = number(at_least=-_MOST_OVERRUN, at_most=1)
        check("counters", state_dict, table(rules))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore all counters."""
        self.check_state_dict(state_dict)
        for name in _COUNTS:
            setattr(self, name, int(state_dict[name]))
        self.progress_remaining = float(state_dict["progress_remaining"])
        self.learner.skipped_in_a_row = int(state_dict["skipped_in_a_row"])
