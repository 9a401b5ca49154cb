"""Norm balls around observations: sampling, steepest ascent and projection."""

from __future__ import annotations

import math
from typing import TypeAlias

import torch
from torch import Tensor

from driftproof.settings.adversarial import NormType

Size: TypeAlias = float | Tensor

_INSIDE = 1 - 1e-6
"""Factor that keeps a rescaled vector within its length despite rounding."""


def norms(offsets: Tensor, norm: NormType, rank: int) -> Tensor:
    """Length of every offset ``[...]``.

    Args:
        offsets: Offsets ``[..., *shape]``.
        norm: The norm.
        rank: Number of axes of one observation, 0 to all.
    """
    flat = _flat(offsets, rank)
    return flat.abs().amax(-1) if norm == "linf" else _lengths(flat).squeeze(-1)


def random_offsets(like: Tensor, size: Size, norm: NormType, rank: int, generator: torch.Generator) -> Tensor:
    """Points drawn uniformly from balls of this size around zero, one for every observation."""
    if norm == "linf":
        return torch.rand(like.shape, generator=generator, device=like.device, dtype=like.dtype).mul_(2).sub_(1) * size
    # A random direction, and a radius whose n-th power is uniform, as most of a ball is near its surface.
    normal = _flat(torch.randn(like.shape, generator=generator, device=like.device, dtype=like.dtype), rank)
    radii = torch.rand(normal.shape[:-1], generator=generator, device=like.device, dtype=like.dtype)
    factors = radii.pow(1 / normal.shape[-1]).unsqueeze(-1) * _INSIDE / _lengths(normal)
    return (normal * factors).view(like.shape) * size


def steepest(gradient: Tensor, norm: NormType, rank: int) -> Tensor:
    """The direction of steepest ascent, of length 1 in this norm; zero where the gradient is zero."""
    if norm == "linf":
        return gradient.sign()
    flat = _flat(gradient, rank)
    return (flat / _lengths(flat)).view(gradient.shape)


def unit_scale(gradient: Tensor, rank: int) -> Tensor:
    """The gradient, scaled to a root mean square of 1 for every observation."""
    flat = _flat(gradient, rank)
    return (flat / _lengths(flat) * math.sqrt(flat.shape[-1])).view(gradient.shape)


def project(offsets: Tensor, size: Size, norm: NormType, rank: int) -> Tensor:
    """The nearest offsets within the ball."""
    if norm == "linf":
        return offsets.clamp(-size, size)  # type: ignore[arg-type]
    flat = _flat(offsets, rank)
    return (flat * (size * _INSIDE / _lengths(flat)).clamp_max(1)).view(offsets.shape)


def moved(clean: Tensor, offsets: Tensor) -> Tensor:
    """``clean + offsets``, rounded towards ``clean``, so that no result is farther from it than its offset."""
    result = clean + offsets
    return torch.where((result - clean).abs() > offsets.abs(), result.nextafter(clean), result)


def _flat(part: Tensor, rank: int) -> Tensor:
    """Observations as vectors ``[..., size]``; one without axes is a single number."""
    return part.flatten(-rank) if rank else part.unsqueeze(-1)


def _lengths(flat: Tensor) -> Tensor:
    """Euclidean lengths ``[..., 1]``, never 0."""
    lengths: Tensor = torch.linalg.vector_norm(flat, dim=-1, keepdim=True)
    return lengths.clamp_min(torch.finfo(flat.dtype).tiny)
