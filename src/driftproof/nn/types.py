"""Types of the inputs and outputs of policies, without Stable-Baselines3 or Gymnasium."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from driftproof.nn.cores import State, mask_state

Observation: TypeAlias = "Tensor | dict[str, Tensor]"
SECOND_CRITIC = "critics.1."
"""How the names of the second critic's weights begin, which a policy with one critic does not have."""


class PolicyState(NamedTuple):
    """Recurrent states of actor and critics. With one shared core, the critics' is empty."""

    actor: State
    critic: State

    def masked(self, keep: Tensor) -> PolicyState:
        """The state, reset where ``keep`` ``[B, 1]`` is 0."""
        return PolicyState(mask_state(self.actor, keep), mask_state(self.critic, keep))

    def rows(self, index: Tensor | slice) -> PolicyState:
        """The state of some of the sequences."""
        return PolicyState(tuple(p[:, index] for p in self.actor), tuple(p[:, index] for p in self.critic))


class Evaluation(NamedTuple):
    """Outputs of a policy: parameters of the actions' distribution, and one prediction for each critic."""

    parameters: Tensor
    predictions: tuple[Tensor, ...]


class Step(NamedTuple):
    """One step of acting.

    Attributes:
        parameters: Parameters of the actions' distribution ``[B, size]``.
        memory: Output of the critics' core, for ``predict_returns``.
        state: Recurrent state after the step.
        latent: The actor's last features ``[B, features]``, for state-dependent noise.
    """

    parameters: Tensor
    memory: Tensor
    state: PolicyState
    latent: Tensor


class Wiring(NamedTuple):
    """Actions of a policy whose sensors and actions can be reordered.

    Attributes:
        actions: Number of actions, or of the components of an action.
        is_discrete: Whether an action is the number of one of them.
        can_reorder: Whether actions can be reordered, and not only sensors.
    """

    actions: int
    is_discrete: bool
    can_reorder: bool


class Rewiring(NamedTuple):
    """How the present sensors and actions relate to the former ones.

    Attributes:
        sensors: Former sensor that each one measures.
        sensor_signs: -1 where it is inverted.
        actions: Former action that each one acts as; of a Box, by component.
        action_signs: -1 where it is inverted.
    """

    sensors: npt.NDArray[np.int64]
    sensor_signs: npt.NDArray[np.float64]
    actions: npt.NDArray[np.int64]
    action_signs: npt.NDArray[np.float64]


RolloutStep: TypeAlias = Callable[[Observation, PolicyState], Step]
RolloutNoise: TypeAlias = Callable[[int, Tensor, Tensor], Tensor]
"""Noise at a step of a rollout, from the step's index, the distribution's parameters and the actor's last features."""


def map_observation(observation: Observation, function: Callable[[Tensor], Tensor]) -> Observation:
    """Apply a function to every part of an observation."""
    if isinstance(observation, dict):
        return {key: function(part) for key, part in observation.items()}
    return function(observation)


def batch_size(observation: Observation) -> int:
    """Length of the first axis."""
    return len(observation if isinstance(observation, Tensor) else next(iter(observation.values())))
