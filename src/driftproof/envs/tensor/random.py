"""Random numbers as a function of a key and a counter, in integer arithmetic that is the same on every device.

SplitMix64 of Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014: the counter-th output of a
generator that starts at the key.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


_INCREMENT = _signed(0x9E3779B97F4A7C15)
_FIRST, _SECOND = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def stream_keys(seeds: Tensor) -> Tensor:
    """Start of the stream of each seed, of int64."""
    return _mixed(seeds * _SECOND + _INCREMENT)


def uniform(keys: Tensor, counters: Tensor) -> Tensor:
    """Uniform numbers in [0, 1), in float64.

    Args:
        keys: Streams, as :func:`stream_keys` returns them.
        counters: Which number of the stream; of a shape that broadcasts with ``keys``.
    """
    return _shifted(_mixed(keys + counters * _INCREMENT), 11).double() * 2.0**-53


def normal(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Two standard normal numbers from two uniform ones, by Box and Muller."""
    radius, angle = torch.sqrt(-2 * torch.log1p(-first)), 2 * torch.pi * second
    return radius * torch.cos(angle), radius * torch.sin(angle)


def _mixed(z: Tensor) -> Tensor:
    z = (z ^ _shifted(z, 30)) * _FIRST
    z = (z ^ _shifted(z, 27)) * _SECOND
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Shifted to the right, with zeros from the left; torch repeats the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
