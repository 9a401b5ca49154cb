"""Agents from files of earlier formats."""

from __future__ import annotations

import os

from driftproof.ppo.components import load_state
from driftproof.ppo.persistence import Persistent, internal_name
from driftproof.state import legacy

_OF_WEIGHTS = ("optimizer", "vgs")
"""Components whose states belong to the very weights they were made with."""


def adopt(agent: Persistent, source: str | os.PathLike[str]) -> list[str]:
    """Give an agent what an older file holds, as far as names and shapes match.

    ``.pt`` files of populations (``v2_full_parameters``, ``v1_policy_only``), state dicts, and files of
    Stable-Baselines3. No code in them is run. :meth:`Persistent.save` then writes today's format.

    Args:
        agent: Built with the settings of the old one.
        source: The file.

    Returns:
        A line for each component: what was taken over, and what was not, and why.

    Raises:
        CheckpointError: It is no such file.
    """
    old = legacy.read(source)
    own = agent.policy.state_dict()
    fitting, unused, missing, wrong_shape = legacy.match(old.components.get("policy", {}), own)
    parts = agent.components()
    load_state(agent.policy, {"policy": parts["policy"]}, {"policy": {**own, **fitting}}, exact_match=True)
    lines = [f"{old.format}", f"policy: {len(fitting)} of {len(own)} tensors taken over"]
    for names, what in ((unused, "no place for"), (missing, "not in the file"), (wrong_shape, "of another shape")):
        lines += [f"policy: {what}: {', '.join(names)}"] if names else []
    is_whole = not (missing or wrong_shape)
    for external, state in old.components.items():
        name = internal_name(external)
        if name == "policy":
            continue
        if name not in parts:
            lines.append(f"{external}: the agent has none")
        elif name in _OF_WEIGHTS and not is_whole:
            lines.append(f"{external}: not taken over, for it belongs to other weights")
        else:
            try:
                load_state(agent.policy, {name: parts[name]}, {name: state}, exact_match=True)
                lines.append(f"{external}: taken over")
            except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
                lines.append(f"{external}: not taken over: {error}")
    lines += [f"{part}: not in the file" for part in old.missing]
    lines += [f"{place}: no value for a file" for place in old.dropped]
    agent.state_was_loaded()
    return lines
