"""Interface of the networks that a learner trains; :class:`driftproof.nn.policies.DistributionalPolicy` has it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from driftproof.nn.dense import DenseNetworks
from driftproof.nn.heads import ValueHead
from driftproof.nn.likelihood import Likelihood
from driftproof.nn.segments import Segments
from driftproof.nn.types import Evaluation, Observation, PolicyState, Rewiring, RolloutNoise, RolloutStep, Wiring


class Distribution(Protocol):
    """Distribution of actions, whose parameters are one tensor ``[..., size]``."""

    size: int
    action_shape: tuple[int, ...]
    action_dtype: torch.dtype

    def sample(self, parameters: Tensor, noise: Tensor) -> Tensor:
        """Random actions ``[..., *action_shape]``."""

    def to_env(self, actions: Tensor) -> Tensor:
        """Actions as the environment takes them, such as clipped to their bounds."""

    def log_prob(self, parameters: Tensor, actions: Tensor) -> Tensor:
        """Log-probability of actions ``[...]``."""

    def entropy(self, parameters: Tensor) -> Tensor:
        """Entropy ``[...]``."""

    def log_prob_and_entropy(self, parameters: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy in one pass."""

    def kl(self, old: Tensor, new: Tensor) -> Tensor:
        """The exact KL(old‖new) ``[...]``."""

    def uniform_divergence(self, parameters: Tensor) -> Tensor:
        """Distance from a distribution that still explores ``[...]``."""

    def likelihood(self, parameters: Tensor, actions: Tensor) -> Likelihood:
        """Log-probability and entropy, for a loss whose gradients are given by formulas."""


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
    def lasting_memory(self) -> bool:
        """Whether the recurrent state outlasts episodes."""

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""

    @property
    def observation_space(self) -> Any:
        """Observation space: has ``shape`` and ``dtype``, or a mapping ``spaces`` of such spaces."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Trainable parameters."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters with their names."""

    def modules(self) -> Iterator[nn.Module]:
        """All modules."""

    def train(self, mode: bool = True) -> Any:
        """Switch layers such as dropout between training and evaluation."""

    def initial_state(self, batch: int) -> PolicyState:
        """The recurrent state at the start of ``batch`` episodes."""

    def stepper(self) -> RolloutStep:
        """Function for one step of acting; weights must not change while it is used."""

    def rollout_noise(self, steps: int, envs: int, sde_sample_freq: int = -1) -> RolloutNoise:
        """Noise for ``distribution.sample`` at every step of a rollout."""

    def predict_returns(self, memory: Tensor) -> tuple[Tensor, ...]:
        """Each critic's prediction from the output of the critics' core."""

    def evaluate(
        self, observation: Observation, state: PolicyState, segments: Segments | None = None, keep: Tensor | None = None
    ) -> Evaluation:
        """Evaluate sequences of observations ``[T, B, ...]`` from their initial recurrent state."""

    def recycle(
        self, observation: Observation, state: PolicyState, segments: Segments | None, threshold: float
    ) -> tuple[Tensor, dict[Tensor, Tensor]]:
        """Recycle dormant units: their share, and masks of what was replaced. Needed for ``recycle_dormant`` only."""

    def state_dict(self) -> dict[str, Any]:
        """Weights by name."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> Any:
        """Copy weights into the parameters."""

    def fresh(self) -> Policy:
        """A policy like this one with new random weights. For ``drift_response``."""

    def last_parameters(self) -> list[nn.Parameter]:
        """Parameters of heads and last layers. For ``drift_response``."""

    def wiring(self) -> Wiring | None:
        """What :meth:`rewire` can reorder; ``None``: nothing. For ``drift_response``."""

    def rewire(self, found: Rewiring) -> None:
        """Reorder weights for sensors and actions that were reordered or inverted. Needed if :meth:`wiring` is."""


@runtime_checkable
class HasKernels(Protocol):
    """A recurrent policy that may have kernels for sequences in which episodes start."""

    @property
    def has_kernels(self) -> bool:
        """Whether masks of episode starts are faster than segments."""


@runtime_checkable
class HasDenseNetworks(Protocol):
    """Policy whose actor and critics may be nothing but dense layers, on observations or behind a recurrent core."""

    def dense_networks(self) -> DenseNetworks | None:
        """Dense layers that can be differentiated without autograd; ``None`` if the networks have other parts."""

    def evaluate_dense(
        self,
        networks: DenseNetworks,
        observation: Observation,
        state: PolicyState,
        segments: Segments | None = None,
        keep: Tensor | None = None,
    ) -> Evaluation:
        """What ``evaluate`` returns, with gradients that end at the outputs of these networks."""
