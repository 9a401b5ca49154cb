"""Steps of the optimizers as functions over named state: UPGD, variance gradient scaling, clipping.

All of them take an optional leading member axis ``[M, ...]``, so that one call steps a whole population.

UPGD, as :func:`upgd_step`:

Per element, with gradient ``g``, parameter ``p`` and step count ``t``::

    u <- beta_utility * u + (1 - beta_utility) * (-g * p)        what removing the weight would cost, to first order
    û  = u / (1 - beta_utility^t)
    p <- p * (1 - lr * weight_decay) - c * lr * (direction + noise) * (1 - s)

where the gate ``s`` in (0, 1) is high for useful weights, and is one of

``anchored``
    ``s = sigmoid(τ û / η)``, ``c = 2``. η is the largest û of all parameters if that is positive, else the largest
    ``|û|``. A weight of zero utility has ``s = 1/2`` and moves as if there were no gate, whatever the others do.
``minmax``
    ``s = sigmoid(2 τ (n - 1/2))``, ``c = 1``, where ``n`` places û between the extremes of all parameters. There is no
    anchor: two outliers determine the steps of all weights.

Utility after Elsayed & Mahmood, "Addressing Loss of Plasticity and Catastrophic Forgetting in Continual Learning",
ICLR 2024 (arXiv 2404.00781).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from driftproof._members import Number as Scalar
from driftproof._members import per_member
from driftproof.optim import _foreach, _reference
from driftproof.optim._core import Extremes, Gate, Group, NoiseReference, Settings, are_plain, compute_dtype, norm
from driftproof.optim._foreach import Scratch
from driftproof.optim._fused import Measured, MemberKernels, reason_against_kernels
from driftproof.optim._gradient_statistics import GradientStatistics
from driftproof.optim._metrics import step_metrics as upgd_metrics
from driftproof.optim._noise import NoiseSource, RawNoise, draw_noise
from driftproof.optim._packed_gradients import HUGE

__all__ = [
    "HUGE",
    "Gate",
    "GradientStatistics",
    "Group",
    "Measured",
    "MemberKernels",
    "NoiseReference",
    "NoiseSource",
    "RawNoise",
    "Scalar",
    "ScalingSettings",
    "Scratch",
    "Settings",
    "clip_gradients",
    "draw_noise",
    "reason_against_kernels",
    "scaling_factor",
    "upgd_metrics",
    "upgd_step",
    "vgs_measured_step",
    "vgs_step",
]


@torch.no_grad()
def upgd_step(
    groups: Iterable[Group],
    *,
    members: bool = False,
    noise: NoiseSource = draw_noise,
    scratch: Scratch | None = None,
    proceed: Tensor | None = None,
    zeroed: bool = False,
) -> None:
    """Take one step: update the parameters and state of all groups in place.

    Args:
        groups: Parameters (none of them empty) with their gradients, state and settings. The gate compares utilities
            across all groups.
        members: The leading axis of every parameter counts independent learners. Each has its own extremes of
            utility, its own noise and, where a setting is a tensor ``[M]``, its own setting: the step equals ``M``
            separate ones.
        noise: Function that draws noise.
        scratch: Scratch memory of an earlier step, to reuse.
        proceed: Where the step is taken, whatever the gradients are elsewhere: bool, 0-dim, or ``[M]`` if the step
            counts are ``[M]`` too. The host reads a flag only if it may read the step counts.
        zeroed: Whether gradients are zero already where the step is not taken.
    """
    scratch = scratch or Scratch()
    batches = [batch for group in groups for batch in _batches(group, proceed, zeroed)]
    if not batches:
        return
    need_low = any(batch.group.settings.gate == "minmax" for batch in batches)
    extremes = []
    for batch in batches:
        if batch.fast:
            _foreach.accumulate(batch.group, members)
            extremes.append(_foreach.utility_extremes(batch.group, members, need_low))
        else:
            _reference.accumulate(batch.group, members)
            extremes.append(_reference.utility_extremes(batch.group, members))
    overall = Extremes.over(extremes)
    for batch in batches:
        params = batch.group.params
        drawn = noise(batch.group.numel, params[0].device) if batch.group.settings.has_noise else None
        if batch.fast:
            _foreach.move(batch.group, overall, drawn, members, scratch)
        else:
            _reference.move(batch.group, overall, drawn, members)
        if batch.narrow is not None:
            torch._foreach_copy_(batch.narrow, batch.group.params)


class _Batch(NamedTuple):
    """Parameters that one call can work on."""

    group: Group
    fast: bool
    narrow: list[Tensor] | None
    """Where results go if ``group`` holds float32 copies of half-precision parameters."""


@dataclass(frozen=True)
class ScalingSettings:
    """Hyper-parameters of variance gradient scaling, each a number or one per member ``[M]``.

    :class:`driftproof.optim.VarianceGradientScaler` documents them.
    """

    beta: Scalar = 0.99
    alpha: Scalar = 0.1
    eps: Scalar = 1e-8
    warmup_steps: Scalar = 100
    min_scaling_factor: Scalar = 0.1
    variance_cap: Scalar = 50.0


@torch.no_grad()
def vgs_step(
    state: GradientStatistics,
    grads: Sequence[Tensor | None],
    settings: ScalingSettings,
    proceed: Tensor | None = None,
    joint: Tensor | None = None,
) -> Tensor:
    """Fold gradients into the averages, and count the step.

    Args:
        state: Averages of the gradients so far, updated in place.
        grads: One for each parameter of the state, or ``None``.
        settings: Hyper-parameters.
        proceed: Where the step is taken, 0-dim or ``[M]`` bool; elsewhere nothing changes.
        joint: The gradients of all parameters side by side ``[M, elements]``, if they are and all are finite.

    Returns:
        Factor of gradients or steps, 0-dim or ``[M]``.
    """
    return _scaled(state, settings, proceed, state.fold(grads, settings.beta, proceed=proceed, joint=joint))


@torch.no_grad()
def vgs_measured_step(
    state: GradientStatistics, measured: Measured, settings: ScalingSettings, proceed: Tensor
) -> tuple[Tensor, Tensor]:
    """:func:`vgs_step` by what kernels have measured, who fold the gradients themselves into the averages later.

    Args:
        state: Averages of the gradients so far; all but the moments are updated in place.
        measured: What :meth:`MemberKernels.measure` has found with ``settings.beta``.
        settings: Hyper-parameters.
        proceed: Where the step is taken ``[M]`` bool; elsewhere nothing changes.

    Returns:
        Factor of gradients or steps, and weight of the gradients for :meth:`MemberKernels.step`, both ``[M]``.
    """
    weight = torch.where(proceed, 1 - settings.beta, 0.0)
    state.fold_measured(measured, weight, proceed)
    return _scaled(state, settings, proceed, True), weight


def _scaled(state: GradientStatistics, settings: ScalingSettings, proceed: Tensor | None, is_folded: bool) -> Tensor:
    """Count a step after whose averages the factor is to be computed."""
    if is_folded:
        factor = scaling_factor(state, settings)
        state.factor.copy_(factor if proceed is None else torch.where(proceed, factor, state.factor))
    state.step_count.add_(1 if proceed is None else proceed)
    return state.factor.clone()


def scaling_factor(state: GradientStatistics, settings: ScalingSettings) -> Tensor:
    """Scaling factor from the averages, 0-dim or ``[M]``."""
    variance = torch.clamp_max(state.normalized_variance(settings.eps), settings.variance_cap)
    factor = torch.clamp_min(1 / (1 + settings.alpha * variance), settings.min_scaling_factor).clamp_max(1)
    return torch.where(state.step_count < settings.warmup_steps, 1.0, factor)


@torch.no_grad()
def clip_gradients(grads: Sequence[Tensor], max_norm: Scalar, members: bool = False) -> Tensor:
    """Scale gradients in place to a common norm of at most ``max_norm``, like ``torch.nn.utils.clip_grad_norm_``.

    Args:
        grads: Gradients on one device.
        max_norm: Largest norm; a number, or one per member.
        members: The leading axis of every gradient counts members, each with its own norm.

    Returns:
        The norm before, 0-dim or ``[M]``.
    """
    norms = [norm(grad, members) for grad in grads] if members else torch._foreach_norm(list(grads))
    total: Tensor = torch.linalg.vector_norm(torch.stack(tuple(norms)), dim=0)
    factor = (max_norm / (total + 1e-6)).clamp_max(1)
    factors: Any = [per_member(factor, grad) for grad in grads] if members else factor
    torch._foreach_mul_(list(grads), factors)
    return total


def _batches(group: Group, proceed: Tensor | None, zeroed: bool) -> Iterator[_Batch]:
    """Parameters that one call can work on, if the step may be taken, and masked if the host does not know."""
    on_host = bool(group.steps) and group.counts_on_host
    if proceed is not None and proceed.dim() > 0 and any(count.dim() == 0 for count in group.steps):
        raise ValueError("members that step on their own need step counts [M]")
    if proceed is None or on_host:
        if proceed is None or proceed:
            yield from _alike(group)
        return
    for batch in _alike(group):
        flags = proceed.to(batch.group.params[0].device)
        yield batch._replace(group=batch.group.masked(flags, zeroed))


def _alike(group: Group) -> Iterator[_Batch]:
    """Cut a group into batches of one device, dtype, layout and, where the host may know it, step count."""
    settings, on_host = group.settings, bool(group.steps) and group.counts_on_host
    if (
        settings.foreach
        and group.params
        and group.has_plain_state
        and are_plain([group.params, group.grads], group.params[0].dtype)
        and (not on_host or len({count for row in group.step_runs for count in row.tolist()}) == 1)
    ):
        yield _Batch(group, True, None)
        return
    lists = [t for t in (group.params, group.grads, group.utilities, group.first_moments, group.second_moments) if t]
    indices = defaultdict(list)
    for i, param in enumerate(group.params):
        fast = settings.foreach and param.device.type in _foreach.DEVICES and all(t[i].is_contiguous() for t in lists)
        step = group.steps[i].item() if on_host else None
        indices[param.device, param.dtype, group.grads[i].dtype, fast, step].append(i)
    for (_, param_dtype, grad_dtype, fast, _), chosen in indices.items():
        batch = group.select(chosen) if len(chosen) < len(group.params) else group
        if param_dtype == grad_dtype == compute_dtype(param_dtype):
            yield _Batch(batch, fast, None)
        else:
            yield _Batch(batch.widened(), fast, batch.params)
