"""Distribution of actions for given observations, with the methods of Stable-Baselines3's distributions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch import distributions as torch_distributions

from driftproof.nn.distributions import ActionDistribution, Bernoulli, Gaussian, MultiCategorical


class PolicyDistribution:
    """Result of ``policy.get_distribution``.

    Actions are as in Stable-Baselines3: integers, zeros and ones as floats, or unclipped numbers, flattened
    ``[B, dim]``; with ``squash_output`` between -1 and 1, and log-probability and entropy are of these.

    Args:
        kind: Family of the distribution.
        parameters: Parameters ``[B, size]``.
        noise: Function that draws noise for these parameters.
    """

    def __init__(self, kind: ActionDistribution, parameters: Tensor, noise: Callable[[], Tensor]) -> None:
        self._kind, self._noise = kind, noise
        self.parameters = parameters

    def sample(self) -> Tensor:
        """Random actions, reparametrised if they are continuous."""
        return self._kind.shown(self._kind.sample(self.parameters, self._noise()))

    def mode(self) -> Tensor:
        """The most probable actions."""
        return self._kind.shown(self._kind.mode(self.parameters))

    def get_actions(self, deterministic: bool = False) -> Tensor:
        """The most probable actions, or random ones."""
        return self.mode() if deterministic else self.sample()

    def log_prob(self, actions: Tensor) -> Tensor:
        """Log-probability or log-density of actions ``[B]``."""
        shape = self.parameters.shape[:-1] + self._kind.action_shape
        if actions.numel() != shape.numel():
            raise ValueError(
                f"actions have shape {tuple(actions.shape)}; {len(self.parameters)} observations need {tuple(shape)}"
            )
        stored = self._kind.stored(actions.reshape(shape))
        return self._kind.log_prob(self.parameters, stored) + self._kind.log_unit

    def entropy(self) -> Tensor:
        """Entropy ``[B]``."""
        return self._kind.entropy(self.parameters) - self._kind.log_unit

    def log_prob_from_params(self) -> tuple[Tensor, Tensor]:
        """Random actions and their log-probabilities."""
        actions = self.sample()
        return actions, self.log_prob(actions)

    @property
    def distribution(self) -> Any:
        """The distribution as torch's, a list of them for MultiDiscrete; a squashed one before squashing."""
        if isinstance(self._kind, Gaussian):
            mean, log_std = self.parameters.chunk(2, -1)
            return torch_distributions.Normal(mean, log_std.exp())
        if isinstance(self._kind, Bernoulli):
            return torch_distributions.Bernoulli(logits=self.parameters)
        if isinstance(self._kind, MultiCategorical):
            parts = torch.split(self.parameters, self._kind.options, -1)
            return [torch_distributions.Categorical(logits=part) for part in parts]
        return torch_distributions.Categorical(logits=self.parameters)
