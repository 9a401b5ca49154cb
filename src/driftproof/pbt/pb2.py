"""PB2: population-based bandits (Parker-Holder et al., arXiv 2002.02518).

A Gaussian process predicts the change of performance over an interval from the time and the hyper-parameters; older
observations count less. The next hyper-parameters maximise the upper confidence bound.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from driftproof._requirements import require
from driftproof.pbt.explore import MAX_OBSERVATIONS, ExploreMethod, History, Observation, from_unit, perturb, to_unit
from driftproof.settings.population import HyperparamConfig, PBTConfig

_CANDIDATES = 512
_NEIGHBOURS = 128
_NEIGHBOURHOOD = 0.1


class PB2(ExploreMethod):
    """Explore method that maximises the upper confidence bound of a Gaussian process, see :func:`propose`.

    Args:
        config: Configuration of the search.

    Raises:
        ImportError: scikit-learn is not installed.
    """

    uses_observations = True

    def __init__(self, config: PBTConfig) -> None:
        super().__init__(config)
        require('explore_method="pb2"', "pbt", "sklearn")

    def explore(self, hyperparams: Mapping[str, Any], history: History, rng: np.random.Generator) -> dict[str, Any]:
        return propose(self.config, hyperparams, history.observations, history.pending, history.time, rng)


def propose(
    config: PBTConfig,
    hyperparams: Mapping[str, Any],
    observations: Sequence[Observation],
    pending: Sequence[Mapping[str, Any]],
    time: float,
    rng: np.random.Generator,
) -> dict[str, Any]:
    """Return the hyper-parameters to try next.

    Hyper-parameters with a list of values are perturbed, and all of them while there are too few observations.

    Args:
        config: Configuration of the search.
        hyperparams: Hyper-parameters of the donor.
        observations: Observations of the whole population, oldest first.
        pending: Hyper-parameters of other members that have not been observed yet; they reduce the model's uncertainty
            near them, so that members do not all try the same.
        time: Current time, in intervals.
        rng: Source of all randomness.

    Returns:
        A mutated copy of ``hyperparams``.
    """
    ranges = [item for item in config.hyperparams if item.values is None]
    observations = observations[-MAX_OBSERVATIONS:]
    known = [item.change for item in observations if item.change is not None]
    if not ranges or len(known) < max(4, 2 * (len(ranges) + 1)):
        return {**hyperparams, **{h.name: perturb(h, hyperparams[h.name], rng) for h in config.hyperparams}}
    proposed = {
        **hyperparams,
        **{h.name: perturb(h, hyperparams[h.name], rng) for h in config.hyperparams if h.values is not None},
    }
    worst = min(known)
    changes = np.array([worst if item.change is None else item.change for item in observations])
    points = np.array([[item.time, *_units(ranges, item.hyperparams)] for item in observations])
    unseen = np.array([[time, *_units(ranges, other)] for other in pending]).reshape(-1, points.shape[1])
    candidates = _candidates(ranges, np.array(_units(ranges, hyperparams)), rng)
    at_now = np.column_stack([np.full(len(candidates), time), candidates])
    best = candidates[int(np.argmax(_upper_confidence(points, changes, unseen, at_now)))]
    # Candidates of whole numbers are at exact values already, so that nothing is rounded here.
    proposed.update({h.name: from_unit(h, float(unit)) for h, unit in zip(ranges, best, strict=True)})
    return proposed


def _units(ranges: Sequence[HyperparamConfig], hyperparams: Mapping[str, Any]) -> list[float]:
    return [to_unit(item, hyperparams[item.name]) for item in ranges]


def _candidates(
    ranges: Sequence[HyperparamConfig], donor: np.ndarray[Any, Any], rng: np.random.Generator
) -> np.ndarray[Any, Any]:
    """Points in the unit cube: uniform ones, and some near the donor."""
    wide = rng.random((_CANDIDATES, len(ranges)))
    near = np.clip(donor + _NEIGHBOURHOOD * rng.standard_normal((_NEIGHBOURS, len(ranges))), 0, 1)
    candidates = np.concatenate([wide, near])
    for i, item in enumerate(ranges):
        if item.is_whole:
            candidates[:, i] = [to_unit(item, from_unit(item, unit)) for unit in candidates[:, i]]
    return candidates


def _upper_confidence(
    points: np.ndarray[Any, Any],
    changes: np.ndarray[Any, Any],
    unseen: np.ndarray[Any, Any],
    candidates: np.ndarray[Any, Any],
) -> np.ndarray[Any, Any]:
    """Predicted mean plus a multiple of the standard deviation, the latter as if ``unseen`` had been observed too."""
    from sklearn.exceptions import ConvergenceWarning  # type: ignore[import-untyped]
    from sklearn.gaussian_process import GaussianProcessRegressor  # type: ignore[import-untyped]
    from sklearn.gaussian_process.kernels import ConstantKernel, WhiteKernel  # type: ignore[import-untyped]

    from driftproof.pbt._kernel import TimeVarying

    targets = np.clip((changes - changes.mean()) / (changes.std() or 1.0), -2, 2)
    kernel = ConstantKernel(1.0, (0.05, 20.0)) * TimeVarying() + WhiteKernel(0.1, (1e-3, 1.0))
    model = GaussianProcessRegressor(kernel)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # kernel parameters may reach their bounds
        model.fit(points, targets)
    mean = model.predict(candidates)
    with_pending = GaussianProcessRegressor(model.kernel_, optimizer=None)
    all_points = np.concatenate([points, unseen])
    with_pending.fit(all_points, np.zeros(len(all_points)))  # the deviation does not depend on the targets
    _, deviation = with_pending.predict(candidates, return_std=True)
    noise = model.kernel_.k2.noise_level
    deviation = np.sqrt(np.maximum(deviation**2 - noise, 0))
    # The constants of the authors' implementation.
    return np.asarray(mean + math.sqrt(max(0.2 * math.log(0.4 * len(points)), 0)) * deviation)
