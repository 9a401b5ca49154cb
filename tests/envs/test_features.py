"""What is known of a market at the close of a bar, and what is not."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from driftproof.envs import FeatureConfig, compute_features, regime_bars
from driftproof.envs.features import LIMIT

SMALL = FeatureConfig(window=8, horizons=(1, 3, 8))
ROWS = 40


def prices(seed=0, rows=ROWS):
    return [column.copy() for column in regime_bars(rows, seed=seed).prices]


def plain_features(open, high, low, close, volume, config):
    """The same, bar by bar, from the formulas of the docstring."""
    rows = []
    for t in range(len(close)):
        if t < config.window:
            rows.append([math.nan] * len(config.names))
            continue
        x = [math.log(price) for price in close[: t + 1]]
        r = [x[i] - x[i - 1] for i in range(t - config.window + 1, t + 1)]
        s = math.sqrt(sum(change**2 for change in r) / len(r))
        quarter = r[-(config.window // 4) :]
        top, bottom = max(high[t - config.window + 1 : t + 1]), min(low[t - config.window + 1 : t + 1])
        mean = sum(volume[t - config.window + 1 : t + 1]) / config.window
        row = [(x[t] - x[t - h]) / (s * math.sqrt(h)) for h in config.horizons]
        row += [(x[t] - sum(x[t - h + 1 : t + 1]) / h) / (s * math.sqrt(h)) for h in config.horizons if h > 1]
        row.append(sum(a * b for a, b in zip(r[1:], r[:-1], strict=True)) / (len(r) - 1) / s**2)
        row.append((x[t] - x[t - config.window]) / sum(map(abs, r)))
        row.append(math.log(math.sqrt(sum(change**2 for change in quarter) / len(quarter)) / s))
        row.append(math.log(high[t] / low[t]) / s)
        row.append(math.log(close[t] / open[t]) / s)
        row.append((2 * close[t] - top - bottom) / (top - bottom))
        row.append(volume[t] / mean - 1)
        rows.append(row)
    return np.clip(rows, -LIMIT, LIMIT)


@pytest.mark.parametrize("config", [SMALL, FeatureConfig(), FeatureConfig(window=13, horizons=(5,))])
def test_they_are_what_their_formulas_say(config):
    columns = prices(rows=150)
    features = compute_features(*columns, config)
    assert features.shape == (150, len(config.names))
    np.testing.assert_allclose(features, plain_features(*columns, config), rtol=1e-9, atol=1e-9)


@given(
    row=st.integers(1, ROWS - 1),
    column=st.integers(0, 4),
    value=st.floats(1e-6, 1e9),
    seed=st.integers(0, 20),
)
def test_no_feature_looks_ahead(row, column, value, seed):
    """Changing any number of a future bar changes nothing before it, to the last bit."""
    columns = prices(seed)
    before = compute_features(*columns, SMALL)
    columns[column][row] = value
    after = compute_features(*columns, SMALL)
    np.testing.assert_array_equal(after[:row], before[:row])
    # Of the bar itself, and the window after it, something changes: the test would see it.
    assert row < SMALL.window or (after[row : row + SMALL.window] != before[row : row + SMALL.window]).any()


@pytest.mark.parametrize("name", FeatureConfig().names)
def test_every_feature_looks_at_the_present_and_not_ahead(name):
    config = FeatureConfig()
    columns, index = prices(rows=200), config.names.index(name)
    before = compute_features(*columns, config)[:, index]
    row = 150
    for column in columns:
        column[row] *= 1.5
    after = compute_features(*columns, config)[:, index]
    np.testing.assert_array_equal(after[:row], before[:row])
    assert (after[row:] != before[row:]).any()


@given(rows=st.integers(0, 80), seed=st.integers(0, 20))
def test_the_end_of_a_history_is_enough(rows, seed):
    columns = prices(seed, 100)
    whole = compute_features(*columns, SMALL)
    part = compute_features(*(column[rows:] for column in columns), SMALL)
    known = slice(SMALL.lookback - 1, None)
    np.testing.assert_array_equal(part[known], whole[rows:][known])
    assert np.isnan(part[: SMALL.lookback - 1]).all()


def test_a_wild_number_leaves_no_trace():
    columns = prices(rows=100)
    before = compute_features(*columns, SMALL)
    columns[3][10], columns[4][10] = 1e300, 1e300
    after = compute_features(*columns, SMALL)
    np.testing.assert_array_equal(after[10 + SMALL.lookback :], before[10 + SMALL.lookback :])


def test_they_do_not_depend_on_the_scale_of_prices_and_volumes():
    columns = prices(rows=100)
    scaled = [column * 1e4 for column in columns]
    np.testing.assert_allclose(compute_features(*scaled, SMALL), compute_features(*columns, SMALL), atol=1e-7)


def test_they_are_finite_where_nothing_moves():
    still = np.full(100, 3.0)
    for volume in (np.zeros(100), np.ones(100)):
        features = compute_features(still, still, still, still, volume, SMALL)[SMALL.lookback :]
        assert np.isfinite(features).all()
        assert (np.delete(features, SMALL.names.index("volatility"), 1) == 0).all()


@pytest.mark.parametrize("rows", [1, 8, 9, 30])
def test_tensors_of_many_markets_are_the_same(rows):
    markets = [prices(seed, rows) for seed in range(3)]
    batch = compute_features(*(torch.tensor(np.stack(column)) for column in zip(*markets, strict=True)), SMALL)
    assert batch.shape == (3, rows, len(SMALL.names))
    for market, features in zip(markets, batch, strict=True):
        np.testing.assert_allclose(features.numpy(), compute_features(*market, SMALL), atol=1e-12)


def test_a_million_rows_take_seconds():
    columns = [np.tile(column, 1000) for column in prices(rows=1000)]
    start = time.process_time()
    compute_features(*columns, FeatureConfig())
    assert time.process_time() - start < 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window": 4}, "Invalid window: 4"),
        ({"horizons": ()}, "one or more"),
        ({"horizons": (100,)}, "up to the window, 64"),
        ({"horizons": (2, 2)}, "each once"),
        ({"horizons": (0,)}, "Invalid horizons: 0"),
    ],
)
def test_nonsense_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        FeatureConfig(**arguments)
