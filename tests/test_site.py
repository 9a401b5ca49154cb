"""The documentation builds as a site without a warning, needs no network, and has no dead link."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).parents[1]
INTERNAL = ("cli", "runs")
"""Packages that only the library itself imports."""


class _Page(HTMLParser):
    """Targets of links and images, addresses that the browser loads, and anchors of one page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        values = {name: value or "" for name, value in attrs}
        self.anchors.update(values[name] for name in ("id", "name") if name in values)
        if tag == "a" and "href" in values:
            self.targets.append(values["href"])
        elif tag in ("img", "script", "iframe", "source", "video") and "src" in values:
            self.loaded.append(values["src"])
        elif tag == "link" and values.get("rel") not in ("canonical", "next", "prev"):
            self.loaded.append(values.get("href", ""))

    handle_startendtag = handle_starttag


def _built(folder: Path) -> dict[Path, _Page]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert not result.stderr
    return {path: _Page(path) for path in folder.rglob("*.html")}


def _dead(pages: dict[Path, _Page]) -> list[str]:
    dead = []
    for path, page in pages.items():
        if path.name == "404.html":  # its links are relative to the site's address, which is unknown here
            continue
        for target in [*page.targets, *page.loaded]:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not file.is_file():
                dead.append(f"{path.name}: {target} does not exist")
            elif parts.fragment and file in pages and unquote(parts.fragment) not in pages[file].anchors:
                dead.append(f"{path.name}: {target} has no such anchor")
    return dead


def _public_names() -> list[str]:
    """All names in the ``__all__`` of the packages that users import."""
    names = []
    for path in sorted((ROOT / "src" / "driftproof").glob("*/__init__.py")):
        for node in ast.parse(path.read_text()).body:
            is_public = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
            if is_public and path.parent.name not in INTERNAL:
                names += [f"driftproof.{path.parent.name}.{name}" for name in ast.literal_eval(node.value)]
    assert len(names) > 100
    return names


def test_site_builds_without_warnings_and_has_no_dead_link(tmp_path):
    pages = _built(tmp_path)
    dead = _dead(pages)
    assert not dead, "\n".join(dead)
    assert [address for page in pages.values() for address in page.loaded if urlsplit(address).netloc] == []
    missing = [name for name in _public_names() if not any(name in page.anchors for page in pages.values())]
    assert not missing, f"not in the API reference, for want of a docstring or of a page: {missing}"
    texts = {path.relative_to(tmp_path).as_posix(): path.read_text() for path in pages}
    assert not any("arithmatex" in text for text in texts.values()), "a formula was not converted"
    in_blocks = (ROOT / "docs" / "techniques.md").read_text().count("```math")
    assert texts["techniques.html"].count('display="block"') == in_blocks > 0
