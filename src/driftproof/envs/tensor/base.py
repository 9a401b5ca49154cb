"""What all tensor environments have in common: seeds, episodes, automatic resets, and their state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
from gymnasium import spaces
from torch import Tensor

from driftproof._arguments import check_count
from driftproof.envs.tensor.random import stream_keys


class TensorStep(NamedTuple):
    """What a step of all environments returns.

    Attributes:
        observation: ``[N, ...]``: to act on next; where an episode has ended, the first one of the next episode.
        reward: ``[N]``, in float32.
        terminated: ``[N]``, bool.
        truncated: ``[N]``, bool.
        final_observation: ``[N, ...]``: what the step led to; where an episode has ended, its last observation, and
            elsewhere the same as ``observation``.
    """

    observation: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    final_observation: Tensor


class TensorEnv(ABC):
    """Many independent environments that reset themselves, as tensors on one device.

    Neither :meth:`prepare` nor :meth:`step` waits for the device or has shapes that depend on data, and all state is
    updated in place: a whole rollout can be captured in a CUDA graph.

    Random numbers are a function of an environment's seed and of how many it has drawn (see
    :mod:`driftproof.envs.tensor.random`), not of a generator: an environment does the same alone and among others, on
    the CPU and on an accelerator, and graphs have no generator to register.

    Args:
        num_envs: Number of environments.
        device: Device of all tensors.
        observation_space: Observation space of one environment.
        action_space: Action space of one environment.
    """

    _state: ClassVar[tuple[str, ...]] = (
        *("seeds", "episodes", "episode_returns", "episode_lengths", "last_returns", "last_lengths"),
    )
    """Attributes with the state, tensors ``[N, ...]``."""
    env_id = ""
    """Id that the environment was made from."""
    kwargs: Mapping[str, Any] = MappingProxyType({})
    """Arguments that the environment was made with."""

    def __init__(
        self, num_envs: int, device: torch.device | str, observation_space: spaces.Space[Any], action_space: Any
    ) -> None:
        check_count("num_envs", num_envs, at_least=1)
        self.num_envs, self.device = num_envs, torch.device(device)
        self.single_observation_space, self.single_action_space = observation_space, action_space
        self.seeds = torch.arange(num_envs, device=self.device)
        self.episodes = self._zeros(torch.int64)
        """Episodes that have ended since the reset with a seed, ``[N]``."""
        self.episode_returns = self._zeros(torch.float64)
        """Sum of the rewards of the running episode, ``[N]``."""
        self.episode_lengths = self._zeros(torch.int64)
        """Steps of the running episode, ``[N]``."""
        self.last_returns = self._zeros(torch.float64)
        """Return of the last episode that has ended, ``[N]``; NaN before the first."""
        self.last_lengths = self._zeros(torch.int64)
        """Length of the last episode that has ended, ``[N]``; 0 before the first."""
        self._keys = stream_keys(self.seeds)
        self._is_reset = False

    def reset(self, seed: int | Tensor | None = None) -> Tensor:
        """Begin new episodes everywhere.

        Args:
            seed: Environment ``i`` starts over with ``seed + i``, or with ``seed[i]``; ``None``: goes on with the next
                random numbers.

        Returns:
            Observations, ``[N, ...]``.
        """
        if seed is not None or not self._is_reset:
            self._set_seeds(0 if seed is None else seed)
        else:
            self.episodes += 1
        self.episode_returns.zero_()
        self.episode_lengths.zero_()
        self._restart_all()
        self._is_reset = True
        return self._observe()

    def _restart_all(self) -> None:
        self._restart(torch.ones_like(self.episodes, dtype=torch.bool))

    def _set_seeds(self, seed: int | Tensor) -> None:
        if isinstance(seed, Tensor):
            if seed.shape != (self.num_envs,):
                raise ValueError(f"seeds must be of shape {(self.num_envs,)}, not {tuple(seed.shape)}")
            self.seeds.copy_(seed)
        else:
            check_count("seed", seed)
            self.seeds.copy_(seed + torch.arange(self.num_envs))
        self._keys.copy_(stream_keys(self.seeds))
        self.episodes.zero_()
        self.last_returns.fill_(torch.nan)
        self.last_lengths.zero_()

    def prepare(self, steps: int) -> None:  # noqa: B027  Most have nothing to prepare.
        """Generate in advance what the next ``steps`` steps need.

        Environments do this by themselves where nobody asks for it, but in smaller portions: call it before each
        rollout, and if that is captured in a graph, as a part of it.
        """

    def step(self, actions: Tensor) -> TensorStep:
        """One step of all environments; those whose episodes end begin the next ones.

        Args:
            actions: ``[N]`` for discrete actions, otherwise ``[N, ...]``. Nothing raises on a device: those beyond the
                range are taken for the nearest within it, and NaN for 0.
        """
        reward, terminated, truncated = self._advance(actions.to(self.device))
        self.episode_returns += reward
        ended = terminated | truncated
        final_observation = self._observe()
        torch.where(ended, self.episode_returns, self.last_returns, out=self.last_returns)
        torch.where(ended, self.episode_lengths, self.last_lengths, out=self.last_lengths)
        self.episodes += ended
        self.episode_returns.masked_fill_(ended, 0.0)
        self.episode_lengths.masked_fill_(ended, 0)
        self._restart(ended)
        return TensorStep(self._observe(), reward.float(), terminated, truncated, final_observation)

    @abstractmethod
    def _advance(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One step without resets, which also counts ``episode_lengths``. Returns rewards, terminated and truncated."""

    @abstractmethod
    def _restart(self, ended: Tensor) -> None:
        """Begin new episodes where ``ended``; their number is in ``episodes``."""

    @abstractmethod
    def _observe(self) -> Tensor:
        """Observations of the present state, as a new tensor."""

    def state_dict(self) -> dict[str, Tensor]:
        """State of all environments: tensors ``[N, ...]``, of which row ``i`` is environment ``i``'s."""
        return {name.lstrip("_"): getattr(self, name).clone() for name in self._state}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Continue as the saved environments would have.

        Raises:
            ValueError: It is not a state of as many environments of this kind.
        """
        own = {name.lstrip("_"): getattr(self, name) for name in self._state}
        kinds, saved = ({key: (*each.shape, each.dtype) for key, each in tree.items()} for tree in (own, state_dict))
        if kinds != saved:
            raise ValueError(f"not a state of {self.num_envs} environments of {type(self).__name__}: {saved}")
        self._check_state(state_dict)
        for key, tensor in own.items():
            tensor.copy_(state_dict[key])
        self._keys.copy_(stream_keys(self.seeds))
        self._is_reset = True

    def _check_state(self, state_dict: Mapping[str, Tensor]) -> None:  # noqa: B027  Most need no check.
        """Raise a ``ValueError`` if it holds what would be an error on the device."""

    def _zeros(self, dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.zeros(self.num_envs, *shape, dtype=dtype, device=self.device)
