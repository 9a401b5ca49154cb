"""The benchmark of starting values: what it runs again, its table, and that the page shows what was measured."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import common
import learning
import starting_values
from starting_values import Run

from driftproof.config.starting import STARTING_VALUES

SHORT = ("run.total_timesteps=64", "env.n_envs=2", "ppo.n_steps=16", "ppo.batch_size=32", "ppo.n_epochs=1")


def entry(name="cartpole", seed=0, final=1.0, **changes):
    run = Run(name, seed)
    values = {"name": name, "seed": seed, "settings": learning.as_json(run.settings), "final": final}
    return {run.key: values | {"baseline": {"random": 20.0}, "seconds": 30.0} | changes}


@pytest.mark.parametrize("name", ["cartpole", "market"])
def test_a_run_is_trained_and_evaluated(name):
    result = starting_values.train(Run(name, 1, SHORT, episodes=2))
    assert (result["name"], result["seed"], result["steps"]) == (name, 1, 64)
    assert list(result["baseline"]) == [{"market": "buy and hold"}.get(name, "random")]
    assert result["settings"]["changes"] == list(SHORT)
    assert result["steps_per_second"] > 0


def test_runs_with_other_values_are_run_again():
    known = entry() | entry(seed=1)
    known["cartpole/1"]["settings"] = {**known["cartpole/1"]["settings"], "values": {"env": "CartPole-v1"}}
    runs = [Run("cartpole", seed) for seed in range(3)]
    kept = starting_values.up_to_date(known, runs)
    assert list(kept) == ["cartpole/0"]
    assert learning.left_to_do(runs, kept) == runs[1:]
    (row,) = starting_values.rows(known)
    assert row[-2] == "1", "the table counts only runs with the present values"


def test_the_table():
    (row,) = starting_values.rows(entry(final=400.0) | entry(seed=1, final=500.0))
    assert row == ["`CartPole-v1`", "Mlp", "50,000", "20.0", "450 ± 71", "400 to 500", "2", "0.5"]


def test_the_page_shows_what_was_measured():
    results = learning.load(common.RESULTS / "starting_values.json")
    table = starting_values.rows(results)
    page, written = starting_values.PAGE.read_text(), (common.RESULTS / "starting_values.md").read_text()
    for row in table:
        line = "| " + " | ".join(row) + " |"
        assert line in page, "run benchmarks/starting_values.py --report"
        assert line in written
    assert len(table) == len(STARTING_VALUES) >= 20
