"""Runs that this user started need no flags; nobody else can make a folder look like one."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from driftproof.config import ConfigError, build_env, load
from driftproof.config.ownership import mark, owned
from driftproof.runs import OWNER
from tests.cli.commands import SMALL, call
from tests.processes import ENVIRONMENT

MY_ENV = """
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv
from stable_baselines3.common.torch_layers import FlattenExtractor

class Thermostat(CartPoleEnv):
    pass

class Net(FlattenExtractor):
    pass

gymnasium.register("Thermostat-v0", Thermostat, max_episode_steps=20)
"""
LIMIT = ["--set", "run.total_timesteps=64", "--set", "run.evaluation_episodes=1"]
OWN = ["--env", "my_env:Thermostat-v0", "--set", "policy.features_extractor_class='my_env:Net'"]


@pytest.fixture
def project(tmp_path):
    """A folder with a module of the user's own, and a script that does as the installed command."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "my_env.py").write_text(MY_ENV)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "command.py").write_text(
        "from driftproof.cli import main\nif __name__ == '__main__':\n    main()\n"
    )
    return folder


def command(folder, *arguments, **variables):
    """Run the installed command, whose working directory Python does not search."""
    script = folder.parent / "bin" / "command.py"
    done = subprocess.run(
        [sys.executable, script, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**ENVIRONMENT, **variables},
    )
    return done.returncode, done.stderr


def test_own_runs_need_no_flags(project, tmp_path, capsys, monkeypatch):
    code, errors = command(project, "train", *OWN, *SMALL, *LIMIT, "--name", "run")
    assert code == 0, errors
    # Moved, from another working directory, and its configuration changed by the command.
    moved = Path(shutil.move(project / "runs" / "run", tmp_path / "moved"))
    code, errors = command(tmp_path / "bin", "train", "--resume", moved, "--set", "run.total_timesteps=128")
    assert code == 0, errors
    config = load(moved / "config.yaml")
    assert config.trust.is_own
    assert config.run.total_timesteps == 128
    # With another key, it is a stranger's.
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    code, _, errors = call(capsys, "config", moved / "config.yaml")
    assert code == 1
    assert "env.id: 'my_env:Thermostat-v0' would import" in errors
    assert "policy.features_extractor_class: 'my_env:Net' would import" in errors


@pytest.mark.slow
def test_own_populations_need_no_flags_in_any_process(project):
    search = ["--set", "pbt.population_size=2", "--set", "pbt.perturbation_interval=1", "--set", "pbt.workers=1"]
    (project / "my.yaml").write_text("env: {id: 'my_env:Thermostat-v0', vectorization: processes}")
    options = ["my.yaml", *SMALL, *LIMIT, *search, "--name", "run"]
    code, errors = command(project, "tune", *options)
    assert code == 1
    assert "my.yaml:1 names" in errors
    code, errors = command(project, "tune", *options, "--trust", "my_env")
    assert code == 0, errors
    code, errors = command(project, "tune", "--resume", "run")
    assert code == 0, errors


def test_a_run_that_never_began_leaves_nothing(tmp_path, capsys):
    guests = tmp_path / "guests"
    guests.mkdir()
    (guests / "member_0000_000000001.zip").touch()
    search = ["--set", "pbt.backend=inline", "--set", f"pbt.checkpoint_dir={guests}"]
    code, *_ = call(capsys, "tune", "--env", "CartPole-v1", *SMALL, *search, "--runs-dir", tmp_path, "--name", "run")
    assert code == 1
    assert not (tmp_path / "run").exists()


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The folder of a run of one's own, whose module can be imported."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    modules, folder = tmp_path / "modules", tmp_path / "run"
    modules.mkdir()
    folder.mkdir()
    (modules / "own_env.py").write_text("")
    monkeypatch.syspath_prepend(modules)
    content = b"env: 'own_env:CartPole-v1'\n"
    mark(folder, [content])
    (folder / "config.yaml").write_bytes(content)
    yield folder
    sys.modules.pop("own_env", None)


def is_recognised(folder):
    config = load(Path(folder) / "config.yaml")
    if config.trust.is_own:
        build_env(config).close()
        return sys.modules.pop("own_env", None) is not None
    with pytest.raises(ConfigError, match="would import and run the module 'own_env'"):
        build_env(config)
    assert "own_env" not in sys.modules
    return False


def test_a_marked_configuration_is_recognised(own, tmp_path):
    assert is_recognised(own)
    assert is_recognised(shutil.copytree(own, tmp_path / "copied"))


@pytest.mark.parametrize(
    "content", ["env: 'own_env:CartPole-v1'", "env: 'own_env:CartPole-v1'\n# \n", "env: 'own_env:Pendulum-v1'\n"]
)
def test_a_changed_configuration_is_not(own, content):
    (own / "config.yaml").write_text(content)
    assert not is_recognised(own)


def test_a_mark_of_another_user_is_not(own, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))
    assert not is_recognised(own)
    mark(own, [b"something else"])
    assert not is_recognised(own)


@pytest.mark.parametrize(
    "forged",
    [
        "",
        "{}",
        "[]",
        "null",
        "[" * 10_000,
        '{"codes": [], "home": null}',
        '{"codes": [""], "home": null}',
        '{"codes": [null, 0, true, {}, "\\ud800", "é"], "home": null}',
        '{"codes": "0", "home": null}',
        '{"codes": ["%s"], "home": null}' % ("0" * 64),
        '{"codes": ["0"], "home": 1}',
        '{"codes": [1%s], "home": null}' % ("0" * 5000),
    ],
)
def test_forged_marks_are_not(own, forged):
    (own / OWNER).write_text(forged)
    assert not is_recognised(own)


def test_the_folder_to_import_from_cannot_be_changed(own):
    forged = json.loads((own / OWNER).read_text()) | {"home": "/tmp"}
    (own / OWNER).write_text(json.dumps(forged))
    assert not is_recognised(own)


def test_links_to_own_files_say_nothing_of_others(own, tmp_path):
    stranger = tmp_path / "stranger"
    stranger.mkdir()
    (stranger / "config.yaml").symlink_to(own / "config.yaml")
    assert not is_recognised(stranger)
    (stranger / OWNER).symlink_to(own / OWNER)
    assert not is_recognised(stranger)
    (stranger / "config.yaml").unlink()
    (stranger / "config.yaml").write_text("env: 'own_env:Pendulum-v1'\n")
    assert not is_recognised(stranger)


def test_a_replayed_configuration_does_not_import_from_the_working_directory(tmp_path, monkeypatch, capsys):
    """A stranger who once got a run of this user sends it back, with a module of the same name beside it."""
    folder, canary = tmp_path / "returned", tmp_path / "canary"
    folder.mkdir()
    content = yaml.safe_dump({"env": {"id": "replayed_env:CartPole-v1"}}).encode()
    mark(folder, [content], home=str(tmp_path / "project"))
    (folder / "config.yaml").write_bytes(content)
    (folder / "replayed_env.py").write_text(f"import pathlib\npathlib.Path({str(canary)!r}).touch()\n")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if os.path.abspath(entry) != str(folder)])
    code, _, errors = call(capsys, "config", "config.yaml")
    assert code == 1
    assert "No module named 'replayed_env'; if it lies in the working directory: --trust replayed_env" in errors
    assert not canary.exists()
    call(capsys, "config", "config.yaml", "--trust", "replayed_env")
    assert canary.exists()
    sys.modules.pop("replayed_env")


def test_configurations_that_change_are_recognised_before_and_after(own):
    before = (own / "config.yaml").read_bytes()
    after = before + b"run: {threads: 1}\n"
    mark(own, [before, after])
    assert is_recognised(own)
    (own / "config.yaml").write_bytes(after)
    assert is_recognised(own)


def test_a_strangers_run_that_goes_on_stays_a_strangers(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "run"
    code, *_ = call(capsys, "train", "--env", "CartPole-v1", *SMALL, *LIMIT, "--runs-dir", tmp_path, "--name", "run")
    assert code == 0
    (folder / OWNER).unlink()
    assert call(capsys, "train", "--resume", folder, "--set", "run.total_timesteps=128")[0] == 0
    assert not load(folder / "config.yaml").trust.is_own


class TestTheKey:
    @pytest.fixture(autouse=True)
    def _mark(self, own, tmp_path):
        self.own, self.path = own, tmp_path / "state" / "driftproof" / "owner.key"

    def test_is_for_its_user_alone(self):
        assert stat.S_IMODE(self.path.stat().st_mode) == 0o600
        assert stat.S_IMODE(self.path.parent.stat().st_mode) == 0o700
        assert len(self.path.read_bytes()) == 32
        assert list(self.path.parent.iterdir()) == [self.path]

    @pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
    def test_that_others_can_read_or_write_is_not_used(self, mode):
        self.path.chmod(mode)
        assert not is_recognised(self.own)

    @pytest.mark.parametrize("content", [b"", b"short", bytes(33)])
    def test_that_is_damaged_is_not_used(self, content):
        self.path.write_bytes(content)
        assert not is_recognised(self.own)

    def test_that_is_gone_makes_no_errors(self):
        self.path.unlink()
        assert not is_recognised(self.own)
        assert not self.path.exists(), "reading does not make one"

    def test_that_cannot_be_made_makes_no_errors(self, tmp_path, monkeypatch):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
        (self.own / OWNER).unlink()
        mark(self.own, [b""])
        assert not (self.own / OWNER).exists()
        assert owned(self.own, b"") is None

    def test_is_in_the_home_directory_by_default(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        for variable in ("", "relative"):
            monkeypatch.setenv("XDG_STATE_HOME", variable)
            mark(self.own, [b"content"])
            assert owned(self.own, b"content") is not None
        assert (tmp_path / "home/.local/state/driftproof/owner.key").exists()
        assert not Path("relative").exists()
