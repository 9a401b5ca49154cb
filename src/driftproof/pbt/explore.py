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
"""Only the latest are kept: fitting a Gaussian process takes cubic time."""


def sample(hyperparam: HyperparamConfig, rng: np.random.Generator) -> Any:
    """Draw a value uniformly, on a logarithmic scale if ``is_log_scale``."""
    if hyperparam.values is not None:
        return hyperparam.values[int(rng.integers(len(hyperparam.values)))]
    return from_unit(hyperparam, float(rng.random()))


def perturb(hyperparam: HyperparamConfig, value: Any, rng: np.random.Generator) -> Any:
    """Multiply or divide by ``perturbation_factor``, clipped to the range; from a list of values, take a neighbour.

    A whole number changes by at least 1; at a bound it moves inwards. 0, and values that are not in the list, cannot be
    perturbed and are resampled.
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
    """Effect of one member's hyper-parameters over one interval."""

    time: float
    """Start of the interval, in intervals."""
    hyperparams: Mapping[str, Any]
    change: float | None
    """Change of performance per interval, higher is better; ``None``: training diverged."""


@dataclass(frozen=True)
class History:
    """Data that an explore method may use.

    Attributes:
        observations: Observations of all members, oldest first; empty unless the method ``uses_observations``.
        pending: Hyper-parameters of other members that have not been observed yet.
        time: Current time, in intervals.
    """

    observations: Sequence[Observation]
    pending: Sequence[Mapping[str, Any]]
    time: float


class ExploreMethod(ABC):
    """How hyper-parameters are mutated after an exploit.

    Args:
        config: Configuration of the search.
    """

    uses_observations: ClassVar[bool] = False
    """Whether the scheduler collects :class:`observations <Observation>` for it, and saves them with the run."""

    def __init__(self, config: PBTConfig) -> None:
        self.config = config

    @abstractmethod
    def explore(self, hyperparams: Mapping[str, Any], history: History, rng: np.random.Generator) -> dict[str, Any]:
        """Return a mutated copy, within the ranges. Hyper-parameters that are not searched stay unchanged.

        Args:
            hyperparams: Hyper-parameters of the donor.
            history: Observations of the population so far.
            rng: Source of all randomness.
        """


class Both(ExploreMethod):
    """Perturbs each hyper-parameter, or resamples it with its ``resample_probability``."""

    def resample_probability(self, item: HyperparamConfig) -> float:
        return item.resample_probability

    def explore(self, hyperparams: Mapping[str, Any], history: History, rng: np.random.Generator) -> dict[str, Any]:
        explored = dict(hyperparams)
        for item in self.config.hyperparams:
            resampled = rng.random() < self.resample_probability(item)
            explored[item.name] = sample(item, rng) if resampled else perturb(item, explored[item.name], rng)
        return explored


class Perturb(Both):
    """Perturbs each hyper-parameter."""

    def resample_probability(self, item: HyperparamConfig) -> float:
        return 0.0


class Resample(Both):
    """Resamples each hyper-parameter."""

    def resample_probability(self, item: HyperparamConfig) -> float:
        return 1.0


def to_unit(hyperparam: HyperparamConfig, value: float) -> float:
    """Position of a value in its range, from 0 to 1, on a linear or logarithmic scale."""
    low, high = _scaled_bounds(hyperparam)
    shifted = value + 0.5 if hyperparam.is_whole else value
    scaled = math.log(shifted) if hyperparam.is_log_scale else shifted
    return min(max((scaled - low) / (high - low), 0.0), 1.0)


def from_unit(hyperparam: HyperparamConfig, unit: float) -> float:
    """Inverse of :func:`to_unit`; whole numbers have equal shares of a linear scale."""
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
