"""How many actors a Ray cluster has room for. Imports no Ray."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

_SMALL = 1e-6
_PART = 0.001
"""Amount of its type that an actor with an ``accelerator_type`` takes."""


def check_resources(resources: Mapping[str, Any]) -> dict[str, Any]:
    """Check Ray's options for placing an actor.

    Raises:
        ValueError: An amount is not a number, or an option is not for placing.
    """
    if "runtime_env" in resources:
        raise ValueError("resources_per_member has no runtime_env: give RayBackend(runtime_env=...)")
    custom = resources.get("resources") or {}
    if not isinstance(custom, Mapping):
        raise ValueError(f"Invalid resources in resources_per_member: {custom!r}; must be amounts by name")
    amounts = {name: resources[name] for name in ("num_cpus", "num_gpus", "memory") if name in resources}
    for name, amount in (amounts | dict(custom)).items():
        is_number = isinstance(amount, Real) and not isinstance(amount, bool)
        if not is_number or not math.isfinite(amount) or amount < 0:
            raise ValueError(f"Invalid {name} in resources_per_member: {amount!r}; must be a number >= 0")
    return dict(resources)


def most_actors(resources: Mapping[str, Any], nodes: Iterable[Mapping[str, Any]]) -> float:
    """Number of actors that fit on the nodes that are alive."""
    needs = _needs(resources)
    return sum(_fit(needs, node["Resources"]) for node in nodes if node["Alive"])


def too_large(resources: Mapping[str, Any], nodes: Iterable[Mapping[str, Any]]) -> str | None:
    """What an actor needs and the largest node has, if no node has room for one."""
    needs = _needs(resources)
    found = [node["Resources"] for node in nodes if node["Alive"]]
    if any(_fit(needs, each) >= 1 for each in found):
        return None
    largest: Mapping[str, float] = max(found, key=lambda each: [each.get(name, 0) for name in needs], default={})
    wanted = ", ".join(f"{need:g} {name}" for name, need in needs.items())
    there = ", ".join(f"{largest.get(name, 0):g} {name}" for name in needs)
    return f"{wanted}, and no node of the cluster has that: the largest of {len(found)} has {there}"


def _needs(resources: Mapping[str, Any]) -> dict[str, float]:
    """Amounts that an actor needs, by Ray's names."""
    named = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    needs = {name: resources.get(option) or 0 for name, option in named.items()} | dict(
        resources.get("resources") or {}
    )
    if resources.get("accelerator_type"):
        needs[f"accelerator_type:{resources['accelerator_type']}"] = _PART
    return {name: need for name, need in needs.items() if need > 0}


def _fit(needs: Mapping[str, float], there: Mapping[str, float]) -> float:
    """Number of actors that fit on a node; infinite for those that need nothing."""
    return min((_times(name, need, there.get(name, 0)) for name, need in needs.items()), default=math.inf)


def _times(name: str, need: float, there: float) -> int:
    if name == "GPU" and need < 1:  # A fraction is of one GPU.
        return int(there) * int(1 / need + _SMALL)
    return int(there / need + _SMALL)
