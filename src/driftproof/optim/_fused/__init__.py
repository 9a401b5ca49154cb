"""The optimizer step of several members in Triton kernels, for parameters that lie side by side in one tensor.

It computes what :func:`driftproof.optim.functional.upgd_step` and the average of gradients behind
:func:`driftproof.optim.functional.vgs_step` compute, up to rounding, in three passes over memory instead of thirty. See
:func:`reason_against_kernels` for where it does not.
"""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from driftproof._members import Number
from driftproof.optim._core import Group
from driftproof.optim._gradient_statistics import GradientStatistics
from driftproof.optim._noise import NoiseSource

ENABLED = os.environ.get("DRIFTPROOF_FUSED_STEP") != "0"
"""Whether kernels run at all."""
CHUNK = 4096
"""Elements of a parameter that one program measures."""
_MOST_CHUNKS = 4096
"""Of one parameter: one program adds them up."""


class Measured(NamedTuple):
    """What a step needs to know of whole gradients.

    Attributes:
        squares: Squared norms ``[M, parameters]``.
        signals: Squared norms of the averages, if they followed these gradients; ``None``: there are no averages.
        largest: Largest magnitudes ``[M]``.
    """

    squares: Tensor
    signals: Tensor | None
    largest: Tensor


@lru_cache
def launcher() -> ModuleType | None:
    """The module that launches the kernels. It is imported when it is first asked for, as it takes its time."""
    try:
        return importlib.import_module("driftproof.optim._fused.launches")
    except ModuleNotFoundError:  # Triton is a part of torch's builds for CUDA only.
        return None


def reason_against_kernels(
    group: Group, keys: Sequence[str], statistics: GradientStatistics | None = None
) -> str | None:
    """Why a step of members takes torch's operations; ``None``: it can take :class:`MemberKernels`.

    Args:
        group: Parameters and state of the members.
        keys: Names of the parameters that lie side by side in the group's.
        statistics: Averages that the gradients are folded into.
    """
    settings, param = group.settings, group.params[0]
    if not ENABLED:
        return "the kernels are off: DRIFTPROOF_FUSED_STEP=0"
    if launcher() is None:
        return "Triton is not installed"
    if not param.is_cuda and not getattr(launcher(), "INTERPRETED", False):
        return f"the parameters are on {param.device.type}"
    if settings.adaptive_noise:
        return "adaptive noise follows norms of steps, of which only torch's operations know"
    if not settings.foreach:
        return "the settings ask for the reference form"
    if len(group.params) != 1 or param.dim() != 2 or group.steps[0].shape != param.shape[:1]:
        return "the parameters do not lie side by side, with step counts of each member"
    state = [param, *group.utilities, *group.first_moments, *group.second_moments]
    if any(tensor.dtype is not torch.float32 or not tensor.is_contiguous() for tensor in state):
        return "parameters or state are not contiguous float32"
    if param.numel() == 0 or param.shape[1] > CHUNK * _MOST_CHUNKS:
        return f"a member has {param.shape[1]} parameters"
    if statistics is None:
        return None
    if statistics.statistic != "elementwise":
        return f"gradient scaling averages the gradients' {statistics.statistic}"
    block = statistics.block
    if statistics.keys != list(keys) or block is None or block.shape != param.shape or block.dtype is not torch.float32:
        return "gradient scaling averages other tensors than those that the optimizer moves"
    return None


class MemberKernels:
    """Launches the kernels for parameters of some sizes, one after the other in one tensor ``[M, elements]``.

    Without waiting for the device, and with no memory that a CUDA graph would not know of.

    Args:
        sizes: Elements of each parameter, of one member.
        members: ``M``.
        device: Device of the parameters.
    """

    def __init__(self, sizes: Sequence[int], members: int, device: torch.device) -> None:
        self.sizes, self.members = list(sizes), members
        chunks: list[tuple[int, int]] = []
        firsts, start = [0], 0
        for size in sizes:
            chunks += [(start + i, min(CHUNK, size - i)) for i in range(0, size, CHUNK)]
            firsts.append(len(chunks))
            start += size
        self.longest = max(last - first for first, last in itertools.pairwise(firsts))
        """Chunks of the parameter that has most."""
        self.starts, self.lengths, self.firsts = (
            torch.tensor(numbers, dtype=torch.int32).to(device) for numbers in (*zip(*chunks, strict=True), firsts)
        )
        """Of every chunk, which is a part of one parameter; and each parameter's first chunk, and their number."""

    def measure(self, grads: Tensor, statistics: GradientStatistics | None = None, beta: Number = 0.0) -> Measured:
        """Measure gradients ``[M, elements]``, which need not be finite.

        Args:
            grads: Gradients of all parameters.
            statistics: Averages that will follow them.
            beta: Decay of the averages.
        """
        module = launcher()
        assert module is not None
        measured: Measured = module.measure(self, grads, statistics, beta)
        return measured

    def step(
        self,
        group: Group,
        grads: Tensor,
        *,
        proceed: Tensor,
        scale: Tensor,
        noise: NoiseSource,
        statistics: GradientStatistics | None = None,
        weight: Tensor | None = None,
        factor: Tensor | None = None,
    ) -> None:
        """Update parameters and state in place; those of members that do not proceed keep every bit.

        Args:
            group: Parameters, state and settings, for which there is no :func:`reason_against_kernels`. Its gradients
                are replaced: if they are the direction, by those that the step has followed.
            grads: Gradients of all parameters; where a member proceeds, they are finite.
            proceed: Whether a member takes the step ``[M]`` bool.
            scale: Factor of the gradients that the optimizer follows ``[M]``.
            noise: Function that draws noise.
            statistics: Averages whose moments follow the unscaled gradients.
            weight: Weight of the gradients in these moments ``[M]``.
            factor: Factor of the whole step ``[M]``.
        """
        module = launcher()
        assert module is not None
        module.step(self, group, grads, proceed, scale, noise, statistics, weight, factor)
