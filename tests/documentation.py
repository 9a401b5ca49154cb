"""Pages of the documentation, and the blocks of code in them.

A block begins with its language and may have options, which no renderer shows::

    ```python title="room.py"             also written to this file, for the commands of the page
    ```python quick="60_000 -> 2_048"       tests replace one text by the other, so that training takes no time
    ```python no-run                      tests compile it and check its imports

Blocks without a language hold shell commands, and `text` what programs print.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHELL = ("", "sh", "bash", "console")
_FENCE = re.compile(r"^```(?P<language>\w*)(?P<options>[^\n`]*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
_OPTION = re.compile(r'([\w-]+)(?:="([^"]*)")?')


@dataclass(frozen=True)
class Block:
    """A block of code."""

    language: str
    options: dict[str, str]
    text: str

    @property
    def quick(self) -> str:
        """The text with fewer steps of training."""
        text = self.text
        for change in filter(None, self.options.get("quick", "").split(";")):
            old, new = change.split(" -> ")
            assert old in text, f"{old} is not in the block"
            text = text.replace(old, new)
        return text


def blocks(page: Path) -> list[Block]:
    """All blocks of a page, in order."""
    return [
        Block(match["language"], dict(_OPTION.findall(match["options"])), match["text"])
        for match in _FENCE.finditer(page.read_text())
    ]


def name_of(page: Path) -> str:
    """Path of a page in the repository."""
    return page.relative_to(ROOT).as_posix()


def commands(page: Path) -> list[str]:
    """Shell commands of a page, without prompts and comments; after a prompt, lines without one are output."""
    found = []
    for block in blocks(page):
        if block.language in SHELL:
            lines = block.text.replace("\\\n", " ").splitlines()
            if any(line.startswith("$ ") for line in lines):
                lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
            found += [line for line in lines if line.strip() and not line.startswith("#")]
    return found
