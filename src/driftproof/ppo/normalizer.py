"""Statistics of observations: those of ``VecNormalize``, as a component of the agent."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
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
        self._is_attached = False
        self._waiting: dict[str, Any] = {}

    @property
    def is_used(self) -> bool:
        """Whether observations are normalised at all."""
        return self._env is not None or bool(self._waiting)

    def wrapped(self, env: VecEnv) -> VecEnv:
        """The environment, in a ``VecNormalize`` with the agent's statistics if it needs one and has none."""
        if not self.is_used or unwrap_vec_normalize(env) is not None:
            return env
        state = self.state_dict()
        normalizer = VecNormalize(env, norm_reward=False, **_arguments(state))
        _fill(normalizer, state)
        return normalizer

    def attach(self, env: VecEnv) -> None:
        """Belong to an environment that :meth:`wrapped` returned; statistics that wait go into its ``VecNormalize``."""
        normalizer = unwrap_vec_normalize(env)
        if normalizer is not None and self._waiting:
            _check_shapes(normalizer, self._waiting)
            _fill(normalizer, self._waiting)
        self._env, self._is_attached, self._waiting = normalizer, True, {}

    def normalize(self, observation: Any) -> Any:
        """Observations as the policy wants them, from those that an environment gives."""
        if self._env is not None:
            return self._env.normalize_obs(observation)
        if not self._waiting:
            return observation
        stub = VecNormalize.__new__(VecNormalize)
        _fill(stub, self._waiting)
        return stub.normalize_obs(observation)

    def state_dict(self) -> dict[str, Any]:
        """Statistics and settings; nothing if observations are not normalised. Whether they move is the wrapper's."""
        return self._waiting if self._env is None else statistics_of(self._env)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over statistics.

        Raises:
            ValueError: They are of other observations, or only one of the two agents normalises its own; nothing has
                changed.
        """
        _check(state_dict)
        if not self._is_attached:
            self._waiting = _as_tensors(state_dict)
        elif self._env is not None and state_dict:
            _check_shapes(self._env, state_dict)
            _fill(self._env, state_dict)
        elif self._env is not None:
            raise ValueError(
                "the state is of an agent whose observations are not normalised, but this one's environment has a "
                "VecNormalize"
            )
        elif state_dict:
            raise ValueError(
                "the state is of an agent whose observations are normalised, but this one's environment has no "
                "VecNormalize: put one around it, VecNormalize(env, norm_reward=False)"
            )


def statistics_of(env: VecNormalize) -> dict[str, Any]:
    """What a :class:`Normalizer` with this environment holds."""
    state: dict[str, Any] = {"norm_obs": env.norm_obs}
    state |= {"clip_obs": float(env.clip_obs), "epsilon": float(env.epsilon), "gamma": float(env.gamma)}
    state["norm_obs_keys"] = None if env.norm_obs_keys is None else list(env.norm_obs_keys)
    rms = env.obs_rms if env.norm_obs else {}
    statistics = rms if isinstance(rms, dict) else {_WHOLE: rms}
    state["obs_rms"] = {key: _moments(part) for key, part in statistics.items()}
    state["ret_rms"] = _moments(env.ret_rms)
    return state


@contextlib.contextmanager
def unchanged_on_error(env: object) -> Iterator[None]:
    """Give an environment its own statistics back if something fails."""
    normalizer = unwrap_vec_normalize(env) if isinstance(env, VecEnv) else None
    before = None if normalizer is None else statistics_of(normalizer)
    try:
        yield
    except BaseException:
        if normalizer is not None and before is not None:
            _fill(normalizer, before)
        raise


def _check_shapes(env: VecNormalize, state: Mapping[str, Any]) -> None:
    own, given = (
        {key: tuple(part["mean"].shape) for key, part in each["obs_rms"].items()}
        for each in (statistics_of(env), state)
    )
    if own != given:
        raise ValueError(f"statistics of observations have shapes {given}, but the environment's {own}")


def _arguments(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: state[name] for name in ("norm_obs", "clip_obs", "gamma", "epsilon", "norm_obs_keys")}


def _fill(env: VecNormalize, state: Mapping[str, Any]) -> None:
    for name, value in _arguments(state).items():
        setattr(env, name, value)
    statistics = {key: _running(part) for key, part in state["obs_rms"].items()}
    if env.norm_obs:
        env.obs_rms = statistics.get(_WHOLE, statistics)  # type: ignore[assignment]
    env.ret_rms = _running(state["ret_rms"])


def _as_tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state with tensors where older files have arrays."""
    if not state:
        return {}
    parts = {key: _moments(_running(part)) for key, part in state["obs_rms"].items()}
    return {**state, "obs_rms": parts, "ret_rms": _moments(_running(state["ret_rms"]))}


def _moments(rms: RunningMeanStd) -> dict[str, Any]:
    # Tensors, which torch.load(..., weights_only=True) reads without NumPy being allowed.
    mean, var = (torch.from_numpy(np.array(each, np.float64)) for each in (rms.mean, rms.var))
    return {"mean": mean, "var": var, "count": float(rms.count)}


def _running(moments: Mapping[str, Any]) -> RunningMeanStd:
    """From tensors, or from arrays, as older files have them."""
    result = RunningMeanStd(shape=np.shape(moments["mean"]))
    result.mean, result.var = (torch.as_tensor(moments[name]).double().cpu().numpy().copy() for name in ("mean", "var"))
    result.count = float(moments["count"])
    return result


def _check(state: Mapping[str, Any]) -> None:
    if not state:
        return
    keys = {"norm_obs", "clip_obs", "epsilon", "gamma", "norm_obs_keys", "obs_rms", "ret_rms"}
    if wrong := set(state) ^ keys:
        raise ValueError(f"the state lacks, or should not have, {', '.join(sorted(map(repr, wrong)))}")
    check_flag("norm_obs", state["norm_obs"])
    for name in ("epsilon", "gamma"):
        check_number(name, state[name], at_least=0)
    if state["clip_obs"] != math.inf:
        check_number("clip_obs", state["clip_obs"], above=0)
    for moments in (*state["obs_rms"].values(), state["ret_rms"]):
        if not isinstance(moments, Mapping) or set(moments) != {"mean", "var", "count"}:
            raise ValueError("statistics of observations must be mean, var and count")
        if np.shape(moments["mean"]) != np.shape(moments["var"]):
            raise ValueError("mean and var of observations have different shapes")
        check_number("count", moments["count"], at_least=0)
