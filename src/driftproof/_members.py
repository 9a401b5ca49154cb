"""The member axis: tensor functions take an optional leading axis ``[M, ...]`` of independent learners.

A number that may differ between members is a float, a 0-dim tensor, or a tensor ``[M]``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

Number: TypeAlias = "float | Tensor"
"""A float, a 0-dim tensor, or one number per member ``[M]``."""


def per_member(value: Number, like: Tensor) -> Number:
    """Shape a number per member ``[M]`` to broadcast against ``like`` ``[M, ...]``; others stay as they are."""
    if isinstance(value, float | int) or value.dim() != 1:
        return value
    return value.view(-1, *(1,) * (like.dim() - 1))
