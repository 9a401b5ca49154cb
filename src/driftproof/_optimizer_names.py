"""Optimizers by name. Without torch, since configurations are read without it."""

from __future__ import annotations

import difflib

OPTIMIZERS = ("adaptive_upgd", "upgd", "upgdw", "adamw", "adam", "sgd")
OPTIONS = (
    *("sigma", "beta1", "beta2", "betas", "beta_utility", "temperature", "weight_decay", "momentum", "dampening"),
    *("adaptive_noise", "noise_beta", "noise_reference", "min_noise_std", "instant_noise_scale", "nesterov", "amsgrad"),
)
"""Their arguments, which configurations have in ``optimizer.kwargs``, but for those that are settings elsewhere."""


def optimizer_name(name: str) -> str:
    """The name of an optimizer from any spelling of it, the name of its class included: ``AdaptiveUPGD``.

    Raises:
        ValueError: There is none of that name.
    """
    spellings = {_plain(known): known for known in OPTIMIZERS}
    if (plain := _plain(name)) in spellings:
        return spellings[plain]
    near = difflib.get_close_matches(plain, spellings, n=1)
    hint = f"did you mean {spellings[near[0]]!r}? There are" if near else "use one of"
    raise ValueError(f"Unknown optimizer {name!r}; {hint} {', '.join(OPTIMIZERS)}, or a class")


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")
