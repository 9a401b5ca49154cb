"""Statistics of observations: those of ``VecNormalize``, as a component of the agent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import VecEnv, VecNormalize, unwrap_vec_normalize

from driftproof._arguments import check_flag, check_number

_WHOLE = ""
"""Name of the statistics of observations without keys."""


class Normalizer:
    """How observations are normalised, wherever the agent is: in a training environment or without one.

    Statistics that were loaded before there is an environment wait for one.
    """

    def __init__(self) -> None:
        self._env: VecNormalize | None = None
        self._waiting: dict[str, Any] | None = None

    @property
    def is_used(self) -> bool:
        """Whether observations are normalised at all."""
        return self._env is not None or self._waiting is not None

    def attach(self, env: VecEnv) -> VecEnv:
        """The environment, with statistics that wait put into its ``VecNormalize``; it gets one if it has none."""
        state = self._waiting
        normalizer = unwrap_vec_normalize(env)
        if state is not None and normalizer is None:
            normalizer = env = VecNormalize(env, norm_reward=False, **_arguments(state))
        self._env, self._waiting = normalizer, None
        if state is not None:
            self.load_state_dict(state)
        return env

    def detach(self) -> None:
        """Go on without the environment."""
        if self._env is not None:
            self._env, self._waiting = None, self.state_dict()

    def normalize(self, observation: Any) -> Any:
        """Observations as the policy wants them, from those that an environment gives."""
        if self._env is not None:
            return self._env.normalize_obs(observation)
        if self._waiting is None:
            return observation
        stub = VecNormalize.__new__(VecNormalize)
        _fill(stub, self._waiting)
        return stub.normalize_obs(observation)

    def state_dict(self) -> dict[str, Any]:
        """Statistics and settings; nothing if observations are not normalised. Whether they move is the wrapper's."""
        if self._env is None:
            return {} if self._waiting is None else self._waiting
        env = self._env
        state: dict[str, Any] = {"norm_obs": env.norm_obs}
        state |= {"clip_obs": float(env.clip_obs), "epsilon": float(env.epsilon), "gamma": float(env.gamma)}
        state["norm_obs_keys"] = None if env.norm_obs_keys is None else list(env.norm_obs_keys)
        rms = env.obs_rms if env.norm_obs else {}
        statistics = rms if isinstance(rms, dict) else {_WHOLE: rms}
        state["obs_rms"] = {key: _moments(part) for key, part in statistics.items()}
        state["ret_rms"] = _moments(env.ret_rms)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over statistics.

        Raises:
            ValueError: They are of other observations; nothing has changed.
        """
        _check(state_dict)
        if self._env is None:
            self._waiting = dict(state_dict) or None
            return
        if not state_dict:
            raise ValueError(
                "the state is of an agent whose observations are not normalised, but this one's environment has a "
                "VecNormalize"
            )
        own = self.state_dict()["obs_rms"]
        shapes = {key: np.shape(part["mean"]) for key, part in own.items()}
        given = {key: np.shape(part["mean"]) for key, part in state_dict["obs_rms"].items()}
        if shapes != given:
            raise ValueError(f"statistics of observations have shapes {given}, but the environment's {shapes}")
        _fill(self._env, state_dict)


def _arguments(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: state[name] for name in ("norm_obs", "clip_obs", "gamma", "epsilon", "norm_obs_keys")}


def _fill(env: VecNormalize, state: Mapping[str, Any]) -> None:
    for name, value in _arguments(state).items():
        setattr(env, name, value)
    statistics = {key: _running(part) for key, part in state["obs_rms"].items()}
    if env.norm_obs:
        env.obs_rms = statistics.get(_WHOLE, statistics)  # type: ignore[assignment]
    env.ret_rms = _running(state["ret_rms"])


def _moments(rms: RunningMeanStd) -> dict[str, Any]:
    return {"mean": np.array(rms.mean), "var": np.array(rms.var), "count": float(rms.count)}


def _running(moments: Mapping[str, Any]) -> RunningMeanStd:
    result = RunningMeanStd(shape=np.shape(moments["mean"]))
    result.mean, result.var = np.array(moments["mean"], np.float64), np.array(moments["var"], np.float64)
    result.count = float(moments["count"])
    return result


def _check(state: Mapping[str, Any]) -> None:
    if not state:
        return
    keys = {"norm_obs", "clip_obs", "epsilon", "gamma", "norm_obs_keys", "obs_rms", "ret_rms"}
    if wrong := set(state) ^ keys:
        raise ValueError(f"the state lacks, or should not have, {', '.join(sorted(map(repr, wrong)))}")
    check_flag("norm_obs", state["norm_obs"])
    for name in ("clip_obs", "epsilon", "gamma"):
        check_number(name, state[name], at_least=0)
    for moments in (*state["obs_rms"].values(), state["ret_rms"]):
        if not isinstance(moments, Mapping) or set(moments) != {"mean", "var", "count"}:
            raise ValueError("statistics of observations must be mean, var and count")
        if np.shape(moments["mean"]) != np.shape(moments["var"]):
            raise ValueError("mean and var of observations have different shapes")
        check_number("count", moments["count"], at_least=0)
