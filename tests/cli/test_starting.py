"""Starting values on the command line: train and config choose them for --env, and say so."""

from __future__ import annotations

import pytest

from driftproof.config import load, loads
from driftproof.config.starting import STARTING_VALUES
from tests.cli.commands import SMALL, call

TOLD = "starting values for CartPole-v1; --set changes them, --defaults leaves them out"
SHORT = ["--set", "run.total_timesteps=32", "--set", "run.evaluation_episodes=0"]


@pytest.mark.parametrize("defaults", [False, True])
def test_training_says_what_it_starts_with(defaults, capsys, tmp_path):
    options = [*SMALL, *SHORT, *(["--defaults"] if defaults else []), "--runs-dir", tmp_path, "--name", "run"]
    code, output, errors = call(capsys, "train", "--env", "CartPole-v1", *options)
    assert code == 0, errors
    assert (output.splitlines()[0] == TOLD) is not defaults
    given = [option for option in (*SMALL, *SHORT) if option != "--set"]
    text = "env: CartPole-v1" if defaults else STARTING_VALUES["cartpole"].text
    assert load(tmp_path / "run" / "config.yaml") == loads(text, given)


def test_a_file_rules(capsys, tmp_path):
    (tmp_path / "mine.yaml").write_text("env: Pendulum-v1\n")
    options = [*SMALL, *SHORT, "--runs-dir", tmp_path, "--name", "run"]
    code, output, errors = call(capsys, "train", tmp_path / "mine.yaml", "--env", "CartPole-v1", *options)
    assert code == 0, errors
    assert "starting values" not in output
    assert load(tmp_path / "run" / "config.yaml").ppo.gamma == loads("").ppo.gamma


def test_config_prints_them(capsys, tmp_path):
    code, output, _ = call(capsys, "config", "--env", "CartPole-v1", "--set", "ppo.gamma=0.5")
    assert code == 0
    assert output.splitlines()[0] == f"# {TOLD}"
    (tmp_path / "mine.yaml").write_text(output)
    assert load(tmp_path / "mine.yaml") == loads(STARTING_VALUES["cartpole"].text, ["ppo.gamma=0.5"])
    code, output, _ = call(capsys, "config", "--env", "CartPole-v1", "--defaults")
    assert loads(output) == loads("env: CartPole-v1")


@pytest.mark.parametrize(
    "arguments", [["train", "x.yaml"], ["train", "--from", "x", "--env", "CartPole-v1"], ["config"]]
)
def test_defaults_need_an_environment(arguments, capsys):
    code, _, errors = call(capsys, *arguments, "--defaults")
    assert code == 1
    assert "--defaults leaves out the starting values of --env" in errors
