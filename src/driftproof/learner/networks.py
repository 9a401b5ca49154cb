"""What the learner asks of the networks that it trains. :class:`driftproof.nn.policies.DistributionalPolicy` has it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from driftproof.nn.heads import ValueHead
from driftproof.nn.segments import Segments
from driftproof.nn.types import Evaluation, Observation, PolicyState, RolloutNoise, RolloutStep


class Distribution(Protocol):
    """Distribution of actions, whose parameters are one tensor ``[..., size]``."""

    size: int
    action_shape: tuple[int, ...]
    action_dtype: torch.dtype

    def sample(self, parameters: Tensor, noise: Tensor) -> Tensor:
        """Random actions ``[..., *action_shape]``."""

    def to_env(self, actions: Tensor) -> Tensor:
        """What the environment gets for actions."""

    def log_prob(self, parameters: Tensor, actions: Tensor) -> Tensor:
        """Log-probability of actions ``[...]``."""

    def entropy(self, parameters: Tensor) -> Tensor:
        """Entropy ``[...]``."""

    def log_prob_and_entropy(self, parameters: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Both at once."""

    def kl(self, old: Tensor, new: Tensor) -> Tensor:
        """The exact KL(old‖new) ``[...]``."""


class Policy(Protocol):
    """Actor and critics as one module."""

    @property
    def distribution(self) -> Distribution:
        """Distribution of actions."""

    @property
    def heads(self) -> Sequence[ValueHead]:
        """The value heads, one for each critic."""

    @property
    def critics(self) -> Iterable[nn.Module]:
        """The critics' own networks, whose gradient norms are logged."""

    @property
    def is_recurrent(self) -> bool:
        """Whether there is a recurrent state."""

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""

    @property
    def observation_space(self) -> Any:
        """Has ``shape`` and ``dtype``, or in ``spaces`` several by name."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """What the optimizer changes."""

    def modules(self) -> Iterator[nn.Module]:
        """All layers."""

    def train(self, mode: bool = True) -> Any:
        """Switch layers such as dropout between learning and acting."""

    def initial_state(self, batch: int) -> PolicyState:
        """The recurrent state at the start of ``batch`` episodes."""

    def stepper(self) -> RolloutStep:
        """One step of acting, for weights that do not change while it is used."""

    def rollout_noise(self, steps: int, envs: int, sde_sample_freq: int = -1) -> RolloutNoise:
        """Noise for ``distribution.sample`` at every step of a rollout."""

    def predict_returns(self, memory: Tensor) -> tuple[Tensor, ...]:
        """Each critic's prediction from the output of the critics' core."""

    def evaluate(
        self, observation: Observation, state: PolicyState, segments: Segments | None = None, keep: Tensor | None = None
    ) -> Evaluation:
        """Whole sequences of observations ``[T, B, ...]`` from the state before them."""
