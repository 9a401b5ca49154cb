"""The form of a UPGD step for ``torch.compile``: tensor by tensor, for the compiler to fuse.

Computes what :mod:`driftproof.optim._reference` computes, up to rounding. The tensors of a group must be of one device
and dtype, step counts included, and there is no member axis.

Numbers that belong to a whole tensor are computed for all tensors at once and stacked: the compiler writes what is
stacked to memory, and would otherwise compute it again for every element.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from driftproof._members import Number as Scalar
from driftproof.optim import _reference
from driftproof.optim._core import (
    MINMAX_EPS,
    STEP_FACTOR,
    Extremes,
    Group,
    bias_correction,
    unflatten,
)
from driftproof.optim._noise import RawNoise, draw_noise, noise_scale


@torch.library.custom_op("driftproof::draw_noise", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def _draw(count: int, device: torch.device) -> Tensor:
    return draw_noise(count, device).flat


@_draw.register_fake
def _(count: int, device: torch.device) -> Tensor:
    return torch.empty(count, dtype=torch.int8 if device.type == "cpu" else torch.float32, device=device)


def traced_noise(count: int, device: torch.device) -> RawNoise:
    """:func:`draw_noise` as one operation that is not compiled: the same numbers from the same generator."""
    return RawNoise(_draw(count, device), noise_scale(device))


def step(groups: list[Group], proceed: Tensor | None) -> None:
    """Take one step of all groups, which :func:`driftproof.optim.functional.upgd_step` documents."""
    batches = [batch for group in groups for batch in _batches(group, proceed)]
    if not batches:
        return
    for group, _ in batches:
        _reference.accumulate(group, members=False)
    extremes = Extremes.over([utility_extremes(group) for group, _ in batches])
    for group, params in batches:
        count, device = sum(param.numel() for param in params), params[0].device
        move(group, extremes, traced_noise(count, device) if group.settings.has_noise else None)
        for param, moved in zip(params, group.params, strict=True):
            if moved is not param:
                param.copy_(moved)


def utility_extremes(group: Group) -> Extremes:
    """The smallest and largest bias-corrected utility of the group."""
    corrections = _corrections(group.settings.beta_utility, torch.stack(group.steps))
    lows, highs = (torch.stack([reduce(u) for u in group.utilities]) for reduce in (torch.amin, torch.amax))
    return Extremes((lows / corrections).amin(), (highs / corrections).amax())


def move(group: Group, extremes: Extremes, noise: RawNoise | None) -> None:
    """Move every parameter along its gated direction."""
    settings = group.settings
    extremes = extremes.to(group.params[0].device, group.utilities[0].dtype)
    numbers = _numbers(group, extremes)
    raw_noises = unflatten(noise.flat, group.params) if noise is not None else []
    for i, param in enumerate(group.params):
        slope, intercept, scale, offset = numbers[i].unbind()
        step = group.grads[i]
        if settings.betas is not None:
            step = group.first_moments[i] / (scale * group.second_moments[i].sqrt() + offset)
        if noise is not None:
            std = _reference.noise_std(group, i, step, members=False)
            step = step + raw_noises[i].to(param.dtype) * (std * noise.scale)
        argument = slope * group.utilities[i]
        if settings.gate == "minmax":
            argument = (argument + intercept).clamp(0, 1)
            argument = 2 * settings.temperature * (argument - 0.5)
        mobility = torch.sigmoid(-argument)
        param.sub_(settings.lr * (settings.weight_decay * param + STEP_FACTOR[settings.gate] * step * mobility))


def _numbers(group: Group, extremes: Extremes) -> Tensor:
    """Numbers for each tensor, ``[tensors, 4]``.

    ``slope * utility + intercept`` is the argument of the gate, and ``first / (scale * sqrt(second) + offset)``, of the
    moments, is Adam's direction.
    """
    settings = group.settings
    counts = torch.stack(group.steps)
    utility = _corrections(settings.beta_utility, counts)
    dtype = group.utilities[0].dtype
    if settings.gate == "anchored":
        anchor = extremes.anchor(dtype)
        divisor = (utility * anchor / settings.temperature).clamp_min(torch.finfo(dtype).tiny)
        rows = [1 / divisor, torch.zeros_like(divisor)]
    else:
        low, high = extremes
        span = high - low + MINMAX_EPS
        rows = [1 / (utility * span), torch.zeros_like(utility) - low / span]
    if settings.betas is None:
        rows += [torch.zeros_like(utility)] * 2
    else:
        first, second = (_corrections(beta, counts) for beta in settings.betas)
        rows += [first / second.sqrt(), first * settings.eps]
    return torch.stack([row.to(dtype) for row in rows], dim=1)


def _corrections(beta: Scalar, counts: Tensor) -> Tensor:
    """``1 - beta^t`` for each tensor, ``[tensors]``."""
    corrections = bias_correction(beta, counts)
    assert isinstance(corrections, Tensor)
    return corrections


def _batches(group: Group, proceed: Tensor | None) -> list[tuple[Group, list[Tensor]]]:
    """Parts of a group of one device and dtype, in the precision of the step, each with its parameters."""
    kinds: dict[Any, list[int]] = {}
    for i, (param, grad) in enumerate(zip(group.params, group.grads, strict=True)):
        kinds.setdefault((str(param.device), param.dtype, grad.dtype), []).append(i)
    parts = [group.select(chosen) for chosen in kinds.values()]
    if proceed is not None:
        parts = [part.masked(proceed.to(part.params[0].device)) for part in parts]
    return [(part.widened(), part.params) for part in parts]
