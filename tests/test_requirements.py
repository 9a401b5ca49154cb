"""Optional packages: what works without them, and what the errors say."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from driftproof._requirements import DISTRIBUTIONS, MissingPackageError, require
from driftproof.runs.folder import RunFolder
from tests.helpers import output_of
from tests.processes import ENVIRONMENT

ROOT = Path(__file__).parents[1]
RL = 'needs gymnasium and stable-baselines3. In a clone of driftproof: pip install ".[rl]"; elsewhere: pip install '


def run(code):
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)


def test_the_core_works_alone_and_every_other_package_says_what_it_needs():
    ran = subprocess.run(
        [sys.executable, ROOT / "tests/bare.py"], env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    errors = dict(line.split(": ", 1) for line in ran.stdout.splitlines())
    assert len(errors) == 10
    assert errors["driftproof.ppo"] == f"driftproof.ppo {RL}gymnasium stable-baselines3"
    assert all(error.startswith(f"{name} needs gymnasium") for name, error in errors.items())


def test_optimizers_import_nothing_else():
    code = "import sys; from driftproof import AdaptiveUPGD; from tests.bare import OTHERS; "
    assert output_of(code + "print(sorted(OTHERS & set(sys.modules)))") == "[]"


@pytest.mark.parametrize("arguments", [[], ["--help"], ["train"]])
def test_the_command_line_without_its_packages_is_one_line(arguments):
    code = f"import sys; sys.argv[1:] = {arguments}; from tests.bare import refuse_others; refuse_others(); "
    ran = run(code + "from driftproof.cli import main; main()")
    assert ran.returncode == 1
    assert ran.stderr == (
        "driftproof: the command line needs pydantic, rich, typer and pyyaml. In a clone of driftproof: "
        'pip install ".[cli]"; elsewhere: pip install pydantic rich typer pyyaml\n'
    )


def test_a_command_without_its_packages_is_one_line():
    code = "import sys; sys.argv[1:] = ['report', 'x']; sys.modules['plotly'] = None; "
    ran = run(code + "from driftproof.cli import main; main()")
    assert ran.returncode == 1
    assert ran.stderr.startswith("driftproof: driftproof.report needs plotly. ")
    assert ran.stderr.count("\n") == 1


def test_missing_packages_are_listed_by_the_names_to_install(monkeypatch):
    require("this", "rl", "sklearn", "yaml")
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(MissingPackageError) as raised:
        require("this", "pbt", "sklearn", "yaml")
    assert raised.value.name == "sklearn"
    assert str(raised.value) == (
        'this needs scikit-learn. In a clone of driftproof: pip install ".[pbt]"; elsewhere: pip install scikit-learn'
    )


def test_runs_need_no_tensorboard(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    RunFolder(tmp_path).log(0, [{"step": 1, "x": 2.0}])
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["metrics.jsonl"]
    assert not list(tmp_path.rglob("*tfevents*"))


def test_extras_install_what_the_errors_promise():
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]

    def installed(extra):
        names = set()
        for requirement in extras[extra]:
            name, inner = re.match(r"([\w-]+)(?:\[([\w,]+)\])?", requirement).groups()
            names |= set().union(*map(installed, inner.split(","))) if name == "driftproof" else {name.lower()}
        return names

    calls = [
        [argument.value for argument in node.args[1:]]
        for path in (ROOT / "src").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "require"
    ]
    assert len(calls) > 10
    for extra, *modules in calls:
        assert {DISTRIBUTIONS.get(module, module) for module in modules} <= installed(extra)
    assert installed("all") == set().union(*(installed(extra) for extra in {*extras} - {"bench", "dev", "docs"}))
