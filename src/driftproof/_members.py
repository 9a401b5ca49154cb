"""The member axis: tensor functions take an optional leading axis ``[M, ...]`` of independent learners.

A number that may differ between members is a float, a 0-dim tensor, or a tensor ``[M]``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from driftproof._arguments import check_number

if TYPE_CHECKING:
    from torch import Tensor

Number: TypeAlias = "float | Tensor"
"""A float, a 0-dim tensor, or one number per member ``[M]``."""


def per_member(value: Number, like: Tensor) -> Number:
    """Shape a number per member ``[M]`` to broadcast against ``like`` ``[M, ...]``; others stay as they are."""
    if isinstance(value, float | int) or value.dim() != 1:
        return value
    return value.view(-1, *(1,) * (like.dim() - 1))


def check_numbers(name: str, value: Any, **bounds: Any) -> None:
    """:func:`check_number` for a number, or for each member's ``[M]``; bounds may be per member too.

    Waits for the device if the value is a tensor.
    """
    columns = {key: listed(given) for key, given in {"value": value, **bounds}.items()}
    for i in range(max(map(len, columns.values()))):
        check_number(name, **{key: column[i % len(column)] for key, column in columns.items()})


def listed(value: Any) -> list[Any]:
    """The numbers in a tensor or an array, or the one number that a value is."""
    return value.flatten().tolist() if hasattr(value, "flatten") else [value]


def member_shape(members: int | None) -> tuple[int, ...]:
    """Shape of a number per member: 0-dim for a single agent."""
    return () if members is None else (members,)


def assign(tensor: Tensor, value: Number) -> None:
    """Set a tensor, 0-dim or ``[M]``, to one number or to one per member; to a float without waiting for the device."""
    if isinstance(value, float | int) or value.dim() == 0:
        tensor.fill_(value)
    else:
        tensor.copy_(value)


def load_numbers(tensor: Tensor, saved: Any) -> None:
    """Set a tensor, 0-dim or ``[M]``, to as many numbers from a file, in a tensor, an array or plain."""
    numbers = listed(saved)
    assign(tensor, numbers[0] if tensor.dim() == 0 else tensor.new_tensor(numbers))
