"""Policy classes that were written for Stable-Baselines3.

A class that derives from ``ActorCriticPolicy`` keeps its networks and its methods. The agent draws actions from its
``get_distribution``, takes the values of a rollout from its ``forward``, as Stable-Baselines3 does, and trains with
``get_distribution`` and ``predict_values``. Its critic predicts one number, the mean return in units of rewards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.utils import ConstantSchedule
from torch import Tensor, distributions, nn

from driftproof._arguments import ArgumentError
from driftproof.nn.cores import CoreName
from driftproof.nn.distributions import distribution_for
from driftproof.nn.files import ValueScale
from driftproof.nn.heads import MeanHead, ValueHead
from driftproof.nn.policies import (
    CnnLstmPolicy,
    CnnPolicy,
    DistributionalPolicy,
    MlpLstmPolicy,
    MlpPolicy,
    MultiInputLstmPolicy,
    MultiInputPolicy,
)
from driftproof.nn.types import (
    Evaluation,
    Observation,
    PolicyState,
    RolloutNoise,
    RolloutStep,
    Step,
    map_observation,
)

_IN_PLACE_OF: dict[str, type[DistributionalPolicy]] = {
    "stable_baselines3.common.policies.ActorCriticPolicy": MlpPolicy,
    "stable_baselines3.common.policies.ActorCriticCnnPolicy": CnnPolicy,
    "stable_baselines3.common.policies.MultiInputActorCriticPolicy": MultiInputPolicy,
    "sb3_contrib.common.recurrent.policies.RecurrentActorCriticPolicy": MlpLstmPolicy,
    "sb3_contrib.common.recurrent.policies.RecurrentActorCriticCnnPolicy": CnnLstmPolicy,
    "sb3_contrib.common.recurrent.policies.RecurrentMultiInputActorCriticPolicy": MultiInputLstmPolicy,
}
"""Policy classes of Stable-Baselines3 and sb3-contrib, and ours that replace them."""


class AdaptedPolicy(ActorCriticPolicy):
    """Interface of our policies on top of an ``ActorCriticPolicy``. No recurrence, no gSDE."""

    written: ClassVar[type[ActorCriticPolicy]]
    """The user's class."""
    default_core: ClassVar[CoreName] = "none"
    predicts_distributions: ClassVar[bool] = False
    is_recurrent = lasting_memory = False
    exploration = None
    value_scale: ValueScale | None = None
    normalizer = None

    def __init__(self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any], **kwargs: Any) -> None:
        if np.any(getattr(action_space, "start", 0)):
            raise ArgumentError(f"{self.written.__name__} needs actions that start at 0, not {action_space}")
        # The agent replaces this optimizer with its own.
        super().__init__(observation_space, action_space, ConstantSchedule(0.0), **kwargs)
        self.distribution = distribution_for(action_space)
        self.heads: list[ValueHead] = [MeanHead()]

    @property
    def critics(self) -> list[nn.Module]:
        """The last layer of the one critic."""
        return [self.value_net]

    def normalized(self, observation: Observation) -> Observation:
        """The observation unchanged: methods of the user's class take it as it is."""
        return observation

    def initial_state(self, batch: int) -> PolicyState:
        """Empty recurrent state."""
        return PolicyState((), ())

    def stepper(self) -> RolloutStep:
        """Function for one step of acting; the values of ``forward`` stand in for the output of the critics' core."""

        def step(observation: Observation, state: PolicyState) -> Step:
            _, values, _ = self(observation)
            return Step(self._action_parameters(observation), values, state, values)

        return step

    def predict_returns(self, memory: Tensor) -> tuple[Tensor, ...]:
        """The values of ``forward``."""
        return (memory,)

    def evaluate(self, observation: Observation, *_: Any) -> Evaluation:
        """Distributions and values of observations ``[T, B, ...]``."""
        return Evaluation(self.evaluate_actor(observation), self.evaluate_critics(observation))

    def evaluate_actor(self, observation: Observation, *_: Any) -> Tensor:
        """Parameters of the actions' distribution ``[T, B, size]``."""
        flat, leading = _flat(observation)
        return self._action_parameters(flat).view(*leading, -1)

    def evaluate_critics(self, observation: Observation, *_: Any) -> tuple[Tensor, ...]:
        """Values ``[T, B, 1]``."""
        flat, leading = _flat(observation)
        return (self.predict_values(flat).view(*leading, 1),)

    def predict_distribution(self, observation: Any, *_: Any) -> tuple[tuple[Tensor, ...], None]:
        """Values ``[B, 1]`` of an environment's observations, and no state."""
        self.set_training_mode(False)
        return (self.predict_values(self.obs_to_tensor(observation)[0]),), None

    def rollout_noise(self, steps: int, envs: int, _: int = -1) -> RolloutNoise:
        """Noise for ``distribution.sample`` at every step of a rollout."""
        noise = self.distribution.noise(steps, envs, device=self.device)
        return lambda step, parameters, latent: noise[step]

    def choose(self, parameters: Tensor, latent: Tensor, deterministic: bool) -> Tensor:
        """Actions for the environments: the most probable ones, or random ones."""
        if deterministic:
            return self.distribution.to_env(self.distribution.mode(parameters))
        noise = self.distribution.noise(len(parameters), device=parameters.device)
        return self.distribution.to_env(self.distribution.sample(parameters, noise))

    def fresh(self) -> AdaptedPolicy:
        """A policy like this one with new random weights, drawn from torch's global generator."""
        arguments = self._get_constructor_parameters()
        return type(self)(**{name: value for name, value in arguments.items() if name != "lr_schedule"})

    def last_parameters(self) -> list[nn.Parameter]:
        """Parameters of the last layers, and of the spread of actions."""
        parameters = [*self.action_net.parameters(), *self.value_net.parameters()]
        return [*parameters, *([self.log_std] if hasattr(self, "log_std") else [])]

    def lacks_second_critic(self, state_dict: Mapping[str, Any]) -> bool:
        """``False``: there is one critic."""
        return False

    def _action_parameters(self, observation: Any) -> Tensor:
        given: Any = self.get_distribution(observation).distribution
        if isinstance(given, distributions.Normal):
            return torch.cat((given.mean, given.stddev.log()), -1)
        return torch.cat([each.logits for each in (given if isinstance(given, list) else [given])], -1)


def as_policy(policy: Any) -> Any:
    """Adapt a class that was written for Stable-Baselines3; anything else is returned unchanged."""
    if not isinstance(policy, type) or not issubclass(policy, ActorCriticPolicy) or issubclass(policy, AdaptedPolicy):
        return policy
    if (own := _IN_PLACE_OF.get(f"{policy.__module__}.{policy.__name__}")) is not None:
        return own
    if any(kind.__name__ == "RecurrentActorCriticPolicy" for kind in policy.__mro__):
        raise TypeError(
            f"{policy.__name__} derives from a recurrent policy of sb3-contrib: derive it from "
            "driftproof.nn.policies.MlpLstmPolicy"
        )
    if policy.evaluate_actions is not ActorCriticPolicy.evaluate_actions:
        raise TypeError(
            f"{policy.__name__} has an evaluate_actions() of its own, which the agent does not call: override "
            "get_distribution() and predict_values(), which it trains with"
        )
    return type(policy.__name__, (AdaptedPolicy, policy), {"written": policy, "__module__": policy.__module__})


def _flat(observation: Observation) -> tuple[Observation, torch.Size]:
    first = observation if isinstance(observation, Tensor) else next(iter(observation.values()))
    return map_observation(observation, lambda part: part.flatten(0, 1)), first.shape[:2]
