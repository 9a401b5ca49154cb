"""The number of torch threads: as configured, as the environment says, or by the size of the work."""

from __future__ import annotations

import pytest
import torch

from driftproof.cli.threads import MACS_PER_STEP, chosen_threads, use_threads
from driftproof.config import loads
from driftproof.ppo import DistributionalPPO
from tests.cli.commands import SMALL, call


@pytest.fixture(autouse=True)
def unchanged(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    yield
    torch.set_num_threads(before)


def agent(width):
    return DistributionalPPO(
        "MlpPolicy", "CartPole-v1", n_steps=64, batch_size=64, policy_kwargs={"net_arch": [width]}, device="cpu"
    )


def test_small_networks_get_one_thread_and_large_ones_all_cores():
    small, large = agent(16), agent(1024)
    assert chosen_threads(small, 8, 0.0)[0] == 1
    large.batch_size = MACS_PER_STEP
    assert chosen_threads(large, 8, 0.0)[0] == 8
    assert chosen_threads(large, 8, 5.0)[0] == 1, "the machine is busy"


def test_settings_come_before_the_environment_and_both_before_the_choice(monkeypatch):
    assert use_threads(loads(""), agent(16)).startswith("1 torch thread (")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert use_threads(loads(""), agent(16)).endswith("(OMP_NUM_THREADS)")
    assert use_threads(loads("run: {threads: 3}"), agent(16)) == "3 torch threads (run.threads)"
    assert torch.get_num_threads() == 3


def test_the_first_line_tells(capsys, tmp_path):
    short = ["--set", "run.total_timesteps=32", "--set", "run.evaluation_episodes=0"]
    options = [*SMALL, *short, "--defaults", "--runs-dir", tmp_path]
    _, output, _ = call(capsys, "train", "--env", "CartPole-v1", *options)
    assert output.splitlines()[0] == "CartPole-v1 with MlpPolicy, 1 torch thread (run.threads)"
    _, output, _ = call(capsys, "train", "--env", "CartPole-v1", *options, "--set", "run.threads=null")
    assert output.splitlines()[0].startswith("CartPole-v1 with MlpPolicy, 1 torch thread (")
    assert "parameters; set run.threads for more" in output
