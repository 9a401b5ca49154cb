"""A population in this process: it exploits, leaves the process's generators alone, and resumes exactly."""

from __future__ import annotations

import json
import random
from functools import partial

import numpy as np
import pytest
import torch

from driftproof.pbt import HyperparamConfig, PBTRunner, Trainee, read_events
from driftproof.ppo import DistributionalPPO
from driftproof.runs.folder import RunFolder
from driftproof.state import compare
from tests.pbt.populations import config, make_agent, states


def test_a_small_population_exploits(tmp_path):
    runner = PBTRunner(config(), make_agent, 8, tmp_path)
    best = runner.run()
    assert runner.updates == [8, 8, 8]
    events = read_events(tmp_path / "population.json")
    exploits = [event for event in events if event.kind == "exploit"]
    assert exploits
    assert all(event.donor != event.member and event.format == "v2_full_parameters" for event in exploits)
    assert [event.kind for event in events[:3]] == ["start"] * 3
    for member in runner.scheduler.members:
        agent = runner.load_member(member.id)
        assert {name: agent.hyperparams[name] for name in member.hyperparams} == member.hyperparams
    loaded = DistributionalPPO.load(runner.path_of(runner.best_member))
    assert not compare(loaded.get_parameters(), best.get_parameters())
    assert len(list((tmp_path / "members").iterdir())) == 3


def test_the_generators_of_the_process_are_left_alone(tmp_path):
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = random.random(), np.random.random(), torch.rand(1).item()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    PBTRunner(config(), make_agent, 2, tmp_path).run()
    assert (random.random(), np.random.random(), torch.rand(1).item()) == expected


def test_members_do_not_disturb_each_other(tmp_path):
    """Without any exploit, a member trains as it does alone."""
    runner = PBTRunner(config(perturbation_interval=4), make_agent, 8, tmp_path / "run")
    runner.run(updates=4)
    for member in range(3):
        alone = make_agent(member)
        for name, value in runner.scheduler.initial_hyperparams()[member].items():
            alone.hyperparams[name] = value
        Trainee(alone, 8).train(4)
        trained = runner.load_member(member)
        assert not compare(dict(trained.policy.state_dict()), dict(alone.policy.state_dict()))


def test_same_seed_same_population(tmp_path):
    runs = [PBTRunner(config(), make_agent, 6, tmp_path / str(i), seed=5) for i in range(2)]
    for runner in runs:
        runner.run()
    assert [vars(event) for event in runs[0].scheduler.events] == [vars(event) for event in runs[1].scheduler.events]
    assert not compare(states(runs[0]), states(runs[1]))


def test_synchronous_decisions_are_for_all_at_once(tmp_path):
    known = set()

    def noting(runner):
        known.add(tuple(member.step for member in runner.scheduler.members))

    PBTRunner(config(), make_agent, 4, tmp_path, synchronous=True, on_change=noting).run()
    assert known == {(0, 0, 0), (2, 2, 2), (4, 4, 4)}


def test_what_is_not_decided_about_is_not_offered_after_an_interruption(tmp_path):
    runner = PBTRunner(config(), make_agent, 4, tmp_path, synchronous=True)
    runner.on_change = lambda runner: runner.stop() if max(runner.updates) == 4 else None
    runner.run()
    resumed = PBTRunner.resume(tmp_path, make_agent)
    assert resumed.updates == [4, 2, 2]
    assert RunFolder(tmp_path).read_state().members[0].offered == "member_0000_000000002.zip"


class InterruptedRunError(Exception):
    pass


@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize("after", [1, 4, 5, 8])
def test_resume_equals_uninterrupted(tmp_path, monkeypatch, after, synchronous):
    """Whenever it is interrupted, also in the middle of a round, and just before the state is written."""
    whole = PBTRunner(config(), make_agent, 8, tmp_path / "whole", seed=2, synchronous=synchronous)
    whole.run()
    cut = PBTRunner(config(), make_agent, 8, tmp_path / "cut", seed=2, synchronous=synchronous)
    save, count = cut._save, iter(range(100))

    def failing():
        if next(count) == after:
            raise InterruptedRunError
        save()

    monkeypatch.setattr(cut, "_save", failing)
    with pytest.raises(InterruptedRunError):
        cut.run()
    # Another process, which has drawn other numbers.
    random.seed(99), np.random.seed(99), torch.manual_seed(99)
    resumed = PBTRunner.resume(tmp_path / "cut", make_agent)
    resumed.run()
    assert [vars(event) for event in resumed.scheduler.events] == [vars(event) for event in whole.scheduler.events]
    assert not compare(states(resumed), states(whole))
    assert resumed.scheduler.statistics() == whole.scheduler.statistics()
    assert read_events(tmp_path / "cut" / "population.json") == whole.scheduler.events


def test_a_folder_that_is_taken_is_refused(tmp_path):
    PBTRunner(config(), make_agent, 2, tmp_path).run()
    with pytest.raises(FileExistsError, match="already holds a population"):
        PBTRunner(config(), make_agent, 2, tmp_path)
    state = json.loads((tmp_path / "population_state.json").read_text())
    (tmp_path / "population_state.json").write_text(json.dumps({**state, "version": 99}))
    with pytest.raises(ValueError, match="newer driftproof"):
        PBTRunner.resume(tmp_path, make_agent)


def test_parameters_lie_where_the_configuration_says(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    PBTRunner(config(checkpoint_dir=elsewhere), make_agent, 4, tmp_path / "run").run(updates=2)
    PBTRunner.resume(tmp_path / "run", make_agent).run()
    assert len(list(elsewhere.glob("*.zip"))) == 3
    assert not (tmp_path / "run" / "members").exists()


def test_what_cannot_change_is_refused_before_training(tmp_path):
    wrong = config(hyperparams=[HyperparamConfig("n_steps", 16, 64)])
    with pytest.raises((KeyError, ValueError), match="n_steps"):
        PBTRunner(wrong, make_agent, 2, tmp_path)
    assert not (tmp_path / "population_state.json").exists()


def test_a_performance_that_is_no_number_is_never_the_best(tmp_path):
    def metric(agent):
        return float("nan") if agent.seed == 10 else agent.num_timesteps * 1.0

    runner = PBTRunner(config(), make_agent, 4, tmp_path, metric=metric)
    assert runner.run().seed != 10


def test_the_optimizer_may_begin_anew(tmp_path):
    runner = PBTRunner(config(optimizer_exploit_strategy="reset"), partial(make_agent), 8, tmp_path)
    runner.run()
    assert any(event.kind == "exploit" for event in runner.scheduler.events)
