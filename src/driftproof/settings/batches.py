"""Split of rollouts into sequences and minibatches. Imports no torch: checks of configurations use it."""

from __future__ import annotations

from typing import NamedTuple

_LONGEST_DEFAULT_SEQUENCE = 128
_SEQUENCES_PER_BATCH = 2
"""Smallest number of sequences per minibatch by default: samples of a single sequence are too correlated."""

STEPS_AND_BATCH = {False: (2048, 64), True: (128, 128)}
"""Defaults of ``n_steps`` and ``batch_size`` without and with recurrence: those of PPO and of RecurrentPPO."""


class Batches(NamedTuple):
    """A rollout of ``n_steps * n_envs`` samples, split into minibatches of whole sequences.

    Attributes:
        sequence_length: Consecutive steps per sequence. The last sequence of an environment may be shorter.
        per_batch: Sequences in a minibatch. The last minibatch may have fewer.
        per_epoch: Minibatches per pass over the rollout.
        sequences: Sequences in the rollout.
    """

    sequence_length: int
    per_batch: int
    per_epoch: int
    sequences: int


def cut(n_steps: int, n_envs: int, batch_size: int, sequence_length: int | None, is_recurrent: bool) -> Batches:
    """Compute the split of a rollout.

    Args:
        n_steps: Steps of every environment.
        n_envs: Environments.
        batch_size: Samples per minibatch; if larger than the rollout, one minibatch holds all of it.
        sequence_length: Steps through which gradients flow; ``None``: at most 128 and half of ``batch_size``, in parts
            of about equal length.
        is_recurrent: Whether the policy has a recurrent core; without one, every step is a sequence.

    Raises:
        ValueError: Sequences are longer than the rollout.
    """
    length = 1
    if is_recurrent and sequence_length is None:
        longest = min(_LONGEST_DEFAULT_SEQUENCE, n_steps, max(1, batch_size // _SEQUENCES_PER_BATCH))
        length = _default_length(n_steps, longest)
    elif is_recurrent and sequence_length is not None:
        if sequence_length > n_steps:
            raise ValueError(
                f"sequence_length={sequence_length} is longer than the rollout of n_steps={n_steps}: use at most "
                f"{n_steps}"
            )
        length = int(sequence_length)
    sequences = _ceil(n_steps, length) * n_envs
    per_batch = sequences if batch_size >= n_steps * n_envs else max(1, batch_size // length)
    return Batches(length, per_batch, _ceil(sequences, per_batch), sequences)


def truncation(n_steps: int, n_envs: int, batch_size: int, batches: Batches) -> str | None:
    """Warning that the last minibatch is smaller than the others; ``None`` if all have the same size."""
    samples = n_steps * n_envs
    whole = batches.sequences // batches.per_batch
    rest = batches.sequences % batches.per_batch
    if batch_size <= samples and not rest:
        return None
    what = (
        f"there will be a truncated mini-batch of size {samples}"
        if batch_size > samples
        else f"after {whole} minibatches of {batches.per_batch * batches.sequence_length} samples there will be a "
        f"truncated mini-batch of size {rest * batches.sequence_length}"
    )
    return (
        f"batch_size={batch_size} does not divide the rollout of n_steps * n_envs = {n_steps} * {n_envs} = {samples} "
        f"samples: {what}. A factor of {samples} gives minibatches of equal size"
    )


def _default_length(n_steps: int, longest: int) -> int:
    """Return a divisor of ``n_steps`` near ``longest``, or else a length that gives about equal parts."""
    divisors = [length for length in range(_ceil(longest, 2), longest + 1) if n_steps % length == 0]
    return divisors[-1] if divisors else _ceil(n_steps, _ceil(n_steps, longest))


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)
