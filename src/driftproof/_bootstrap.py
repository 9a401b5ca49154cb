"""Bootstrap intervals of means: over independent values, and over a time series."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

DRAWS = 10_000
_SERIES_DRAWS = 2_000
_CHUNK = 2_000_000
"""Indices drawn at a time, which bounds the memory."""


def independent_interval(values: npt.ArrayLike, level: float = 0.95) -> tuple[float, float]:
    """Percentile interval of the mean of independent values."""
    array = np.asarray(values, dtype=np.float64)
    return _ends(np.random.default_rng(0).choice(array, size=(DRAWS, len(array))).mean(1), level)


def series_interval(values: npt.ArrayLike, level: float = 0.95) -> tuple[float, float, float]:
    """Percentile interval of the mean of a time series, by the stationary bootstrap, and the mean block length.

    Politis & Romano (1994), "The Stationary Bootstrap": blocks of geometric length keep the dependence of
    neighbouring values, and the series is taken as a circle.
    """
    series = np.asarray(values, dtype=np.float64)
    if not np.isfinite(series).all():
        return math.nan, math.nan, 1.0
    block = block_length(series)
    rng, count = np.random.default_rng(0), len(series)
    step = max(_CHUNK // count, 1)
    means = [_resampled(series, block, min(step, _SERIES_DRAWS - i), rng) for i in range(0, _SERIES_DRAWS, step)]
    return *_ends(np.concatenate(means), level), block


def block_length(series: npt.ArrayLike) -> float:
    """Mean block length of the stationary bootstrap that suits a series, at least 1.

    Politis & White (2004), with the correction of Patton, Politis & White (2009).
    """
    x = np.asarray(series, dtype=np.float64)
    count = len(x)
    x = x - x.mean()
    if count < 4 or not x.any():
        return 1.0
    near = max(5, int(math.log10(count)))
    farthest = min(math.ceil(math.sqrt(count)) + near, count - 2)
    covariance, correlation = np.zeros(farthest + 1), np.zeros(farthest + 1)
    for lag in range(farthest + 1):
        product = float(x[lag:] @ x[: count - lag])
        norms = float(x[lag + 1 :] @ x[lag + 1 :]) * float(x[: -(lag + 1)] @ x[: -(lag + 1)])
        covariance[lag] = product / count
        correlation[lag] = abs(product) / math.sqrt(norms) if norms > 0 else 0.0
    # The first lag from which on `near` correlations are negligible.
    small = correlation < 2 * math.sqrt(math.log10(count) / count)
    quiet = [lag for lag in range(farthest + 1 - near) if small[lag : lag + near].all()]
    lags = min(2 * max(quiet[0], 1), farthest) if quiet else farthest
    k = np.arange(1, lags + 1)
    window = np.where(k / lags <= 0.5, 1.0, 2 * (1 - k / lags))
    spectrum = float(covariance[0] + 2 * (window * covariance[1 : lags + 1]).sum())
    slope = float(2 * (window * k * covariance[1 : lags + 1]).sum())
    if spectrum == 0:
        return 1.0
    best = (2 * slope**2 / (2 * spectrum**2)) ** (1 / 3) * count ** (1 / 3)
    return float(np.clip(best, 1.0, max(math.ceil(min(3 * math.sqrt(count), count / 3)), 1)))


def _resampled(series: Array, block: float, draws: int, rng: np.random.Generator) -> Array:
    """Means of resampled series."""
    count = len(series)
    places = np.arange(count)
    is_start = rng.random((draws, count)) < 1 / block
    is_start[:, 0] = True
    start = np.maximum.accumulate(np.where(is_start, places, 0), axis=1)
    origin = np.take_along_axis(rng.integers(count, size=(draws, count)), start, axis=1)
    means: Array = series[(origin + places - start) % count].mean(1)
    return means


def _ends(means: Array, level: float) -> tuple[float, float]:
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2]).tolist()
    return low, high
