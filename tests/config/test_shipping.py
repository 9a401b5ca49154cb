"""Which of the user's modules Ray brings to other nodes: those that are named and trusted, and no others."""

from __future__ import annotations

import sys

import pytest

from driftproof._trust import Trust, UntrustedError
from driftproof.config import Config, loads
from driftproof.config.shipping import own_modules, runtime_env


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Working directory with modules of the user."""
    for name in ("shipped_env.py", "shipped_helper.py", "never_named.py"):
        (tmp_path / name).write_text("raise SystemExit('imported')")
    (tmp_path / "shipped_package").mkdir()
    (tmp_path / "shipped_package" / "__init__.py").touch()
    (tmp_path / "shipped_package" / "nets.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


FILE = "env: 'shipped_env:World-v0'\npolicy: {features_extractor_class: 'shipped_package.nets:Net'}"


def test_modules_that_are_named_and_trusted(folder):
    named = [str(folder / "shipped_env.py"), str(folder / "shipped_package")]
    both = Trust.of(["shipped_env", "shipped_package"], here=str(folder))
    assert own_modules(loads(FILE, trusted=both)) == named
    helper = Trust.of(["shipped_env", "shipped_package", "shipped_helper"], here=str(folder))
    config = loads(FILE, trusted=helper)
    assert own_modules(config) == sorted([*named, str(folder / "shipped_helper.py")])
    assert runtime_env(config) == {"working_dir": None, "py_modules": own_modules(config)}


def test_typed_names_need_no_trust(folder):
    config = loads("", ["env.id='shipped_env:World-v0'"], trusted=Trust.of([], here=str(folder)))
    assert own_modules(config) == [str(folder / "shipped_env.py")]


def test_own_runs_are_shipped_from_the_folder_where_they_were_started(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    trust = Trust(is_own=True, here=str(elsewhere), home=str(folder))
    assert own_modules(loads("env: 'shipped_env:World-v0'", trusted=trust)) == [str(folder / "shipped_env.py")]


def test_nothing_untrusted(folder):
    with pytest.raises(UntrustedError, match=r"'shipped_package\.nets', which configuration:2 names"):
        own_modules(loads(FILE, trusted=Trust.of(["shipped_env"], here=str(folder))))


def test_installed_modules_stay_where_they_are():
    config = loads(
        "env: 'gymnasium:CartPole-v1'\noptimizer: 'torch.optim:Adam'", trusted=["gymnasium", "no_such_module"]
    )
    assert own_modules(config) == []
    assert own_modules(Config(env={"id": "driftproof.envs:driftproof/RegimeMarket-v0"})) == []
