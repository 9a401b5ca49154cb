"""Gymnasium's vector environments and EnvPool as a VecEnv of Stable-Baselines3."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from stable_baselines3.common.env_util import is_wrapped
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs, VecEnvStepReturn

from driftproof.envs.tensor.base import TensorEnv
from driftproof.ppo.tensor_vec_env import TensorVecEnv

_ENVPOOL_INTERFACE = ("all_env_ids", "async_reset", "config", "recv", "send")
"""Attributes that identify EnvPool: up to 1.1 it is not a VectorEnv, since 1.2 it is both a VectorEnv and an Env."""


class GymnasiumVecEnv(VecEnv):
    """Presents a vector environment of Gymnasium, or EnvPool's of type ``"gymnasium"``, as a VecEnv.

    How episodes follow each other depends on the autoreset mode of the environment:

    - Same step, and disabled: as in Stable-Baselines3. When disabled, the adapter resets what has ended.
    - Next step, as in EnvPool and in ``gymnasium.make_vec("CartPole-v1")``: the step that ends an episode returns the
      final observation, also found in ``info["terminal_observation"]``. The step after it ignores the action and
      returns the first observation of the next episode, with reward 0, done ``False`` and ``info["autoreset"]``
      ``True``. It is not a transition: do not train on it. Wrappers of Stable-Baselines3 do not handle it:
      VecFrameStack lets the final observation into the next stack, and VecMonitor counts one step too many.

    ``info["episode"]`` is set at the end of every episode, as if from Monitor, unless the environment has it already.
    So ``env_is_wrapped(Monitor)`` is true, and neither Monitor nor VecMonitor is needed. Numbers in infos are Python
    numbers. Infos of resets are in :attr:`reset_infos`. Observations are copied wherever the environment might write
    into them again.

    Args:
        env: The environment. EnvPool must be synchronous, with one player.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any] | gymnasium.Env[Any, Any]) -> None:
        if isinstance(env, VectorEnv):
            num_envs, spaces = env.num_envs, (env.single_observation_space, env.single_action_space)
        elif _is_envpool(env):
            # Its spaces are those of a single environment.
            num_envs, spaces = len(env), (env.observation_space, env.action_space)  # type: ignore[arg-type]
        else:
            raise TypeError(f"env must be a gymnasium.vector.VectorEnv or an EnvPool, but is a {type(env).__name__}")
        self.env: Any = env
        self.autoreset_mode = _autoreset_mode(env)
        super().__init__(num_envs, *spaces)
        self.metadata = dict(env.metadata)
        # These two return copies if configured to, but wrappers around them may write into the arrays.
        self._copies = not (isinstance(env, SyncVectorEnv | AsyncVectorEnv) and env.copy)
        self._actions: Any = None
        self._returns = np.zeros(num_envs)
        self._lengths = np.zeros(num_envs, dtype=np.int64)
        # Environments whose next step only resets; None if there are none.
        self._resetting: npt.NDArray[np.bool_] | None = None
        self._start = time.time()

    def reset(self) -> VecEnvObs:
        arguments: dict[str, Any] = {}
        if (seed := self._seeds[0]) is not None:
            if _is_envpool(self.env):
                warnings.warn(
                    f"EnvPool takes its seed when made, envpool.make(..., seed={seed}): not seeded", stacklevel=2
                )
            else:
                # An int stands for seed, seed + 1, ..., which is what VecEnv.seed chose.
                arguments["seed"] = seed
        if options := self._common_options():
            arguments["options"] = options
        obs, infos = self.env.reset(**arguments)
        self._check_batch(obs, infos)
        self._reset_seeds()
        self._reset_options()
        self._returns[:] = 0
        self._lengths[:] = 0
        self._resetting = None
        self.reset_infos = _split(infos, self.num_envs)
        return _copied(obs) if self._copies else obs  # type: ignore[no-any-return]

    def step_async(self, actions: npt.NDArray[Any]) -> None:
        # Spaces that combine others have no dtype.
        dtype = self.action_space.dtype
        self._actions = actions if dtype is None else np.asarray(actions, dtype)

    def step_wait(self) -> VecEnvStepReturn:
        obs, raw_rewards, terminated, truncated, raw_infos = self.env.step(self._actions)
        dones = np.logical_or(terminated, truncated)
        # A copy: SB3 adds the value of truncated states to it.
        rewards = np.array(raw_rewards, dtype=np.float32)
        infos = _split(raw_infos, self.num_envs)
        if self._copies:
            obs = _copied(obs)
        self._returns += raw_rewards
        self._lengths += 1
        if self._resetting is not None:
            self._void(self._resetting, rewards, infos)
            self._resetting = None
        if dones.any():
            obs = self._end_episodes(obs, dones, terminated, infos)
        return obs, rewards, dones, infos

    def _void(
        self,
        resetting: npt.NDArray[np.bool_],
        rewards: npt.NDArray[np.float32],
        infos: list[dict[str, Any]],
    ) -> None:
        """Exclude steps that only reset from episodes: reward 0, not done."""
        rewards[resetting] = 0
        self._returns[resetting] = 0
        self._lengths[resetting] = 0
        for i in np.flatnonzero(resetting).tolist():
            self.reset_infos[i] = infos[i]
            infos[i] = {"autoreset": True}

    def _end_episodes(
        self, obs: Any, dones: npt.NDArray[np.bool_], terminated: npt.NDArray[np.bool_], infos: list[dict[str, Any]]
    ) -> Any:
        """Complete the infos of episodes that have ended, and reset their environments where needed.

        Returns:
            The observations to continue from.
        """
        ended = np.flatnonzero(dones).tolist()
        seconds = round(time.time() - self._start, 6)
        for i in ended:
            if self.autoreset_mode is AutoresetMode.SAME_STEP:
                final_obs = _copied(self._take_final(i, infos))
            else:
                final_obs = _row(obs, i)
            info = infos[i]
            info["terminal_observation"] = final_obs
            info["TimeLimit.truncated"] = not terminated[i]
            if "episode" not in info:
                info["episode"] = {"r": round(float(self._returns[i]), 6), "l": int(self._lengths[i]), "t": seconds}
        self._returns[dones] = 0
        self._lengths[dones] = 0
        if self.autoreset_mode is AutoresetMode.NEXT_STEP:
            self._resetting = dones.copy()
        elif self.autoreset_mode is AutoresetMode.DISABLED:
            obs, raw_infos = self.env.reset(options={"reset_mask": dones.copy()})
            if self._copies:
                obs = _copied(obs)
            reset_infos = _split(raw_infos, self.num_envs)
            for i in ended:
                self.reset_infos[i] = reset_infos[i]
        return obs

    def _take_final(self, i: int, infos: list[dict[str, Any]]) -> Any:
        """Split an info that is of a step and a reset at once. Returns the final observation."""
        reset_info = infos[i]
        if "final_obs" not in reset_info:
            raise ValueError(
                f'the autoreset mode of {type(self.env).__name__} is SAME_STEP, but its infos have no "final_obs"'
            )
        final_obs = reset_info.pop("final_obs")
        if "final_info" not in reset_info:
            self.reset_infos[i] = {}
            return final_obs
        infos[i] = reset_info.pop("final_info")
        if "episode" in reset_info:
            # From a wrapper of the vector environment, which does not handle final infos.
            infos[i]["episode"] = reset_info.pop("episode")
        self.reset_infos[i] = reset_info
        return final_obs

    def _common_options(self) -> dict[str, Any]:
        options = self._options[0]
        if any(other != options for other in self._options):
            raise ValueError(
                "a vector environment is reset with the same options everywhere: pass one dict to set_options"
            )
        return options

    def _check_batch(self, obs: Any, infos: Any) -> None:
        if not isinstance(infos, dict):
            raise TypeError(f"infos must be a dict of arrays, got a {type(infos).__name__}: leave out DictInfoToList")
        rows = len(_first_leaf(obs))
        if rows != self.num_envs:
            raise ValueError(
                f"{type(self.env).__name__} returned observations of {rows} environments instead of {self.num_envs}; "
                "EnvPool needs batch_size = num_envs and a single player"
            )

    def close(self) -> None:
        self.env.close()

    def get_images(self) -> Sequence[npt.NDArray[Any] | None]:
        frames = self.env.render()
        return [] if frames is None else list(frames)

    def render(self, mode: str | None = None) -> npt.NDArray[Any] | None:
        if self.render_mode in (None, "rgb_array"):
            return super().render(mode)
        self.env.render()
        return None

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        if attr_name == "render_mode":
            return [self.env.render_mode for _ in self._get_indices(indices)]
        self._check_attr(attr_name)
        values = self.env.unwrapped.call("get_wrapper_attr", attr_name)
        return [values[i] for i in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        base = self.env.unwrapped
        if isinstance(base, SyncVectorEnv):
            for i in self._get_indices(indices):
                base.envs[i].set_wrapper_attr(attr_name, value)
            return
        if not hasattr(base, "set_attr"):
            raise AttributeError(
                f"{type(base).__name__} has no set_attr: {attr_name!r} of its environments cannot be set"
            )
        self._refuse_some(indices)
        base.set_attr(attr_name, [value] * self.num_envs)

    def env_method(
        self, method_name: str, *method_args: Any, indices: VecEnvIndices = None, **method_kwargs: Any
    ) -> list[Any]:
        self._check_attr(method_name)
        base = self.env.unwrapped
        if isinstance(base, SyncVectorEnv):
            methods = [base.envs[i].get_wrapper_attr(method_name) for i in self._get_indices(indices)]
            return [method(*method_args, **method_kwargs) for method in methods]
        self._refuse_some(indices)
        return list(base.call(method_name, *method_args, **method_kwargs))

    def env_is_wrapped(
        self, wrapper_class: type[gymnasium.Wrapper[Any, Any, Any, Any]], indices: VecEnvIndices = None
    ) -> list[bool]:
        base = self.env.unwrapped
        if wrapper_class is Monitor:
            return [True for _ in self._get_indices(indices)]
        if isinstance(base, SyncVectorEnv):
            return [is_wrapped(base.envs[i], wrapper_class) for i in self._get_indices(indices)]
        if hasattr(base, "call"):
            raise NotImplementedError(f"{type(base).__name__} does not show the wrappers of its environments")
        return [False for _ in self._get_indices(indices)]

    def _check_attr(self, name: str) -> None:
        base = self.env.unwrapped
        if not hasattr(base, "call"):
            raise AttributeError(f"{type(base).__name__} has no call(): {name!r} of its environments cannot be read")
        # Checked first, because an AttributeError would end a worker of AsyncVectorEnv.
        if not all(base.call("has_wrapper_attr", name)):
            raise AttributeError(f"the environments of {type(base).__name__} have no attribute {name!r}")

    def _refuse_some(self, indices: VecEnvIndices) -> None:
        if list(self._get_indices(indices)) != list(range(self.num_envs)):
            kind = type(self.env.unwrapped).__name__
            raise NotImplementedError(f"{kind} can only access all of its environments: leave out indices")


def as_vec_env(env: object) -> VecEnv | None:
    """Adapt a tensor environment, or a vector environment of Gymnasium or EnvPool.

    Returns:
        The adapter, or ``None`` for anything else, such as a plain environment or a VecEnv.
    """
    if isinstance(env, TensorEnv):
        return TensorVecEnv(env)
    if isinstance(env, VectorEnv) or _is_envpool(env):
        return GymnasiumVecEnv(env)  # type: ignore[arg-type]
    return None


def _is_envpool(env: object) -> bool:
    return isinstance(env, gymnasium.Env) and all(hasattr(type(env), name) for name in _ENVPOOL_INTERFACE)


def _autoreset_mode(env: VectorEnv[Any, Any, Any] | gymnasium.Env[Any, Any]) -> AutoresetMode:
    if "autoreset_mode" not in env.metadata and _is_envpool(env):
        return AutoresetMode.NEXT_STEP
    mode = env.metadata.get("autoreset_mode")
    if not isinstance(mode, AutoresetMode):
        raise ValueError(
            f'metadata["autoreset_mode"] of {type(env).__name__} is {mode!r}, so when it resets is unknown. Set it: '
            'env.metadata = {**env.metadata, "autoreset_mode": gymnasium.vector.AutoresetMode.NEXT_STEP}, '
            "or SAME_STEP, or DISABLED (EnvPool: NEXT_STEP)"
        )
    return mode


def _split(infos: dict[str, Any], num_envs: int) -> list[dict[str, Any]]:
    """Turn a dict of arrays, where ``_key`` masks the environments with ``key``, into a dict per environment."""
    split: list[dict[str, Any]] = [{} for _ in range(num_envs)]
    for key, value in infos.items():
        if key[:1] == "_" and key[1:] in infos:
            continue
        values: Sequence[Any]
        if isinstance(value, dict):
            values = _split(value, num_envs)
        elif not isinstance(value, np.ndarray) or value.shape[:1] != (num_envs,):
            values = [value] * num_envs
        else:
            values = value.tolist() if value.ndim == 1 else list(value.copy())
        mask = infos.get(f"_{key}")
        if mask is None:
            for info, one in zip(split, values, strict=True):
                info[key] = one
        else:
            for i in np.flatnonzero(mask).tolist():
                split[i][key] = values[i]
    return split


def _copied(obs: Any) -> Any:
    if isinstance(obs, dict):
        return {key: _copied(value) for key, value in obs.items()}
    if isinstance(obs, tuple):
        return tuple(_copied(value) for value in obs)
    # Some are transposed; a contiguous copy is faster to use.
    return np.array(obs, order="C")


def _row(obs: Any, i: int) -> Any:
    """Copy one environment's part of batched observations."""
    if isinstance(obs, dict):
        return {key: _row(value, i) for key, value in obs.items()}
    if isinstance(obs, tuple):
        return tuple(_row(value, i) for value in obs)
    return np.array(obs[i])


def _first_leaf(obs: Any) -> Any:
    while isinstance(obs, dict | tuple):
        obs = next(iter(obs.values() if isinstance(obs, dict) else obs))
    return obs
