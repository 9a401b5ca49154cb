"""The components of an agent that have a state, and how their states are taken and given."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from driftproof._arguments import check_number
from driftproof.nn.policies import DistributionalPolicy
from driftproof.optim import VarianceGradientScaler

_LARGEST = torch.finfo(torch.float32).max


class Stateful(Protocol):
    """Has a state of tensors and plain values."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


def finite_numbers(state_dict: Mapping[str, Any], keys: Iterable[str], besides: Iterable[str] = ()) -> dict[str, float]:
    """The numbers of a state that has these keys, and others ``besides``, but none else.

    Raises:
        ValueError: A key is missing or unknown, or there is no single finite number under it.
    """
    keys = tuple(keys)
    if wrong := set(state_dict) ^ {*keys, *besides}:
        raise ValueError(f"the state lacks, or should not have, {', '.join(sorted(map(repr, wrong)))}")
    numbers = {}
    for key in keys:
        value = state_dict[key]
        number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        check_number(key, number, at_least=-_LARGEST, at_most=_LARGEST)
        numbers[key] = float(number)
    return numbers


def copy_state(components: Mapping[str, Stateful]) -> dict[str, dict[str, Any]]:
    """A copy of every state."""
    return {name: copy.deepcopy(dict(part.state_dict())) for name, part in components.items()}


def load_state(
    policy: DistributionalPolicy,
    components: Mapping[str, Stateful],
    states: Mapping[str, dict[str, Any]],
    exact_match: bool,
) -> None:
    """Give every component its state, or, if one of them does not take it, none.

    The state of an agent with one critic may be given to one with two.

    Raises:
        ValueError: With ``exact_match``, names are missing or unknown.
    """
    missing, unknown = sorted(components.keys() - states.keys()), sorted(states.keys() - components.keys())
    if missing or unknown:
        message = f"nothing to load for {missing}, and no use for {unknown}, of the agent's {sorted(components)}"
        if exact_match:
            raise ValueError(message)
        warnings.warn(message, stacklevel=3)
    before = copy_state(components)
    try:
        _load_all(policy, components, states)
    except Exception:
        _load_all(policy, components, before)
        raise


def _load_all(
    policy: DistributionalPolicy, components: Mapping[str, Stateful], states: Mapping[str, dict[str, Any]]
) -> None:
    widened = policy.lacks_second_critic(states.get("policy", {}))
    for name, part in components.items():
        if name not in states:
            continue
        state = states[name]
        if isinstance(part, Optimizer):
            if widened:
                state = _with_more_parameters(state, len(list(policy.parameters())))
            state = _with_settings_of(part, state)
        if widened and isinstance(part, VarianceGradientScaler):
            _load_in_part(part, policy, state)
        else:
            part.load_state_dict(state)


def _with_settings_of(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state with the receiver's settings: numbers belong to ``hyperparams``, the rest to its device."""
    groups = state["param_groups"]
    if len(groups) != len(optimizer.param_groups):
        return state  # which the optimizer refuses
    own = [{**group, "params": given["params"]} for group, given in zip(optimizer.param_groups, groups, strict=True)]
    return {**state, "param_groups": own}


def _with_more_parameters(state: dict[str, Any], count: int) -> dict[str, Any]:
    """An optimizer's state for more parameters, of which the last have none yet."""
    groups = [*state["param_groups"][:-1], {**state["param_groups"][-1]}]
    groups[-1]["params"] = [*groups[-1]["params"], *range(sum(len(g["params"]) for g in groups), count)]
    return {**state, "param_groups": groups}


def _load_in_part(vgs: VarianceGradientScaler, policy: DistributionalPolicy, state: dict[str, Any]) -> None:
    """Averages of the parameters that the state knows; the others begin anew."""
    vgs.update_parameters([])
    try:
        vgs.load_state_dict(state)
    finally:
        vgs.update_parameters(policy.named_parameters())
