"""Runs episodes of an agent while its observations are perturbed."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from gymnasium import make
from stable_baselines3.common.type_aliases import GymEnv
from stable_baselines3.common.vec_env import VecEnv, VecNormalize, unwrap_vec_normalize
from torch import Tensor

from driftproof.learner.collector import reset_state
from driftproof.nn.types import Observation, PolicyState
from driftproof.ppo import DistributionalPPO
from driftproof.ppo.generators import unchanged_generators
from driftproof.ppo.normalizer import statistics_of

Flags: TypeAlias = "npt.NDArray[np.bool_]"


class Player:
    """An agent's policy with its recurrent states in several running episodes.

    Args:
        model: The agent. Its weights must not change meanwhile.
        deterministic: Take the most probable actions instead of sampling.
    """

    def __init__(self, model: DistributionalPPO, deterministic: bool = True) -> None:
        self.model, self.policy, self.deterministic = model, model.policy, deterministic
        self.policy.set_training_mode(False)
        self._step = self.policy.stepper()
        self.state: PolicyState = self.policy.initial_state(0)

    def begin(self, envs: int) -> None:
        """Start this number of episodes with initial recurrent states."""
        self.state = self.policy.initial_state(envs)

    def reset_state(self, starts: Flags) -> None:
        """Reset the recurrent states where episodes start."""
        if not self.policy.lasting_memory:
            self.state = reset_state(self.state, starts)

    def seen(self, observation: Any) -> Observation:
        """Environments' observations as the policy's networks take them: normalised tensors."""
        tensors: Observation = self.policy.obs_to_tensor(observation)[0]
        return self.policy.normalized(tensors)

    @torch.no_grad()
    def act(self, observation: Observation) -> Tensor:
        """Actions for normalised observations; updates the recurrent states."""
        step = self._step(observation, self.state)
        self.state = step.state
        return self.policy.choose(step.parameters, step.latent, self.deterministic)

    def actor(self, observation: Observation) -> Tensor:
        """Parameters of the action distribution ``[N, ...]``, with gradients; recurrent states are not updated."""
        return self.policy.evaluate_actor(*self._as_sequence(observation)).squeeze(0)

    def value(self, observation: Observation) -> Tensor:
        """Minimum of the critics' expected normalised returns, with gradients; recurrent states are not updated."""
        predictions = self.policy.evaluate_critics(*self._as_sequence(observation))
        means = [head.mean(p) for head, p in zip(self.policy.heads, predictions, strict=True)]
        return torch.stack(means).amin(0).squeeze(0)

    def _as_sequence(self, observation: Observation) -> tuple[Observation, PolicyState, None, Tensor]:
        """Arguments for sequences of one step. A mask makes recurrent cores run step by step, as when acting."""
        if isinstance(observation, dict):
            sequence: Observation = {key: part.unsqueeze(0) for key, part in observation.items()}
            envs = len(next(iter(observation.values())))
        else:
            sequence, envs = observation.unsqueeze(0), len(observation)
        return sequence, self.state, None, torch.ones(1, envs, device=self.policy.device)


Perturb: TypeAlias = Callable[[Player, Observation, Flags], Observation]
"""Returns the perturbed observations, from a player, the observations and where episodes start."""


def play(player: Player, env: VecEnv, perturb: Perturb | None, episodes: int, seed: int | None) -> list[float]:
    """Returns of episodes, distributed evenly over the environments, so that short episodes do not count more often.

    Args:
        player: The agent that acts.
        env: The environments.
        perturb: Perturbs observations; ``None``: they are not perturbed.
        episodes: Number of episodes.
        seed: Seed of the environments and of random actions; ``None``: not seeded.
    """
    if seed is None:
        return _play(player, env, perturb, episodes)
    with unchanged_generators():
        torch.manual_seed(seed)
        env.seed(seed)
        return _play(player, env, perturb, episodes)


def _play(player: Player, env: VecEnv, perturb: Perturb | None, episodes: int) -> list[float]:
    envs = env.num_envs
    left = np.array([(episodes + i) // envs for i in range(envs)])
    observation, starts = env.reset(), np.ones(envs, dtype=bool)
    player.begin(envs)
    running, returns = np.zeros(envs), []
    while left.any():
        player.reset_state(starts)
        tensors = player.seen(observation)
        shown = tensors if perturb is None else perturb(player, tensors, starts)
        observation, rewards, dones, infos = env.step(player.act(shown).cpu().numpy())
        running += rewards
        for i in np.flatnonzero(dones & (left > 0)):
            returns.append(float(running[i]))
            left[i] -= 1
        running[dones] = 0
        starts = dones | resets(infos)
    return returns


def resets(infos: list[dict[str, Any]]) -> Flags:
    """Where a vector environment used the step only to reset itself."""
    return np.fromiter((info.get("autoreset", False) for info in infos), bool, len(infos))


@contextlib.contextmanager
def as_the_agent_sees_it(model: DistributionalPPO, env: GymEnv | str) -> Iterator[VecEnv]:
    """The environment with observations normalised as in training; the normaliser is not updated meanwhile."""
    with contextlib.ExitStack() as stack:
        if isinstance(env, str):
            env = make(env)
            stack.callback(env.close)
        wrapped = model.wrapped(env)
        if (wrapped.observation_space, wrapped.action_space) != (model.observation_space, model.action_space):
            raise ValueError(
                f"the environment has observations {wrapped.observation_space} and actions {wrapped.action_space}, but "
                f"the agent was made for {model.observation_space} and {model.action_space}"
            )
        normalizer = unwrap_vec_normalize(wrapped)
        if normalizer is not None:
            _check_statistics(model, normalizer)
            stack.callback(setattr, normalizer, "training", normalizer.training)
            normalizer.training = False
        yield wrapped


def _check_statistics(model: DistributionalPPO, env: VecNormalize) -> None:
    """Warn about normalisation that the agent was not trained with."""
    if env.norm_obs and not model.normalizer.is_used:
        warnings.warn(
            "the environment has a VecNormalize, but the agent was trained without one: it sees other observations "
            "than in training. Give the environment without it",
            stacklevel=5,
        )
    elif _has_seen_nothing(statistics_of(env)) and not _has_seen_nothing(model.normalizer.state_dict()):
        warnings.warn(
            "the environment's VecNormalize has seen no observations, and does not normalise them as the agent's did. "
            "Give the environment without it, and the agent's own statistics are used",
            stacklevel=5,
        )


def _has_seen_nothing(statistics: Mapping[str, Any]) -> bool:
    return all(moments["count"] < 1 for moments in statistics.get("obs_rms", {}).values())
