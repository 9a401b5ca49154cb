"""Tensor environments as a VecEnv of Stable-Baselines3."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
import torch
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs, VecEnvStepReturn

from driftproof.envs.tensor.base import TensorEnv


class TensorVecEnv(VecEnv):
    """Presents a tensor environment as a VecEnv, at the price of one transfer each way per step.

    ``info["episode"]`` is set at the end of every episode, as if from Monitor. The state of all environments is saved
    and resumed with the agent.

    Args:
        env: The tensor environment, see :func:`driftproof.envs.tensor.make`.
    """

    def __init__(self, env: TensorEnv) -> None:
        self.env = env
        super().__init__(env.num_envs, env.single_observation_space, env.single_action_space)
        self._actions = torch.zeros(0)
        self._start = time.time()

    def reset(self) -> VecEnvObs:
        seeds = self._seeds
        observation = self.env.reset(None if seeds[0] is None else torch.tensor(seeds))
        self._reset_seeds()
        self._reset_options()
        return observation.cpu().numpy()

    def step_async(self, actions: npt.NDArray[Any]) -> None:
        self._actions = torch.from_numpy(np.asarray(actions))

    def step_wait(self) -> VecEnvStepReturn:
        observation, reward, terminated, truncated, final = self.env.step(self._actions)
        dones = (terminated | truncated).cpu().numpy()
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        if dones.any():
            seconds = round(time.time() - self._start, 6)
            finals, terminations = final.cpu().numpy(), terminated.tolist()
            returns, lengths = self.env.last_returns.tolist(), self.env.last_lengths.tolist()
            for i in np.flatnonzero(dones).tolist():
                infos[i] = {
                    "terminal_observation": finals[i],
                    "TimeLimit.truncated": not terminations[i],
                    "episode": {"r": round(returns[i], 6), "l": lengths[i], "t": seconds},
                }
        return observation.cpu().numpy(), reward.cpu().numpy(), dones, infos

    def states(self) -> list[dict[str, torch.Tensor]]:
        """State of each environment."""
        state = {name: tensor.cpu() for name, tensor in self.env.state_dict().items()}
        return [{name: tensor[i].clone() for name, tensor in state.items()} for i in range(self.num_envs)]

    def load_states(self, states: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Continue as the saved environments would have."""
        self.env.load_state_dict({name: torch.stack([state[name] for state in states]) for name in states[0]})

    def close(self) -> None:
        pass

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        value: Any = None if attr_name == "render_mode" else getattr(self.env, attr_name)
        has_rows = isinstance(value, torch.Tensor) and value.shape[:1] == (self.num_envs,)
        return [value[i] if has_rows else value for i in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        raise NotImplementedError(f"{attr_name!r} of tensor environments cannot be set one by one")

    def env_method(self, method_name: str, *args: Any, indices: VecEnvIndices = None, **kwargs: Any) -> list[Any]:
        raise NotImplementedError(f"{method_name!r} of tensor environments cannot be called one by one")

    def env_is_wrapped(
        self, wrapper_class: type[gymnasium.Wrapper[Any, Any, Any, Any]], indices: VecEnvIndices = None
    ) -> list[bool]:
        return [wrapper_class is Monitor for _ in self._get_indices(indices)]
