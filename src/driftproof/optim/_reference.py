"""The reference form of a UPGD step: one tensor at a time, one formula per line. Slow, and the oracle of the tests."""

from __future__ import annotations

import torch
from torch import Tensor

from driftproof._members import Number as Scalar
from driftproof._members import per_member
from driftproof.optim._core import (
    MINMAX_EPS,
    STEP_FACTOR,
    Extremes,
    Group,
    Settings,
    adaptive_std,
    bias_correction,
    elements,
    norm,
    unflatten,
)
from driftproof.optim._noise import RawNoise


def accumulate(group: Group, members: bool) -> None:
    """Count the step and fold the gradients into all averages."""
    settings = group.settings
    for i, (param, grad) in enumerate(zip(group.params, group.grads, strict=True)):
        group.steps[i].add_(1 if group.proceed is None else group.proceed)
        _fold(group, group.utilities[i], -grad * param, settings.beta_utility)
        if settings.betas is not None:
            _fold(group, group.first_moments[i], grad, settings.betas[0])
            _fold(group, group.second_moments[i], grad * grad, settings.betas[1])
        if settings.averages_norms:
            _fold(group, group.norm_emas[i], norm(grad, members), settings.noise_beta)


def utility_extremes(group: Group, members: bool) -> Extremes:
    """The smallest and largest bias-corrected utility of the group."""
    utilities = [corrected_utility(group, i) for i in range(len(group.params))]
    rows = [u.flatten(1) if members else u.flatten() for u in utilities]
    return Extremes.over([Extremes(r.amin(-1), r.amax(-1)) for r in rows])


def move(group: Group, extremes: Extremes, noise: RawNoise | None, members: bool) -> None:
    """Move every parameter along its gated direction."""
    settings = group.settings
    raw_noises = unflatten(noise.flat, group.params) if noise is not None else []
    for i, param in enumerate(group.params):
        step = direction(group, i)
        if noise is not None:
            unit_noise = raw_noises[i].to(param.dtype) * noise.scale
            step = step + per_member(noise_std(group, i, step, members), param) * unit_noise
        mobility = 1 - protection(corrected_utility(group, i), extremes.to(param.device, param.dtype), settings)
        lr, decay = per_member(settings.lr, param), per_member(settings.weight_decay, param)
        # Not p * (1 - lr * decay) first: in float32 that factor is exactly 1 for the small lr * decay of long training.
        param.sub_(lr * (decay * param + STEP_FACTOR[settings.gate] * step * mobility))


def corrected_utility(group: Group, i: int) -> Tensor:
    """The utility û of every weight of parameter ``i``."""
    utility = group.utilities[i]
    return utility / per_member(bias_correction(group.settings.beta_utility, _count(group, i)), utility)


def protection(utility: Tensor, extremes: Extremes, settings: Settings) -> Tensor:
    """The gate ``s`` in (0, 1) of bias-corrected utilities: high for useful weights."""
    temperature = per_member(settings.temperature, utility)
    if settings.gate == "anchored":
        return torch.sigmoid(temperature * (utility / per_member(extremes.anchor(utility.dtype), utility)))
    low, high = (per_member(extreme, utility) for extreme in extremes)
    rank = ((utility - low) / (high - low + MINMAX_EPS)).clamp(0, 1)
    return torch.sigmoid(2 * temperature * (rank - 0.5))


def direction(group: Group, i: int) -> Tensor:
    """The direction to descend, without noise: the gradient, or Adam's from the moments."""
    if group.settings.betas is None:
        return group.grads[i]
    grad, (beta1, beta2) = group.grads[i], group.settings.betas
    first = group.first_moments[i] / per_member(bias_correction(beta1, _count(group, i)), grad)
    second = group.second_moments[i] / per_member(bias_correction(beta2, _count(group, i)), grad)
    return first / (second.sqrt() + per_member(group.settings.eps, grad))


def noise_std(group: Group, i: int, direction: Tensor, members: bool) -> Scalar:
    """Standard deviation of the noise on parameter ``i``."""
    settings = group.settings
    if not settings.adaptive_noise:
        return settings.sigma
    if settings.noise_reference == "direction":
        reference = norm(direction, members) / elements(direction, members) ** 0.5
    elif settings.instant_noise_scale:
        reference = norm(group.grads[i], members)
    else:
        reference = group.norm_emas[i] / bias_correction(settings.noise_beta, _count(group, i))
    return adaptive_std(settings, reference)


def _fold(group: Group, average: Tensor, value: Tensor, beta: Scalar) -> None:
    kept, beta = per_member(group.kept(beta), average), per_member(beta, average)
    average.copy_(kept * average + (1 - beta) * value)


def _count(group: Group, i: int) -> Scalar:
    return group.steps[i].item() if group.counts_on_host else group.steps[i]
