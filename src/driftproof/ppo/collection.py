"""Acting in the environments for one rollout."""

from __future__ import annotations

import multiprocessing.connection
import traceback
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv
from torch import Tensor

from driftproof.learner.rollout import HostObservation, Rollout, check_observation, check_rewards, mark_failure
from driftproof.nn.types import Observation, PolicyState, RolloutStep
from driftproof.ppo.sb3_views import Deferred, RolloutView
from driftproof.ppo.training import values_of

if TYPE_CHECKING:
    from driftproof.ppo.algorithm import DistributionalPPO


_SAMPLES_PER_PREDICTION = 1024
"""Samples that wait for the critics' predictions at most, unless the steps of one chunk have more."""


def collect(agent: DistributionalPPO, env: VecEnv, callback: BaseCallback, rollout: Rollout) -> bool:
    """Fill the rollout; ``False`` if the callback wants training to end.

    While the environments wait, cores remember and the actor acts. Predictions of returns follow for many steps
    together, and log-probabilities in the update, at once.
    """
    callback.on_rollout_start()
    agent._in_rollout, agent.edge.reset_seed = True, None
    policy, distribution = agent.policy, agent.policy.distribution
    policy.set_training_mode(False)
    # Weights must not change until the rollout ends.
    step_policy = policy.stepper()
    noise = policy.rollout_noise(rollout.steps, rollout.envs, agent.sde_sample_freq)
    # Without memory a chunk is a single step: too few samples for a call of the critics.
    steps_per_prediction = max(rollout.chunk, _SAMPLES_PER_PREDICTION // rollout.envs)
    ends: list[tuple[int, npt.NDArray[np.int64], Tensor]] = []
    memories: list[Tensor] = []
    for bootstrap in rollout.bootstraps:
        bootstrap.zero_()

    callback.update_locals(
        {
            "self": agent,
            "env": env,
            "callback": callback,
            "n_rollout_steps": rollout.steps,
            "rollout_buffer": RolloutView(agent, rollout),
        }
    )
    _check_observation(agent, agent._last_obs, 0)
    for step in range(rollout.steps):
        observation, starts = agent._last_obs, agent._last_episode_starts
        assert observation is not None
        assert starts is not None
        rollout.starts[step] = starts
        with torch.inference_mode():
            stored = _store(rollout.observations, step, observation)
            state = forget(agent.state, starts)
            rollout.store_state(step, state)
            parameters, memory, state, latent = step_policy(stored, state)
            memories.append(memory)
            action = distribution.sample(parameters, noise(step, parameters, latent))
            rollout.parameters[step] = parameters
            rollout.actions[step] = action
            actions = distribution.to_env(action).cpu().numpy()
        new_obs, rewards, dones, infos = _step_env(env, actions, step)
        check_rewards(rewards, step)
        _check_observation(agent, new_obs, step)
        # A step in which a vector environment only resets is no transition, and an episode of its own.
        resets = np.fromiter((info.get("autoreset", False) for info in infos), bool, len(infos))
        ends_here = dones | resets
        # Before the callback, which may end training here: the next one goes on from where the environments are.
        agent.state, agent._last_obs, agent._last_episode_starts = state, new_obs, ends_here
        agent.num_timesteps += env.num_envs

        # By the names of Stable-Baselines3.
        callback.update_locals(
            {
                "n_steps": step + 1,
                "obs_tensor": stored,
                "actions": actions,
                "clipped_actions": actions,
                "values": Deferred(partial(_values, agent, memory)),
                "log_probs": Deferred(partial(distribution.log_prob, parameters, action)),
                "new_obs": new_obs,
                "rewards": rewards,
                "dones": dones,
                "infos": infos,
            }
        )
        if not callback.on_step():
            return False

        agent._update_info_buffer(infos, dones)
        rollout.valid[step] = ~resets
        rollout.rewards[step] = rewards
        rollout.dones[step] = ends_here
        truncated = _truncated(infos, dones)
        rollout.truncated[step] = truncated
        if truncated.any():
            ends.append(_remember_end(step_policy, agent, infos, step, np.flatnonzero(truncated)))
        if len(memories) == steps_per_prediction or step == rollout.steps - 1:
            _predict(policy, memories, rollout, step)
            memories.clear()

    _predict_ends(agent, step_policy, rollout, ends)
    callback.on_rollout_end()
    return True


@torch.no_grad()
def _values(agent: DistributionalPPO, memory: Tensor) -> Tensor:
    """What the critics expect ``[N, 1]``, in units of rewards."""
    return values_of(agent, agent.policy.predict_returns(memory)).unsqueeze(-1)


def forget(state: PolicyState, starts: npt.NDArray[np.bool_]) -> PolicyState:
    """The state, forgotten where episodes start."""
    if not starts.any() or not (state.actor or state.critic):
        return state
    device = (state.actor + state.critic)[0].device
    return state.masked(torch.from_numpy(~starts).to(device, torch.float32).unsqueeze(1))


def _check_observation(agent: DistributionalPPO, observation: Any, step: int) -> None:
    if agent._vec_normalize_env is not None:
        # One bad number has spoiled its averages, and with them the observations of all environments.
        check_observation(agent._vec_normalize_env.old_obs, step)
    check_observation(observation, step)


def _step_env(env: VecEnv, actions: npt.NDArray[Any], step: int) -> tuple[Any, Any, Any, list[dict[str, Any]]]:
    try:
        observation, rewards, dones, infos = env.step(actions)
        # Some vector environments have nothing to tell.
        return observation, rewards, dones, infos or [{} for _ in range(env.num_envs)]
    except Exception as error:
        # The exception stays what it is, so that those who expect it still catch it.
        index = _dead_env(env) if isinstance(env.unwrapped, SubprocVecEnv) else _raising_env(error)
        which = "an environment" if index is None else f"environment {index}"
        what = str(error) or PROCESS_ENDED
        mark_failure(
            error,
            f"{which} raised {type(error).__name__} at step {step} of the rollout: {what}; the agent has learned "
            "nothing from this rollout",
        )
        raise


PROCESS_ENDED = "its process has ended; if it said why, that is above"
"""What is said of an ``EOFError``, which says nothing."""
_LOOP_VARIABLES: dict[type, str] = {DummyVecEnv: "env_idx", SyncVectorEnv: "i", AsyncVectorEnv: "index"}


def _raising_env(error: Exception) -> int | None:
    """Which environment raised: the loop over them knows."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for kind, name in _LOOP_VARIABLES.items():
            if isinstance(frame.f_locals.get("self"), kind) and name in frame.f_locals:
                return int(frame.f_locals[name])
    return None


def _dead_env(env: VecEnv) -> int | None:
    """Which environment's process has ended, having printed its error."""
    sentinels = [process.sentinel for process in env.unwrapped.processes]  # type: ignore[attr-defined]
    dead = multiprocessing.connection.wait(sentinels, timeout=1)
    return sentinels.index(dead[0]) if dead else None


def _truncated(infos: list[dict[str, Any]], dones: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    truncated = np.zeros(len(dones), dtype=bool)
    for i in dones.nonzero()[0]:
        truncated[i] = infos[i].get("TimeLimit.truncated", False) and infos[i].get("terminal_observation") is not None
    return truncated


def _remember_end(
    step_policy: RolloutStep,
    agent: DistributionalPPO,
    infos: list[dict[str, Any]],
    step: int,
    envs: npt.NDArray[np.int64],
) -> tuple[int, npt.NDArray[np.int64], Tensor]:
    """The critics' memory at the observations at which a time limit ended episodes."""
    finals = [infos[i]["terminal_observation"] for i in envs]
    stacked: HostObservation
    if isinstance(finals[0], dict):
        stacked = {key: np.stack([final[key] for final in finals]) for key in finals[0]}
    else:
        stacked = np.stack(finals)
    check_observation(_at_rows(stacked, envs, agent.n_envs), step)
    with torch.inference_mode():
        tensors, _ = agent.policy.obs_to_tensor(stacked)
        rows = torch.from_numpy(envs).to(agent.device)
        memory = step_policy(tensors, agent.state.rows(rows)).memory
    return step, envs, memory


def _at_rows(observation: HostObservation, rows: npt.NDArray[np.int64], count: int) -> HostObservation:
    """Observations of some environments among zeros for the others."""
    if isinstance(observation, dict):
        return {key: _at_rows(part, rows, count) for key, part in observation.items()}  # type: ignore[misc]
    result = np.zeros((count, *observation.shape[1:]), observation.dtype)
    result[rows] = observation
    return result


def _predict(policy: Any, memories: list[Tensor], rollout: Rollout, step: int) -> None:
    with torch.inference_mode():
        for room, prediction in zip(rollout.predictions, policy.predict_returns(torch.stack(memories)), strict=True):
            room[step + 1 - len(memories) : step + 1] = prediction


def _predict_ends(
    agent: DistributionalPPO,
    step_policy: RolloutStep,
    rollout: Rollout,
    ends: list[tuple[int, npt.NDArray[np.int64], Tensor]],
) -> None:
    """Predictions at time limits, and after the last step of the rollout."""
    assert agent._last_obs is not None
    assert agent._last_episode_starts is not None
    with torch.inference_mode():
        for step, envs, memory in ends:
            for room, prediction in zip(rollout.bootstraps, agent.policy.predict_returns(memory), strict=True):
                room[step, torch.from_numpy(envs).to(rollout.device)] = prediction
        tensors, _ = agent.policy.obs_to_tensor(agent._last_obs)
        memory = step_policy(tensors, forget(agent.state, agent._last_episode_starts)).memory
        for room, prediction in zip(rollout.last_predictions, agent.policy.predict_returns(memory), strict=True):
            room.copy_(prediction)


def _store(room: Observation, step: int, observation: HostObservation) -> Observation:
    """Keep an observation of the rollout; where it is kept."""
    if isinstance(room, dict):
        assert isinstance(observation, dict)
        return {key: part[step].copy_(torch.from_numpy(np.asarray(observation[key]))) for key, part in room.items()}
    return room[step].copy_(torch.from_numpy(np.asarray(observation)))
