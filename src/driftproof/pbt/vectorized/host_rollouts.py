"""Rollouts in environments on the host: those of each member step in turn while the device infers for the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecEnv, unwrap_vec_normalize
from torch import Tensor

from driftproof.learner.metrics import to_host
from driftproof.learner.population import MemberGenerators, PopulationCollector, PopulationRollout, PopulationState
from driftproof.learner.rollout import HostObservation, check_rewards
from driftproof.nn.normalization import normalized
from driftproof.nn.stacked import StackedPolicy
from driftproof.nn.types import Observation, PolicyState
from driftproof.pbt.vectorized.noise import action_noise
from driftproof.ppo import DistributionalPPO
from driftproof.ppo.collection import check_observations, explained, last_observations, truncations

Failures = dict[int, Exception]


class HostRollouts:
    """Collects rollouts of all members in their own vector environments.

    Members form two halves: while environments of one step, the device infers the actions of the other. Observations
    and episode starts go to the device in one transfer each per half and step, and actions come back in one.

    Args:
        agents: The members' agents, each with its environments.
        state: State of the members.
        rollout: Rollouts to overwrite.
        generators: Random generators of the members.
    """

    def __init__(
        self,
        agents: Sequence[DistributionalPPO],
        state: PopulationState,
        rollout: PopulationRollout,
        generators: MemberGenerators,
    ) -> None:
        self.agents, self.rollout, self.generators = agents, rollout, generators
        self.policy = state.policy
        self.state = state.policy.initial_state(rollout.envs)
        """Recurrent state before the last observations ``[M, layers, N, units]``."""
        middle = (state.members + 1) // 2
        borders = [(0, middle), (middle, state.members)] if state.members > 1 else [(0, 1)]
        self._halves = [_Half(self, first, last) for first, last in borders]

    def read(self, member: int) -> None:
        """Take the recurrent state from a member's agent."""
        for stack, part in zip(_parts(self.state), _parts(self.agents[member].state), strict=True):
            stack[member].copy_(part)

    def write(self, member: int) -> None:
        """Give the recurrent state to a member's agent."""
        worker = self.agents[member].worker
        worker.state = PolicyState(*(tuple(part[member].clone() for part in parts) for parts in self.state))

    def restart(self, members: Sequence[int]) -> None:
        """Reset the recurrent states of running episodes of some members."""
        index = torch.tensor(members).to(self.rollout.device, non_blocking=True)
        for stack in _parts(self.state):
            stack.index_fill_(0, index, 0)
        for member in members:
            self.agents[member].reset_lstm_states_to_initial()

    def collect(self, callbacks: Mapping[int, BaseCallback]) -> Failures:
        """Collect one rollout of each member that has a callback; returns the members that failed."""
        noise = action_noise(self.policy, self.rollout, self.generators, list(callbacks))
        failures: Failures = {}
        halves = self._halves
        for half in halves:
            half.begin(callbacks, noise, failures)
        halves[0].infer(0)
        for step in range(self.rollout.steps):
            for i, half in enumerate(halves):
                half.send(step)
                following = halves[(i + 1) % len(halves)]
                next_step = step + (i + 1) // len(halves)
                if following is not half and next_step < self.rollout.steps:
                    following.infer(next_step)
                half.receive(step)
                if following is half and next_step < self.rollout.steps:
                    half.infer(next_step)
        for half in halves:
            half.finish()
        for stack, part in zip(_parts(self.state), _parts(self.rollout.last_state), strict=True):
            for member in callbacks:
                stack[member].copy_(part[member])
        return failures

    def finish_update(self) -> None:
        """Nothing is left to do after an update."""


class _Half:
    """Some of the members, whose actions are inferred together."""

    def __init__(self, whole: HostRollouts, first: int, last: int) -> None:
        self.whole, self.first, self.last = whole, first, last
        self.policy: StackedPolicy = whole.policy.part(first, last)
        self.rollout = whole.rollout.part(first, last)
        rollout = self.rollout
        shape = (rollout.members, rollout.steps, rollout.envs)
        self.rewards = np.zeros(shape, np.float32)
        self.dones, self.truncated = np.zeros(shape, bool), np.zeros(shape, bool)
        self.valid = np.ones(shape, bool)
        self.starts = _pinned(torch.zeros(rollout.members, rollout.envs, dtype=torch.bool), rollout.device)
        self.observation = self._host_storage()

    def _host_storage(self) -> Observation:
        storage, device = self.rollout.observations, self.rollout.device
        if isinstance(storage, dict):
            return {key: _pinned(torch.zeros_like(part[:, 0], device="cpu"), device) for key, part in storage.items()}
        return _pinned(torch.zeros_like(storage[:, 0], device="cpu"), device)

    def begin(self, callbacks: Mapping[int, BaseCallback], noise: Tensor, failures: Failures) -> None:
        members = slice(self.first, self.last)
        state = PolicyState(*(tuple(part[members] for part in parts) for parts in self.whole.state))
        self.collector = PopulationCollector(self.policy, self.rollout, state, noise[members])
        self.callbacks = {member: callbacks[member] for member in range(self.first, self.last) if member in callbacks}
        self.failures = failures
        for member, callback in self._active():
            with self._caught(member):
                agent = self._agent(member)
                worker, normalizer = agent.worker, agent.learner.normalizer
                worker.in_rollout, worker.reset_seed = True, None
                if normalizer is not None:
                    normalizer.begin()
                callback.on_rollout_start()
                callback.update_locals({"self": agent, "env": agent.env, "n_rollout_steps": self.rollout.steps})
                check_observations(unwrap_vec_normalize(agent.env), worker.observation, 0)  # type: ignore[arg-type]

    def infer(self, step: int) -> None:
        """Begin to infer the actions of a step."""
        observation, starts = self._uploaded(learns=True)
        self.actions = self.collector.act(observation, starts)

    def _uploaded(self, learns: bool) -> tuple[Observation, Tensor]:
        """Observations and starts on the device."""
        for member, _ in self._active():
            with self._caught(member):
                agent, row = self._agent(member), member - self.first
                given, normalizer = agent.worker.observation, agent.learner.normalizer
                assert given is not None
                assert agent.worker.starts is not None
                if normalizer is not None and learns:
                    normalizer.observe(given, agent.worker.starts)
                _write(self.observation, row, given, agent)
                self.starts[row] = torch.from_numpy(agent.worker.starts)
        device = self.rollout.device
        if isinstance(self.observation, dict):
            moved: Observation = {key: part.to(device, non_blocking=True) for key, part in self.observation.items()}
        else:
            moved = self.observation.to(device, non_blocking=True)
        return moved, self.starts.to(device, non_blocking=True)

    def send(self, step: int) -> None:
        """Wait for the actions, and let the environments begin their steps."""
        actions = to_host(self.actions).numpy()
        for member, _ in self._active():
            with self._caught(member):
                env = self._env(member)
                with explained(env, step):
                    env.step_async(actions[member - self.first].astype(env.action_space.dtype, copy=False))

    def receive(self, step: int) -> None:
        """Wait for the environments, and store what they returned."""
        last = None
        for member, callback in self._active():
            with self._caught(member):
                found = self._receive_one(member, callback, step)
                if found is not None:
                    last = self._host_storage() if last is None else last
                    _write(
                        last, member - self.first, found, self._agent(member), self.truncated[member - self.first, step]
                    )
        device = self.rollout.device
        if isinstance(last, dict):
            last = {key: part.to(device, non_blocking=True) for key, part in last.items()}
        elif last is not None:
            last = last.to(device, non_blocking=True)
        self.collector.record(last)

    def _receive_one(self, member: int, callback: BaseCallback, step: int) -> HostObservation | None:
        """Store what a member's environments returned; the last observations of truncated episodes, if there are."""
        agent, env, row = self._agent(member), self._env(member), member - self.first
        worker = agent.worker
        with explained(env, step):
            new_obs, rewards, dones, infos = env.step_wait()
        infos = infos or [{} for _ in range(env.num_envs)]
        check_rewards(rewards, step)
        check_observations(unwrap_vec_normalize(env), new_obs, step)
        resets = np.fromiter((info.get("autoreset", False) for info in infos), bool, len(infos))
        ends_here = dones | resets
        worker.observation, worker.starts = new_obs, ends_here  # type: ignore[assignment]
        worker.counters.num_timesteps += env.num_envs
        shown = {"n_steps": step + 1, "new_obs": new_obs, "rewards": rewards, "dones": dones, "infos": infos}
        callback.update_locals(shown)
        if not callback.on_step():
            raise RuntimeError("a callback stopped a member's training before the end of its slice")
        agent._update_info_buffer(infos, dones)
        truncated = truncations(infos, dones)
        self.rewards[row, step], self.dones[row, step] = rewards, ends_here
        self.truncated[row, step], self.valid[row, step] = truncated, ~resets
        return last_observations(infos, truncated)

    def finish(self) -> None:
        rollout = self.rollout
        observation, starts = self._uploaded(learns=False)
        self.collector.finish(observation, starts)
        for name in ("rewards", "dones", "truncated", "valid"):
            array: npt.NDArray[Any] = getattr(self, name)
            getattr(rollout, name).copy_(torch.from_numpy(array), non_blocking=True)
        for member, callback in self._active():
            with self._caught(member):
                normalizer = self._agent(member).learner.normalizer
                if normalizer is not None:
                    normalizer.finish()
                callback.on_rollout_end()

    def _active(self) -> list[tuple[int, BaseCallback]]:
        return [(member, callback) for member, callback in self.callbacks.items() if member not in self.failures]

    def _agent(self, member: int) -> DistributionalPPO:
        return self.whole.agents[member]

    def _env(self, member: int) -> VecEnv:
        env = self._agent(member).env
        assert env is not None
        return env

    def _caught(self, member: int) -> _Caught:
        return _Caught(member, self.failures)


class _Caught:
    """Notes an exception of one member, which must not end the others."""

    def __init__(self, member: int, failures: Failures) -> None:
        self.member, self.failures = member, failures

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        if isinstance(error, Exception):
            self.failures[self.member] = error
            return True
        return False


def _write(
    target: Observation,
    row: int,
    observation: HostObservation,
    agent: DistributionalPPO,
    envs: npt.NDArray[np.bool_] | None = None,
) -> None:
    """Copy a member's observations, normalised, into its row; those of some environments only if they are given."""
    normalizer = agent.learner.normalizer
    if isinstance(observation, dict):
        given: Observation = {key: torch.from_numpy(np.asarray(part)) for key, part in observation.items()}
    else:
        given = torch.from_numpy(np.asarray(observation))
    if normalizer is not None:
        given = normalized(given, normalizer.moments)
    index = slice(None) if envs is None else torch.from_numpy(envs)
    if isinstance(target, dict):
        assert isinstance(given, dict)
        for key, part in target.items():
            part[row][index] = given[key].to(part.dtype)
    else:
        assert isinstance(given, Tensor)
        target[row][index] = given.to(target.dtype)


def _pinned(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.pin_memory() if device.type == "cuda" else tensor


def _parts(state: PolicyState) -> tuple[Tensor, ...]:
    return state.actor + state.critic
