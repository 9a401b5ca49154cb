"""``driftproof train --from``: a new run begins with what another agent has learned."""

from __future__ import annotations

import json

import pytest
import torch
from stable_baselines3 import PPO

from driftproof.config import load
from driftproof.ppo import DistributionalPPO, Linear
from driftproof.state import CheckpointStore, compare, read, write
from tests.cli.commands import SMALL, call
from tests.cli.test_commands import error

SHORT = ["--set", "run.total_timesteps=64", "--set", "run.evaluation_episodes=0"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a run that others begin with."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture
def source(runs, capsys):
    if not (runs / "first").exists():
        options = ["--env", "CartPole-v1", *SMALL, *SHORT, "--set", "ppo.learning_rate=0.002"]
        options += ["--set", "env.normalize_observations=true"]
        code, _, errors = call(capsys, "train", *options, "--runs-dir", runs, "--name", "first")
        assert code == 0, errors
    return runs / "first"


def trained(capsys, runs, name, *options):
    code, output, errors = call(capsys, "train", *options, "--runs-dir", runs, "--name", name)
    assert code == 0, errors
    return runs / name, output


def checkpoints(folder):
    return [read(path) for path in CheckpointStore(folder / "checkpoints").list()]


def test_a_run_begins_with_another(source, runs, capsys):
    folder, output = trained(capsys, runs, "second", "--from", "first")
    assert f"starts from {source}" in output
    assert "loaded: policy, return_scale, normalizer, optimizer, vgs" in output
    assert load(folder / "config.yaml") == load(source / "config.yaml")
    before, first, later = checkpoints(source)[-1], read(folder / "origin.zip"), checkpoints(folder)
    assert compare(first.tree["optimizer"]["state"], before.tree["optimizer"]["state"]) == []
    for name in ("policy", "return_scale", "normalizer", "vgs"):
        assert compare(first.tree[name], before.tree[name]) == [], name
    assert first.tree["counters"]["num_timesteps"] == 0
    assert [each.tree["counters"]["num_timesteps"] for each in later] == [32, 64]
    assert compare(later[0].tree["policy"], first.tree["policy"])
    origin = json.loads((folder / "origin.json").read_text())
    assert origin["checkpoint"].endswith("first/checkpoints/checkpoint_000000000064.zip")
    assert origin["num_timesteps"] == 64


def test_settings_may_be_others(source, runs, capsys, tmp_path):
    folder, output = trained(capsys, runs, "changed", "--from", source, "--set", "ppo.learning_rate=0.001")
    assert "learning_rate 0.002 in the checkpoint, 0.001 here" in output
    assert checkpoints(folder)[-1].tree["hyperparams"]["learning_rate"] == 0.001
    config = load(source / "config.yaml")
    (tmp_path / "c.yaml").write_text((source / "config.yaml").read_text().replace("adaptive_upgd", "adam"))
    folder, output = trained(capsys, runs, "adam", tmp_path / "c.yaml", "--from", source, "--best")
    assert "optimizer: begins anew, since its state does not fit" in output
    assert load(folder / "config.yaml") != config


def test_other_networks_are_told(source, runs, capsys):
    line = error(capsys, "train", "--from", source, "--set", "policy.net_arch=[16]", "--runs-dir", runs, "--name", "x")
    assert "action_head.weight is (2, 8) in the checkpoint and (2, 16) here" in line
    line = error(capsys, "train", "--from", source, "--env", "Acrobot-v1", "--runs-dir", runs, "--name", "x")
    assert "actor_network.0.weight is (8, 4) in the checkpoint and (8, 6) here" in line
    options = ["--set", "env.normalize_observations=false", "--runs-dir", runs, "--name", "x"]
    assert "normalised" in error(capsys, "train", "--from", source, *options)
    assert not (runs / "x").exists()


def test_a_run_that_was_killed_at_once_is_resumed_with_what_it_began_with(source, runs, capsys, monkeypatch):
    from driftproof.cli import training

    def killed(*_):
        raise OSError("no space")

    monkeypatch.setattr(training, "_train", killed)
    assert call(capsys, "train", "--from", source, "--runs-dir", runs, "--name", "killed")[0] == 1
    monkeypatch.undo()
    assert call(capsys, "train", "--resume", runs / "killed")[0] == 0
    assert compare(read(runs / "killed" / "origin.zip").tree["policy"], checkpoints(source)[-1].tree["policy"]) == []
    # Both began with it: what comes after is the same.
    assert (
        compare(checkpoints(runs / "killed")[-1].tree["policy"], checkpoints(runs / "second")[-1].tree["policy"]) == []
    )


def test_options_that_say_nothing(source, runs, capsys):
    assert "give --from" in error(capsys, "train", "--env", "CartPole-v1", "--best", "--runs-dir", runs)
    assert "leave out --from" in error(capsys, "train", "--resume", source, "--from", source)
    assert "there is no run 'nothing'" in error(capsys, "train", "--from", "nothing", "--runs-dir", runs)


class TestCheckpoints:
    def test_of_agents_made_in_python(self, tmp_path, capsys):
        """All that a configuration can say of an agent comes from its checkpoint."""
        given = {
            "n_steps": 16,
            "batch_size": 16,
            "n_epochs": 1,
            "learning_rate": Linear(1e-3, 1e-4),
            "optimizer_class": torch.optim.AdamW,
            "optimizer_kwargs": {"betas": (0.8, 0.9)},
            "vgs_kwargs": {"warmup_steps": 3},
            "target_kl": 0.05,
            "kl_penalty": {"kp": 0.2},
            "policy_kwargs": {"activation_fn": torch.nn.ReLU, "net_arch": {"pi": [8], "vf": []}, "shared_lstm": True}
            | {"enable_critic_lstm": False, "lstm_hidden_size": 8, "num_quantiles": 4, "features_extractor_kwargs": {}},
        }
        agent = DistributionalPPO("MlpLstmPolicy", "CartPole-v1", **given, device="cpu").learn(16)
        agent.save(tmp_path / "agent.zip")
        options = ["--from", tmp_path / "agent.zip", "--env", "CartPole-v1", *SHORT]
        folder, output = trained(capsys, tmp_path, "run", *options)
        assert "loaded: policy, return_scale, normalizer, optimizer, vgs, kl_penalty" in output
        found = DistributionalPPO.load(CheckpointStore(folder / "checkpoints").latest(), device="cpu")
        settings = found.settings()
        for name in ("n_steps", "batch_size", "n_epochs", "learning_rate", "target_kl"):
            assert settings[name] == given[name]
        assert type(found.policy.optimizer) is torch.optim.AdamW
        assert found.policy.optimizer.param_groups[0]["betas"] == (0.8, 0.9)
        assert found.vgs.warmup_steps == 3
        assert found.policy.critic_core is None
        first = read(folder / "origin.zip")
        assert compare(first.tree["policy"], dict(agent.policy.state_dict())) == []

    def test_of_stable_baselines3_once_converted(self, tmp_path, capsys):
        PPO("MlpPolicy", "CartPole-v1", n_steps=32, batch_size=32, n_epochs=1, device="cpu").learn(32).save(
            tmp_path / "sb3"
        )
        target = tmp_path / "agent.zip"
        assert call(capsys, "convert", tmp_path / "sb3.zip", target, "--env", "CartPole-v1")[0] == 0
        assert "give --env" in error(capsys, "train", "--from", target, "--runs-dir", tmp_path)
        folder, _ = trained(capsys, tmp_path, "run", "--from", target, "--env", "CartPole-v1", *SHORT)
        first = read(folder / "origin.zip")
        assert compare(first.tree["policy"], read(target).tree["policy"]) == []
        assert first.tree["return_scale"]["initialised"]
        line = error(capsys, "train", "--from", tmp_path / "sb3.zip", "--env", "CartPole-v1", "--runs-dir", tmp_path)
        assert "driftproof convert" in line

    @pytest.mark.parametrize("place", ["optimizer_class", "features_extractor_class", "activation_fn", "policy"])
    def test_that_name_modules(self, tmp_path, capsys, monkeypatch, place):
        (tmp_path / f"surprise_{place}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
        monkeypatch.chdir(tmp_path)
        agent = DistributionalPPO("MlpPolicy", "CartPole-v1", device="cpu")
        for named in (f"surprise_{place}:Thing", {"$foreign": f"surprise_{place}.Thing"}):
            config = agent.config()
            where = (
                config["settings"] if place in ("optimizer_class", "policy") else config["settings"]["policy_kwargs"]
            )
            where[place] = named
            write(tmp_path / "agent.zip", agent.state_tree(), config=config)
            code, _, errors = call(capsys, "train", "--from", "agent.zip", "--env", "CartPole-v1", "--name", "x")
            assert code == 1
            assert "Traceback" not in errors
        assert not (tmp_path / "ran").exists()
        assert not (tmp_path / "runs" / "x").exists()

    @pytest.mark.parametrize("tree", [{}, {"policy": 3}, {"policy": {}}, [1], {"policy": {"x": torch.zeros(1)}}])
    def test_without_an_agent(self, tmp_path, capsys, tree):
        for config in ({}, {"settings": 3}, {"settings": {"learning_rate": {"$schedule": 3}}, "n_envs": 1}):
            write(tmp_path / "x.zip", tree, config=config)
            code, _, errors = call(
                capsys, "train", "--from", tmp_path / "x.zip", "--env", "CartPole-v1", "--runs-dir", tmp_path
            )
            assert code == 1
            assert "Traceback" not in errors
            assert not list(tmp_path.glob("cartpole*"))
