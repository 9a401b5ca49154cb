"""Commands, as they are run."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from driftproof.state import read, write


def run(*arguments):
    """Exit code, output and errors of a command."""
    done = subprocess.run(
        [sys.executable, "-m", "driftproof", *map(str, arguments)], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr


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


def test_inspect_notices_damage(checkpoint):
    data = bytearray(checkpoint.read_bytes())
    data[data.index(b"\0" * 40) + 20] ^= 1
    checkpoint.write_bytes(data)
    code, output, _ = run("inspect", checkpoint)
    assert code == 1
    assert "DAMAGED" in output


def test_convert_writes_what_an_older_file_holds(tmp_path):
    weights = {"weight": torch.arange(6.0)}
    torch.save({"format_version": "v1_policy_only", "model_state_dict": weights}, tmp_path / "old.pt")
    code, output, _ = run("convert", tmp_path / "old.pt", tmp_path / "new.zip")
    assert code == 0
    assert "v1_policy_only" in output
    assert torch.equal(read(tmp_path / "new.zip").tree["policy"]["weight"], weights["weight"])
    code, _, errors = run("convert", tmp_path / "old.pt", tmp_path / "new.zip")
    assert code == 2
    assert "exists" in errors
    assert run("convert", tmp_path / "old.pt", tmp_path / "new.zip", "--overwrite")[0] == 0


@pytest.mark.parametrize("content", [None, b"", b"no checkpoint"])
@pytest.mark.parametrize("command", ["inspect", "convert"])
def test_mistakes_are_one_line(command, content, tmp_path):
    path = tmp_path / "file.zip"
    if content is not None:
        path.write_bytes(content)
    code, _, errors = run(command, path, *([tmp_path / "new.zip"] if command == "convert" else []))
    assert code == 2
    assert errors.startswith("driftproof: ")
    assert str(path) in errors
    assert len(errors.splitlines()) == 1
    assert not (tmp_path / "new.zip").exists()
