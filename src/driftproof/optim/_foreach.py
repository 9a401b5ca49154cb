"""The fast form of a UPGD step: few operations over many tensors, no host synchronisation.

Computes what :mod:`driftproof.optim._reference` computes, up to rounding. The tensors of a group must be contiguous,
of one device and dtype and, unless the step counts are capturable, have taken equally many steps.

Small tensors cost by the operation, large ones by the pass over memory. Hence directions and gates live in flat
buffers, utilities that are neighbours in memory (see :func:`pack`) count as one tensor, and what torch has fused
kernels for goes through them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from driftproof._members import Number as Scalar
from driftproof._members import per_member
from driftproof.optim._core import (
    COPIED_ELEMENTS,
    MINMAX_EPS,
    STEP_FACTOR,
    Extremes,
    Group,
    adaptive_std,
    bias_correction,
    elements,
    norm,
    unflatten,
)
from driftproof.optim._noise import RawNoise

DEVICES = ("cpu", "cuda")

_BUCKET_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 25}
"""Elements worked on at a time, unless one tensor has more: bounds scratch memory, and on a CPU suits the caches."""

_LEAST_UNIT = 1e-20
"""Smallest unit of directions, so that they do not overflow in it."""

_CACHE_ENTRIES = 64
"""Number of cached layouts of scratch memory; changing sets of gradients make many."""


class Scratch:
    """Flat buffers, kept from step to step on a CPU, where fresh memory costs page faults worth several passes."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}
        self._views: dict[tuple[object, ...], tuple[Tensor, list[Tensor]]] = {}
        self._spreads: dict[tuple[object, ...], tuple[Tensor, list[Tensor]]] = {}

    def like(self, name: str, tensors: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Uninitialised memory for all of ``tensors``: flat, and as views of their shapes."""
        dtype, device = tensors[0].dtype, tensors[0].device
        if device.type != "cpu":
            flat = torch.empty(sum(t.numel() for t in tensors), dtype=dtype, device=device)
            return flat, unflatten(flat, tensors)
        key = (name, dtype, *(t.shape for t in tensors))
        if key not in self._views:
            if len(self._views) >= _CACHE_ENTRIES:
                self._views.clear()
            count = sum(t.numel() for t in tensors)
            buffer = self._buffers.get((name, dtype))
            if buffer is None or buffer.numel() < count:
                self._views.clear()
                buffer = self._buffers[name, dtype] = torch.empty(count, dtype=dtype, device="cpu")
            self._views[key] = buffer[:count], unflatten(buffer[:count], tensors)
        return self._views[key]

    def spread(self, values: Tensor, tensors: list[Tensor]) -> Tensor:
        """Repeat value ``i`` as often as tensor ``i`` has elements: ``[tensors]`` to ``[elements]``."""
        key = (values.device, values.dtype, *(t.shape for t in tensors))
        if key not in self._spreads:
            if len(self._spreads) >= _CACHE_ENTRIES:
                self._spreads.clear()
            buffer = torch.empty_like(values)
            views = [value.expand(t.numel()) for value, t in zip(buffer.unbind(), tensors, strict=True)]
            self._spreads[key] = buffer, views
        # Not repeat_interleave: on CUDA it writes all repetitions of one value by a single warp.
        buffer, views = self._spreads[key]
        buffer.copy_(values)
        return torch.cat(views)


def pack(tensors: list[Tensor]) -> list[Tensor]:
    """Copies of contiguous tensors of one device and dtype that are neighbours in memory."""
    return unflatten(torch.cat([t.flatten() for t in tensors]), tensors)


def accumulate(group: Group, members: bool) -> None:
    """Count the step and fold the gradients into all averages but the moments, which :func:`move` updates."""
    settings = group.settings
    if group.proceed is not None:
        torch._foreach_add_(group.steps, [group.proceed.float()] * len(group.steps))
    elif group.steps[0].is_cpu:
        for counts in group.step_runs:
            counts.add_(1)
    else:
        torch._foreach_add_(group.steps, 1)
    beta = settings.beta_utility
    if isinstance(beta, Tensor):
        weight = group.kept(beta) - 1
        for utility, grad, param in zip(group.utilities, group.grads, group.params, strict=True):
            # u + (beta - 1) * (u + grad * param), in two passes over memory.
            utility.addcmul_(torch.addcmul(utility, grad, param), _shaped(weight, utility))
    else:
        kept = group.kept(beta)
        if isinstance(kept, Tensor) and kept.dim() == 1:
            torch._foreach_mul_(group.utilities, _each(kept, group.utilities))
        else:
            torch._foreach_mul_(group.utility_runs, kept)
        _add_products(group, beta - 1)
    if settings.averages_norms:
        weight = 1 - group.kept(settings.noise_beta)
        weights: Any = [weight.expand_as(ema) for ema in group.norm_emas] if isinstance(weight, Tensor) else weight
        torch._foreach_lerp_(group.norm_emas, _norms(group.grads, members), weights)


def _add_products(group: Group, value: float) -> None:
    """Add ``value * grad * param`` to the utilities."""
    is_packed = len(group.utility_runs) == 1 < len(group.params) and group.params[0].is_cpu
    if is_packed and group.numel <= COPIED_ELEMENTS and group.flat_grads is not None:
        params = torch._C._nn.flatten_dense_tensors(group.params)
        group.utility_runs[0].addcmul_(group.flat_grads, params, value=value)
    else:
        torch._foreach_addcmul_(group.utilities, group.grads, group.params, value=value)


def utility_extremes(group: Group, members: bool, need_low: bool) -> Extremes:
    """The largest bias-corrected utility of the group, and the smallest.

    Unless ``need_low``, the smallest is exact only where the largest is not positive. The anchored gate reads it
    nowhere else, and most steps save a pass over the utilities.
    """
    corrections = _bias_corrections(group, group.settings.beta_utility, members)
    if members:
        rows = [u.flatten(1) for u in group.utilities]
        if not rows[0].is_cpu:
            lows, tops = zip(*(r.aminmax(dim=1) for r in rows), strict=True)
            return Extremes(_corrected(lows, corrections).amin(0), _corrected(tops, corrections).amax(0))
        highs = _corrected([r.amax(1) for r in rows], corrections).amax(0)
        if not need_low and bool((highs > 0).all()):
            return Extremes(highs, highs)
        return Extremes(_corrected([r.amin(1) for r in rows], corrections).amin(0), highs)
    utilities = group.utility_runs if group.counts_on_host else group.utilities
    if utilities[0].is_cpu:
        high = _corrected([u.amax() for u in utilities], corrections).amax().item()
        if high > 0 and not need_low:
            return Extremes(high, high)
        return Extremes(_corrected([u.amin() for u in utilities], corrections).amin().item(), high)
    largest = _corrected(torch._foreach_max(utilities), corrections).amax()
    if need_low:
        return Extremes(_corrected([u.amin() for u in utilities], corrections).amin(), largest)
    return Extremes(-_corrected(torch._foreach_norm(utilities, torch.inf), corrections).amax(), largest)


def move(group: Group, extremes: Extremes, noise: RawNoise | None, members: bool, scratch: Scratch) -> None:
    """Update moments, then move every parameter along its gated direction."""
    extremes = extremes.to(group.params[0].device, group.params[0].dtype)
    start = 0
    for bucket in _buckets(group):
        flat, directions = scratch.like("directions", bucket.params)
        stop = start + flat.numel()
        unit = 1.0
        if noise is None:
            _write_directions(bucket, flat, directions)
        else:
            part = RawNoise(noise.flat[start:stop], noise.scale)
            unit = _write_noisy_directions(bucket, flat, directions, part, members)
        _apply_gate(bucket, flat, extremes, members, scratch)
        _descend(bucket, directions, unit)
        start = stop


def _buckets(group: Group) -> Iterator[Group]:
    """Parameters to work on together."""
    limit = _BUCKET_ELEMENTS[group.params[0].device.type]
    if group.numel <= limit:
        yield group
        return
    bucket: list[int] = []
    filled = 0
    for i, param in enumerate(group.params):
        if bucket and filled + param.numel() > limit:
            yield group.select(bucket)
            bucket, filled = [], 0
        bucket.append(i)
        filled += param.numel()
    yield group.select(bucket)


def _write_directions(group: Group, flat: Tensor, directions: list[Tensor]) -> None:
    betas = group.settings.betas
    if betas is None:
        torch.cat([g.flatten() for g in group.grads], out=flat)
    elif _differs_by_member(group, betas):
        _write_adam_directions_per_member(group, directions, betas)
    else:
        flat.zero_()
        _add_adam_directions(group, flat, directions, betas)


def _write_noisy_directions(
    group: Group, flat: Tensor, directions: list[Tensor], noise: RawNoise, members: bool
) -> float:
    """Write directions with noise; returns the unit that they are in."""
    settings = group.settings
    unit, betas = settings.sigma * noise.scale, settings.betas
    is_simple = betas is not None and not settings.adaptive_noise and flat.is_cpu
    if not is_simple or isinstance(unit, Tensor) or unit < _LEAST_UNIT or _differs_by_member(group, betas):
        _write_directions(group, flat, directions)
        _add_noise(group, flat, directions, noise, members)
        return 1.0
    assert betas is not None
    # The noise first, in the place of zeros, and as it was drawn: directions are added in its unit.
    flat.copy_(noise.flat)
    _add_adam_directions(group, flat, directions, betas, unit)
    return unit


def _add_adam_directions(
    group: Group, flat: Tensor, directions: list[Tensor], betas: tuple[Scalar, Scalar], unit: float = 1.0
) -> None:
    settings, steps, device = group.settings, group.steps, flat.device
    numbers: Any = (*betas, settings.eps)
    beta1, beta2, eps = numbers
    if device.type == "cuda" and not settings.capturable:
        steps = [torch.full((), steps[0].item(), dtype=torch.float32, device=device)] * len(steps)
    grads, first, second = group.grads, *group.moment_runs
    is_packed = device.type == "cpu" and group.counts_on_host and len(first) == len(second) == 1
    if is_packed and group.flat_grads is not None:
        directions, grads, steps = [flat], [group.flat_grads], steps[:1]
    else:
        first, second = group.first_moments, group.second_moments
    # Adam's fused kernel subtracts lr * direction from what it is given, and a negative lr adds it.
    torch._fused_adam_(
        directions,
        grads,
        first,
        second,
        [],
        steps,
        lr=-1 / unit,
        beta1=beta1,
        beta2=beta2,
        weight_decay=0.0,
        eps=eps,
        amsgrad=False,
        maximize=False,
        found_inf=None if group.proceed is None else (~group.proceed).float(),
    )


def _differs_by_member(group: Group, betas: tuple[Scalar, Scalar] | None) -> bool:
    """Whether settings of the moments, or step counts, are tensors."""
    numbers = (*(betas or ()), group.settings.eps)
    return group.steps[0].dim() > 0 or any(isinstance(number, Tensor) for number in numbers)


def _write_adam_directions_per_member(group: Group, directions: list[Tensor], betas: tuple[Scalar, Scalar]) -> None:
    """Equivalent of the fused kernel for settings and step counts that are tensors, in few passes over memory."""
    weights = [1 - group.kept(beta) for beta in betas]
    first, second = (_bias_corrections(group, beta, members=True) for beta in betas)
    # (m / first) / (sqrt(v / second) + eps) = m / (scale * sqrt(v) + offset)
    scales, offsets = first / second**0.5, first * group.settings.eps
    for i, (grad, direction) in enumerate(zip(group.grads, directions, strict=True)):
        moment, square = group.first_moments[i], group.second_moments[i]
        moment.lerp_(grad, _shaped(weights[0], grad))
        square.lerp_(torch.mul(grad, grad, out=direction), _shaped(weights[1], grad))
        scale, offset = (_shaped(_of_parameter(each, i), grad) for each in (scales, offsets))
        torch.sqrt(square, out=direction)
        if isinstance(scale, Tensor) and isinstance(offset, Tensor):
            torch.addcmul(offset, direction, scale, out=direction)
        else:
            direction.mul_(scale).add_(offset)
        torch.div(moment, direction, out=direction)


def _of_parameter(values: Scalar, i: int) -> Scalar:
    """What :func:`_bias_corrections` returns, for one parameter."""
    return values[i] if isinstance(values, Tensor) and values.dim() == 2 else values


def _shaped(value: Scalar, like: Tensor) -> Any:
    """A number for all of a tensor, or one per member, in the tensor's precision."""
    shaped = per_member(value, like)
    return shaped.to(like.dtype) if isinstance(shaped, Tensor) else shaped


def _add_noise(group: Group, flat: Tensor, directions: list[Tensor], noise: RawNoise, members: bool) -> None:
    settings = group.settings
    if not settings.adaptive_noise and not isinstance(settings.sigma, Tensor):
        flat.add_(noise.flat, alpha=settings.sigma * noise.scale)
        return
    stds = [settings.sigma] * len(directions)
    if settings.adaptive_noise:
        references = _noise_references(group, directions, members)
        stds = [adaptive_std(settings, reference) for reference in references]
    for direction, raw, std in zip(directions, unflatten(noise.flat, directions), stds, strict=True):
        if isinstance(std, Tensor) and std.dim() > 0:
            direction.addcmul_(raw.to(direction.dtype), _shaped(std * noise.scale, direction))
        else:
            direction.add_(raw * (std * noise.scale))


def _noise_references(group: Group, directions: list[Tensor], members: bool) -> list[Tensor]:
    """Reference that the noise of each tensor is proportional to: 0-dim, or ``[M]``."""
    settings = group.settings
    if settings.noise_reference == "direction":
        return [n / elements(d, members) ** 0.5 for n, d in zip(_norms(directions, members), directions, strict=True)]
    if settings.instant_noise_scale:
        return _norms(group.grads, members)
    corrections = _bias_corrections(group, settings.noise_beta, members)
    if isinstance(corrections, Tensor) and not group.counts_on_host:
        return list(torch._foreach_div(group.norm_emas, list(corrections.unbind())))
    return list(torch._foreach_div(group.norm_emas, _each(corrections, group.norm_emas)))


def _apply_gate(group: Group, flat: Tensor, extremes: Extremes, members: bool, scratch: Scratch) -> None:
    """Multiply the directions by ``1 - s``."""
    settings = group.settings
    corrections = _bias_corrections(group, settings.beta_utility, members)
    if settings.gate == "anchored":
        # All that turns u into the argument of the sigmoid: bias correction, η and τ.
        divisors = gate_divisors(corrections, extremes.anchor(flat.dtype) / settings.temperature, flat.dtype)
        if not isinstance(divisors, Tensor) and flat.is_cpu:
            _multiply_by_sigmoid(flat, group.utility_runs, -1 / divisors)
            return
        gates, _ = _quotients(group, -divisors, members, scratch)
        _multiply_by_sigmoid(flat, [gates], 1.0)
    else:
        low, high = extremes
        gates, views = _quotients(group, gate_divisors(corrections, 1.0, flat.dtype), members, scratch)
        parts = views if members else [gates]
        for part in parts:
            part.sub_(per_member(low, part)).mul_(per_member(1 / (high - low + MINMAX_EPS), part))
        gates.clamp_(0, 1).sub_(0.5)
        for part in parts:
            part.mul_(per_member(2 * settings.temperature, part))
        flat.addcmul_(flat, gates.sigmoid_(), value=-1)


def _multiply_by_sigmoid(flat: Tensor, arguments: list[Tensor], slope: float) -> None:
    """``flat *= sigmoid(slope * argument)`` in one pass: torch computes that as the derivative of softplus."""
    parts = [flat] if len(arguments) == 1 else unflatten(flat, arguments)
    for part, argument in zip(parts, arguments, strict=True):
        # Beyond the threshold the sigmoid counts as 1: exp(50) is finite, and 1 - sigmoid(50) is not representable.
        torch.ops.aten.softplus_backward.grad_input(part, argument, slope, 50.0, grad_input=part)


def _quotients(group: Group, divisors: Scalar, members: bool, scratch: Scratch) -> tuple[Tensor, list[Tensor]]:
    """The utilities over ``divisors``, in scratch memory: flat, and by parameter."""
    flat, views = scratch.like("gates", group.utilities)
    by_parameter = isinstance(divisors, Tensor) and not group.counts_on_host
    if members:
        for i, (utility, view) in enumerate(zip(group.utilities, views, strict=True)):
            divisor = divisors[i] if by_parameter and isinstance(divisors, Tensor) else divisors
            torch.div(utility, per_member(divisor, utility), out=view)
        return flat, views
    runs = group.utility_runs
    utilities = runs[0] if len(runs) == 1 else torch.cat(runs)
    if by_parameter and isinstance(divisors, Tensor):
        divisors = scratch.spread(divisors, group.utilities)
    torch.div(utilities, divisors, out=flat)
    return flat, views


def _descend(group: Group, steps: list[Tensor], unit: float) -> None:
    """Weight decay, and the step, which is in a unit."""
    settings, params = group.settings, group.params
    lr, decay, factor = settings.lr, settings.weight_decay, STEP_FACTOR[settings.gate]
    if isinstance(decay, Tensor) or (isinstance(lr, Tensor) and lr.dim() > 0):
        for param, step in zip(params, steps, strict=True):
            param.mul_(_shaped(1 - lr * decay, param))
            if isinstance(lr, Tensor):
                param.addcmul_(step, _shaped(-factor * unit * lr, step))
            else:
                param.sub_(step, alpha=factor * unit * lr)
        return
    factor *= unit
    # p - (factor * lr) * (step + decay / factor * p)
    torch._fused_sgd_(
        params,
        steps,
        [],
        weight_decay=decay / factor,
        momentum=0.0,
        lr=factor * lr,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    )


def _bias_corrections(group: Group, beta: Scalar, members: bool) -> Scalar:
    """``1 - beta^t``: a number, or ``[M]`` of them, for all parameters.

    Where the host may not know the counts ``t``, one for each parameter: ``[parameters]``, or with a member axis
    ``[parameters, 1 or M]``.
    """
    if group.counts_on_host:
        return bias_correction(beta, group.steps[0].item())
    counts = torch.stack(group.steps)
    return bias_correction(beta, counts.view(len(counts), -1) if members else counts)


def gate_divisors(corrections: Scalar, value: Scalar, dtype: torch.dtype) -> Scalar:
    """Bias corrections times a value, never below a normal number: the product may underflow, and 0/0 is NaN."""
    product = corrections * value
    tiny = torch.finfo(dtype).tiny
    return product.to(dtype).clamp_min(tiny) if isinstance(product, Tensor) else max(product, tiny)


def _corrected(values: Sequence[Tensor], corrections: Scalar) -> Tensor:
    """Values (0-dim or ``[M]``) of the utilities, stacked and bias-corrected."""
    return torch.stack(tuple(values)) / corrections


def _norms(tensors: list[Tensor], members: bool) -> list[Tensor]:
    return [norm(t, members) for t in tensors] if members else list(torch._foreach_norm(tensors))


def _each(value: Scalar, tensors: list[Tensor]) -> Any:
    """A scalar as a foreach operation takes it: one for all tensors, or one per member shaped for each tensor."""
    if isinstance(value, Tensor) and value.dim() == 1:
        return [per_member(value, t) for t in tensors]
    return value
