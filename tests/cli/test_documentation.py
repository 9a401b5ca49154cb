"""Commands in README and docs exist, and so do their options."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from driftproof.cli.app import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "configs").glob("*.yaml"))]


def commands(text):
    """Of blocks of code without a language, and of comments in YAML files."""
    blocks = re.findall(r"```\n(.*?)```", text, re.DOTALL) if "```" in text else [text]
    for line in re.findall(r"^(?:# +)?(?:.*:  )?driftproof (.*)$", "\n".join(blocks), re.MULTILINE):
        yield shlex.split(line.split(" < ")[0], comments=True)


def app_commands():
    return get_command(app).commands


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_the_documentation_exist(page):
    known = app_commands()
    for name, *arguments in commands(page.read_text()):
        assert name in known, name
        options = {option for parameter in known[name].params for option in parameter.opts} | {"--help"}
        for argument in arguments:
            assert not argument.startswith("--") or argument in options, (name, argument)


def test_every_command_is_documented():
    text = (ROOT / "docs" / "command_line.md").read_text()
    documented = {name for name, *_ in commands(text)}
    assert documented == set(app_commands())


def test_ready_configurations_are_named_where_they_are_used():
    for page in PAGES:
        for name in re.findall(r"configs/([a-z_]+\.yaml)", page.read_text()):
            assert (ROOT / "configs" / name).exists(), name
