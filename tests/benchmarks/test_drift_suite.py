"""The drift suite: counting of returns, tasks and their seeds, statistics, and what it runs again."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import drift_methods
import drift_report
import drift_scenarios
import drift_statistics
import drift_suite
from drift_methods import METHODS
from drift_scenarios import SCENARIOS, Cut, Recorder
from drift_suite import Run

# Of Box2D's wrappers, when they are imported.
pytestmark = pytest.mark.filterwarnings("ignore:builtin type:DeprecationWarning", "ignore:.*pkg_resources")


class Counting(gymnasium.Env):
    """The t-th step of all rewards t. Episodes terminate after given lengths, in turn."""

    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, *lengths):
        self.lengths, self.episode, self.age, self.time = lengths, -1, 0, 0

    def reset(self, *, seed=None, options=None):
        self.episode, self.age = self.episode + 1, 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.age, self.time = self.age + 1, self.time + 1
        is_over = self.age == self.lengths[self.episode % len(self.lengths)]
        return np.zeros(1, np.float32), float(self.time), is_over, False, {}


def record(lengths, steps, limit=100, iteration=10, task_steps=20, is_cut=True):
    recorder = Recorder(Cut(Counting(*lengths), limit, iteration if is_cut else None), task_steps, iteration)
    recorder.reset()
    for _ in range(steps):
        *_, terminated, truncated, _ = recorder.step(0)
        if terminated or truncated:
            recorder.reset()
    return recorder.returns()


def test_episodes_that_an_iteration_cuts_count_in_the_published_way_only():
    # Of 4, 4 and the 2 steps that are left; then of 10.
    returns = record([4, 4, 4, 50], 20)
    assert returns["published"] == [pytest.approx((10 + 26 + 19) / 3, abs=1e-4), 155.0]
    assert returns["plain"] == [18.0, None]
    assert returns["episodes"] == [2, 0]


def test_an_episode_that_ends_where_an_iteration_does_is_whole():
    assert record([5], 10)["plain"] == [27.5]
    assert record([50], 10, limit=5)["plain"] == [27.5]


def test_uncut_episodes_count_where_they_end_and_not_across_tasks():
    returns = record([12, 12], 40, is_cut=False)
    # Ends: 12, 24, 36; the task changes after 20.
    assert returns["published"] == [None, 78.0, pytest.approx(sum(range(13, 25))), pytest.approx(sum(range(25, 37)))]
    assert returns["plain"] == [None, 78.0, None, pytest.approx(sum(range(25, 37)))]


def test_an_episode_that_was_given_up_is_not_whole():
    recorder = Recorder(Counting(50), 20, 10)
    recorder.reset()
    for _ in range(5):
        recorder.step(0)
    recorder.reset()
    recorder.reset()
    assert recorder.returns() == {"published": [15.0], "plain": [None], "episodes": [0]}


def observations(scenario, seed, steps):
    """What was observed after every step, and the infos; the agent does nothing."""
    env, recorder = scenario.make(seed)
    env.reset(seed=0)
    seen = []
    for _ in range(steps):
        observation, reward, terminated, truncated, info = env.step(1)
        seen.append((observation, reward, truncated, info))
        if terminated or truncated:
            env.reset()
    return seen, recorder


def test_tasks_of_continual_control_begin_where_they_should():
    scenario = SCENARIOS["continual-mountaincar"].scaled(0.0)
    seen, recorder = observations(scenario, 3, 2400)
    assert [info["drift"]["observation_offset"] for *_, info in seen] == [0.0] * 800 + [1.0] * 800 + [2.0] * 800
    # Episodes end after 400 steps, though the environment's own limit is 200.
    assert [i + 1 for i, (_, _, truncated, _) in enumerate(seen) if truncated] == list(range(400, 2401, 400))
    assert recorder.returns()["published"] == [-400.0] * 3
    assert all(reward == -1 / 20 for _, reward, *_ in seen)
    # Velocities are within 0.07, offsets have a standard deviation of 0.02.
    positions = np.array([observation for observation, *_ in seen])
    offsets = [positions[at : at + 300].mean(0) - positions[:300].mean(0) for at in (800, 1600)]
    assert 0 < np.abs(offsets).max() < 0.1


def test_published_sizes():
    for name in drift_scenarios.WORLDS:
        scenario = SCENARIOS[f"continual-{name}"]
        assert scenario.steps == 1_600_000
        assert scenario.cut
        change = scenario.changes(scenario.task_steps, np.random.default_rng(0))[0]
        assert change.deviation == (0.02 if name == "mountaincar" else 2.0)
        assert scenario.tasks == (5 if name == "mountaincar" else 10)


@pytest.mark.parametrize("name", ["continual-cartpole", "permute-flip-acrobot", "gains-cartpole"])
def test_a_seed_draws_the_tasks(name):
    scenario = SCENARIOS[name].scaled(0.0)
    first, again, other = (observations(scenario, seed, 900)[0] for seed in (1, 1, 2))
    np.testing.assert_array_equal([o for o, *_ in first], [o for o, *_ in again])
    np.testing.assert_array_equal(*[[o for o, *_ in each[:100]] for each in (first, other)])
    assert not np.allclose([o for o, *_ in first[800:]], [o for o, *_ in other[800:]])


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenarios_can_be_made(name):
    scenario = SCENARIOS[name].scaled(0.0)
    if scenario.missing:
        pytest.skip(f"{scenario.missing} is not installed")
    env, recorder = scenario.make(0)
    assert env.observation_space.contains(env.reset(seed=0)[0])
    env.step(env.action_space.sample())
    assert recorder.steps == 1
    assert all(0 <= task < scenario.tasks for task in (*scenario.first, *(scenario.judged or ())))


def test_scaled_rewards_are_scored_as_they_were():
    seen, recorder = observations(SCENARIOS["reward-scale-cartpole"].scaled(0.0), 0, 1600)
    assert {reward for _, reward, *_ in seen} == {1 / 20, 10 / 20}
    plain = recorder.returns()["plain"]
    assert plain[0] == pytest.approx(plain[1], rel=0.2)


def test_the_backbone_is_the_same_for_all():
    env, _ = SCENARIOS["continual-cartpole"].scaled(0.0).make(0)
    for name in ("sb3", "sb3-layernorm", "ours"):
        policy = METHODS[name].make(drift_suite.DummyVecEnv([lambda: env]), 0, {}).policy
        widths = [m.out_features for m in policy.modules() if isinstance(m, torch.nn.Linear)]
        assert widths.count(256) >= 6, name
        slopes = {m.negative_slope for m in policy.modules() if isinstance(m, torch.nn.LeakyReLU)}
        assert slopes == {0.1}, name
        norms = [m for m in policy.modules() if isinstance(m, torch.nn.LayerNorm)]
        assert len(norms) == (6 if name == "sb3-layernorm" else 0)


def test_l2_init_is_the_gradient_of_the_squared_distance():
    torch.manual_seed(0)
    first = torch.randn(5)
    ours, plain = (torch.nn.Parameter(first.clone()) for _ in range(2))
    optimizers = [drift_methods.L2InitAdam([ours], lr=0.1, l2_init=0.3), torch.optim.Adam([plain], lr=0.1)]
    for _ in range(4):
        for parameter, optimizer, weight in ((ours, optimizers[0], 0.0), (plain, optimizers[1], 0.3)):
            optimizer.zero_grad()
            ((parameter - 2) ** 2).sum().add(weight * ((parameter - first) ** 2).sum()).backward()
            optimizer.step()
    torch.testing.assert_close(ours, plain)


def test_every_part_of_the_kit_is_left_out_once():
    parts = drift_methods.kit_parts()
    assert "observation_normalizer" in parts
    for name, off in parts.items():
        method = METHODS[f"kit-minus-{name.replace('_', '-')}"]
        assert method.parts({})[name] == off
        # Without the alarm, there is nothing to respond to; rewiring needs the response and the normaliser.
        needing = {"drift_alarm": ["drift_response"], "drift_response": [], "observation_normalizer": []}
        left_out = {name, *needing[name], "drift_rewiring"} if name in needing else {name}
        kept = {other: value for other, value in method.parts({}).items() if other not in left_out}
        assert kept == {other: value for other, value in METHODS["kit"].parts({}).items() if other not in left_out}
    assert METHODS["sb3"].parts({}) == {}


def entry(scenario="continual-cartpole", label="kit", seed=0, alarms=None, tasks=2, finished=True, **means):
    """A run with so many iterations in a task, and given returns by task."""
    plain = [value for task in means["plain"] for value in task]
    iterations = len(means["plain"][0])
    return {
        "scenario": scenario,
        "method": label,
        "label": label,
        "seed": seed,
        "scale": 1.0,
        "machine": "a machine",
        "settings": {"method": label, "tasks": tasks, "iterations": iterations},
        "finished": finished,
        "steps": len(plain) * 800,
        "seconds": 10.0,
        "cpu_seconds": 8.0,
        "alarms": alarms,
        "returns": {"published": [value - 1 for value in plain], "plain": plain, "episodes": [1] * len(plain)},
    }


def test_metrics_by_hand():
    # Random 24, trained 380: 90% is 344.4, 10% is 59.6.
    run = drift_statistics.summarize(entry(plain=[[100.0] * 20, [50.0] * 10 + [400.0] * 10]), 2)
    assert (run.first, run.last, run.change) == (100.0, 225.0, 125.0)
    assert (run.plain, run.published) == (162.5, 161.5)
    # The mean of five iterations is above with the last four of them.
    assert (run.steps_to_level, run.censored, run.collapsed) == (15 * 800, 0.0, False)
    dead = drift_statistics.summarize(entry(plain=[[100.0] * 20, [50.0] * 20]), 2)
    assert (dead.steps_to_level, dead.censored, dead.collapsed) == (20 * 800, 1.0, True)
    assert drift_statistics.summarize(entry(plain=[[100.0] * 20, [50.0] * 20]), 1).collapsed is False


def test_alarms_by_hand():
    plain = [[300.0] * 40, [50.0] * 40, [60.0] * 40]
    run = drift_statistics.summarize(entry(plain=plain, tasks=3, alarms=[7, 43, 44, 79, 81]), 3)
    # After the second switch, returns do not fall.
    assert run.delays == [3]
    assert run.false_alarms == 2
    assert run.quiet_updates == 120 - 2 * 25
    assert drift_statistics.summarize(entry(plain=plain, tasks=3, alarms=[79]), 3).delays == [None]
    assert drift_statistics.summarize(entry(plain=plain, tasks=3), 3).delays is None


def test_alarms_of_all_scenarios(tmp_path):
    plain = [[300.0] * 40, [50.0] * 40]
    for seed, alarms in enumerate([[43], [42, 70], []]):
        write(tmp_path, entry("length-cartpole", seed=seed, plain=plain, alarms=alarms))
    write(tmp_path, entry("actions-cartpole", plain=plain, alarms=[44]))
    groups, _ = drift_report.grouped(drift_suite.load(tmp_path), None)
    table = drift_report.detector_table(groups)
    for row in (
        "| driftproof | actions | 1 | 4 (1 of 1) | 0.00 |",
        "| driftproof | dynamics | 3 | 3 (2 of 3) | 3.03 |",
        "| driftproof | all | 4 | 3.5 (3 of 4) | 2.27 |",
    ):
        assert row in table
    assert drift_report.detector_table({}) is None


def test_the_return_to_a_is_that_of_its_first_tenth():
    plain = [[100.0] * 18 + [390.0] * 2, [30.0] * 20, [90.0] * 2 + [300.0] * 18]
    run = drift_statistics.summarize(entry("recurrence-cartpole", plain=plain, tasks=3), 3)
    assert (run.end_of_a, run.return_to_a) == (390.0, 90.0)


def test_sums_draw_seeds_within_scenarios():
    low, high = [0.0, 10.0], [1000.0, 1000.0]
    assert drift_statistics.stratified([low, high], drift_statistics.sum_of_iqms) == (1005.0, 1000.0, 1010.0)


def test_differences_are_paired_by_seed():
    ours = [drift_statistics.summarize(entry(seed=s, plain=[[100.0 * s + 7]]), 1) for s in (0, 1, 2)]
    theirs = [drift_statistics.summarize(entry(seed=s, plain=[[100.0 * s]]), 1) for s in (2, 1)]
    assert drift_statistics.paired(ours, theirs) == (7.0, 7.0, 7.0)


def write(folder, made):
    path = folder / made["scenario"] / made["label"] / f"{made['seed']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(made))


def test_a_report_is_made_of_a_folder(tmp_path):
    for seed in range(3):
        for label, value in (("sb3", 50.0), ("oracle", 200.0), ("kit", 300.0)):
            for world in drift_scenarios.WORLDS:
                write(tmp_path, entry(f"continual-{world}", label, seed, plain=[[value + seed] * 4] * 2))
    write(tmp_path, entry(label="ours", finished=False, plain=[[1.0] * 4]))
    drift_suite.write_report(tmp_path, tmp_path)
    text = (tmp_path / "drift_suite.md").read_text()
    assert "| driftproof | 300 [299, 301] |" in text
    assert "| 1,200 [" in text
    assert "| published: PPO | 61.8 | -373 | -499 | -347 |  | -1,157 |  |" in text
    assert "2 tasks of 3,200 steps (in full 10 of 160,000)" in text
    assert "| 100 |" in text
    assert "Cut off before the last task, and left out: continual-cartpole, ours: 1." in text
    assert len(json.loads((tmp_path / "drift_suite.json").read_text())) == 36
    assert (tmp_path / "drift_suite.png").stat().st_size > 1_000
    groups, left_out = drift_report.grouped(drift_suite.load(tmp_path), tasks=1)
    assert len(groups["continual-cartpole"]["ours"]) == 1
    assert not left_out


def test_results_of_earlier_campaigns_are_kept(tmp_path):
    target = tmp_path / "results"
    target.mkdir()
    for folder, seeds in (("first", (0, 1)), ("second", (1, 2))):
        for seed in seeds:
            write(tmp_path / folder, entry(seed=seed, plain=[[100.0 * len(folder)] * 4] * 2))
        drift_suite.write_report(tmp_path / folder, target)
    runs = drift_report.read_json(target / "drift_suite.json")
    assert [(run.seed, run.plain) for run in runs] == [(0, 500.0), (1, 600.0), (2, 600.0)]
    assert "2 tasks of 3,200 steps" in (target / "drift_suite.md").read_text()
    other = entry(seed=3, plain=[[1.0] * 4] * 2)
    other["settings"]["method"] = "kit-memory"
    write(tmp_path / "third", other)
    with pytest.raises(SystemExit, match=r"kit had another method in .*: give new runs a --label"):
        drift_suite.write_report(tmp_path / "third", target)


def test_finished_runs_are_not_run_again_and_others_are(tmp_path):
    runs = drift_suite.plan(["continual-cartpole"], ["sb3", "kit"], range(2), overrides={"gamma": 0.9}, scale=0.0)
    assert [run.key for run in runs[:2]] == ["continual-cartpole/sb3/0", "continual-cartpole/kit, gamma=0.9/0"]
    assert runs[0].settings["gamma"] == 0.99
    for run, finished in zip(runs[:2], (True, False), strict=True):
        path = run.path(tmp_path)
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"settings": run.settings, "finished": finished}))
    assert drift_suite.left_to_do(runs, tmp_path) == runs[1:]
    with pytest.raises(SystemExit, match=r"continual-cartpole/sb3/0 was run with another iterations"):
        drift_suite.left_to_do([replace(runs[0], scale=1.0)], tmp_path)


def test_tuning_has_its_own_seeds_and_tasks():
    given = drift_suite.parse(["--tuning", "--methods", "kit", "--set", "learning_rate=1e-3"])
    assert (given.scenarios, given.tasks, given.first_seed) == (["continual-cartpole", "continual-acrobot"], 2, 1000)
    assert given.overrides == [("learning_rate", 1e-3)]
    assert given.folder != drift_suite.FOLDER
    assert drift_suite.chosen(["mujoco", "market"]) == ["friction-halfcheetah", "market"]


@pytest.fixture
def _same_threads_afterwards():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.usefixtures("_same_threads_afterwards")
def test_an_oracle_is_new_at_every_switch(tmp_path, monkeypatch):
    made = []
    real = drift_methods.Method.make
    monkeypatch.setattr(
        drift_methods.Method, "make", lambda *given: made.append(real(*given)) or made[-1], raising=True
    )
    run = Run("continual-cartpole", "sb3-oracle", "sb3-oracle", seed=1, scale=0.0, tasks=2)
    drift_suite.train(run, tmp_path)
    assert [model.num_timesteps for model in made] == [800, 800]
    kept = json.loads(run.path(tmp_path).read_text())
    assert kept["finished"]
    assert len(kept["returns"]["published"]) == 2
    assert kept["steps"] == 1600


@pytest.mark.usefixtures("_same_threads_afterwards")
def test_a_run_that_is_cut_off_keeps_its_tasks(tmp_path, monkeypatch):
    class Alarmed(drift_suite.Progress):
        def _on_rollout_start(self):
            if self.recorder.steps:
                self.logger.record(drift_suite.ALARM, 1.0)
            super()._on_rollout_start()
            if self.recorder.steps:
                raise KeyboardInterrupt

    monkeypatch.setattr(drift_suite, "Progress", Alarmed)
    run = Run("continual-cartpole", "sb3", "sb3", seed=1, scale=0.0, tasks=3)
    with pytest.raises(KeyboardInterrupt):
        drift_suite.train(run, tmp_path)
    kept = json.loads(run.path(tmp_path).read_text())
    assert not kept["finished"]
    assert drift_statistics.tasks_of(kept) == 1
    assert drift_suite.left_to_do([run], tmp_path) == [run]


@pytest.mark.usefixtures("_same_threads_afterwards")
@pytest.mark.parametrize("scenario", ["continual-cartpole", "reward-scale-cartpole"])
def test_a_run_that_is_cut_off_continues(tmp_path, monkeypatch, scenario):
    """With the agent, the drift and the record of its last checkpoint, and a new episode."""
    monkeypatch.setattr(drift_suite, "KEPT_EVERY", 2)
    iterations = drift_scenarios.SCENARIOS[scenario].iterations
    run = Run(scenario, "kit", "kit", seed=1, scale=3 / iterations, tasks=2)
    whole, cut_off = tmp_path / "whole", tmp_path / "cut_off"
    drift_suite.train(run, whole)

    class CutOff(drift_suite.Progress):
        def _on_rollout_end(self):
            super()._on_rollout_end()
            if self.recorder.steps == 5 * 800:
                raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(drift_suite, "Progress", CutOff)
        with pytest.raises(KeyboardInterrupt):
            drift_suite.train(run, cut_off)
    assert drift_suite.left_to_do([run], cut_off) == [run]
    begun, learn = [], drift_suite.DistributionalPPO.learn

    def noted(self, steps, **given):
        (drift,) = self.env.env_method("get_wrapper_attr", "lasting_state")
        begun.append((self.num_timesteps, steps, drift["steps"], self.worker.observation is None))
        return learn(self, steps, **given)

    monkeypatch.setattr(drift_suite.DistributionalPPO, "learn", noted)
    drift_suite.train(run, cut_off)
    assert begun == [(4 * 800, 2 * 800, 4 * 800, True)]
    first, second = (json.loads(run.path(folder).read_text()) for folder in (whole, cut_off))
    assert second["finished"]
    for name, values in second["returns"].items():
        assert len(values) == 6
        assert values[:4] == first["returns"][name][:4]
    assert second["returns"]["published"][4] > 50
    assert second["alarms"] == first["alarms"]
    assert not list(cut_off.glob("**/*.zip"))


@pytest.mark.usefixtures("_same_threads_afterwards")
def test_a_checkpoint_of_other_settings_is_not_continued(tmp_path, monkeypatch):
    """And never will be, although the run's file is of the present settings from now on."""

    class CutOff(drift_suite.Progress):
        def _on_rollout_end(self):
            super()._on_rollout_end()
            raise KeyboardInterrupt

    run = Run("continual-cartpole", "kit", "kit", seed=1, scale=0.0, tasks=2)
    path = run.path(tmp_path)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"finished": False, "settings": {**run.settings, "tasks": 3}}))
    path.with_suffix(".zip").write_bytes(b"of another run")
    with monkeypatch.context() as patch:
        patch.setattr(drift_suite, "Progress", CutOff)
        with pytest.raises(KeyboardInterrupt):
            drift_suite.train(run, tmp_path)
    assert json.loads(path.read_text())["settings"] == run.settings
    assert not path.with_suffix(".zip").exists()
    drift_suite.train(run, tmp_path)
    assert json.loads(path.read_text())["finished"]
