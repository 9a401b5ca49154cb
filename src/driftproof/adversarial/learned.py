"""A learned adversary: an agent of this library whose actions perturb another agent's observations."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gymnasium import spaces
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn

from driftproof._arguments import check_count, check_number
from driftproof.adversarial.attacks import StatePerturbation
from driftproof.adversarial.playing import Flags, Player, as_the_agent_sees_it, resets
from driftproof.nn.types import Observation
from driftproof.ppo import DistributionalPPO
from driftproof.ppo.generators import unchanged_generators
from driftproof.settings.adversarial import NormType, PerturbationConfig

_ROLLOUT, _BATCH, _SEQUENCE = 2048, 256, 32
"""Largest number of samples in an adversary's rollout and minibatch, and the length of its sequences."""


class AdversaryEnv(VecEnvWrapper):
    """The adversary's environment: its actions perturb the victim's observations, the victim's losses are its rewards.

    This is the decision process whose optimal policy is the strongest attack (Zhang et al., 2020, arXiv 2003.08938;
    learned as in Zhang et al., 2021, arXiv 2101.08452). ``info["episode"]`` has the victim's returns.

    Args:
        venv: The victim's environments, with normalised observations.
        victim: The agent under attack, which acts in them.
        attack: The perturbation, with its radius.
    """

    def __init__(self, venv: VecEnv, victim: Player, attack: StatePerturbation) -> None:
        super().__init__(venv, action_space=_moves(venv.observation_space))
        self.victim, self.attack = victim, attack
        self._observation: Any = None

    def reset(self) -> VecEnvObs:
        self._observation = self.victim.seen(self.venv.reset())
        self.victim.begin(self.num_envs)
        return _on_host(self._observation)

    def step_async(self, actions: npt.NDArray[Any]) -> None:
        directions = torch.from_numpy(actions).to(self.victim.policy.device)
        self.venv.step_async(self.victim.act(self.attack.move(self._observation, directions)).cpu().numpy())

    def step_wait(self) -> VecEnvStepReturn:
        observation, rewards, dones, infos = self.venv.step_wait()
        self._observation = self.victim.seen(observation)
        for info in infos:
            if info.get("terminal_observation") is not None:
                info["terminal_observation"] = self._last(info["terminal_observation"])
        self.victim.reset_state(dones | resets(infos))
        return _on_host(self._observation), -rewards, dones, infos

    def _last(self, observation: Any) -> Any:
        """The last observation of an episode as the victim's networks take it."""
        seen = _on_host(self.victim.seen(observation))
        return {key: part[0] for key, part in seen.items()} if isinstance(seen, dict) else seen[0]


def train_adversary(
    model: DistributionalPPO,
    env: GymEnv | str,
    epsilon: float,
    steps: int,
    *,
    norm_type: NormType = "linf",
    seed: int | None = 0,
    callback: MaybeCallback = None,
    **settings: Any,
) -> DistributionalPPO:
    """Train an adversary against an agent, whose weights stay unchanged.

    Args:
        model: The victim, which acts deterministically.
        env: The victim's environment, not the one that it trains in. Its ``VecNormalize``, or the agent's own
            normaliser, is not updated; ``epsilon`` is in units of normalised observations.
        epsilon: Radius of the perturbations.
        steps: Environment steps; tens of thousands for small tasks, as many as the victim had for hard ones.
        norm_type: Norm of the ball.
        seed: Seed of the adversary.
        callback: Callback of its training.
        settings: Arguments of its :class:`DistributionalPPO`. By default it is recurrent if the victim is.
    """
    check_number("epsilon", epsilon, at_least=0)
    check_count("steps", steps, at_least=1)
    config = PerturbationConfig(epsilon=epsilon, norm_type=norm_type)
    with as_the_agent_sees_it(model, env) as venv, unchanged_generators():
        attacked = AdversaryEnv(venv, Player(model), perturbation_of(model, config))
        adversary = DistributionalPPO(env=attacked, seed=seed, **{**_defaults(model, venv.num_envs, steps), **settings})
        adversary.learn(steps, callback)
    # It keeps its normaliser, but not the caller's environment.
    adversary.env = None
    return adversary


class LearnedAttack:
    """Perturbs observations with a trained adversary.

    Args:
        adversary: An agent from :func:`train_adversary`.
        attack: The perturbation, with its radius.
    """

    def __init__(self, adversary: DistributionalPPO, attack: StatePerturbation) -> None:
        self.player, self.attack = Player(adversary), attack

    def __call__(self, victim: Player, observation: Observation, starts: Flags) -> Observation:
        """The perturbed observations; updates the adversary's recurrent state with the true ones."""
        if starts.all():
            self.player.begin(len(starts))
        self.player.reset_state(starts)
        return self.attack.move(observation, self.player.act(self.player.policy.normalized(observation)))


def _on_host(observation: Observation) -> VecEnvObs:
    if isinstance(observation, dict):
        return {key: part.cpu().numpy() for key, part in observation.items()}
    array: npt.NDArray[Any] = observation.cpu().numpy()
    return array


def perturbation_of(model: DistributionalPPO, config: PerturbationConfig, seed: int | None = None) -> StatePerturbation:
    """A perturbation of this agent's observations."""
    return StatePerturbation(
        config,
        model.observation_space,
        images_are_divided=model.policy.normalize_images,
        device=model.device,
        seed=seed,
    )


def check_adversary(model: DistributionalPPO, adversary: Any) -> None:
    """Raise an error unless the adversary has the spaces of this agent's adversaries."""
    if not isinstance(adversary, DistributionalPPO):
        raise TypeError(f"adversaries must be agents that train_adversary() made, not {adversary!r}")
    seen, moves = model.observation_space, _moves(model.observation_space)
    if (adversary.observation_space, adversary.action_space) != (seen, moves):
        raise ValueError(
            f"an adversary of this agent sees {seen} and has actions {moves}, but the one given sees "
            f"{adversary.observation_space} and has actions {adversary.action_space}"
        )


def _moves(space: spaces.Space[Any]) -> spaces.Box:
    """Action space of an adversary: one action for every number of an observation that can be perturbed."""
    parts = space.spaces.values() if isinstance(space, spaces.Dict) else [space]
    size = sum(math.prod(part.shape) for part in parts if isinstance(part, spaces.Box))
    return spaces.Box(-1, 1, (size,), np.float32)


def _defaults(model: DistributionalPPO, envs: int, steps: int) -> dict[str, Any]:
    """Default settings of an adversary that trains for this number of steps."""
    space = model.observation_space
    kind = "MultiInput" if isinstance(space, spaces.Dict) else "Cnn" if is_image_space(space) else "Mlp"
    # Powers of two, so that minibatches divide rollouts.
    chunks, chunks_per_batch = (
        2 ** max(0, (min(most, steps) // (_SEQUENCE * envs)).bit_length() - 1) for most in (_ROLLOUT, _BATCH)
    )
    return {
        "policy": f"{kind}LstmPolicy" if model.policy.is_recurrent else f"{kind}Policy",
        "n_steps": _SEQUENCE * chunks,
        "batch_size": _SEQUENCE * envs * chunks_per_batch,
        "gamma": model.gamma,
        "observation_normalizer": False,  # It sees what its victim sees.
        "device": model.device,
    }
