"""Runs that are used from elsewhere or were moved, the list of runs, and recorded episodes."""

from __future__ import annotations

import json
import os
import shutil
import sys

import gymnasium
import pytest
from PIL import Image

from driftproof.envs import regime_bars, write_csv
from driftproof.runs.folder import RunFolder
from tests.cli.commands import SMALL, call
from tests.cli.test_commands import error
from tests.cli.test_labels import Capture

MARKET = [
    *("--env", "driftproof/Market-v0", "--set", "env.kwargs.data=prices.csv", "--set", "env.kwargs.episode_length=20"),
    *("--set", "env.kwargs.features={window: 8, horizons: [1, 4]}", "--set", "run.total_timesteps=32"),
]


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """A run that was started in a folder with its data, by a relative path."""
    folder = tmp_path_factory.mktemp("start")
    write_csv(folder / "prices.csv", regime_bars(200, seed=3, symbol="ACME"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for options in ([*MARKET, "--name", "market"], ["--env", "CartPole-v1", "--set", "run.total_timesteps=32"]):
            assert call(Capture(), "train", *options, *SMALL)[0] == 0
    return folder


def test_what_a_run_was_started_with_is_recorded(started):
    sources = json.loads((started / "runs" / "market" / "sources.json").read_text())
    (file,) = sources["files"]
    assert (file["setting"], file["path"]) == ("env.kwargs.data", str(started / "prices.csv"))
    assert file["bytes"] == os.path.getsize(started / "prices.csv")
    assert sources["started"].endswith("+00:00")
    assert "cores" in sources["machine"]


def test_a_run_works_from_another_folder(started, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, output, errors = call(capsys, "evaluate", started / "runs" / "market")
    assert code == 0, errors
    assert "evaluated out of sample on held-out split of ACME" in output
    code, _, errors = call(capsys, "train", "--resume", started / "runs" / "market", "--set", "run.total_timesteps=64")
    assert code == 0, errors


def test_a_run_that_was_moved_says_what_is_missing_and_takes_it(started, capsys, tmp_path, monkeypatch):
    """As on another machine: nothing is where it was."""
    shutil.copytree(started / "runs" / "market", tmp_path / "there" / "market")
    shutil.move(started / "prices.csv", tmp_path / "renamed.csv")
    shutil.copy(tmp_path / "renamed.csv", tmp_path / "kept")
    monkeypatch.chdir(tmp_path)
    try:
        said = error(capsys, "evaluate", "there/market")
        assert said.startswith(f"prices.csv, a file of this run, is missing: it was {started}/prices.csv (")
        assert said.endswith("or give its path: --set env.kwargs.data=PATH")
        there = ["--set", "env.kwargs.data=renamed.csv"]
        code, output, errors = call(capsys, "evaluate", "there/market", *there)
        assert code == 0, errors
        assert "evaluated out of sample" in output
        more = ["--set", "run.total_timesteps=96"]
        code, _, errors = call(capsys, "train", "--resume", "there/market", *there)
        assert code == 0, errors
        (tmp_path / "other.csv").write_text((tmp_path / "renamed.csv").read_text() + "\n")
        said = error(capsys, "train", "--resume", "there/market", "--set", "env.kwargs.data=other.csv", *more)
        assert said.startswith("env.kwargs cannot change when a run is resumed")
        shutil.copy(tmp_path / "renamed.csv", tmp_path / "there" / "prices.csv")
        os.remove(tmp_path / "renamed.csv")
        shutil.rmtree(tmp_path / "there" / "market")
        shutil.copytree(started / "runs" / "market", tmp_path / "there" / "market")
        code, _, errors = call(capsys, "evaluate", "there/market")
        assert code == 0, "found next to the run folder"
    finally:
        shutil.copy(tmp_path / "kept", started / "prices.csv")


def test_data_that_has_changed_is_told(started, capsys, tmp_path, monkeypatch):
    shutil.copytree(started / "runs", tmp_path / "runs")
    write_csv(tmp_path / "prices.csv", regime_bars(200, seed=4, symbol="ACME"))
    monkeypatch.chdir(tmp_path)
    code, _, errors = call(capsys, "evaluate", "market")
    assert code == 0
    assert "prices.csv has changed since the run was started" in errors


def test_own_modules_of_a_moved_run_are_named(capsys, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "my_world.py").write_text(
        "import gymnasium\nfrom gymnasium.envs.classic_control import CartPoleEnv\n"
        "gymnasium.register('Mine-v0', CartPoleEnv, max_episode_steps=20)\n"
    )
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", list(sys.path))
    mine = ["--env", "my_world:Mine-v0", "--set", "run.total_timesteps=32", "--name", "mine"]
    code, _, errors = call(capsys, "train", *mine, *SMALL)
    assert code == 0, errors
    shutil.move(tmp_path / "here" / "runs", tmp_path / "runs")
    (tmp_path / "here" / "my_world.py").unlink()
    monkeypatch.chdir(tmp_path)
    sys.modules.pop("my_world")
    gymnasium.registry.pop("Mine-v0")
    assert error(capsys, "evaluate", "mine", "--trust", "my_world") == (
        f"the run needs the module my_world, which was {tmp_path}/here/my_world.py: copy it into this folder or one on "
        "PYTHONPATH, and add --trust my_world"
    )


def test_runs_are_listed(started, capsys, tmp_path):
    shutil.copytree(started / "runs", tmp_path / "runs")
    (tmp_path / "runs" / "broken").mkdir()
    (tmp_path / "runs" / "broken" / "config.yaml").write_text("- [")
    with RunFolder(tmp_path / "runs" / "market").locked():
        code, output, _ = call(capsys, "runs", "--runs-dir", tmp_path / "runs")
    assert code == 0
    lines = {line.split()[0]: line for line in output.splitlines()}
    head = ["run", "environment", "steps", "training return", "evaluation", "evaluated", "state"]
    assert all(name in lines["run"] for name in head)
    assert lines["market"].endswith("training")
    assert "not seen in training  done" in lines["cartpole-v1"]
    assert "damaged: " in lines["broken"]
    assert "there are no runs in" in error(capsys, "runs", "--runs-dir", tmp_path / "nowhere")


def test_an_agent_is_recorded(started, capsys, tmp_path):
    code, output, errors = call(
        capsys, "play", "market", "--runs-dir", started / "runs", "--output", tmp_path / "market.gif",
        "--set", f"env.kwargs.data={started / 'prices.csv'}",
    )  # fmt: skip
    assert code == 0, errors
    assert ", played out of sample on held-out split of ACME" in output
    with Image.open(tmp_path / "market.gif") as gif:
        assert gif.n_frames > 10
    assert "must end in .gif or .mp4" in error(
        capsys, "play", "market", "--output", "x.avi", "--runs-dir", started / "runs"
    )
