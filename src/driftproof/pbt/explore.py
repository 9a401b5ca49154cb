"""Drawing and mutating hyper-parameters. All randomness comes from the generator that is passed in.

A new explore method is a subclass of :class:`ExploreMethod`, and a line in :mod:`driftproof._registry`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from driftproof.settings.population import HyperparamConfig, PBTConfig

MAX_OBSERVATIONS = 200
"""The latest that are kept: fitting a model takes time with their cube."""


def sample(hyperparam: HyperparamConfig, rng: np.random.Generator) -> Any:
    """Draw a value, on a logarithmic scale where that was asked for."""
    if hyperparam.values is not None:
        return hyperparam.values[int(rng.integers(len(hyperparam.values)))]
    return from_unit(hyperparam, float(rng.random()))


def perturb(hyperparam: HyperparamConfig, value: Any, rng: np.random.Generator) -> Any:
    """Multiply or divide by the factor, within the range; of values to choose from, take a neighbour.

    A whole number moves by 1 at least, away from an end of its range if it stands there. What cannot be perturbed, 0
    and values that are not among those to choose from, is drawn anew.
    """
    up = bool(rng.integers(2))
    if hyperparam.values is not None:
        return _neighbour(hyperparam.values, value, up, rng)
    if value == 0:
        return sample(hyperparam, rng)
    factor = hyperparam.perturbation_factor
    moved = value * factor if up else value / factor
    if hyperparam.is_whole:
        return _whole(hyperparam, int(value), moved)
    return _clip(hyperparam, moved)


@dataclass(frozen=True)
class Observation:
    """What one member's hyper-parameters did in one interval."""

    time: float
    """When it began, in intervals."""
    hyperparams: Mapping[str, Any]
    change: float | None
    """Of performance per interval, more is better; ``None``: training diverged."""


@dataclass(frozen=True)
class History:
    """What is known of a population when hyper-parameters are explored.

    Attributes:
        observations: Of all members, in the order of time; empty unless the method ``uses_observations``.
        pending: Hyper-parameters of other members of which nothing is known yet.
        time: Now, in intervals.
    """

    observations: Sequence[Observation]
    pending: Sequence[Mapping[str, Any]]
    time: float


class ExploreMethod(ABC):
    """What happens to hyper-parameters that a member takes over.

    Args:
        config: The search.
    """

    uses_observations: ClassVar[bool] = False
    """Whether to keep :class:`observations <Observation>` for it, also in the files of a run."""

    def __init__(self, config: PBTConfig) -> None:
        self.config = config

    @abstractmethod
    def explore(self, hyperparams: Mapping[str, Any], history: History, rng: np.random.Generator) -> dict[str, Any]:
        """A mutated copy, within the ranges. Hyper-parameters that are not searched stay as they are.

        Args:
            hyperparams: Of the donor.
            history: What is known of the population.
            rng: Source of all randomness.
        """


class Both(ExploreMethod):
    """Each hyper-parameter is perturbed, or drawn anew with its ``resample_probability``."""

    def resample_probability(self, item: HyperparamConfig) -> float:
        return item.resample_probability

    def explore(self, hyperparams: Mapping[str, Any], history: History, rng: np.random.Generator) -> dict[str, Any]:
        explored = dict(hyperparams)
        for item in self.config.hyperparams:
            resampled = rng.random() < self.resample_probability(item)
            explored[item.name] = sample(item, rng) if resampled else perturb(item, explored[item.name], rng)
        return explored


class Perturb(Both):
    """Each hyper-parameter is perturbed."""

    def resample_probability(self, item: HyperparamConfig) -> float:
        return 0.0


class Resample(Both):
    """Each hyper-parameter is drawn anew."""

    def resample_probability(self, item: HyperparamConfig) -> float:
        return 1.0


def to_unit(hyperparam: HyperparamConfig, value: float) -> float:
    """Where a value stands in its range, 0 to 1, on its scale."""
    low, high = _scaled_bounds(hyperparam)
    shifted = value + 0.5 if hyperparam.is_whole else value
    scaled = math.log(shifted) if hyperparam.is_log_scale else shifted
    return min(max((scaled - low) / (high - low), 0.0), 1.0)


def from_unit(hyperparam: HyperparamConfig, unit: float) -> float:
    """The inverse of :func:`to_unit`; whole numbers have equal shares of the scale."""
    low, high = _scaled_bounds(hyperparam)
    scaled = low + unit * (high - low)
    value = math.exp(scaled) if hyperparam.is_log_scale else scaled
    return _clip(hyperparam, math.floor(value) if hyperparam.is_whole else value)


def _scaled_bounds(hyperparam: HyperparamConfig) -> tuple[float, float]:
    low, high = hyperparam.bounds
    if hyperparam.is_whole:
        high += 1
    return (math.log(low), math.log(high)) if hyperparam.is_log_scale else (low, high)


def _clip(hyperparam: HyperparamConfig, value: float) -> float:
    low, high = hyperparam.bounds
    return min(max(value, low), high)


def _whole(hyperparam: HyperparamConfig, value: int, moved: float) -> float:
    step = 1 if moved > value else -1
    rounded = round(moved)
    result = _clip(hyperparam, rounded if rounded != value else value + step)
    return result if result != value else _clip(hyperparam, value - step)


def _neighbour(values: Sequence[Any], value: Any, up: bool, rng: np.random.Generator) -> Any:
    if value not in values:
        return values[int(rng.integers(len(values)))]
    index = values.index(value)
    if index == 0:
        return values[1]
    if index == len(values) - 1:
        return values[-2]
    return values[index + 1 if up else index - 1]
