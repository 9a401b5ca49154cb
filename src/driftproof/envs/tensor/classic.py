"""Gymnasium's CartPole and Pendulum as tensors, in float64 as they are there."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium
import torch
from gymnasium.envs.classic_control import cartpole, pendulum
from torch import Tensor

from driftproof._arguments import check_count
from driftproof.envs.tensor.base import TensorEnv
from driftproof.envs.tensor.random import uniform


class ClassicEnv(TensorEnv):
    """An environment of which the state is a few numbers, uniform at the start of an episode.

    Args:
        num_envs: Number of environments.
        device: Device of all tensors.
        world: The environment in Gymnasium, whose constants apply.
        size: Numbers of the state.
        max_episode_steps: Steps after which episodes are truncated; ``None``: as registered with Gymnasium.
    """

    _state = (*TensorEnv._state, "state")
    _id: ClassVar[str]

    def __init__(
        self, num_envs: int, device: torch.device | str, world: Any, size: int, max_episode_steps: int | None
    ) -> None:
        super().__init__(num_envs, device, world.observation_space, world.action_space)
        limit = max_episode_steps or gymnasium.spec(self._id).max_episode_steps
        assert limit is not None
        check_count("max_episode_steps", limit, at_least=1)
        self.max_episode_steps = limit
        self.state = self._zeros(torch.float64, size)
        """State of the simulation, ``[N, size]``."""
        self._world = world
        self._index = torch.arange(size, device=self.device)

    def _advance(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        state, reward, terminated = self._simulate(actions)
        self.state.copy_(state)
        self.episode_lengths += 1
        return reward, terminated, self.episode_lengths >= self.max_episode_steps

    def _restart(self, ended: Tensor) -> None:
        counters = self.episodes[:, None] * len(self._index) + self._index
        start = self._start(uniform(self._keys[:, None], counters) * 2 - 1)
        torch.where(ended[:, None], start, self.state, out=self.state)

    def _simulate(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The next state, rewards and terminated."""
        raise NotImplementedError

    def _start(self, noise: Tensor) -> Tensor:
        """First state of an episode, from uniform noise in [-1, 1)."""
        raise NotImplementedError


class CartPole(ClassicEnv):
    """``CartPole-v1``.

    Args:
        num_envs: Number of environments.
        device: Device of all tensors.
        max_episode_steps: Steps after which episodes are truncated; ``None``: 500.
        **kwargs: Arguments of Gymnasium's environment.
    """

    _id = "CartPole-v1"

    def __init__(
        self, num_envs: int, device: torch.device | str = "cpu", max_episode_steps: int | None = None, **kwargs: Any
    ) -> None:
        super().__init__(num_envs, device, cartpole.CartPoleEnv(**kwargs), 4, max_episode_steps)

    def _simulate(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        world = self._world
        x, speed, angle, turning = self.state.unbind(1)
        force = torch.where(actions.reshape(self.num_envs) >= 1, world.force_mag, -world.force_mag)
        cosine, sine = angle.cos(), angle.sin()
        push = (force + world.polemass_length * turning**2 * sine) / world.total_mass
        turn = (world.gravity * sine - cosine * push) / (
            world.length * (4.0 / 3.0 - world.masspole * cosine**2 / world.total_mass)
        )
        acceleration = push - world.polemass_length * turn * cosine / world.total_mass
        state = self.state + world.tau * torch.stack((speed, acceleration, turning, turn), 1)
        terminated = (state[:, 0].abs() > world.x_threshold) | (state[:, 2].abs() > world.theta_threshold_radians)
        if world._sutton_barto_reward:
            return state, -terminated.double(), terminated
        return state, torch.ones_like(x), terminated

    def _start(self, noise: Tensor) -> Tensor:
        return 0.05 * noise

    def _observe(self) -> Tensor:
        return self.state.float()


class Pendulum(ClassicEnv):
    """``Pendulum-v1``.

    Args:
        num_envs: Number of environments.
        device: Device of all tensors.
        max_episode_steps: Steps after which episodes are truncated; ``None``: 200.
        **kwargs: Arguments of Gymnasium's environment.
    """

    _id = "Pendulum-v1"

    def __init__(
        self, num_envs: int, device: torch.device | str = "cpu", max_episode_steps: int | None = None, **kwargs: Any
    ) -> None:
        super().__init__(num_envs, device, pendulum.PendulumEnv(**kwargs), 2, max_episode_steps)

    def _simulate(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        world = self._world
        angle, speed = self.state.unbind(1)
        # In float32, as actions are there: a pendulum amplifies the smallest differences.
        torque = actions.reshape(self.num_envs).float().nan_to_num(0.0).clamp(-world.max_torque, world.max_torque)
        wrapped = (angle + torch.pi) % (2 * torch.pi) - torch.pi
        cost = wrapped**2 + 0.1 * speed**2 + 0.001 * torque**2
        gravity = 3 * world.g / (2 * world.l) * angle.sin()
        speed = speed + (gravity + 3.0 / (world.m * world.l**2) * torque) * world.dt
        speed = speed.clamp(-world.max_speed, world.max_speed)
        terminated = torch.zeros_like(self.episodes, dtype=torch.bool)
        return torch.stack((angle + speed * world.dt, speed), 1), -cost, terminated

    def _start(self, noise: Tensor) -> Tensor:
        return torch.stack((noise[:, 0] * pendulum.DEFAULT_X, noise[:, 1] * pendulum.DEFAULT_Y), 1)

    def _observe(self) -> Tensor:
        angle, speed = self.state.unbind(1)
        return torch.stack((angle.cos(), angle.sin(), speed), 1).float()
