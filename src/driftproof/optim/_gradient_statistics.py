"""Averages over time of the gradients of a list of tensors: the measuring half of variance gradient scaling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from driftproof.optim._core import compute_dtype, unflatten

Statistic: TypeAlias = Literal["elementwise", "spatial_mean"]

_VECTORS = ("weight", "energy", "mean", "signal")
_TOTALS = ("norms", "largest")


class GradientStatistics:
    """Exponential averages of gradients. They start at zero, and the sum of their weights corrects that bias, once.

    With ``elementwise``, ``energy`` averages ``‖g‖²``, and ``signal`` is the squared norm of the average gradient. With
    ``spatial_mean``, ``energy`` averages the square of the tensor's mean gradient, and ``signal`` is the square of the
    average mean. Either way, bias-corrected, ``energy - signal`` is the variance over time.

    Args:
        keys: A unique name for each parameter.
        params: The tensors whose gradients are averaged.
        statistic: What is averaged.
    """

    def __init__(self, keys: Sequence[str], params: Sequence[Tensor], statistic: Statistic) -> None:
        self.keys = list(keys)
        self.params = list(params)
        self.statistic: Statistic = statistic
        self.device = self.params[0].device if self.params else torch.device("cpu")
        # [parameters]: the sum of weights (1 - beta^t while beta is constant), then what is averaged with them.
        for name in _VECTORS:
            setattr(self, name, torch.zeros(len(self.params), device=self.device))
        # Per element, flat, for `elementwise` alone.
        self.moments = [_zero_moment(p) for p in self.params] if statistic == "elementwise" else []
        # Of the whole gradient, again behind their sums of weights: norm and mean square; largest magnitude.
        self.norms = torch.zeros(3, device=self.device)
        self.largest = torch.zeros(2, device=self.device)
        self._counts = torch.tensor([float(p.numel()) for p in self.params], device=self.device)
        self.on_host = all(p.is_cpu for p in self.params)
        self._rows: dict[tuple[int, ...], Tensor] = {}

    weight: Tensor
    energy: Tensor
    mean: Tensor
    signal: Tensor

    def fold(self, beta: float, extremes: bool = True) -> bool:
        """Fold the present gradients into the averages; ``False`` if there is none.

        Elements that are not finite count as zero: a step that is skipped for an overflow must not spoil the averages.

        Args:
            beta: What the averages keep of their past.
            extremes: Fold the largest magnitude too, which on a CPU costs a third of all.
        """
        found = [(i, p.grad) for i, p in enumerate(self.params) if p.grad is not None and p.numel() > 0]
        if not found:
            return False
        rows, grads = self._rows_of(tuple(i for i, _ in found)), [_flat(grad) for _, grad in found]
        if not self.on_host:
            grads = _finite(grads)
        if self.statistic == "elementwise":
            squares, signal = self._fold_elements(grads, [self.moments[i] for i, _ in found], beta)
            energy = squares
        else:
            squares = self._squared_norms(grads)
            energy, signal = self._fold_means(grads, rows, beta)
        self._average("weight", rows, torch.ones_like(energy), beta)
        self._average("energy", rows, energy, beta)
        self._average("signal", rows, signal, 0.0)
        total = squares.sum()
        one = torch.ones_like(total)
        self.norms.lerp_(torch.stack([one, total.sqrt(), total / sum(g.numel() for g in grads)]), 1 - beta)
        if extremes:
            self.largest.lerp_(torch.stack([one, self._gather(_magnitudes(grads)).amax()]), 1 - beta)
        return True

    def _fold_elements(self, grads: list[Tensor], moments: list[Tensor], beta: float) -> tuple[Tensor, Tensor]:
        if not self.on_host:
            torch._foreach_lerp_(moments, grads, 1 - beta)
            return self._squared_norms(grads), self._squared_norms(moments)
        # Tensor by tensor, so that each is fetched from memory once.
        values = []
        for i, moment in enumerate(moments):
            values += [_squared_norm_on_host(grads, i), moment.lerp_(grads[i], 1 - beta).dot(moment)]
        energy, signal = torch.stack(values).to(torch.float32).view(-1, 2).unbind(1)
        return energy, signal

    def _fold_means(self, grads: list[Tensor], rows: Tensor | None, beta: float) -> tuple[Tensor, Tensor]:
        mean = self._gather([g.mean() for g in grads])
        self._average("mean", rows, mean, beta)
        return mean.square(), (self.mean if rows is None else self.mean[rows]).square()

    def variances(self, eps: float) -> Tensor:
        """Noise over signal of every tensor ``[parameters]``; NaN where no gradient, or none but zeros, was seen."""
        energy = self.energy / self.weight
        signal = self.signal / self.weight.square()
        return (energy - signal).clamp_min(0) / (signal + eps * energy)

    def total_averages(self) -> dict[str, Tensor]:
        """Averages of the whole gradient's norm, mean, variance over elements, and largest magnitude."""
        weight, norm, mean_square = self.norms.unbind()
        if self.statistic == "elementwise":
            sums = self._gather([m.sum() for m in self.moments])
        else:
            sums = self.mean * self._counts
        seen = self.weight > 0
        mean = torch.where(seen, sums / self.weight, 0).sum() / torch.where(seen, self._counts, 0).sum()
        return {
            "grad_norm": norm / weight,
            "grad_mean": mean,
            "grad_var": (mean_square / weight - mean.square()).clamp_min(0),
            "grad_max": self.largest[1] / self.largest[0],
        }

    def fits(self, i: int, param: Tensor) -> bool:
        """Whether the averages of parameter ``i`` can be those of ``param``."""
        return self.statistic != "elementwise" or self.moments[i].numel() == param.numel()

    def adopt(self, other: GradientStatistics, sources: Sequence[int | None]) -> None:
        """Take over averages: parameter ``i`` those of parameter ``sources[i]`` of ``other``, where there is one."""
        for name in _TOTALS:
            getattr(self, name).copy_(getattr(other, name))
        for i, j in enumerate(sources):
            if j is None:
                continue
            for name in _VECTORS:
                getattr(self, name)[i] = getattr(other, name)[j]
            if self.statistic == "elementwise":
                self.moments[i].copy_(other.moments[j])

    def state_dict(self) -> dict[str, Any]:
        """A copy of the averages; those of single elements are by the parameters' keys."""
        return {
            "keys": list(self.keys),
            **{name: getattr(self, name).clone() for name in (*_VECTORS, *_TOTALS)},
            "moments": {key: moment.clone() for key, moment in zip(self.keys, self.moments, strict=False)},
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Any], statistic: Statistic) -> GradientStatistics:
        """Averages as they were saved, of no parameters yet: :meth:`adopt` them."""
        loaded = cls([], [], statistic)
        loaded.keys = list(state["keys"])
        for name in (*_VECTORS, *_TOTALS):
            value = torch.as_tensor(state[name], dtype=torch.float32)
            expected = getattr(loaded, name).shape if name in _TOTALS else (len(loaded.keys),)
            if tuple(value.shape) != tuple(expected):
                raise ValueError(f"{name!r} has shape {tuple(value.shape)}, expected {tuple(expected)}")
            setattr(loaded, name, value)
        if statistic == "elementwise":
            loaded.moments = [state["moments"][key] for key in loaded.keys]
        return loaded

    def _average(self, name: str, rows: Tensor | None, value: Tensor, beta: float) -> None:
        vector = getattr(self, name)
        if rows is None:
            vector.lerp_(value, 1 - beta)
        else:
            vector.index_copy_(0, rows, vector[rows].lerp(value, 1 - beta))

    def _rows_of(self, present: tuple[int, ...]) -> Tensor | None:
        """Where in the vectors these parameters are; ``None``: everywhere. Kept, for it comes from the host."""
        if len(present) == len(self.params):
            return None
        if present not in self._rows:
            self._rows[present] = torch.tensor(present, device=self.device)
        return self._rows[present]

    def _squared_norms(self, tensors: list[Tensor]) -> Tensor:
        """``‖t‖²`` of each flat tensor. On a host, tensors that are not finite are replaced in the list."""
        if self.on_host:
            return self._gather([_squared_norm_on_host(tensors, i) for i in range(len(tensors))])
        return self._gather(_squared_norms(tensors))

    def _gather(self, scalars: Sequence[Tensor]) -> Tensor:
        """Stack 0-dim tensors of any device and precision as the averages are kept."""
        return torch.stack([s.to(self.device, torch.float32) for s in scalars])


def gradient_totals(grads: Sequence[Tensor], device: torch.device) -> dict[str, Tensor]:
    """Norm, mean, variance over elements and largest magnitude of one whole gradient; zeros if it is empty."""
    wide = [_flat(g) for g in grads if g.numel() > 0]
    if not wide:
        return {name: torch.zeros((), device=device) for name in ("grad_norm", "grad_mean", "grad_var", "grad_max")}
    count = sum(g.numel() for g in wide)
    total = torch.stack([s.to(device) for s in _squared_norms(wide)]).sum()
    mean = torch.stack([g.sum().to(device) for g in wide]).sum() / count
    return {
        "grad_norm": total.sqrt(),
        "grad_mean": mean,
        "grad_var": (total / count - mean.square()).clamp_min(0),
        "grad_max": torch.stack([m.to(device) for m in _magnitudes(wide)]).amax(),
    }


def scale_all(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply tensors of any device by a 0-dim factor, in place."""
    if len({t.device for t in tensors}) == 1:
        torch._foreach_mul_(tensors, factor)
        return
    for tensor in tensors:
        tensor.mul_(factor.to(tensor.device))


def _finite(grads: list[Tensor]) -> list[Tensor]:
    """Copies with zeros for what is not finite, in few operations."""
    if len({(g.device, g.dtype) for g in grads}) > 1:
        return [g.nan_to_num(0, 0, 0) for g in grads]
    return unflatten(torch.cat(grads).nan_to_num_(0, 0, 0), grads)


def _squared_norm_on_host(grads: list[Tensor], i: int) -> Tensor:
    """``‖g‖²`` of one of the gradients, which is replaced in the list if it is not finite: seldom, hence no copies."""
    square = grads[i].dot(grads[i])
    if not math.isfinite(square.item()):
        grads[i] = grads[i].nan_to_num(0, 0, 0)
        square = grads[i].dot(grads[i])
    return square


def _squared_norms(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """``‖t‖²`` of each flat tensor, 0-dim."""
    if all(t.is_cpu for t in tensors):
        # Several times faster than a norm.
        return [t.dot(t) for t in tensors]
    norms = torch._foreach_norm(list(tensors))
    return torch._foreach_mul(norms, norms)


def _magnitudes(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The largest magnitude in each tensor, 0-dim."""
    if all(t.is_cpu for t in tensors):
        # Several times faster than a norm of order infinity.
        return [torch.maximum(high, -low) for low, high in (t.aminmax() for t in tensors)]
    return torch._foreach_norm(list(tensors), torch.inf)


def _flat(grad: Tensor) -> Tensor:
    """A gradient as one row, in float32 or wider."""
    flat = grad if grad.dim() == 1 else grad.reshape(-1)
    return flat if flat.dtype.itemsize >= 4 else flat.float()


def _zero_moment(param: Tensor) -> Tensor:
    return torch.zeros(param.numel(), dtype=compute_dtype(param.dtype), device=param.device)
