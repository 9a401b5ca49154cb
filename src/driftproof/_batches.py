"""How rollouts are cut into sequences and minibatches. Plain numbers: configurations are checked without torch."""

from __future__ import annotations

import math

_LONGEST_DEFAULT_CHUNK = 32
_SHORTEST_DEFAULT_CHUNK = 8


def sequence_steps(steps: int, envs: int, batch_size: int, sequence_length: int | None, is_recurrent: bool) -> int:
    """Steps that stay together in minibatches, which must divide evenly.

    Args:
        steps: ``n_steps`` of every environment.
        envs: How many environments.
        batch_size: Samples in a minibatch.
        sequence_length: As it was given; ``None``: the largest divisor of ``steps`` up to 32.
        is_recurrent: Whether the policy has a memory.

    Raises:
        ValueError: They do not fit together; the message has numbers that do.
    """
    chunk = sequence_length
    if not is_recurrent:
        chunk = 1
    elif chunk is None:
        chunk = max(k for k in range(1, min(steps, _LONGEST_DEFAULT_CHUNK) + 1) if steps % k == 0)
        if chunk < min(steps, _SHORTEST_DEFAULT_CHUNK):
            raise ValueError(
                f"n_steps={steps} can be cut into sequences of {chunk} at most, too short to learn a memory: use a "
                f"multiple of {_LONGEST_DEFAULT_CHUNK}, or give sequence_length"
            )
    if steps % chunk:
        raise ValueError(f"sequence_length={chunk} does not divide n_steps={steps}; use one of {_divisors(steps)}")
    samples = steps * envs
    if batch_size % chunk or samples % batch_size:
        fitting = [b for b in _divisors(samples) if b % chunk == 0]
        near = sorted(sorted(fitting, key=lambda b: abs(b - batch_size))[:4])
        raise ValueError(
            f"batch_size={batch_size} does not fit: it must be a multiple of sequence_length={chunk} and divide "
            f"n_steps * n_envs = {steps} * {envs} = {samples}; use for example {', '.join(map(str, near))}"
        )
    return int(chunk)


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
