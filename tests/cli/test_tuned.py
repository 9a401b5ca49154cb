"""What a search found: printed, as a configuration to train with, and confirmed with other seeds."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scipy import stats

from driftproof.cli.backtesting import trials_of
from driftproof.cli.tuned import ancestry, compared
from driftproof.config import build_agent, load, loads
from driftproof.config.tuned import configured, tuned
from driftproof.runs.events import Event
from tests.cli.commands import SMALL, call

SEARCH = [
    *("--set", "pbt.population_size=2", "--set", "pbt.backend=inline", "--set", "pbt.perturbation_interval=1"),
    *("--set", "run.total_timesteps=128", "--set", "ppo.learning_rate={kind: linear, start: 1e-3}"),
    "--set",
    "pbt.hyperparams=[{name: learning_rate, min_value: 1e-4, max_value: 1e-2, is_log_scale: true}, "
    "{name: optimizer.sigma, min_value: 1e-4, max_value: 1e-2, is_log_scale: true}]",
]


@pytest.mark.parametrize("optimizer", ["adaptive_upgd", "upgdw", "adam", "sgd"])
def test_every_hyperparameter_has_its_place(optimizer):
    """An agent of the found configuration has the found values, and trains without a population."""
    rate = "learning_rate: {kind: linear, start: 0.01}"
    config = loads(f"env: Pendulum-v1\noptimizer: {optimizer}\nadversarial: {{enabled: true}}\n{rate}")
    agent = build_agent(config)
    values = {}
    for name, value in agent.hyperparams.items():
        new = int(value) + 1 if name in ("n_epochs", "vgs.warmup_steps") else 0.5 * value if value else 0.25
        try:
            agent.hyperparams.check(name, new)
        except ValueError:
            continue  # without effect in this agent
        values[name] = new
    assert len(values) > 12
    agent.env.close()
    found = tuned(config, values)
    agent = build_agent(found)
    assert {name: agent.hyperparams[name] for name in values} == pytest.approx(values)
    assert found.ppo.learning_rate.kind == "linear"
    assert configured(config, "learning_rate") == 0.01
    assert configured(config, "optimizer.weight_decay") is None
    agent.env.close()


def test_best_values_are_printed_and_train_as_they_are(capsys, tmp_path):
    options = ["--env", "CartPole-v1", *SMALL, *SEARCH, "--runs-dir", tmp_path, "--name", "run", "--confirm", 2]
    code, output, errors = call(capsys, "tune", *options)
    assert code == 0, errors
    assert "best of 2 members: member " in output
    assert "1e-4 to 0.01, log scale" in output
    assert f"to train with them: driftproof train {tmp_path / 'run' / 'best.yaml'}" in output
    found, before = load(tmp_path / "run" / "best.yaml"), load(tmp_path / "run" / "config.yaml")
    state = json.loads((tmp_path / "run" / "population_state.json").read_text())
    rates = [member["hyperparams"]["learning_rate"] for member in state["members"]]
    assert any(found.ppo.learning_rate.start == pytest.approx(rate) for rate in rates)
    assert (found.env, found.run) == (before.env, before.run)
    assert found.pbt != before.pbt
    result = json.loads((tmp_path / "run" / "confirm.json").read_text())
    assert len(result["best"]) == len(result["configured"]) == 2
    assert result["difference"] == pytest.approx(np.mean(result["best"]) - np.mean(result["configured"]))
    assert "difference of returns " in output
    seeds = {load(path).run.seed for path in (tmp_path / "run" / "confirm").glob("best-*/config.yaml")}
    assert seeds == {5000, 5100}, "seeds that no member has trained with"
    # Agents that have been trained are not trained again.
    code, output, _ = call(capsys, "tune", "--resume", "run", "--runs-dir", tmp_path, "--confirm", 2)
    assert code == 0
    assert "step " not in output
    assert json.loads((tmp_path / "run" / "confirm.json").read_text()) == result
    code, _, errors = call(capsys, "train", tmp_path / "run" / "best.yaml", "--runs-dir", tmp_path, "--name", "again")
    assert code == 0, errors
    trials = [json.loads((tmp_path / name / "sources.json").read_text())["trials"] for name in ("run", "again")]
    assert trials[0] == 1
    assert trials[1] == trials_of(tmp_path / "run") >= 2, "the Sharpe ratio is deflated for the search"


def test_the_difference_is_students_paired_interval():
    best, other = [1.0, 2.5, 3.0, 2.2], [0.5, 2.0, 1.0, 2.4]
    found = compared(best, other)
    expected = stats.ttest_rel(best, other).confidence_interval(0.95)
    assert found["difference"] == pytest.approx(np.mean(np.array(best) - other))
    assert found["interval"] == pytest.approx([expected.low, expected.high], abs=2e-3)
    assert compared([1.0], [0.0])["interval"] is None
    many = np.random.default_rng(0).normal(size=60)
    expected = stats.ttest_1samp(many, 0).confidence_interval(0.95)
    assert compared(list(many), [0.0] * 60)["interval"] == pytest.approx([expected.low, expected.high], rel=5e-3)


def test_the_history_follows_those_that_were_taken_over():
    def event(kind, member, step, value, donor=None):
        return Event(kind, member, step, donor, None if donor is None else step, hyperparams={"x": value})

    events = [
        event("start", 0, 0, 1.0),
        event("start", 1, 0, 2.0),
        event("explore", 1, 2, 3.0),
        event("exploit", 0, 4, 4.0, donor=1),
        event("explore", 1, 6, 9.0),
        event("exploit", 0, 8, 7.0, donor=1),
        Event("undo", 0, 8, hyperparams={"x": 4.0}),
    ]
    assert [values["x"] for values in ancestry(events, 0)] == [2.0, 3.0, 4.0]
    assert [values["x"] for values in ancestry(events, 1)] == [2.0, 3.0, 9.0]
