"""Files of signals."""

import csv

import numpy as np
import pytest

from driftproof.signals import Signals, infer

from .agents import FEATURES, agent, market

COLUMNS = ["timestamp", "symbol", "signal", "close", "score", "p10", "p50", "p90", "cvar"]


@pytest.fixture(scope="module")
def signals():
    return infer(agent(), {symbol: market(30, i) for i, symbol in enumerate(("A", 'B, "C"'))}, features=FEATURES)


def test_csv(signals, tmp_path):
    path = signals.write(tmp_path / "new" / "signals.csv")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == COLUMNS
    assert len(rows) == len(signals) == 60
    for name in ("symbol", "signal"):
        assert [row[name] for row in rows] == getattr(signals, name).tolist()
    assert [row["timestamp"] for row in rows[:3]] == ["2000-01-01T00:00:00Z"] * 2 + ["2000-01-01T01:00:00Z"]
    np.testing.assert_array_equal([float(row["close"]) for row in rows], signals.close)
    assert rows[0]["score"] == rows[0]["cvar"] == ""
    for name in COLUMNS[4:]:
        np.testing.assert_allclose(
            [float(row[name] or "nan") for row in rows], getattr(signals, name), rtol=1e-8, atol=0
        )


def test_parquet(signals, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    table = parquet.read_table(signals.write(tmp_path / "signals.parquet"))
    assert table.column_names == COLUMNS
    assert str(table.schema.field("timestamp").type) == "timestamp[us, tz=UTC]"
    assert table["symbol"].to_pylist() == signals.symbol.tolist()
    assert table["score"].null_count == np.isnan(signals.score).sum() == 2 * (FEATURES.lookback - 1)
    np.testing.assert_array_equal(table["score"].to_numpy(), signals.score)


def test_fractions_of_seconds_are_kept():
    times = np.array(["2024-01-01T00:00:00", "2024-01-01T00:00:00.25"], "M8[us]")
    nothing, one = np.full(2, np.nan), np.ones(2)
    said = Signals(times, np.array(["A", "A"]), np.array(["HOLD", "BUY"]), one, one, nothing, nothing, nothing, nothing)
    assert list(said.lines()) == [
        "2024-01-01T00:00:00Z,A,HOLD,1.0,1,,,,",
        "2024-01-01T00:00:00.250000Z,A,BUY,1.0,1,,,,",
    ]


def test_other_endings_are_refused(signals, tmp_path):
    with pytest.raises(ValueError, match=r"signals.txt: must end in .csv or .parquet"):
        signals.write(tmp_path / "signals.txt")
    assert not list(tmp_path.iterdir())
