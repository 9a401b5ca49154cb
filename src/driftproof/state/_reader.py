"""Reads checkpoint files sequentially, and validates everything in them."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import stat
import zlib
from dataclasses import dataclass
from datetime import datetime
from typing import Any, BinaryIO, NoReturn

import safetensors.torch
from torch import Tensor

from driftproof._files import refuse_constant, unique_keys
from driftproof.state import _container
from driftproof.state._codec import shortened, unflatten
from driftproof.state._container import Member
from driftproof.state._errors import CheckpointError

FORMAT_VERSION = 1
MANIFEST, STATE = "manifest.json", "state.safetensors"

MAX_JSON_BYTES = 64 * 2**20
MAX_JSON_VALUES = 500_000
"""Limits of the manifest, and of the header of the tensors: parsed JSON takes many times the memory of its text."""

MAX_DIMENSIONS = 64
"""Largest number of dimensions of a tensor, as in NumPy and torch."""

_DAMAGED = "take another copy of it, or an older checkpoint"
_CONVERT = (
    "convert it to a checkpoint: driftproof convert {0} NEW.zip --env ID, or load it into an agent: "
    "driftproof.ppo.legacy.adopt(agent, {0!r})"
)
_CONVERT_SB3 = (
    "convert it to a checkpoint: driftproof convert {0} NEW.zip --env ID, or to an agent: "
    "driftproof.ppo.from_sb3({0!r}, env)"
)

Source = str | os.PathLike[str] | BinaryIO


@dataclass(frozen=True)
class Manifest:
    """The checked manifest of a file."""

    format_version: int
    versions: dict[str, str]
    created: str
    exact: bool
    config: dict[str, Any]
    bytes: int
    sha256: str
    plain: Any
    """The tree, with references to tensors."""


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file to read, unless it is a pipe, a device or a folder.

    Raises:
        CheckpointError: It cannot be opened.
        FileNotFoundError: There is no such file.
    """
    # Without O_NONBLOCK, opening a pipe without a writer blocks for ever.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be opened ({error}); check the path and its permissions") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path} is not a regular file; give the path of a checkpoint")
    return os.fdopen(descriptor, "rb")


class Reader:
    """Reads one file: :meth:`manifest`, then :meth:`state`, then :meth:`tree`."""

    def __init__(self, source: Source) -> None:
        self.unchecked_state = b""
        """The tensors' bytes, which may be damaged."""
        self._file: BinaryIO
        if isinstance(source, str | os.PathLike):
            self.name = os.fspath(source)
            self._file = open_regular(source)
        else:
            self.name = str(getattr(source, "name", "the file"))
            content = source.read()
            if not content and source.seekable():
                source.seek(0)  # It was written just now.
                content = source.read()
            self._file = io.BytesIO(content)
        self.size = self._file.seek(0, io.SEEK_END)
        self._file.seek(0)
        self._manifest: Manifest | None = None
        self._members: list[Member] = []

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def _fail(self, problem: str, advice: str = _DAMAGED, cause: Exception | None = None) -> NoReturn:
        raise CheckpointError(f"{self.name} {problem}; {advice}") from cause

    def _take(self, count: int, what: str) -> bytes:
        left = self.size - self._file.tell()
        if count > left:
            self._fail(f"is cut off: {left:,} of {count:,} bytes of {what} are there")
        try:
            data = self._file.read(count)
        except OSError as error:
            self._fail(f"cannot be read ({error})", cause=error)
        if len(data) != count:
            self._fail("changes while it is read", "try again")
        return data

    def _header(self, name: str) -> Member:
        data = self._take(_container.header_size(name), f"the header of {name}")
        try:
            return _container.parse_header(data, name)
        except ValueError as error:
            self._fail(f"is damaged: {error}", cause=error)

    def manifest(self) -> Manifest:
        """Read and check the manifest.

        Raises:
            CheckpointError: This is not a checkpoint, or one of a newer format, or its manifest is damaged.
        """
        self._refuse_foreign()
        member = self._header(MANIFEST)
        if member.size > MAX_JSON_BYTES:
            self._fail(f"is damaged: {MANIFEST} has {member.size:,} bytes, more than the limit of {MAX_JSON_BYTES:,}")
        text = self._take(member.size, MANIFEST)
        if zlib.crc32(text) != member.crc:
            self._fail(f"is damaged: the checksum of {MANIFEST} does not match")
        self._members.append(member)
        self._manifest = self._checked(self._json(text, MANIFEST))
        return self._manifest

    def _refuse_foreign(self) -> None:
        """Raise an error that names the kind of a file that is not a checkpoint."""
        start = self._take(min(4096, self.size), "its start")
        self._file.seek(max(0, self.size - 65536))
        end = self._take(min(65536, self.size), "its end")
        self._file.seek(0)
        if not start:
            self._fail("is empty")
        convert = _CONVERT.format(self.name)
        if re.match(rb"\x80[\x02-\x05]", start):
            self._fail("is a pickle, perhaps of torch, which could run code when loaded", convert)
        if start.startswith(_container.LOCAL_SIGNATURE):
            if start[30 : 30 + len(MANIFEST)] == MANIFEST.encode():
                return
            if b"policy.pth" in end:
                self._fail("is a Stable-Baselines3 file, with pickles in it", _CONVERT_SB3.format(self.name))
            if b"/data.pkl" in start + end:
                self._fail("is a torch file, with a pickle in it", convert)
            self._fail(f"is a zip file, but does not begin with {MANIFEST}", "give the path of a checkpoint")
        if start[8:9] == b"{" and int.from_bytes(start[:8], "little") < self.size:
            self._fail("is a bare safetensors file: tensors without the rest of an agent", "give a checkpoint")
        if start.startswith(b'{"file"'):
            self._fail(
                "only names the checkpoint to take", f"use CheckpointStore({os.path.dirname(self.name)!r}).latest()"
            )
        self._fail("is not a checkpoint, which is a zip file", "give the path of a checkpoint")

    def _json(self, text: bytes, what: str) -> Any:
        if problem := excess(text):
            self._fail(f"is damaged: {what} has {problem}")
        try:
            return json.loads(
                text.decode("utf-8"),
                object_pairs_hook=unique_keys,
                parse_constant=refuse_constant,
                parse_int=_short_int,
            )
        except (ValueError, RecursionError) as error:
            self._fail(f"is damaged: {what} is not valid JSON ({error})", cause=error)

    def _checked(self, found: Any) -> Manifest:
        if not isinstance(found, dict) or found.get("format") != "driftproof":
            self._fail("is not a driftproof checkpoint", "give the path of a checkpoint")
        version = found.get("format_version")
        if type(version) is not int or version < 1:
            self._fail(f"is damaged: its format_version is {shortened(version)}")
        if version > FORMAT_VERSION:
            self._fail(
                f"was written by a newer driftproof (format {shortened(version)})",
                f"this one reads up to format {FORMAT_VERSION}: upgrade it",
            )
        kinds = {"versions": dict, "created": str, "exact": bool, "config": dict, "files": dict}
        names = {"format", "format_version", "state", *kinds}
        if found.keys() != names:
            wrong = ", ".join(shortened(name) for name in sorted(found.keys() ^ names)[:5])
            self._fail(f"is damaged: its manifest has missing or unknown keys: {wrong}")
        for name, kind in kinds.items():
            if type(found[name]) is not kind:
                self._fail(f"is damaged: {name!r} in its manifest is of type {type(found[name]).__name__}")
        if not all(type(version) is str for version in found["versions"].values()):
            self._fail("is damaged: 'versions' in its manifest are not all text")
        try:
            datetime.fromisoformat(found["created"])
            config = unflatten({}, found["config"])
        except (ValueError, RecursionError) as error:
            self._fail(f"is damaged: its manifest is invalid ({error})", cause=error)
        if type(config) is not dict:
            self._fail("is damaged: 'config' in its manifest is not a mapping")
        size, digest = self._file_entry(found["files"])
        created, exact = found["created"], found["exact"]
        return Manifest(version, found["versions"], created, exact, config, size, digest, found["state"])

    def _file_entry(self, files: dict[str, Any]) -> tuple[int, str]:
        entry = files.get(STATE)
        if len(files) != 1 or type(entry) is not dict or entry.keys() != {"bytes", "sha256"}:
            self._fail(f"is damaged: 'files' in its manifest does not describe {STATE} alone")
        if type(entry["bytes"]) is not int or entry["bytes"] < 8:
            self._fail(f"is damaged: {shortened(entry['bytes'])} is not a size of {STATE}")
        if type(entry["sha256"]) is not str or not re.fullmatch("[0-9a-f]{64}", entry["sha256"]):
            self._fail(f"is damaged: {shortened(entry['sha256'])} is not a checksum of {STATE}")
        return entry["bytes"], entry["sha256"]

    def state(self) -> bytes:
        """Read and check the tensors, and that nothing else is in the file.

        Raises:
            CheckpointError: They are damaged.
        """
        assert self._manifest is not None
        member = self._header(STATE)
        if member.size != self._manifest.bytes:
            self._fail(f"is damaged: its manifest and its zip header do not agree on the size of {STATE}")
        self.unchecked_state = self._take(member.size, STATE)
        if hashlib.sha256(self.unchecked_state).hexdigest() != self._manifest.sha256:
            self._fail(f"is damaged: the checksum of {STATE} does not match")
        if zlib.crc32(self.unchecked_state) != member.crc:
            self._fail(f"is damaged: the zip checksum of {STATE} does not match")
        end = _container.directory([*self._members, member])
        if self._take(len(end), "the zip directory") != end:
            self._fail("is damaged: its zip directory does not describe its members")
        if self._file.tell() != self.size:
            self._fail(f"is damaged: {self.size - self._file.tell():,} bytes follow its end")
        return self.unchecked_state

    def tree(self, state: bytes) -> Any:
        """Build the tree from the manifest and these tensors.

        Raises:
            CheckpointError: They do not belong together.
        """
        assert self._manifest is not None
        tensors = self._tensors(state)
        try:
            return unflatten(tensors, self._manifest.plain)
        except (ValueError, RecursionError) as error:
            self._fail(f"is damaged: its tree cannot be built ({error})", cause=error)

    def _tensors(self, state: bytes) -> dict[str, Tensor]:
        length = int.from_bytes(state[:8], "little")
        if length > len(state) - 8:
            self._fail(f"is damaged: the header of {STATE} should have {length:,} bytes")
        entries = self._json(state[8 : 8 + length].rstrip(b" "), f"the header of {STATE}")
        if not isinstance(entries, dict) or not all(_is_small(entry) for entry in entries.values()):
            self._fail(f"is damaged: {STATE} has tensors of more than {MAX_DIMENSIONS} dimensions, or none")
        try:
            return safetensors.torch.load(state)
        except Exception as error:  # of many types, for invalid dtypes, shapes and offsets
            self._fail(f"is damaged: {STATE} cannot be read ({error})", cause=error)


def excess(text: bytes) -> str | None:
    """Description of the limit that a JSON text exceeds, if any."""
    if len(text) > MAX_JSON_BYTES:
        return f"{len(text):,} bytes of plain values; the limit is {MAX_JSON_BYTES:,}"
    values = sum(text.count(mark) for mark in (b",", b"[", b"{"))
    if values > MAX_JSON_VALUES:
        return f"about {values:,} plain values; the limit is {MAX_JSON_VALUES:,}"
    return None


def _is_small(entry: Any) -> bool:
    """Whether an entry of safetensors' header has few enough dimensions; safetensors checks everything else."""
    shape = entry.get("shape", []) if isinstance(entry, dict) else None
    return isinstance(shape, list) and len(shape) <= MAX_DIMENSIONS


def _short_int(text: str) -> int:
    if len(text) > 20:
        raise ValueError("an int of more than 20 digits")
    return int(text)
