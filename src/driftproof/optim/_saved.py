"""Checks of a saved state of the variance gradient scaler."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from driftproof._arguments import check_number
from driftproof.optim._core import compute_dtype


def saved_number(name: str, value: Any, at_least: float, at_most: float) -> float:
    """A number out of a state dict, or a ``ValueError``."""
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex() or value.dtype == torch.bool:
            raise ValueError(f"Invalid {name}: a tensor of shape {tuple(value.shape)}; must be one number")
        value = value.item()
    check_number(name, value, at_least=at_least, at_most=at_most)
    return float(value)


def saved_keys(keys: Any) -> list[str]:
    if not isinstance(keys, (list, tuple)) or not all(isinstance(key, str) for key in keys):
        raise ValueError("'keys' must be a list of names")
    if len(set(keys)) != len(keys):
        raise ValueError("'keys' has a duplicate name")
    return list(keys)


def saved_shapes(shapes: Any) -> list[tuple[int, ...]]:
    if not isinstance(shapes, (list, tuple)):
        raise ValueError("'shapes' must be a list")
    for shape in shapes:
        if not isinstance(shape, (list, tuple)) or not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError("'shapes' must be lists of lengths")
    return [tuple(shape) for shape in shapes]


def saved_tensor(name: str, value: Any, shape: tuple[int, ...]) -> Tensor:
    """A tensor out of a state dict, in float32 or wider, or a ``ValueError``."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        raise ValueError(f"{name!r} must be a tensor of floating-point numbers")
    tensor = value
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name!r} has shape {tuple(tensor.shape)}, expected {shape}")
    if not tensor.isfinite().all():
        raise ValueError(f"{name!r} is not finite")
    return tensor.to(compute_dtype(tensor.dtype))
