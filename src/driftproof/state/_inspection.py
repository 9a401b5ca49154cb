"""What a checkpoint file holds, for people to read."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from driftproof._text import printable, table
from driftproof.state._errors import CheckpointError
from driftproof.state._reader import Reader, Source
from driftproof.state.tree import Leaf, describe

_WIDEST = 120
"""Characters of a cell in a table."""


@dataclass(frozen=True)
class Component:
    """One entry at the top of a tree."""

    name: str
    tensors: int
    values: int
    bytes: int


@dataclass(frozen=True)
class Inspection:
    """What a file holds, in words and numbers; ``str()`` of it is a table."""

    source: str
    file_bytes: int
    intact: bool
    problem: str | None
    """Why the file cannot be loaded."""
    format_version: int
    created: str
    exact: bool
    versions: dict[str, str]
    config: dict[str, Any]
    components: list[Component]
    leaves: list[Leaf]
    """Empty if the tensors of a damaged file cannot be told apart."""

    def __str__(self) -> str:
        return self.render()

    def render(self, *, leaves: bool = False) -> str:
        """Plain text, with every leaf if asked for."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        first = [
            self.source,
            f"  {'intact' if self.intact else 'DAMAGED: ' + str(self.problem)}",
            f"  {self.file_bytes:,} bytes, format {self.format_version}, written {self.created}",
            f"  {'exact: training continues as if uninterrupted' if self.exact else 'not exact'}",
            f"  {versions}",
        ]
        # Names in a file are a stranger's, and terminals obey some characters.
        lines = [*map(printable, first), ""]
        rows = [(part.name, f"{part.tensors:,}", f"{part.values:,}", f"{part.bytes:,}") for part in self.components]
        total = [sum(getattr(part, of) for part in self.components) for of in ("tensors", "values", "bytes")]
        lines += _table(
            [("component", "tensors", "values", "bytes"), *rows, ("total", *(f"{n:,}" for n in total))], texts=1
        )
        if leaves:
            lines += ["", *_table([("leaf", "kind", "dtype", "shape", "bytes"), *_rows(self.leaves)], texts=4)]
        return "\n".join(lines)


def inspect(source: Source) -> Inspection:
    """What a file holds and whether it is intact, without building anything of it.

    Raises:
        CheckpointError: Not even its manifest can be read.
        FileNotFoundError: There is no such file.
    """
    with Reader(source) as reader:
        manifest = reader.manifest()
        problem = None
        try:
            leaves = describe(reader.tree(reader.state()))
        except CheckpointError as error:
            problem = str(error)
            leaves = _leaves_of_damaged(reader)
    return Inspection(
        source=reader.name,
        file_bytes=reader.size,
        intact=problem is None,
        problem=problem,
        format_version=manifest.format_version,
        created=manifest.created,
        exact=manifest.exact,
        versions=manifest.versions,
        config=manifest.config,
        components=_components(leaves),
        leaves=leaves,
    )


def _leaves_of_damaged(reader: Reader) -> list[Leaf]:
    try:
        return describe(reader.tree(reader.unchecked_state))
    except CheckpointError:
        return []


def _components(leaves: list[Leaf]) -> list[Component]:
    parts: dict[str, list[Leaf]] = {}
    for leaf in leaves:
        parts.setdefault(leaf.path.split("/")[0], []).append(leaf)
    return [
        Component(
            name=name,
            tensors=sum(leaf.dtype is not None for leaf in part),
            values=sum(leaf.dtype is None for leaf in part),
            bytes=sum(leaf.bytes for leaf in part),
        )
        for name, part in parts.items()
    ]


def _rows(leaves: list[Leaf]) -> list[tuple[str, ...]]:
    """A row per leaf, but one for many plain values at one place."""
    rows: list[tuple[str, ...]] = []
    places = itertools.groupby(leaves, key=lambda leaf: (leaf.path.rpartition("/")[0], leaf.dtype is None))
    for (parent, plain), group in places:
        here = list(group)
        if plain and len(here) > 16:
            rows.append((f"{parent}/...", f"{len(here):,} values", "", "", f"{sum(leaf.bytes for leaf in here):,}"))
            continue
        for leaf in here:
            shape = "" if leaf.shape is None else "x".join(map(str, leaf.shape))
            rows.append((leaf.path, leaf.kind, leaf.dtype or "", shape, f"{leaf.bytes:,}"))
    return rows


def _table(rows: list[tuple[str, ...]], texts: int) -> list[str]:
    """Aligned lines: so many columns of text, then numbers."""
    shown = ([printable(cell, _WIDEST) for cell in row] for row in rows)
    return [f"  {line}".rstrip() for line in table(shown, numbers_from=texts).splitlines()]
