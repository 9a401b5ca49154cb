"""``driftproof inspect`` and ``driftproof convert``."""

from __future__ import annotations

import pytest
import torch

from driftproof.state import read, write
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


def test_convert_writes_what_an_older_file_holds(tmp_path, capsys):
    weights = {"weight": torch.arange(6.0)}
    torch.save({"format_version": "v1_policy_only", "model_state_dict": weights}, tmp_path / "old.pt")
    code, output, _ = call(capsys, "convert", tmp_path / "old.pt", tmp_path / "new.zip")
    assert code == 0
    assert "v1_policy_only" in output
    assert torch.equal(read(tmp_path / "new.zip").tree["policy"]["weight"], weights["weight"])
    code, _, errors = call(capsys, "convert", tmp_path / "old.pt", tmp_path / "new.zip")
    assert code == 1
    assert "exists" in errors
    assert call(capsys, "convert", tmp_path / "old.pt", tmp_path / "new.zip", "--overwrite")[0] == 0


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
    assert errors == f"driftproof: {checkpoint} has today's format already: there is nothing to convert\n"


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
