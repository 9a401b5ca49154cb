"""How an agent's components are given their states: all are checked first, then all are set, or none."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.optim import SGD, Optimizer

from driftproof.nn.policies import DistributionalPolicy
from driftproof.optim import VarianceGradientScaler
from driftproof.ppo.generators import restored_on_error
from driftproof.ppo.schemas import check_optimizer_state, check_policy_state, is_known
from driftproof.state import CheckpointError, Stateful, copy_tree


def load_state(
    policy: DistributionalPolicy,
    components: Mapping[str, Stateful],
    states: Mapping[str, Any],
    exact_match: bool,
    external: Callable[[str], str] = str,
) -> None:
    """Give every component its state, or, if one of the states is wrong, none.

    A component that has ``check_state_dict()`` raises an error there for a wrong state, before any component changes.
    Others find out by trying: they go first, and if one fails, all that were tried get their own states back.

    The state of an agent with one critic may be given to one with two.

    Args:
        policy: Of the agent.
        components: In the order in which they are to take their states.
        states: Are not kept: what components need of them, they copy.
        exact_match: Whether a missing or unknown name is an error, and not a warning.
        external: From names to those that users know.

    Raises:
        CheckpointError: A state is wrong, or, with ``exact_match``, names are missing or unknown; nothing has changed.
    """
    _check_names(components, states, exact_match, external)
    if not exact_match and "policy" in states:
        states = {**states, "policy": _with_own_tensors(policy, states["policy"])}
    parts = {name: part for name, part in components.items() if name in states}
    with _as_checkpoint_error("the state"):
        widened = policy.lacks_second_critic(states.get("policy", {}))
    given, unchecked = {}, []
    for name, part in parts.items():
        with _as_checkpoint_error(external(name)):
            given[name] = _prepared(policy, part, states[name], widened)
            if not _check(policy, part, given[name], widened):
                unchecked.append(name)
    with _as_checkpoint_error("the state"):
        given = copy_tree(given)
    order = [*unchecked, *(name for name in parts if name not in unchecked)]
    undo: list[tuple[str, Callable[[], None]]] = []
    with restored_on_error():
        try:
            for name in order:
                undo.append((name, _restore_point(parts[name])))
                with _as_checkpoint_error(external(name)):
                    _set(policy, parts[name], given[name], widened)
        except BaseException:
            for _, restore in reversed(undo):
                # One that does not take its own state back must not keep the others from it, nor hide the cause.
                with contextlib.suppress(Exception):
                    restore()
            raise


@contextlib.contextmanager
def _as_checkpoint_error(name: str) -> Iterator[None]:
    """Whatever is wrong with a state is one kind of error. Warnings that a user has made errors stay what they are."""
    try:
        yield
    except (CheckpointError, Warning):
        raise
    except Exception as error:
        raise CheckpointError(f"{name}: {error}") from error


def _check_names(
    components: Mapping[str, Stateful], states: Any, exact_match: bool, external: Callable[[str], str]
) -> None:
    if not isinstance(states, Mapping) or not all(isinstance(name, str) for name in states):
        raise CheckpointError("the state of an agent is a dict of its components' states, by name")
    missing = sorted(map(external, components.keys() - states.keys()))
    unknown = sorted(map(external, states.keys() - components.keys()))
    if missing or unknown:
        known = sorted(map(external, components))
        message = CheckpointError(f"nothing to load for {missing}, and no use for {unknown}, of the agent's {known}")
        if exact_match:
            raise message
        warnings.warn(str(message), stacklevel=4)


def _with_own_tensors(policy: DistributionalPolicy, state: Any) -> Any:
    """A policy's state with the policy's own tensors where it has none, of which a warning tells."""
    own = policy.state_dict()
    if not isinstance(state, Mapping) or policy.lacks_second_critic(state):
        return state  # The second critic is added elsewhere, and what is no state is refused.
    if missing := [name for name in own if name not in state]:
        warnings.warn(f"the policy's {', '.join(missing[:5])} are not given, and stay as they are", stacklevel=5)
    return {**{name: own[name] for name in missing}, **state}


def _prepared(policy: DistributionalPolicy, part: Stateful, state: Any, widened: bool) -> Any:
    """The state as the component is to be given it."""
    if not isinstance(part, Optimizer):
        return state
    if widened:
        state = _with_more_parameters(state, len(list(policy.parameters())))
    # Before the settings of the file go, which the agent's own replace.
    check_optimizer_state(part, state)
    return _with_settings_of(part, state)


def _check(policy: DistributionalPolicy, part: Stateful, state: Any, widened: bool) -> bool:
    """Raise an error if a state is wrong; whether that can be known before it is tried."""
    if part is policy:
        check_policy_state(policy, state)
    elif isinstance(part, Optimizer):
        return is_known(part)
    elif isinstance(part, VarianceGradientScaler):
        part.check_state_dict(state, partial=widened)
    elif callable(check := getattr(part, "check_state_dict", None)):
        check(state)
    else:
        return False
    return True


def _restore_point(part: Stateful) -> Callable[[], None]:
    """What makes a component again what it is now."""
    if callable(own := getattr(part, "restore_point", None)):
        restore: Callable[[], None] = own()
        return restore
    before = copy_tree(dict(part.state_dict()))
    return lambda: part.load_state_dict(before)


def _set(policy: DistributionalPolicy, part: Stateful, state: Any, widened: bool) -> None:
    if widened and isinstance(part, VarianceGradientScaler):
        _load_in_part(part, policy, state)
    else:
        part.load_state_dict(state)


def _with_settings_of(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state with the receiver's settings: numbers belong to ``hyperparams``, the rest to its device."""
    merged = []
    for own, given in zip(optimizer.param_groups, state["param_groups"], strict=True):
        # What is no setting is a state, which some optimizers keep there.
        rest = {key: value for key, value in given.items() if key not in optimizer.defaults}
        merged.append({**own, **rest})
    if type(optimizer) is SGD:
        state = _with_all_buffers(optimizer, state)
    return {**state, "param_groups": merged}


def _with_all_buffers(optimizer: SGD, state: dict[str, Any]) -> dict[str, Any]:
    """The state of SGD with a momentum for all parameters, or for none: its fused form takes no mixture."""
    entries = {index: entry for index, entry in state["state"].items() if entry.get("momentum_buffer") is not None}
    if not entries:
        return {**state, "state": {}}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    zeros = {i: {"momentum_buffer": torch.zeros_like(p)} for i, p in enumerate(parameters) if i not in entries}
    return {**state, "state": {**entries, **zeros}}


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
