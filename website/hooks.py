"""What the site adds to the pages in docs/: linked files of the repository, the API reference, and formulas.

Pages in docs/ are written to be read on GitHub, too: they link to ``../examples/own_loop.py`` and write formulas as
``$…$``. On the site, every file outside docs/ that a page links to becomes a page under ``repository/``, each public
package gets a page under ``api/``, and formulas become MathML, which browsers show without a script.
"""

from __future__ import annotations

import ast
import html
import posixpath
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PACKAGE = ROOT / "src" / "driftproof"
LINK = re.compile(r"(?<=\]\()(?P<target>[^)\s#:]+)(?=[)#])")  # the target of a Markdown link, without its anchor
CODE = re.compile(r"(^```.*?^```|`[^`\n]+`)", re.DOTALL | re.MULTILINE)
FORMULA = re.compile(r'<(div|span) class="arithmatex">\\([\[(])(.*?)\\[\])]</\1>', re.DOTALL)
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".json": "json", ".csv": "text"}
MODULES = {
    "optim": ("diagnostics", "functional"),
    "pbt": ("ray_backend", "vectorized"),
    "nn": ("policies",),
    "settings": ("definition",),
}
"""Modules of packages that are public, too."""
PICTURES = {".png", ".gif", ".svg"}

_sources: dict[str, Path] = {}
"""The repository's file behind each page of the site."""


def on_files(files: Files, config: Any) -> Files:
    """Add the API reference and all files of the repository that the navigation or pages lead to."""
    _sources.clear()
    _sources.update({file.src_uri: DOCS / file.src_uri for file in files.documentation_pages()})
    waiting = list(_sources.values())

    def add(source: Path) -> None:
        uri = _uri(source)
        if files.get_file_from_path(uri) is None:
            files.append(_page(source, uri, config))
            _sources[uri] = source
            waiting.append(source)

    entries = _entries(config.nav)
    packages = [Path(entry).stem for entry in entries if entry.startswith("api/")]
    for entry in entries:
        if entry.startswith("repository/"):
            add(ROOT / entry.removeprefix("repository/"))
        elif entry.startswith("api/"):
            files.append(File.generated(config, entry, content=_reference(Path(entry).stem, packages)))
    while waiting:
        source = waiting.pop()
        if source.suffix == ".md":
            for part in CODE.split(source.read_text())[::2]:
                for target in LINK.findall(part):
                    if (linked := (source.parent / target).resolve()).exists() and not linked.is_relative_to(DOCS):
                        add(linked)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links between files of the repository into links between pages of the site."""
    source = _sources.get(page.file.src_uri)
    if source is None or source.suffix != ".md":
        return markdown
    here = posixpath.dirname(page.file.src_uri) or "."

    def link(match: re.Match[str]) -> str:
        linked = (source.parent / match["target"]).resolve()
        return posixpath.relpath(_uri(linked), here) if linked.exists() else match["target"]

    parts = CODE.split(markdown)
    return "".join(part if index % 2 else LINK.sub(link, part) for index, part in enumerate(parts))


def on_page_content(content: str, **_: Any) -> str:
    """Turn formulas, which the Markdown extension has marked, into MathML."""

    def formula(match: re.Match[str]) -> str:
        return str(convert(html.unescape(match[3]).strip(), display="block" if match[2] == "[" else "inline"))

    return FORMULA.sub(formula, content)


def _uri(source: Path) -> str:
    """Where a file or folder of the repository is found among the site's sources."""
    if source.is_relative_to(DOCS):
        return source.relative_to(DOCS).as_posix()
    uri = f"repository/{source.relative_to(ROOT).as_posix()}"
    if source.is_dir():
        return f"{uri}/index.md"
    return uri if source.suffix in {".md", *PICTURES} else f"{uri}.md"


def _page(source: Path, uri: str, config: Any) -> File:
    if source.suffix in {".md", *PICTURES}:
        return File.generated(config, uri, abs_src_path=str(source))
    name = source.relative_to(ROOT).as_posix()
    if source.is_dir():
        text = "\n".join(f"- `{path.name}`" for path in sorted(source.iterdir()) if path.name[0] not in "._")
    else:
        text = f"````{LANGUAGES.get(source.suffix, 'text')}\n{source.read_text()}\n````"
    return File.generated(config, uri, content=f"---\nsearch:\n  exclude: true\n---\n# {name}\n\n{text}\n")


def _entries(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [entry for part in (nav.values() if isinstance(nav, dict) else nav) for entry in _entries(part)]


def _reference(name: str, packages: list[str]) -> str:
    """The page of a package: its public names, which are those in ``__all__``, and its public modules."""
    if name == "driftproof":
        return _overview(packages)
    package = f"driftproof.{name}"
    text = f"# {package}\n\n::: {package}\n"
    for module in MODULES.get(name, ()):
        path = f"{package}.{module}"
        text += f"\n## {path}\n\n::: {path}\n    options:\n      heading_level: 3\n"
    return text


def _overview(packages: list[str]) -> str:
    source = (PACKAGE / "__init__.py").read_text()
    names = "\n".join(f"| [`{name}`][{home}.{name}] | `{home}` |" for name, home in _names(source).items())
    rows = "\n".join(
        f"| [`driftproof.{name}`]({name}.md) | {_docstring(PACKAGE / name / '__init__.py')} |"
        for name in packages
        if name != "driftproof"
    )
    return f"""# API reference

{_docstring(PACKAGE / "__init__.py")}

| package | contents |
|---|---|
{rows}

Every public name is in the `__all__` of its package; nothing else is promised to stay. The most important ones can be
imported from `driftproof` itself, with `from driftproof import DistributionalPPO`:

| name | described in |
|---|---|
{names}
"""


def _names(source: str) -> dict[str, str]:
    """The public names of ``driftproof`` itself, and the package where each is described."""
    homes = {
        alias.name: node.module
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    return {name: homes.get(name, "driftproof.ppo.DistributionalPPO") for name in _all(source)}


def _all(source: str) -> list[str]:
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def _docstring(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")[0].replace("\n", " ")
