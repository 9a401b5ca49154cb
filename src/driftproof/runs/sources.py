"""``sources.json``: the data and code that a run was started with, when and where."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field

from driftproof._files import read_json
from driftproof.runs.layout import SOURCES, own_file
from driftproof.state import write_atomically

_MOST = 10_000
_CHUNK = 2**20
_Name = Annotated[str, Field(strict=True, max_length=1_000)]
_Count = Annotated[int, Field(strict=True, ge=0, le=2**53)]


class History(BaseModel):
    """Bars of a market's history, as :attr:`driftproof.envs.MarketEnv.history` tells them.

    Attributes:
        split: Part of the data.
        symbols: First time, last time and number of bars of each symbol; times are ISO, in UTC.
    """

    split: _Name
    symbols: Annotated[dict[_Name, tuple[_Name, _Name, _Count]], Field(max_length=_MOST)]

    @property
    def bars(self) -> int:
        """Number of bars of all symbols."""
        return sum(count for _, _, count in self.symbols.values())

    @property
    def span(self) -> tuple[str, str]:
        """Day of the first bar, and of the last."""
        return min(f for f, _, _ in self.symbols.values())[:10], max(last for _, last, _ in self.symbols.values())[:10]

    def overlaps(self, other: History) -> bool:
        """Whether both have bars of one symbol at one time."""
        return any(
            first <= other.symbols[symbol][1] and other.symbols[symbol][0] <= last
            for symbol, (first, last, _) in self.symbols.items()
            if symbol in other.symbols
        )

    def is_of_the_time_of(self, other: History) -> bool:
        """Whether both have bars of one time, of any symbols."""
        return any(
            first <= end and begin <= last
            for first, last, _ in self.symbols.values()
            for begin, end, _ in other.symbols.values()
        )


class File(BaseModel):
    """A file that the configuration names.

    Attributes:
        setting: Path of the setting, such as ``env.kwargs.data``.
        path: Where the file was, absolute.
        sha256: Its checksum.
        bytes: Its size.
    """

    setting: _Name
    path: _Name
    sha256: Annotated[str, Field(strict=True, pattern="^[0-9a-f]{64}$")]
    bytes: _Count


class Module(BaseModel):
    """A module with code of the user that the configuration names.

    Attributes:
        name: Name of the module.
        path: File that it was imported from.
    """

    name: _Name
    path: _Name


class Sources(BaseModel):
    """What a run was trained on, when and where.

    Attributes:
        histories: Bars of markets; those of the run that it started from too.
        is_complete: Whether these are all: not if it started from a checkpoint whose training is not recorded.
        trials: Number of trials that its hyper-parameters were selected from.
        files: Files that the configuration names.
        modules: Modules that the configuration names.
        started: When the run was started, ISO, in UTC.
        machine: What it was started on.
    """

    histories: Annotated[list[History], Field(max_length=_MOST)] = []
    is_complete: Annotated[bool, Field(strict=True)] = True
    trials: Annotated[int, Field(strict=True, ge=1, le=2**53)] = 1
    files: Annotated[list[File], Field(max_length=_MOST)] = []
    modules: Annotated[list[Module], Field(max_length=_MOST)] = []
    started: _Name = ""
    machine: _Name = ""


def read_sources(folder: Path) -> Sources | None:
    """What a run was trained on; ``None`` if it is not recorded, as in runs of earlier versions.

    Raises:
        RunFolderError: The record is damaged.
    """
    path = own_file(folder, SOURCES)
    return read_json(path, Sources, advice="remove it, or restore it from a copy") if path.exists() else None


def write_sources(folder: Path, sources: Sources) -> None:
    """Record what a run is trained on."""
    content = sources.model_dump_json(indent=1)
    write_atomically(own_file(folder, SOURCES), [content.encode()], follow_links=False)


def file_of(setting: str, path: Path) -> File:
    """The record of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as content:
        while part := content.read(_CHUNK):
            digest.update(part)
    return File(setting=setting, path=str(path.resolve()), sha256=digest.hexdigest(), bytes=path.stat().st_size)


def history_of(values: Mapping[str, Any]) -> History:
    """A history from plain values."""
    return History.model_validate(dict(values))
