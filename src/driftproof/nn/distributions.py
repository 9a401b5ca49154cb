"""Distributions of actions, one for each kind of action space.

The parameters of a distribution are one tensor ``[..., size]``; they should be float32 also under autocast. Nothing
here reads a value back from the device.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch import Tensor, nn

from driftproof.nn.likelihood import AutogradLikelihood, ChoiceLikelihood, Likelihood

Device: TypeAlias = torch.device | str | None

_LOG_2PI = math.log(2 * math.pi)

_NODES = 24
"""Number of points at which the entropy of a squashed Gaussian is summed."""

_REACH = 5.0
"""The outermost point, in standard deviations. Entropies are exact to 1e-5 for standard deviations up to 2."""

_LEAST_STD = 0.1
"""Standard deviation that still explores, in halves of the box's extent."""

_SATURATED = 2.0
"""Mean before squashing beyond which the hyperbolic tangent has less than 8% of its slope."""


class ActionDistribution(nn.Module, ABC):
    """Family of distributions over one action space, whose methods take the parameters as a tensor.

    It has no state; it is a module so that its constants move to the policy's device.

    Args:
        space: Action space.
        size: Width of the parameters.
        action_shape: Shape of one action as it is stored; environments get that of the space.
        action_dtype: Dtype of :meth:`sample` for float32 parameters.
    """

    def __init__(
        self, space: spaces.Space[Any], size: int, action_shape: tuple[int, ...], action_dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.size = size
        self.action_shape = action_shape
        self.action_dtype = action_dtype
        self._env_shape: tuple[int, ...] = space.shape or ()

    @abstractmethod
    def noise(self, *leading: int, device: Device = None, dtype: torch.dtype | None = None) -> Tensor:
        """Random numbers ``[*leading, ...]`` for :meth:`sample`, independent of the parameters."""

    @abstractmethod
    def sample(self, parameters: Tensor, noise: Tensor) -> Tensor:
        """Random actions ``[..., *action_shape]``: the same for the same noise."""

    @abstractmethod
    def mode(self, parameters: Tensor) -> Tensor:
        """The most probable actions ``[..., *action_shape]``."""

    @abstractmethod
    def log_prob(self, parameters: Tensor, actions: Tensor) -> Tensor:
        """Log-probability or log-density of actions ``[...]``.

        Args:
            parameters: Parameters ``[..., size]``.
            actions: Actions ``[..., *action_shape]``, not broadcast.
        """

    @abstractmethod
    def entropy(self, parameters: Tensor) -> Tensor:
        """Entropy ``[...]``."""

    def log_prob_and_entropy(self, parameters: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """:meth:`log_prob` and :meth:`entropy`, with common terms computed once."""
        return self.log_prob(parameters, actions), self.entropy(parameters)

    @abstractmethod
    def kl(self, old: Tensor, new: Tensor) -> Tensor:
        """The exact Kullback-Leibler divergence KL(old‖new) ``[...]`` of two parameters."""

    @abstractmethod
    def uniform_divergence(self, parameters: Tensor) -> Tensor:
        """Distance ``[...]`` from a distribution that still explores; its gradient does not vanish at certainty.

        For discrete actions KL(uniform‖policy), whose gradient is bounded by 1 for each parameter.
        """

    def likelihood(self, parameters: Tensor, actions: Tensor) -> Likelihood:
        """:meth:`log_prob` and :meth:`entropy`, for a loss whose gradients are given by formulas."""
        return AutogradLikelihood(self, parameters, actions)

    log_unit: float = 0.0
    """Logarithm of the volume in the environment per unit of :meth:`shown`.

    Log-probabilities and entropies are of the environment's actions: for :meth:`shown`, add and subtract it.
    """

    def shown(self, actions: Tensor) -> Tensor:
        """Actions as Stable-Baselines3's policies return them, ``[..., *action_shape]``: not clipped, not scaled."""
        return actions

    def stored(self, shown: Tensor) -> Tensor:
        """Stored actions from those of :meth:`shown`; the inverse."""
        return shown.to(self.action_dtype)

    def to_env(self, actions: Tensor) -> Tensor:
        """Actions for the environment ``[..., *shape of the space]``."""
        if self.action_shape == self._env_shape:
            return actions
        leading = actions.shape[: actions.dim() - len(self.action_shape)]
        return actions.reshape(leading + self._env_shape)

    def _check_actions(self, parameters: Tensor, actions: Tensor) -> None:
        expected = parameters.shape[:-1] + self.action_shape
        if actions.shape != expected:
            raise ValueError(
                f"actions have shape {tuple(actions.shape)}, but parameters {tuple(parameters.shape)} need "
                f"{tuple(expected)}"
            )


class Categorical(ActionDistribution):
    """One of ``n`` actions. Parameters: unnormalised log-probabilities. Actions: int64 ``[...]``, from 0."""

    def __init__(self, space: spaces.Discrete) -> None:
        super().__init__(space, int(space.n), (), torch.int64)
        self._start = int(space.start)

    def noise(self, *leading: int, device: Device = None, dtype: torch.dtype | None = None) -> Tensor:
        return _gumbel((*leading, self.size), device, dtype)

    def sample(self, parameters: Tensor, noise: Tensor) -> Tensor:
        return (parameters + noise).argmax(-1)

    def mode(self, parameters: Tensor) -> Tensor:
        return parameters.argmax(-1)

    def log_prob(self, parameters: Tensor, actions: Tensor) -> Tensor:
        self._check_actions(parameters, actions)
        return _of_choice(parameters.log_softmax(-1), actions)

    def entropy(self, parameters: Tensor) -> Tensor:
        return _entropy_of_choice(parameters.log_softmax(-1))

    def log_prob_and_entropy(self, parameters: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        self._check_actions(parameters, actions)
        log_probs = parameters.log_softmax(-1)
        return _of_choice(log_probs, actions), _entropy_of_choice(log_probs)

    def likelihood(self, parameters: Tensor, actions: Tensor) -> Likelihood:
        self._check_actions(parameters, actions)
        return ChoiceLikelihood(parameters, actions)

    def kl(self, old: Tensor, new: Tensor) -> Tensor:
        return _kl_of_choice(old, new)

    def uniform_divergence(self, parameters: Tensor) -> Tensor:
        return parameters.logsumexp(-1) - parameters.mean(-1) - math.log(self.size)

    def shown(self, actions: Tensor) -> Tensor:
        return self.to_env(actions)

    def stored(self, shown: Tensor) -> Tensor:
        return super().stored(shown) - self._start

    def to_env(self, actions: Tensor) -> Tensor:
        return actions + self._start if self._start else actions


class MultiCategorical(ActionDistribution):
    """Several independent choices. Parameters: those of one :class:`Categorical` after the other.

    Actions: int64 ``[..., choices]``, each from 0.
    """

    padded: Tensor
    padding: Tensor
    shares: Tensor
    start: Tensor

    def __init__(self, space: spaces.MultiDiscrete) -> None:
        options = self.options = [int(n) for n in space.nvec.flat]
        super().__init__(space, sum(options), (len(options),), torch.int64)
        self._table = (len(options), max(options))
        self._even = min(options) == max(options)
        # Position of each option in the parameters, in a table as wide as the widest choice, and a mask of padding.
        columns = torch.arange(max(options))
        ends = torch.tensor(options).cumsum(0).unsqueeze(1)
        counts = torch.tensor(options).unsqueeze(1)
        self.register_buffer("padded", (ends - counts + columns).minimum(ends - 1).flatten(), persistent=False)
        self.register_buffer("padding", columns >= counts, persistent=False)
        shares = [1 / n for n in options for _ in range(n)]
        self.register_buffer("shares", torch.tensor(shares), persistent=False)
        self.register_buffer("start", torch.tensor(space.start.reshape(-1), dtype=torch.int64), persistent=False)

    def noise(self, *leading: int, device: Device = None, dtype: torch.dtype | None = None) -> Tensor:
        return _gumbel((*leading, self.size), device, dtype)

    def sample(self, parameters: Tensor, noise: Tensor) -> Tensor:
        return self._logits(parameters + noise).argmax(-1)

    def mode(self, parameters: Tensor) -> Tensor:
        return self._logits(parameters).argmax(-1)

    def log_prob(self, parameters: Tensor, actions: Tensor) -> Tensor:
        self._check_actions(parameters, actions)
        return _of_choice(self._logits(parameters).log_softmax(-1), actions).sum(-1)

    def entropy(self, parameters: Tensor) -> Tensor:
        return _entropy_of_choice(self._logits(parameters).log_softmax(-1)).sum(-1)

    def log_prob_and_entropy(self, parameters: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        self._check_actions(parameters, actions)
        log_probs = self._logits(parameters).log_softmax(-1)
        return _of_choice(log_probs, actions).sum(-1), _entropy_of_choice(log_probs).sum(-1)

    def kl(self, old: Tensor, new: Tensor) -> Tensor:
        return _kl_of_choice(self._logits(old), self._logits(new)).sum(-1)

    def uniform_divergence(self, parameters: Tensor) -> Tensor:
        norms = self._logits(parameters).logsumexp(-1).sum(-1)
        return norms - (parameters * self.shares).sum(-1) - sum(map(math.log, self.options))

    def shown(self, actions: Tensor) -> Tensor:
        return actions + self.start

    def stored(self, shown: Tensor) -> Tensor:
        return super().stored(shown) - self.start

    def to_env(self, actions: Tensor) -> Tensor:
        return super().to_env(actions + self.start)

    def _logits(self, parameters: Tensor) -> Tensor:
        """One row for each choice ``[..., choices, options]``; padding gets probability 0."""
        if self._even:
            return parameters.reshape(parameters.shape[:-1] + self._table)
        table = parameters.index_select(-1, self.padded).reshape(parameters.shape[:-1] + self._table)
        # Finite, since 0 * -inf is NaN.
        return table.masked_fill(self.padding, torch.finfo(parameters.dtype).min)


class Bernoulli(ActionDistribution):
    """Independent binary actions. Parameters: log-odds. Actions: 0 or 1 ``[..., n]``, floats; environments get int8."""

    def __init__(self, space: spaces.MultiBinary) -> None:
        count = math.prod(space.shape)
        super().__init__(space, count, (count,), torch.float32)

    def noise(self, *leading: int, device: Device = None, dtype: torch.dtype | None = None) -> Tensor:
        # Log-odds of uniform numbers, so that a sample takes one comparison.
        return torch.rand(*leading, self.size, device=device, dtype=dtype).logit_()

    def sample(self, parameters: Tensor, noise: Tensor) -> Tensor:
        return (noise < parameters).to(parameters.dtype)

    def mode(self, parameters: Tensor) -> Tensor:
        return (parameters > 0).to(parameters.dtype)

    def log_prob(self, parameters: Tensor, actions: Tensor) -> Tensor:
        self._check_actions(parameters, actions)
        return F.logsigmoid(parameters * (2 * actions - 1)).sum(-1)

    def entropy(self, parameters: Tensor) -> Tensor:
        return (F.softplus(parameters) - F.silu(parameters)).sum(-1)

    def kl(self, old: Tensor, new: Tensor) -> Tensor:
        return (F.softplus(new) - F.softplus(old) - old.sigmoid() * (new - old)).sum(-1)

    def uniform_divergence(self, parameters: Tensor) -> Tensor:
        return (F.softplus(parameters) - parameters / 2).sum(-1) - self.size * math.log(2)

    def to_env(self, actions: Tensor) -> Tensor:
        return super().to_env(actions.to(torch.int8))


class Gaussian(ActionDistribution):
    """Independent normal distributions. Parameters: means, then logarithms of standard deviations.

    Actions: floats ``[..., dim]``, the box flattened, not clipped; environments get them clipped to the box.
    """

    low: Tensor
    high: Tensor
    reach: Tensor
    """Bounds of means that can explore, lower and upper ones, and the unit of their distances ``[3, dim]``."""

    def __init__(self, space: spaces.Box) -> None:
        dim = math.prod(space.shape)
        super().__init__(space, 2 * dim, (dim,), torch.float32)
        self.dim = dim
        self.register_buffer("low", _rounded(space.low, towards=math.inf), persistent=False)
        self.register_buffer("high", _rounded(space.high, towards=-math.inf), persistent=False)
        self.register_buffer("reach", self._reach(), persistent=False)

    def _reach(self) -> Tensor:
        half = (self.high - self.low) / 2
        return torch.stack((self.low, self.high, torch.where((half > 0) & half.isfinite(), half, 1.0)))

    def noise(self, *leading: int, device: Device = None, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(*leading, self.dim, device=device, dtype=dtype)

    def sample(self, parameters: Tensor, noise: Tensor) -> Tensor:
        mean, log_std = parameters.chunk(2, -1)
        return torch.addcmul(mean, log_std.exp(), noise)

    def mode(self, parameters: Tensor) -> Tensor:
        return parameters[..., : self.dim]

    def log_prob(self, parameters: Tensor, actions: Tensor) -> Tensor:
        self._check_actions(parameters, actions)
        mean, log_std = parameters.chunk(2, -1)
        z = (mean - actions) * (-log_std).exp()
        return -self.dim / 2 * _LOG_2PI - torch.add(log_std, z.square(), alpha=0.5).sum(-1)

    def entropy(self, parameters: Tensor) -> Tensor:
        return parameters[..., self.dim :].sum(-1) + self.dim / 2 * (1 + _LOG_2PI)

    def kl(self, old: Tensor, new: Tensor) -> Tensor:
        old_mean, old_log_std = old.chunk(2, -1)
        mean, log_std = new.chunk(2, -1)
        z = (mean - old_mean) * (-log_std).exp()
        log_ratio = 2 * (old_log_std - log_std)
        return (log_ratio.expm1() - log_ratio + z.square()).sum(-1) / 2

    def uniform_divergence(self, parameters: Tensor) -> Tensor:
        """Distance ``[...]`` of means from the bounds, and of standard deviations from 10% of half the box's extent.

        It is 0 where these explore. The gradient of KL(uniform‖policy) would grow with the inverse of the variance,
        and pull every mean to the centre.
        """
        mean, log_std = parameters.chunk(2, -1)
        low, high, unit = self.reach.unbind()
        outside = (mean - high).clamp_min(0) + (low - mean).clamp_min(0)
        return (outside / unit + (math.log(_LEAST_STD) + unit.log() - log_std).clamp_min(0)).sum(-1)

    def to_env(self, actions: Tensor) -> Tensor:
        return super().to_env(actions.clamp(self.low, self.high))


class SquashedGaussian(Gaussian):
    """A :class:`Gaussian` squashed into the bounds of its box by a hyperbolic tangent.

    Actions: floats ``[..., dim]`` before squashing; environments get ``low + (tanh(a) + 1) / 2 * (high - low)``.
    Log-probability and entropy are of the environment's actions. :meth:`mode` is the squashed mean, the median.
    """

    nodes: Tensor
    weights: Tensor

    def __init__(self, space: spaces.Box) -> None:
        super().__init__(space)
        # Check the space and not the tensors, which have no values on the meta device.
        extent = space.high.astype(np.float64) - space.low.astype(np.float64)
        if not ((extent > 0) & (extent <= np.finfo(np.float32).max)).all():
            raise ValueError(f"squash_output=True needs an action space with finite bounds, low < high, not {space}")
        # The environment's action has the slope (high - low) / 2 * (1 - tanh(a)^2), whose logarithm is, in a form that
        # does not cancel, log(high - low) + log(2) + 2 * (a - 2 * softplus(a, beta=2)).
        self._log_scale = float(np.log(extent).sum()) + self.dim * math.log(2)
        nodes = torch.linspace(-_REACH, _REACH, _NODES)
        self.register_buffer("nodes", nodes, persistent=False)
        self.register_buffer("weights", (-nodes.square() / 2).softmax(0), persistent=False)

    def _reach(self) -> Tensor:
        ends = torch.full_like(self.low, _SATURATED)
        return torch.stack((-ends, ends, torch.ones_like(ends)))

    def log_prob(self, parameters: Tensor, actions: Tensor) -> Tensor:
        slope = (actions - 2 * F.softplus(actions, beta=2)).sum(-1)
        return torch.sub(super().log_prob(parameters, actions), slope, alpha=2) - self._log_scale

    def entropy(self, parameters: Tensor) -> Tensor:
        """Entropy ``[...]``: the Gaussian's plus the expected log-derivative of squashing.

        The expectation is summed over evenly spaced points, which is far more exact here than Gauss-Hermite nodes: the
        integrand is analytic, but its curvature is confined to about one unit, however wide the Gaussian is.
        """
        mean, log_std = parameters.chunk(2, -1)
        actions = torch.addcmul(mean.unsqueeze(-1), log_std.exp().unsqueeze(-1), self.nodes)
        bends = (F.softplus(actions, beta=2) * self.weights).sum((-2, -1))
        slope = mean.sum(-1) - 2 * bends
        return torch.add(super().entropy(parameters), slope, alpha=2) + self._log_scale

    @property
    def log_unit(self) -> float:  # type: ignore[override]
        return self._log_scale - 2 * self.dim * math.log(2)

    def shown(self, actions: Tensor) -> Tensor:
        """Actions between -1 and 1."""
        return actions.tanh()

    def stored(self, shown: Tensor) -> Tensor:
        limit = 1 - torch.finfo(self.action_dtype).eps
        return super().stored(shown).clamp(-limit, limit).atanh()

    def to_env(self, actions: Tensor) -> Tensor:
        # sigmoid(2a) is (tanh(a) + 1) / 2; lerp never leaves the bounds, not even by rounding.
        return ActionDistribution.to_env(self, torch.lerp(self.low, self.high, (2 * actions).sigmoid()))


def distribution_for(action_space: spaces.Space[Any], squash_output: bool = False) -> ActionDistribution:
    """The distribution for an action space.

    Args:
        action_space: A Discrete, MultiDiscrete, MultiBinary or Box.
        squash_output: For a Box with finite bounds: squash actions into it instead of clipping them.

    Raises:
        TypeError: The kind of space is not supported.
        ValueError: The space cannot be squashed.
    """
    if squash_output and not isinstance(action_space, spaces.Box):
        raise ValueError(f"squash_output=True needs a Box as action space, not {action_space}")
    match action_space:
        case spaces.Discrete():
            return Categorical(action_space)
        case spaces.MultiDiscrete():
            return MultiCategorical(action_space)
        case spaces.MultiBinary():
            return Bernoulli(action_space)
        case spaces.Box():
            return SquashedGaussian(action_space) if squash_output else Gaussian(action_space)
    raise TypeError(f"Unsupported action space: {action_space}; must be Discrete, MultiDiscrete, MultiBinary or Box")


def _gumbel(shape: tuple[int, ...], device: Device, dtype: torch.dtype | None) -> Tensor:
    # Gumbel-max trick: the largest of log-probabilities plus Gumbel noise is a sample.
    waits = torch.empty(shape, device=device, dtype=dtype).exponential_()
    return waits.clamp_min_(torch.finfo(waits.dtype).tiny).log_().neg_()


def _of_choice(log_probs: Tensor, choice: Tensor) -> Tensor:
    return log_probs.gather(-1, choice.unsqueeze(-1)).squeeze(-1)


def _entropy_of_choice(log_probs: Tensor) -> Tensor:
    return -(log_probs.exp() * log_probs).sum(-1)


def _kl_of_choice(old: Tensor, new: Tensor) -> Tensor:
    old_log_probs = old.log_softmax(-1)
    return (old_log_probs.exp() * (old_log_probs - new.log_softmax(-1))).sum(-1)


def _rounded(bounds: np.ndarray[Any, Any], towards: float) -> Tensor:
    """Flattened bounds in the default precision, rounded so that they do not exceed the space's."""
    exact = torch.tensor(bounds.reshape(-1), dtype=torch.float64)
    near = exact.to(torch.get_default_dtype())
    beyond = near < exact if towards > 0 else near > exact
    return torch.where(beyond, near.nextafter(torch.tensor(towards)), near)
