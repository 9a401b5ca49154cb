"""Acting: single steps of a policy, with exploration noise."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from driftproof._arguments import check_count
from driftproof.nn.cores import paired_stepper
from driftproof.nn.exploration import StateDependentExploration
from driftproof.nn.interface import PolicyInterface
from driftproof.nn.networks import layer_steppers
from driftproof.nn.types import Observation, PolicyState, RolloutNoise, RolloutStep, Step, batch_size


class Acting(PolicyInterface):
    """Acts with networks that a subclass builds."""

    actor_network: nn.Sequential
    exploration: StateDependentExploration | None
    log_std: nn.Parameter

    @abstractmethod
    def initial_state(self, batch: int) -> PolicyState:
        """The recurrent state at the start of ``batch`` episodes."""

    @abstractmethod
    def _with_spread(self, outputs: Tensor, latent: Tensor) -> Tensor: ...

    def stepper(self, by_module: bool = False) -> RolloutStep:
        """Function for one step of acting, without gradients; weights must not change while it is used.

        It takes observations ``[B, ...]`` and the recurrent state before them.

        Args:
            by_module: Call the modules of the actor, so that an exported graph names their parameters. Slower.
        """
        run_cores = self._core_stepper()
        actor = nn.Sequential(*self.actor_network, self.action_head)
        *layers, action_head = actor if by_module else layer_steppers(actor)
        spread = self._with_spread
        if self.exploration is not None:
            log_std = self.exploration.stepper(self.log_std)

            def spread(outputs: Tensor, latent: Tensor) -> Tensor:
                return torch.cat((outputs, log_std(latent).expand_as(outputs)), -1)

        def step(observation: Observation, state: PolicyState) -> Step:
            latent, critic_memory, state = run_cores(*self._features(observation), state)
            for layer in layers:
                latent = layer(latent)
            return Step(spread(action_head(latent), latent), critic_memory, state, latent)

        return step

    def _core_stepper(self) -> Callable[[Tensor, Tensor, PolicyState], tuple[Tensor, Tensor, PolicyState]]:
        """Function from the actor's features, the critics' features and the state to both cores' outputs."""
        if self.critic_core is None:
            actor_step = self.actor_core.stepper()

            def shared(features: Tensor, _: Tensor, state: PolicyState) -> tuple[Tensor, Tensor, PolicyState]:
                memory, actor_state = actor_step(features, state.actor)
                return memory, memory, PolicyState(actor_state, state.critic)

            return shared
        if self.critic_features_extractor is None:
            pair_step = paired_stepper(self.actor_core, self.critic_core)

            def paired(features: Tensor, _: Tensor, state: PolicyState) -> tuple[Tensor, Tensor, PolicyState]:
                (memory, actor), (critic_memory, critic) = pair_step(features, state.actor, state.critic)
                return memory, critic_memory, PolicyState(actor, critic)

            return paired
        steps = self.actor_core.stepper(), self.critic_core.stepper()

        def separate(features: Tensor, others: Tensor, state: PolicyState) -> tuple[Tensor, Tensor, PolicyState]:
            memory, actor = steps[0](features, state.actor)
            critic_memory, critic = steps[1](others, state.critic)
            return memory, critic_memory, PolicyState(actor, critic)

        return separate

    def reset_noise(self, n_envs: int = 1) -> None:
        """Draw the exploration matrices of gSDE anew.

        Args:
            n_envs: Number of environments, each with its own matrix.
        """
        if self.exploration is None:
            raise ValueError("reset_noise() needs a policy with use_sde=True; others draw noise at every step")
        check_count("n_envs", n_envs, at_least=1)
        self.exploration.draw(n_envs)

    def rollout_noise(self, steps: int, envs: int, sde_sample_freq: int = -1) -> RolloutNoise:
        """Noise for ``distribution.sample`` at every step of a rollout.

        Args:
            steps: Steps of the rollout.
            envs: Parallel environments.
            sde_sample_freq: Steps between draws of the exploration matrices of gSDE; -1: one for the rollout.
        """
        if self.exploration is None:
            noise = self.distribution.noise(steps, envs, device=self.device)
            return lambda step, parameters, latent: noise[step]
        dim, correlated = self.exploration.dim, self.exploration.rollout_noise(envs, sde_sample_freq, self.log_std)
        return lambda step, parameters, latent: correlated(step, latent, parameters[..., dim:])

    def _noise(self, parameters: Tensor, latent: Tensor) -> Tensor:
        """Noise for one step, from the current exploration matrices or newly drawn."""
        if self.exploration is None:
            return self.distribution.noise(len(parameters), device=parameters.device)
        return self.exploration.noise(latent, self.log_std, parameters[..., self.exploration.dim :])

    def _predict(self, observation: Any, deterministic: bool = False) -> Tensor:
        """Actions for the first step of episodes; :meth:`predict` takes a recurrent state."""
        step = self.stepper()(self.normalized(observation), self.initial_state(batch_size(observation)))
        return self.choose(step.parameters, step.latent, deterministic)

    def choose(self, parameters: Tensor, latent: Tensor, deterministic: bool) -> Tensor:
        """Actions for the environments: the most probable ones, or random ones.

        Args:
            parameters: Parameters of the actions' distribution ``[B, size]``.
            latent: The actor's last features ``[B, features]``.
            deterministic: Choose the most probable actions.
        """
        if deterministic:
            return self.distribution.to_env(self.distribution.mode(parameters))
        return self.distribution.to_env(self.distribution.sample(parameters, self._noise(parameters, latent)))
