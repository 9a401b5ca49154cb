"""A readable summary of a checkpoint file."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from driftproof._text import printable, table
from driftproof.state._errors import CheckpointError
from driftproof.state._reader import Reader, Source
from driftproof.state.tree import Leaf, describe

_WIDEST = 120
"""Largest number of characters in a table's cell."""


@dataclass(frozen=True)
class Component:
    """Summary of one top-level entry of a tree."""

    name: str
    tensors: int
    values: int
    bytes: int


@dataclass(frozen=True)
class Inspection:
    """Summary of a checkpoint file; ``str()`` of it is a table."""

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
    """All leaves of the tree; empty if the tensors of a damaged file cannot be read."""

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
        # Names in an untrusted file may contain control sequences of terminals.
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
    """Summarise a checkpoint file and check whether it is intact, without building an agent.

    Raises:
        CheckpointError: The manifest cannot be read.
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
    """One row per leaf, but a single row for more than 16 plain values of one parent."""
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
    """Aligned lines: ``texts`` columns of text, then numbers."""
    shown = ([printable(cell, _WIDEST) for cell in row] for row in rows)
    return [f"  {line}".rstrip() for line in table(shown, numbers_from=texts).splitlines()]
