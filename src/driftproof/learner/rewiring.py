"""Finds sensors and actuators that were swapped or inverted.

A linear model of one step of the world, ``Δx ≈ W [1, a, x]``, depends little on the policy that acts. After a change
for the worse, :class:`TransitionModel` looks for the order and signs of the sensors, or of the actions, with which the
model of the world before explains the transitions since. Networks whose input or output weights are reordered alike
can go on as before; whether they do is up to a trial.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from driftproof.nn.types import Rewiring, Wiring
from driftproof.state.schema import Rule, items, number, numbers, table

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

LARGEST = 24
"""Numbers of an observation up to which orders are searched."""
_MEMORY = 20_000
"""Transitions that the model of the world remembers."""
_FEWEST = 1_000
"""Transitions that a model needs, and that the world after a change is judged by if there are as many."""
_PART = 512
"""Transitions that are summed up together, at most: those of a rollout may be from before and after a change."""
_QUANTILE = 0.95
"""Larger changes of a sensor within a step, such as collisions, count as this quantile of them."""
_LEAST_ERROR = 0.01
"""Standard error of the model, at least, relative to the changes of a sensor within a step."""
_LEAST_SPREAD = 0.05
"""Standard deviation of first observations, at least, relative to that of all."""
_CONSTANT = 1e-9
"""Variance of a sensor, relative to its second moment, that is nothing but rounding."""
_LEAST_GAIN = 0.5
"""Improvement of the score that makes an order worth a trial."""
_AS_GOOD, _TRIALS = 2.0, 2
"""So many orders are worth a trial whose scores differ by less than this."""
_AS_LONG, _AS_FAR, _AS_NARROW, _AS_WIDE = 1.33, 0.5, 0.1, 3.0
"""Ratio of lengths of episodes, distance of means in standard deviations, and ratios of variances that are usual: what
is usual has been learned while the policy was worse, too."""
_LARGEST_MOMENT = 1e150


class Starts(NamedTuple):
    """Mean and variance of the first observations of episodes."""

    mean: Array
    variance: Array


class TransitionModel:
    """Linear model of one step of the world, from moments of transitions, and transitions that it does not explain.

    Args:
        sensors: Numbers of an observation.
        wiring: Actions.
    """

    def __init__(self, sensors: int, wiring: Wiring) -> None:
        self.sensors, self.wiring, self.actions = sensors, wiring, wiring.actions
        self._size = 1 + wiring.actions + 2 * sensors
        self.moments, self.count = np.zeros((self._size, self._size)), 0.0
        """Second moments of ``[1, a, x, Δx]``, and transitions that they are averages of."""
        self.recent: list[dict[str, Any]] = []
        """Sums since the world was last as expected, by parts of rollouts."""

    def observe(self, rows: Array, starts: npt.NDArray[np.bool_], actions: Tensor) -> None:
        """Take the transitions of a rollout.

        Args:
            rows: Observations ``[T, N, sensors]``.
            starts: Whether they are the first of an episode ``[T, N]``.
            actions: Actions that followed ``[T, N, ...]``.
        """
        features = self._features(actions)
        with np.errstate(over="ignore", invalid="ignore"):
            change = rows[1:] - rows[:-1]
            followed = np.abs(change[~starts[1:]])
            bound = np.quantile(followed, _QUANTILE, axis=0) if len(followed) else np.zeros(self.sensors)
            bound = np.where(bound > 0, bound, np.inf)
            steps = max(1, _PART // rows.shape[1])
            parts = [
                self._sums(rows[i : i + steps + 1], starts[i : i + steps + 1], features[i : i + steps], bound)
                for i in range(0, len(rows), steps)
            ]
        kept = _FEWEST + sum(sums["count"] for sums in parts)
        self.recent += [sums for sums in parts if sums["count"] and _is_finite(sums)]
        while sum(sums["count"] for sums in self.recent[1:]) >= kept:
            del self.recent[0]

    def _sums(self, rows: Array, starts: npt.NDArray[np.bool_], features: Array, bound: Array) -> dict[str, Any]:
        """Sums of ``len(features)`` steps; ``rows`` has the observations after the last one, too, if there are any."""
        follows, first = ~starts[1:], rows[: len(features)][starts[: len(features)]]
        x, change = rows[:-1][follows], (rows[1:] - rows[:-1])[follows]
        columns = np.ones((len(x), 1)), features[: len(follows)][follows], x, np.clip(change, -bound, bound)
        table = np.concatenate(columns, 1)
        return {
            "moments": table.T @ table,
            "count": float(len(x)),
            "starts": np.stack((first.sum(0), (first**2).sum(0))),
            "episodes": float(len(first)),
        }

    def learn(self) -> None:
        """Take what was observed for the world as expected."""
        for sums in self.recent:
            self.count = min(self.count + sums["count"], _MEMORY)
            weight = min(sums["count"] / self.count, 1.0)
            self.moments = (1 - weight) * self.moments + weight * sums["moments"] / sums["count"]
        self.recent = []

    def rewire(self, found: Rewiring) -> None:
        """Describe the same world with sensors and actions in another order."""
        m, n = self.actions, self.sensors
        order = np.concatenate(([0], 1 + found.actions, 1 + m + found.sensors, 1 + m + n + found.sensors))
        signs = np.concatenate(([1.0], found.action_signs, found.sensor_signs, found.sensor_signs))
        self.moments = self.moments[order][:, order] * signs * signs[:, None]
        self.recent = []

    def restart(self) -> None:
        """Begin anew, in another world."""
        self.moments, self.count, self.recent = np.zeros_like(self.moments), 0.0, []

    @property
    def is_waiting(self) -> bool:
        """Whether the model is known, but too few transitions are that it could be compared with."""
        return self.count >= _FEWEST and sum(sums["count"] for sums in self.recent) < _FEWEST / 2

    def match(self, starts: Starts) -> list[Rewiring]:
        """Orders and signs of sensors, or of actions, with which the model explains the last transitions, best first.

        Empty if none of them is clearly better than those that there are.

        Args:
            starts: First observations in the world before.
        """
        seen, first, episodes = self._last()
        if self.count < _FEWEST or seen is None:
            return []
        with np.errstate(over="ignore", invalid="ignore"):
            score = _Score(self, seen, starts, first if episodes else None)
            unchanged = score.unchanged()
            found = score.search(unchanged, of_sensors=True)
            if self.wiring.can_reorder:
                found += score.search(unchanged, of_sensors=False)
            found.sort(key=lambda each: each[1])
            limit = min(score(unchanged) - _LEAST_GAIN, found[0][1] + _AS_GOOD)
        return [wiring for wiring, value in found if value < limit][:_TRIALS]

    def is_usual(self, length: float) -> bool:
        """Whether the policy lately was where it usually is, for as long: then the world differs in rewards at most.

        Args:
            length: Usual steps of an episode.
        """
        seen, _, episodes = self._last()
        if self.count < _FEWEST or seen is None or not episodes:
            return False
        now = sum(sums["count"] for sums in self.recent) / sum(sums["episodes"] for sums in self.recent)
        where = slice(1 + self.actions, 1 + self.actions + self.sensors)
        with np.errstate(over="ignore", invalid="ignore"):
            (mean, variance), (usual_mean, usual_variance) = (
                (moments[0, where], moments.diagonal()[where] - moments[0, where] ** 2)
                for moments in (seen, self.moments)
            )
            least = _CONSTANT * np.maximum(self.moments.diagonal()[where], 1e-12)
            ratio = (np.maximum(variance, 0) + least) / (np.maximum(usual_variance, 0) + least)
            moved = np.abs(mean - usual_mean) / np.sqrt(np.maximum(usual_variance, least))
        return bool(
            1 / _AS_LONG < now / length < _AS_LONG
            and (moved < _AS_FAR).all()
            and (ratio > _AS_NARROW).all()
            and (ratio < _AS_WIDE).all()
        )

    def misfit(self, state: Mapping[str, Any], starts: Starts) -> float:
        """How badly the model of another world explains the last transitions; infinite if that is not known.

        Args:
            state: State of that model.
            starts: First observations in that world.
        """
        other = TransitionModel(self.sensors, self.wiring)
        other.load_state_dict(state)
        seen, first, episodes = self._last()
        if other.count < _FEWEST or seen is None:
            return float("inf")
        with np.errstate(over="ignore", invalid="ignore"):
            score = _Score(other, seen, starts, first if episodes else None)
            value = score(score.unchanged())
        return value if np.isfinite(value) else float("inf")

    def _last(self) -> tuple[Array | None, Array, float]:
        """Moments of the last transitions, moments of first observations, and number of episodes."""
        moments, starts = np.zeros_like(self.moments), np.zeros((2, self.sensors))
        count = episodes = 0.0
        for sums in reversed(self.recent):
            moments, starts = moments + sums["moments"], starts + sums["starts"]
            count, episodes = count + sums["count"], episodes + sums["episodes"]
            if count >= _FEWEST:
                break
        return (moments / count if count >= _FEWEST / 2 else None), starts / max(episodes, 1.0), episodes

    def _features(self, actions: Tensor) -> Array:
        """Actions ``[T, N, actions]``; numbered ones as indicators."""
        if self.wiring.is_discrete:
            actions = torch.nn.functional.one_hot(actions.long(), self.actions)
        features: Array = actions.flatten(2).double().cpu().numpy()
        return features

    def state_dict(self) -> dict[str, Any]:
        """Moments of the world as expected, and of what was observed since."""
        recent = [{name: _saved(value) for name, value in sums.items()} for sums in self.recent]
        return {"moments": _saved(self.moments), "count": self.count, "recent": recent}

    def rule(self) -> Rule:
        """Schema of :meth:`state_dict`."""
        bounds: dict[str, Any] = {"at_least": -_LARGEST_MOMENT, "at_most": _LARGEST_MOMENT}
        moments = numbers((self._size, self._size), [torch.float64], **bounds)
        amount = number(at_least=0, at_most=_LARGEST_MOMENT)
        sums = {
            "moments": moments,
            "count": number(above=0, at_most=_LARGEST_MOMENT),
            "starts": numbers((2, self.sensors), [torch.float64], **bounds),
            "episodes": amount,
        }
        return table({"moments": moments, "count": amount, "recent": items(table(sums))})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a checked state."""
        self.moments, self.count = _loaded(state["moments"]), float(state["count"])
        self.recent = [{name: _loaded(value) for name, value in sums.items()} for sums in state["recent"]]


class _Score:
    """How badly the former model explains what was seen, by order and signs: the smaller, the better."""

    def __init__(self, model: TransitionModel, seen: Array, starts: Starts, first: Array | None) -> None:
        self.sensors, self.actions, self.has_signs = model.sensors, model.actions, not model.wiring.is_discrete
        n, known = self.sensors, 1 + self.actions + self.sensors
        moments = model.moments
        square = np.maximum(moments.diagonal()[known - n : known], 0)
        variance = square - moments[0, known - n : known] ** 2
        # Of sensors that are constant, but for rounding, the size, so that equations remain well-conditioned.
        self.scale = np.sqrt(np.where(variance > _CONSTANT * square, variance, square)) + 1e-12
        unit = np.concatenate((np.ones(known - n), self.scale, self.scale))
        moments = moments / unit / unit[:, None]
        inputs, changes = moments[:known, :known], moments[known:, known:]
        self.weights = np.linalg.lstsq(inputs + 1e-6 * np.eye(known), moments[:known, known:], rcond=None)[0].T
        error = changes.diagonal() - 2 * (self.weights * moments[known:, :known]).sum(1)
        error = error + np.einsum("ij,jk,ik->i", self.weights, inputs, self.weights)
        self.error = np.maximum(error, _LEAST_ERROR**2 * changes.diagonal() + 1e-12)
        self.seen, self.first = seen, first
        self.starts = Starts(starts.mean / self.scale, starts.variance / self.scale**2 + _LEAST_SPREAD**2)

    def unchanged(self) -> Rewiring:
        n, m = self.sensors, self.actions
        return Rewiring(np.arange(n), np.ones(n), np.arange(m), np.ones(m))

    def __call__(self, wiring: Rewiring) -> float:
        return float(self._of(_repeated(wiring, 1))[0])

    def search(self, unchanged: Rewiring, *, of_sensors: bool) -> list[tuple[Rewiring, float]]:
        """Orders that no exchange of two and no inversion of one improves, from this one and from random ones."""
        count = self.sensors if of_sensors else self.actions
        signs = of_sensors or self.has_signs
        rng = np.random.default_rng(0)
        moves, flips = _moves(count, signs)
        begins = [(np.arange(count), np.ones(count))]
        for _ in range(24 if count <= 8 else 8 if count <= 16 else 4):
            begins.append((rng.permutation(count), rng.choice([-1.0, 1.0], count) if signs else np.ones(count)))

        def replaced(wiring: Rewiring, order: Indices, sign: Array) -> Rewiring:
            if of_sensors:
                return wiring._replace(sensors=order, sensor_signs=sign)
            return wiring._replace(actions=order, action_signs=sign)

        others = _repeated(unchanged, len(moves))
        found: dict[bytes, tuple[Rewiring, float]] = {}
        for order, sign in begins:
            value = self(replaced(unchanged, order, sign))
            while True:
                values = self._of(replaced(others, order[moves], sign[moves] * flips))
                if not (values < value - 1e-9).any():
                    break
                best = values.argmin()
                order, sign, value = order[moves[best]], sign[moves[best]] * flips[best], float(values[best])
            found[order.tobytes() + sign.tobytes()] = replaced(unchanged, order, sign), value
        return list(found.values())

    def _of(self, wirings: Rewiring) -> Array:
        """Scores of a stack of wirings."""
        m, known = self.actions, 1 + self.actions + self.sensors
        # By former sensor: the present one that measures it.
        where = np.argsort(wirings.sensors, axis=1)
        gains = np.take_along_axis(wirings.sensor_signs, where, 1) / self.scale
        of_sensors = wirings.sensor_signs / self.scale[wirings.sensors]
        weights = np.empty((len(where), self.sensors, known))
        weights[:, :, 0] = self.weights[:, 0]
        weights[:, :, 1 : 1 + m] = (
            self.weights[:, 1 : 1 + m].T[wirings.actions].swapaxes(1, 2) * wirings.action_signs[:, None]
        )
        weights[:, :, 1 + m :] = self.weights[:, 1 + m :].T[wirings.sensors].swapaxes(1, 2) * of_sensors[:, None]
        inputs, changes = self.seen[:known, :known], self.seen[known:]
        error = gains**2 * changes[:, known:].diagonal()[where]
        products = (weights.reshape(-1, known) @ inputs).reshape(weights.shape)
        error = error + np.einsum("kij,kij->ki", products, weights)
        error = error - 2 * gains * np.einsum("kij,kij->ki", changes[:, :known][where], weights)
        score: Array = np.log1p(np.maximum(error, 0) / self.error).sum(-1)
        if self.first is not None:
            mean, square = self.first
            distance = gains**2 * square[where] - 2 * gains * mean[where] * self.starts.mean + self.starts.mean**2
            score = score + np.log1p(np.maximum(distance, 0) / self.starts.variance).sum(-1)
        return score


def _is_finite(sums: Mapping[str, Any]) -> bool:
    return all(np.isfinite(value).all() and np.abs(value).max(initial=0) < _LARGEST_MOMENT for value in sums.values())


def _moves(count: int, signs: bool) -> tuple[Indices, Array]:
    """Inversions of one, and exchanges of two with or without inversions: indices and signs ``[moves, count]``."""
    moves, flips = [], []
    for flip in 1 - 2 * np.eye(count) if signs else ():
        moves.append(np.arange(count))
        flips.append(flip)
    for i, j in combinations(range(count), 2):
        exchanged = np.arange(count)
        exchanged[[i, j]] = j, i
        for pair in ((1, 1), (1, -1), (-1, 1), (-1, -1)) if signs else ((1, 1),):
            flip = np.ones(count)
            flip[[i, j]] = pair
            moves.append(exchanged)
            flips.append(flip)
    return np.array(moves, np.int64).reshape(-1, count), np.array(flips).reshape(-1, count)


def _repeated(wiring: Rewiring, count: int) -> Rewiring:
    """A stack of equal wirings."""
    parts: list[Any] = [np.broadcast_to(part, (count, len(part))) for part in wiring]
    return Rewiring(*parts)


def _saved(value: Any) -> Any:
    return torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value


def _loaded(value: Any) -> Any:
    return value.double().cpu().numpy().copy() if isinstance(value, Tensor) else float(value)
