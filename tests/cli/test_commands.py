"""What commands do, and what they say when they cannot."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys

import pytest
import yaml

from driftproof.config import Config, load, loads
from driftproof.config.starting import STARTING_VALUES
from driftproof.pbt import CannotStartError, InlineBackend, read_events, read_metrics
from driftproof.state import CheckpointStore, inspect
from tests.cli.commands import SMALL, call, run
from tests.processes import ENVIRONMENT, ROOT

LIMIT = ["--set", "run.total_timesteps=128"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a small run, trained by a command."""
    folder = tmp_path_factory.mktemp("runs")
    code, output, errors = run("train", "--env", "CartPole-v1", *SMALL, *LIMIT, "--runs-dir", folder)
    assert code == 0, errors
    return folder / "cartpole-v1", output


def error(capsys, *arguments):
    """The one line that a mistake is answered with."""
    code, _, errors = call(capsys, *arguments)
    assert code == 1, errors
    assert "Traceback" not in errors
    (line,) = errors.splitlines()
    assert line.startswith("driftproof: ")
    return line.removeprefix("driftproof: ")


def test_help_is_there_at_once():
    began = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    code, output, _ = run("--help")
    used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - began
    assert code == 0
    for command in ("train", "tune", "evaluate", "config", "inspect", "convert"):
        assert command in output
    # Without torch: on a machine with time to spare, 0.3 s.
    program = "import sys, driftproof.cli; print(sorted({'torch', 'gymnasium', 'pydantic', 'rich'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=ENVIRONMENT, check=True)
    assert done.stdout == "[]\n"
    assert used < 5


@pytest.mark.parametrize(
    "arguments", [["tain"], ["train", "--foo"], ["evaluate"], ["evaluate", "x", "--episodes", "0"]]
)
def test_wrong_usage_is_exit_code_two(capsys, arguments):
    code, _, errors = call(capsys, *arguments)
    assert code == 2
    assert "Usage" in errors


def test_a_training_leaves_everything_in_its_folder(trained):
    folder, output = trained
    names = {path.name for path in folder.iterdir()}
    assert names >= {"config.yaml", "metrics.jsonl", "tensorboard", "checkpoints", "evaluation.json"}
    config = load(folder / "config.yaml")
    assert config == loads(STARTING_VALUES["cartpole"].text, [x for x in (*SMALL, *LIMIT) if x != "--set"])
    rows = read_metrics(folder / "metrics.jsonl")[0]
    assert [row["step"] for row in rows] == [32, 64, 96, 128]
    # Every update is logged with what it did, the last one too.
    for name in ("train/loss", "vgs/scaling_factor", "critic/divergence", "train/approx_kl", "rollout/ep_rew_mean"):
        assert all(name in row for row in rows[1:]), name
    assert inspect(CheckpointStore(folder / "checkpoints").latest()).intact
    evaluation = json.loads((folder / "evaluation.json").read_text())
    assert evaluation["episodes"] == len(evaluation["returns"]) == 2
    assert evaluation["interval"][0] <= evaluation["mean"] <= evaluation["interval"][1]
    assert set(evaluation["baselines"]) == {"random"}
    assert "step 128 of 128" in output
    assert "95% interval" in output
    assert output.splitlines()[-1] == f"done: {folder}"


def test_a_run_that_is_done_stays_as_it_is(trained, capsys):
    folder, _ = trained
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}
    code, output, _ = call(capsys, "train", "--resume", folder)
    assert code == 0
    assert "is done" in output
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def test_evaluation_is_the_same_again(trained, capsys, tmp_path):
    folder, _ = trained
    after_training = json.loads((folder / "evaluation.json").read_text())
    code, _, _ = call(capsys, "evaluate", folder, "--output", tmp_path / "again.json")
    assert code == 0
    assert json.loads((tmp_path / "again.json").read_text()) == after_training
    checkpoint = CheckpointStore(folder / "checkpoints").latest()
    more = [
        "--episodes",
        3,
        "--seed",
        1,
        "--output",
        tmp_path / "more.json",
        "--set",
        "env.kwargs.sutton_barto_reward=true",
    ]
    code, _, _ = call(capsys, "evaluate", checkpoint, *more)
    assert code == 0
    result = json.loads((tmp_path / "more.json").read_text())
    assert len(result["returns"]) == 3
    assert result["mean"] < 0, "the override was used"
    # A run is found by its name.
    code, _, _ = call(
        capsys, "evaluate", folder.name, "--runs-dir", folder.parent, "--best", "--output", tmp_path / "best.json"
    )
    assert code == 0


def test_names_that_are_taken_are_refused(trained, capsys):
    folder, _ = trained
    line = error(capsys, "train", "--env", "CartPole-v1", "--runs-dir", folder.parent, "--name", folder.name)
    assert line.endswith(f"driftproof train --resume {folder}")
    assert "exists: choose another --name" in line
    assert "exists" in error(capsys, "tune", "--env", "CartPole-v1", "--runs-dir", folder.parent, "--name", folder.name)
    # Without a name, there is always another one.
    code, output, _ = call(capsys, "train", "--env", "CartPole-v1", *SMALL, *LIMIT, "--runs-dir", folder.parent)
    assert code == 0
    assert output.splitlines()[-1] == f"done: {folder}-2"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["train"], "give a CONFIG file, or --env ID"),
        (["train", "CartPole-v1"], "CartPole-v1: no such file; to give an environment, use --env ID"),
        (["train", "--env", ""], "--env '' must be a Gymnasium id"),
        (["train", "--env", "tests.cli.worlds:"], "env.id: 'tests.cli.worlds:' cannot be made"),
        (["train", "--env", "CartPole-v1", "--runs-dir", __file__], "test_commands.py is a file: give a folder"),
        (["evaluate", "nowhere", "--attack", "foo"], "--attack 'foo' must be one of"),
        (["evaluate", "nowhere", "--attack", "mad", "--epsilon", "-1"], "--epsilon -1 must be above 0"),
        (["infer", "nowhere", "prices.csv", "--output", "signals.txt"], "must end in .csv or .parquet"),
        (["train", "--env", "CartPol-v1"], "env.id: there is no environment 'CartPol-v1'; did you mean 'CartPole-v1'?"),
        (["train", "--env", "CartPole-v1", "--set", "ppo.gama=1"], "--set ppo.gama=1: ppo.gama: unknown"),
        (["train", "--env", "CartPole-v1", "--set", "sequence_length=600"], "sequence_length=600 is longer than"),
        (["tune", "--env", "CartPole-v1", "--set", "pbt.hyperparams.0.name=num_atoms"], "cannot be searched"),
        (["train", "--env", "CartPole-v1", "--name", "a/b"], "--name 'a/b' must be a folder name, not a path"),
        (["train", "--resume", "x", "--env", "CartPole-v1"], "leave out --env"),
        (["train", "--resume", "nowhere"], "there is no run 'nowhere'"),
        (["evaluate", "nowhere"], "there is no run 'nowhere'"),
        (["evaluate", "nowhere", "--epsilon", "0.1"], "--epsilon is the perturbation size of --attack"),
        (["config", "nowhere.yaml"], "nowhere.yaml: No such file or directory"),
    ],
)
def test_mistakes_are_one_line(capsys, arguments, problem, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert problem in error(capsys, *arguments)
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_an_environment_that_breaks_is_told(capsys, tmp_path):
    line = error(
        capsys, "train", "--env", "tests.cli.worlds:Broken-v0", *SMALL, *LIMIT, "--runs-dir", tmp_path, "--name", "run"
    )
    assert "environment 0 raised ValueError at step" in line
    assert "the pole has burst" in line
    code, _, errors = run("--traceback", "train", "--env", "tests.cli.worlds:Broken-v0", *SMALL, "--runs-dir", tmp_path)
    assert code == 1
    assert 'raise ValueError("the pole has burst")' in errors


def test_an_environment_that_breaks_in_evaluation_is_told(trained, capsys):
    folder, _ = trained
    line = error(capsys, "evaluate", folder, "--env", "tests.cli.worlds:Broken-v0", "--episodes", 40)
    assert re.search(r"Broken-v0 failed during evaluation: ValueError in .*worlds.py:\d+: the pole has burst", line)
    # Processes of environments say themselves why they end, and the command does in its last line.
    options = ["--env", "tests.cli.worlds:Broken-v0", "--set", "env.vectorization=processes"]
    code, _, errors = run("evaluate", folder, *options)
    assert code == 1
    assert "failed during evaluation: EOFError" in errors.splitlines()[-1]


def test_an_agent_does_not_play_where_it_cannot(trained, capsys):
    folder, _ = trained
    assert "the agent has the observation space Box(" in error(capsys, "evaluate", folder, "--env", "Pendulum-v1")
    assert "the agent has the action space Discrete(2)" in error(
        capsys, "evaluate", folder, "--env", "tests.cli.worlds:ThreeActions-v0"
    )


def test_episodes_that_do_not_end_can_be_left(trained, capsys, monkeypatch):
    folder, _ = trained

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("driftproof.cli.evaluation.measure", interrupted)
    options = ["--env", "CartPole-v1", *SMALL, *LIMIT, "--runs-dir", folder.parent, "--name", "endless"]
    code, _, errors = call(capsys, "train", *options)
    assert code == 130
    assert f"trained and saved in {folder.parent / 'endless'}, not evaluated: driftproof evaluate" in errors


def test_runs_that_are_not_there_are_told_with_those_that_are(trained, capsys, tmp_path):
    folder, _ = trained
    line = error(capsys, "report", folder.name[:-1], "--runs-dir", folder.parent)
    assert line.endswith(f"did you mean {folder.name!r}?")
    for number in range(20):
        (tmp_path / f"run{number:02d}").mkdir()
        (tmp_path / f"run{number:02d}" / "config.yaml").touch()
    line = error(capsys, "report", "zzz", "--runs-dir", tmp_path)
    assert line.endswith("run08, run09, 10 more")


def test_a_run_can_go_on_for_longer(capsys, tmp_path):
    options = ["--env", "CartPole-v1", *SMALL, *LIMIT, "--runs-dir", tmp_path, "--name", "run"]
    assert call(capsys, "train", *options)[0] == 0
    before = (tmp_path / "run" / "evaluation.json").stat().st_mtime_ns
    code, output, errors = call(capsys, "train", "--resume", tmp_path / "run", "--set", "run.total_timesteps=256")
    assert code == 0, errors
    assert "step 256 of 256" in output
    assert load(tmp_path / "run" / "config.yaml").run.total_timesteps == 256
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[0][-1]["step"] == 256
    assert (tmp_path / "run" / "evaluation.json").stat().st_mtime_ns != before
    line = error(capsys, "train", "--resume", tmp_path / "run", "--set", "gamma=0.5")
    assert line.startswith("ppo.gamma cannot change when a run is resumed; these can: run.total")
    assert load(tmp_path / "run" / "config.yaml").ppo.gamma != 0.5


def test_runs_of_one_kind_are_not_taken_for_the_other(trained, capsys):
    folder, _ = trained
    assert f"driftproof train --resume {folder}" in error(capsys, "tune", "--resume", folder)
    assert "is not a population: leave out --member" in error(capsys, "evaluate", folder, "--member", 0)


def test_a_refused_start_leaves_the_name_free(capsys, tmp_path, monkeypatch):
    def refuse(self, work):
        raise CannotStartError("no room for a member")

    search = ["--set", "pbt.population_size=2", "--set", "pbt.backend=inline", "--set", "pbt.perturbation_interval=1"]
    options = ["--env", "CartPole-v1", *SMALL, *LIMIT, *search, "--runs-dir", tmp_path, "--name", "run"]
    with monkeypatch.context() as patched:
        patched.setattr(InlineBackend, "start", refuse)
        assert error(capsys, "tune", *options) == "no room for a member"
        assert not (tmp_path / "run").exists()
    assert call(capsys, "tune", *options)[0] == 0
    with monkeypatch.context() as patched:
        patched.setattr(InlineBackend, "start", refuse)
        error(capsys, "tune", "--resume", tmp_path / "run", "--set", "run.evaluation_episodes=1")
    assert (tmp_path / "run" / "population_state.json").exists()


@pytest.mark.parametrize("backend", ["inline", "vectorized"])
def test_a_population_is_tuned(capsys, tmp_path, backend):
    search = ["--set", "pbt.population_size=2", "--set", f"pbt.backend={backend}"]
    search += ["--set", "pbt.perturbation_interval=2"]
    drift = ["--set", "env.drift=[{kind: reward_scale, schedule: {kind: sudden, values: [1, 2], every: 40}}]"]
    options = ["--env", "CartPole-v1", *SMALL, *LIMIT, *search, *drift]
    code, output, errors = call(capsys, "tune", *options, "--runs-dir", tmp_path, "--name", "run")
    assert code == 0, errors
    folder = tmp_path / "run"
    names = {path.name for path in folder.iterdir()}
    assert names >= {"config.yaml", "metrics.jsonl", "members", "population.json", "population_state.json"}
    assert names >= {"evaluation.json", "tensorboard"}
    assert "member 1  update 4 of 4" in output
    took_over = [event for event in read_events(folder / "population.json") if event.kind == "exploit"]
    assert all(f"member {event.member}  exploits member {event.donor}" in output for event in took_over)
    rows = read_metrics(folder / "metrics.jsonl")
    assert [row["drift/phase"] for row in rows[0]] == [0, 0, 1, 1]
    assert [row["drift/reward_scale"] for row in rows[1]] == [1, 1, 2, 2]
    code, output, _ = call(capsys, "evaluate", folder, "--member", 1)
    assert code == 0
    assert "member_0001" in output
    # The world as it was when training ended: rewards are twice what CartPole gives.
    assert json.loads((folder / "evaluation.json").read_text())["mean"] % 2 == 0
    assert "members 0 to 1" in error(capsys, "evaluate", folder, "--member", 2)
    assert f"driftproof tune --resume {folder}" in error(capsys, "train", "--resume", folder)
    code, output, _ = call(capsys, "tune", "--resume", folder)
    assert code == 0
    assert "is done" in output


def test_a_training_logs_how_the_world_drifts(capsys, tmp_path):
    drift = [
        "--set",
        "env.drift=[{kind: dynamics, names: gravity, schedule: {kind: sudden, values: [1, 3], every: 40}}]",
    ]
    code, _, errors = call(
        capsys, "train", "--env", "CartPole-v1", *SMALL, *LIMIT, *drift, "--runs-dir", tmp_path, "--name", "run"
    )
    assert code == 0, errors
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")[0]
    assert [(row["drift/phase"], row["drift/dynamics.gravity"]) for row in rows] == [(0, 1), (0, 1), (1, 3), (1, 3)]


def test_a_market_is_compared_with_holding_and_doing_nothing(capsys, tmp_path):
    market = ["--env", "driftproof/RegimeMarket-v0", "--set", "env.kwargs.episode_length=8"]
    code, _, errors = call(capsys, "train", *market, *SMALL, *LIMIT, "--runs-dir", tmp_path)
    assert code == 0, errors
    result = json.loads((tmp_path / "driftproof-regimemarket-v0" / "evaluation.json").read_text())
    assert set(result["baselines"]) == {"buy and hold", "flat"}
    assert result["baselines"]["flat"]["returns"] == [0, 0]
    assert result["baselines"]["buy and hold"]["mean"] != 0


def test_config_prints_all_settings_and_a_schema(capsys, tmp_path):
    code, output, _ = call(capsys, "config")
    assert code == 0
    assert loads(output) == Config()
    code, output, _ = call(capsys, "config", "--schema")
    assert "learning_rate" in json.loads(output)["$defs"]["PPOSection"]["properties"]
    code, output, _ = call(capsys, "config", ROOT / "configs" / "cartpole.yaml", "--full", "--set", "gamma=0.5")
    assert loads(output).ppo.gamma == 0.5
    assert yaml.safe_load(output)["env"]["n_envs"] == 8


def test_config_checks_a_file(capsys):
    code, output, _ = call(capsys, "config", ROOT / "configs" / "regime_market_population.yaml")
    assert code == 0
    assert "59 updates of 2,048 steps, 16 minibatches of 512 samples each" in output
    assert "a population of 6 searches learning_rate, ent_coef, gae_lambda" in output
    assert "the configuration is valid" in output


def test_warnings_are_one_line(tmp_path):
    (tmp_path / "my.yaml").write_text("pbt: {perturbation_interval: 1}\nn_epochs: 1\nvgs_warmup_steps: 1000\n")
    code, _, errors = run("config", tmp_path / "my.yaml")
    assert code == 0
    (line,) = errors.splitlines()
    assert line.startswith("driftproof: warning: perturbation_interval=1 updates are 1 optimizer steps")


def test_warnings_of_gymnasium_are_plain_and_said_once(capsys, tmp_path):
    (tmp_path / "my.yaml").write_text("env: CartPole-v0\npolicy: MlpPolicy\n")
    code, _, errors = run("config", tmp_path / "my.yaml")
    assert code == 0
    (line,) = errors.splitlines()
    assert line.startswith("driftproof: warning: The environment CartPole-v0 is out of date.")


def limited(size):
    """Files cannot grow beyond this size: the system's own error, as from a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def test_a_full_disk_leaves_the_run_whole(tmp_path):
    folder = tmp_path / "run"
    long = [*SMALL, "--set", "run.total_timesteps=1_000_000_000"]
    arguments = ["train", "--env", "CartPole-v1", *long, "--runs-dir", tmp_path, "--name", "run"]
    # The file of metrics grows until it cannot.
    code, _, errors = run(*arguments, preexec=lambda: limited(200_000))
    assert code == 1
    (line,) = errors.splitlines()
    assert "File too large" in line
    assert line.endswith(f"earlier checkpoints are intact: fix the cause, then driftproof train --resume {folder}")
    checkpoint = CheckpointStore(folder / "checkpoints").load_latest()
    steps = checkpoint.tree["counters"]["num_timesteps"]
    assert steps > 0
    rows = read_metrics(folder / "metrics.jsonl")[0]
    assert rows[-1]["step"] >= steps - 32
    # With room again it goes on.
    code, _, errors = run("train", "--resume", folder, "--set", f"run.total_timesteps={steps + 64}")
    assert code == 0, errors
    assert read_metrics(folder / "metrics.jsonl")[0][-1]["step"] == steps + 64


def test_a_disk_that_is_full_from_the_beginning(tmp_path):
    arguments = ["train", "--env", "CartPole-v1", *SMALL, *LIMIT, "--runs-dir", tmp_path, "--name", "run"]
    code, _, errors = run(*arguments, preexec=lambda: limited(100))
    assert code == 1
    (line,) = errors.splitlines()
    assert f"cannot write a run to {tmp_path}: File too large" in line
    assert not (tmp_path / "run").exists()


def bound_by_permissions():
    """Root may write anywhere, unless the program that it runs next has not that capability."""
    import ctypes

    drop_from_bounding_set, dac_override = 24, 1
    if os.getuid() == 0 and ctypes.CDLL(None).prctl(drop_from_bounding_set, dac_override, 0, 0, 0):
        raise PermissionError("capabilities cannot be dropped")


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    tmp_path.chmod(0o555)
    probe = subprocess.run(["touch", tmp_path / "probe"], preexec_fn=bound_by_permissions, check=False)
    if probe.returncode == 0:
        pytest.skip("this user may write anywhere")
    code, _, errors = run(
        "train", "--env", "CartPole-v1", *SMALL, "--runs-dir", tmp_path / "runs", preexec=bound_by_permissions
    )
    tmp_path.chmod(0o755)
    assert code == 1, errors
    (line,) = errors.splitlines()
    assert line.endswith(
        f"cannot write a run to {tmp_path}/runs: Permission denied; choose another folder with --runs-dir"
    )
    assert not list(tmp_path.iterdir())


def test_a_run_that_can_no_longer_be_written_is_left_as_it_is(trained):
    """Not root's mistake: the folder is read only, as on a disk that was mounted so."""
    folder, _ = trained
    longer = ["--set", "run.total_timesteps=256"]
    for path in (folder, folder / "checkpoints"):
        path.chmod(0o555)
    (folder / "metrics.jsonl").chmod(0o444)
    code, _, errors = run("train", "--resume", folder, *longer, preexec=bound_by_permissions)
    for path in (folder, folder / "checkpoints"):
        path.chmod(0o755)
    (folder / "metrics.jsonl").chmod(0o644)
    assert code == 1, errors
    (line,) = errors.splitlines()
    assert line.startswith(f"driftproof: {folder}/owner.json: Permission denied")
    folder.chmod(0o755)
