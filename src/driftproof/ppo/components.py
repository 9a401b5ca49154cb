"""The components of an agent that have a state, and how their states are taken and given."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from driftproof._arguments import check_number
from driftproof.nn.policies import DistributionalPolicy
from driftproof.optim import UPGD, UPGDW, AdaptiveUPGD, VarianceGradientScaler
from driftproof.state import Stateful, copy_tree

_LARGEST = torch.finfo(torch.float32).max


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


def load_state(
    policy: DistributionalPolicy,
    components: Mapping[str, Stateful],
    states: Mapping[str, Any],
    exact_match: bool,
    external: Callable[[str], str] = str,
) -> None:
    """Give every component its state, or, if one of them does not take it, none.

    The state of an agent with one critic may be given to one with two.

    Args:
        policy: Of the agent.
        components: In the order in which they are to take their states.
        states: Are not kept: what components need of them, they copy.
        exact_match: Whether a missing or unknown name is an error, and not a warning.
        external: From names to those that users know.

    Raises:
        ValueError: With ``exact_match``, names are missing or unknown.
    """
    missing = sorted(map(external, components.keys() - states.keys()))
    unknown = sorted(map(external, states.keys() - components.keys()))
    if missing or unknown:
        known = sorted(map(external, components))
        message = f"nothing to load for {missing}, and no use for {unknown}, of the agent's {known}"
        if exact_match:
            raise ValueError(message)
        warnings.warn(message, stacklevel=3)
    before = copy_tree({name: dict(part.state_dict()) for name, part in components.items()})
    touched: dict[str, Stateful] = {}
    try:
        _load_all(policy, components, copy_tree(states), touched)
    except Exception:
        for name, part in touched.items():
            # One that does not take its own state back must not keep the others from it, nor hide the cause.
            with contextlib.suppress(Exception):
                _load_all(policy, {name: part}, before, {})
        raise


def _load_all(
    policy: DistributionalPolicy,
    components: Mapping[str, Stateful],
    states: Mapping[str, Any],
    touched: dict[str, Stateful],
) -> None:
    widened = policy.lacks_second_critic(states.get("policy", {}))
    for name, part in components.items():
        if name not in states:
            continue
        state = states[name]
        touched[name] = part
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
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if strange := [index for index in state["state"] if index not in range(len(parameters))]:
        raise ValueError(f"the optimizer has a state for parameters {strange}, of {len(parameters)}")
    # Others may have states of other shapes.
    elementwise = isinstance(optimizer, UPGD | AdaptiveUPGD | UPGDW | Adam | AdamW | SGD)
    for index, entries in state["state"].items() if elementwise else ():
        for key, entry in entries.items():
            if isinstance(entry, Tensor) and entry.ndim and entry.shape != parameters[index].shape:
                raise ValueError(
                    f"the optimizer's {key} of parameter {index} has shape {tuple(entry.shape)}, but the parameter "
                    f"{tuple(parameters[index].shape)}"
                )
    merged = []
    for own, given in zip(optimizer.param_groups, groups, strict=True):
        # What is no setting is a state, which some optimizers keep there.
        rest = {key: value for key, value in given.items() if key not in optimizer.defaults}
        merged.append({**own, **rest})
    return {**state, "param_groups": merged}


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
