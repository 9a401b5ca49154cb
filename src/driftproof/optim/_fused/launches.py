"""Launches of the kernels, and the formulas over numbers of members between them."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from driftproof._members import Number
from driftproof.optim._core import MINMAX_EPS, STEP_FACTOR, Extremes, Group, Settings, bias_correction
from driftproof.optim._foreach import gate_divisors
from driftproof.optim._fused import CHUNK, Measured, MemberKernels, kernels
from driftproof.optim._gradient_statistics import GradientStatistics
from driftproof.optim._noise import NoiseSource

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether kernels are interpreted, on a CPU, as TRITON_INTERPRET=1 asks for."""
_EXTREMES_BLOCK = 2048
"""Elements of a program that looks for extremes."""
_MOVE_BLOCK = 1024
"""Elements of a program that moves parameters: it reads seven numbers for each of them."""


def measure(plan: MemberKernels, grads: Tensor, statistics: GradientStatistics | None, beta: Number) -> Measured:
    """What :meth:`MemberKernels.measure` returns."""
    members, chunks, parameters = plan.members, len(plan.starts), len(plan.sizes)
    grads = grads.contiguous()
    moments, weights = grads, grads
    if statistics is not None:
        assert statistics.block is not None
        moments, weights = statistics.block, _row(1 - beta, members, grads)
    of_chunks = grads.new_empty(3, members, chunks)
    results = grads.new_empty(3, members, parameters)
    with torch.cuda.device_of(grads):  # type: ignore[no-untyped-call]
        kernels.measure[(members * chunks,)](
            *(grads, moments, weights, plan.starts, plan.lengths, of_chunks, chunks, grads.shape[1]),
            MOMENTS=statistics is not None,
            BLOCK=CHUNK,
            num_warps=8,
        )
        kernels.gather[(members * parameters,)](
            *(of_chunks, plan.firsts, results, chunks, parameters),
            MOMENTS=statistics is not None,
            WIDTH=int(triton.next_power_of_2(max(plan.longest, 32))),
            num_warps=1 if plan.longest <= 256 else 8,
        )
    return Measured(results[0], None if statistics is None else results[1], results[2].amax(-1))


def step(
    plan: MemberKernels,
    group: Group,
    grads: Tensor,
    proceed: Tensor,
    scale: Tensor,
    noise: NoiseSource,
    statistics: GradientStatistics | None,
    weight: Tensor | None,
    factor: Tensor | None,
) -> None:
    """What :meth:`MemberKernels.step` does."""
    settings, members = group.settings, plan.members
    (param,), (utility,), (count,) = group.params, group.utilities, group.steps
    param, grads = param.detach(), grads.contiguous()
    elements = param.shape[1]
    count.add_(proceed)
    drawn = noise(group.numel, param.device) if settings.has_noise else None
    betas = torch.stack([_row(beta, members, param) for beta in (settings.beta_utility, *(settings.betas or ()))])
    corrections = bias_correction(betas, count)
    assert isinstance(corrections, Tensor)
    flags = proceed.to(param.dtype)
    rows = {
        "proceed": flags,
        "scale": scale,
        "utility": betas[0] - 1,
        "moment": flags if weight is None else weight,
        **_adam_rows(settings, betas, corrections, flags),
        "noise": flags if drawn is None else settings.sigma * drawn.scale,
        "kept": 1 - settings.lr * settings.weight_decay,
        "step": -STEP_FACTOR[settings.gate] * settings.lr,
        "factor": flags if factor is None else factor,
    }
    numbers = torch.stack([_row(row, members, param) for row in rows.values()])
    kept = grads if statistics is None or statistics.gradients is None else statistics.gradients
    group.grads = [kept]
    with torch.cuda.device_of(param):  # type: ignore[no-untyped-call]
        blocks = -(-elements // _EXTREMES_BLOCK)
        found = param.new_empty(2, members, blocks)
        kernels.find_extremes[(members * blocks,)](
            *(grads, param, utility, numbers, found, members, blocks, elements), BLOCK=_EXTREMES_BLOCK, num_warps=4
        )
        gates = _gate_rows(settings, found.amax(-1) / corrections[0], corrections[0])
        blocks = -(-elements // _MOVE_BLOCK)
        kernels.move[(members * blocks,)](
            *(grads, param, utility, *(group.first_moments or [param]), *(group.second_moments or [param])),
            *(param if statistics is None else statistics.block, param if drawn is None else drawn.flat),
            *(kept, numbers, gates, members, blocks, elements),
            ADAM=settings.betas is not None,
            NOISE=drawn is not None,
            MINMAX=settings.gate == "minmax",
            MOMENTS=statistics is not None,
            SCALED=factor is not None,
            BLOCK=_MOVE_BLOCK,
            num_warps=4,
        )


def _adam_rows(settings: Settings, betas: Tensor, corrections: Tensor, unused: Tensor) -> dict[str, Any]:
    """Numbers of the moments: (m / first) / (sqrt(v / second) + eps) = m / (root * sqrt(v) + offset)."""
    if settings.betas is None:
        return dict.fromkeys(("first", "second", "root", "offset"), unused)
    _, first, second = corrections
    _, first_weight, second_weight = 1 - betas
    root, offset = first / second**0.5, first * settings.eps
    return {"first": first_weight, "second": second_weight, "root": root, "offset": offset}


def _gate_rows(settings: Settings, extremes: Tensor, corrections: Tensor) -> Tensor:
    """Numbers of the gate, by the largest utilities and the largest negatives ``[2, M]``, without their bias."""
    high, low = extremes[0], -extremes[1]
    if settings.gate == "anchored":
        anchor = Extremes(low, high).anchor(high.dtype)
        rows = [gate_divisors(corrections, anchor / settings.temperature, high.dtype)]
    else:
        slope = 2 * settings.temperature
        rows = [gate_divisors(corrections, 1.0, high.dtype), low, 1 / (high - low + MINMAX_EPS), slope]
    return torch.stack([_row(row, len(high), high) for row in rows])


def _row(value: Number, members: int, like: Tensor) -> Tensor:
    """A number for all members, or one of each, as ``[M]``."""
    if isinstance(value, Tensor):
        return value.to(like.dtype).expand(members)
    return torch.full((members,), value, dtype=like.dtype, device=like.device)
