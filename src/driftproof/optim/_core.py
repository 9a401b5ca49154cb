"""Shared parts of the forms of a UPGD step: settings, the tensors of a group, and formulas over scalars."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from driftproof._members import Number as Scalar
from driftproof._members import per_member

Gate: TypeAlias = Literal["anchored", "minmax"]
NoiseReference: TypeAlias = Literal["direction", "gradient"]

STEP_FACTOR: dict[Gate, float] = {"anchored": 2.0, "minmax": 1.0}
"""Factor of the step per gate; 2 compensates the gate's value of 1/2 at zero utility."""

MINMAX_EPS = 1e-8


@dataclass(frozen=True)
class Settings:
    """Hyper-parameters of one group; :class:`driftproof.optim.UPGD` documents each.

    Numbers may be tensors, ``[M]`` if the step has a member axis.
    """

    lr: Scalar
    weight_decay: Scalar
    sigma: Scalar
    beta_utility: Scalar
    betas: tuple[Scalar, Scalar] | None = None
    """Decays of the moments behind an Adam-like direction; ``None``: the direction is the gradient."""
    eps: Scalar = 1e-8
    gate: Gate = "anchored"
    temperature: Scalar = 1.0
    adaptive_noise: bool = False
    noise_reference: NoiseReference = "direction"
    noise_beta: Scalar = 0.999
    min_noise_std: Scalar = 1e-6
    instant_noise_scale: bool = True
    foreach: bool = True
    """Use the fast form where it applies: contiguous tensors on a CPU or CUDA device."""
    capturable: bool = False
    """Step counts live beside the parameters, and the host never reads them."""

    @property
    def averages_norms(self) -> bool:
        """Whether the noise follows an average of gradient norms, which is then part of the state."""
        return self.adaptive_noise and self.noise_reference == "gradient" and not self.instant_noise_scale

    @property
    def has_noise(self) -> bool:
        return isinstance(self.sigma, Tensor) or self.sigma > 0


COPIED_ELEMENTS = 1 << 16
"""On a CPU, up to this total number of elements, operations are what costs: concatenating the tensors is cheaper."""

_DERIVED = {
    "params": ("numel",),
    "grads": ("flat_grads",),
    "steps": ("step_runs",),
    "utilities": ("utility_runs", "has_plain_state"),
    "first_moments": ("moment_runs", "has_plain_state"),
    "second_moments": ("moment_runs", "has_plain_state"),
}
"""Cached properties of a group that follow from its lists."""


@dataclass
class Group:
    """Tensors that share settings, by role: position ``i`` of every list belongs to parameter ``i``.

    Parameters and state are updated in place. State is float32 or wider. Lists may be replaced between steps, not
    changed.
    """

    settings: Settings
    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    utilities: list[Tensor] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)
    """Steps taken so far, 0-dim: on the host, or beside the parameter if the settings are capturable. Members that do
    not step together have counts of their own ``[M]``, beside the parameter."""
    first_moments: list[Tensor] = field(default_factory=list)
    second_moments: list[Tensor] = field(default_factory=list)
    norm_emas: list[Tensor] = field(default_factory=list)
    """Averages of gradient norms, 0-dim or ``[M]``; empty unless the settings ask for them."""
    proceed: Tensor | None = None
    """Where a step is taken, 0-dim or ``[M]`` bool, if the host does not know; nothing changes elsewhere."""

    @property
    def counts_on_host(self) -> bool:
        """Whether the host may read the step counts."""
        return not self.settings.capturable and self.steps[0].dim() == 0

    @cached_property
    def step_runs(self) -> list[Tensor]:
        """The step counts as :func:`runs`."""
        return runs(self.steps)

    @cached_property
    def utility_runs(self) -> list[Tensor]:
        """The utilities as :func:`runs`."""
        return runs(self.utilities)

    @cached_property
    def moment_runs(self) -> tuple[list[Tensor], list[Tensor]]:
        """The moments as :func:`runs`."""
        return runs(self.first_moments), runs(self.second_moments)

    @cached_property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(param.numel() for param in self.params)

    @cached_property
    def flat_grads(self) -> Tensor | None:
        """The gradients as one row, if they are neighbours in memory, or so small that copying them is cheap."""
        flat = joined(self.grads)
        if flat is None and self.numel <= COPIED_ELEMENTS:
            flat = torch._C._nn.flatten_dense_tensors(self.grads)
        return flat

    @cached_property
    def has_plain_state(self) -> bool:
        """Whether utilities and moments are on a CPU, contiguous and of the parameters' dtype."""
        return are_plain([self.utilities, self.first_moments, self.second_moments], self.params[0].dtype)

    def __setattr__(self, name: str, value: object) -> None:
        if not torch.compiler.is_compiling():  # A traced step makes its groups anew, and caches nothing.
            for cached in _DERIVED.get(name, ()):
                self.__dict__.pop(cached, None)
        super().__setattr__(name, value)

    def widened(self) -> Group:
        """The same state, with copies of parameters and gradients in the precision that the step is computed in."""
        params = [p.to(compute_dtype(p.dtype)) for p in self.params]
        grads = [g.to(p.dtype) for p, g in zip(params, self.grads, strict=True)]
        return replace(self, params=params, grads=grads)

    def select(self, indices: Sequence[int]) -> Group:
        """The same group with only some of its parameters."""
        lists = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("settings", "proceed")}
        chosen = {k: [v[i] for i in indices] if v else [] for k, v in lists.items()}
        return Group(self.settings, **chosen, proceed=self.proceed)

    def masked(self, proceed: Tensor, zeroed: bool = False) -> Group:
        """The same group with a step that goes nowhere where ``proceed`` is False, 0-dim or ``[M]``.

        Args:
            proceed: Where the step is taken.
            zeroed: Whether gradients are zero elsewhere already.
        """
        # Gradients that are not finite would turn products with zero into NaN.
        grads = self.grads if zeroed else [torch.where(_shaped(proceed, grad), grad, 0) for grad in self.grads]
        lr = torch.where(proceed, self.settings.lr, 0.0)
        return replace(self, settings=replace(self.settings, lr=lr), grads=grads, proceed=proceed)

    def kept(self, beta: Scalar) -> Scalar:
        """Decay of averages: ``beta``, or 1 where no step is taken."""
        return beta if self.proceed is None else torch.where(self.proceed, beta, 1.0)


class Extremes(NamedTuple):
    """Smallest and largest bias-corrected utility over all parameters of a step.

    Numbers where the host may know them (parameters on a CPU), else tensors: 0-dim, or ``[M]``.
    """

    low: Scalar
    high: Scalar

    def anchor(self, dtype: torch.dtype) -> Scalar:
        """The η of the anchored gate: the largest û if positive, else the largest ``|û|``; always a normal number."""
        tiny = torch.finfo(dtype).tiny
        if isinstance(self.high, Tensor):
            return torch.where(self.high > 0, self.high, -self.low).clamp_min(tiny)
        return max(self.high if self.high > 0 else -self.low, tiny)

    def to(self, device: torch.device, dtype: torch.dtype) -> Extremes:
        """The same on another device, as far as they are tensors."""
        low, high = (_moved(e, device, dtype) if isinstance(e, Tensor) else e for e in self)
        return Extremes(low, high)

    @staticmethod
    def over(parts: Sequence[Extremes]) -> Extremes:
        """The extremes of several sets of parameters together."""
        tensors = [part.high for part in parts if isinstance(part.high, Tensor)]
        if not tensors:
            return Extremes(min(part.low for part in parts), max(part.high for part in parts))
        like = tensors[0]
        for tensor in tensors:  # Not max(key=...), which torch.compile cannot trace.
            if torch.finfo(tensor.dtype).bits > torch.finfo(like.dtype).bits:
                like = tensor
        lows, highs = (torch.stack([_like(e, like) for e in column]) for column in zip(*parts, strict=True))
        return Extremes(lows.amin(0), highs.amax(0))


def _like(value: Scalar, like: Tensor) -> Tensor:
    if isinstance(value, Tensor):
        return _moved(value, like.device, like.dtype)
    return torch.full_like(like, value)


def _moved(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    # Transfers to the host must complete before it reads; others need not.
    return tensor.to(device, dtype, non_blocking=device.type != "cpu")


def bias_correction(beta: Scalar, step: Scalar) -> Scalar:
    """``1 - beta^step``, without the cancellation that float32 suffers for a beta near one; tensors broadcast.

    Before the first step, when all averages are zero, that of the first: 0/0 is NaN.
    """
    if isinstance(step, Tensor):
        step = step.clamp_min(1)
    elif not isinstance(beta, Tensor):
        return 1.0 - math.pow(beta, max(step, 1))
    log_beta = beta.log() if isinstance(beta, Tensor) else math.log(beta) if beta > 0 else -math.inf
    exponent = step * log_beta
    assert isinstance(exponent, Tensor)
    return -torch.expm1(exponent)


def adaptive_std(settings: Settings, reference: Tensor) -> Tensor:
    """Standard deviation of adaptive noise, 0-dim or ``[M]``; 0 for members without noise, whose sigma is 0."""
    std = torch.clamp_min(settings.sigma * reference, settings.min_noise_std)
    return torch.where(settings.sigma > 0, std, 0) if isinstance(settings.sigma, Tensor) else std


def runs(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Contiguous tensors as flat views in the same order, one for each stretch of neighbours in memory."""
    stretches: list[tuple[Tensor, int]] = []
    stop, limit = 0, 0
    for tensor in tensors:
        start, length = tensor.data_ptr(), tensor.numel()
        end = start + length * tensor.itemsize
        if start == stop and end <= limit:
            stretches[-1] = (stretches[-1][0], stretches[-1][1] + length)
        else:
            storage = tensor.untyped_storage()
            limit = storage.data_ptr() + storage.nbytes()
            stretches.append((tensor, length))
        stop = end
    return [first.as_strided((length,), (1,)) for first, length in stretches]


def joined(tensors: list[Tensor]) -> Tensor | None:
    """Contiguous tensors as one flat view, if they are neighbours in memory."""
    first, stop = tensors[0], tensors[0].data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != stop:
            return None
        stop += tensor.nbytes
    storage = first.untyped_storage()
    if stop > storage.data_ptr() + storage.nbytes():
        return None
    return first.as_strided(((stop - first.data_ptr()) // first.itemsize,), (1,))


def are_plain(lists: Sequence[Sequence[Tensor]], dtype: torch.dtype) -> bool:
    """Whether all tensors are on a CPU, contiguous and of one dtype."""
    return all(t.is_cpu and t.dtype is dtype and t.is_contiguous() for tensors in lists for t in tensors)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision of state and arithmetic for parameters of ``dtype``: float32 or wider."""
    return torch.float32 if torch.finfo(dtype).bits < 32 else dtype


def norm(tensor: Tensor, members: bool) -> Tensor:
    """Euclidean norm of a tensor (0-dim), or of each member's slice (``[M]``)."""
    length: Tensor = torch.linalg.vector_norm(tensor.flatten(1), dim=1) if members else torch.linalg.vector_norm(tensor)
    return length


def _shaped(flags: Tensor, like: Tensor) -> Tensor:
    shaped = per_member(flags, like)
    assert isinstance(shaped, Tensor)
    return shaped


def elements(tensor: Tensor, members: bool) -> int:
    """Number of elements of a tensor, or of one member's slice."""
    return tensor.numel() // tensor.shape[0] if members else tensor.numel()


def unflatten(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Views into ``flat``, one after the other, in the shapes of ``like``."""
    return list(torch._C._nn.unflatten_dense_tensors(flat, like))
