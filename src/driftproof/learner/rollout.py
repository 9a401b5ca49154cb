"""Rollout storage: ``n_steps`` steps of experience in tensors on the agent's device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from driftproof.learner.networks import Policy
from driftproof.nn.segments import Segments
from driftproof.nn.types import Observation, PolicyState, map_observation

_GATHERED_BYTES = 1 << 22
"""Largest memory of the observations of minibatches that are gathered at once."""

HostObservation: TypeAlias = "npt.NDArray[Any] | dict[str, npt.NDArray[Any]]"


class RolloutError(RuntimeError):
    """An environment returned values that cannot be trained on."""


_FAILURE = "driftproof_environment_failure"


def mark_failure(error: Exception, what: str) -> None:
    """Note on an environment's own exception which environment raised it, and when."""
    setattr(error, _FAILURE, what)
    # Shown below a traceback from Python 3.11 on.
    setattr(error, "__notes__", [*getattr(error, "__notes__", []), what])  # noqa: B010


def failure_of_environment(error: BaseException) -> str | None:
    """What :func:`mark_failure` noted; ``None`` if no environment raised this."""
    return str(error) if isinstance(error, RolloutError) else getattr(error, _FAILURE, None)


class Minibatch(NamedTuple):
    """Chunks of sequences ``[K, B, ...]``, and how to run a recurrent policy over them.

    Attributes:
        observations: Observations.
        actions: Actions before they were clipped or squashed for the environment.
        parameters: Parameters of the distribution that the actions were drawn from.
        log_probs: Log-probabilities of the actions when they were drawn.
        advantages: Normalised advantages.
        targets: Normalised returns.
        predictions: Each critic's predictions during the rollout; empty if not needed.
        valid: 0 where a step is not a transition, as a vector environment's reset; ``None``: all are.
        state: Recurrent state before the first step.
        segments: Where episodes start.
        keep: The same as a mask ``[K, B]``, for static shapes and kernels; ``None``: use ``segments``.
        attacked_segments: Where episodes start in the first sequences, which an adversary attacks.
    """

    observations: Observation
    actions: Tensor
    parameters: Tensor
    log_probs: Tensor
    advantages: Tensor
    targets: Tensor
    predictions: tuple[Tensor, ...]
    valid: Tensor | None
    state: PolicyState
    segments: Segments | None
    keep: Tensor | None
    attacked_segments: Segments | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> Minibatch:
        """Apply a function to every tensor, except segments."""
        return Minibatch(
            map_observation(self.observations, function),
            function(self.actions),
            function(self.parameters),
            function(self.log_probs),
            function(self.advantages),
            function(self.targets),
            tuple(map(function, self.predictions)),
            None if self.valid is None else function(self.valid),
            PolicyState(tuple(map(function, self.state.actor)), tuple(map(function, self.state.critic))),
            self.segments,
            None if self.keep is None else function(self.keep),
            self.attacked_segments,
        )


class Rollout:
    """Storage for ``steps`` steps of ``envs`` environments; each rollout overwrites the previous one.

    The recurrent state is stored only at the start of every chunk of ``chunk`` steps: the state before the step, reset
    where an episode starts there.

    Args:
        policy: Policy that acts in it.
        steps: Number of steps T.
        envs: Number of environments N.
        chunk: Number of consecutive steps K that stay together in a minibatch. Where it does not divide T,
            the last chunk is padded.
    """

    def __init__(self, policy: Policy, steps: int, envs: int, chunk: int) -> None:
        self.steps, self.envs, self.chunk = steps, envs, chunk
        self.device = device = policy.device
        shape = (steps, envs)
        distribution = policy.distribution
        self.observations = _storage(policy.observation_space, shape, device)
        self.actions = torch.zeros(*shape, *distribution.action_shape, dtype=distribution.action_dtype, device=device)
        self.parameters = torch.zeros(*shape, distribution.size, device=device)
        self.predictions = tuple(torch.zeros(*shape, head.outputs, device=device) for head in policy.heads)
        self.bootstraps = tuple(torch.zeros(*shape, head.outputs, device=device) for head in policy.heads)
        self.last_predictions = tuple(torch.zeros(envs, head.outputs, device=device) for head in policy.heads)
        initial = policy.initial_state(envs)
        self.states = PolicyState(*(self._state_storage(parts) for parts in initial))
        self.last_state = initial
        """Recurrent state after the last step."""
        # Rewards and flags stay on the host until the rollout ends.
        self.rewards = np.zeros(shape, dtype=np.float32)
        self.starts = np.zeros(shape, dtype=bool)
        self.resets_memory = not policy.lasting_memory
        """Whether the recurrent state is reset where episodes start."""
        self.dones = np.zeros(shape, dtype=bool)
        self.truncated = np.zeros(shape, dtype=bool)
        self.valid = np.ones(shape, dtype=bool)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Steps, environments, and steps of a chunk."""
        return self.steps, self.envs, self.chunk

    @property
    def resets(self) -> npt.NDArray[np.bool_]:
        """Where the recurrent state is reset ``[T, N]``."""
        return self.starts & self.resets_memory

    def _state_storage(self, parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """``[chunks, layers, N, units]`` for each part."""
        return tuple(part.new_zeros(-(-self.steps // self.chunk), *part.shape) for part in parts)

    def store_state(self, step: int, state: PolicyState) -> None:
        """Store the recurrent state before a step, if a chunk starts there."""
        if step % self.chunk == 0:
            for stored, parts in zip(self.states, state, strict=True):
                for target, part in zip(stored, parts, strict=True):
                    target[step // self.chunk].copy_(part)

    def minibatches(
        self,
        log_probs: Tensor,
        advantages: Tensor,
        targets: Tensor,
        chunks_per_batch: int,
        orders: list[Tensor],
        with_predictions: bool,
        static_shapes: bool,
        masks: bool = False,
        attacked: Callable[[int], int] | None = None,
    ) -> Iterator[Minibatch]:
        """Minibatches of whole chunks ``[K, B]``, one pass for every order.

        Args:
            log_probs: Log-probabilities of the actions ``[T, N]``.
            advantages: Advantages ``[T, N]``.
            targets: Normalised returns ``[T, N]``.
            chunks_per_batch: Chunks per minibatch B.
            orders: Permutations of the ``⌈T / K⌉ * N`` chunks, on the CPU.
            with_predictions: Include the critics' predictions, for value clipping.
            static_shapes: Give a mask of episode starts instead of segments, and fill the last minibatch up with
                chunks that do not count.
            masks: Give a mask of episode starts instead of segments.
            attacked: Maps the number of a minibatch's chunks to how many of them an adversary attacks.
        """
        padding = -self.steps % self.chunk

        def chunked(part: Tensor) -> Tensor:
            """``[T, N, ...]`` to ``[K, chunks, ...]``, the last step repeated where T is too short."""
            if padding:
                part = torch.cat((part, part[-1:].expand(padding, *part.shape[1:])))
            return part.view(-1, self.chunk, *part.shape[1:]).transpose(0, 1).flatten(1, 2)

        padded_starts = np.pad(self.resets, ((0, padding), (0, 0)))
        starts = padded_starts.reshape(-1, self.chunk, self.envs).swapaxes(0, 1).reshape(self.chunk, -1)
        is_whole = self.valid.all() and not padding
        valid = None if is_whole and not static_shapes else chunked(self._to_device(self.valid))
        if valid is not None and padding:
            valid[-padding:, -self.envs :] = 0
        keep = chunked(self._to_device(~self.resets)) if static_shapes or masks else None
        everything = Minibatch(
            map_observation(self.observations, chunked),
            chunked(self.actions),
            chunked(self.parameters),
            chunked(log_probs),
            chunked(advantages),
            chunked(targets),
            tuple(chunked(p) for p in self.predictions) if with_predictions else (),
            valid,
            # [chunks, layers, N, units] to [layers, chunks, units].
            PolicyState(*(tuple(part.transpose(0, 1).flatten(1, 2) for part in parts) for parts in self.states)),
            None,
            keep,
        )
        cuts_segments = bool(self.states.actor + self.states.critic) and keep is None
        # Without recurrence, samples of several minibatches are gathered at once, and each minibatch is a view of them.
        at_once = self._batches_at_once(chunks_per_batch) if self.chunk == 1 and not static_shapes else 1
        for block in (block for order in orders for block in torch.split(order, chunks_per_batch * at_once)):
            missing = -len(block) % chunks_per_batch if static_shapes else 0
            if missing:
                block = torch.cat((block, block[:1].expand(missing)))
            index = block.to(self.device, non_blocking=True)
            gathered = everything.map(lambda part, index=index: part.index_select(1, index))  # type: ignore[misc]
            if missing and gathered.valid is not None:
                gathered.valid[:, -missing:] = 0
            for start in range(0, len(block), chunks_per_batch):
                host_index = block[start : start + chunks_per_batch]
                batch = gathered
                if len(host_index) < len(block):
                    place = (1, start, len(host_index))
                    batch = gathered.map(lambda part, place=place: part.narrow(*place))  # type: ignore[misc]
                if cuts_segments:
                    own_starts = starts[:, host_index.numpy()]
                    batch = batch._replace(segments=Segments.cut(own_starts, self.device))
                    if attacked is not None:
                        first = Segments.cut(own_starts[:, : attacked(len(host_index))], self.device)
                        batch = batch._replace(attacked_segments=first)
                yield batch

    def _batches_at_once(self, samples: int) -> int:
        """How many minibatches of ``samples`` samples fit into the memory for gathering."""
        parts = self.observations.values() if isinstance(self.observations, dict) else [self.observations]
        sample = sum(part.nbytes for part in parts) // (self.steps * self.envs)
        return max(1, _GATHERED_BYTES // max(1, sample * samples))

    def _to_device(self, mask: npt.NDArray[np.bool_]) -> Tensor:
        return torch.from_numpy(mask.astype(np.float32)).to(self.device, non_blocking=True)


def check_observation(observation: HostObservation, step: int) -> None:
    """Refuse observations that are not finite.

    Raises:
        RolloutError: One is not finite; names the environment.
    """
    for key, part in observation.items() if isinstance(observation, dict) else [("", observation)]:
        if part.dtype.kind == "f" and not np.isfinite(part.sum()):
            _refuse(part, f"observation {key!r}" if key else "observation", step)


def check_rewards(rewards: npt.NDArray[Any], step: int) -> None:
    """Refuse rewards that are not finite.

    Raises:
        RolloutError: One is not finite; names the environment.
    """
    if not np.isfinite(rewards.sum()):
        _refuse(rewards, "reward", step)


def _refuse(values: npt.NDArray[Any], what: str, step: int) -> None:
    bad = ~np.isfinite(values.reshape(len(values), -1))
    if not bad.any():
        return  # Large values, whose sum overflows.
    env, place = (int(i) for i in np.argwhere(bad)[0])
    value = values.reshape(len(values), -1)[env, place]
    raise RolloutError(
        f"environment {env} returned the {what} {value} at step {step} of the rollout"
        + (f" (element {place})" if values.ndim > 1 else "")
        + "; this rollout was not trained on. Make the environment return finite numbers"
    )


def _storage(space: Any, shape: tuple[int, int], device: torch.device) -> Observation:
    """Zeros for observations of a space of Gymnasium, or of anything that has ``shape`` and ``dtype``."""
    if isinstance(parts := getattr(space, "spaces", None), Mapping):
        return {key: _tensor_storage(part, shape, device) for key, part in parts.items()}
    return _tensor_storage(space, shape, device)


def _tensor_storage(space: Any, shape: tuple[int, int], device: torch.device) -> Tensor:
    dtype = torch.from_numpy(np.zeros(1, dtype=space.dtype)).dtype
    if dtype == torch.float64:
        dtype = torch.float32
    return torch.zeros(*shape, *(space.shape or ()), dtype=dtype, device=device)
