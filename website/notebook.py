"""A tutorial as a notebook: ``python website/notebook.py docs/tutorials/optimizers.md > examples/optimizers.ipynb``.

Text becomes Markdown cells, Python blocks become code cells, and blocks that follow a code cell and show its output
become that output. Links are rewritten for the notebook's folder.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "examples"
_LINK = re.compile(r"(?<=\]\()(?!https?:)([^)#]+)")
_BLOCK = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```\n", re.DOTALL | re.MULTILINE)


def notebook(page: Path) -> str:
    """The notebook of a page, as JSON."""
    cells: list[dict[str, Any]] = []
    position, text = 0, _LINK.sub(lambda match: _moved(page, match[1]), page.read_text())
    for match in _BLOCK.finditer(text):
        _add_text(cells, text[position : match.start()])
        position, (language, content) = match.end(), match.groups()
        if language == "python":
            cells.append(_cell("code", content) | {"execution_count": None, "outputs": []})
        elif cells[-1]["cell_type"] == "code":
            cells[-1]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": _lines(content)}]
    _add_text(cells, text[position:])
    for index, cell in enumerate(cells):
        cell["id"] = f"cell-{index}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    document = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(document, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def _moved(page: Path, target: str) -> str:
    return os.path.relpath((page.parent / target).resolve(), FOLDER)


def _add_text(cells: list[dict[str, Any]], text: str) -> None:
    if text.strip():
        cells.append(_cell("markdown", text.strip() + "\n"))


def _cell(kind: str, text: str) -> dict[str, Any]:
    return {"cell_type": kind, "metadata": {}, "source": _lines(text)}


def _lines(text: str) -> list[str]:
    return text.strip("\n").splitlines(keepends=True)


if __name__ == "__main__":
    sys.stdout.write(notebook(Path(sys.argv[1])))
