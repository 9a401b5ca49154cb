"""Intervals of means, against an independent implementation and their nominal coverage."""

from __future__ import annotations

import numpy as np
import pytest
from arch.bootstrap import StationaryBootstrap, optimal_block_length

from driftproof._bootstrap import block_length, independent_interval, series_interval


def autoregressive(count, coefficient, seed):
    noise = np.random.default_rng(seed).normal(size=count)
    for i in range(1, count):
        noise[i] += coefficient * noise[i - 1]
    return noise


@pytest.mark.parametrize(("count", "coefficient"), [(60, 0.0), (300, 0.5), (2000, 0.8)])
def test_equals_arch(count, coefficient):
    series = autoregressive(count, coefficient, seed=1)
    theirs = max(float(optimal_block_length(series)["stationary"].iloc[0]), 1.0)
    assert block_length(series) == pytest.approx(theirs, rel=1e-9)
    low, high, block = series_interval(series)
    ends = StationaryBootstrap(block, series, seed=2).conf_int(np.mean, 2000, method="percentile").ravel()
    assert [low, high] == pytest.approx(ends, abs=0.1 * (high - low))


def test_dependence_widens_the_interval():
    """The interval of an autocorrelated mean holds 0 about as often as it says, that over single values does not."""
    held = {"series": 0, "values": 0}
    for seed in range(60):
        series = autoregressive(400, 0.7, seed)
        low, high, _ = series_interval(series)
        held["series"] += low <= 0 <= high
        low, high = independent_interval(series)
        held["values"] += low <= 0 <= high
    assert held["series"] >= 50
    assert held["values"] <= 45


@pytest.mark.parametrize("series", [np.zeros(50), np.ones(3), np.arange(4.0)])
def test_degenerate_series(series):
    low, high, block = series_interval(series)
    assert low <= series.mean() <= high
    assert block >= 1


def test_values_that_are_not_finite_have_no_interval():
    assert np.isnan(series_interval([1.0, np.nan, 2.0])[0])
