"""Windows of walk-forward tests."""

from __future__ import annotations

import numpy as np
import pytest

from driftproof.backtest.windows import rows_between, stitched, windows
from driftproof.envs import Bars


def market(first, last):
    times = np.arange(first, last, dtype="M8[D]").astype("M8[us]")
    ones = np.ones(len(times))
    return {"A": Bars(times, ones, ones, ones, ones, ones, "A")}


def test_rolling_windows_follow_each_other():
    found = windows(market("2000-01-31", "2004-01-01"), "2y", "6mo")
    assert [window.train for window in found[:2]] == [("2000-01-31", "2002-01-31"), ("2000-07-31", "2002-07-31")]
    assert [window.test for window in found] == [
        ("2002-01-31", "2002-07-31"),
        ("2002-07-31", "2003-01-31"),
        ("2003-01-31", "2003-07-31"),
        ("2003-07-31", "2004-01-01"),
    ]
    assert all(window.train[1] == window.test[0] for window in found)


def test_expanding_windows_begin_with_the_data():
    found = windows(market("2000-01-01", "2004-01-01"), "2y", "1y", "6mo", expanding=True)
    assert {window.train[0] for window in found} == {"2000-01-01"}
    assert [window.test[0] for window in found] == ["2002-01-01", "2002-07-01", "2003-01-01", "2003-07-01"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("9y", "6mo"), "end before a test after 9y of training"),
        (("2 years", "6mo"), "Invalid train: '2 years'"),
        (("1mo", "6mo", "1x"), "Invalid step: '1x'"),
        (("1d", "1d", "1min"), "more than 1000 windows"),
    ],
)
def test_impossible_windows_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        windows(market("2000-01-01", "2004-01-01"), *arguments)


def test_tests_are_stitched_to_one_row_of_positions():
    bars = market("2000-01-01", "2000-01-11")["A"]
    parts = {
        ("2000-01-03", "2000-01-06"): np.array([np.nan, 0.1, 0.2]),
        ("2000-01-04", "2000-01-07"): np.array([np.nan, 0.3, 0.4]),
        ("2000-01-08", "2000-01-10"): np.array([0.5, 0.6]),
    }
    found = stitched(bars, parts)
    assert np.isnan(found[:3]).all()
    assert found[3:].tolist() == [0.1, 0.3, 0.4, 0, 0.5, 0.6, 0]
    assert rows_between(bars, "2000-01-03", "2000-01-05", before=5) == slice(0, 4)
