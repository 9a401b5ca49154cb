"""The examples run, as a user would run them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import processes

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
ARGUMENTS = {"made_up_prices": ["prices.csv"]}
SAYS = {
    "drift_demo": "picture: drift_demo.png",
    "minatar_and_minigrid": "environments Vector/MiniGrid-*",
    "made_up_prices": "written to prices.csv",
    "own_environment": "page: room.html",
    "own_loop": "update 2: episodes of",
    "real_prices": "buying and holding",
    "robust_agent": "trained against attacks",
    "transformer_on_drift": "last fifth of tasks",
}


SLOW = ("drift_demo", "own_environment", "real_prices", "robust_agent")
"""The documentation's tutorials, which are always tested, run much of the same code."""


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=[pytest.mark.slow] if path.stem in SLOW else []) for path in EXAMPLES],
)
def test_runs(path, tmp_path):
    command = [sys.executable, str(path), *ARGUMENTS.get(path.stem, ["--quick"])]
    code, output, errors = processes.run(command, cwd=tmp_path)
    assert code == 0, errors
    assert SAYS[path.stem] in output
