"""Backtests in reports: curves, what was trained on, damaged files."""

from __future__ import annotations

import json

import numpy as np
import pytest

from driftproof.backtest import backtest
from driftproof.backtest.engine import Training
from driftproof.cli.evaluation import write_json
from driftproof.envs import Bars
from driftproof.report import write_report
from driftproof.state import RunFolderError

from .folders import write_agent
from .test_report import assert_valid, figure, sections


@pytest.fixture
def run(tmp_path):
    """A run with a backtest, of which the first half is in sample."""
    times = np.arange("2015-01-01", "2017-01-01", dtype="M8[D]").astype("M8[us]")
    close = 100 * np.exp(np.cumsum(np.random.default_rng(0).normal(0, 0.02, len(times))))
    bars = Bars(times, close, close, close, close, close, "ONE")
    training = Training((("2015-01-01", "2016-01-01"),), "trained on <b>ONE</b>")
    targets = {"ONE": np.sign(np.sin(np.arange(len(times)) / 9))}
    result = backtest({"ONE": bars}, targets, cost=0.001, training=training)
    path = write_agent(tmp_path / "run", updates=3)
    write_json(path / "backtest.json", result.to_dict())
    return path, result


def test_equity_and_drawdown_are_drawn(run, tmp_path):
    path, result = run
    page = write_report([path], tmp_path / "report.html")
    assert "Backtest" in sections(page)
    assert_valid(page)
    drawn = figure(page, "Equity")
    assert [trace["name"] for trace in drawn["data"]] == ["agent", "buy and hold", "volatility-scaled"]
    ends = [part.accounts["agent"].equity[-1] for part in result.parts]
    assert drawn["data"][0]["y"][-1] == pytest.approx(np.prod(ends))
    (shape,) = drawn["layout"]["shapes"]
    assert (shape["x0"][:10], shape["x1"][:10]) == ("2015-01-02", "2016-01-01")
    depth = min(figure(page, "Drawdown")["data"][0]["y"])
    assert depth == pytest.approx(min(part.performances["agent"].max_drawdown for part in result.parts))
    assert figure(page, "Position")["data"][0]["y"][-1] == pytest.approx(
        result.parts[1].accounts["agent"].long[-1] - result.parts[1].accounts["agent"].short[-1]
    )
    text = page.read_text()
    assert '<h3 class="in-sample">IN SAMPLE, 2015-01-01 to 2016-01-01</h3>' in text
    for title in ("Out of sample, 2016-01-01 to 2016-12-31", "By regime"):
        assert f"<h3>{title}</h3>" in text
    for factor, each in result.main.costs.items():
        assert f"<td>{factor}</td><td>{each.annual_return:+.1%}</td>" in text
    assert "probability of a Sharpe ratio above 0: " in text
    assert '<p class="label in-sample">IN SAMPLE, 2015-01-01 to 2016-01-01' in text
    assert '<p class="label">out of sample, after training, 2016-01-01 to 2016-12-31' in text
    assert "<b>ONE</b>" not in text


def test_runs_without_a_backtest_are_told_how_to_get_one(tmp_path):
    path = write_agent(tmp_path / "run", updates=3)
    assert "Backtest" not in write_report([path], tmp_path / "report.html").read_text()
    (path / "config.yaml").write_text("env:\n  id: driftproof/Market-v0\n")
    page = write_report([path], tmp_path / "report.html").read_text()
    assert "Backtest: no run has a backtest (driftproof backtest RUN DATA)" in page


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content.pop("parts"),
        lambda content: content.update(parts=[]),
        lambda content: content["parts"][0]["performances"]["agent"].update(bars="many"),
        lambda content: content["parts"][0]["curves"].update(time=["2015"] * 50_000),
        lambda content: content["parts"][0].update(sample="hindsight"),
    ],
)
def test_damaged_files_are_named(run, damage, tmp_path):
    path, _ = run
    content = json.loads((path / "backtest.json").read_text())
    damage(content)
    (path / "backtest.json").write_text(json.dumps(content))
    with pytest.raises(RunFolderError, match=r"backtest.json cannot be read: .*; remove it, or test the run again"):
        write_report([path], tmp_path / "report.html")
