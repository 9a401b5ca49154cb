"""Loading of component states: all are checked first, then all are set, or none."""

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
    """Load every component's state, or none if one of the states is invalid.

    ``check_state_dict()``, where a component has it, raises an error for an invalid state before any component changes.
    Components without it are loaded first; if one fails, those already loaded are restored.

    The state of an agent with one critic may be given to one with two.

    Args:
        policy: The agent's policy.
        components: Components by name, in loading order.
        states: States by name; components copy them.
        exact_match: Whether a missing or unknown name is an error instead of a warning.
        external: Maps names to those that users know.

    Raises:
        CheckpointError: A state is invalid, or, with ``exact_match``, a name is missing or unknown; nothing changed.
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
                # A failure to restore one must neither stop the others' restoration nor hide the cause.
                with contextlib.suppress(Exception):
                    restore()
            raise


@contextlib.contextmanager
def _as_checkpoint_error(name: str) -> Iterator[None]:
    """Turn errors into ``CheckpointError``, except warnings that a filter turned into errors."""
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
        raise CheckpointError("the state of an agent must be a dict of its components' states by name")
    missing = sorted(map(external, components.keys() - states.keys()))
    unknown = sorted(map(external, states.keys() - components.keys()))
    if missing or unknown:
        known = sorted(map(external, components))
        message = CheckpointError(f"the states lack {missing} and have unknown {unknown}; the agent has {known}")
        if exact_match:
            raise message
        warnings.warn(str(message), stacklevel=4)


def _with_own_tensors(policy: DistributionalPolicy, state: Any) -> Any:
    """A policy's state, completed with the policy's own tensors where they are missing; warns of these."""
    own = policy.state_dict()
    if not isinstance(state, Mapping) or policy.lacks_second_critic(state):
        return state  # A missing second critic is added later; an invalid state is refused later.
    if missing := [name for name in own if name not in state]:
        warnings.warn(f"the state lacks {', '.join(missing[:5])}: the policy keeps its own", stacklevel=5)
    return {**{name: own[name] for name in missing}, **state}


def _prepared(policy: DistributionalPolicy, part: Stateful, state: Any, widened: bool) -> Any:
    """The state in the form that the component loads."""
    if not isinstance(part, Optimizer):
        return state
    if widened:
        state = _with_more_parameters(state, len(list(policy.parameters())))
    # Before the agent's settings replace those of the file.
    check_optimizer_state(part, state)
    return _with_settings_of(part, state)


def _check(policy: DistributionalPolicy, part: Stateful, state: Any, widened: bool) -> bool:
    """Raise an error if a state is invalid; returns whether it could be checked without loading it."""
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
    """Returns a function that restores the component's present state."""
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
    """An optimizer's state with this optimizer's own settings, which ``hyperparams`` and the device determine."""
    merged = []
    for own, given in zip(optimizer.param_groups, state["param_groups"], strict=True):
        # Some optimizers keep state in their parameter groups.
        rest = {key: value for key, value in given.items() if key not in optimizer.defaults}
        merged.append({**own, **rest})
    if type(optimizer) is SGD:
        state = _with_all_buffers(optimizer, state)
    return {**state, "param_groups": merged}


def _with_all_buffers(optimizer: SGD, state: dict[str, Any]) -> dict[str, Any]:
    """The state of SGD with momentum buffers for all parameters or none, as its fused form requires."""
    entries = {index: entry for index, entry in state["state"].items() if entry.get("momentum_buffer") is not None}
    if not entries:
        return {**state, "state": {}}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    zeros = {i: {"momentum_buffer": torch.zeros_like(p)} for i, p in enumerate(parameters) if i not in entries}
    return {**state, "state": {**entries, **zeros}}


def _with_more_parameters(state: dict[str, Any], count: int) -> dict[str, Any]:
    """An optimizer's state extended to ``count`` parameters, the last of which have no state yet."""
    groups = [*state["param_groups"][:-1], {**state["param_groups"][-1]}]
    groups[-1]["params"] = [*groups[-1]["params"], *range(sum(len(g["params"]) for g in groups), count)]
    return {**state, "param_groups": groups}


def _load_in_part(vgs: VarianceGradientScaler, policy: DistributionalPolicy, state: dict[str, Any]) -> None:
    """Load the statistics of parameters that the state has; those of the others start anew."""
    vgs.update_parameters([])
    try:
        vgs.load_state_dict(state)
    finally:
        vgs.update_parameters(policy.named_parameters())
