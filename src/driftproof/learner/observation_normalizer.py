"""Normalisation of observations whose sensors drift.

Running statistics that never forget do not follow a changing environment, and those that forget follow the wrong
observations: a policy that fails after a shift visits other states, which have another mean. The first observations of
episodes do not depend on the policy. Hence statistics here are anchored on them: when they move, the mean moves along
at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from driftproof.learner.anchored_statistics import FIXED, AnchoredStatistics, Array
from driftproof.learner.rollout import HostObservation
from driftproof.nn.normalization import LIMIT, WHOLE, Moments
from driftproof.state.schema import check, table

_SMALLEST_BATCH = 32
"""Observations that are learned from before a rollout ends, at least."""
_USUAL_STEPS = 128
"""Steps that there is room for in the first rollout; more as they come."""


class ObservationNormalizer:
    """Keeps observations at the scale that they had first, within bounds, when sensors shift or change their gain.

    A component of the agent. Parts of observations that are not floating-point numbers, such as images, stay as they
    are. Statistics change at the start of episodes, when they have shifted, and at the end of rollouts, which hold
    normalised observations.

    Args:
        space: Observation space: has ``shape`` and ``dtype``, or a mapping ``spaces`` of such spaces.
        memory: Steps that mean and scale remember.
    """

    def __init__(self, space: Any, memory: int = 20_000) -> None:
        self._shapes = dict(normalizable(space))
        self.statistics = {key: AnchoredStatistics(math.prod(shape), memory) for key, shape in self._shapes.items()}
        self._usual_steps = _USUAL_STEPS
        """Steps of the last rollout."""
        self._vectors: dict[str, tuple[Array, Array] | None] | None = None
        self._moments: dict[str, Moments] | None = None
        self.begin()
        self._refresh()

    @property
    def moments(self) -> Mapping[str, Moments]:
        """What to subtract from observations, and what to divide them by, by key."""
        if self._moments is None:
            self._moments = {
                key: Moments(*(torch.from_numpy(each.reshape(self._shapes[key])) for each in part.moments))
                for key, part in self.statistics.items()
            }
        return self._moments

    def _arrays(self) -> dict[str, tuple[Array, Array] | None]:
        """:attr:`moments` as vectors ``[size]``; ``None``: observations stay as they are."""
        if self._vectors is None:
            moments = {key: part.moments for key, part in self.statistics.items()}
            self._vectors = {
                key: (mean, std) if mean.any() or (std != 1).any() else None for key, (mean, std) in moments.items()
            }
        return self._vectors

    def begin(self) -> None:
        """Begin a rollout."""
        self._steps = 0
        """Steps so far."""
        self._rows: dict[str, Array] = {}
        """Observations of these steps ``[capacity, N, size]``, before they are normalised."""
        self._starts = np.empty((0, 0), bool)
        """Which of them are the first of an episode ``[capacity, N]``."""
        self._learned = 0
        """How many of these steps the statistics know."""
        self._pending = 0
        """Observations in the others."""

    def _make_room(self, envs: int) -> None:
        """Make room for more steps; the first time, for as many as the last rollout had."""
        steps, size = self._steps, max(2 * self._steps, self._usual_steps)
        before, starts = self._rows, self._starts
        self._rows = {key: np.empty((size, envs, part.size)) for key, part in self.statistics.items()}
        self._starts = np.empty((size, envs), bool)
        if steps:
            for key, rows in self._rows.items():
                rows[:steps] = before[key][:steps]
            self._starts[:steps] = starts[:steps]

    @property
    def sensors(self) -> AnchoredStatistics | None:
        """Statistics of observations that are one array; ``None``: they are a dict, or no floating-point numbers."""
        return self.statistics.get(WHOLE)

    def recorded(self, steps: int, key: str = WHOLE) -> tuple[Array, npt.NDArray[np.bool_]] | None:
        """Observations of the rollout ``[T, N, *shape]`` before they were normalised, and which are first ``[T, N]``.

        ``None`` if they are not those of so many steps, as a state was loaded meanwhile, or are not normalised.
        """
        if self._steps != steps or key not in self._shapes:
            return None
        starts = self._starts[:steps]
        return self._rows[key][:steps].reshape(*starts.shape, *self._shapes[key]), starts

    def take(self, observation: HostObservation, starts: npt.NDArray[np.bool_]) -> HostObservation:
        """:meth:`observe` observations; returns them normalised, in single precision.

        The same numbers as with :attr:`moments`, at less overhead for the few numbers of a step.
        """
        rows = self.observe(observation, starts)
        result: dict[str, npt.NDArray[Any]] = {}
        for key, moments in self._arrays().items():
            part = rows[key]
            if moments is not None:
                part = part - moments[0]
                part /= moments[1]
            part = np.maximum(part, -LIMIT)
            np.minimum(part, LIMIT, out=part)
            result[key] = part.astype(np.float32).reshape(-1, *self._shapes[key])
        if isinstance(observation, dict):
            return {**observation, **result}
        return result.get(WHOLE, observation)

    def observe(self, observation: HostObservation, starts: npt.NDArray[np.bool_]) -> dict[str, Array]:
        """Learn from observations, before they are normalised; returns them as rows ``[N, size]``, by key.

        Args:
            observation: Observation of every environment ``[N, ...]``.
            starts: Whether it is the first of an episode ``[N]``.
        """
        if self._steps and len(starts) != self._starts.shape[1]:
            self.learn()  # Evaluations drop environments that have played their episodes.
            self.begin()
        step = self._steps
        if step == len(self._starts):
            self._make_room(len(starts))
        rows = {key: stored[step] for key, stored in self._rows.items()}
        for key, row in rows.items():
            part = observation[key] if isinstance(observation, dict) else observation
            row[:] = part if part.ndim == 2 else part.reshape(row.shape)
        self._starts[step] = starts
        if True in starts.tolist():  # Faster than NumPy for a few numbers.
            self._learn_starts(rows, starts)
        self._steps = step + 1
        self._pending += len(starts)
        # The first observations ever are used soon.
        if self._pending >= self._enough:
            self.learn()
        return rows

    def learn(self) -> None:
        """Update the statistics with all observations since the last call."""
        if not self._pending:
            return
        for key, part in self.statistics.items():
            part.learn(self._rows[key][self._learned : self._steps].reshape(-1, part.size))
        self._learned, self._pending = self._steps, 0
        self._refresh()

    def finish(self) -> None:
        """End a rollout."""
        self.learn()
        self._usual_steps = self._steps or self._usual_steps
        for part in self.statistics.values():
            if part.count >= FIXED:
                part.fix()
        self._refresh()

    def restart(self) -> None:
        """Restart the statistics, for networks with new weights."""
        for part in self.statistics.values():
            part.restart()
        self._refresh()

    def rewire(self, order: npt.NDArray[np.int64], signs: Array) -> None:
        """From now on, sensor ``i`` measures what ``order[i]`` measured, times ``signs[i]``."""
        assert self.sensors is not None
        self.sensors.rewire(order, signs)
        self._refresh()

    def forget(self) -> None:
        """Let new observations count more, after a change of the environment."""
        for part in self.statistics.values():
            part.forget()
        self._refresh()

    def metrics(self) -> dict[str, float]:
        """Shifts of sensors that were found, and those that were undone."""
        parts = self.statistics.values()
        return {
            "drift/anchor_moves": float(sum(part.shifts for part in parts)),
            "drift/anchor_undone": float(sum(part.undone for part in parts)),
        }

    def state_dict(self) -> dict[str, Any]:
        """A copy of the statistics by key."""
        return {key: part.state_dict() for key, part in self.statistics.items()}

    def check_state_dict(self, state_dict: Any) -> None:
        """Raise a ``CheckpointError`` unless this is a state for such observations."""
        check("observations", state_dict, table({key: part.rule() for key, part in self.statistics.items()}))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the statistics.

        Raises:
            CheckpointError: The state does not fit; nothing has changed.
        """
        self.check_state_dict(state_dict)
        for key, part in self.statistics.items():
            part.load_state_dict(state_dict[key])
        self.begin()
        self._refresh()

    def _learn_starts(self, rows: Mapping[str, Array], starts: npt.NDArray[np.bool_]) -> None:
        for key, part in self.statistics.items():
            for start in rows[key][starts]:
                if last := part.has_shifted(start):
                    self.learn()  # Up to here, observations are from before the shift.
                    part.move(last)
                else:
                    part.learn_start(start)
        self._refresh()

    def _refresh(self) -> None:
        """Compute moments anew when they are needed: statistics have changed."""
        counts = (part.count for part in self.statistics.values())
        self._enough = max(_SMALLEST_BATCH, min(counts, default=math.inf))
        """Pending observations that are learned from before the rollout ends."""
        self._vectors = self._moments = None


def normalizable(space: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Keys and shapes of the parts of observations that can be normalised: those of floating-point numbers."""
    parts = getattr(space, "spaces", None)
    for key, part in parts.items() if isinstance(parts, Mapping) else [(WHOLE, space)]:
        if np.issubdtype(part.dtype, np.floating) and part.shape:
            yield key, tuple(part.shape)
