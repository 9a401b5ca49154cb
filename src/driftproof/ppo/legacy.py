"""Agents from files of earlier formats."""

from __future__ import annotations

import os
import warnings

from driftproof.ppo.components import load_state
from driftproof.ppo.persistence import Persistent, internal_name
from driftproof.state import CheckpointError, legacy, printable

_OF_WEIGHTS = ("optimizer", "vgs")
"""Components whose states belong to the very weights they were made with."""
_SHOWN = 10
"""Names in a message."""


def adopt(agent: Persistent, source: str | os.PathLike[str] | legacy.LegacyCheckpoint) -> list[str]:
    """Give an agent what an older file holds, as far as names and shapes match.

    See :mod:`driftproof.state.legacy` for the formats. No code in them is run. :meth:`Persistent.save` then writes
    today's format.

    Args:
        agent: Built with the settings of the old one.
        source: The file, or what :func:`driftproof.state.legacy.read` returned.

    Returns:
        A line for each component: what was taken over, and what was not, and why.

    Raises:
        CheckpointError: It is no such file, or no tensor of its policy fits; the agent has not changed.
    """
    old = source if isinstance(source, legacy.LegacyCheckpoint) else _read(source)
    own = agent.policy.state_dict()
    fitting, unused, missing, wrong_shape = legacy.match(old.components["policy"], own)
    if not fitting:
        raise CheckpointError(
            f"{old.source}: none of its policy's {len(old.components['policy'])} tensors fits one of the agent's "
            f"{len(own)} by name and shape; of another shape: {_listed(wrong_shape)}; without a place: "
            f"{_listed(unused)}; wanted: {_listed(missing)}. Build the agent with the environment and the network "
            "settings of the old one"
        )
    parts = agent.components()
    load_state(agent.policy, {"policy": parts["policy"]}, {"policy": {**own, **fitting}}, exact_match=True)
    lines = [f"policy: {len(fitting)} of {len(own)} tensors taken over"]
    for names, what in ((unused, "no place for"), (missing, "not in the file"), (wrong_shape, "of another shape")):
        lines += [f"policy: {what}: {', '.join(map(printable, names))}"] if names else []
    is_whole = not (missing or wrong_shape)
    for external, state in old.components.items():
        name = internal_name(external)
        if name == "policy":
            continue
        if name not in parts:
            lines.append(f"{printable(external)}: the agent has none")
        elif name in _OF_WEIGHTS and not is_whole:
            lines.append(f"{external}: not taken over, for it belongs to other weights")
        else:
            try:
                load_state(agent.policy, {name: parts[name]}, {name: state}, exact_match=True)
                lines.append(f"{external}: taken over")
            except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
                lines.append(f"{external}: not taken over: {printable(error)}")
    lines += [f"{part}: not in the file" for part in old.missing]
    lines += [f"{printable(place)}: no value for a file" for place in old.dropped]
    agent.state_was_loaded()
    return lines


def _read(source: str | os.PathLike[str]) -> legacy.LegacyCheckpoint:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # The report says what is missing.
        return legacy.read(source)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(printable(name, 80) for name in names[:_SHOWN]) + more if names else "none"
