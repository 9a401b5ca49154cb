"""The code in README and docs runs, and what they link to exists."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import gymnasium
import pytest
import yaml

from driftproof import config
from tests.documentation import PAGES, ROOT, SHELL, blocks, commands, name_of

LANGUAGES = {*SHELL, "python", "yaml", "toml", "json", "math", "text"}
UNCHECKED = {"cd", "export", "source", "git", "ray", "docker", "tail"}
"""Programs of others, whose arguments are not checked."""


@pytest.fixture
def own_modules(monkeypatch):
    """Forgets what a page imports and registers."""
    modules, registered = set(sys.modules), set(gymnasium.registry)
    yield
    for name in set(sys.modules) - modules:
        if "." not in name and name.islower() and importlib.util.find_spec(name) is None:
            del sys.modules[name]
    for name in set(gymnasium.registry) - registered:
        del gymnasium.registry[name]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_examples_run(page, capsys, tmp_path, monkeypatch, own_modules):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    namespace: dict[str, object] = {}
    for block in blocks(page):
        if title := block.options.get("title"):
            Path(title).write_text(block.quick)
        elif block.language == "python" and "no-run" not in block.options:
            exec(compile(block.quick, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks_are_well_formed(page):
    for block in blocks(page):
        assert block.language in LANGUAGES, block.language
        if block.language == "python":
            for module, names in _imports(compile(block.text, str(page), "exec", ast.PyCF_ONLY_AST)):
                assert not (missing := [name for name in names if not _exists(module, name)]), (module, missing)
        elif block.language == "yaml":
            assert config.loads(block.text, trusted=_trusted(block.text))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_name_what_exists(page):
    """Those of ``driftproof`` itself: tests/cli/test_documentation.py."""
    titles = {block.options.get("title") for block in blocks(page)}
    for line in commands(page):
        program, *words = shlex.split(line, comments=True)
        if program == "python" and words[0] != "-m" and words[0] not in titles:
            source = (ROOT / words[0]).read_text()
            assert [word for word in words[1:] if word.startswith("--") and word not in source] == [], line
        elif program == "make":
            targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert [word for word in words if "=" not in word and word not in targets] == [], line
        elif program == "pip":
            extras = importlib.metadata.metadata("driftproof").get_all("Provides-Extra")
            named = [name for group in re.findall(r"\[([\w,]+)\]", line) for name in group.split(",")]
            assert set(named) <= set(extras), line
        else:
            assert program in {"driftproof", "python", *UNCHECKED}, f"{line!r}: output is marked ```text"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_the_notebook_is_the_tutorial():
    spec = importlib.util.spec_from_file_location("notebook", ROOT / "website" / "notebook.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page, file = ROOT / "docs" / "tutorials" / "optimizers.md", ROOT / "examples" / "optimizers.ipynb"
    text = module.notebook(page)
    assert text == file.read_text(), f"run: python website/notebook.py docs/tutorials/optimizers.md > {file}"
    code = ["".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert code == [block.text.strip() for block in blocks(page) if block.language == "python"]


def test_quoted_messages_are_those_of_the_library():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = [" ".join(block.split()).strip("… ") for block in re.findall(r"```text\n(.*?)```", page, re.DOTALL)]
    known = "\n".join(_texts())
    assert quoted
    assert [message for message in quoted if message not in known] == []


def _imports(tree: ast.AST) -> Iterator[tuple[str, list[str]]]:
    """Modules that are imported, if they are installed, and the names that are imported from them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and importlib.util.find_spec(str(node.module).partition(".")[0]):
            yield str(node.module), [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "driftproof":
                    yield alias.name, []


def _exists(module: str, name: str) -> bool:
    return hasattr(importlib.import_module(module), name) or bool(importlib.util.find_spec(f"{module}.{name}"))


def _trusted(text: str) -> list[str]:
    """Modules that a configuration names for its environment."""
    section = (yaml.safe_load(text) or {}).get("env", {})
    name = section if isinstance(section, str) else section.get("id", "")
    return [name.partition(":")[0]] if ":" in name else []


def _texts() -> Iterator[str]:
    """All texts in the source; the ellipsis stands for what is filled in."""
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                yield " ".join("".join(map(str, parts)).split())
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield " ".join(node.value.split())
