"""Agents from files of earlier formats."""

from __future__ import annotations

import os
import warnings
from typing import Any

from driftproof.ppo.components import load_state
from driftproof.ppo.migration import anew, upgraded
from driftproof.ppo.persistence import Persistent
from driftproof.ppo.tree import OWN_PLACE, external_name, internal_name
from driftproof.state import CheckpointError, Stateful, legacy, printable

_OF_WEIGHTS = ("optimizer", "vgs")
"""Components whose states are valid for the weights in the file only."""
_SHOWN = 2
"""Number of names shown in a message."""


def adopt(agent: Persistent, source: str | os.PathLike[str] | legacy.LegacyCheckpoint) -> list[str]:
    """Load an older file into an agent, as far as names and shapes match.

    See :mod:`driftproof.state.legacy` for the formats. No code in them is run. :meth:`Persistent.save` then writes
    today's format.

    Args:
        agent: Agent built with the settings of the old one.
        source: The file, or what :func:`driftproof.state.legacy.read` returned.

    Returns:
        A line for each component: what was loaded, and what was not, and why.

    Raises:
        CheckpointError: The file has another format, or no tensor of its policy fits; the agent has not changed.
    """
    old = source if isinstance(source, legacy.LegacyCheckpoint) else _read(source)
    own = agent.policy.state_dict()
    fitting, unused, missing, wrong_shape = legacy.match(old.components["policy"], own)
    if not fitting:
        raise CheckpointError(
            f"{old.source}: no tensor of its policy fits one of the agent's by name and shape; of another shape: "
            f"{_listed(wrong_shape)}; without a place: {_listed(unused)}; wanted: {_listed(missing)}. Build the agent "
            "with the environment and the network settings of the old one"
        )
    policy = {"policy": agent.components()["policy"]}
    load_state(agent.policy, policy, {"policy": {**own, **fitting}}, exact_match=True)
    lines = [f"policy: {len(fitting)} of {len(own)} tensors loaded"]
    for names, what in ((unused, "no place for"), (missing, "not in the file"), (wrong_shape, "of another shape")):
        lines += [f"policy: {what}: {', '.join(printable(name, 80) for name in names)}"] if names else []
    lines += take_over_rest(agent, old, is_whole=not (missing or wrong_shape))
    agent.reset_lstm_states_to_initial()
    agent.state_was_loaded()
    return lines


def take_over_rest(agent: Persistent, old: legacy.LegacyCheckpoint, is_whole: bool) -> list[str]:
    """Load what a file holds besides its policy, which the agent has loaded already.

    State that the file lacks, or has in an earlier form, starts anew; a ``FutureWarning`` names what is discarded.

    Args:
        agent: Agent with the policy of the file.
        old: The file.
        is_whole: Whether the agent has all of the file's weights and no others. If not, the states of optimizer and
            gradient scaling are not loaded.

    Returns:
        A line for each component, and for everything that was not loaded.
    """
    parts, lines = agent.components(), []
    given = {internal_name(name): state for name, state in old.components.items() if name != "policy"}
    for name in _OF_WEIGHTS:
        if name in parts:
            state, _ = anew(parts[name])
            load_state(agent.policy, {name: parts[name]}, {name: state}, exact_match=True)
    for name, state in given.items():
        shown = printable(external_name(name), 80)
        if name not in parts or name in OWN_PLACE:
            lines.append(f"{shown}: not used by the agent")
        elif name in _OF_WEIGHTS and not is_whole:
            lines.append(f"{shown}: not loaded, since it belongs to other weights")
        else:
            lines.append(f"{shown}: {_taken_over(agent, name, parts[name], state)}")
    lines += [f"{printable(name, 80)}: the agent in the file had none" for name in old.empty]
    lines += [f"{part}: not in the file" for part in old.missing if part in parts]
    lines += [f"{printable(name, 80)}: not loaded" for name in old.extras]
    return [*lines, *(f"{printable(place)}: no value for a file" for place in old.dropped)]


def _taken_over(agent: Persistent, name: str, component: Stateful, state: Any) -> str:
    """Load a component's state; returns a line for the report."""
    try:
        state, problem = upgraded(component, state)
        load_state(agent.policy, {name: component}, {name: state}, exact_match=True)
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        return f"not loaded: {printable(error)}"
    if problem is None:
        return "loaded"
    warnings.warn(problem, FutureWarning, stacklevel=4)
    return problem


def _read(source: str | os.PathLike[str]) -> legacy.LegacyCheckpoint:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # The report has it.
        return legacy.read(source)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(printable(name, 60) for name in names[:_SHOWN]) + more if names else "none"
