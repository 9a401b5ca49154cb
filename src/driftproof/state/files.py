"""Checkpoint files: a state tree in a zip, tensors as safetensors and the rest as JSON. Reading one runs no code."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import torch
from torch import Tensor

from driftproof._arguments import check_flag
from driftproof.state import _container
from driftproof.state._atomic import write_atomically
from driftproof.state._codec import TENSOR_DTYPES, flatten
from driftproof.state._container import Member
from driftproof.state._errors import CheckpointError
from driftproof.state._inspection import Component, Inspection, inspect
from driftproof.state._reader import FORMAT_VERSION, MANIFEST, STATE, Reader, Source, excess
from driftproof.state.tree import to_device

__all__ = [
    "FORMAT_VERSION",
    "Checkpoint",
    "CheckpointError",
    "Component",
    "Inspection",
    "Source",
    "inspect",
    "read",
    "write",
]


@dataclass(frozen=True)
class Checkpoint:
    """Content of a checkpoint file."""

    tree: Any
    config: dict[str, Any]
    """Plain values that were passed to :func:`write`."""
    versions: dict[str, str]
    """Versions of the libraries that wrote the file."""
    exact: bool
    """Whether training can continue from it as if it had not been interrupted."""
    created: str
    """Time in UTC, ISO 8601."""
    format_version: int


def write(target: Source, tree: Any, *, config: Mapping[str, Any] | None = None, exact: bool = False) -> None:
    """Write a tree to a file.

    Args:
        target: A path, which is replaced atomically, or a binary file to write to.
        tree: The state tree; tensors may be on any device.
        config: Plain values, returned in :attr:`Checkpoint.config`.
        exact: Whether training can continue from it as if it had not been interrupted.

    Raises:
        TypeError: ``tree`` or ``config`` holds a type that files cannot store.
        ValueError: There are too many plain values.
        OSError: The file cannot be written; an old one at that path stays unchanged.
    """
    parts = serialize(tree, config=config, exact=exact).parts()
    if isinstance(target, str | os.PathLike):
        write_atomically(target, parts)
    else:
        for part in parts:
            target.write(part)
        target.flush()


@dataclass(frozen=True)
class Serialized:
    """A serialized tree without checksums, which take longer than everything else."""

    manifest: dict[str, Any]
    header: bytes
    """Header of safetensors."""
    data: list[memoryview]

    def parts(self) -> list[bytes | memoryview]:
        """The bytes of the file, in pieces."""
        state: list[bytes | memoryview] = [len(self.header).to_bytes(8, "little"), self.header, *self.data]
        digest, crc, size = hashlib.sha256(), 0, 0
        for part in state:
            digest.update(part)
            crc, size = zlib.crc32(part, crc), size + len(part)
        files = {STATE: {"bytes": size, "sha256": digest.hexdigest()}}
        manifest = json.dumps({**self.manifest, "files": files}, allow_nan=False).encode("ascii")
        for text in (manifest, self.header):
            if problem := excess(text):
                raise ValueError(f"the tree is too large for a file: it has {problem}; put many numbers into one array")
        members = [Member(MANIFEST, len(manifest), zlib.crc32(manifest)), Member(STATE, size, crc)]
        first: list[bytes | memoryview] = [_container.header(members[0]), manifest, _container.header(members[1])]
        return [*first, *state, _container.directory(members)]


def serialize(
    tree: Any, *, config: Mapping[str, Any] | None = None, exact: bool = False, copied: bool = False
) -> Serialized:
    """Serialize a tree for :func:`write`.

    Args:
        tree: The state tree; must not change until it is written, unless ``copied``.
        config: As for :func:`write`.
        exact: As for :func:`write`.
        copied: Copy all tensors, into one buffer.
    """
    check_flag("exact", exact)
    tensors, plain = flatten(tree)
    in_config, plain_config = flatten(dict(config or {}))
    if in_config:
        raise TypeError(f"config may hold plain values only; tensors or arrays at {', '.join(sorted(in_config))}")
    header, rows = _serialize_tensors(tensors)
    if copied and rows:
        rows = [torch.cat(rows)]
    manifest = {
        "format": "driftproof",
        "format_version": FORMAT_VERSION,
        "versions": dict(_versions()),
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "exact": exact,
        "config": plain_config,
        "state": plain,
    }
    return Serialized(manifest, header, [row.numpy().data for row in rows])


def _serialize_tensors(tensors: dict[str, Tensor]) -> tuple[bytes, list[Tensor]]:
    """Header of safetensors and the tensors' bytes without copying, which `safetensors.torch.save` does twice."""
    if sys.byteorder != "little":
        raise NotImplementedError("checkpoints are little-endian, but this machine is big-endian")
    entries, rows, end = {}, [], 0
    # Large item sizes first, so that all tensors are aligned.
    for path, tensor in sorted(tensors.items(), key=lambda item: -item[1].itemsize):
        if not (tensor.is_cpu and tensor.is_contiguous()) or tensor.is_conj() or tensor.is_neg():
            tensor = tensor.cpu().resolve_conj().resolve_neg().contiguous()
        start, end = end, end + tensor.nbytes
        entries[path] = {
            "dtype": TENSOR_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        # Not reshape, which keeps odd strides of dimensions of size one, for which view() fails.
        rows.append(tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8))
    header = json.dumps(entries).encode("ascii")
    return header + b" " * (-len(header) % 8), rows


@functools.cache
def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in ("driftproof", "torch", "numpy", "safetensors", "gymnasium", "stable-baselines3"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def read(source: Source, device: torch.device | str = "cpu") -> Checkpoint:
    """Read a file. All of it is checked before anything is returned.

    Args:
        source: A path, or a binary file that is read from its current position to its end.
        device: Device of the tensors; NumPy arrays stay NumPy arrays.

    Raises:
        CheckpointError: It is not a checkpoint, is damaged, or is of a newer format.
        FileNotFoundError: There is no such file.
    """
    with Reader(source) as reader:
        manifest = reader.manifest()
        tree = reader.tree(reader.state())
    return Checkpoint(
        tree=tree if torch.device(device).type == "cpu" else to_device(tree, device),
        config=manifest.config,
        versions=manifest.versions,
        exact=manifest.exact,
        created=manifest.created,
        format_version=manifest.format_version,
    )
