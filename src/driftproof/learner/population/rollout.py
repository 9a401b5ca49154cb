"""Rollouts of all members in tensors ``[M, T, N, ...]`` on the population's device."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from driftproof.learner.estimates import Experience
from driftproof.learner.rollout import Minibatch, Rollout
from driftproof.nn.stacked import StackedPolicy
from driftproof.nn.types import Observation, PolicyState, map_observation

_TENSORS = ("observations", "actions", "parameters", "predictions", "bootstraps", "last_predictions", "states")
_FLAGS = ("rewards", "starts", "dones", "truncated", "valid")


class PopulationRollout:
    """Storage for ``steps`` steps of ``envs`` environments of each member; each rollout overwrites the previous one.

    What :class:`driftproof.learner.rollout.Rollout` stores of one agent, with a leading member axis.

    Args:
        policy: The members' policies.
        steps: Number of steps T.
        envs: Number of environments N of each member.
        chunk: Number of consecutive steps K that stay together in a minibatch. Where it does not divide T, the last
            chunk is padded.
    """

    def __init__(self, policy: StackedPolicy, steps: int, envs: int, chunk: int) -> None:
        self.members, self.steps, self.envs, self.chunk = policy.members, steps, envs, chunk
        self._like = single = Rollout(policy.like, steps, envs, chunk)
        self.device = single.device
        self.resets_memory = single.resets_memory
        self.observations: Observation = map_observation(single.observations, self._stacked)
        self.actions, self.parameters = self._stacked(single.actions), self._stacked(single.parameters)
        self.predictions = tuple(map(self._stacked, single.predictions))
        self.bootstraps = tuple(map(self._stacked, single.bootstraps))
        self.last_predictions = tuple(map(self._stacked, single.last_predictions))
        self.states = PolicyState(*(tuple(map(self._stacked, parts)) for parts in single.states))
        """Recurrent states at the starts of chunks ``[M, chunks, layers, N, units]``."""
        self.last_state = policy.initial_state(envs)
        """Recurrent state after the last step ``[M, layers, N, units]``."""
        self.rewards = self._zeros(torch.float32)
        self.starts, self.dones, self.truncated = (self._zeros(torch.bool) for _ in range(3))
        self.valid = ~self._zeros(torch.bool)

    def _stacked(self, part: Tensor) -> Tensor:
        return part.new_zeros(self.members, *part.shape)

    def _zeros(self, dtype: torch.dtype) -> Tensor:
        return torch.zeros(self.members, self.steps, self.envs, dtype=dtype, device=self.device)

    @property
    def resets(self) -> Tensor:
        """Where the recurrent state is reset ``[M, T, N]``."""
        return self.starts & self.resets_memory

    @property
    def experience(self) -> Experience:
        """Inputs of the advantage estimation."""
        flags = (self.rewards, self.dones, self.truncated, self.valid)
        return Experience(*flags, self.predictions, self.bootstraps, self.last_predictions)

    def part(self, first: int, last: int) -> PopulationRollout:
        """The rollouts of members ``first`` to ``last - 1``, as views."""
        view = copy.copy(self)
        view.members = last - first
        for name, value in vars(self).items():
            if isinstance(value, Tensor | dict | tuple):
                setattr(view, name, _sliced(value, slice(first, last)))
        return view

    def single(self, member: int) -> Rollout:
        """A member's rollout as a single agent has it: tensors are views; rewards and flags are copied to the host."""
        rollout = copy.copy(self._like)
        for name in (*_TENSORS, "last_state"):
            setattr(rollout, name, _sliced(getattr(self, name), member))
        for name in _FLAGS:
            setattr(rollout, name, getattr(self, name)[member].cpu().numpy())
        return rollout

    def store_state(self, step: int, state: PolicyState) -> None:
        """Store the recurrent state before a step, if a chunk starts there."""
        if step % self.chunk == 0:
            for stored, parts in zip(self.states, state, strict=True):
                for target, part in zip(stored, parts, strict=True):
                    target[:, step // self.chunk].copy_(part)

    def fill(self, member: int, rollout: Rollout) -> None:
        """Copy a single agent's rollout into a member's place."""
        for name in (*_TENSORS, "last_state", *_FLAGS):
            _fill(getattr(self, name), getattr(rollout, name), member)

    def minibatches(
        self,
        log_probs: Tensor,
        advantages: Tensor,
        targets: Tensor,
        chunks_per_batch: int,
        orders: Tensor,
        with_predictions: bool,
    ) -> Iterator[Minibatch]:
        """Minibatches of whole chunks ``[M, K, B]``, one pass for every order.

        Args:
            log_probs: Log-probabilities of the actions ``[M, T, N]``.
            advantages: Advantages ``[M, T, N]``.
            targets: Normalised returns ``[M, T, N]``.
            chunks_per_batch: Chunks per minibatch B.
            orders: Permutations of each member's ``⌈T / K⌉ * N`` chunks ``[epochs, M, chunks]``.
            with_predictions: Include the critics' predictions, for value clipping.
        """
        padding = -self.steps % self.chunk

        def chunked(part: Tensor) -> Tensor:
            """``[M, T, N, ...]`` to ``[M, chunks, K, ...]``, the last step repeated where T is too short."""
            if padding:
                part = torch.cat((part, part[:, -1:].expand(-1, padding, *part.shape[2:])), 1)
            chunks = part.reshape(self.members, -1, self.chunk, *part.shape[2:])
            return chunks.transpose(2, 3).flatten(1, 2)

        # Always there: whether all steps are transitions is for the device to know.
        valid = chunked(self.valid.float())
        if padding:
            valid[:, -self.envs :, -padding:] = 0
        everything = Minibatch(
            map_observation(self.observations, chunked),
            chunked(self.actions),
            chunked(self.parameters),
            chunked(log_probs),
            chunked(advantages),
            chunked(targets),
            tuple(chunked(p) for p in self.predictions) if with_predictions else (),
            valid,
            # [M, chunks, layers, N, units] to [M, chunks, layers, units].
            PolicyState(*(tuple(part.transpose(2, 3).flatten(1, 2) for part in parts) for parts in self.states)),
            None,
            chunked((~self.resets).float()) if self.states.actor or self.states.critic else None,
        )
        # The members' chunks as one row of chunks: selecting along one axis costs the host a third of indexing by two.
        everything = everything.map(lambda part: part.flatten(0, 1))
        first = torch.arange(self.members, device=self.device).unsqueeze(1) * orders.shape[-1]
        for order in orders.to(self.device, non_blocking=True) + first:
            for index in order.split(chunks_per_batch, 1):
                rows, shape = index.flatten(), index.shape

                def chosen(part: Tensor, rows: Tensor = rows, shape: torch.Size = shape) -> Tensor:
                    # [M * chunks, K or layers, ...] to [M, K or layers, B, ...].
                    return part.index_select(0, rows).view(*shape, *part.shape[1:]).transpose(1, 2)

                yield everything.map(chosen)


def _sliced(value: Any, members: slice | int) -> Any:
    if isinstance(value, Tensor):
        return value[members]
    if isinstance(value, dict):
        return {key: _sliced(part, members) for key, part in value.items()}
    parts = tuple(_sliced(part, members) for part in value)
    return type(value)(*parts) if isinstance(value, PolicyState) else parts


def _fill(target: Any, source: Any, member: int) -> None:
    if isinstance(target, Tensor):
        target[member].copy_(torch.as_tensor(source))
    elif isinstance(target, dict):
        for key, part in target.items():
            _fill(part, source[key], member)
    else:
        for part, given in zip(target, source, strict=True):
            _fill(part, given, member)
