"""Averages over time of the gradients of a list of tensors: the measuring half of variance gradient scaling."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from driftproof._arguments import check_number
from driftproof.optim._core import compute_dtype, unflatten

Statistic: TypeAlias = Literal["elementwise", "spatial_mean"]

_VECTORS = ("weight", "energy", "mean", "signal")
_TOTALS = ("norms", "largest")
STATE_KEYS = ("keys", "shapes", "moments", *_VECTORS, *_TOTALS)
"""Of a state."""
_NEVER_NEGATIVE = ("weight", "energy", "signal", "norms", "largest")
_FULL_WEIGHT = 1.001
"""What weights of an average add up to in the end, but for rounding."""
_HUGE = 1e15
"""Gradients beyond count as an overflow: millions of their squares would not fit a float32."""

_SMALL = 1 << 13
"""On a CPU, tensors of up to so many elements cost by the operation, larger ones by the pass over memory."""
_COLUMNS = 128


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
        self.shapes = [tuple(p.shape) for p in self.params]
        self.statistic: Statistic = statistic
        self.device = self.params[0].device if self.params else torch.device("cpu")
        self.on_host = all(p.is_cpu for p in self.params)
        # [parameters]: the sum of weights (1 - beta^t while beta is constant), then what is averaged with them.
        for name in _VECTORS:
            setattr(self, name, self._zeros(len(self.params)))
        # Per element, flat, for `elementwise` alone.
        self.moments = [_zero_moment(p) for p in self.params] if statistic == "elementwise" else []
        self._pack_moments()
        # Of the whole gradient, again behind their sums of weights: norm and mean square; largest magnitude.
        self.norms = self._zeros(3)
        self.largest = self._zeros(2)
        self._zero, self._one = self._zeros(()), self._zeros(()) + 1
        self._dtypes, self._devices = [p.dtype for p in self.params], [p.device for p in self.params]

    weight: Tensor
    energy: Tensor
    mean: Tensor
    signal: Tensor

    def _zeros(self, shape: int | tuple[()]) -> Tensor:
        return torch.zeros(shape, dtype=torch.float32, device=self.device)

    @property
    def is_outdated(self) -> bool:
        """Whether the model was moved, or cast to another precision, since the averages began."""
        return [p.dtype for p in self.params] != self._dtypes or [p.device for p in self.params] != self._devices

    def fold(self, beta: float, extremes: bool = True) -> bool:
        """Fold the present gradients into the averages; ``False`` if there is none.

        Elements that are not finite, or beyond 1e15, count as zero: a step that is skipped for an overflow must not
        spoil the averages.

        Args:
            beta: What the averages keep of their past.
            extremes: Fold the largest magnitude too, which on a CPU costs a third of all.
        """
        present = [i for i, p in enumerate(self.params) if p.grad is not None and p.numel() > 0]
        if not present:
            return False
        if self.on_host and self._small is not None and len(present) == len(self.params):
            self._fold_packed(self._small, beta, extremes)
            return True
        grads = [_flat(grad) for i in present if (grad := self.params[i].grad) is not None]
        if not self.on_host:
            grads = _finite(grads)
        if self.statistic == "elementwise":
            norms, signals = self._fold_elements(grads, [self.moments[i] for i in present], beta)
            squares, signal = self._by_parameter(norms, present), self._by_parameter(signals, present)
            energy = squares
        else:
            squares = self._by_parameter(self._squared_norms(grads), present)
            mean = self._by_parameter([g.mean() for g in grads], present)
            self._average("mean", mean, present, beta)
            energy, signal = mean.square(), self.mean.square()
        self._average("weight", torch.ones_like(energy), present, beta)
        self._average("energy", energy, present, beta)
        self._average("signal", signal, present, 0.0)
        total = squares.sum()
        count = sum(g.numel() for g in grads)
        self.norms.lerp_(torch.stack([self._one, total.sqrt(), total / count]), 1 - beta)
        if extremes:
            self.largest.lerp_(torch.stack([self._one, self._gather(_magnitudes(grads)).amax()]), 1 - beta)
        return True

    def _fold_packed(self, small: _Rows, beta: float, extremes: bool) -> None:
        """:meth:`fold` of all gradients on a host, element by element, the small ones at once."""
        large = [_flat(grad) for i in self._large if (grad := self.params[i].grad) is not None]
        norms, signals = self._fold_elements(large, [self.moments[i] for i in self._large], beta)
        squares, signal = small.fold(self.params, beta)
        for i, norm, square in zip(self._large, norms, signals, strict=True):
            squares[i], signal[i] = norm, square
        self.weight.lerp_(self._one, 1 - beta)
        self.energy.lerp_(squares, 1 - beta)
        self.signal.copy_(signal)
        total = squares.sum().item()
        self.norms.lerp_(_vector(1.0, math.sqrt(total), total / self._count), 1 - beta)
        if extremes:
            magnitude = self._gather(_magnitudes([small.gradients, *large])).amax().item()
            self.largest.lerp_(_vector(1.0, magnitude), 1 - beta)

    def _pack_moments(self) -> None:
        """Keep the moments of small tensors in one place, where one operation reaches them all."""
        moments = self.moments[: len(self.params)] if self.on_host else []
        fits = [i for i, m in enumerate(moments) if m.dtype is torch.float32 and m.numel() <= _SMALL]
        self._small = _Rows(self.params, fits) if len(fits) > 1 else None
        self._large = [i for i in range(len(self.params)) if i not in set(fits)]
        self._count = sum(p.numel() for p in self.params)
        if self._small is not None:
            for i, packed in zip(fits, self._small.moments, strict=True):
                self.moments[i] = packed.copy_(self.moments[i])

    def __getstate__(self) -> dict[str, Any]:
        # Views would be written with all that lies around them.
        return {**self.__dict__, "moments": [moment.clone() for moment in self.moments], "_small": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._pack_moments()

    def _fold_elements(
        self, grads: list[Tensor], moments: list[Tensor], beta: float
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Update the moments; squared norms of the gradients, and of the moments."""
        if not self.on_host:
            torch._foreach_lerp_(moments, grads, 1 - beta)
            return _squared_norms(grads), _squared_norms(moments)
        norms, signals = [], []
        for i, moment in enumerate(moments):
            # Tensor by tensor, so that each is fetched from memory once.
            norms.append(_squared_norm_on_host(grads, i))
            signals.append(moment.lerp_(grads[i], 1 - beta).dot(moment))
        return norms, signals

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
        return self.shapes[i] == tuple(param.shape)

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
            "shapes": [list(shape) for shape in self.shapes],
            **{name: getattr(self, name).clone() for name in (*_VECTORS, *_TOTALS)},
            "moments": {key: moment.clone() for key, moment in zip(self.keys, self.moments, strict=False)},
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Any], statistic: Statistic) -> GradientStatistics:
        """Averages as they were saved, of no parameters yet: :meth:`adopt` them.

        Raises:
            KeyError, TypeError, ValueError: What is missing or wrong.
        """
        loaded = cls([], [], statistic)
        loaded.keys, loaded.shapes = _saved_keys(state["keys"]), _saved_shapes(state["shapes"])
        if len(loaded.shapes) != len(loaded.keys):
            raise ValueError(f"'shapes' has {len(loaded.shapes)} entries, expected {len(loaded.keys)}")
        for name in (*_VECTORS, *_TOTALS):
            expected = getattr(loaded, name).shape if name in _TOTALS else (len(loaded.keys),)
            saved = _saved(name, state[name], tuple(expected))
            if name in _NEVER_NEGATIVE and (saved < 0).any():
                raise ValueError(f"{name!r} has negative numbers")
            setattr(loaded, name, saved)
        if max(*loaded.weight.tolist(), loaded.norms[0].item(), loaded.largest[0].item()) > _FULL_WEIGHT:
            raise ValueError("weights of averages are above 1")
        moments, expected_keys = state["moments"], loaded.keys if statistic == "elementwise" else []
        if not isinstance(moments, dict) or set(moments) != set(expected_keys):
            raise ValueError("'moments' has other keys than 'keys'")
        pairs = zip(expected_keys, loaded.shapes, strict=False)
        loaded.moments = [_saved(key, moments[key], (math.prod(shape),)) for key, shape in pairs]
        return loaded

    def state_tensors(self) -> list[Tensor]:
        """All averages, themselves."""
        return [*(getattr(self, name) for name in (*_VECTORS, *_TOTALS)), *self.moments]

    def _average(self, name: str, values: Tensor, present: list[int], beta: float) -> None:
        """Fold values ``[parameters]`` into an average, at the present parameters alone."""
        vector: Tensor = getattr(self, name)
        if len(present) == len(self.params):
            vector.lerp_(values, 1 - beta)
            return
        # No index from the host: it would have to wait for the device to take it.
        here = set(present)
        mask = torch.stack([self._one if i in here else self._zero for i in range(len(self.params))])
        vector.lerp_(values, mask * (1 - beta))

    def _by_parameter(self, scalars: Sequence[Tensor], present: list[int]) -> Tensor:
        """Spread 0-dim values of the present parameters over ``[parameters]``, with zeros elsewhere."""
        if len(present) == len(self.params):
            return self._gather(scalars)
        values = dict(zip(present, scalars, strict=True))
        return self._gather([values.get(i, self._zero) for i in range(len(self.params))])

    def _squared_norms(self, tensors: list[Tensor]) -> Sequence[Tensor]:
        """``‖t‖²`` of each flat tensor. On a host, tensors that are not finite are replaced in the list."""
        if self.on_host:
            return [_squared_norm_on_host(tensors, i) for i in range(len(tensors))]
        return _squared_norms(tensors)

    def _gather(self, scalars: Sequence[Tensor]) -> Tensor:
        """Stack 0-dim tensors of any device and precision as the averages are kept."""
        if self.on_host:
            return torch.stack(tuple(scalars)).to(torch.float32)
        return torch.stack([s.to(self.device, torch.float32) for s in scalars])

    @cached_property
    def _counts(self) -> Tensor:
        """Elements of every parameter."""
        counts = [float(math.prod(shape)) for shape in self.shapes]
        return torch.tensor(counts, dtype=torch.float32, device="cpu").to(self.device, non_blocking=True)


class _Rows:
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

    def fold(self, params: list[Tensor], beta: float) -> tuple[Tensor, Tensor]:
        """Update the averages; squared norms of gradients and averages ``[parameters]``, zeros for large tensors."""
        torch._foreach_copy_(self._views, [grad for i in self.indices if (grad := params[i].grad) is not None])
        if not self.gradients.dot(self.gradients).item() < _HUGE**2:
            self.gradients.copy_(_zero_where_huge(self.gradients))
        self._average.lerp_(self.gradients, 1 - beta)
        squares = torch.linalg.vector_norm(self._matrices, dim=2).square_()
        totals = torch.zeros(2, len(params), dtype=torch.float32, device="cpu")
        squares, signals = totals.index_add_(1, self._owners, squares).unbind()
        return squares, signals


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
    """Copies with zeros for what is not finite or too large to be squared, in few operations."""
    if len({(g.device, g.dtype) for g in grads}) > 1:
        return [_zero_where_huge(g) for g in grads]
    return unflatten(_zero_where_huge(torch.cat(grads)), grads)


def _squared_norm_on_host(grads: list[Tensor], i: int) -> Tensor:
    """``‖g‖²`` of one of the gradients, which is replaced in the list if it is not finite: seldom, hence no copies."""
    square = grads[i].dot(grads[i])
    if not square.item() < _HUGE**2:
        grads[i] = _zero_where_huge(grads[i])
        square = grads[i].dot(grads[i])
    return square


def _zero_where_huge(grad: Tensor) -> Tensor:
    # NaN is not smaller than anything.
    return torch.where(grad.abs() < _HUGE, grad, 0)


def saved_number(name: str, value: Any, at_least: float, at_most: float) -> float:
    """A number out of a state dict, or a ``ValueError``."""
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex() or value.dtype == torch.bool:
            raise ValueError(f"Invalid {name}: a tensor of shape {tuple(value.shape)}; must be one number")
        value = value.item()
    check_number(name, value, at_least=at_least, at_most=at_most)
    return float(value)


def _saved_keys(keys: Any) -> list[str]:
    if not isinstance(keys, (list, tuple)) or not all(isinstance(key, str) for key in keys):
        raise ValueError("'keys' must be a list of names")
    if len(set(keys)) != len(keys):
        raise ValueError("'keys' has a name twice")
    return list(keys)


def _saved_shapes(shapes: Any) -> list[tuple[int, ...]]:
    if not isinstance(shapes, (list, tuple)):
        raise ValueError("'shapes' must be a list")
    for shape in shapes:
        if not isinstance(shape, (list, tuple)) or not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError("'shapes' must be lists of lengths")
    return [tuple(shape) for shape in shapes]


def _saved(name: str, value: Any, shape: tuple[int, ...]) -> Tensor:
    """A tensor out of a state dict, in float32 or wider, or a ``ValueError``."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        raise ValueError(f"{name!r} must be a tensor of floating-point numbers")
    tensor = value
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name!r} has shape {tuple(tensor.shape)}, expected {shape}")
    if not tensor.isfinite().all():
        raise ValueError(f"{name!r} is not finite")
    return tensor.to(compute_dtype(tensor.dtype))


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


def _vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device="cpu")


def _zero_moment(param: Tensor) -> Tensor:
    return torch.zeros(param.numel(), dtype=compute_dtype(param.dtype), device=param.device)
