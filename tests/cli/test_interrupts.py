"""Ctrl-C once and twice, a closed terminal, SIGTERM: nothing is lost, and it is said how to go on."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time

import pytest

from driftproof.pbt import read_events, read_metrics
from driftproof.pbt.folder import RunFolder
from driftproof.state import CheckpointStore, compare, read
from tests.cli.commands import ENVIRONMENT, ROOT, SMALL, run, start, wait_for

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals")

LONG = [*SMALL, "--set", "run.total_timesteps=1_000_000_000"]


def held(folder):
    """A training that stands still once ``hold`` is there."""
    return ["--set", "env.id='tests.cli.worlds:Held-v0'", "--set", f"env.kwargs.folder={folder}"]


def saved(folder):
    return CheckpointStore(folder / "checkpoints").load_latest()


def read_state(folder):
    return RunFolder(folder).read_state()


def is_gone(group, seconds=30):
    """Whether no process of a group is left, at once or soon."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def hold(folder, process):
    """Let a training that has saved something stand still in the middle of a rollout."""
    wait_for(lambda: (folder / "run" / "checkpoints" / "latest").exists(), process)
    (folder / "hold").touch()
    wait_for(lambda: (folder / "held").exists(), process)


def test_ctrl_c_finishes_the_update_saves_and_says_how_to_go_on(tmp_path):
    """Also with environments in processes of their own, which hear of it too."""
    processes = ["--set", "env.vectorization=processes"]
    process = start("train", *held(tmp_path), *LONG, *processes, "--runs-dir", tmp_path, "--name", "run")
    hold(tmp_path, process)
    before = saved(tmp_path / "run").tree["counters"]["num_timesteps"]
    os.killpg(process.pid, signal.SIGINT)
    assert "finishing this update" in process.stderr.readline()
    (tmp_path / "hold").unlink()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    checkpoint = saved(tmp_path / "run")
    steps = checkpoint.tree["counters"]["num_timesteps"]
    assert steps > before
    assert steps % 32 == 0
    assert len(errors.splitlines()) == 1
    assert f"stopped at step {steps:,} of 1,000,000,000; saved, but for running episodes" in errors
    assert f"in {tmp_path}/run. Go on" in errors
    # What was logged ends with what was saved.
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[0][-1]["step"] == steps
    command = re.search(r"driftproof (train --resume \S+)", errors)[1]
    resumed = start(*command.split())
    rows = tmp_path / "run" / "metrics.jsonl"
    wait_for(lambda: read_metrics(rows)[0][-1]["step"] > steps, resumed)
    resumed.send_signal(signal.SIGTERM)
    _, errors = resumed.communicate(timeout=60)
    assert resumed.returncode == 130, errors
    assert "finishing this update" in errors


def test_a_second_ctrl_c_stops_at_once_without_damage(tmp_path):
    process = start("train", *held(tmp_path), *LONG, "--runs-dir", tmp_path, "--name", "run")
    hold(tmp_path, process)
    os.killpg(process.pid, signal.SIGINT)
    assert "once more stops at once" in process.stderr.readline()
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    # The world still stands still.
    assert time.monotonic() - began < 20
    assert process.returncode == 130
    assert len(errors.splitlines()) == 1
    assert f"the last checkpoint is in {tmp_path}/run. Go on" in errors
    assert saved(tmp_path / "run") is not None
    for path in (tmp_path / "run" / "checkpoints").glob("*.zip"):
        read(path)


def test_a_closed_terminal_is_like_ctrl_c(tmp_path):
    """A real terminal, with the live view on it, that goes away in the middle of a rollout."""
    terminal, end = pty.openpty()

    def take_terminal():
        import fcntl

        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    command = [sys.executable, "-m", "driftproof", "train", *held(tmp_path), *LONG]
    process = subprocess.Popen(
        [*map(str, command), "--runs-dir", str(tmp_path), "--name", "run"],
        stdin=end,
        stdout=end,
        stderr=end,
        cwd=ROOT,
        env={**ENVIRONMENT, "TERM": "xterm"},
        preexec_fn=take_terminal,
    )
    os.close(end)
    # What is not read would hold it up.
    seen = b""
    os.set_blocking(terminal, False)
    while not (tmp_path / "run" / "checkpoints" / "latest").exists() or b"VGS factor" not in seen:
        assert process.poll() is None, seen
        time.sleep(0.02)
        try:
            seen += os.read(terminal, 65536)
        except BlockingIOError:
            continue
    (tmp_path / "hold").touch()
    wait_for(lambda: (tmp_path / "held").exists(), process)
    before = saved(tmp_path / "run").tree["counters"]["num_timesteps"]
    os.close(terminal)
    time.sleep(0.5)  # It shows something four times a second, and must not mind that nobody sees it.
    (tmp_path / "hold").unlink()
    assert process.wait(60) == 130
    assert saved(tmp_path / "run").tree["counters"]["num_timesteps"] > before
    for sign in (b"steps/s", b"critic divergence", b"KL", b"entropy"):
        assert sign in seen, sign


def test_an_interrupted_training_comes_to_the_same_end(tmp_path):
    """Stopped by signals twice and resumed from its folder alone, it equals one that was not."""
    settings = [*held(tmp_path), *SMALL, "--set", "run.exact_resume=true", "--set", "run.total_timesteps=1280"]
    settings += ["--set", "env.normalize_observations=true", "--set", "run.keep_checkpoints=2"]
    settings += ["--set", "ppo.learning_rate={kind: linear, start: 1e-3}", "--runs-dir", tmp_path]
    code, _, errors = run("train", *settings, "--name", "whole")
    assert code == 0, errors
    arguments = ["train", *settings, "--name", "run"]
    for number in (signal.SIGINT, signal.SIGTERM):
        process = start(*arguments)
        hold(tmp_path, process)
        process.send_signal(number)
        assert "finishing this update" in process.stderr.readline()
        (tmp_path / "hold").unlink()
        (tmp_path / "held").unlink()
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 130, errors
        assert f"saved in {tmp_path}/run. Go on" in errors, "exactly"
        arguments = ["train", "--resume", tmp_path / "run"]
    code, _, errors = run(*arguments)
    assert code == 0, errors
    trees = [saved(tmp_path / name).tree for name in ("whole", "run")]
    for tree in trees:
        assert tree["counters"]["num_timesteps"] == 1280
        tree["rollout"]["episodes"].pop("t")
        for group in tree["optimizer"]["param_groups"]:
            group.pop("differentiable", None)
    differences = compare(*trees)
    assert not differences, "\n".join(map(str, differences[:5]))
    metrics = [read_metrics(tmp_path / name / "metrics.jsonl")[0] for name in ("whole", "run")]
    assert [row["step"] for row in metrics[0]] == [row["step"] for row in metrics[1]] == [32 * i for i in range(1, 41)]
    assert [row["train/loss"] for row in metrics[0]] == [row["train/loss"] for row in metrics[1]]
    evaluations = [json.loads((tmp_path / name / "evaluation.json").read_text()) for name in ("whole", "run")]
    assert evaluations[0] == evaluations[1]


def test_a_second_ctrl_c_stops_a_population_at_once(tmp_path):
    search = ["--set", "pbt.population_size=2", "--set", "pbt.workers=1", "--set", "pbt.perturbation_interval=1"]
    process = start("tune", *held(tmp_path), *LONG, *search, "--runs-dir", tmp_path, "--name", "run")
    folder = tmp_path / "run"
    wait_for(lambda: (folder / "population_state.json").exists(), process)
    (tmp_path / "hold").touch()
    wait_for(lambda: (tmp_path / "held").exists(), process)
    os.killpg(process.pid, signal.SIGINT)
    assert "finishing the slices in training" in process.stderr.readline()
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert len(errors.splitlines()) == 1
    assert f"driftproof tune --resume {folder}" in errors
    assert not read_state(folder)["members"][0]["waits"]
    assert is_gone(process.pid)


def test_an_interrupted_population_finishes_its_slices(tmp_path):
    """Ctrl-C reaches the workers too, as all processes of a terminal, and they do not mind."""
    search = ["--set", "pbt.population_size=3", "--set", "pbt.workers=1", "--set", "pbt.perturbation_interval=2"]
    search += ["--set", "run.total_timesteps=256"]
    options = ["--env", "CartPole-v1", *SMALL, *search, "--runs-dir", tmp_path, "--name", "run"]
    process = start("tune", *options)
    folder = tmp_path / "run"
    wait_for(lambda: (folder / "population_state.json").exists(), process)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 130, errors
    assert f"driftproof tune --resume {folder}" in errors.splitlines()[-1]
    assert "Traceback" not in errors
    assert [event.kind for event in read_events(folder / "population.json")].count("restart") == 0
    code, output, errors = run("tune", "--resume", folder)
    assert code == 0, errors
    assert "random" in output
    metrics = read_metrics(folder / "metrics.jsonl")
    assert all([row["step"] for row in metrics[member]] == [32 * i for i in range(1, 9)] for member in range(3))
    assert {row["step"] for row in metrics[None]} <= set(range(25))
