"""Schemas of the states of networks and optimizers. Other components check their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from driftproof.nn.policies import DistributionalPolicy
from driftproof.nn.types import SECOND_CRITIC
from driftproof.optim import UPGD, UPGDW, AdaptiveUPGD
from driftproof.state import CheckpointError
from driftproof.state.schema import (
    Rule,
    anything,
    check,
    count,
    fail,
    flag,
    items,
    mapping,
    number,
    numbers,
    optional,
    scalar,
    shown,
    table,
    text,
)

_MOST_STEPS = 2**48

_ENTRIES: dict[type[Optimizer], tuple[tuple[str, ...], tuple[str, ...]]] = {
    # Required entries, and optional ones.
    Adam: (("step", "exp_avg", "exp_avg_sq"), ("max_exp_avg_sq",)),
    AdamW: (("step", "exp_avg", "exp_avg_sq"), ("max_exp_avg_sq",)),
    SGD: ((), ("momentum_buffer",)),
    UPGD: ((), ("step", "avg_utility", "grad_norm_ema")),
    AdaptiveUPGD: ((), ("step", "avg_utility", "grad_norm_ema", "first_moment", "sec_moment")),
    UPGDW: ((), ("step", "avg_utility", "grad_norm_ema", "exp_avg", "exp_avg_sq")),
}
_NEVER_NEGATIVE = ("exp_avg_sq", "max_exp_avg_sq", "sec_moment", "grad_norm_ema")
_LARGEST_RATE = 1e6
"""Largest learning rate in a loaded state; a step with a larger one would destroy the weights."""


def check_policy_state(policy: DistributionalPolicy, state: Any) -> None:
    """Raise a ``CheckpointError`` unless these are weights of the policy, or of one like it with a single critic."""
    own = policy.state_dict()
    if isinstance(state, dict) and policy.lacks_second_critic({key: None for key in state if isinstance(key, str)}):
        own = {key: value for key, value in own.items() if not key.startswith(SECOND_CRITIC)}
    check("policy", state, table({key: _weights(value) for key, value in own.items()}))


def _weights(own: Any) -> Rule:
    if not isinstance(own, Tensor):
        return anything  # A module's extra state, in a format of its own.
    if not own.is_floating_point():
        return numbers(own.shape, [own.dtype], tensors_only=True)
    largest = torch.finfo(own.dtype).max
    return numbers(own.shape, at_least=-largest, at_most=largest, tensors_only=True)


def is_known(optimizer: Optimizer) -> bool:
    """Whether there is a schema for the optimizer's state."""
    return type(optimizer) in _ENTRIES


def check_optimizer_state(optimizer: Optimizer, state: Any) -> None:
    """Raise a ``CheckpointError`` unless this is a state of the optimizer, as far as there is a schema for it."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # Optimizers of other libraries may have any state.
    check("optimizer", state, table({"state": mapping(anything, key=_index), "param_groups": items(anything)}))
    items(_group_like({}), len(optimizer.param_groups))(state["param_groups"], ("optimizer", "param_groups"))
    given = [index for group in state["param_groups"] for index in group["params"]]
    if given != list(range(len(parameters))):
        raise CheckpointError(
            f"the optimizer has {len(parameters)} parameters, but its state is of {len(given)}, or of others"
        )
    if strange := [index for index in state["state"] if index not in range(len(parameters))]:
        raise CheckpointError(
            f"the state has an entry for parameter {shown(strange[0])}, but the optimizer has {len(parameters)}"
        )
    if not is_known(optimizer):
        return
    groups = zip(optimizer.param_groups, state["param_groups"], strict=True)
    for i, (own, group) in enumerate(groups):
        _group_like(own)(group, ("optimizer", "param_groups", i))
        for index in group["params"]:
            if index in state["state"]:
                rule = _entries(optimizer, parameters[index], own)
                rule(state["state"][index], ("optimizer", "state", index))


def _index(value: Any, path: tuple[Any, ...]) -> None:
    count()(value, path)


def _group_like(own: Mapping[str, Any]) -> Rule:
    """A parameter group. Settings that are missing or new come from other versions of the optimizer."""
    rules = {key: _setting_like(key, value) for key, value in own.items() if key != "params"}

    def rule(value: Any, path: tuple[Any, ...]) -> None:
        if not isinstance(value, dict) or "params" not in value:
            fail(path, value, "a dict with 'params'")
        items(count())(value["params"], (*path, "params"))
        for key, setting in value.items():
            if key != "params" and own:
                rules.get(key, _plain)(setting, (*path, key))

    return rule


def _setting_like(key: str, own: Any) -> Rule:
    if key == "lr":
        return scalar(at_least=0, at_most=_LARGEST_RATE)
    if own is None or isinstance(own, bool):
        return optional(flag)  # Such as foreach, where None means automatic.
    if isinstance(own, int | float):
        return number()
    if isinstance(own, str):
        return text
    if isinstance(own, tuple | list):
        return items(number(), len(own))
    return scalar() if isinstance(own, Tensor) else _plain


def _plain(value: Any, path: tuple[Any, ...]) -> None:
    if not isinstance(value, bool | str | None):
        number()(value, path)


def _entries(optimizer: Optimizer, parameter: Tensor, group: Mapping[str, Any]) -> Rule:
    required, possible = _ENTRIES[type(optimizer)]
    rules = {name: _entry(name, parameter) for name in (*required, *possible)}
    if group.get("amsgrad"):
        required = (*required, "max_exp_avg_sq")
    full = table(
        {name: rules[name] for name in required},
        {name: rule for name, rule in rules.items() if name not in required},
    )

    def rule(value: Any, path: tuple[Any, ...]) -> None:
        if value != {}:  # An empty one is initialised later.
            full(value, path)

    return rule


def _entry(name: str, parameter: Tensor) -> Rule:
    if name == "step":
        return _whole(scalar(at_least=0, at_most=_MOST_STEPS))
    if name == "grad_norm_ema":
        return scalar(at_least=0)
    at_least = 0.0 if name in _NEVER_NEGATIVE else None
    inner = numbers(parameter.shape, [parameter.dtype, torch.float32], at_least=at_least, tensors_only=True)
    return optional(inner) if name == "momentum_buffer" else inner


def _whole(inner: Rule) -> Rule:
    def rule(value: Any, path: tuple[Any, ...]) -> None:
        inner(value, path)
        if float(value) != int(value):
            fail(path, value, "a whole number")

    return rule
