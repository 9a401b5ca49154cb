"""Collection of the members' rollouts: all policies act in one pass, and nothing waits for the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from driftproof.learner.population.rollout import PopulationRollout
from driftproof.nn.stacked import StackedPolicy
from driftproof.nn.types import Observation, PolicyState, map_observation

_SAMPLES_PER_PREDICTION = 1024
"""Samples of a member per batched call of the critics, at most, unless the steps of one chunk have more."""


class _Cutoff(NamedTuple):
    """Last observations of episodes that are truncated at a step, and the recurrent state before them."""

    step: int
    observation: Observation
    state: PolicyState


class PopulationCollector:
    """Fills rollouts while the caller steps the environments, as :class:`driftproof.learner.Collector` does for one.

    All tensors are on the population's device.

    Args:
        policy: Policies that act.
        rollout: Rollouts to overwrite.
        state: Recurrent state before the first step ``[M, layers, N, units]``.
        noise: Noise for sampling actions ``[M, T, N, ...]``.
    """

    def __init__(self, policy: StackedPolicy, rollout: PopulationRollout, state: PolicyState, noise: Tensor) -> None:
        policy.like.train(False)
        self.policy, self.rollout, self.state, self.noise = policy, rollout, state, noise
        self.step = 0
        self._steps_per_prediction = max(rollout.chunk, _SAMPLES_PER_PREDICTION // rollout.envs)
        self._memories: list[Tensor] = []
        self._cutoffs: list[_Cutoff] = []
        for bootstrap in rollout.bootstraps:
            bootstrap.zero_()

    @torch.inference_mode()
    def act(self, observation: Observation, starts: Tensor) -> Tensor:
        """Actions for the environments ``[M, N, ...]``.

        Args:
            observation: Observations ``[M, N, ...]``.
            starts: Whether they are the first of an episode ``[M, N]``.
        """
        rollout, t, distribution = self.rollout, self.step, self.policy.like.distribution
        rollout.starts[:, t].copy_(starts)
        stored = _at(rollout.observations, t, observation)
        state = self._reset(starts)
        rollout.store_state(t, state)
        parameters, memory, self.state, _ = self.policy.step(stored, state)
        self._memories.append(memory)
        chosen = distribution.sample(parameters, self.noise[:, t])
        rollout.parameters[:, t].copy_(parameters)
        rollout.actions[:, t].copy_(chosen)
        return distribution.to_env(chosen)

    @torch.inference_mode()
    def record(self, last: Observation | None = None) -> None:
        """Go on to the next step. The caller stores rewards and flags in the rollout.

        Args:
            last: Last observations ``[M, N, ...]`` of episodes that were truncated at this step, and anything for the
                others; ``None``: none was truncated.
        """
        if last is not None:
            self._cutoffs.append(_Cutoff(self.step, last, self.state))
        if len(self._memories) == self._steps_per_prediction or self.step == self.rollout.steps - 1:
            self._predict()
        self.step += 1

    @torch.inference_mode()
    def finish(self, observation: Observation, starts: Tensor) -> None:
        """Predict the returns after the last step.

        Args:
            observation: Observations after the last step ``[M, N, ...]``.
            starts: Whether they are the first of an episode ``[M, N]``.
        """
        rollout = self.rollout
        for stored, parts in zip(rollout.last_state, self.state, strict=True):
            for target, part in zip(stored, parts, strict=True):
                target.copy_(part)
        memory = self.policy.step(_like(rollout.observations, observation), self._reset(starts)).memory
        for target, prediction in zip(rollout.last_predictions, self.policy.predict_returns(memory), strict=True):
            target.copy_(prediction)

    def _reset(self, starts: Tensor) -> PolicyState:
        if not self.rollout.resets_memory:
            return self.state
        return self.state.masked((~starts).to(torch.float32).unsqueeze(-1))

    def _predict(self) -> None:
        rollout, begin, end = self.rollout, self.step + 1 - len(self._memories), self.step + 1
        for target, prediction in zip(
            rollout.predictions, self.policy.predict_returns(torch.stack(self._memories, 1)), strict=True
        ):
            target[:, begin:end].copy_(prediction)
        self._memories.clear()
        if not self._cutoffs:
            return
        # All steps at once, as further sequences.
        observation = _joined([each.observation for each in self._cutoffs])
        actor, critic = (
            tuple(torch.cat(parts, 2) for parts in zip(*states, strict=True))
            for states in zip(*(each.state for each in self._cutoffs), strict=True)
        )
        memory = self.policy.step(_like(rollout.observations, observation), PolicyState(actor, critic)).memory
        for bootstrap, prediction in zip(rollout.bootstraps, self.policy.predict_returns(memory), strict=True):
            for i, each in enumerate(self._cutoffs):
                bootstrap[:, each.step].copy_(prediction[:, i * rollout.envs : (i + 1) * rollout.envs])
        self._cutoffs.clear()


def _at(storage: Observation, step: int, observation: Observation) -> Observation:
    """Copy an observation into the rollout; returns the stored tensors."""
    if isinstance(storage, dict):
        assert isinstance(observation, dict)
        return {key: part[:, step].copy_(observation[key]) for key, part in storage.items()}
    assert isinstance(observation, Tensor)
    return storage[:, step].copy_(observation)


def _like(storage: Observation, observation: Observation) -> Observation:
    """Observations of the rollout's dtype."""
    if isinstance(storage, dict):
        assert isinstance(observation, dict)
        return {key: observation[key].to(part.dtype) for key, part in storage.items()}
    dtype = storage.dtype
    return map_observation(observation, lambda part: part.to(dtype))


def _joined(observations: list[Observation]) -> Observation:
    """Observations ``[M, N, ...]`` one after the other ``[M, steps * N, ...]``."""
    first = observations[0]
    if isinstance(first, dict):
        return {key: torch.cat([each[key] for each in observations], 1) for key in first}  # type: ignore[index]
    return torch.cat(observations, 1)  # type: ignore[arg-type]
