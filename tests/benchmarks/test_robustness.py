"""The robustness benchmark: what it runs, keeps and concludes, and how it counts passes."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import learning
import robustness

from driftproof.adversarial import SAPPOConfig
from driftproof.ppo import DistributionalPPO


def entry(variant, seed, clean, mad, learned):
    attacks = [("clean", 0.0, clean), ("mad", 0.1, (clean + mad) / 2), ("mad", 0.2, mad), ("learned", 0.2, learned)]
    return {
        "task": "pendulum",
        "label": variant,
        "seed": seed,
        "settings": {"steps": 1},
        "robustness": [{"attack": name, "epsilon": e, "mean": m, "low": m, "high": m} for name, e, m in attacks],
    }


RESULTS = {
    "a": entry("plain", 0, -100.0, -500.0, -400.0),
    "b": entry("plain", 1, -100.0, -300.0, -500.0),
    "c": entry("robust_kl_coef=0.1", 0, -105.0, -200.0, -205.0),
    "d": entry("robust_kl_coef=0.1", 1, -105.0, -205.0, -155.0),
}


def test_the_strongest_attack_is_found_for_every_agent():
    assert [robustness.returns(e)["strongest", 0.2] for e in RESULTS.values()] == [-500, -500, -205, -205]
    assert robustness.returns(RESULTS["a"])["strongest", 0.1] == -300


def test_the_report_says_what_is_kept_and_what_is_won():
    table, verdict, settings = robustness.report(RESULTS)
    assert "| mad, ε 0.2 | -400 [-500, -300] | -202.5 [-205, -200] |" in table
    assert "| strongest, ε 0.2 | -500 [-500, -500] | -205 [-205, -205] |" in table
    assert "-105 against -100 (-5.0%)" in verdict
    assert "-205 against -500; that attack costs 100 against 400 (0.25 times)" in verdict
    assert "steps=1" in settings


def test_it_is_drawn(tmp_path):
    robustness.plot(RESULTS, tmp_path / "robustness.png")
    assert (tmp_path / "robustness.png").stat().st_size > 1_000


def test_variants_of_a_task_differ_in_one_thing():
    plain, *attacked = robustness.plan(["hopper"], 1)
    assert plain.key == "hopper/plain/0"
    assert [run.adversarial.robust_kl_coef for run in attacked] == [0.03, 0.1, 0.3, 1.0]
    for run in attacked:
        assert run.settings.keys() - plain.settings.keys() == {"adversarial"}
        assert all(run.settings[name] == value for name, value in plain.settings.items())


def test_passes_are_counted_by_samples_and_networks():
    settings = {"n_steps": 16, "batch_size": 16, "n_epochs": 2, "seed": 0, "device": "cpu"}
    plain, attacked = (
        DistributionalPPO("MlpPolicy", "CartPole-v1", **settings, adversarial=adversarial).learn(16)
        for adversarial in (None, SAPPOConfig(warmup_updates=0))
    )
    assert robustness.passes(plain) == 1
    assert robustness.passes(attacked) == 1 + (3 + 1) / 2
    attacked = DistributionalPPO(
        "MlpPolicy", "CartPole-v1", **settings, adversarial=SAPPOConfig(warmup_updates=0, attack_value=False)
    ).learn(16)
    assert robustness.passes(attacked) == 1 + (3 + 1) / 4


@pytest.fixture
def _same_threads_afterwards():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.usefixtures("_same_threads_afterwards")
def test_a_real_run_through_the_file(tmp_path, monkeypatch, capsys):
    small = {"n_steps": 32, "batch_size": 64, "n_epochs": 1}
    task = replace(
        robustness.TASKS["pendulum"], n_envs=2, settings=small, adversary_settings={**small, "batch_size": 320}
    )
    monkeypatch.setitem(robustness.TASKS, "pendulum", task)
    monkeypatch.setattr(robustness, "AGENTS", tmp_path / "agents")
    run = replace(robustness.plan(["pendulum"], 1)[-1], steps=128, adversary_steps=320, episodes=1)
    path = tmp_path / "robustness.json"
    kept = learning.run_all([run], path, train=robustness.train)["pendulum/robust_kl_coef=0.1/0"]
    attacks = [(r["attack"], r["epsilon"]) for r in kept["robustness"]]
    assert attacks[0] == ("clean", 0.0)
    assert attacks[-1] == ("learned", task.epsilons[-1])
    assert kept["final"] == kept["robustness"][0]["mean"] < 0
    # The agent is not trained again.
    agent, speed = robustness.trained(run)
    assert speed == kept["steps_per_second"]
    assert agent.adversary.updates == 2
    assert json.loads(path.read_text())["pendulum/robust_kl_coef=0.1/0"] == kept
