"""Norm balls around observations: sampling, steepest ascent and projection."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from driftproof.settings.adversarial import NormType

Size: TypeAlias = float | Tensor
"""A number, a 0-dim tensor, or a tensor that broadcasts against the leading axes of observations."""

_INSIDE = 1 - 1e-6
"""Factor that keeps a rescaled vector within its length despite rounding."""


class Draws(Protocol):
    """Source of random numbers in the shape, type and device of a tensor."""

    def uniform(self, like: Tensor) -> Tensor:
        """Numbers from 0 to 1."""

    def normal(self, like: Tensor) -> Tensor:
        """Standard normal numbers."""


class GeneratorDraws:
    """Draws from a generator.

    Args:
        generator: The generator; ``None``: the device's own.
    """

    def __init__(self, generator: torch.Generator | None) -> None:
        self.generator = generator

    def uniform(self, like: Tensor) -> Tensor:
        return torch.rand(like.shape, generator=self.generator, device=like.device, dtype=like.dtype)

    def normal(self, like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=self.generator, device=like.device, dtype=like.dtype)


class MemberDraws:
    """Draws for the members of a population ``[M, ...]``, each from its own generator.

    Args:
        sources: Source of every member.
        active: Returns which members draw at present, 1 or 0 each; the others get zeros.
    """

    def __init__(self, sources: Sequence[Draws], active: Callable[[], Sequence[float]]) -> None:
        self.sources, self.active = sources, active

    def uniform(self, like: Tensor) -> Tensor:
        return self._drawn(like, [source.uniform for source in self.sources])

    def normal(self, like: Tensor) -> Tensor:
        return self._drawn(like, [source.normal for source in self.sources])

    def _drawn(self, like: Tensor, functions: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
        result = torch.zeros_like(like)
        for row, function, draws in zip(result, functions, self.active(), strict=True):
            if draws:
                row.copy_(function(row))
        return result


def norms(offsets: Tensor, norm: NormType, rank: int) -> Tensor:
    """Length of every offset ``[...]``.

    Args:
        offsets: Offsets ``[..., *shape]``.
        norm: The norm.
        rank: Number of axes of one observation, 0 to all.
    """
    flat = _flat(offsets, rank)
    return flat.abs().amax(-1) if norm == "linf" else _lengths(flat).squeeze(-1)


def random_offsets(like: Tensor, size: Size, norm: NormType, rank: int, draws: Draws) -> Tensor:
    """Points drawn uniformly from balls of this size around zero, one for every observation."""
    size = spread(size, rank)
    if norm == "linf":
        return draws.uniform(like).mul_(2).sub_(1) * size
    # A random direction, and a radius whose n-th power is uniform, as most of a ball is near its surface.
    normal = _flat(draws.normal(like), rank)
    radii = draws.uniform(normal[..., 0])
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
        size = spread(size, rank)
        return offsets.clamp(-size, size)  # type: ignore[arg-type]
    flat = _flat(offsets, rank)
    return (flat * (spread(size, 1) * _INSIDE / _lengths(flat)).clamp_max(1)).view(offsets.shape)


def spread(size: Size, rank: int) -> Size:
    """A size of leading axes, with ``rank`` more axes to broadcast over the numbers of an observation."""
    if isinstance(size, Tensor) and size.dim() > 0:
        return size.view(*size.shape, *(1,) * rank)
    return size


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
