"""What commands make of trained agents: pages, signals, files for other programs, returns under attack."""

from __future__ import annotations

import csv
import io
import json
import sys

import numpy as np
import onnxruntime
import pytest

from driftproof.envs import regime_bars, write_csv
from driftproof.runs.folder import RunFolder
from tests.cli.commands import SMALL, call
from tests.cli.test_commands import LIMIT, error

MARKET = ["--set", "env.id=driftproof/RegimeMarket-v0", "--set", "env.kwargs.episode_length=16"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of a market, with features that are not the default, and of something else."""
    folder = tmp_path_factory.mktemp("runs")
    features = ["--set", "env.kwargs.features={window: 16, horizons: [1, 4]}"]

    class Capture:
        def readouterr(self):
            return type("Nothing", (), {"out": "", "err": ""})

    for name, env in (("market", [*MARKET, *features]), ("pole", ["--env", "CartPole-v1"])):
        code, _, _ = call(Capture(), "train", *env, *SMALL, *LIMIT, "--runs-dir", folder, "--name", name)
        assert code == 0
    write_csv(folder / "prices.csv", regime_bars(60, seed=1, symbol="ONE"), regime_bars(40, seed=2, symbol="TWO"))
    return folder


def test_a_run_that_somebody_is_at_work_on_is_left_alone(runs, capsys):
    with RunFolder(runs / "pole").locked():
        said = error(capsys, "train", "--resume", "pole", "--runs-dir", runs)
    assert said == f"{runs}/pole: another process is using this run; wait for it, or end it"


def test_a_population_that_somebody_is_at_work_on_is_left_alone(tmp_path, capsys):
    search = ["--set", "pbt.population_size=2", "--set", "pbt.backend=inline", "--set", "pbt.perturbation_interval=1"]
    call(capsys, "tune", "--env", "CartPole-v1", *SMALL, *LIMIT, *search, "--runs-dir", tmp_path, "--name", "run")
    with RunFolder(tmp_path / "run").locked():
        said = error(capsys, "tune", "--resume", "run", "--runs-dir", tmp_path)
    assert said == f"{tmp_path}/run: another process is using this run; wait for it, or end it"


def rows(text):
    return list(csv.DictReader(io.StringIO(text)))


def test_reports_are_written_where_runs_are(runs, capsys):
    code, output, _ = call(capsys, "report", "market", "--runs-dir", runs)
    assert code == 0
    assert output == f"written to {runs}/market/report.html\n"
    assert "buy and hold" in (runs / "market" / "report.html").read_text()
    code, output, _ = call(capsys, "report", runs / "market", "pole", "--runs-dir", runs)
    assert output == f"written to {runs}/report.html\n"
    assert "--output x.pdf must end in .html" in error(capsys, "report", "market", "--output", "x.pdf")
    assert "there is no run 'nowhere'; the runs in" in error(capsys, "report", "nowhere", "--runs-dir", runs)


def test_signals_are_those_of_the_runs_features_in_both_modes(runs, capsys, monkeypatch, tmp_path):
    code, output, errors = call(capsys, "infer", "market", runs / "prices.csv", "--runs-dir", runs)
    assert code == 0, errors
    assert output.startswith("100 rows: ")
    said = rows((runs / "market" / "signals.csv").read_text())
    assert list(said[0]) == ["timestamp", "symbol", "signal", "close", "score", "p10", "p50", "p90", "cvar"]
    with open(runs / "prices.csv") as lines:
        monkeypatch.setattr(sys, "stdin", lines)
        code, output, errors = call(capsys, "infer", "market", "--stream", "--runs-dir", runs)
    assert code == 0, errors
    streamed = {(row["timestamp"], row["symbol"]): row for row in rows(output)}
    assert len(streamed) == 100
    for row in said:
        other = streamed[row["timestamp"], row["symbol"]]
        assert row["signal"] == other["signal"]
        if row["score"]:
            assert float(row["score"]) == pytest.approx(float(other["score"]), abs=1e-6)
    options = ["--buy", "0", "--sell", "-1", "--deadzone", "0", "--output", tmp_path / "all.csv"]
    call(capsys, "infer", "market", runs / "prices.csv", *options, "--runs-dir", runs)
    assert {row["signal"] for row in rows((tmp_path / "all.csv").read_text()) if row["score"] > "0"} == {"BUY"}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["market"], "give either a price file, or --stream"),
        (["market", "x.csv", "--stream"], "give either a price file, or --stream"),
        (["market", "--stream", "--output", "x.csv"], "--stream writes to standard output"),
        (["market", "nowhere.csv"], "nowhere.csv: there is no such file"),
        (["market", "PRICES", "--output", "x.txt"], "--output x.txt must end in .csv or .parquet"),
        (["market", "PRICES", "--buy", "-0.9"], "buy"),
        (["market", "PRICES", "--column", "timestamp"], "--column timestamp must be OURS=THEIRS"),
        (["market", "PRICES", "--column", "timestamp=Date"], "Date"),
        (["pole", "PRICES"], "the agent observes Box"),
    ],
)
def test_mistakes_about_signals_are_one_line(runs, capsys, arguments, problem, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = [str(runs / "prices.csv") if word == "PRICES" else word for word in arguments]
    assert problem in error(capsys, "infer", *given, "--runs-dir", runs)


def test_agents_are_exported(runs, capsys, tmp_path):
    code, _, errors = call(capsys, "export", "pole", "--onnx", tmp_path / "pole.onnx", "--runs-dir", runs)
    assert code == 0, errors
    session = onnxruntime.InferenceSession(tmp_path / "pole.onnx")
    action, *_ = session.run(["action"], {"observation": np.zeros((3, 4), np.float32)})
    assert action.shape == (3,)


def test_agents_are_evaluated_under_attack(runs, capsys):
    options = ["--attack", "random", "--attack", "mad", "--epsilon", 0.5, "--episodes", 2, "--runs-dir", runs]
    code, output, errors = call(capsys, "evaluate", "pole", *options)
    assert code == 0, errors
    assert "95% interval" in output
    results = json.loads((runs / "pole" / "attacks.json").read_text())["results"]
    found = [(result["attack"], result["epsilon"]) for result in results]
    assert found == [("clean", 0), ("random", 0.5), ("mad", 0.5)]
    clean = json.loads((runs / "pole" / "evaluation.json").read_text())
    assert results[0]["returns"] == clean["returns"], "the same episodes"
    line = error(capsys, "evaluate", "pole", "--attack", "foo", "--runs-dir", runs)
    assert line == "--attack 'foo' must be one of random, mad, critic, learned, or all"


def daily_file(path, days, bars):
    """Prices with dates as 31/12/2020, without volume."""
    rows = [f"{str(day)[8:]}/{str(day)[5:7]}/{str(day)[:4]}," for day in days]
    numbers = zip(*bars.prices[:4], strict=True)
    lines = [row + ",".join(map(repr, map(float, each))) for row, each in zip(rows, numbers, strict=True)]
    path.write_text("\n".join(["When,O,H,L,C", *lines]))
    return lines


@pytest.fixture
def daily(capsys, tmp_path):
    """A run in a market of a file, and the lines of the file."""
    path = tmp_path / "prices.csv"
    days = np.arange("2020-01-01", "2021-02-04", dtype="M8[D]")
    lines = daily_file(path, days, regime_bars(400, seed=1))
    features = ["--set", "env.kwargs.features={window: 16, horizons: [1, 4], volume: false}"]
    market = ["--env", "driftproof/Market-v0", "--set", f"env.kwargs.data={path}", *features]
    load = ["--set", "env.kwargs.load={columns: {timestamp: When}}", "--set", "env.kwargs.episode_length=16"]
    code, _, errors = call(capsys, "train", *market, *load, *SMALL, *LIMIT, "--runs-dir", tmp_path, "--name", "daily")
    assert code == 0, errors
    return path, lines


def test_prices_are_read_as_the_run_read_them(daily, capsys, tmp_path):
    path, lines = daily
    # The beginning of the file alone would not tell days from months.
    path.write_text("\n".join(["When,O,H,L,C", *lines[:12], *lines[31:43]]))
    code, _, errors = call(capsys, "infer", "daily", path, "--max-gap", "40", "--runs-dir", tmp_path)
    assert code == 0, errors
    said = rows_in(tmp_path / "daily" / "signals.csv")
    assert said[12]["timestamp"] == "2020-02-01T00:00:00Z"
    assert len(said) == 24
    hours = tmp_path / "hours.csv"
    write_csv(hours, regime_bars(60, seed=1))
    for command in ("infer", "backtest"):
        assert "are 1h apart, but 1d is expected" in error(capsys, command, "daily", hours, "--runs-dir", tmp_path)
        code, _, errors = call(capsys, command, "daily", hours, "--any-frequency", "--runs-dir", tmp_path)
        assert code == 0, errors


def test_backtests_tell_what_was_trained_on_and_what_was_not(daily, runs, capsys, tmp_path):
    out = tmp_path / "out"
    code, output, errors = call(capsys, "backtest", "daily", daily[0], "--runs-dir", tmp_path, "--out", out)
    assert code == 0, errors
    assert "trained on training split of prices, 2020-01-17 to 2020-10-06" in output
    assert "IN SAMPLE, 2020-01-17 to 2020-10-06" in output
    assert "out of sample, after training, 2020-10-06 to 2021-02-03" in output
    saved = json.loads((tmp_path / "daily" / "backtest.json").read_text())
    assert [part["sample"] for part in saved["parts"]] == ["in sample", "out of sample"]
    assert saved == json.loads((out / "backtest.json").read_text())
    assert sum(float(row["log_return"]) for row in rows_in(out / "equity.csv")) == pytest.approx(
        sum(part["performances"]["agent"]["log_return"] for part in saved["parts"])
    )
    assert rows_in(out / "trades.csv")
    # The run's data may be gone: what was trained on is recorded.
    elsewhere = daily[0].rename(tmp_path / "moved.csv")
    code, output, errors = call(capsys, "backtest", "daily", elsewhere, "--runs-dir", tmp_path, "--end", "2020-09-01")
    assert code == 0, errors
    assert "IN SAMPLE" in output
    assert "out of sample" not in output
    # A run that starts from it has seen its prices too.
    again = ["--set", f"env.kwargs.data={elsewhere}", "--set", "env.kwargs.split=validation"]
    code, _, errors = call(capsys, "train", "--from", "daily", *again, "--runs-dir", tmp_path, "--name", "later")
    assert code == 0, errors
    code, output, errors = call(capsys, "backtest", "later", elsewhere, "--runs-dir", tmp_path)
    assert output.count("IN SAMPLE, ") == 2
    code, output, errors = call(capsys, "backtest", "market", runs / "prices.csv", "--runs-dir", runs)
    assert code == 0, errors
    assert "trained on simulated prices" in output
    assert "agent in" in output
    # A checkpoint outside of its run does not tell what it was trained on.
    alone = next(iter((runs / "market" / "checkpoints").glob("*.zip"))).read_bytes()
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "agent.zip").write_bytes(alone)
    assert "the agent observes" in error(capsys, "backtest", tmp_path / "alone" / "agent.zip", runs / "prices.csv")


def rows_in(path):
    return rows(path.read_text())


def test_files_of_prices_are_checked(runs, capsys, tmp_path):
    code, output, _ = call(capsys, "data", "check", runs / "prices.csv")
    assert code == 0
    assert "ONE: 60 bars, every 1h" in output
    assert output.endswith("can be used\n")
    lines = (runs / "prices.csv").read_text().splitlines()
    (tmp_path / "twice.csv").write_text("\n".join([*lines[:5], *lines[4:]]))
    code, output, _ = call(capsys, "data", "check", tmp_path / "twice.csv")
    assert code == 1
    assert "REFUSED: row 6" in output
    assert "there is no such file" in error(capsys, "data", "check", tmp_path / "none.csv")


@pytest.mark.slow
def test_trials_of_a_population_are_counted(daily, capsys, tmp_path):
    search = ["--set", "pbt.population_size=3", "--set", "pbt.backend=inline", "--set", "pbt.perturbation_interval=1"]
    searched = ["--set", "pbt.hyperparams=[{name: ent_coef, min_value: 0, max_value: 0.1}]"]
    features = ["--set", "env.kwargs.features={window: 16, horizons: [1, 4], volume: false}"]
    market = ["--env", "driftproof/Market-v0", "--set", f"env.kwargs.data={daily[0]}", *features]
    load = ["--set", "env.kwargs.load={columns: {timestamp: When}}", "--set", "env.kwargs.episode_length=16"]
    steps = ["--set", "run.total_timesteps=256", "--runs-dir", tmp_path, "--name", "search"]
    code, _, errors = call(capsys, "tune", *market, *load, *SMALL, *search, *searched, *steps)
    assert code == 0, errors
    code, _, errors = call(capsys, "backtest", "search", daily[0], "--runs-dir", tmp_path)
    assert code == 0, errors
    saved = json.loads((tmp_path / "search" / "backtest.json").read_text())
    events = json.loads((tmp_path / "search" / "population.json").read_text())["events"]
    assert saved["trials"] == 3 + sum(event["kind"] in ("exploit", "explore", "replace") for event in events) > 3
    part = saved["parts"][-1]
    assert part["deflated"] < part["performances"]["agent"]["probability"]
