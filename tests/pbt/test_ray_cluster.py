"""The rehearsal in docs/ray_cluster.md: three nodes, a module of the user's, a node that dies, a stop and a resume."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.processes import ENVIRONMENT, run

pytest.importorskip("ray")

PAGE = Path(__file__).parents[2] / "docs" / "ray_cluster.md"
NOTING = """
import os, sys
with open(os.environ["NOTED"], "a") as file:
    file.write(f"{os.getpid()} {__file__} {os.environ['HERE'] in sys.path}\\n")
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_rehearsal(tmp_path):
    text = PAGE.read_text()
    for name in ("my_env.py", "my.yaml", "rehearsal.py"):
        (content,) = re.findall(rf"`{name}`:\n\n```[\w -]+\n(.*?)```", text, re.DOTALL)
        (tmp_path / name).write_text(content)
    with open(tmp_path / "my_env.py", "a") as file:
        file.write(NOTING)
    noted = tmp_path / "noted"
    environment = {**ENVIRONMENT, "NOTED": str(noted), "HERE": str(tmp_path)}
    result = run([sys.executable, "rehearsal.py"], cwd=tmp_path, env=environment)
    assert result[0] == 0, result[2]
    before, after = (line for line in result[1].splitlines() if " after " in line)
    updates = [int(number) for number in re.findall(r"\d+", before)]
    assert min(updates) >= 4
    assert max(updates) < 8
    assert after.startswith("finished after [8, 8, 8, 8, 8] with restarts of members")
    assert re.search(r"members \[\d", after)
    assert "pbt.workers: 2 is ignored" in result[2]
    # All processes but the one that was started have imported the copy, and nothing from its folder.
    lines = [line.split() for line in noted.read_text().splitlines()]
    own = str(tmp_path / "my_env.py")
    assert [here for _, path, here in lines if path == own] == ["True"]
    copies = [(path, here) for _, path, here in lines if path != own]
    assert len(copies) >= 3
    assert all("py_modules_files" in path and here == "False" for path, here in copies)
