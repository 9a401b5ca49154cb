"""Checks a population's search space against the agent that it is for."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

from driftproof._text import did_you_mean
from driftproof.settings.population import HyperparamConfig, PBTConfig

if TYPE_CHECKING:
    from driftproof.ppo import Hyperparameters

_EARLIER = {
    "lr": "learning_rate",
    "entropy_coef": "ent_coef",
    "ent_coef_initial": "ent_coef",
    "adversarial_epsilon": "adversary.epsilon",
}
"""Names of hyper-parameters in the earlier system, and their names here."""


def check_against(
    config: PBTConfig,
    hyperparams: Hyperparameters,
    *,
    vgs_warmup_steps: int | None = None,
    steps_per_interval: int | None = None,
    lower_bounds: Mapping[str, float] | None = None,
) -> PBTConfig:
    """Check at the start what the agent would refuse, or silently clip, during training.

    Args:
        config: Configuration of the search.
        hyperparams: Hyper-parameters of the agent.
        vgs_warmup_steps: Warm-up of variance gradient scaling in optimizer steps. ``None``: from ``hyperparams``.
        steps_per_interval: Optimizer steps of a member per perturbation interval, if known.
        lower_bounds: By name, the value below which the agent clips a hyper-parameter.

    Returns:
        The configuration, with ``is_whole`` set as the agent has the hyper-parameter: ``int`` or ``float``.

    Raises:
        ValueError: A name is unknown or cannot change while training, or the agent would refuse a value.
    """
    checked = [_checked(item, hyperparams, dict(lower_bounds or {})) for item in config.hyperparams]
    config = dataclasses.replace(config, hyperparams=checked)
    if vgs_warmup_steps is None and "vgs.warmup_steps" in hyperparams:
        vgs_warmup_steps = int(hyperparams["vgs.warmup_steps"])
    if vgs_warmup_steps and steps_per_interval is not None and steps_per_interval < vgs_warmup_steps:
        per_update = steps_per_interval / config.perturbation_interval
        warnings.warn(
            f"perturbation_interval={config.perturbation_interval} updates are {steps_per_interval} optimizer steps, "
            f"fewer than the {vgs_warmup_steps} of variance gradient scaling's warm-up: members would be compared "
            "before it has any effect; "
            f"use a perturbation_interval >= {math.ceil(vgs_warmup_steps / per_update)} or a shorter vgs.warmup_steps",
            stacklevel=2,
        )
    return config


def _checked(
    item: HyperparamConfig, hyperparams: Hyperparameters, lower_bounds: Mapping[str, float]
) -> HyperparamConfig:
    if item.name not in hyperparams:
        raise ValueError(_why_not(item.name, hyperparams))
    if item.name in hyperparams.unused:
        raise ValueError(
            f"{item.name!r} cannot be searched: it would have no effect: it needs {hyperparams.unused[item.name]}"
        )
    if item.values is None:
        # The registry keeps counts as int and everything else as float.
        item = dataclasses.replace(item, is_whole=isinstance(hyperparams[item.name], int))
        low, high = item.bounds
        places = {f"min_value={low!r}": low, f"max_value={high!r}": high}
    else:
        places = {f"values has {value!r}, which": value for value in item.values}
    for place, value in places.items():
        bound = lower_bounds.get(item.name)
        reason = None
        try:
            hyperparams.check(item.name, value)
        except (ValueError, TypeError) as error:
            reason = str(error)
        if reason is None and bound is not None and value < bound:
            reason = f"smaller values are clipped to {bound!r}; use at least {bound!r}"
        if reason is not None:
            raise ValueError(f"{item.name!r}: {place} cannot be used: {reason}")
    return item


def _why_not(name: str, hyperparams: Hyperparameters) -> str:
    if name in hyperparams.fixed:
        return f"{name!r} cannot be searched, as it cannot change while the agent trains: {hyperparams.fixed[name]}"
    if _EARLIER.get(name) in {*hyperparams, *hyperparams.fixed}:
        return f"the agent has no hyper-parameter {name!r}; it is {_EARLIER[name]!r}"
    known = list(hyperparams)
    inside = [each for each in known if each.endswith(f".{name}")]
    return f"the agent has no hyper-parameter {name!r}; {did_you_mean(inside[0] if inside else name, known)}"
