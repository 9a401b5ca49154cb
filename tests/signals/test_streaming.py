"""Signals of bars as they come are those of the whole history, and mistakes in lines are named."""

import csv
import datetime
import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driftproof.envs import Bars, FeatureConfig, MarketDataError, compute_features, write_csv
from driftproof.signals import RunningFeatures, infer, stream

from .agents import FEATURES, agent, market
from .test_infer import KINDS


def interleaved(folder, *markets):
    """Lines of a file in which markets take turns."""
    write_csv(folder / "prices.csv", *markets)
    header, *lines = (folder / "prices.csv").read_text().splitlines(keepends=True)
    return [header, *sorted(lines)]


def rows(lines):
    return list(csv.DictReader(io.StringIO("\n".join(lines))))


@pytest.mark.parametrize("kind", KINDS)
def test_one_by_one_is_the_same_as_all_at_once(kind, tmp_path):
    model = agent(**KINDS[kind])
    markets = [market(60, 0, "A"), market(40, 1, "B")]
    answers = []
    count = stream(model, interleaved(tmp_path, *markets), answers.append, features=FEATURES, cvar_alpha=0.3)
    assert count == 100
    expected = infer(model, {bars.symbol: bars for bars in markets}, features=FEATURES, cvar_alpha=0.3)
    found = rows(answers)
    assert len(found) == len(expected)
    assert [row["signal"] for row in found] == expected.signal.tolist()
    assert [(row["timestamp"], row["symbol"]) for row in found] == [
        (row["timestamp"], row["symbol"]) for row in rows([answers[0], *expected.lines()])
    ]
    for name in ("score", "p10", "p50", "p90", "cvar"):
        numbers = [float(row[name] or "nan") for row in found]
        np.testing.assert_allclose(numbers, getattr(expected, name), atol=1e-6)


def test_each_line_is_answered_before_the_next_is_read(tmp_path):
    lines, answers = interleaved(tmp_path, market(20)), []

    def feed():
        for i, line in enumerate(lines):
            assert len(answers) == max(i, 1)
            yield line

    stream(agent(), feed(), answers.append, features=FEATURES)
    assert len(answers) == len(lines) == 21


@settings(max_examples=50)
@given(
    steps=st.lists(st.floats(-0.5, 0.5), min_size=20, max_size=80),
    window=st.integers(8, 19),
    start=st.floats(1e-3, 1e6),
    seed=st.integers(0, 2**16),
)
def test_running_features_are_those_of_the_whole(steps, window, start, seed):
    close = start * np.exp(np.cumsum(steps))
    rng = np.random.default_rng(seed)
    open_ = np.append(start, close[:-1])
    high, low = np.maximum(open_, close) * (1 + rng.random(len(close))), np.minimum(open_, close) * 0.9
    bars = Bars(np.arange(len(close)).astype("M8[us]"), open_, high, low, close, rng.random(len(close)))
    config = FeatureConfig(window=window, horizons=(1, 8))
    whole, running = compute_features(*bars.prices, config), RunningFeatures(config)
    for i in range(len(bars)):
        one = Bars(bars.timestamps[i : i + 1], *(prices[i : i + 1] for prices in bars.prices))
        found = running.push(one)
        if i < config.lookback - 1:
            assert found is None
        else:
            np.testing.assert_allclose(found, whole[i], rtol=1e-6, atol=1e-6)


HEADER = "timestamp,symbol,open,high,low,close,volume"
GOOD = ["2024-01-02T09:00:00Z,A,10,11,9,10.5,100", "2024-01-02T10:00:00Z,A,10.5,11,10,10.8,100"]
MISTAKES = {
    "nothing": ([], "input: is empty"),
    "no close": (["timestamp,open,high,low,volume"], "input, row 1: there is no column 'close'"),
    "NaN": ([HEADER, *GOOD, "2024-01-02T11:00:00Z,A,10,11,nan,10.5,100"], "input, row 4: low is nan"),
    "text": ([HEADER, *GOOD, "2024-01-02T11:00:00Z,A,10,11,9,high,100"], "input, row 4: close 'high' is not a number"),
    "empty cell": ([HEADER, *GOOD, "2024-01-02T11:00:00Z,A,10,11,9,,100"], "input, row 4: close is empty"),
    "twice": ([HEADER, *GOOD, GOOD[1]], "input, row 4: 2024-01-02T10:00:00 is already in row 3"),
    "backwards": ([HEADER, *reversed(GOOD)], "input, row 3: 2024-01-02T09:00:00 comes after"),
    "gap": ([HEADER, *GOOD, "2024-02-02T11:00:00Z,A,10,11,9,10.5,100"], "input, row 4: nothing between"),
    "day or month": ([HEADER, "2/1/24,A,10,11,9,10.5,100"], "input, row 2: timestamp '2/1/24' is no date"),
    "short line": ([HEADER, *GOOD, "2024-01-02T11:00:00Z,A,10"], "input, row 4: has 3 columns, and the header 7"),
    "high below low": ([HEADER, "2024-01-02T09:00:00Z,A,10,9,9,10.5,100"], "input, row 2: high is below open or close"),
    "price of nothing": ([HEADER, "2024-01-02T09:00:00Z,A,10,11,0,10.5,100"], "input, row 2: low is 0; it must be"),
    "no symbol": ([HEADER, "2024-01-02T09:00:00Z,,10,11,9,10.5,100"], "input, row 2: symbol is empty"),
    "quotes": ([HEADER, '"2024-01-02T09:00:00Z"x,A,10,11,9,10.5,100'], "input, row 2: is not CSV"),
    "empty line first": (["", HEADER, *GOOD], "input, row 1: there is no column 'timestamp'"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_lines_are_named(mistake):
    lines, message = MISTAKES[mistake]
    answers = []
    with pytest.raises(MarketDataError, match=message):
        stream(agent(), lines, answers.append, features=FEATURES)
    answered = len(lines) - 1 if len(lines) > 1 and "row 1:" not in message else 1
    assert len(answers) == answered


@pytest.mark.parametrize("mistake", sorted(MISTAKES.keys() - {"gap"}))
def test_mistakes_in_files_are_named(mistake, tmp_path):
    lines, message = MISTAKES[mistake]
    path = tmp_path / "prices.csv"
    path.write_text("".join(f"{line}\n" for line in lines))
    message = message.replace("input", "prices.csv")
    with pytest.raises(MarketDataError, match=message):
        infer(agent(), path, features=FEATURES)


def test_gaps_in_files_are_named(tmp_path):
    write_csv(tmp_path / "prices.csv", market(60))
    lines = (tmp_path / "prices.csv").read_text().splitlines()
    (tmp_path / "prices.csv").write_text("\n".join(lines[:30] + lines[40:]))
    with pytest.raises(MarketDataError, match=r"prices.csv, row 31: nothing between"):
        infer(agent(), tmp_path / "prices.csv", features=FEATURES, load={"max_gap": datetime.timedelta(hours=9)})


def test_columns_zones_and_gaps_can_be_told():
    lines = [
        "Date,open,high,low,close,volume",
        "2024-01-02 09:00,10,11,9,10.5,100",
        "2024-03-02 09:00,10,11,9,10.5,100",
    ]
    options = {"columns": {"timestamp": "Date"}, "timezone": "Europe/Berlin", "symbol": "DAX"}
    answers = []
    stream(agent(), lines, answers.append, features=FEATURES, max_gap=90, **options)
    assert answers == [
        "timestamp,symbol,signal,close,score,p10,p50,p90,cvar",
        "2024-01-02T08:00:00Z,DAX,HOLD,10.5,,,,,",
        "2024-03-02T08:00:00Z,DAX,HOLD,10.5,,,,,",
    ]


def test_agent_comes_from_a_file_and_foreign_files_are_refused(tmp_path):
    from driftproof.state import CheckpointError

    agent().save(tmp_path / "agent")
    lines, answers = interleaved(tmp_path, market(20)), []
    assert stream(tmp_path / "agent", lines, answers.append, features=FEATURES) == 20
    (tmp_path / "other.zip").write_bytes(b"no agent")
    with pytest.raises(CheckpointError):
        stream(tmp_path / "other.zip", lines, answers.append)


def test_marks_at_the_beginning_of_files_are_no_part_of_a_name():
    answers = []
    assert stream(agent(), ["\ufeff" + HEADER, *GOOD], answers.append, features=FEATURES) == 2
