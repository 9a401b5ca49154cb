"""Run folders of strangers: nothing outside of them is written, and nothing in them becomes the user's own."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest
import torch
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize

from driftproof.config import ConfigError, load, loads
from driftproof.ppo import DistributionalPPO
from driftproof.state import CheckpointError, read, write
from tests.cli.commands import call
from tests.security.strangers import SETTINGS


@pytest.fixture
def outside(tmp_path):
    folder = tmp_path / "outside"
    folder.mkdir()
    return folder


def test_a_linked_folder_of_tensorboard(stranger, outside, capsys):
    (stranger.run / "tensorboard").mkdir()
    (stranger.run / "tensorboard" / "member_0000").symlink_to(outside)
    code, _, errors = call(capsys, "train", "--resume", stranger.run)
    assert code == 1
    assert "member_0000 is a link" in errors
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize("command", [["evaluate"], ["export", "--onnx", "x.onnx"], ["report"], ["train", "--resume"]])
def test_a_linked_configuration(command, stranger, outside, capsys):
    config = stranger.run / "config.yaml"
    config.rename(outside / "config.yaml")
    config.symlink_to(outside / "config.yaml")
    code, _, errors = call(capsys, command[0], *command[1:], stranger.run)
    assert code == 1
    assert "config.yaml is a link" in errors


def test_hard_links(stranger, outside, capsys):
    metrics, mine = stranger.run / "metrics.jsonl", outside / "mine"
    mine.write_text("mine\n")
    metrics.unlink()
    os.link(mine, metrics)
    code, _, errors = call(capsys, "train", "--resume", stranger.run)
    assert code == 1
    assert "metrics.jsonl has hard links" in errors
    assert mine.read_text() == "mine\n"


def test_a_cluster_that_training_does_not_need_is_not_written_down_as_the_users_own(stranger, tmp_path, capsys):
    """Otherwise ``tune`` on the new run's configuration would connect to it."""
    pbt = {**SETTINGS["pbt"], "backend": "ray", "address": "ray://203.0.113.1:10001"}
    path = stranger.configure({"pbt": pbt})
    runs = ["--runs-dir", tmp_path / "runs", "--name", "new"]
    code, _, errors = call(capsys, "train", path, *runs)
    assert code == 1
    assert "names a Ray cluster" in errors
    assert not (tmp_path / "runs").exists()
    typed = ["--set", "pbt.address=ray://203.0.113.1:10001", "--set", "run.total_timesteps=32"]
    assert call(capsys, "train", path, *runs, *typed)[0] == 0
    assert load(tmp_path / "runs" / "new" / "config.yaml").trust.is_own


@pytest.mark.parametrize("state", ["[]", '"x"', "1", "null"])
def test_a_population_state_that_is_no_object(state, stranger, capsys):
    (stranger.run / "population_state.json").write_text(state)
    code, _, errors = call(capsys, "inspect", stranger.run)
    assert code == 1
    assert "not a mapping" in errors


def test_long_numbers_in_yaml_take_no_time():
    start = time.perf_counter()
    for value in (
        "1" * 200_000 + "x",
        "1" + "_" * 200_000 + "x",
        "0x" + "f" * 200_000,
        "1" + ":1" * 99_999,
        "1" * 5000,
    ):
        with pytest.raises(ConfigError) as error:
            loads(f"ppo: {{n_steps: {value}}}")
        assert len(str(error.value)) < 300
    assert time.perf_counter() - start < 5


def test_floats_of_yaml_are_still_read():
    for value in ("1e-4", "1.e-4", ".1e-3", "+1_0.0e-5", "1E-4", "0.0001"):
        assert loads(f"ppo: {{learning_rate: {value}}}").ppo.learning_rate == pytest.approx(1e-4)


@pytest.mark.parametrize("size", [2**2000, 2**20_000], ids=["no float", "not printed"])
@pytest.mark.parametrize("place", ["num_timesteps", "learning_rate"])
def test_large_numbers_in_the_agent_that_a_run_begins_with(place, size, stranger, tmp_path, capsys):
    checkpoint = read(stranger.checkpoint)
    checkpoint.tree["counters" if place == "num_timesteps" else "hyperparams"][place] = size
    write(tmp_path / "alone.zip", checkpoint.tree, config=checkpoint.config)
    options = ["--env", "CartPole-v1", "--runs-dir", tmp_path / "runs", "--set", "run.total_timesteps=32"]
    code, _, errors = call(capsys, "train", "--from", tmp_path / "alone.zip", *options)
    assert code == 0, errors


@pytest.mark.parametrize("change", ["normalizer", "n_steps"])
def test_wrong_settings_in_the_agent_that_a_run_begins_with(change, stranger, tmp_path, capsys):
    checkpoint = read(stranger.checkpoint)
    if change == "normalizer":
        checkpoint.tree["normalizer"] = [1]
    else:
        checkpoint.config["settings"]["n_steps"] = 2**20_000
    write(tmp_path / "alone.zip", checkpoint.tree, config=checkpoint.config)
    options = ["--env", "CartPole-v1", "--runs-dir", tmp_path / "runs"]
    code, _, errors = call(capsys, "train", "--from", tmp_path / "alone.zip", *options)
    assert code == 1
    assert errors.count("\n") <= 3
    assert not (tmp_path / "runs").exists()


class TestAttributes:
    """Attributes of agents, which files may hold: none of the agent's own, and all are checked first."""

    @pytest.mark.parametrize(
        "attributes",
        [
            *({name: 1} for name in ("logger", "predict", "policy", "env", "_logger", "__class__", "a b", "")),
            *({"fine": 1, name: 1} for name in ("state", "seed")),
            *([1], 1, None, {1: 1}),
        ],
        ids=str,
    )
    def test_wrong_ones_change_nothing(self, attributes, stranger):
        stranger.tamper(lambda config: config.update(attributes=attributes))
        env = VecNormalize(make_vec_env("CartPole-v1", 2), norm_reward=False)
        env.reset()
        before, drawn = env.obs_rms.mean.copy(), torch.get_rng_state()
        with pytest.raises(CheckpointError, match="attribute") as error:
            DistributionalPPO.load(stranger.checkpoint, env, device="cpu")
        assert len(str(error.value)) < 500
        np.testing.assert_array_equal(env.obs_rms.mean, before)
        assert torch.equal(torch.get_rng_state(), drawn)

    def test_others_are_set(self, stranger):
        stranger.tamper(lambda config: config.update(attributes={"note": "mine", "scores": [1, 2.5]}))
        agent = DistributionalPPO.load(stranger.checkpoint, device="cpu")
        assert (agent.note, agent.scores) == ("mine", [1, 2.5])
