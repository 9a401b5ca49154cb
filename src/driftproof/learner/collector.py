"""Collection of a rollout: the policy acts, and observations, actions and predictions are stored."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from driftproof.learner.networks import Policy
from driftproof.learner.observation_normalizer import ObservationNormalizer
from driftproof.learner.rollout import HostObservation, Rollout, check_observation
from driftproof.nn.normalization import normalized
from driftproof.nn.types import Observation, PolicyState, map_observation

_SAMPLES_PER_PREDICTION = 1024
"""Samples per batched call of the critics, at most, unless the steps of one chunk have more."""


class _Cutoff(NamedTuple):
    """Episodes truncated at a step, and the output of the critics' core for their last observations."""

    step: int
    envs: npt.NDArray[np.int64]
    memory: Tensor


class Collector:
    """Fills a rollout while the caller steps the environments.

    ::

        collector = Collector(policy, rollout, state)
        for _ in range(rollout.steps):
            actions = collector.act(observations, starts)
            observations, rewards, starts = ...  # the environments
            collector.record(rewards, starts)
        collector.finish(observations, starts)
        state = collector.state

    While the environments wait, only the cores and the actor run. The critics predict returns for many steps at once,
    and the update computes all log-probabilities at once. Weights must not change until the rollout ends.

    Args:
        policy: Policy that acts.
        rollout: Rollout to overwrite.
        state: Recurrent state before the first step; ``None``: the initial state.
        sde_sample_freq: Steps between draws of the exploration matrices of gSDE; -1: one for the rollout.
        normalizer: Normaliser of observations, which learns from them.
    """

    observation: Observation
    """The last observations, normalised, on the policy's device."""
    state: PolicyState
    """Recurrent state after the last action."""
    parameters: Tensor
    """Parameters of the distribution that the last actions were drawn from."""
    chosen: Tensor
    """The last actions before clipping or squashing; :meth:`act` returns them as the environments take them."""
    memory: Tensor
    """Output of the critics' core at the last observations."""

    def __init__(
        self,
        policy: Policy,
        rollout: Rollout,
        state: PolicyState | None = None,
        sde_sample_freq: int = -1,
        normalizer: ObservationNormalizer | None = None,
    ) -> None:
        policy.train(False)
        self.policy, self.rollout, self.normalizer = policy, rollout, normalizer
        if normalizer is not None:
            normalizer.begin()
        self.state = policy.initial_state(rollout.envs) if state is None else state
        self.step = 0
        self._step_policy = policy.stepper()
        self._noise = policy.rollout_noise(rollout.steps, rollout.envs, sde_sample_freq)
        # Without recurrence a chunk is a single step: too few samples for a call of the critics.
        self._steps_per_prediction = max(rollout.chunk, _SAMPLES_PER_PREDICTION // rollout.envs)
        self._memories: list[Tensor] = []
        self._cutoffs: list[_Cutoff] = []
        for bootstrap in rollout.bootstraps:
            bootstrap.zero_()

    def act(self, observation: HostObservation, starts: npt.NDArray[np.bool_]) -> npt.NDArray[Any]:
        """Sample actions for the environments.

        Args:
            observation: Observation of every environment ``[N, ...]``.
            starts: Whether it is the first of an episode ``[N]``.
        """
        rollout, step, distribution = self.rollout, self.step, self.policy.distribution
        rollout.starts[step] = starts
        self._raw = observation
        if self.normalizer is not None:
            observation = self.normalizer.take(observation, starts)
        with torch.inference_mode():
            self.observation = _store(rollout.observations, step, _as_tensors(observation))
            state = reset_state(self.state, starts & rollout.resets_memory)
            rollout.store_state(step, state)
            parameters, memory, self.state, latent = self._step_policy(self.observation, state)
            self._memories.append(memory)
            chosen = distribution.sample(parameters, self._noise(step, parameters, latent))
            rollout.parameters[step] = parameters
            rollout.actions[step] = chosen
            self.parameters, self.chosen, self.memory = parameters, chosen, memory
            actions: npt.NDArray[Any] = distribution.to_env(chosen).cpu().numpy()
            return actions

    def record(
        self,
        rewards: npt.NDArray[Any],
        dones: npt.NDArray[np.bool_],
        truncated: npt.NDArray[np.bool_] | None = None,
        last_observations: HostObservation | None = None,
        valid: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        """Store rewards and episode ends that followed the last actions.

        Args:
            rewards: Rewards ``[N]``.
            dones: Where an episode terminated or was truncated ``[N]``.
            truncated: Where a time limit truncated it, so that its last observation still has a value ``[N]``.
            last_observations: Last observations of the truncated episodes only, stacked.
            valid: Where the step was a transition, and not only a reset ``[N]``; ``None``: everywhere.
        """
        rollout, step = self.rollout, self.step
        rollout.rewards[step] = rewards
        rollout.dones[step] = dones
        rollout.valid[step] = True if valid is None else valid
        rollout.truncated[step] = False if truncated is None else truncated
        if truncated is not None and truncated.any():
            assert last_observations is not None
            self._cutoffs.append(self._cutoff(np.flatnonzero(truncated), last_observations))
        if len(self._memories) == self._steps_per_prediction or step == rollout.steps - 1:
            self._predict()
        self.step += 1

    def finish(self, observation: HostObservation, starts: npt.NDArray[np.bool_]) -> None:
        """Predict the returns to bootstrap from: after the last step and after truncated episodes.

        Args:
            observation: Observations after the last step ``[N, ...]``.
            starts: Whether they are the first of an episode ``[N]``.
        """
        rollout, predict = self.rollout, self.policy.predict_returns
        rollout.last_state = self.state
        with torch.inference_mode():
            for step, envs, memory in self._cutoffs:
                for target, prediction in zip(rollout.bootstraps, predict(memory), strict=True):
                    target[step, torch.from_numpy(envs).to(rollout.device)] = prediction
            tensors = _tensors(rollout.observations, self._normalized(_as_tensors(observation)))
            memory = self._step_policy(tensors, reset_state(self.state, starts & rollout.resets_memory)).memory
            for target, prediction in zip(rollout.last_predictions, predict(memory), strict=True):
                target.copy_(prediction)
        if self.normalizer is not None:
            self.normalizer.finish()

    def _cutoff(self, envs: npt.NDArray[np.int64], last: HostObservation) -> _Cutoff:
        rollout = self.rollout
        check_observation(_at_rows(last, envs, rollout.envs), self.step)
        with torch.inference_mode():
            rows = torch.from_numpy(envs).to(rollout.device)
            memory = self._step_policy(
                _tensors(rollout.observations, self._normalized(_as_tensors(last))), self.state.rows(rows)
            ).memory
        return _Cutoff(self.step, envs, memory)

    def raw_observation(self) -> Observation:
        """The last observations before they were normalised, on the policy's device."""
        raw, device = _as_tensors(self._raw), self.rollout.device
        return raw if device.type == "cpu" else map_observation(raw, lambda part: part.to(device))

    def _normalized(self, observation: Observation) -> Observation:
        return observation if self.normalizer is None else normalized(observation, self.normalizer.moments)

    def _predict(self) -> None:
        rollout, begin, end = self.rollout, self.step + 1 - len(self._memories), self.step + 1
        with torch.inference_mode():
            predictions = self.policy.predict_returns(torch.stack(self._memories))
            for target, prediction in zip(rollout.predictions, predictions, strict=True):
                target[begin:end] = prediction
        self._memories.clear()


def reset_state(state: PolicyState, starts: npt.NDArray[np.bool_]) -> PolicyState:
    """The recurrent state, reset where episodes start."""
    if not starts.any() or not (state.actor or state.critic):
        return state
    device = (state.actor + state.critic)[0].device
    return state.masked(torch.from_numpy(~starts).to(device, torch.float32).unsqueeze(1))


def _at_rows(observation: HostObservation, rows: npt.NDArray[np.int64], count: int) -> HostObservation:
    """Observations of some environments, with zeros in the rows of the others."""
    if isinstance(observation, dict):
        return {key: _at_rows(part, rows, count) for key, part in observation.items()}  # type: ignore[misc]
    result = np.zeros((count, *observation.shape[1:]), observation.dtype)
    result[rows] = observation
    return result


def _as_tensors(observation: HostObservation) -> Observation:
    if isinstance(observation, dict):
        return {key: torch.from_numpy(np.asarray(part)) for key, part in observation.items()}
    return torch.from_numpy(np.asarray(observation))


def _store(storage: Observation, step: int, observation: Observation) -> Observation:
    """Copy an observation into the rollout; returns the stored tensors."""
    if isinstance(storage, dict):
        assert isinstance(observation, dict)
        return {key: part[step].copy_(observation[key]) for key, part in storage.items()}
    assert isinstance(observation, Tensor)
    return storage[step].copy_(observation)


def _tensors(like: Observation, observation: Observation) -> Observation:
    """Observations as tensors of the rollout's dtype and device."""
    if isinstance(like, dict):
        assert isinstance(observation, dict)
        return {key: observation[key].to(part) for key, part in like.items()}
    assert isinstance(observation, Tensor)
    return observation.to(like)
