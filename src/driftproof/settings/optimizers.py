"""Arguments of the optimizers: bounds, and which of them have an effect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from driftproof.settings.definition import LARGE

DEFAULT_OPTIMIZER = "adaptive_upgd"

_DECAY = {"at_least": 0, "below": 1}
_SCALE = {"above": 0, "at_most": LARGE}
_WEIGHT = {"at_least": 0, "at_most": LARGE}
BOUNDS: dict[str, Mapping[str, float]] = {
    **dict.fromkeys(("beta1", "beta2", "beta_utility", "noise_beta", "momentum"), _DECAY),
    **dict.fromkeys(("weight_decay", "sigma", "min_noise_std"), _WEIGHT),
    **dict.fromkeys(("temperature", "eps"), _SCALE),
    "dampening": {"at_least": -LARGE, "at_most": LARGE},
}
"""Bounds of optimizers' arguments by name, except the learning rate. torch's own optimizers accept ``eps=0`` too."""
OPTIONS = (*BOUNDS, "betas", "adaptive_noise", "noise_reference", "instant_noise_scale", "nesterov", "amsgrad")
"""Arguments of optimizers that configuration files have in ``optimizer.kwargs``."""
NOISE_DEFAULTS: dict[str, Any] = {
    "adaptive_noise": False,
    "noise_reference": "direction",
    "noise_beta": 0.999,
    "min_noise_std": 1e-6,
    "instant_noise_scale": True,
}
"""Arguments of UPGD's noise."""
DEFAULTS = {**NOISE_DEFAULTS, "dampening": 0}
"""Defaults of arguments that may have no effect."""

_NOISE = ("noise_reference", "noise_beta", "min_noise_std", "instant_noise_scale")
_AVERAGE = "adaptive_noise=True, noise_reference='gradient' and instant_noise_scale=False"


def unused_by_optimizer(name: str, options: Mapping[str, Any]) -> dict[str, str]:
    """Return the options of an optimizer that have no effect, each with the setting that it needs.

    Args:
        name: Name of the optimizer.
        options: Given options; the others have their defaults.
    """
    if name == "sgd":
        return {} if options.get("momentum") else {"dampening": "momentum above 0"}
    if name not in ("adaptive_upgd", "upgd", "upgdw"):
        return {}
    values = NOISE_DEFAULTS | dict(options)
    if options.get("sigma") == 0:
        return dict.fromkeys(("adaptive_noise", *_NOISE), "sigma above 0")
    if not values["adaptive_noise"]:
        return dict.fromkeys(_NOISE, "adaptive_noise=True") | {"noise_beta": _AVERAGE}
    if values["noise_reference"] != "gradient":
        return {"noise_beta": _AVERAGE, "instant_noise_scale": "noise_reference='gradient'"}
    return {"noise_beta": _AVERAGE} if values["instant_noise_scale"] else {}
