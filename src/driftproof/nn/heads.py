"""Value heads: the last layer of a critic, which predicts a distribution of returns.

The returns are normalised λ-returns; :class:`driftproof.learner.return_scale.ReturnScale` decodes them. Predictions are
tensors ``[..., outputs]`` in a form specific to the head, returns are ``[...]``.

Leading axes are free, so that one head serves several members or critics ``[M, ...]`` at once: numbers such as a scale
or a clip range are then floats, 0-dim, or ``[M]``, and weights ``[M, outputs, features]``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from driftproof._arguments import ArgumentError, check_count, check_number, check_option
from driftproof._members import Number, per_member
from driftproof.nn.grouped import linear
from driftproof.settings.agent import ClipMode as ClipMode

CLIP_MODES: tuple[str, ...] = get_args(ClipMode)

_TINY = 1e-8


class Scale(NamedTuple):
    """Returns are ``mean + std * normalised``; floats, 0-dim tensors, or one number per member ``[M]``."""

    mean: Number
    std: Number


class ValueHead(nn.Module, ABC):
    """A distribution of normalised returns from features ``[..., features]``.

    Args:
        features: Width of the inputs.
        outputs: Number of outputs that describe the distribution.
    """

    def __init__(self, features: int, outputs: int) -> None:
        super().__init__()
        check_count("features", features, at_least=1)
        self.outputs = outputs
        self.linear = nn.Linear(features, outputs)

    def forward(self, features: Tensor) -> Tensor:
        """Predictions ``[..., outputs]``, in the precision of the weights also under autocast.

        With weights per member ``[M, outputs, features]``, passed by ``torch.func.functional_call``, features are
        ``[M, ..., features]``.
        """
        weight, bias = self.linear.weight, self.linear.bias
        prediction: Tensor = self.linear(features) if weight.dim() == 2 else linear(features, weight, bias)
        return prediction.to(weight.dtype)

    @abstractmethod
    def mean(self, prediction: Tensor) -> Tensor:
        """The expected return."""

    @abstractmethod
    def std(self, prediction: Tensor) -> Tensor:
        """The standard deviation of the return."""

    @abstractmethod
    def quantiles(self, prediction: Tensor) -> Tensor:
        """Quantiles of the return ``[..., outputs]`` at the levels ``(i + 1/2) / outputs``, in order."""

    def below(self, prediction: Tensor, returns: Tensor) -> Tensor:
        """Share ``[...]`` of the predicted quantiles below returns; those that equal them count half."""
        return _share_below(self.quantiles(prediction), returns)

    @abstractmethod
    def cvar(self, prediction: Tensor, alpha: Number) -> Tensor:
        """Conditional value at risk: the mean of the worst share ``alpha`` of returns; the mean for ``alpha=1``."""

    @abstractmethod
    def loss(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Loss of a prediction per sample ``[...]``.

        Args:
            prediction: Prediction ``[..., outputs]``.
            target: Normalised returns ``[...]``, not broadcast.
        """

    @abstractmethod
    def clip_to(self, prediction: Tensor, old: Tensor, mode: ClipMode, delta: Number) -> Tensor:
        """The prediction, clipped to within ``delta`` of an old one.

        Args:
            prediction: Prediction ``[..., outputs]``.
            old: Earlier prediction of the same head ``[..., outputs]``.
            mode: What is clipped: the mean, mean and standard deviation, or every quantile.
            delta: Largest distance, in units of normalised returns; a number, or one per member.
        """

    @abstractmethod
    def difference(self, prediction: Tensor, other: Tensor) -> Tensor:
        """Distance of another prediction from the first, per sample ``[...]``: 0 if equal, and smooth there."""

    @abstractmethod
    def rescale(self, old: Scale, new: Scale) -> None:
        """Change the weights so that decoded predictions stay the same under the new scale."""

    @abstractmethod
    def rescaled(self, prediction: Tensor, old: Scale, new: Scale) -> Tensor:
        """A prediction made before :meth:`rescale`, converted to the new scale."""

    def _as_column(self, target: Tensor, prediction: Tensor) -> Tensor:
        """Targets ``[..., 1]``, one for each prediction."""
        if prediction.shape[:-1] != target.shape:
            raise ValueError(
                f"targets have shape {tuple(target.shape)}, but predictions {tuple(prediction.shape)} need "
                f"{tuple(prediction.shape[:-1])}"
            )
        return target.to(prediction.dtype).unsqueeze(-1)


class QuantileHead(ValueHead):
    """Quantiles at the levels ``(i + 1/2) / num_quantiles``, learned by quantile Huber regression.

    Dabney et al., "Distributional Reinforcement Learning with Quantile Regression", AAAI 2018 (arXiv 1710.10044).
    Near steps and peaks of the density that are narrower than ``huber_kappa``, the learned value is biased towards the
    median by up to ``huber_kappa``.

    Args:
        features: Width of the inputs.
        num_quantiles: Number of quantiles.
        huber_kappa: Threshold of the Huber loss. Keep it small relative to the standard deviation of returns, or
            quantiles become expectiles.
    """

    levels: Tensor
    tilts: Tensor
    """Weights of errors below the target and above it ``[2, num_quantiles]``."""

    def __init__(self, features: int, num_quantiles: int = 32, huber_kappa: float = 0.1) -> None:
        check_count("num_quantiles", num_quantiles, at_least=1)
        check_number("huber_kappa", huber_kappa, above=0)
        super().__init__(features, num_quantiles)
        self.huber_kappa = huber_kappa
        self.register_buffer("levels", (torch.arange(num_quantiles) + 0.5) / num_quantiles, persistent=False)
        tilts = torch.stack([self.levels, 1 - self.levels]) / (huber_kappa * num_quantiles)
        self.register_buffer("tilts", tilts, persistent=False)

    def mean(self, prediction: Tensor) -> Tensor:
        return prediction.mean(-1)

    def std(self, prediction: Tensor) -> Tensor:
        return _root_mean_square(prediction - self.mean(prediction).unsqueeze(-1))

    def quantiles(self, prediction: Tensor) -> Tensor:
        # Learned quantiles may cross.
        return prediction.sort(-1).values

    def below(self, prediction: Tensor, returns: Tensor) -> Tensor:
        return _share_below(prediction, returns)  # In any order.

    def cvar(self, prediction: Tensor, alpha: Number) -> Tensor:
        _check_share(alpha)
        # Each quantile represents an equal share of the returns; the last may count in part.
        share = 1 / self.levels.numel()
        shares = (per_member(alpha, prediction) + share / 2 - self.levels).clamp(0, share)
        worst = (self.quantiles(prediction) * shares).sum(-1)
        return worst / per_member(alpha, worst)

    def loss(self, prediction: Tensor, target: Tensor) -> Tensor:
        target = self._as_column(target, prediction)
        # torch.nn.functional's wrapper broadcasts first, which takes longer than the loss.
        columns = target.expand_as(prediction)
        huber = torch._C._nn.huber_loss(prediction, columns, 0, self.huber_kappa)  # type: ignore[arg-type]
        below, above = self.tilts
        return (torch.where(prediction > target, above, below) * huber).sum(-1)

    def clip_to(self, prediction: Tensor, old: Tensor, mode: ClipMode, delta: Number) -> Tensor:
        check_option("mode", mode, CLIP_MODES)
        if mode == "per_quantile":
            return _clamp(prediction, old, delta)
        mean = self.mean(prediction)
        clipped_mean = _clamp(mean, self.mean(old), delta)
        if mode == "mean_only":
            return prediction + (clipped_mean - mean).unsqueeze(-1)
        centred = prediction - mean.unsqueeze(-1)
        std = _root_mean_square(centred)
        stretch = _clamp(std, self.std(old), delta) / std
        return torch.addcmul(clipped_mean.unsqueeze(-1), centred, stretch.unsqueeze(-1))

    def difference(self, prediction: Tensor, other: Tensor) -> Tensor:
        """Mean squared difference of quantiles: the squared 2-Wasserstein distance if these are in order."""
        return (other - prediction).square().mean(-1)

    @torch.no_grad()
    def rescale(self, old: Scale, new: Scale) -> None:
        """As PopArt does (van Hasselt et al., 2016, arXiv 1602.07714): exact up to rounding."""
        weight, bias = self.linear.weight, self.linear.bias
        weight.mul_(per_member(old.std / new.std, weight))
        bias.copy_(self.rescaled(bias, old, new))

    def rescaled(self, prediction: Tensor, old: Scale, new: Scale) -> Tensor:
        factor, shift = old.std / new.std, (old.mean - new.mean) / new.std
        return prediction * per_member(factor, prediction) + per_member(shift, prediction)


class CategoricalHead(ValueHead):
    """Probabilities of fixed atoms between ``v_min`` and ``v_max``, learned by cross-entropy with projected targets.

    Bellemare et al., "A Distributional Perspective on Reinforcement Learning", ICML 2017 (arXiv 1707.06887). Returns
    outside the support are clipped to it; :meth:`saturated` gives their share. A change of scale changes the returns
    that atoms stand for, which weights cannot compensate: decoded values change with it.

    Args:
        features: Width of the inputs.
        num_atoms: Number of atoms.
        v_min: The first atom, in normalised returns.
        v_max: The last atom.
    """

    support: Tensor
    places: Tensor

    def __init__(self, features: int, num_atoms: int = 51, v_min: float = -10.0, v_max: float = 10.0) -> None:
        check_count("num_atoms", num_atoms, at_least=2)
        check_number("v_max", v_max)
        check_number("v_min", v_min, below=v_max)
        super().__init__(features, num_atoms)
        self.v_min, self.v_max = v_min, v_max
        self.register_buffer("support", torch.linspace(v_min, v_max, num_atoms), persistent=False)
        self.register_buffer("places", torch.arange(num_atoms, dtype=self.support.dtype), persistent=False)

    def mean(self, prediction: Tensor) -> Tensor:
        return self._expect(self.support, prediction.softmax(-1))

    def std(self, prediction: Tensor) -> Tensor:
        return self._moments(prediction.softmax(-1))[1]

    def quantiles(self, prediction: Tensor) -> Tensor:
        levels = (self.places + 0.5) / self.places.numel()
        cumulative = prediction.softmax(-1).cumsum(-1)
        # Of the same members as the sums, where torch.vmap runs this for several at once, and contiguous.
        reached = torch.searchsorted(cumulative, torch.zeros_like(cumulative) + levels)
        return self.support[reached.clamp_max(self.places.numel() - 1)]

    def cvar(self, prediction: Tensor, alpha: Number) -> Tensor:
        _check_share(alpha)
        probabilities = prediction.softmax(-1)
        below = probabilities.cumsum(-1) - probabilities
        shares = torch.minimum((per_member(alpha, below) - below).clamp_min(0), probabilities)
        worst = self._expect(self.support, shares)
        return worst / per_member(alpha, worst)

    def loss(self, prediction: Tensor, target: Tensor) -> Tensor:
        place = self._place(self._as_column(target, prediction))
        # A target's weight on an atom falls linearly to 0 over the distance between two atoms.
        projected = (1 - (place - self.places).abs()).clamp_min(0)
        return -(projected * prediction.log_softmax(-1)).sum(-1)

    def clip_to(self, prediction: Tensor, old: Tensor, mode: ClipMode, delta: Number) -> Tensor:
        """The prediction with its atoms shifted and projected onto the support.

        Probability shifted past an end of the support stays there: wide distributions near it may end up farther than
        ``delta`` from the old one. Projection adds up to a quarter of the atoms' squared distance to the variance.
        """
        check_option("mode", mode, CLIP_MODES)
        if mode == "per_quantile":
            raise ValueError('clip mode "per_quantile" needs a quantile head; a categorical head has no quantiles')
        probabilities, old_probabilities = prediction.softmax(-1), old.softmax(-1)
        if mode == "mean_only":
            mean, old_mean = self._expect(self.support, probabilities), self._expect(self.support, old_probabilities)
            positions = self.support + (_clamp(mean, old_mean, delta) - mean).unsqueeze(-1)
        else:
            mean, std = self._moments(probabilities)
            old_mean, old_std = self._moments(old_probabilities)
            centred = self.support - mean.unsqueeze(-1)
            stretch = _clamp(std, old_std, delta) / std
            positions = torch.addcmul(_clamp(mean, old_mean, delta).unsqueeze(-1), centred, stretch.unsqueeze(-1))
        return self._share(positions, probabilities).clamp_min(_TINY).log()

    def difference(self, prediction: Tensor, other: Tensor) -> Tensor:
        """Kullback-Leibler divergence of the other from the first."""
        log_probs = prediction.log_softmax(-1)
        return (log_probs.exp() * (log_probs - other.log_softmax(-1))).sum(-1)

    def rescale(self, old: Scale, new: Scale) -> None:
        """Does nothing: the atoms stay, and stand for other returns."""

    def rescaled(self, prediction: Tensor, old: Scale, new: Scale) -> Tensor:
        return prediction

    def saturated(self, target: Tensor, members: bool = False) -> Tensor:
        """The share of targets outside the support, 0-dim; with ``members``, of each member's ``[M]``."""
        outside = ((target < self.v_min) | (target > self.v_max)).float()
        return outside.flatten(1).mean(1) if members else outside.mean()

    def _moments(self, probabilities: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation."""
        mean = self._expect(self.support, probabilities)
        variance = self._expect((self.support - mean.unsqueeze(-1)).square(), probabilities)
        return mean, variance.clamp_min(_TINY**2).sqrt()

    def _expect(self, values: Tensor, probabilities: Tensor) -> Tensor:
        # Not a matrix product: autocast would round it to bfloat16.
        return (probabilities * values).sum(-1)

    def _place(self, returns: Tensor) -> Tensor:
        """Fractional atom index of returns: 0 at the first atom, 1 at the second."""
        last = self.places.numel() - 1
        return ((returns - self.v_min) * (last / (self.v_max - self.v_min))).clamp(0, last)

    def _share(self, positions: Tensor, probabilities: Tensor) -> Tensor:
        """Project probabilities at fractional atom indices ``[..., n]`` onto neighbouring atoms ``[..., atoms]``."""
        place = self._place(positions)
        # Clamped as integers: NaN must not become an invalid index, but propagate to the result.
        lower = place.detach().long().clamp(0, self.places.numel() - 2)
        given_up = probabilities * (place - lower)
        result = torch.zeros_like(probabilities)
        return result.scatter_add(-1, lower, probabilities - given_up).scatter_add(-1, lower + 1, given_up)


class MeanHead(ValueHead):
    """The mean return as one number in units of rewards, learned by squared error.

    For policies with their own value network, whose output it reads.
    """

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.outputs = 1

    def mean(self, prediction: Tensor) -> Tensor:
        return prediction.squeeze(-1)

    def std(self, prediction: Tensor) -> Tensor:
        return torch.zeros_like(self.mean(prediction))

    def quantiles(self, prediction: Tensor) -> Tensor:
        return prediction

    def cvar(self, prediction: Tensor, alpha: Number) -> Tensor:
        raise ArgumentError("cvar_alpha needs a policy that predicts distributions, such as MlpPolicy")

    def loss(self, prediction: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(prediction, self._as_column(target, prediction), reduction="none").squeeze(-1)

    def clip_to(self, prediction: Tensor, old: Tensor, mode: ClipMode, delta: Number) -> Tensor:
        return _clamp(prediction, old, delta)

    def difference(self, prediction: Tensor, other: Tensor) -> Tensor:
        return (other - prediction).square().squeeze(-1)

    def rescale(self, old: Scale, new: Scale) -> None:
        """Does nothing: predictions are always in units of rewards."""

    def rescaled(self, prediction: Tensor, old: Scale, new: Scale) -> Tensor:
        return prediction


def _share_below(quantiles: Tensor, returns: Tensor) -> Tensor:
    return (returns.unsqueeze(-1) - quantiles).sign_().add_(1).mean(-1).mul_(0.5)


def _root_mean_square(values: Tensor) -> Tensor:
    # Faster than torch.std, and never 0, where a square root has no gradient.
    return values.square().mean(-1).clamp_min(_TINY**2).sqrt()


def _check_share(alpha: Number) -> None:
    # Tensors are not checked: reading them would wait for the device.
    if not isinstance(alpha, Tensor):
        check_number("alpha", alpha, above=0, at_most=1)


def _clamp(value: Tensor, old: Tensor, delta: Number) -> Tensor:
    delta = per_member(delta, value)
    return torch.clamp(value, old - delta, old + delta)
