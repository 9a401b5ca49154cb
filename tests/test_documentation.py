"""The code in README and docs runs, and what they link to exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_run(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        exec(compile(block, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_quoted_messages_are_those_of_the_library():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = [" ".join(block.split()).strip("… ") for block in re.findall(r"```text\n(.*?)```", page, re.DOTALL)]
    known = "\n".join(_texts())
    assert quoted
    assert [message for message in quoted if message not in known] == []


def _texts() -> Iterator[str]:
    """All texts in the source; the ellipsis stands for what is filled in."""
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                yield " ".join("".join(map(str, parts)).split())
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield " ".join(node.value.split())
