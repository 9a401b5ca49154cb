"""Every printed return says what it was obtained on, and whether training saw it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.main import get_command

from driftproof.cli import scopes
from driftproof.cli.app import app
from driftproof.envs import MarketEnv, regime_bars, write_csv
from tests.cli.commands import SMALL, call
from tests.cli.test_commands import error

MARKET = ["--env", "driftproof/Market-v0", "--set", "env.kwargs.features={window: 8, horizons: [1, 4]}"]
SHORT = ["--set", "env.kwargs.episode_length=40", "--set", "run.total_timesteps=64"]
DRIFT = "env.drift=[{kind: reward_scale, schedule: {kind: sudden, every: 20, values: [1, 10, 1, 100]}}]"
SEARCH = ["--set", "pbt.population_size=2", "--set", "pbt.backend=inline", "--set", "pbt.perturbation_interval=1"]
RATES = ["--set", "pbt.hyperparams=[{name: learning_rate, min_value: 1e-4, max_value: 1e-2, is_log_scale: true}]"]
LABEL = re.compile(r"evaluated (IN SAMPLE|out of sample|in phase \d+|in new episodes) .*")


BACKTEST = re.compile(r"(IN SAMPLE|out of sample)(, after training)?, \d{4}-\d\d-\d\d\S* to \d{4}-\d\d-\d\d")


class Capture:
    def readouterr(self):
        return type("Nothing", (), {"out": "", "err": ""})


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    write_csv(folder / "prices.csv", regime_bars(400, seed=3, symbol="ACME"))
    market = [*MARKET, "--set", f"env.kwargs.data={folder / 'prices.csv'}", *SHORT, *SMALL]
    pole = [
        "--env",
        "CartPole-v1",
        "--set",
        "env.kwargs.max_episode_steps=8",
        *SMALL,
        "--set",
        "run.total_timesteps=96",
    ]
    for command, name, options in (
        ("train", "market", market),
        ("train", "all", [*market, "--set", "env.kwargs.split=all"]),
        ("train", "drifting", [*pole, "--set", DRIFT]),
        ("train", "pole", pole),
        ("tune", "population", [*pole, *SEARCH]),
    ):
        assert call(Capture(), command, *options, "--runs-dir", folder, "--name", name)[0] == 0
    return folder


def saved(runs, name, file="evaluation.json"):
    return json.loads((runs / name / file).read_text())


def test_every_command_that_prints_a_return_labels_it(runs, capsys):
    """A table with the heading "return" comes after a label; other lines with a return say "training return"."""
    market = [*MARKET, "--set", f"env.kwargs.data={runs / 'prices.csv'}", *SHORT, *SMALL, "--runs-dir", runs]
    pole = ["--env", "CartPole-v1", *SMALL, "--set", "run.total_timesteps=96", "--runs-dir", runs]
    for arguments in (
        ["train", *market, "--name", "again"],
        ["train", *pole, "--name", "pole again"],
        ["train", "--resume", "again", "--set", "run.total_timesteps=128", "--runs-dir", runs],
        ["tune", *pole, *SEARCH, *RATES, "--name", "population again", "--confirm", 1],
        ["evaluate", "market", "--runs-dir", runs],
        ["evaluate", "market", "--stochastic", "--set", "env.kwargs.split=train", "--runs-dir", runs],
        ["evaluate", "market", "--attack", "random", "--epsilon", 0.1, "--runs-dir", runs],
        ["evaluate", "all", "--runs-dir", runs],
        ["evaluate", "drifting", "--runs-dir", runs],
        ["evaluate", "drifting", "--phase", 1, "--runs-dir", runs],
        ["evaluate", "drifting", "--phases", "all", "--runs-dir", runs],
        ["evaluate", "drifting", "--attack", "random", "--epsilon", 0.1, "--runs-dir", runs],
        ["evaluate", "population", "--member", 1, "--runs-dir", runs],
    ):
        code, output, errors = call(capsys, *arguments)
        assert code == 0, (arguments, errors)
        lines = output.splitlines()
        heads = [i for i, line in enumerate(lines) if re.search(r"(^|  )return  ", line)]
        assert heads, arguments
        for i in heads:
            assert LABEL.fullmatch(lines[i - 1]), (arguments, lines[i - 1])
        for line in lines:
            for match in re.finditer(r"return [-\d]", line):
                assert line[: match.start()].endswith("training "), (arguments, line)
        for i, line in enumerate(lines):
            assert not line.startswith("difference of returns") or LABEL.fullmatch(lines[i - 4]), arguments
    _, output, _ = call(capsys, "play", "drifting", "--output", runs / "play.gif", "--runs-dir", runs)
    assert re.match(r"return 8, played in phase 2 of the drift .*, held, where training ended; in new episodes", output)
    _, output, errors = call(capsys, "backtest", "market", runs / "prices.csv", "--runs-dir", runs)
    lines = output.splitlines()
    samples = [lines[i - 2] for i, line in enumerate(lines) if re.match(r"return +[+-]", line)]
    assert [line.partition(", ")[0] for line in samples] == ["IN SAMPLE", "out of sample"], errors
    assert all(re.search(r"\d{4}-\d\d-\d\d.* to \d{4}-\d\d-\d\d", line) for line in samples)
    _, output, _ = call(capsys, "runs", "--runs-dir", runs)
    head, *lines = output.splitlines()
    assert re.search("training return +evaluation +evaluated +state", head)
    assert all(re.search("(not seen in training|IN SAMPLE)  ", line) for line in lines)
    for name in ("market", "all", "drifting", "pole", "population"):
        call(capsys, "report", name, "--runs-dir", runs)
        page = (runs / name / "report.html").read_text()
        assert "<dt>Training return</dt>" in page or "<dt>Best training return</dt>" in page
        labels = re.findall(r'<p class="label[^"]*">([^<]*)</p>', page)
        assert labels
        assert all(LABEL.fullmatch(label) or BACKTEST.match(label) for label in labels), labels


def test_the_audit_knows_all_commands():
    audited = {"train", "tune", "evaluate", "play", "backtest", "runs", "report"}
    elsewhere = {"walkforward"}  # tests/cli/test_walking.py
    without_returns = {"infer", "export", "config", "inspect", "convert", "data"}
    assert audited | elsewhere | without_returns == set(get_command(app).commands)


def test_a_market_without_a_split_is_evaluated_on_the_last_bars(runs, capsys):
    result = saved(runs, "market")
    assert result["scope"]["split"] == "held_out"
    assert result["scope"]["in_sample"] is False
    (first, last, bars), bars_of_all = result["scope"]["symbols"]["ACME"], regime_bars(400, seed=3)
    assert (first, last, bars) == (str(bars_of_all.timestamps[280]), str(bars_of_all.timestamps[-1]), 120)
    sources = json.loads((runs / "market" / "sources.json").read_text())
    assert sources["histories"][0]["symbols"]["ACME"][1] == str(bars_of_all.timestamps[279])
    code, output, _ = call(capsys, "train", "--resume", "market", "--runs-dir", runs)
    assert code == 0
    assert "env.kwargs.split is not set: the last 30% of the bars are held out for evaluation" in output
    assert "trains on training split of ACME, 2000-01-01 to" in output
    assert "will be evaluated out of sample on held-out split of ACME, " in output


def test_evaluation_on_bars_of_training_is_in_sample_and_red(runs, capsys):
    assert saved(runs, "all")["scope"]["in_sample"] is True
    code, output, _ = call(capsys, "evaluate", "all", "--runs-dir", runs)
    assert code == 0
    assert "evaluated IN SAMPLE on all bars of ACME, 2000-01-01 to" in output
    call(capsys, "report", "all", "market", "--runs-dir", runs)
    page = (runs / "report.html").read_text()
    assert re.search('<p class="label in-sample">all: evaluated IN SAMPLE on all bars', page)
    assert re.search('<p class="label">market: evaluated out of sample on held-out split', page)
    assert '<small class="word in-sample">' in page


def test_in_sample_is_red_on_a_terminal(capsys):
    lines = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer, "secho", lambda text, **style: lines.append((text, style)))
        scopes.show({"text": "IN SAMPLE on x", "in_sample": True})
        scopes.show({"text": "out of sample on x", "in_sample": False})
    assert lines == [
        ("evaluated IN SAMPLE on x", {"fg": "red", "bold": True}),
        ("evaluated out of sample on x", {"fg": None, "bold": False}),
    ]


def test_bars_of_the_run_that_it_started_from_are_seen_too(runs, capsys):
    """A warm start on other bars does not forget what the first run saw."""
    later = ["--set", "env.kwargs.split=validation", "--set", "env.evaluation_kwargs.split=train"]
    options = [*later, "--set", "env.kwargs.episode_length=20", "--set", "run.total_timesteps=32"]
    code, output, errors = call(capsys, "train", "--from", "market", *options, "--runs-dir", runs, "--name", "warm")
    assert code == 0, errors
    assert "will be evaluated IN SAMPLE on training split of ACME" in output
    assert saved(runs, "warm")["scope"]["in_sample"] is True


def test_the_same_prices_under_another_name_are_in_sample(runs, capsys, tmp_path):
    """A copy of the file, or another market of the same time, is no test of the agent."""
    write_csv(tmp_path / "copy.csv", regime_bars(400, seed=3, symbol="OTHER"))
    for split, label in (("train", "IN SAMPLE on training split of OTHER"), ("test", "out of sample on test split of")):
        options = ["--set", f"env.kwargs.data={tmp_path / 'copy.csv'}", "--set", f"env.kwargs.split={split}"]
        _, output, errors = call(capsys, "evaluate", "market", *options, "--episodes", 1, "--runs-dir", runs)
        assert f"evaluated {label}" in output, errors
    assert "training saw bars of the same time, of ACME" not in output


def test_what_a_lone_checkpoint_has_seen_is_unknown(runs, capsys, tmp_path):
    (path,) = (runs / "all" / "checkpoints").glob("*64.zip")
    (tmp_path / "alone.zip").write_bytes(path.read_bytes())
    options = [*MARKET, "--set", f"env.kwargs.data={runs / 'prices.csv'}", *SHORT, *SMALL]
    options += ["--from", tmp_path / "alone.zip", "--set", "run.total_timesteps=32", "--name", "alone"]
    _, output, errors = call(capsys, "train", *options, "--runs-dir", tmp_path)
    assert "held-out split of ACME" in output, errors
    assert "whether training saw these bars is not recorded" in output
    assert "out of sample" not in output
    _, output, errors = call(capsys, "backtest", "alone", runs / "prices.csv", "--runs-dir", tmp_path)
    assert "UNKNOWN SAMPLE" in output, errors
    assert "out of sample" not in output


def test_markets_of_different_times_are_split_at_one(capsys, tmp_path):
    """Else training would see one market at the time on which another is evaluated."""
    late = regime_bars(400, seed=4, symbol="LATE")
    write_csv(tmp_path / "two.csv", regime_bars(400, seed=3, symbol="ACME"), late.rows(slice(160, None)))
    options = [*MARKET, "--set", f"env.kwargs.data={tmp_path / 'two.csv'}", *SHORT, *SMALL, "--runs-dir", tmp_path]
    code, output, errors = call(capsys, "train", *options, "--name", "two")
    assert code == 0, errors
    assert "all are split at 20" in output
    assert "evaluated out of sample on held-out split of ACME, LATE" in output
    sources = json.loads((tmp_path / "two" / "sources.json").read_text())
    ends = {last for _, last, _ in sources["histories"][0]["symbols"].values()}
    scope = saved(tmp_path, "two")["scope"]["symbols"]
    assert len(ends) == 1
    assert all(first > min(ends) for first, _, _ in scope.values())
    fractions = ["--set", "env.kwargs.fractions=[0.7, 0.15, 0.15]", "--name", "three"]
    _, output, _ = call(capsys, "train", *options, *fractions)
    assert "evaluated IN SAMPLE on held-out split of ACME, LATE" in output


def test_a_run_of_an_earlier_version_is_labelled_truthfully(runs, capsys, tmp_path):
    for name, is_seen in (("market", False), ("all", True)):
        path = runs / name / "sources.json"
        content = path.read_text()
        path.unlink()
        code, _, _ = call(capsys, "evaluate", name, "--output", tmp_path / "x.json", "--runs-dir", runs)
        assert code == 0
        assert json.loads((tmp_path / "x.json").read_text())["scope"]["in_sample"] is is_seen
        path.write_text(content)
    path = runs / "all" / "evaluation.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in content.items() if key != "scope"}))
    call(capsys, "report", "all", "--runs-dir", runs)
    page = (runs / "all" / "report.html").read_text()
    assert re.search('<p class="label in-sample">evaluated IN SAMPLE, on the split that training saw', page)
    path.write_text(json.dumps(content))


def test_one_path_gets_a_block_bootstrap(runs, capsys, tmp_path):
    """Twenty replays of one deterministic path are as good as one: the interval is that of its bars."""
    options = ["--set", "env.kwargs.episode_length=null", "--runs-dir", runs, "--output", tmp_path / "one.json"]
    intervals = []
    for episodes in (2, 20):
        code, output, _ = call(capsys, "evaluate", "market", "--episodes", episodes, *options)
        assert code == 0
        result = json.loads((tmp_path / "one.json").read_text())
        assert len({round(value, 9) for value in result["returns"]}) == 1
        assert "interval: stationary block bootstrap over 119 bars, mean block " in output
        assert "cover 119 different bars, equal to 1.0 non-overlapping episodes" in output
        held = result["baselines"]["buy and hold"]
        intervals.append(held["interval"])
        assert held["interval"][0] < held["mean"] < held["interval"][1]
    assert intervals[0] == pytest.approx(intervals[1])


def test_overlapping_episodes_do_not_narrow_the_interval(runs, capsys, tmp_path):
    widths = []
    for episodes in (20, 200):
        options = ["--episodes", episodes, "--runs-dir", runs, "--output", tmp_path / "x.json"]
        call(capsys, "evaluate", "market", *options)
        low, high = json.loads((tmp_path / "x.json").read_text())["baselines"]["buy and hold"]["interval"]
        widths.append(high - low)
    assert widths[1] > 0.7 * widths[0], "independent episodes would narrow it by a factor of three"


def test_attacks_in_a_history_have_no_interval_over_episodes(runs, capsys):
    options = ["--attack", "random", "--epsilon", 0.1, "--episodes", 3, "--runs-dir", runs]
    code, output, errors = call(capsys, "evaluate", "market", *options)
    assert code == 0, errors
    assert "no confidence intervals: episodes share bars" in output
    results = saved(runs, "market", "attacks.json")["results"]
    assert [(result["low"], result["high"]) for result in results] == [(None, None)] * 2
    assert call(capsys, "report", "market", "--runs-dir", runs)[0] == 0


def test_repeats_of_one_path_elsewhere_have_no_interval(runs, capsys, tmp_path):
    code, output, errors = call(
        capsys,
        "train",
        "--env",
        "tests.cli.worlds:Fixed-v0",
        *SMALL,
        "--set",
        "run.total_timesteps=32",
        "--runs-dir",
        tmp_path,
        "--name",
        "fixed",
    )
    assert code == 0, errors
    result = json.loads((tmp_path / "fixed" / "evaluation.json").read_text())
    assert result["interval"] is None
    assert "interval: all 2 episodes are identical" in output
    assert re.search(r"agent +4 +– +0", output)
    call(capsys, "report", "fixed", "--runs-dir", tmp_path)
    assert "no interval: all 2 episodes are identical" in (tmp_path / "fixed" / "report.html").read_text()


def test_a_drifting_world_is_evaluated_where_training_ended(runs, capsys):
    """After 48 steps of each environment, the scale is 1 again; phases 1 and 3 have others."""
    result = saved(runs, "drifting")
    assert (result["scope"]["phase"], result["scope"]["values"]) == (2, {"reward_scale": 1.0})
    call(capsys, "evaluate", "drifting", "--episodes", 20, "--output", runs / "many.json", "--runs-dir", runs)
    assert json.loads((runs / "many.json").read_text())["returns"] == [8.0] * 20, "held, though the drift would go on"
    before = (runs / "drifting" / "evaluation.json").read_text()
    for phase, scale in ((1, 10), (3, 100)):
        code, output, _ = call(capsys, "evaluate", "drifting", "--phase", phase, "--runs-dir", runs)
        assert code == 0
        assert re.search(rf"agent +{8 * scale} ", output)
    assert "in phase 3 of the drift (reward_scale 100), held, not seen in training" in output
    assert (runs / "drifting" / "evaluation.json").read_text() == before, "a chosen phase is not the run's result"
    assert error(capsys, "evaluate", "drifting", "--phase", 9, "--runs-dir", runs) == (
        "--phase 9: the drift has the phases 0, 1, 2, 3"
    )
    assert "does not drift and has no phases: leave out --phase 1" in error(
        capsys, "evaluate", "pole", "--phase", 1, "--runs-dir", runs
    )


def test_seeds_of_training_are_in_sample(runs, capsys):
    _, output, _ = call(capsys, "evaluate", "pole", "--seed", 1, "--runs-dir", runs)
    assert "evaluated IN SAMPLE in CartPole-v1 with seeds 1 to 2, of which training used some" in output
    _, output, _ = call(capsys, "evaluate", "pole", "--seed", 2, "--runs-dir", runs)
    assert "evaluated in new episodes of CartPole-v1 (seeds 2 to 3, not used in training)" in output


def test_the_observation_normalizer_is_told(capsys, tmp_path):
    options = ["--env", "CartPole-v1", *SMALL, "--set", "run.total_timesteps=32", "--set", DRIFT]
    options += ["--set", "drift.observation_normalizer=true", "--runs-dir", tmp_path, "--name", "run"]
    _, output, errors = call(capsys, "train", *options)
    assert "observation normaliser frozen" in output, errors
    _, output, _ = call(capsys, "evaluate", "run", "--phases", "--runs-dir", tmp_path)
    assert "observation normaliser follows shifts, as in training" in output


def test_episodes_of_the_held_out_part_fit_into_it():
    env = MarketEnv(regime_bars(300, seed=1, symbol="X"), "held_out", features={"window": 8, "horizons": (1, 4)})
    assert env.episode_length == 89
    assert env.rows["X"] == range(210, 300)
    rewards = [0.0]
    env.reset(seed=0)
    while True:
        _, reward, ended, cut, _ = env.step(np.array([1.0]))
        rewards.append(reward)
        if ended or cut:
            break
    assert len(rewards) == 90


def test_every_logged_metric_is_in_the_guide(runs, capsys):
    """With everything that logs: recurrence, drift kit, KL penalty, adversarial training, continuous actions."""
    parts = [
        *("drift.drift_kit=true", "drift.recycle_dormant=0.1", "drift.init_decay=0.01", "ppo.kl_penalty=true"),
        *("ppo.target_kl=0.02", "adversarial.enabled=true", "adversarial.warmup_updates=1"),
        *("policy.name=MlpLstmPolicy", "run.evaluation_episodes=0", "run.total_timesteps=96"),
    ]
    options = [word for part in parts for word in ("--set", part)]
    code, _, errors = call(
        capsys, "train", "--env", "Pendulum-v1", *SMALL, *options, "--runs-dir", runs, "--name", "full"
    )
    assert code == 0, errors
    rows = [json.loads(line) for path in runs.glob("*/metrics.jsonl") for line in path.read_text().splitlines()]
    names = {name for row in rows for name in row} - {"step", "member"}
    text = (Path(__file__).parents[2] / "docs" / "watching_a_run.md").read_text()
    families = ("lstm/", "population/diversity/", "population/format/")
    own = ("drift/reward_scale",)  # of the environment
    assert len(names) > 60
    missing = [name for name in names if f"`{name}`" not in text and not name.startswith((*families, *own))]
    assert not missing
