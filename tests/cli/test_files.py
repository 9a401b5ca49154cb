"""``driftproof inspect`` and ``driftproof convert``."""

from __future__ import annotations

import io
import zipfile

import numpy as np
import pytest
import torch

from driftproof.ppo import DistributionalPPO
from driftproof.state import compare, without, write
from tests.cli.commands import SMALL, call, run


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "agent.zip"
    write(path, {"policy": {"weight": torch.zeros(3, 4)}, "counters": {"steps": 7}}, exact=True)
    return path


def test_inspect_tells_what_is_inside(checkpoint):
    code, output, _ = run("inspect", checkpoint, "--leaves")
    assert code == 0
    for text in ("intact", "policy", "counters", "policy/weight", "3x4", "torch"):
        assert text in output, text


def test_inspect_notices_damage(checkpoint, capsys):
    data = bytearray(checkpoint.read_bytes())
    data[data.index(b"\0" * 40) + 20] ^= 1
    checkpoint.write_bytes(data)
    code, output, _ = call(capsys, "inspect", checkpoint)
    assert code == 1
    assert "DAMAGED" in output


@pytest.fixture
def old(tmp_path):
    """A member of a population, as it was written, of an agent with the default networks."""
    settings = {"n_steps": 16, "batch_size": 16, "n_epochs": 1, "layer_norm": False, "device": "cpu"}
    agent = DistributionalPPO("MlpLstmPolicy", "CartPole-v1", **settings)
    agent.learn(32)
    path = tmp_path / "member_0_step_2.pt"
    content = {"format_version": "v2_full_parameters", "data": agent.get_parameters(), "step": 2, "performance": 9.5}
    torch.save(content, path)
    return path, agent


def test_convert_makes_an_agent_that_can_be_loaded_and_evaluated(old, tmp_path, capsys):
    path, agent = old
    target = tmp_path / "new.zip"
    code, output, _ = call(capsys, "convert", path, target, "--env", "CartPole-v1")
    assert code == 0
    assert "v2_full_parameters" in output
    assert "policy: 26 of 26 tensors loaded" in output
    loaded = DistributionalPPO.load(target, "CartPole-v1", device="cpu")
    given, taken = (without(each.get_parameters(), ["policy.optimizer/param_groups"]) for each in (agent, loaded))
    assert compare(taken, given) == []
    returns = [each.predict_quantiles(np.ones(4, np.float32))[0] for each in (agent, loaded)]
    np.testing.assert_allclose(*returns)  # Layer normalisation, which has no tensors, would make a difference.
    loaded.learn(32)
    code, output, _ = call(capsys, "evaluate", target, "--env", "CartPole-v1", "--episodes", 1)
    assert code == 0
    assert "1 episodes of CartPole-v1" in output
    code, _, errors = call(capsys, "convert", path, target, "--env", "CartPole-v1")
    assert code == 1
    assert "exists" in errors
    assert call(capsys, "convert", path, target, "--env", "CartPole-v1", "--overwrite")[0] == 0


def test_convert_takes_zips_with_all_their_states(old, tmp_path, capsys):
    """As Stable-Baselines3 wrote them, of an algorithm that added states to its parameters."""
    parameters = old[1].get_parameters()
    vgs = {"step_count": 320, "grad_mean_ema": 1.5e-05, "grad_var_ema": 1.7e-07, "grad_norm_ema": 0.030}
    states = {name: parameters[name] for name in ("policy", "policy.optimizer")}
    states |= {"vgs_state": vgs, "kl_penalty_state": {"kl_beta": 0.1}, "pytorch_variables": {}}
    with zipfile.ZipFile(tmp_path / "old.zip", "w") as archive:
        archive.writestr("data", "{}")
        for name, state in states.items():
            file = io.BytesIO()
            torch.save(state, file)
            archive.writestr(f"{name}.pth", file.getvalue())
        archive.writestr("_stable_baselines3_version", "2.3.2")
    target = tmp_path / "new.zip"
    settings = ["--set", "ppo.target_kl=0.02", "--set", "ppo.kl_penalty=true"]
    code, output, errors = call(capsys, "convert", tmp_path / "old.zip", target, "--env", "CartPole-v1", *settings)
    assert code == 0, errors
    assert "vgs_state: variance gradient scaling: the state is of an earlier version" in output
    assert "kl_penalty_state: the KL penalty begins anew" in output
    assert "pytorch_variables" in output
    for name in ("vgs", "kl_penalty", "optimizer"):
        assert f"{name}: not in the file" not in output
    loaded = DistributionalPPO.load(target, "CartPole-v1", device="cpu")
    assert compare(loaded.get_parameters()["policy"], parameters["policy"]) == []
    assert float(loaded.vgs.metrics()["vgs/grad_norm_ema"]) == pytest.approx(0.030)


def test_convert_builds_networks_as_configured(tmp_path, capsys):
    networks = {"net_arch": [8], "lstm_hidden_size": 4}
    agent = DistributionalPPO("MlpLstmPolicy", "CartPole-v1", policy_kwargs=networks, device="cpu")
    torch.save({"format_version": "v1_policy_only", "data": agent.policy.state_dict()}, tmp_path / "old.pt")
    (tmp_path / "agent.yaml").write_text("policy: {net_arch: [8], lstm_hidden_size: 4}\nenv: {id: CartPole-v1}\n")
    command = ["convert", tmp_path / "old.pt", tmp_path / "new", "--config", tmp_path / "agent.yaml"]
    code, output, errors = call(capsys, *command)
    assert code == 0, errors
    assert "20 of 20 tensors loaded" in output
    assert "optimizer: not in the file" in output
    loaded = DistributionalPPO.load(tmp_path / "new.zip", device="cpu")
    assert compare(dict(loaded.policy.state_dict()), dict(agent.policy.state_dict())) == []


def test_convert_lists_what_fits_in_part(old, tmp_path, capsys):
    settings = ["--set", "policy.net_arch=[16]"]
    code, output, _ = call(capsys, "convert", old[0], tmp_path / "new.zip", "--env", "CartPole-v1", *settings)
    assert code == 0
    assert "policy: of another shape: " in output
    assert "policy: no place for: " in output
    assert "policy.optimizer: not loaded, since it belongs to other weights" in output


def test_convert_says_which_option_is_missing(old, tmp_path, capsys):
    code, _, errors = call(capsys, "convert", old[0], tmp_path / "new.zip")
    assert code == 1
    assert "--env ID" in errors
    assert not (tmp_path / "new.zip").exists()


def test_convert_writes_nothing_if_no_tensor_fits(tmp_path, capsys):
    torch.save({"format_version": "v1_policy_only", "data": {"weight": torch.arange(6.0)}}, tmp_path / "old.pt")
    code, _, errors = call(capsys, "convert", tmp_path / "old.pt", tmp_path / "new.zip", "--env", "CartPole-v1")
    assert code == 1
    assert "no tensor of its policy fits" in errors
    assert not (tmp_path / "new.zip").exists()


def test_inspect_takes_a_run(tmp_path, capsys):
    options = ["--env", "CartPole-v1", *SMALL, "--set", "run.total_timesteps=32", "--set", "run.evaluation_episodes=0"]
    assert call(capsys, "train", *options, "--runs-dir", tmp_path, "--name", "mine")[0] == 0
    code, output, _ = call(capsys, "inspect", "mine", "--runs-dir", tmp_path)
    assert code == 0
    assert "checkpoint_000000000032.zip" in output
    assert "intact" in output


def test_convert_refuses_what_needs_none(checkpoint, capsys):
    code, _, errors = call(capsys, "convert", checkpoint, checkpoint.with_name("new.zip"))
    assert code == 1
    assert errors == f"driftproof: {checkpoint} is in the present format: there is nothing to convert\n"


@pytest.mark.parametrize("content", [None, b"", b"no checkpoint"])
@pytest.mark.parametrize("command", ["inspect", "convert"])
def test_mistakes_are_one_line(command, content, tmp_path, capsys):
    path = tmp_path / "file.zip"
    if content is not None:
        path.write_bytes(content)
    code, _, errors = call(capsys, command, path, *([tmp_path / "new.zip"] if command == "convert" else []))
    assert code == 1
    assert errors.startswith("driftproof: ")
    assert str(path) in errors
    assert len(errors.splitlines()) == 1
    assert not (tmp_path / "new.zip").exists()
