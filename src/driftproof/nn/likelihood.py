"""Log-probabilities and entropies of actions with their derivatives, which for one choice are formulas."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch import Tensor


class _Distribution(Protocol):
    def log_prob_and_entropy(self, parameters: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]: ...

    def uniform_divergence(self, parameters: Tensor) -> Tensor: ...


class Likelihood(ABC):
    """Actions ``[...]`` under a distribution with parameters ``[..., size]``, to be differentiated once.

    Attributes:
        log_prob: Log-probabilities of the actions ``[...]``.
        entropy: Entropies ``[...]``.
    """

    log_prob: Tensor
    entropy: Tensor

    @abstractmethod
    def uniform_divergence(self) -> Tensor:
        """Mean distance from a distribution that still explores, 0-dim."""

    @abstractmethod
    def backward(self, log_prob: Tensor, entropy: float | Tensor, divergence: float | Tensor) -> None:
        """Add gradients to those of the parameters.

        Args:
            log_prob: Gradient of the loss by each log-probability ``[...]``.
            entropy: Gradient by the mean entropy.
            divergence: Gradient by the mean distance; not 0 only after :meth:`uniform_divergence`.
        """


class AutogradLikelihood(Likelihood):
    """For any distribution."""

    def __init__(self, distribution: _Distribution, parameters: Tensor, actions: Tensor) -> None:
        self._distribution, self._parameters = distribution, parameters
        with torch.enable_grad():
            self._log_prob, self._entropy = distribution.log_prob_and_entropy(parameters, actions)
        self.log_prob, self.entropy = self._log_prob.detach(), self._entropy.detach()
        self._divergence: Tensor | None = None

    def uniform_divergence(self) -> Tensor:
        with torch.enable_grad():
            self._divergence = self._distribution.uniform_divergence(self._parameters).mean()
        return self._divergence.detach()

    def backward(self, log_prob: Tensor, entropy: float | Tensor, divergence: float | Tensor) -> None:
        tensors, gradients = [self._log_prob], [log_prob]
        if isinstance(entropy, Tensor) or entropy:
            tensors.append(self._entropy)
            gradients.append(torch.full_like(self.entropy, 1 / self.entropy.numel()) * entropy)
        if self._divergence is not None:
            tensors.append(self._divergence)
            gradients.append(torch.ones_like(self._divergence) * divergence)
        torch.autograd.backward(tensors, gradients)


class ChoiceLikelihood(Likelihood):
    """For one choice among ``n``, whose parameters ``[..., n]`` are unnormalised log-probabilities."""

    @torch.no_grad()
    def __init__(self, parameters: Tensor, actions: Tensor) -> None:
        self._parameters, self._actions = parameters, actions.unsqueeze(-1)
        self._log_probs = parameters.log_softmax(-1)
        self._probs = self._log_probs.exp()
        self.log_prob = self._log_probs.gather(-1, self._actions).squeeze(-1)
        self.entropy = (self._probs * self._log_probs).sum(-1).neg_()

    def uniform_divergence(self) -> Tensor:
        return self._log_probs.mean().add_(math.log(self._probs.shape[-1])).neg_()

    @torch.no_grad()
    def backward(self, log_prob: Tensor, entropy: float | Tensor, divergence: float | Tensor) -> None:
        probs, count = self._probs, self.entropy.numel()
        of_choice = log_prob.unsqueeze(-1)
        gradient = torch.mul(probs, of_choice).neg_().scatter_add_(-1, self._actions, of_choice)
        if isinstance(entropy, Tensor) or entropy:
            gradient -= (self._log_probs + self.entropy.unsqueeze(-1)).mul_(probs).mul_(entropy / count)
        if isinstance(divergence, Tensor) or divergence:
            gradient += (probs - 1 / probs.shape[-1]).mul_(divergence / count)
        if self._parameters.is_leaf and self._parameters.grad is None:
            self._parameters.grad = gradient
        else:
            torch.autograd.backward(self._parameters, gradient)
