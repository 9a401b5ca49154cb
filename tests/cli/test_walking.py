"""Walk-forward tests: windows are runs, an interrupted test is resumed, and no window knows what comes after it."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from driftproof.envs import regime_bars, write_csv
from driftproof.envs.market_data import Bars
from tests.cli.commands import SMALL, call
from tests.cli.test_commands import error


@pytest.fixture
def prices(tmp_path):
    write(tmp_path / "prices.csv")
    return tmp_path / "prices.csv"


def write(path, changed_from=None):
    times = np.arange("2020-01-01", "2021-02-04", dtype="M8[D]").astype("M8[us]")
    bars = regime_bars(len(times), seed=1)
    factor = np.ones(len(times))
    if changed_from is not None:
        late = times >= np.datetime64(changed_from)
        factor[late] = np.random.default_rng(0).uniform(0.8, 1.2, late.sum())
    write_csv(path, Bars(times, *(each * factor for each in bars.prices), "ONE"))


def walk(capsys, tmp_path, prices, *options):
    (tmp_path / "market.yaml").write_text(
        "env: {kwargs: {episode_length: 16, features: {window: 16, horizons: [1, 4]}}}\nrun: {total_timesteps: 64}\n"
    )
    pairs = zip(SMALL[::2], SMALL[1::2], strict=True)
    settings = [word for pair in pairs if "episodes" not in pair[1] for word in pair]
    lengths = ["--train", "6mo", "--test", "3mo"]
    return call(
        capsys, "walkforward", tmp_path / "market.yaml", prices, *lengths, *settings, "--runs-dir", tmp_path, *options
    )


def result(folder):
    return json.loads((folder / "backtest.json").read_text())


def test_every_window_is_a_run_and_all_tests_are_one_backtest(prices, tmp_path, capsys):
    code, output, errors = walk(capsys, tmp_path, prices, "--name", "walk", "--warm")
    assert code == 0, errors
    root = tmp_path / "walk"
    assert sorted(path.name for path in root.glob("window_*")) == ["window_000", "window_001", "window_002"]
    assert "window 2 of 3: training 2020-04-01 to 2020-10-01, test 2020-10-01 to 2021-01-01" in output
    assert "out of sample, 2020-07-01 to 2021-02-03" in output
    assert "IN SAMPLE" not in output
    assert json.loads((root / "window_001" / "origin.json").read_text())["checkpoint"].startswith(
        str(root / "window_000")
    )
    saved = result(root)
    assert [part["sample"] for part in saved["parts"]] == ["out of sample"]
    assert saved["parts"][0]["performances"]["agent"]["bars"] == 217
    # A window is a run like any other.
    code, output, errors = call(capsys, "backtest", "window_001", prices, "--runs-dir", root)
    assert code == 0, errors
    assert "IN SAMPLE, 2020-01-17 to 2020-06-30" in output  # of the window before it
    assert "out of sample, after training, 2020-09-30 to" in output
    code, _, errors = call(capsys, "report", "walk", "--runs-dir", tmp_path)
    assert code == 0, errors


def test_an_interrupted_test_goes_on_where_it_was(prices, tmp_path, capsys):
    code, _, errors = walk(capsys, tmp_path, prices, "--name", "walk")
    assert code == 0, errors
    root = tmp_path / "walk"
    whole = result(root)
    trained = (root / "window_000" / "checkpoints").stat().st_mtime_ns
    shutil.rmtree(root / "window_002")
    (root / "backtest.json").unlink()
    code, _, errors = call(capsys, "walkforward", "--resume", "walk", "--runs-dir", tmp_path)
    assert code == 0, errors
    assert result(root) == whole
    assert (root / "window_000" / "checkpoints").stat().st_mtime_ns == trained


@pytest.mark.slow
def test_no_window_knows_what_comes_after_it(prices, tmp_path, capsys):
    walk(capsys, tmp_path, prices, "--name", "one", "--expanding")
    write(prices, changed_from="2020-11-15")
    walk(capsys, tmp_path, prices, "--name", "two", "--expanding")
    curves = [result(tmp_path / name)["parts"][0]["curves"] for name in ("one", "two")]
    before = [time < "2020-11-15" for time in curves[0]["time"]].count(True)
    equity = [curve["equity"]["agent"] for curve in curves]
    assert before > 100
    assert equity[0][:before] == equity[1][:before]
    assert equity[0][before:] != equity[1][before:]


def test_mistakes_are_one_line(prices, tmp_path, capsys):
    assert "give a CONFIG and a price file" in error(capsys, "walkforward")
    (tmp_path / "market.yaml").write_text("")
    start = ["walkforward", tmp_path / "market.yaml", prices, "--runs-dir", tmp_path]
    assert "end before a test after 9y of training" in error(capsys, *start, "--train", "9y")
    assert "Invalid test: '6 moons'" in error(capsys, *start, "--test", "6 moons")
    assert not list(tmp_path.glob("walkforward*"))
    assert "is not a walk-forward test" in error(capsys, "walkforward", "--resume", lone(tmp_path))


def lone(folder):
    (folder / "other").mkdir()
    (folder / "other" / "config.yaml").write_text("")
    return folder / "other"
