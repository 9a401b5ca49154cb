"""Averages over time of the gradients of a list of tensors, for variance gradient scaling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from driftproof._members import Number, member_shape
from driftproof.optim._core import compute_dtype
from driftproof.optim._packed_gradients import HUGE, PackedGradients, zero_where_huge
from driftproof.optim._saved import saved_keys, saved_shapes, saved_tensor
from driftproof.settings.scaling import Statistic

if TYPE_CHECKING:
    from driftproof.optim._fused import Measured

_VECTORS = ("weight", "energy", "mean", "signal")
_TOTALS = ("norms", "largest")
_PROGRESS = ("step_count", "factor")
STATE_KEYS = ("keys", "shapes", "moments", *_VECTORS, *_TOTALS)
"""Keys of a state."""
_NEVER_NEGATIVE = ("weight", "energy", "signal", "norms", "largest")
_FULL_WEIGHT = 1.001
"""Limit of an average's sum of weights, with a margin for rounding."""
_SMALL = 1 << 13
"""On a CPU, up to this many elements, cost grows with the number of operations; above, with memory traffic."""


class GradientStatistics:
    """Exponential averages of gradients. They start at zero, and the sum of their weights corrects that bias, once.

    With ``elementwise``, ``energy`` averages ``‖g‖²``, and ``signal`` is the squared norm of the average gradient. With
    ``spatial_mean``, ``energy`` averages the square of the tensor's mean gradient, and ``signal`` is the square of the
    average mean. Either way, bias-corrected, ``energy - signal`` is the variance over time.

    Args:
        keys: A unique name for each parameter.
        params: The tensors whose gradients are averaged.
        statistic: What is averaged.
        members: How many independent learners the leading axis of every parameter counts; ``None``: there is one, and
            no such axis. Numbers about the gradient are then ``[M]``, here written as ``[...]``.
    """

    def __init__(
        self, keys: Sequence[str], params: Sequence[Tensor], statistic: Statistic, members: int | None = None
    ) -> None:
        self.keys = list(keys)
        self.params = list(params)
        self.shapes = [tuple(p.shape) for p in self.params]
        self.statistic: Statistic = statistic
        self.members = members
        self.device = self.params[0].device if self.params else torch.device("cpu")
        self.on_host = members is None and all(p.is_cpu for p in self.params)
        # [..., parameters]: the sum of weights (1 - beta^t while beta is constant), then what is averaged with them.
        for name in _VECTORS:
            setattr(self, name, self._zeros(len(self.params)))
        # Per element [..., elements], for `elementwise` alone.
        self.moments = [self._zero_moment(p) for p in self.params] if statistic == "elementwise" else []
        if members is not None and self.moments and len({moment.dtype for moment in self.moments}) == 1:
            self._pair = torch.stack([torch.cat(self.moments, 1)] * 2)
            self.moments = list(torch.split(self._pair[1], self._sizes, 1))
        self._pack_moments()
        # Of the whole gradient, again behind their sums of weights: norm and mean square; largest magnitude.
        self.norms = self._zeros(3)
        self.largest = self._zeros(2)
        self.step_count, self.factor = self._zeros(), self._zeros() + 1
        self._zero, self._one = self._zeros(), self._zeros() + 1
        self._dtypes, self._devices = [p.dtype for p in self.params], [p.device for p in self.params]

    _pair: Tensor | None = None
    """Gradients and moments of several members side by side ``[2, M, elements]``; a parameter's moments are views."""
    weight: Tensor
    energy: Tensor
    mean: Tensor
    signal: Tensor
    step_count: Tensor
    """Steps so far ``[...]``; the averages themselves do not need it."""
    factor: Tensor
    """The last scaling factor ``[...]``."""

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros((*member_shape(self.members), *shape), dtype=torch.float32, device=self.device)

    def _zero_moment(self, param: Tensor) -> Tensor:
        return torch.zeros_like(self._rows(param), dtype=compute_dtype(param.dtype))

    def _rows(self, tensor: Tensor) -> Tensor:
        """A tensor as one row ``[..., elements]``."""
        return tensor.reshape(-1) if self.members is None else tensor.reshape(self.members, -1)

    @property
    def is_outdated(self) -> bool:
        """Whether the model was moved, or cast to another precision, since the averages began."""
        return [p.dtype for p in self.params] != self._dtypes or [p.device for p in self.params] != self._devices

    def fold(
        self,
        grads: Sequence[Tensor | None],
        beta: Number,
        extremes: bool = True,
        proceed: Tensor | None = None,
        joint: Tensor | None = None,
    ) -> bool:
        """Fold gradients into the averages; ``False`` if there is none.

        Elements that are not finite, or beyond 1e15, count as zero: a step that is skipped for an overflow must not
        spoil the averages.

        Args:
            grads: One for each parameter, or ``None``.
            beta: Decay of the averages.
            extremes: Fold the largest magnitude too, which on a CPU costs a third of all.
            proceed: Where averages change at all, ``[...]`` bool.
            joint: The gradients of all parameters side by side ``[M, elements]``, if they are and all are finite.
        """
        present = [i for i, grad in enumerate(grads) if grad is not None and grad.numel() > 0]
        if not present:
            return False
        weight = 1 - beta if proceed is None else torch.where(proceed, 1 - beta, 0.0)
        packed = self._packed if self.on_host and len(present) == len(grads) else None
        singly = present if packed is None else self._large
        rows = {i: _wide(self._rows(grad)) for i in singly if (grad := grads[i]) is not None}
        if not self.on_host and joint is None:
            joint, finite = _finite(list(rows.values()))
            rows = dict(zip(rows, finite, strict=True))
        if self.statistic == "elementwise":
            norms, averages = self._fold_elements(rows, weight, joint)
            if packed is None:
                squares, signals = self._by_parameter(norms), self._by_parameter(averages)
            else:
                squares, signals = packed.fold(grads, weight)
                for i in rows:
                    squares[i], signals[i] = norms[i], averages[i]
            energy = squares
        else:
            squares = self._by_parameter({i: self._squared_norm(rows, i) for i in rows})
            means = self._by_parameter({i: row.mean(-1) for i, row in rows.items()})
            self._average("mean", means, present, weight)
            energy, signals = means.square(), self.mean.square()
        count = sum(self._sizes[i] for i in present)
        if self.on_host and proceed is None and len(present) == len(self.params) and isinstance(weight, float):
            self._average_on_host(squares, energy, signals, weight, count)
        else:
            self._average("weight", self._one.unsqueeze(-1), present, weight)
            self._average("energy", energy, present, weight)
            # Without weight where nothing changes: there, averages are what they were.
            self._average("signal", signals, present, 1.0 if proceed is None else proceed.float())
            self._average_total(squares, count, weight)
        if extremes:
            together = [] if packed is None else [packed.gradients]
            if self.members is not None and joint is not None:
                largest = torch.linalg.vector_norm(joint, torch.inf, dim=-1).float()
            else:
                largest = self._gather(_magnitudes([*together, *rows.values()])).amax(-1)
            self._lerp(self.largest, (largest,), weight)
        return True

    def fold_measured(self, measured: Measured, weight: Tensor, proceed: Tensor) -> None:
        """What :meth:`fold` does with gradients of all parameters that are measured already; the caller folds moments.

        Args:
            measured: What :meth:`driftproof.optim._fused.MemberKernels.measure` has found.
            weight: Weight of the gradients, 0 where no average changes ``[M]``.
            proceed: Where averages change at all ``[M]`` bool.
        """
        assert measured.signals is not None
        flags = proceed.unsqueeze(-1)
        squares, signals = (torch.where(flags, each, 0) for each in (measured.squares, measured.signals))
        column = weight.unsqueeze(-1)
        self.weight.lerp_(self._one.unsqueeze(-1), column)
        self.energy.lerp_(squares, column)
        self.signal.lerp_(signals, flags.float())
        self._average_total(squares, sum(self._sizes), weight)
        self._lerp(self.largest, (torch.where(proceed, measured.largest, 0),), weight)

    def _average_total(self, squares: Tensor, count: int, weight: Number) -> None:
        """Fold norm and mean square of a whole gradient of so many elements, by the squares of its parts' norms."""
        total = squares.sum(-1)
        self._lerp(self.norms, (total.sqrt(), total / count), weight)

    def _average_on_host(self, squares: Tensor, energy: Tensor, signals: Tensor, weight: float, count: int) -> None:
        """Fold numbers of all parameters. NumPy takes a third of torch's time for an operation on few numbers."""
        square = float(squares.numpy().sum())
        totals = torch.tensor((1.0, math.sqrt(square), square / count), device="cpu").numpy()
        for average, values in ((self.weight, 1), (self.energy, energy.numpy()), (self.norms, totals)):
            numbers = average.numpy()
            numbers += weight * (values - numbers)
        self.signal.numpy()[:] = signals.numpy()

    def _lerp(self, average: Tensor, values: Sequence[Tensor], weight: Number) -> None:
        """Fold values ``[...]`` of the whole gradient into an average, behind their sum of weights."""
        average.lerp_(torch.stack([self._one, *values], -1), _column(weight))

    def _pack_moments(self) -> None:
        """Pack the moments of small tensors on a CPU, so that one operation covers them all."""
        moments = self.moments[: len(self.params)] if self.on_host else []
        fits = [i for i, m in enumerate(moments) if m.dtype is torch.float32 and m.numel() <= _SMALL]
        self._packed = PackedGradients(self.params, fits) if len(fits) > 1 else None
        self._large = [i for i in range(len(self.params)) if i not in set(fits)]
        if self._packed is not None:
            for i, packed in zip(fits, self._packed.moments, strict=True):
                self.moments[i] = packed.copy_(self.moments[i])

    def __getstate__(self) -> dict[str, Any]:
        # Views would be written with all that lies around them.
        moments = [moment.clone() for moment in self.moments]
        return {**self.__dict__, "moments": moments, "_packed": None, "_pair": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._pack_moments()

    def _fold_elements(
        self, rows: dict[int, Tensor], weight: Number, joint: Tensor | None
    ) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Update the moments; squared norms of gradients, and of moments, by parameter.

        Args:
            rows: Gradients by parameter.
            weight: Weight of the gradients in the averages.
            joint: The gradients side by side, if they are.
        """
        if self.on_host:
            norms, averages = {}, {}
            for i in rows:
                # Tensor by tensor, so that each is fetched from memory once.
                norms[i] = self._squared_norm(rows, i)
                averages[i] = self.moments[i].lerp_(rows[i], weight).dot(self.moments[i])
            return norms, averages
        moments, grads = [self.moments[i] for i in rows], list(rows.values())
        if self._pair is not None and joint is not None and len(rows) == len(self.params):
            if joint.data_ptr() != self._pair.data_ptr():
                self._pair[0].copy_(joint)
            self._pair[1].lerp_(self._pair[0], _column(weight))
            # One operation for a parameter's gradient and moment.
            squares = self._squared_norms(list(torch.split(self._pair, self._sizes, 2)))
            return {i: s[0] for i, s in zip(rows, squares, strict=True)}, {
                i: s[1] for i, s in zip(rows, squares, strict=True)
            }
        if isinstance(weight, Tensor):
            torch._foreach_mul_(moments, _each(1 - weight, moments))
            torch._foreach_add_(moments, torch._foreach_mul(grads, _each(weight, moments)))
        else:
            torch._foreach_lerp_(moments, grads, weight)
        return tuple(dict(zip(rows, self._squared_norms(t), strict=True)) for t in (grads, moments))  # type: ignore[return-value]

    def variances(self, eps: Number) -> Tensor:
        """Noise over signal of every tensor ``[..., parameters]``; NaN where all gradients so far were zero or none."""
        energy = self.energy / self.weight
        signal = self.signal / self.weight.square()
        return (energy - signal).clamp_min(0) / (signal + _column(eps) * energy)

    def normalized_variance_on_host(self, eps: float) -> float:
        """:meth:`normalized_variance` as a Python number: on a CPU, faster than operations on small tensors."""
        logs = []
        for weight, energy, signal in zip(
            self.weight.tolist(), self.energy.tolist(), self.signal.tolist(), strict=True
        ):
            if energy > 0:
                energy, signal = energy / weight, signal / weight**2
                logs.append(math.log1p(max(energy - signal, 0.0) / (signal + eps * energy)))
        return math.expm1(math.fsum(logs) / len(logs) / 2) if logs else 0.0

    def normalized_variance(self, eps: Number) -> Tensor:
        """How much longer gradients are than their mean ``[...]``: a geometric mean over tensors; 0 before any."""
        return self.variances(eps).log1p().nanmean(-1).div(2).expm1().nan_to_num(0)

    def total_averages(self) -> dict[str, Tensor]:
        """Averages of the whole gradient's norm, mean, variance over elements, and largest magnitude ``[...]``."""
        weight, norm, mean_square = self.norms.unbind(-1)
        if self.statistic == "elementwise":
            sums = self._gather([m.sum(-1) for m in self.moments])
        else:
            sums = self.mean * self._counts
        seen = self.weight > 0
        mean = torch.where(seen, sums / self.weight, 0).sum(-1) / torch.where(seen, self._counts, 0).sum(-1)
        return {
            "grad_norm": norm / weight,
            "grad_mean": mean,
            "grad_var": (mean_square / weight - mean.square()).clamp_min(0),
            "grad_max": self.largest[..., 1] / self.largest[..., 0],
        }

    def fits(self, i: int, param: Tensor) -> bool:
        """Whether the averages of parameter ``i`` can be those of ``param``."""
        return self.shapes[i] == tuple(param.shape)

    def adopt(self, other: GradientStatistics, sources: Sequence[int | None]) -> None:
        """Copy averages: parameter ``i`` gets those of parameter ``sources[i]`` of ``other``, where there is one."""
        for name in (*_TOTALS, *_PROGRESS):
            getattr(self, name).copy_(getattr(other, name))
        for i, j in enumerate(sources):
            if j is None:
                continue
            for name in _VECTORS:
                getattr(self, name)[i] = getattr(other, name)[j]
            if self.statistic == "elementwise":
                self.moments[i].copy_(other.moments[j])

    def tensors(self) -> dict[str, Tensor]:
        """All averages by name, not copies; those of single elements are ``moments.`` and the parameter's key."""
        moments = {f"moments.{key}": moment for key, moment in zip(self.keys, self.moments, strict=False)}
        return {name: getattr(self, name) for name in (*_PROGRESS, *_VECTORS, *_TOTALS)} | moments

    @property
    def gradients(self) -> Tensor | None:
        """Memory for ``joint`` of :meth:`fold`, which then is not copied; ``None``: there is none."""
        return None if self._pair is None else self._pair[0]

    @property
    def block(self) -> Tensor | None:
        """The moments of all parameters side by side ``[M, elements]``, not copies; ``None``: they are not."""
        return None if self._pair is None else self._pair[1]

    def storages(self) -> list[Tensor]:
        """All memory of the averages, each part once, not copies."""
        moments = self.moments if self._pair is None else [self._pair[1]]
        return [*(getattr(self, name) for name in (*_PROGRESS, *_VECTORS, *_TOTALS)), *moments]

    def state_dict(self) -> dict[str, Any]:
        """A copy of the averages; those of single elements are by the parameters' keys."""
        return {
            "keys": list(self.keys),
            "shapes": [list(shape) for shape in self.shapes],
            **{name: getattr(self, name).clone() for name in (*_PROGRESS, *_VECTORS, *_TOTALS)},
            "moments": {key: moment.clone() for key, moment in zip(self.keys, self.moments, strict=False)},
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Any], statistic: Statistic) -> GradientStatistics:
        """Saved averages without parameters; use :meth:`adopt` to copy them.

        Raises:
            KeyError, TypeError, ValueError: Something is missing or invalid.
        """
        loaded = cls([], [], statistic)
        loaded.keys, loaded.shapes = saved_keys(state["keys"]), saved_shapes(state["shapes"])
        if len(loaded.shapes) != len(loaded.keys):
            raise ValueError(f"'shapes' has {len(loaded.shapes)} entries, expected {len(loaded.keys)}")
        for name in (*_VECTORS, *_TOTALS):
            expected = getattr(loaded, name).shape if name in _TOTALS else (len(loaded.keys),)
            saved = saved_tensor(name, state[name], tuple(expected))
            if name in _NEVER_NEGATIVE and (saved < 0).any():
                raise ValueError(f"{name!r} has negative numbers")
            setattr(loaded, name, saved)
        if max(*loaded.weight.tolist(), loaded.norms[0].item(), loaded.largest[0].item()) > _FULL_WEIGHT:
            raise ValueError("weights of averages are above 1")
        moments, expected_keys = state["moments"], loaded.keys if statistic == "elementwise" else []
        if not isinstance(moments, dict) or set(moments) != set(expected_keys):
            raise ValueError("'moments' has other keys than 'keys'")
        pairs = zip(expected_keys, loaded.shapes, strict=False)
        loaded.moments = [saved_tensor(key, moments[key], (math.prod(shape),)) for key, shape in pairs]
        return loaded

    def _average(self, name: str, values: Tensor, present: list[int], weight: Number) -> None:
        """Fold values ``[..., parameters]`` into an average, at the present parameters alone."""
        vector: Tensor = getattr(self, name)
        weight = _column(weight)
        if len(present) < len(self.params):
            # A mask and not an index from the host, which would synchronise with the device.
            here = set(present)
            weight = weight * torch.stack([self._one if i in here else self._zero for i in range(len(self.params))], -1)
        vector.lerp_(values, weight)

    def _by_parameter(self, numbers: dict[int, Tensor]) -> Tensor:
        """Numbers ``[...]`` of the present parameters as ``[..., parameters]``, with zeros elsewhere."""
        return self._gather([numbers.get(i, self._zero) for i in range(len(self.params))])

    def _squared_norm(self, rows: dict[int, Tensor], i: int) -> Tensor:
        """``‖g‖²`` of a gradient; on a host, one that is not finite is replaced: seldom, hence no copies before."""
        (square,) = self._squared_norms([rows[i]])
        if self.on_host and not square.item() < HUGE**2:
            rows[i] = zero_where_huge(rows[i])
            (square,) = self._squared_norms([rows[i]])
        return square

    def _squared_norms(self, rows: list[Tensor]) -> Sequence[Tensor]:
        """``‖row‖²`` of each row ``[...]``."""
        if self.members is not None:
            norms = torch.stack([torch.linalg.vector_norm(row, dim=-1) for row in rows], -1)
            return norms.square().unbind(-1)
        return _squared_norms(rows)

    def _gather(self, numbers: Sequence[Tensor]) -> Tensor:
        """Stack numbers ``[...]`` of any device and precision, as the averages are kept, to ``[..., numbers]``."""
        if self.on_host:
            return torch.stack(tuple(numbers)).to(torch.float32)
        return torch.stack([n.to(self.device, torch.float32) for n in numbers], -1)

    @cached_property
    def _sizes(self) -> list[int]:
        """Elements of every parameter, of one member."""
        return [math.prod(shape) // (self.members or 1) for shape in self.shapes]

    @cached_property
    def _counts(self) -> Tensor:
        return torch.tensor(self._sizes, dtype=torch.float32, device="cpu").to(self.device, non_blocking=True)


def gradient_totals(grads: Sequence[Tensor], device: torch.device) -> dict[str, Tensor]:
    """Norm, mean, variance over elements and largest magnitude of one whole gradient; zeros if it is empty."""
    wide = [_wide(g.reshape(-1)) for g in grads if g.numel() > 0]
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


def _finite(rows: list[Tensor]) -> tuple[Tensor | None, list[Tensor]]:
    """Copies with zeros for what is not finite or too large to be squared: side by side, if they can be, and each."""
    if len({(row.device, row.dtype) for row in rows}) != 1:
        return None, [zero_where_huge(row) for row in rows]
    joint = zero_where_huge(torch.cat(rows, -1))
    return joint, list(torch.split(joint, [row.shape[-1] for row in rows], -1))


def _squared_norms(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """``‖t‖²`` of each flat tensor, 0-dim."""
    if all(t.is_cpu for t in tensors):
        # Several times faster than a norm.
        return [t.dot(t) for t in tensors]
    norms = torch._foreach_norm(list(tensors))
    return torch._foreach_mul(norms, norms)


def _magnitudes(rows: Sequence[Tensor]) -> Sequence[Tensor]:
    """The largest magnitude in each row ``[..., elements]``."""
    if all(row.dim() == 1 for row in rows):
        if not all(row.is_cpu for row in rows):
            return torch._foreach_norm(list(rows), torch.inf)
        # Several times faster than a norm of order infinity.
        return [torch.maximum(high, -low) for low, high in (row.aminmax() for row in rows)]
    return [row.abs().amax(-1) for row in rows]


def _wide(tensor: Tensor) -> Tensor:
    """A tensor in float32 or wider."""
    return tensor if tensor.dtype.itemsize >= 4 else tensor.float()


def _column(number: Number) -> Number:
    """A number per member ``[M]`` for what is ``[M, ...]``."""
    return number.unsqueeze(-1) if isinstance(number, Tensor) and number.dim() == 1 else number


def _each(number: Tensor, rows: Sequence[Tensor]) -> Any:
    """A number as a foreach operation takes it: one for all rows, or one per member for each row."""
    return number if number.dim() == 0 else [number.unsqueeze(-1)] * len(rows)
