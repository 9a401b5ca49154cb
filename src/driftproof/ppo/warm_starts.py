"""Warm start: a new training with the weights and statistics of another agent."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from driftproof.nn.types import SECOND_CRITIC
from driftproof.ppo.components import load_state
from driftproof.ppo.persistence import Persistent
from driftproof.ppo.tree import check_layer_norm, internal_name, parameters_from
from driftproof.state import CheckpointError, printable, read
from driftproof.state.files import Checkpoint

_ITS_OWN = ("hyperparams", "entropy")
"""Components that stay the agent's own."""
_NEEDED = ("policy", "return_scale", "normalizer")
"""Components without which the loaded agent would act or predict differently."""
_LARGE = 1e300
"""Bound for integers in files, which can be larger than any float."""
_SHOWN = 5
"""Number of tensors shown in a message."""


def warm_start(agent: Persistent, source: str | os.PathLike[str] | Checkpoint) -> list[str]:
    """Load the weights and learned statistics of another agent, for a new training.

    Settings, counters, schedules and random generators stay the agent's. The optimizer's moments and the statistics of
    gradient scaling, of a KL penalty and of an adversary are loaded if both agents have them and they fit.

    Args:
        agent: Agent with networks of the same shapes.
        source: A checkpoint, or its file.

    Returns:
        A report in lines: what was loaded, what begins anew and why, and which hyper-parameters differ.

    Raises:
        CheckpointError: The networks differ, or only one of the two normalises observations; nothing has changed.
    """
    checkpoint = source if isinstance(source, Checkpoint) else read(source)
    tree = checkpoint.tree
    if not isinstance(tree, dict) or not isinstance(tree.get("policy"), dict):
        raise CheckpointError("the checkpoint holds no policy: pass the checkpoint of an agent")
    states = {internal_name(name): state for name, state in parameters_from(tree).items()}
    parts = {name: part for name, part in agent.components().items() if name in states and name not in _ITS_OWN}
    _check_networks(agent.policy.state_dict(), states["policy"])
    check_layer_norm(agent, checkpoint)
    needed = {name: part for name, part in parts.items() if name in _NEEDED}
    load_state(agent.policy, needed, {name: states[name] for name in needed}, exact_match=True)
    report = [f"loaded: {', '.join(needed)}"]
    for name in [name for name in parts if name not in needed]:
        try:
            load_state(agent.policy, {name: parts[name]}, {name: states[name]}, exact_match=True)
            report[0] += f", {name}"
        except CheckpointError as error:
            report.append(f"{name}: begins anew, since its state does not fit ({printable(error, 200)})")
    agent.state_was_loaded()
    return report + _other_hyperparams(agent, states.get("hyperparams"))


def _check_networks(own: Mapping[str, Tensor], given: Mapping[str, Any]) -> None:
    """Refuse networks with different tensors.

    Raises:
        CheckpointError: Names tensors that differ, other than those of a second critic that the checkpoint lacks.
    """
    if not any(str(name).startswith(SECOND_CRITIC) for name in given):
        own = {name: tensor for name, tensor in own.items() if not name.startswith(SECOND_CRITIC)}
    here = {name: tuple(tensor.shape) for name, tensor in own.items()}
    there = {str(name): tuple(getattr(tensor, "shape", ())) for name, tensor in given.items()}
    differing = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
    if not differing:
        return
    lines = [
        f"{printable(name, 80)} is {there.get(name, 'missing')} in the checkpoint and {here.get(name, 'missing')} here"
        for name in differing[:_SHOWN]
    ]
    more = f"; and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
    raise CheckpointError(
        f"networks of the checkpoint and of the agent differ in {len(differing)} tensors: {'; '.join(lines)}{more}. "
        "Use the checkpoint's policy settings, and an environment with the same spaces"
    )


def _other_hyperparams(agent: Persistent, given: Any) -> list[str]:
    if not isinstance(given, dict):
        return []
    own = dict(agent.hyperparams)
    differing = [
        f"{name} {given[name]:g} in the checkpoint, {value:g} here"
        for name, value in own.items()
        if isinstance(given.get(name), int | float) and abs(given[name]) < _LARGE and given[name] != value
    ]
    return [f"hyper-parameters that differ: {', '.join(differing)}"] if differing else []
