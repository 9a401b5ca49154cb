"""Acting in the environments for one rollout."""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecNormalize, unwrap_vec_normalize
from torch import Tensor

from driftproof.learner.collector import Collector
from driftproof.learner.learner import Learner
from driftproof.learner.rollout import HostObservation, Rollout, check_observation, check_rewards, mark_failure
from driftproof.ppo.sb3_views import Deferred
from driftproof.ppo.worker import Worker


def collect(
    worker: Worker,
    learner: Learner,
    rollout: Rollout,
    callback: BaseCallback,
    sde_sample_freq: int,
    count_episodes: Callable[[list[dict[str, Any]], npt.NDArray[np.bool_]], None],
) -> bool:
    """Fill the rollout; ``False`` if the callback stops training.

    Args:
        worker: Worker with the environments.
        learner: Learner with the policy that acts.
        rollout: Rollout to overwrite.
        callback: Called at every step.
        sde_sample_freq: Steps between draws of the exploration matrices of gSDE.
        count_episodes: Called with the infos and dones of every step.
    """
    env, counters, distribution = worker.env, worker.counters, learner.policy.distribution
    assert env is not None
    normalizer = unwrap_vec_normalize(env)
    worker.in_rollout, worker.reset_seed = True, None
    collector = Collector(learner.policy, rollout, worker.recurrent_state, sde_sample_freq, learner.normalizer)
    check_observations(normalizer, worker.observation, 0)
    for step in range(rollout.steps):
        assert worker.observation is not None
        assert worker.starts is not None
        # Callbacks may have reset the recurrent state.
        collector.state = worker.recurrent_state
        actions = collector.act(worker.observation, worker.starts).astype(env.action_space.dtype, copy=False)
        new_obs, rewards, dones, infos = _step_env(env, actions, step)
        check_rewards(rewards, step)
        check_observations(normalizer, new_obs, step)
        # A step in which a vector environment only resets is not a transition; it counts as an episode of its own.
        resets = np.fromiter((info.get("autoreset", False) for info in infos), bool, len(infos))
        ends_here = dones | resets
        # Before the callback, which may stop training: the next training continues from these observations.
        worker.state, worker.observation, worker.starts = collector.state, new_obs, ends_here
        counters.num_timesteps += env.num_envs

        # Local variables of Stable-Baselines3's loop, which callbacks read.
        callback.update_locals(
            {
                "n_steps": step + 1,
                "obs_tensor": collector.observation if learner.normalizer is None else collector.raw_observation(),
                "actions": actions,
                "clipped_actions": actions,
                "values": Deferred(partial(_values, learner, collector.memory)),
                "log_probs": Deferred(partial(distribution.log_prob, collector.parameters, collector.chosen)),
                "new_obs": new_obs,
                "rewards": rewards,
                "dones": dones,
                "infos": infos,
            }
        )
        if not callback.on_step():
            return False

        count_episodes(infos, dones)
        truncated = truncations(infos, dones)
        collector.record(rewards, ends_here, truncated, last_observations(infos, truncated), ~resets)

    assert worker.observation is not None
    assert worker.starts is not None
    collector.state = worker.recurrent_state
    collector.finish(worker.observation, worker.starts)
    return True


@torch.no_grad()
def _values(learner: Learner, memory: Tensor) -> Tensor:
    """Values ``[N, 1]`` in units of rewards."""
    return learner.values(learner.policy.predict_returns(memory)).unsqueeze(-1)


def check_observations(normalizer: VecNormalize | None, observation: Any, step: int) -> None:
    """Refuse observations that are not finite, also those before normalisation."""
    if normalizer is not None:
        # One NaN spoils the running statistics, and with them the observations of all environments.
        check_observation(normalizer.old_obs, step)
    check_observation(observation, step)


def _step_env(env: VecEnv, actions: npt.NDArray[Any], step: int) -> tuple[Any, Any, Any, list[dict[str, Any]]]:
    with explained(env, step):
        observation, rewards, dones, infos = env.step(actions)
    # Some vector environments return empty infos.
    return observation, rewards, dones, infos or [{} for _ in range(env.num_envs)]


@contextlib.contextmanager
def explained(env: VecEnv, step: int) -> Iterator[None]:
    """Note on an exception of a vector environment which of its environments raised it, and when."""
    try:
        yield
    except Exception as error:
        # Raise the same exception, so that handlers for its type still catch it.
        index = _dead_env(env) if isinstance(env.unwrapped, SubprocVecEnv) else _raising_env(error)
        which = "an environment" if index is None else f"environment {index}"
        what = str(error) or PROCESS_ENDED
        mark_failure(
            error,
            f"{which} raised {type(error).__name__} at step {step} of the rollout: {what}; this rollout was not "
            "trained on",
        )
        raise


PROCESS_ENDED = "its process has ended; its own error, if any, is printed above"
"""Message for an ``EOFError``, which has none."""
_LOOP_VARIABLES: dict[type, str] = {DummyVecEnv: "env_idx", SyncVectorEnv: "i", AsyncVectorEnv: "index"}


def _raising_env(error: Exception) -> int | None:
    """Index of the environment that raised, from the loop variable in the traceback."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for kind, name in _LOOP_VARIABLES.items():
            if isinstance(frame.f_locals.get("self"), kind) and name in frame.f_locals:
                return int(frame.f_locals[name])
    return None


def _dead_env(env: VecEnv) -> int | None:
    """Index of the environment whose process has ended."""
    sentinels = [process.sentinel for process in env.unwrapped.processes]  # type: ignore[attr-defined]
    dead = multiprocessing.connection.wait(sentinels, timeout=1)
    return sentinels.index(dead[0]) if dead else None


def truncations(infos: list[dict[str, Any]], dones: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Where a time limit truncated an episode ``[N]``."""
    truncated = np.zeros(len(dones), dtype=bool)
    for i in dones.nonzero()[0]:
        truncated[i] = infos[i].get("TimeLimit.truncated", False) and infos[i].get("terminal_observation") is not None
    return truncated


def last_observations(infos: list[dict[str, Any]], truncated: npt.NDArray[np.bool_]) -> HostObservation | None:
    """Last observations of truncated episodes, stacked; ``None`` if there are none."""
    finals = [infos[i]["terminal_observation"] for i in np.flatnonzero(truncated)]
    if not finals:
        return None
    if isinstance(finals[0], dict):
        return {key: np.stack([final[key] for final in finals]) for key in finals[0]}
    return np.stack(finals)
