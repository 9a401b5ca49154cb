"""Migration of parameters from earlier versions and other agents: missing states are completed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from driftproof.learner.alarm import CalibrationAlarm
from driftproof.learner.kl import KLPenalty
from driftproof.learner.response import DriftResponse
from driftproof.optim import UPGD, UPGDW, AdaptiveUPGD, VarianceGradientScaler
from driftproof.optim.earlier_states import EARLIER_STATE, is_earlier_state
from driftproof.state import Stateful, printable

EARLIER_STATES = ("vgs_state", "kl_penalty_state")
"""Names that earlier versions added to the parameters of Stable-Baselines3."""

_MOMENTS: dict[type[Optimizer], set[str]] = {
    UPGD: {"avg_utility"},
    AdaptiveUPGD: {"avg_utility", "first_moment", "sec_moment"},
    UPGDW: {"avg_utility", "exp_avg", "exp_avg_sq"},
    Adam: {"exp_avg", "exp_avg_sq"},
    AdamW: {"exp_avg", "exp_avg_sq"},
}
"""State that an optimizer always keeps for a parameter."""
_SHOWN = 6
"""Number of names shown in a message."""


def is_policy_only(given: Mapping[str, Any]) -> bool:
    """Whether this is the state dict of a policy, which ``v1_policy_only`` files hold."""
    return bool(given) and all(isinstance(key, str) and isinstance(value, Tensor) for key, value in given.items())


def is_earlier(given: Mapping[str, Any]) -> bool:
    """Whether these are the parameters of ``v2_full_parameters`` files.

    They have the states of gradient scaling and of the KL penalty, ``None`` if the agent had none, and no
    hyper-parameters, which every agent's parameters have today.
    """
    return "hyperparams" not in given and {"policy", *EARLIER_STATES} <= set(given)


def completed(components: Mapping[str, Stateful], states: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """States for all of an agent's components, given another agent's policy and perhaps more of its states.

    What belongs to the former weights starts anew unless given: the optimizer's moments, the statistics of variance
    gradient scaling, drift alarm and response. Other components keep their states unless given.

    Args:
        components: The agent's components, by their names in the tree.
        states: The other agent's states, including its policy; ``None``: it had no such component.

    Returns:
        The states, and notes on what was not loaded.
    """
    given = {name: state for name, state in states.items() if state is not None and name in components}
    result: dict[str, Any] = {}
    notes = [f"the agent has no {printable(name, 80)}" for name in states if name not in components]
    kept = []
    for name, component in components.items():
        if name in given:
            result[name], problem = upgraded(component, given[name])
        else:
            result[name], problem = anew(component)
            if problem is None:
                kept.append(name)
        notes += [] if problem is None else [problem]
    return result, [*notes, *([f"{', '.join(kept)}: the agent keeps its own"] if kept else [])]


def upgraded(component: Stateful, state: Any) -> tuple[Any, str | None]:
    """A component's state in the current form, and a note on what is lost, if it had an earlier one."""
    if isinstance(component, VarianceGradientScaler) and isinstance(state, Mapping) and is_earlier_state(state):
        return component.upgraded(state), f"variance gradient scaling: {EARLIER_STATE}"
    if isinstance(component, KLPenalty) and isinstance(state, Mapping) and not set(component.state_dict()) & set(state):
        return (
            component.initial_state_dict(),
            f"the KL penalty begins anew: its state has another form ({_named(state)})",
        )
    if isinstance(component, Optimizer) and (other := _entry_of_another(component, state)):
        initial, note = anew(component)
        return initial, f"{note}: the state is of another optimizer, with {_named(other)}"
    return state, None


def _entry_of_another(optimizer: Optimizer, state: Any) -> Mapping[Any, Any] | None:
    """The first parameter's state that lacks what this optimizer keeps, if there is one."""
    entries = state.get("state") if isinstance(state, Mapping) else None
    own = _MOMENTS.get(type(optimizer), set())
    for entry in entries.values() if isinstance(entries, Mapping) else ():
        if isinstance(entry, Mapping) and entry and not own <= set(entry):
            return entry
    return None


def _named(state: Mapping[Any, Any]) -> str:
    return ", ".join(printable(repr(key), 40) for key in list(state)[:_SHOWN]) or "nothing"


def anew(component: Stateful) -> tuple[dict[str, Any], str | None]:
    """The state of a component after the weights were replaced, and a note on what starts anew, if anything does."""
    own = dict(component.state_dict())
    if isinstance(component, Optimizer):
        return {**own, "state": {}}, "the optimizer begins without moments"
    if isinstance(component, VarianceGradientScaler):
        initial = component.initial_state_dict()
        return initial, "statistics of variance gradient scaling begin anew, with its warm-up"
    if isinstance(component, CalibrationAlarm):
        return component.initial_state_dict(), "the drift alarm begins anew"
    if isinstance(component, DriftResponse):
        return component.initial_state_dict(), "no weights of earlier worlds are kept"
    return own, None
