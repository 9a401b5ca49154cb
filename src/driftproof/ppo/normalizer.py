"""Observation normaliser: the statistics of ``VecNormalize`` as a component of the agent."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import VecEnv, VecNormalize, unwrap_vec_normalize

from driftproof.state import CheckpointError
from driftproof.state.schema import check, fail, flag, items, mapping, number, numbers, optional, table, text

_WHOLE = ""
"""Name of the statistics of observations without keys."""


class Normalizer:
    """Observation normaliser of an agent, with or without an environment.

    Statistics that are loaded before an environment is set are kept until there is one.
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
        """The environment, wrapped in ``VecNormalize`` with the agent's statistics if it needs one and has none."""
        if not self.is_used or unwrap_vec_normalize(env) is not None:
            return env
        state = self.state_dict()
        normalizer = VecNormalize(env, **_arguments(state))
        _fill(normalizer, state)
        return normalizer

    def attach(self, env: VecEnv) -> None:
        """Use an environment that :meth:`wrapped` returned; its ``VecNormalize`` gets statistics loaded before."""
        normalizer = unwrap_vec_normalize(env)
        if normalizer is not None and self._waiting:
            _check_shapes(normalizer, self._waiting)
            _fill(normalizer, self._waiting)
        self._env, self._is_attached, self._waiting = normalizer, True, {}

    def normalize(self, observation: Any) -> Any:
        """Normalise an environment's observations for the policy."""
        if self._env is not None:
            return self._env.normalize_obs(observation)
        if not self._waiting:
            return observation
        stub = VecNormalize.__new__(VecNormalize)
        _fill(stub, self._waiting)
        return stub.normalize_obs(observation)

    def state_dict(self) -> dict[str, Any]:
        """Statistics and settings without ``training``; empty if observations are not normalised."""
        return self._waiting if self._env is None else statistics_of(self._env)

    def check_state_dict(self, state_dict: Any) -> None:
        """Raise a ``CheckpointError`` for statistics that are invalid, or of other observations.

        Also if only one of the two agents normalises observations.
        """
        _check(state_dict)
        if not self._is_attached:
            return
        if self._env is not None and state_dict:
            _check_shapes(self._env, state_dict)
        elif self._env is not None:
            raise CheckpointError(
                "the state is of an agent whose observations are not normalised, but this one's environment has a "
                "VecNormalize"
            )
        elif state_dict:
            raise CheckpointError(
                "the state is of an agent whose observations are normalised, but this one's environment has no "
                "VecNormalize: wrap it, VecNormalize(env, norm_reward=False)"
            )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load statistics.

        Raises:
            CheckpointError: They do not fit; nothing has changed.
        """
        self.check_state_dict(state_dict)
        if not self._is_attached:
            self._waiting = _as_tensors(state_dict)
        elif self._env is not None:
            _fill(self._env, state_dict)


def statistics_of(env: VecNormalize) -> dict[str, Any]:
    """State of a :class:`Normalizer` with this environment."""
    state: dict[str, Any] = {"norm_obs": env.norm_obs}
    state |= {"clip_obs": float(env.clip_obs), "epsilon": float(env.epsilon), "gamma": float(env.gamma)}
    state |= {"norm_reward": env.norm_reward, "clip_reward": float(env.clip_reward)}
    state["norm_obs_keys"] = None if env.norm_obs_keys is None else list(env.norm_obs_keys)
    rms = env.obs_rms if env.norm_obs else {}
    statistics = rms if isinstance(rms, dict) else {_WHOLE: rms}
    state["obs_rms"] = {key: _moments(part) for key, part in statistics.items()}
    state["ret_rms"] = _moments(env.ret_rms)
    return state


@contextlib.contextmanager
def unchanged_on_error(env: object) -> Iterator[None]:
    """Restore an environment's statistics if the block raises an error."""
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
        raise CheckpointError(f"statistics of observations have shapes {given}, but the environment's {own}")


def _arguments(state: Mapping[str, Any]) -> dict[str, Any]:
    # Older files lack the settings of reward scaling, which was not supported.
    rewards = {"norm_reward": False, "clip_reward": 10.0}
    names = ("norm_obs", "clip_obs", "gamma", "epsilon", "norm_obs_keys")
    return {name: state[name] for name in names} | {name: state.get(name, rewards[name]) for name in rewards}


def _fill(env: VecNormalize, state: Mapping[str, Any]) -> None:
    """Write statistics and settings of observations into a wrapper.

    ``norm_reward`` and ``training`` stay the wrapper's own, as environments for evaluation need.
    """
    for name, value in _arguments(state).items():
        if name != "norm_reward":
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
    # Tensors: torch.load(..., weights_only=True) does not read NumPy arrays.
    mean, var = (torch.from_numpy(np.array(each, np.float64)) for each in (rms.mean, rms.var))
    return {"mean": mean, "var": var, "count": float(rms.count)}


def _running(moments: Mapping[str, Any]) -> RunningMeanStd:
    """Running statistics from tensors, or from arrays, which older files have."""
    result = RunningMeanStd(shape=np.shape(moments["mean"]))
    result.mean, result.var = (torch.as_tensor(moments[name]).double().cpu().numpy().copy() for name in ("mean", "var"))
    result.count = float(moments["count"])
    return result


def _check(state: Any) -> None:
    if state == {}:
        return
    moments = table({"mean": numbers(), "var": numbers(at_least=0), "count": number(at_least=0)})
    single = table({"mean": numbers(()), "var": numbers((), at_least=0), "count": number(at_least=0)})
    rules = {
        "norm_obs": flag,
        "clip_obs": _check_clip,
        "epsilon": number(at_least=0),
        "gamma": number(at_least=0, at_most=1),
        "norm_obs_keys": optional(items(text)),
        "obs_rms": mapping(moments),
        "ret_rms": single,
    }
    check("normalizer", state, table(rules, {"norm_reward": flag, "clip_reward": number(above=0)}))
    keys = [_WHOLE] if state["norm_obs_keys"] is None else state["norm_obs_keys"]
    if sorted(state["obs_rms"]) != (sorted(keys) if state["norm_obs"] else []):
        raise CheckpointError("the normalizer's statistics do not match the observations that it normalises")
    for each in (*state["obs_rms"].values(), state["ret_rms"]):
        if np.shape(each["mean"]) != np.shape(each["var"]):
            raise CheckpointError("mean and var of observations have different shapes")
        if state["epsilon"] == 0 and not (torch.as_tensor(each["var"]) > 0).all():
            raise CheckpointError("observations that never varied cannot be normalised with an epsilon of 0")


def _check_clip(value: Any, path: tuple[Any, ...]) -> None:
    number(above=0, finite=False)(value, path)
    if math.isnan(value) or value < 0:
        fail(path, value, "a number > 0")
