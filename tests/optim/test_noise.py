"""The cheap noise is sound: moments, independence between elements, steps and bits, and the generator's seed."""

from __future__ import annotations

import math

import pytest
import torch

from driftproof.optim._noise import draw_noise

CPU = torch.device("cpu")


def unit_noise(count: int) -> torch.Tensor:
    noise = draw_noise(count, CPU)
    assert noise.flat.shape == (count,)
    return noise.flat.double() * noise.scale


def test_zero_mean_unit_variance():
    count = 2_000_000
    noise = unit_noise(count)
    assert abs(noise.mean()) < 4 / math.sqrt(count)
    # Uniform: the fourth moment is 9/5, so the variance of a square is 4/5.
    assert abs(noise.square().mean() - 1) < 4 * math.sqrt(0.8 / count)


def test_distribution_is_exactly_symmetric_with_unit_variance():
    """Over all 256 bytes, each as likely as the others."""
    levels = torch.arange(-128, 128).bitwise_or(1).double()
    scale = draw_noise(1, CPU).scale
    assert levels.sum() == 0
    assert (levels * scale).square().mean().item() == pytest.approx(1.0, abs=1e-12)


def test_all_levels_are_equally_likely():
    count = 1_280_000
    counts = torch.bincount((draw_noise(count, CPU).flat.long() + 127) // 2, minlength=128).double()
    expected = count / 128
    chi_squared = ((counts - expected).square() / expected).sum().item()
    # 127 degrees of freedom: standard deviation 16.
    assert abs(chi_squared - 127) < 4 * 16


@pytest.mark.parametrize("lag", [1, 2, 3, 4, 7, 8, 16, 64, 1000])
def test_elements_are_uncorrelated(lag):
    count = 1_000_000
    noise = unit_noise(count)
    for transform in (lambda x: x, torch.abs, torch.square):
        values = transform(noise) - transform(noise).mean()
        correlation = (values[lag:] * values[:-lag]).mean() / values.square().mean()
        assert abs(correlation) < 4.5 / math.sqrt(count)


def test_steps_are_uncorrelated():
    count, steps = 100_000, 6
    draws = torch.stack([unit_noise(count) for _ in range(steps)])
    correlation = torch.corrcoef(draws) - torch.eye(steps)
    assert correlation.abs().max() < 4.5 / math.sqrt(count)


def test_bits_of_neighbours_are_independent():
    """Eight draws share a word of the generator: no bit of one may tell a bit of another."""
    words = draw_noise(800_000, CPU).flat.view(-1, 8).int()
    bits = torch.stack([(words >> b) & 1 for b in range(1, 8)], dim=-1).flatten(1).double()
    correlation = torch.corrcoef(bits.T) - torch.eye(56)
    assert correlation.abs().max() < 5 / math.sqrt(bits.shape[0])


def test_sum_of_many_draws_is_gaussian():
    """What a weight feels after many steps: skewness 0, kurtosis 3."""
    total = sum(unit_noise(200_000) for _ in range(64)) / 8
    assert abs(total.pow(3).mean()) < 0.03
    assert abs(total.pow(4).mean() - 3) < 0.1


@pytest.mark.parametrize("count", [1, 7, 8, 9, 1001])
def test_any_count_and_the_seed_decides(count):
    torch.manual_seed(1)
    first = draw_noise(count, CPU).flat.clone()
    torch.manual_seed(1)
    assert torch.equal(first, draw_noise(count, CPU).flat)
    assert not torch.equal(first, draw_noise(count, CPU).flat) or count == 1
