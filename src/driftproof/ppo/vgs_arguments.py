"""Arguments of variance gradient scaling by their flat names: ``vgs_beta=0.99`` is ``vgs_kwargs={"beta": 0.99}``."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypedDict

from driftproof._registry import OPTIMIZERS
from driftproof.nn.policies import DistributionalPolicy


class VGSArguments(TypedDict, total=False):
    """Flat names of the arguments of :class:`driftproof.optim.VarianceGradientScaler`, as configurations have them."""

    vgs_enabled: bool
    vgs_beta: float
    vgs_alpha: float
    vgs_eps: float
    vgs_warmup_steps: int
    vgs_min_scaling_factor: float
    vgs_variance_cap: float
    vgs_statistic: Literal["elementwise", "spatial_mean"]
    vgs_apply_to: Literal["gradient", "update"]


_EARLIER = {
    "ent_coef_initial": "ent_coef",
    "entropy_coef": "ent_coef",
    "lr": "learning_rate",
    "use_twin_critics": "policy_kwargs={'twin_critics': ...}",
    "kl_early_stop": "kl_stop",
    "kl_exceed_stop_fraction": "kl_stop='fraction' with kl_stop_fraction",
    **dict.fromkeys(
        ("rollout_buffer_class", "rollout_buffer_kwargs"),
        "not replaceable: rollouts are tensors cut into sequences; read them through model.rollout_buffer",
    ),
}
"""Arguments of the earlier system and of Stable-Baselines3, and what they are called here."""


def resolve_vgs(
    switch: bool | None, vgs_kwargs: Mapping[str, Any], flat: Mapping[str, Any], known: Iterable[str]
) -> tuple[Any, dict[str, Any]]:
    """Whether gradients are scaled, and the arguments of the scaler, from all the names that say so.

    Args:
        switch: ``variance_gradient_scaling``; ``None``: not given.
        vgs_kwargs: As given.
        flat: Keyword arguments of the agent that are not its own.
        known: Names of the agent's own arguments, for hints.

    Raises:
        TypeError: There is no argument of that name.
        ValueError: One setting has two values.
    """
    for name in flat:
        if name not in VGSArguments.__annotations__:
            raise TypeError(f"DistributionalPPO() got an unexpected keyword argument {name!r}; {_hint(name, known)}")
    arguments = dict(vgs_kwargs)
    for name, value in flat.items():
        key = name.removeprefix("vgs_")
        if key in arguments and arguments[key] != value:
            raise ValueError(
                f"{name}={value!r} and vgs_kwargs[{key!r}]={arguments[key]!r} are two values of one setting"
            )
        if key != "enabled":
            arguments[key] = value
    enabled = flat.get("vgs_enabled")
    if switch is not None and enabled is not None and switch != enabled:
        raise ValueError(f"variance_gradient_scaling={switch!r} and vgs_enabled={enabled!r} are the same setting")
    given = enabled if switch is None else switch
    return True if given is None else given, arguments


def _hint(name: str, known: Iterable[str]) -> str:
    if name in _EARLIER:
        return f"it is {_EARLIER[name]}"
    kinds_of: dict[str, list[type[Any]]] = {
        "policy_kwargs": [DistributionalPolicy],
        "optimizer_kwargs": [OPTIMIZERS.load(name) for name in OPTIMIZERS.built_in],
    }
    for argument, kinds in kinds_of.items():
        if any(name in inspect.signature(kind).parameters for kind in kinds):
            return f"it belongs into {argument}: {argument}={{{name!r}: ...}}"
    names = [*known, *VGSArguments.__annotations__]
    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {near[0]!r}?" if near else "see its documentation for those that it has"
