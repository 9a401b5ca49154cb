"""Commands in README and docs exist, and so do their options."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
from typer.main import get_command

from driftproof import config
from driftproof.cli.app import app
from tests import documentation
from tests.documentation import ROOT, blocks, name_of

PAGES = [*documentation.PAGES, *sorted((ROOT / "configs").glob("*.yaml"))]


def commands(page):
    """Arguments of ``driftproof``, in shell blocks of a page and in comments of a configuration."""
    text = page.read_text() if page.suffix == ".yaml" else "\n".join(documentation.commands(page))
    for line in re.findall(r"^(?:# +)?(?:.*:  )?driftproof (.*)$", text, re.MULTILINE):
        yield shlex.split(re.split(" [<>|] ", line)[0], comments=True)


def app_commands():
    return get_command(app).commands


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_of_the_documentation_can_be_parsed(page, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    files = {block.options["title"]: block for block in blocks(page) if "title" in block.options}
    for arguments in commands(page):
        command = get_command(app)
        while isinstance(command, click.Group):
            name, *arguments = arguments
            command = command.commands[name]
        if "--help" in arguments or "COMMAND" in arguments:
            continue
        given = command.make_context(command.name, list(arguments)).params
        if overrides := given.get("overrides"):
            own = files.get(str(given.get("config")))
            base = Path(given["config"]).read_text() if given.get("config") and Path(given["config"]).exists() else ""
            trusted = given.get("trusted") or ()
            assert config.loads(own.text if own else base, overrides, trusted=trusted)


def test_every_command_is_documented():
    documented = {name for name, *_ in commands(ROOT / "docs" / "command_line.md")}
    assert documented == set(app_commands())


def test_ready_configurations_are_named_where_they_are_used():
    for page in PAGES:
        for name in re.findall(r"configs/([a-z_]+\.yaml)", page.read_text()):
            assert (ROOT / "configs" / name).exists(), name
