"""Drawing and mutating hyper-parameters. All randomness comes from the generator that is passed in."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from driftproof.pbt.config import HyperparamConfig, PBTConfig


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


def explore(config: PBTConfig, hyperparams: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """A mutated copy. Hyper-parameters that are not searched stay as they are."""
    explored = dict(hyperparams)
    for item in config.hyperparams:
        probability = {"perturb": 0.0, "both": item.resample_probability, "resample": 1.0}[config.explore_method]
        resampled = rng.random() < probability
        explored[item.name] = sample(item, rng) if resampled else perturb(item, explored[item.name], rng)
    return explored


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
