"""Gradients of small tensors side by side, so that one operation covers them all on a CPU."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

HUGE = 1e15
"""Gradients beyond count as an overflow: millions of their squares would not fit a float32."""
_COLUMNS = 128


class PackedGradients:
    """Small tensors in a matrix, each in rows of its own that are filled up with zeros: gradients, and their averages.

    Args:
        params: All parameters.
        indices: Which of them are small.
    """

    def __init__(self, params: list[Tensor], indices: list[int]) -> None:
        self.indices = indices
        counts = [-(-params[i].numel() // _COLUMNS) for i in indices]
        self._matrices = torch.zeros(2, sum(counts), _COLUMNS, dtype=torch.float32, device="cpu")
        self.gradients, moments = self._matrices.flatten(1).unbind()
        stops = [_COLUMNS * stop for stop in itertools.accumulate(counts)]
        starts = [0, *stops[:-1]]
        self.moments = [moments[start : start + params[i].numel()] for i, start in zip(indices, starts, strict=True)]
        self._views = [
            self.gradients[start : start + params[i].numel()].view(params[i].shape)
            for i, start in zip(indices, starts, strict=True)
        ]
        self._average = moments
        owners = [i for i, count in zip(indices, counts, strict=True) for _ in range(count)]
        self._owners = torch.tensor(owners, device="cpu")

    def fold(self, grads: Sequence[Tensor | None], weight: Any) -> tuple[Tensor, Tensor]:
        """Update the averages; squared norms of gradients and averages ``[parameters]``, zeros for large tensors."""
        torch._foreach_copy_(self._views, [grad for i in self.indices if (grad := grads[i]) is not None])
        if not self.gradients.dot(self.gradients).item() < HUGE**2:
            self.gradients.copy_(zero_where_huge(self.gradients))
        self._average.lerp_(self.gradients, weight)
        squares = torch.linalg.vector_norm(self._matrices, dim=2).square_()
        totals = torch.zeros(2, len(grads), dtype=torch.float32, device="cpu")
        squares, signals = totals.index_add_(1, self._owners, squares).unbind()
        return squares, signals


def zero_where_huge(grad: Tensor) -> Tensor:
    """The gradient with zeros for elements that are not finite, or too large to be squared."""
    # NaN is not smaller than anything.
    return torch.where(grad.abs() < HUGE, grad, 0)
