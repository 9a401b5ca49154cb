"""Cheap noise for perturbing weights: independent draws with zero mean and unit variance.

The noise is uniform, not Gaussian. A weight receives one small draw per step, so what it feels is a sum of
many, and such a sum depends on the first two moments of the draws alone (Kloeden & Platen, *Numerical Solution
of Stochastic Differential Equations*, 1992, §14.1: simplified weak schemes). On a CPU, where torch generates
random numbers on one core, that freedom makes the noise several times cheaper: every 64-bit word of the
generator yields eight draws, one per byte.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

_LOWEST_BIT_OF_EACH_BYTE = 0x0101010101010101
# The bytes are the odd numbers in [-127, 127]: 64 magnitudes, whose squares average (4 * 64^2 - 1) / 3.
_BYTE_STD = math.sqrt((4 * 64**2 - 1) / 3)
_UNIFORM_BOUND = math.sqrt(3)


class RawNoise(NamedTuple):
    """Noise as the generator left it: ``flat * scale`` has zero mean and unit variance."""

    flat: Tensor
    scale: float


NoiseSource: TypeAlias = Callable[[int, torch.device], RawNoise]
"""Function that draws a number of values on a device."""


def noise_scale(device: torch.device) -> float:
    """The scale of the noise that :func:`draw_noise` draws on a device."""
    return 1.0 / _BYTE_STD if device.type == "cpu" else 1.0


def draw_noise(count: int, device: torch.device) -> RawNoise:
    """Draw independent numbers from the device's default generator: bytes on a CPU, floats elsewhere."""
    if device.type != "cpu":
        flat = torch.empty(count, dtype=torch.float32, device=device).uniform_(-_UNIFORM_BOUND, _UNIFORM_BOUND)
        return RawNoise(flat, noise_scale(device))
    words = torch.empty((count + 7) // 8, dtype=torch.int64, device="cpu")
    words.random_(-(2**63), None)  # all 64 bits
    # Odd numbers only: a range symmetric about zero, so that the mean is exactly zero.
    words.bitwise_or_(_LOWEST_BIT_OF_EACH_BYTE)
    return RawNoise(words.view(torch.int8)[:count], noise_scale(device))
