"""Returns of the episodes that end in rollouts, and what was seen in some rollouts: evidence for the drift alarm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from driftproof.learner.rollout import Rollout
from driftproof.state.schema import Rule, count, number, numbers, table

FEW_EPISODES = 4
"""Fewer completed episodes are weak evidence."""
LOOK = 800
"""Steps, together with ``FEW_EPISODES``, that shorter rollouts are put together for."""
LARGEST_RETURN = 1e18
"""Larger returns count as this much: squares of sums of them must be finite."""


class EpisodeReturns:
    """Returns of the episodes that end in a rollout, with running sums for those that go on.

    The sums belong to the environments, not to what has been learned: whoever owns the environments saves them.
    """

    def __init__(self) -> None:
        self._running: npt.NDArray[np.float64] = np.zeros(0)
        self._recent: npt.NDArray[np.float64] = np.zeros(0)
        """What running episodes have returned since the weights were replaced."""
        self._counts: npt.NDArray[np.bool_] = np.zeros(0, bool)
        """Whether the running episode of an environment counts: not if other weights began it."""
        self._between: npt.NDArray[np.bool_] = np.zeros(0, bool)
        """Environments whose last episode ended with the rollout."""

    def of(self, rollout: Rollout) -> npt.NDArray[np.float64]:
        """Returns of the completed episodes."""
        if len(self._running) != rollout.envs:
            self._running, self._counts = np.zeros(rollout.envs), rollout.starts[0].copy()
            self._recent = np.zeros(rollout.envs)
        # Where the environments were reset.
        self._running[rollout.starts[0]] = self._recent[rollout.starts[0]] = 0
        self._counts[rollout.starts[0]] = True
        sums = np.where(rollout.valid, rollout.rewards, 0).cumsum(0, dtype=np.float64) + self._running
        envs, steps = np.nonzero((rollout.dones & rollout.valid).T)
        ends = sums[steps, envs]
        is_first = np.diff(envs, prepend=-1) != 0
        returns = ends - np.where(is_first, 0, np.concatenate(([0.0], ends))[:-1])
        counted: npt.NDArray[np.float64] = returns[~is_first | self._counts[envs]]
        is_last = np.diff(envs, append=-1) != 0
        running = sums[-1].copy()
        running[envs[is_last]] -= ends[is_last]
        recent = self._recent + sums[-1] - self._running
        recent[envs] = running[envs]
        self._running, self._recent = bounded(running), bounded(recent)
        self._counts[envs] = True
        self._between = rollout.dones[-1].copy()
        return counted

    def weights_were_replaced(self) -> None:
        """Do not count the running episodes, which other weights began."""
        self._counts = self._counts & self._between
        self._recent = np.zeros_like(self._recent)

    @property
    def recent(self) -> npt.NDArray[np.float64]:
        """What the running episode of each environment has returned since the weights were replaced."""
        return self._recent

    def state_dict(self) -> dict[str, Any]:
        """Running sums, and which of them count."""
        parts = {"running": self._running, "recent": self._recent, "counts": self._counts}
        return {name: torch.from_numpy(part.copy()) for name, part in parts.items()}

    @staticmethod
    def rule(envs: int) -> Rule:
        """Schema of :meth:`state_dict`: of so many environments, or of none before the first update."""

        def check_sums(value: Any, path: tuple[Any, ...]) -> None:
            table(dict.fromkeys(("running", "recent", "counts"), numbers((None,), [torch.float64, torch.bool])))(
                value, path
            )
            size = envs if len(value["counts"]) else 0
            sums = numbers((size,), [torch.float64], at_least=-LARGEST_RETURN, at_most=LARGEST_RETURN)
            table({"running": sums, "recent": sums, "counts": numbers((size,), [torch.bool])})(value, path)

        return check_sums

    def load_state_dict(self, state_dict: Mapping[str, Any], starts: npt.NDArray[np.bool_]) -> None:
        """Restore the running sums.

        Args:
            state_dict: A checked state.
            starts: Whether the next observation of an environment is the first of an episode ``[N]``.
        """
        self._running, self._recent, self._counts = (
            torch.as_tensor(state_dict[name]).cpu().numpy().copy() for name in ("running", "recent", "counts")
        )
        self._between = starts.copy() if len(self._counts) else np.zeros(0, bool)


@dataclass
class Look:
    """What was seen in some rollouts.

    Attributes:
        steps: Transitions.
        calibration: Sum of their calibrations.
        episodes: Completed episodes.
        returns: Sum of their returns.
    """

    steps: int = 0
    calibration: float = 0.0
    episodes: int = 0
    returns: float = 0.0

    @property
    def mean_return(self) -> float | None:
        return self.returns / self.episodes if self.episodes else None

    @property
    def is_enough(self) -> bool:
        return self.episodes >= FEW_EPISODES or self.steps >= LOOK

    def add(self, rollout: Rollout, returns: npt.NDArray[np.float64], calibration: float = 0.0) -> None:
        """Take a rollout, the returns of the episodes completed in it, and its calibration."""
        steps = int(rollout.valid.sum())
        self.steps, self.calibration = self.steps + steps, self.calibration + calibration * steps
        self.episodes, self.returns = self.episodes + len(returns), self.returns + float(returns.sum())

    @staticmethod
    def rule() -> Rule:
        """Schema of the numbers."""
        return table(
            {
                "steps": count(),
                "calibration": number(at_least=0, at_most=LARGEST_RETURN),
                "episodes": count(),
                "returns": number(at_least=-(LARGEST_RETURN**2), at_most=LARGEST_RETURN**2),
            }
        )


def bounded(returns: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Returns within bounds."""
    return np.clip(returns, -LARGEST_RETURN, LARGEST_RETURN)


def expected_return(seen: Look, running: npt.NDArray[np.float64], has_time: bool) -> float | None:
    """Mean return of the episodes in a trial, which is often too short for them to end; ``None``: not known yet.

    Those that end within a short time are the short ones. What the running ones have returned is shared out among them,
    which is unbiased if an episode is as likely to end at one step as at any other.

    Args:
        seen: The completed episodes.
        running: What the running ones have returned in the trial.
        has_time: Whether the trial goes on if none has ended.
    """
    if seen.episodes:
        return (seen.returns + float(running.sum())) / seen.episodes
    return None if has_time else float(running.mean())
