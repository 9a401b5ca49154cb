"""Cutting sequences at episode starts, so that a recurrent core runs over them without a loop over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_CALL = 24
"""Cost of one more call of a core, in samples: this much padding is worth saving a call."""


@dataclass(frozen=True)
class Segments:
    """A plan that runs sequences ``[T, B]`` with episode starts in them as segments without any.

    Segments are sorted by length, the longest first, and run in *slabs*: stretches of time in which the same segments
    are alive. A segment that ends within a slab is padded to its end; what follows its end is never read.

    Attributes:
        slabs: For each slab, the flat positions in ``[T * B]`` of its samples ``[length, rows]``.
        positions: Position of each sample of ``[T * B]`` in the concatenated outputs of all slabs.
        sequences: The sequence that each segment is cut from ``[S]``.
        carries: 1 where a segment continues from the given state, 0 where it starts an episode ``[S, 1]``.
    """

    slabs: Sequence[Tensor]
    positions: Tensor
    sequences: Tensor
    carries: Tensor

    @staticmethod
    def cut(starts: npt.NDArray[np.bool_], device: torch.device | str = "cpu") -> Segments | None:
        """The plan for sequences with episode starts at ``starts`` ``[T, B]``; ``None`` if there is nothing to cut.

        An episode start at the first step of a sequence is not cut: the caller must pass a zero state for it.
        """
        steps, batch = starts.shape
        if not starts[1:].any():
            return None
        cuts = starts.copy()
        cuts[0] = True
        # Sequence by sequence, in the order of time.
        sequence, begin = np.nonzero(cuts.T)
        end = np.append(begin[1:], steps)
        end[np.append(sequence[1:] != sequence[:-1], True)] = steps
        length = end - begin
        order = np.argsort(-length, kind="stable")
        sequence, begin, length = sequence[order], begin[order], length[order]

        positions = np.empty(steps * batch, dtype=np.int64)
        slabs = []
        filled = 0
        for first, last in _slab_borders(length):
            rows = int(np.searchsorted(-length, -first, side="left"))
            time = np.arange(first, last)[:, None]
            alive = time < length[:rows]
            flat = np.where(alive, begin[:rows] + time, 0) * batch + sequence[:rows]
            positions[flat[alive]] = filled + np.flatnonzero(alive)
            filled += flat.size
            slabs.append(torch.from_numpy(flat).to(device, non_blocking=True))
        carries = ((begin == 0) & ~starts[0, sequence]).astype(np.float32)[:, None]
        return Segments(
            slabs,
            torch.from_numpy(positions).to(device, non_blocking=True),
            torch.from_numpy(sequence).to(device, non_blocking=True),
            torch.from_numpy(carries).to(device, non_blocking=True),
        )


def _slab_borders(lengths: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Stretches of time, from the lengths in descending order, that balance padding against calls."""
    ends, counts = np.unique(lengths, return_counts=True)
    borders: list[tuple[int, int]] = []
    first, waiting = 0, 0
    for i in range(len(ends) - 1):
        # Segments that would be padded if the slab extended to the next end instead.
        waiting += int(counts[i])
        if waiting * int(ends[i + 1] - ends[i]) > _CALL:
            borders.append((first, int(ends[i])))
            first, waiting = int(ends[i]), 0
    borders.append((first, int(ends[-1])))
    return borders
