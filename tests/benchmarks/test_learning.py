"""The learning benchmark: its averages, its own tasks, and what it runs again."""

from __future__ import annotations

import json
import pickle
import sys
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import learning
from learning_tasks import ALGORITHMS, TASKS, MemoryCue


def test_iqm_of_four_is_the_mean_of_the_middle_two():
    assert learning.iqm(np.array([100.0, 2.0, -50.0, 4.0])) == 3.0


def test_iqm_of_five_is_the_mean_of_the_middle_three():
    assert learning.iqm(np.array([1.0, 2.0, 3.0, 7.0, 1000.0])) == 4.0


@pytest.mark.parametrize("seeds", [1, 2, 3])
def test_iqm_of_few_is_the_mean(seeds):
    values = np.array([1.0, 5.0, 30.0])[:seeds]
    assert learning.iqm(values) == values.mean()


def test_iqm_is_taken_along_the_axis():
    values = np.array([[0.0, 8.0], [1.0, 6.0], [2.0, 4.0], [9.0, -90.0]])
    np.testing.assert_array_equal(learning.iqm(values), [1.5, 5.0])
    np.testing.assert_array_equal(learning.iqm(values.T, axis=1), [1.5, 5.0])


def test_interval_of_two_seeds_by_hand():
    """Drawn are (0,0), (0,1), (1,0), (1,1) alike, so a quarter of the averages is 0, half 5, a quarter 10."""
    assert learning.iqm_interval(np.array([0.0, 10.0]), level=0.8) == (5.0, 0.0, 10.0)
    assert learning.iqm_interval(np.array([0.0, 10.0]), level=0.3) == (5.0, 5.0, 5.0)


def test_interval_of_equal_seeds_is_a_point():
    assert learning.iqm_interval(np.full(5, 7.0)) == (7.0, 7.0, 7.0)


def test_interval_moves_and_stretches_with_the_values():
    values = np.random.default_rng(1).normal(size=8)
    np.testing.assert_allclose(
        learning.iqm_interval(3 * values + 2), 3 * np.array(learning.iqm_interval(values)) + 2, rtol=1e-12
    )


def test_interval_covers_the_truth_as_often_as_it_says():
    """The bootstrap of 20 draws is a little too narrow, and not more than that."""
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(200):
        _, low, high = learning.iqm_interval(rng.normal(size=20), level=0.9, draws=300)
        hits += low <= 0 <= high
    assert 0.8 <= hits / 200 <= 0.95


def test_interval_draws_whole_seeds():
    """Two points of a curve that are each other's mirror image have mirrored intervals only if drawn together."""
    points = np.array([3.0, 1.0, 4.0, 1.0, 5.0])
    middle, low, high = learning.iqm_interval(np.stack([points, -points], axis=1))
    np.testing.assert_allclose([middle[1], low[1], high[1]], [-middle[0], -high[0], -low[0]])


def test_curve_is_the_mean_of_the_last_episodes(monkeypatch):
    monkeypatch.setattr(learning, "POINTS", 4)
    monkeypatch.setattr(learning, "WINDOW", 2)
    steps, returns = [30, 50, 51, 90], [1.0, 3.0, 5.0, 9.0]
    # At steps 25, 50, 75 and 100.
    assert learning.curve(steps, returns, total=100) == [None, 2.0, 4.0, 7.0]


def play(env, policy, episodes):
    """Mean return of a policy that sees the episode's observations so far."""
    total = 0.0
    for episode in range(episodes):
        seen = [env.reset(seed=episode)[0]]
        over = False
        while not over:
            observation, reward, over, _, _ = env.step(policy(seen))
            seen.append(observation)
            total += reward
    return total / episodes


@pytest.mark.parametrize(("cues", "length"), [(2, 1), (4, 8)])
def test_memory_rewards_who_remembers(cues, length):
    env = MemoryCue(cues, length)
    assert play(env, lambda seen: np.argmax(seen[0][:cues]), 200) == 1.0


@pytest.mark.parametrize("cues", [2, 4])
def test_memory_gives_one_in_k_without_memory(cues):
    env = MemoryCue(cues)
    by_last = play(env, lambda seen: np.argmax(seen[-1][:cues]), 2_000)
    always_one = play(env, lambda seen: 1, 2_000)
    # Three standard deviations of a mean of 2,000 coins.
    assert by_last == pytest.approx(1 / cues, abs=0.034)
    assert always_one == pytest.approx(1 / cues, abs=0.034)


def test_memory_shows_the_cue_once_and_says_when_to_answer():
    env = MemoryCue(cues=3, length=4)
    seen, rewards, over = [env.reset(seed=5)[0]], [], False
    while not over:
        # The right answer counts for nothing before the end.
        observation, reward, over, truncated, _ = env.step(env.cue)
        seen.append(observation)
        rewards.append(reward)
        assert env.observation_space.contains(observation)
        assert not truncated
    assert rewards == [0, 0, 0, 0, 1]
    assert seen[0][:3].tolist() == np.eye(3)[env.cue].tolist()
    assert [o[3] for o in seen[:5]] == [1, 0, 0, 0, 0]
    assert [o[4] for o in seen[:5]] == [0, 0, 0, 0, 1]
    assert len({tuple(o[:3]) for o in seen[1:5]}) == 4


def test_memory_repeats_with_the_seed():
    first, second = MemoryCue(), MemoryCue()
    for env in (first, second):
        env.reset(seed=3)
    for _ in range(3):
        np.testing.assert_array_equal(first.step(0)[0], second.step(0)[0])


@pytest.mark.parametrize("arguments", [{"cues": 1}, {"length": 0}])
def test_memory_refuses_what_needs_no_memory(arguments):
    with pytest.raises(ValueError, match="at least"):
        MemoryCue(**arguments)


def test_masked_cartpole_shows_position_and_angle():
    masked, plain = TASKS["cartpole-masked"].make(), gym.make("CartPole-v1")
    assert masked.observation_space.shape == (2,)
    pairs = [(masked.reset(seed=1)[0], plain.reset(seed=1)[0])]
    pairs += [(masked.step(action)[0], plain.step(action)[0]) for action in (0, 1, 1, 0)]
    for seen, whole in pairs:
        np.testing.assert_array_equal(seen, whole[[0, 2]])
        assert masked.observation_space.contains(seen)


def test_tasks_name_what_exists_and_travel_to_other_processes():
    for name, task in TASKS.items():
        assert set(task.algorithms) | set(task.overrides) <= set(ALGORITHMS), name
        # Equal settings would not be equal work if a rollout did not divide into minibatches.
        assert task.settings["n_steps"] * task.n_envs % task.settings.get("batch_size", 64) == 0, name
        assert pickle.loads(pickle.dumps(task.make)) is task.make


def test_copies_name_the_symbol_of_four_steps_ago():
    env = TASKS["short-copy"].make()
    for shift, total in ((0, 1.0), (1, -1.0)):
        seen, rewards, over = [env.reset(seed=3)[0]], [], False
        while not over:
            symbol = seen[-5] if len(seen) > 4 else 0
            observation, reward, over, _, _ = env.step((symbol + shift) % 4)
            seen.append(observation)
            rewards.append(reward)
        assert rewards[:4] == [0.0] * 4
        assert len(rewards) == 52
        assert sum(rewards) == pytest.approx(total)


def test_the_area_under_a_curve_begins_with_the_first_episode():
    assert learning.area_under([None, None, 2.0, 4.0]) == 2.5
    assert np.isnan(learning.area_under([None]))


def test_variants_of_short_tasks_change_new_lstms_only_while_they_run():
    import short

    with short.initialised(short.gates(0, 1, 0)):
        core = short.LSTMCore(2, 3)
        before = core.recurrence.bias_ih_l0.detach().clone()
        core.initialise()
    change = (core.recurrence.bias_ih_l0.detach() - before).view(4, 3)
    torch.testing.assert_close(change, torch.tensor([0.0, 1.0, 0.0, 0.0])[:, None].expand(4, 3))
    plain = short.LSTMCore(2, 3)
    before = plain.recurrence.bias_ih_l0.detach().clone()
    plain.initialise()
    change = (plain.recurrence.bias_ih_l0.detach() - before).view(4, 3)
    torch.testing.assert_close(change, torch.tensor([1.0, -1.0, 0.0, 1.0])[:, None].expand(4, 3))
    assert {run.task for run in short.plan(1, None)} == {"short-masked", "short-copy", "short-bits", "short-box"}


def make_runs(seeds=2, **arguments):
    return learning.plan({"memory": TASKS["memory"]}, ["SB3 PPO", "driftproof"], seeds, **arguments)


class Fake:
    """Trains nothing; remembers what it was asked for, and fails on demand."""

    def __init__(self, fail_at=()):
        self.keys = []
        self.fail_at = fail_at

    def __call__(self, run):
        self.keys.append(run.key)
        if run.key in self.fail_at:
            raise RuntimeError("no luck")
        return {
            "task": run.task,
            "label": run.label,
            "seed": run.seed,
            "settings": run.settings,
            "final": 0.5 + run.seed,
            "steps_per_second": 10.0,
            "curve": [None, *[float(run.seed)] * (learning.POINTS - 1)],
        }


ALL_KEYS = ["memory/SB3 PPO/0", "memory/driftproof/0", "memory/SB3 PPO/1", "memory/driftproof/1"]


def test_finished_runs_are_kept_and_not_run_again(tmp_path):
    path = tmp_path / "new" / "learning.json"
    fake = Fake()
    assert list(learning.run_all(make_runs(1), path, train=fake)) == ALL_KEYS[:2]
    results = learning.run_all(make_runs(2), path, train=fake)
    assert fake.keys == ALL_KEYS
    assert sorted(results) == sorted(ALL_KEYS)
    assert json.loads(path.read_text()) == results


def test_an_interrupted_campaign_goes_on_where_it_was(tmp_path):
    path = tmp_path / "learning.json"

    class Interrupted(Fake):
        def __call__(self, run):
            if len(self.keys) == 3:
                raise KeyboardInterrupt
            return super().__call__(run)

    with pytest.raises(KeyboardInterrupt):
        learning.run_all(make_runs(), path, train=Interrupted())
    rest = Fake()
    learning.run_all(make_runs(), path, train=rest)
    assert rest.keys == ALL_KEYS[3:]


def test_a_failed_run_does_not_stop_the_others_and_is_run_again(tmp_path, capsys):
    path = tmp_path / "learning.json"
    with pytest.raises(SystemExit, match=r"1 of 4 runs failed: memory/driftproof/0"):
        learning.run_all(make_runs(), path, train=Fake(fail_at=ALL_KEYS[1:2]))
    assert "no luck" in capsys.readouterr().err
    again = Fake()
    learning.run_all(make_runs(), path, train=again)
    assert again.keys == ALL_KEYS[1:2]


def test_other_settings_under_the_same_name_are_refused(tmp_path):
    path = tmp_path / "learning.json"
    learning.run_all(make_runs(1), path, train=Fake())
    before = path.read_text()
    with pytest.raises(SystemExit, match=r"memory/SB3 PPO/0 was run with another steps\. .*--fresh"):
        learning.run_all(make_runs(2, steps=77), path, train=Fake())
    assert path.read_text() == before


def test_fresh_forgets_all_seeds_of_what_runs_again(tmp_path):
    path = tmp_path / "learning.json"
    results = learning.run_all(make_runs(), path, train=Fake())
    only_ours = [run for run in make_runs(1) if run.algorithm == "driftproof"]
    assert sorted(learning.without(only_ours, results)) == ["memory/SB3 PPO/0", "memory/SB3 PPO/1"]


def test_changes_go_to_driftproof_under_a_name_of_their_own(monkeypatch):
    monkeypatch.setitem(learning.NETWORKS, "driftproof", {"policy_kwargs": {"lstm_hidden_size": 64}})
    changes = {"optimizer_class": "adam", "policy_kwargs": {"twin_critics": False}}
    theirs, ours = make_runs(1, changes=changes)
    assert theirs == make_runs(1)[0]
    assert ours.label == "driftproof, optimizer_class='adam', policy_kwargs={'twin_critics': False}"
    assert ours.arguments["optimizer_class"] == "adam"
    assert ours.arguments["policy_kwargs"] == {"lstm_hidden_size": 64, "twin_critics": False}
    assert {name for name in theirs.arguments if theirs.arguments[name] != ours.arguments[name]} == set()


def test_schedules_are_written_as_text():
    arguments = learning.with_schedules({"learning_rate": "linear 1e-3", "gamma": 0.9, "optimizer_class": "adam"})
    assert arguments["learning_rate"](0.25) == pytest.approx(2.5e-4)
    assert (arguments["gamma"], arguments["optimizer_class"]) == (0.9, "adam")


def test_overrides_of_a_task_go_before_its_settings():
    task = replace(TASKS["memory"], overrides={"driftproof": {"n_epochs": 3}})
    theirs, ours = learning.plan({"memory": task}, ["SB3 PPO", "driftproof"], 1)
    assert (theirs.arguments["n_epochs"], ours.arguments["n_epochs"]) == (10, 3)


@pytest.mark.parametrize(
    ("text", "value"), [("gamma=0.9", 0.9), ('optimizer_class="adam"', "adam"), ("a={'b': None}", {"b": None})]
)
def test_setting_reads_python_literals(text, value):
    assert learning.setting(text) == (text.split("=")[0], value)


@pytest.mark.parametrize("text", ["optimizer_class=adam", "gamma", "gamma="])
def test_setting_refuses_other_text(text):
    with pytest.raises(learning.argparse.ArgumentTypeError, match="Python literal"):
        learning.setting(text)


def test_report_counts_seeds_at_the_threshold_and_tells_settings(tmp_path, monkeypatch):
    monkeypatch.setitem(learning.NETWORKS, "driftproof", {"policy_kwargs": {"lstm_hidden_size": 64}})
    results = learning.run_all(make_runs(), tmp_path / "learning.json", train=Fake())
    table, settings = learning.report(results)
    # Finals are 0.5 and 1.5, the threshold 0.95.
    assert "| SB3 PPO | 1 [0.5, 1.5] | 1 of 2 | 0.5 [0, 1] | 10 |" in table
    assert "`gamma=0.99`" in settings.splitlines()[0]
    assert settings.splitlines()[1:] == ["- driftproof: `policy_kwargs={'lstm_hidden_size': 64}`"]
    learning.plot(results, tmp_path / "learning.png")
    assert (tmp_path / "learning.png").stat().st_size > 1_000


@pytest.fixture
def _same_threads_afterwards():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("_same_threads_afterwards")
def test_a_real_run_through_the_file(tmp_path):
    tasks = {"memory": replace(TASKS["memory"], episodes=12, n_envs=2)}
    runs = learning.plan(tasks, ["SB3 PPO"], 1, steps=256)
    entry = learning.run_all(runs, tmp_path / "learning.json")["memory/SB3 PPO/0"]
    assert 0 <= entry["final"] <= 1
    assert len(entry["curve"]) == learning.POINTS
    # The first episode of each of two environments ends at step 18; points are 2.56 steps apart.
    assert entry["curve"][:6] == [None] * 6
    assert entry["curve"][7] is not None
    assert entry["settings"]["steps"] == 256
