"""``betas`` for all optimizers: each decay has one place in a parameter group, whatever name it is given by."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from driftproof._arguments import ArgumentError

ALIASES = ("beta1", "beta2")


def merge_betas(group: MutableMapping[str, Any], present: Mapping[str, Any]) -> None:
    """Replace ``beta1`` and ``beta2`` of a group by ``betas``, which a group that has them keeps.

    Args:
        group: Options of a group, or some of them.
        present: Has the betas that are in force where the group does not say.
    """
    given = {i: group.pop(name) for i, name in enumerate(ALIASES) if name in group}
    if given and "betas" not in group:
        group["betas"] = tuple(given.get(i, beta) for i, beta in enumerate(present["betas"]))


def check_agreement(betas: Any, others: Mapping[str, tuple[int, Any, Any]]) -> None:
    """Raise an :class:`ArgumentError` if an argument that means the same as one of the ``betas`` contradicts it.

    Args:
        betas: The argument; if it is not a pair, that is for others to check.
        others: Index of the beta, value and default of the others by name.
    """
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        return
    for name, (i, value, default) in others.items():
        if value not in (default, betas[i]):
            raise ArgumentError(f"{name}={value!r} contradicts betas={betas!r}: give one of them", name)
