"""``driftproof evaluate --phases``: returns in every phase of a drift, which is held meanwhile."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from driftproof.cli.arenas import Following
from driftproof.ppo import DistributionalPPO
from tests.cli.commands import SMALL, call
from tests.cli.test_commands import error
from tests.report.folders import figure

SCALES = "env.drift=[{kind: reward_scale, schedule: {kind: sudden, every: 20, values: [1, 10, 1, 100]}}]"
"""Rewards tell the phase: 1 in phases 0 and 2, 10 in phase 1, 100 in phase 3."""
STEPS = ["--set", "run.total_timesteps=96"]  # 48 of each environment
POPULATION = ["--set", "pbt.population_size=2", "--set", "pbt.backend=inline", "--set", "pbt.perturbation_interval=1"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")

    class Capture:
        def readouterr(self):
            return type("Nothing", (), {"out": "", "err": ""})

    common = ["--env", "CartPole-v1", "--set", "env.kwargs.max_episode_steps=8", *SMALL, *STEPS, "--runs-dir", folder]
    for command, more, name in (
        ("train", ["--set", SCALES], "drifting"),
        ("tune", ["--set", SCALES, *POPULATION], "population"),
        ("train", [], "still"),
    ):
        assert call(Capture(), command, *common, *more, "--name", name)[0] == 0
    return folder


def phases_of(path):
    return json.loads(path.read_text())["phases"]


@pytest.mark.parametrize("name", ["drifting", "population"])
def test_returns_in_every_phase(runs, capsys, name):
    code, output, errors = call(capsys, "evaluate", name, "--phases", "--episodes", 3, "--runs-dir", runs)
    assert code == 0, errors
    found = phases_of(runs / name / "phases.json")
    assert [(each["phases"], each["values"]) for each in found] == [
        ([0, 2], {"reward_scale": 1}),
        ([1], {"reward_scale": 10}),
        ([3], {"reward_scale": 100}),
    ]
    assert [each["returns"] for each in found] == [[scale * 8.0] * 3 for scale in (1, 10, 100)], "held in all episodes"
    assert [each["interval"] for each in found] == [[scale * 8.0] * 2 for scale in (1, 10, 100)]
    assert [(each["is_seen"], each["is_last"]) for each in found] == [(True, True), (True, False), (False, False)]
    rows = [line.split("  ") for line in output.splitlines() if "reward_scale" in line]
    assert [(row[0], row[-1]) for row in rows[::2]] == [("0, 2", "training ended here"), ("3", "not seen in training")]
    assert f"written to {runs / name}/phases.json" in output
    assert call(capsys, "report", name, "--runs-dir", runs)[0] == 0
    assert [trace["y"] for trace in figure(runs / name / "report.html", "Return by phase")["data"][1:]] == [
        [8],
        [80],
        [800],
    ]


def test_the_same_drift_continues_afterwards(runs, capsys):
    _, before, _ = call(capsys, "evaluate", "drifting", "--runs-dir", runs)
    call(capsys, "evaluate", "drifting", "--phases", "--runs-dir", runs)
    assert call(capsys, "evaluate", "drifting", "--runs-dir", runs)[1] == before


@pytest.mark.slow
def test_another_drift(runs, capsys, tmp_path):
    """Random, in episodes and in other processes."""
    drift = "env.drift=[{kind: reward_scale, schedule: {kind: random_walk, low: 1, high: 9, deviation: 2}}]"
    options = ["--set", drift, "--set", "env.vectorization=processes", "--episodes", 2, "--runs-dir", runs]
    for name in ("one", "two"):
        code, output, errors = call(capsys, "evaluate", "drifting", "--phases", *options, "--output", tmp_path / name)
        assert code == 0, errors
        assert "not seen in training" in output
    assert (tmp_path / "one").read_text() == (tmp_path / "two").read_text()
    for each in phases_of(tmp_path / "one"):
        assert each["returns"] == pytest.approx([8 * each["values"]["reward_scale"]] * 2)


def test_of_very_many_phases_some_are_evaluated(runs, capsys, tmp_path):
    drift = "env.drift=[{kind: reward_scale, schedule: {kind: sudden, every: 1}}]"
    options = ["--set", drift, "--episodes", 1, "--runs-dir", runs, "--output", tmp_path / "phases.json"]
    _, output, _ = call(capsys, "evaluate", "drifting", "--phases", *options)
    assert "the drift has 48 different phases; 24 of them are evaluated" in output
    found = [each["values"]["reward_scale"] for each in phases_of(tmp_path / "phases.json")]
    assert (found[0], found[-1], found) == (0, 47, sorted(found))
    assert len(found) <= 24


def test_the_observation_normalizer_follows_and_starts_every_phase_as_it_was():
    agent = DistributionalPPO(
        "MlpPolicy", "CartPole-v1", n_steps=512, batch_size=64, seed=0, drift_kit=False, observation_normalizer=True
    )
    agent.learn(512)
    rows = np.random.default_rng(0).normal(0, 0.05, (200, 4)).astype(np.float32)
    starts = np.ones(len(rows), bool)
    player = Following(agent)

    def mean_input(shift):
        moments = agent.learner.normalizer.moments[""]
        return moments.normalize(torch.as_tensor(rows + shift)).mean(0).numpy()

    before = mean_input(0)
    assert np.abs(mean_input(9)).max() > 5
    player.predict(rows + np.float32(9), episode_start=starts)
    np.testing.assert_allclose(mean_input(9), before, atol=0.2)
    player.restart()
    np.testing.assert_array_equal(mean_input(0), before)


def test_environments_that_have_played_their_episodes_are_not_followed():
    """``evaluate_policy`` says of each of their steps that an episode starts."""
    agent = DistributionalPPO("MlpPolicy", "CartPole-v1", n_steps=128, seed=0, observation_normalizer=True).learn(1280)
    player, statistics = Following(agent), agent.learner.normalizer.sensors
    rng = np.random.default_rng(0)
    before = statistics.start_mean.copy()
    for step in range(50):
        rows = np.float32(rng.normal(0, 0.03, (2, 4)) + (0.8 if step else 0.0))
        player.predict(rows, None, np.array([True, step == 0]))
    assert statistics.shifts == 0
    np.testing.assert_allclose(statistics.start_mean, before, atol=0.01)
    player.predict(rows, None, np.array([True, True]))
    assert statistics.shifts == 1, "but the first observation of an episode counts"


def test_mistakes_are_one_line(runs, capsys):
    said = error(capsys, "evaluate", "still", "--phases", "--runs-dir", runs)
    assert said.startswith("CartPole-v1 does not drift and has no phases: leave out --phases, or add a drift, such as")
    said = error(capsys, "evaluate", "drifting", "--phases", "--attack", "mad", "--runs-dir", runs)
    assert said == "--phases and --attack cannot be combined: run two evaluations"
    assert not (runs / "still" / "phases.json").exists()


def test_tensorboard_has_the_phase(runs):
    events = EventAccumulator(str(next((runs / "drifting" / "tensorboard").rglob("events*")).parent))
    events.Reload()
    logged = [event.value for event in events.Scalars("drift/phase")]
    assert logged == [0, 1, 2]
