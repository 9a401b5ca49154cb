"""Ctrl-C, a closed terminal and SIGTERM, once and twice, at any moment: nothing is lost, and how to go on is said."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios

import pytest

from driftproof.pbt import read_events, read_metrics
from driftproof.runs.folder import RunFolder
from driftproof.state import CheckpointStore, compare, read
from tests.cli.commands import SMALL, call, run, start
from tests.processes import ENVIRONMENT, Started

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals")

LONG = [*SMALL, "--set", "run.total_timesteps=1_000_000_000"]
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
each_signal = pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)


def each_signal_at(*points):
    """Parametrizes a test by point and signal: all of them, and in the fast suite one signal per point, in turn."""
    pairs = itertools.product(enumerate(points), enumerate(SIGNALS))
    cases = [
        pytest.param(point, number, marks=[] if i % 3 == j else [pytest.mark.slow], id=f"{point}-{number.name}")
        for (i, point), (j, number) in pairs
    ]
    return pytest.mark.parametrize(("point", "number"), cases)


def held(folder):
    """A training that stands still once ``hold`` is there."""
    return ["--set", "env.id='tests.cli.worlds:Held-v0'", "--set", f"env.kwargs.folder={folder}"]


def saved(folder):
    return CheckpointStore(folder / "checkpoints").load_latest()


def read_state(folder):
    return RunFolder(folder).read_state()


def hold(folder, process):
    """Let a training that has saved something stand still in the middle of a rollout."""
    process.wait_for((folder / "run" / "checkpoints" / "latest").exists)
    (folder / "hold").touch()
    process.wait_for((folder / "held").exists)


def test_ctrl_c_finishes_the_update_saves_and_says_how_to_go_on(tmp_path):
    """Also with environments in processes of their own, which hear of it too."""
    in_processes = ["--set", "env.vectorization=processes"]
    process = start("train", *held(tmp_path), *LONG, *in_processes, "--runs-dir", tmp_path, "--name", "run")
    hold(tmp_path, process)
    before = saved(tmp_path / "run").tree["counters"]["num_timesteps"]
    process.send_to_all(signal.SIGINT)
    process.wait_for(lambda: process.stderr_text)
    (tmp_path / "hold").unlink()
    code, _, errors = process.end_of()
    assert code == 130, errors
    checkpoint = saved(tmp_path / "run")
    steps = checkpoint.tree["counters"]["num_timesteps"]
    assert steps > before
    assert steps % 32 == 0
    first, second = errors.splitlines()
    assert "finishing this update" in first
    assert f"stopped at step {steps:,} of 1,000,000,000; saved, except episodes in progress" in second
    assert f"in {tmp_path}/run. Resume" in second
    process.wait_until_alone()
    # What was logged ends with what was saved.
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[0][-1]["step"] == steps
    # A request to end reaches all processes of a service.
    command = re.search(r"driftproof (train --resume \S+)", errors)[1]
    resumed = start(*command.split())
    rows = tmp_path / "run" / "metrics.jsonl"
    resumed.wait_for(lambda: read_metrics(rows)[0][-1]["step"] > steps)
    resumed.send_to_all(signal.SIGTERM)
    code, _, errors = resumed.end_of()
    assert code == 130, errors
    assert "finishing this update" in errors
    assert "saved, except episodes in progress" in errors
    resumed.wait_until_alone()


def test_a_second_ctrl_c_stops_at_once_without_damage(tmp_path):
    process = start("train", *held(tmp_path), *LONG, "--runs-dir", tmp_path, "--name", "run")
    hold(tmp_path, process)
    process.send_to_all(signal.SIGINT)
    process.wait_for(lambda: "press Ctrl-C again to stop at once" in process.stderr_text)
    process.send_to_all(signal.SIGINT)
    # The world still stands still.
    code, _, errors = process.end_of()
    assert code == 130
    assert len(errors.splitlines()) == 2
    assert f"the last checkpoint is in {tmp_path}/run. Resume" in errors
    assert saved(tmp_path / "run") is not None
    for path in (tmp_path / "run" / "checkpoints").glob("*.zip"):
        read(path)
    process.wait_until_alone()


class Terminal:
    """A real terminal, with a command on it.

    Args:
        options: Of the process.
    """

    def __init__(self, *arguments, **options):
        self._end, end = pty.openpty()
        self.seen = b""
        command = [sys.executable, "-m", "driftproof", *arguments]
        streams = {"stdin": end, "stdout": end, "stderr": end, "env": {**ENVIRONMENT, "TERM": "xterm"}}
        take = {"preexec": lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)}
        self.process = Started(command, **streams, **take, **options)
        os.close(end)
        os.set_blocking(self._end, False)

    def wait_for(self, condition):
        """While what the command writes is read: otherwise it would wait for that."""

        def read_and_ask():
            with contextlib.suppress(BlockingIOError):
                self.seen += os.read(self._end, 65536)
            return condition()

        self.process.wait_for(read_and_ask)

    def close(self):
        os.close(self._end)


def test_a_closed_terminal_is_like_ctrl_c(tmp_path):
    """A real terminal, with the live view on it, that goes away in the middle of a rollout."""
    terminal = Terminal("train", *held(tmp_path), *LONG, "--runs-dir", tmp_path, "--name", "run")
    latest = tmp_path / "run" / "checkpoints" / "latest"
    terminal.wait_for(lambda: latest.exists() and b"VGS factor" in terminal.seen)
    (tmp_path / "hold").touch()
    terminal.wait_for((tmp_path / "held").exists)
    before = saved(tmp_path / "run").tree["counters"]["num_timesteps"]
    terminal.close()
    (tmp_path / "hold").unlink()
    code, _, _ = terminal.process.end_of()
    assert code == 130
    assert saved(tmp_path / "run").tree["counters"]["num_timesteps"] > before
    for sign in (b"steps/s", b"critic divergence", b"KL", b"entropy"):
        assert sign in terminal.seen, sign
    terminal.process.wait_until_alone()


@pytest.mark.slow
def test_a_terminal_that_a_command_outlives(tmp_path):
    """As with ``nohup`` or ``disown``: it trains to its end, evaluates, and does not fail to write to nobody."""
    short = [*SMALL, "--set", "run.total_timesteps=6400", "--runs-dir", tmp_path, "--name", "run"]
    (tmp_path / "hold").write_text("100")  # Before it starts: on a busy machine it could end before it is held.
    terminal = Terminal("train", *held(tmp_path), *short, ignored=[signal.SIGHUP])
    terminal.wait_for((tmp_path / "held").exists)
    terminal.close()
    (tmp_path / "hold").unlink()
    assert terminal.process.end_of()[0] == 0
    assert saved(tmp_path / "run").tree["counters"]["num_timesteps"] == 6400
    assert (tmp_path / "run" / "evaluation.json").exists()


def test_an_interrupted_training_comes_to_the_same_end(tmp_path):
    """Stopped by signals twice and resumed from its folder alone, it equals one that was not."""
    settings = [*held(tmp_path), *SMALL, "--set", "run.exact_resume=true", "--set", "run.total_timesteps=1280"]
    settings += ["--set", "env.normalize_observations=true", "--set", "run.keep_checkpoints=2"]
    settings += ["--set", "ppo.learning_rate={kind: linear, start: 1e-3}", "--runs-dir", tmp_path]
    code, _, errors = run("train", *settings, "--name", "whole")
    assert code == 0, errors
    arguments = ["train", *settings, "--name", "run"]
    for number in (signal.SIGINT, signal.SIGTERM):
        # Before it starts: on a busy machine so short a training could end before it is held.
        (tmp_path / "hold").write_text("100")
        process = start(*arguments)
        process.wait_for((tmp_path / "held").exists)
        process.send_signal(number)
        process.wait_for(lambda started=process: "finishing this update" in started.stderr_text)
        (tmp_path / "hold").unlink()
        (tmp_path / "held").unlink()
        code, _, errors = process.end_of()
        assert code == 130, errors
        assert f"saved in {tmp_path}/run. Resume" in errors, "exactly"
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


def search(*settings):
    return [part for setting in settings for part in ("--set", f"pbt.{setting}")]


def test_a_second_ctrl_c_stops_a_population_at_once(tmp_path):
    small = search("population_size=2", "workers=1", "perturbation_interval=1")
    process = start("tune", *held(tmp_path), *LONG, *small, "--runs-dir", tmp_path, "--name", "run")
    folder = tmp_path / "run"
    process.wait_for((folder / "population_state.json").exists)
    (tmp_path / "hold").touch()
    process.wait_for((tmp_path / "held").exists)
    process.send_to_all(signal.SIGINT)
    process.wait_for(lambda: "finishing the members in training" in process.stderr_text)
    process.send_to_all(signal.SIGINT)
    code, _, errors = process.end_of()
    assert code == 130
    assert len(errors.splitlines()) == 2
    assert f"driftproof tune --resume {folder}" in errors
    assert not read_state(folder).members[0].waits
    process.wait_until_alone()


@pytest.mark.parametrize(
    "number", [pytest.param(each, marks=pytest.mark.slow) for each in (signal.SIGTERM, SIGNALS[0], SIGNALS[2])]
)
def test_an_interrupted_population_finishes_its_slices(tmp_path, number):
    """Signals reach the workers too, as all processes of a terminal or of a service, and they do not mind."""
    small = search("population_size=3", "workers=1", "perturbation_interval=2")
    options = ["--env", "CartPole-v1", *SMALL, *small, "--set", "run.total_timesteps=256", "--runs-dir", tmp_path]
    process = start("tune", *options, "--name", "run")
    folder = tmp_path / "run"
    process.wait_for((folder / "population_state.json").exists)
    process.send_to_all(number)
    code, _, errors = process.end_of()
    assert code == 130, errors
    assert f"driftproof tune --resume {folder}" in errors.splitlines()[-1]
    assert "Traceback" not in errors
    process.wait_until_alone()
    assert [event.kind for event in read_events(folder / "population.json")].count("restart") == 0
    code, output, errors = run("tune", "--resume", folder)
    assert code == 0, errors
    assert "random" in output
    metrics = read_metrics(folder / "metrics.jsonl")
    assert all([row["step"] for row in metrics[member]] == [32 * i for i in range(1, 9)] for member in range(3))
    assert {row["step"] for row in metrics[None]} <= set(range(25))


@pytest.mark.slow
def test_workers_and_environments_end_with_a_killed_command(tmp_path):
    """Though they are in the middle of a step, and nobody is left to end them."""
    small = search("population_size=2", "workers=1", "perturbation_interval=1")
    where = ["--set", "env.vectorization=processes", "--runs-dir", tmp_path, "--name", "run"]
    process = start("tune", *held(tmp_path), *LONG, *small, *where)
    process.wait_for((tmp_path / "run" / "population_state.json").exists)
    (tmp_path / "hold").touch()
    process.wait_for((tmp_path / "held").exists)
    assert len(process.left()) > 3
    process.kill()
    process.wait()
    process.wait_until_alone()


@each_signal
def test_a_signal_while_a_command_is_being_imported(tmp_path, number):
    """A new process, which begins with nothing imported; the signal comes with the first large import."""
    program = f"""
import os, sys
from driftproof.cli import main

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            os.kill(os.getpid(), {int(number)})

sys.meta_path.insert(0, Finder())
main()
"""
    arguments = ["train", "--env", "CartPole-v1", *SMALL, "--runs-dir", tmp_path / "runs", "--name", "run"]
    process = Started([sys.executable, "-c", program, *arguments])
    assert process.end_of() == (130, "", "driftproof: interrupted\n")
    assert not list(tmp_path.iterdir())
    process.wait_until_alone()


@pytest.fixture(scope="module")
def nursery():
    """Runs commands that signal themselves."""
    with Started([sys.executable, "-m", "tests.cli.nursery"], stdin=subprocess.PIPE, text=True) as process:
        process.outlives_tests = True
        yield process


@pytest.fixture
def interrupted(nursery, tmp_path):
    """Runs a command that is sent signals at some point: exit code and errors. Nothing is left of it then."""

    def interrupt(point, signals, *arguments, call=1):
        paths = {"output": str(tmp_path / "output"), "errors": str(tmp_path / "errors")}
        order = {"point": point, "signals": signals, "call": call, "arguments": [*map(str, arguments)], **paths}
        answers = nursery.stdout_text.count("\n")
        print(json.dumps(order), file=nursery.stdin, flush=True)
        nursery.wait_for(lambda: nursery.stdout_text.count("\n") > answers)
        nursery.wait_for(lambda: nursery.left() == [nursery.pid])
        errors = (tmp_path / "errors").read_text()
        assert "Traceback" not in errors
        return int(nursery.stdout_text.splitlines()[-1]), errors

    return interrupt


TRAIN = ["train", "--env", "CartPole-v1", *SMALL, "--set", "run.total_timesteps=128", "--name", "run"]
TUNE = [*("tune", "--env", "CartPole-v1", *SMALL, "--set", "run.total_timesteps=128", "--name", "run")]
TUNE += search("population_size=2", "perturbation_interval=1", "backend=inline")


@each_signal_at("building", "making the folder", "restoring")
def test_before_training_nothing_is_left(interrupted, tmp_path, point, number):
    for signals in ([number], [number, signal.SIGTERM]):
        code, errors = interrupted(point, signals, *TRAIN, "--runs-dir", tmp_path / "runs")
        assert code == 130, errors
        (line,) = errors.splitlines()
        assert "interrupted" in line or f"stopped before anything was saved; {tmp_path}/runs/run was removed" in line
        assert not list(tmp_path.glob("runs/*"))


@each_signal_at("beginning", "1st rollout", "1st update", "3rd rollout", "saving", "3rd update")
def test_training_saves_and_goes_on(interrupted, capsys, tmp_path, point, number):
    """One in the middle of the first update, too; checkpoints are saved by another thread."""
    folder = tmp_path / "run"
    nth = 3 if point.startswith("3rd") else 1
    code, errors = interrupted(point.split()[-1], [number], *TRAIN, "--runs-dir", tmp_path, call=nth)
    assert code == 130, errors
    first, second = errors.splitlines()
    assert "finishing this update" in first
    done = saved(folder).tree["counters"]["num_timesteps"]
    assert done == 32 * nth or point == "saving"
    assert f"stopped at step {done} of 128; saved" in second
    code, _, errors = call(capsys, "train", "--resume", folder)
    assert code == 0, errors
    assert saved(folder).tree["counters"]["num_timesteps"] == 128


def test_twice_in_training_stops_at_once(interrupted, tmp_path):
    folder, new = tmp_path / "run", [*TRAIN, "--runs-dir", tmp_path]
    code, errors = interrupted("rollout", [signal.SIGINT, signal.SIGINT], *new)
    assert code == 130
    assert f"stopped before anything was saved; {folder} was removed" in errors.splitlines()[-1]
    assert not folder.exists()
    code, errors = interrupted("update", [signal.SIGTERM, signal.SIGTERM], *new, call=3)
    assert code == 130
    assert f"stopped at step 96 of 128; the last checkpoint is in {folder}" in errors.splitlines()[-1]
    assert saved(folder).tree["counters"]["num_timesteps"] == 64
    # Shells repeat hang-ups.
    code, errors = interrupted("rollout", [signal.SIGHUP, signal.SIGHUP], "train", "--resume", folder)
    assert code == 130
    assert "stopped at step 96 of 128; saved" in errors.splitlines()[-1]
    code, errors = interrupted("rollout", [signal.SIGHUP, signal.SIGTERM], "train", "--resume", folder)
    assert code == 130
    assert f"the last checkpoint is in {folder}" in errors.splitlines()[-1]


@each_signal_at("end of training", "evaluating")
def test_what_is_trained_is_not_evaluated(interrupted, tmp_path, point, number):
    for command, name in ((TRAIN, "train"), (TUNE, "tune")):
        if command is TUNE and point == "end of training":
            continue
        folder = tmp_path / name / "run"
        code, errors = interrupted(point, [number], *command, "--runs-dir", tmp_path / name)
        assert code == 130, errors
        end = f"trained and saved in {folder}, not evaluated: driftproof evaluate {folder}"
        assert end in errors.splitlines()[-1]
        assert not (folder / "evaluation.json").exists()
    assert saved(tmp_path / "train" / "run").tree["counters"]["num_timesteps"] == 128


@each_signal_at("loading", "evaluating")
def test_an_interrupted_evaluation_writes_nothing(interrupted, capsys, tmp_path, point, number):
    folder = tmp_path / "run"
    code, _, errors = call(capsys, *TRAIN, "--runs-dir", tmp_path, "--set", "run.evaluation_episodes=0")
    assert code == 0, errors
    for again in ([], [number]):
        code, errors = interrupted(point, [number, *again], "evaluate", folder, "--episodes", 2)
        assert (code, errors) == (130, "driftproof: interrupted\n")
        assert not (folder / "evaluation.json").exists()


def test_a_population_in_one_process_saves_and_goes_on(interrupted, capsys, tmp_path):
    folder = tmp_path / "run"
    code, errors = interrupted("building population", [signal.SIGINT], *TUNE, "--runs-dir", tmp_path)
    assert code == 130
    assert f"stopped before anything was saved; {folder} was removed" in errors
    assert not folder.exists()
    points = (("rollout", signal.SIGINT), ("report", signal.SIGTERM), ("update", signal.SIGHUP))
    for done, (point, number) in enumerate(points, 1):
        arguments = ["tune", "--resume", folder] if folder.exists() else [*TUNE, "--runs-dir", tmp_path]
        code, errors = interrupted(point, [number], *arguments)
        assert code == 130, errors
        assert f"stopped after {done} of 8 updates; saved in {folder}" in errors.splitlines()[-1]
    code, _, errors = call(capsys, "tune", "--resume", folder)
    assert code == 0, errors
    assert [place.updates for place in read_state(folder).members] == [4, 4]


@each_signal_at("starting a worker")
def test_a_signal_while_workers_start(interrupted, tmp_path, point, number):
    folder = tmp_path / "run"
    population = [*TUNE, *search("backend=process", "workers=2"), "--runs-dir", tmp_path]
    code, errors = interrupted(point, [number], *population, call=2)
    assert code == 130, errors
    # The first one's order was given before.
    assert f"stopped after 1 of 8 updates; saved in {folder}" in errors.splitlines()[-1]
