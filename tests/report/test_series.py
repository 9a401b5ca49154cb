"""Series for pictures: nothing that the eye would look for is lost, and what is shown together belongs together."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from driftproof.report.series import Life, plain, spread, thin, together

VALUES = st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), min_size=1, max_size=400)


@given(VALUES, st.integers(10, 60))
def test_thinning_keeps_ends_extremes_and_gaps(values, limit):
    y = np.array(values)
    x = np.arange(len(y), dtype=float)
    thin_x, thin_y = thin(x, y, limit)
    assert len(thin_x) <= max(limit, 5)
    np.testing.assert_array_equal(y[thin_x.astype(int)], thin_y)  # points of the line, in their places
    assert list(thin_x) == sorted(set(thin_x))
    assert (thin_x[0], thin_x[-1]) == (x[0], x[-1])
    assert np.isnan(thin_y).any() == np.isnan(y).any()
    if np.isfinite(y).any():
        assert (np.nanmin(thin_y), np.nanmax(thin_y)) == (np.nanmin(y), np.nanmax(y))


def test_every_spike_and_every_gap_of_a_long_line_survives():
    y = np.zeros(100_000)
    spikes = [7, 31_234, 31_999, 50_001, 77_777]
    y[spikes] = [5, -3, 4, math.nan, 2]
    thin_x, _ = thin(np.arange(len(y), dtype=float), y)
    assert len(thin_x) <= 2_000
    assert set(spikes) <= set(thin_x.astype(int))


def test_short_lines_stay_as_they_are():
    x, y = np.arange(2_000.0), np.arange(2_000.0) ** 2
    assert thin(x, y) == (x, y)


def test_rows_without_a_metric_are_left_out():
    life = Life([{"step": 1}, {"step": 2, "a": 5.0}, {"step": 3, "a": math.nan}])
    steps, values = life.column("a")
    assert steps.tolist() == [2, 3]
    assert values[0] == 5
    assert math.isnan(values[1])
    assert life.last("a") == 5
    assert (life.steps, life.end, life.metrics) == ([1, 2, 3], 3, {"a"})
    assert life.column("b")[0].shape == (0,)
    assert math.isnan(life.last("b"))


def test_lives_meet_at_the_same_steps():
    first = [{"step": 0, "a": 0.0}, {"step": 10, "a": 10.0}]
    second = [{"step": 5, "a": 100.0}]
    steps, values = together([Life(first), Life(second), Life([{"step": 5}])], "a")
    assert steps.tolist() == [0, 5, 10]
    np.testing.assert_array_equal(values, [[0, 5, 10], [math.nan, 100, math.nan], [math.nan] * 3])


def test_the_spread_is_that_of_what_is_known():
    values = np.array([[0.0, 1.0, math.nan], [10.0, math.nan, math.nan], [5.0, math.inf, math.nan]])
    low, middle, high = spread(values)
    assert (low[0], middle[0], high[0]) == (1, 5, 9)
    assert low[1] == middle[1] == high[1] == 1
    assert math.isnan(middle[2])


@given(arrays(float, array_shapes(min_dims=2, max_dims=2), elements=st.floats(-1e6, 1e6) | st.just(math.nan)))
def test_the_spread_is_numpys(values):
    values[0, 0] = 1.0
    known = np.isfinite(values).any(0)
    expected = np.nanquantile(values[:, known], (0.1, 0.5, 0.9), axis=0)
    np.testing.assert_allclose(np.array(spread(values))[:, known], expected, rtol=1e-9, atol=1e-6)
    assert np.isnan(np.array(spread(values))[:, ~known]).all()


def test_numbers_are_what_json_has():
    assert plain([1.0, math.nan, math.inf, 12_345_678_901.0, 1 / 3]) == [1, None, None, 12_345_678_901, 0.3333333]
    assert plain([[1.5], [math.nan]]) == [[1.5], [None]]


@pytest.mark.parametrize(
    ("logged", "expected"),
    [
        ([0, 0, 1, 1, 2], [(1, 0), (3, 1), (5, 2)]),
        ([0, math.nan, 0, 1], [(1, 0), (4, 1)]),
        ([], []),
    ],
)
def test_a_phase_begins_where_its_number_changes(logged, expected):
    rows = [{"step": step, "drift/phase": float(phase)} for step, phase in enumerate(logged, 1)]
    assert Life(rows).phases() == expected
