"""Reads pickles of torch with tensors, plain values and NumPy numbers, without running code in them.

Three things are stricter here than in ``torch.load(weights_only=True)``. Archives are repacked, because torch
decompresses members, and may see other members than Python does. NumPy's own functions are not called: they set states
unchecked, and free the memory of arrays that tensors still use. The size of the content is limited by that of the file.
"""

from __future__ import annotations

import io
import math
import re
import shutil
import warnings
import zipfile
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch

from driftproof._text import printable
from driftproof.state._errors import CheckpointError

_MOST_PARTS = 1000
"""Limit for zip files of Stable-Baselines3, which have fewer than ten members."""
_MOST_MEMBERS = 100_000
"""Limit for torch files, which have one member per tensor."""
_ZIP = b"PK\x03\x04"
_DTYPE_CODES = frozenset(np.dtype(code).str[1:] for code in "?bBhHiIlLqQefdFD")


def read_content(file: BinaryIO, name: str, device: torch.device | str) -> tuple[Any, bool]:
    """Content of a torch file, or of every ``*.pth`` in a zip file of Stable-Baselines3; and whether it is the latter.

    Args:
        file: The file, read from its start.
        name: Name of the file in errors.
        device: Device of the tensors.

    Raises:
        CheckpointError: It holds anything but tensors and plain values, or is damaged.
    """
    file.seek(0)
    if file.read(4) != _ZIP:
        return _unpickled(file, name, device), False
    with _archive(file, name) as archive:
        names = archive.namelist()
        if "policy.pth" not in names:
            return _unpickled(_repacked(archive, name), name, device), False
        if len(names) > _MOST_PARTS:
            raise CheckpointError(f"{name} has {len(names):,} members, too many for a file of an agent")
        parts = [part for part in names if part.endswith(".pth")]
        return {part.removesuffix(".pth"): _part(archive, part, name, device) for part in parts}, True


def _part(archive: zipfile.ZipFile, part: str, name: str, device: torch.device | str) -> Any:
    """Content of one member of a zip file of Stable-Baselines3, which is a torch file itself."""
    file = io.BytesIO(_read(archive, part, name))
    if file.read(4) != _ZIP:
        return _unpickled(file, name, device)
    with _archive(file, name) as inner:
        return _unpickled(_repacked(inner, name), name, device)


def _archive(file: BinaryIO, name: str) -> zipfile.ZipFile:
    """Open an archive whose members are not compressed, and together not larger than the file."""
    size = file.seek(0, io.SEEK_END)
    try:
        archive = zipfile.ZipFile(file)
    except (zipfile.BadZipFile, ValueError, EOFError, NotImplementedError, OSError) as error:
        raise _damaged(name, error) from error
    entries = archive.infolist()
    # Compressed members could become any size.
    if any(info.compress_type for info in entries) or sum(info.file_size for info in entries) > size:
        raise CheckpointError(f"{name} has compressed members, which files of agents do not have")
    if len(entries) > _MOST_MEMBERS or len({info.filename for info in entries}) < len(entries):
        raise CheckpointError(f"{name} is damaged: it has a member twice, or more than {_MOST_MEMBERS:,}")
    return archive


def _repacked(archive: zipfile.ZipFile, name: str) -> BinaryIO:
    """The same members in a new archive: torch looks for them in another way than Python does."""
    packed = io.BytesIO()
    try:
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as target:
            for info in archive.infolist():
                with archive.open(info) as source, target.open(zipfile.ZipInfo(info.filename), "w") as member:
                    shutil.copyfileobj(source, member)
    except (zipfile.BadZipFile, ValueError, EOFError, NotImplementedError, OSError, RuntimeError) as error:
        raise _damaged(name, error) from error
    return packed


def _read(archive: zipfile.ZipFile, member: str, name: str) -> bytes:
    try:
        return archive.read(member)
    except (zipfile.BadZipFile, ValueError, EOFError, NotImplementedError, OSError, RuntimeError) as error:
        raise _damaged(name, error) from error


def _damaged(name: str, error: Exception) -> CheckpointError:
    return CheckpointError(f"{name} is damaged: {printable(error)}; take another copy of it")


def _unpickled(file: BinaryIO, name: str, device: torch.device | str) -> Any:
    file.seek(0)
    try:
        with torch.serialization.safe_globals(_numpy_names()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(file, map_location=device, weights_only=True)
    except Exception as error:  # pickles can raise anything
        # torch's own message explains how to run the code in it.
        named = re.search(r"GLOBAL ([\w.]{1,100})", str(error))
        reason = f"it names {named[1]}" if named else type(error).__name__
        raise CheckpointError(
            f"{name} is not a file of tensors and plain values ({reason}); nothing of it was loaded"
        ) from error


class PickledArray:
    """Replaces ``numpy.ndarray`` in a pickle.

    NumPy's own class accepts any state, several times, and frees its memory although a tensor may share it.
    """

    array: npt.NDArray[Any] | None = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, is_fortran, content = state
        if not isinstance(dtype, _PickledDtype) or not isinstance(content, bytes):
            raise ValueError("an array that does not hold numbers")
        if not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError("an array with an invalid shape")
        if math.prod(shape) * dtype.dtype.itemsize != len(content):
            raise ValueError("an array whose shape does not match its content")
        values = np.frombuffer(content, dtype.dtype).reshape(shape, order="F" if is_fortran else "C")
        self.array = values.astype(dtype.dtype.newbyteorder("="))


class _PickledDtype:
    """Replaces ``numpy.dtype`` in a pickle; ``__setstate__`` sets the byte order."""

    def __init__(self, code: str, align: bool = False, copy: bool = False) -> None:
        if code not in _DTYPE_CODES:
            raise ValueError("a dtype that is not numeric")
        self.dtype = np.dtype(code)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dtype = self.dtype.newbyteorder(">" if state[1] == ">" else "<")


def _reconstruct(*_: Any) -> PickledArray:
    """Replaces the function with which NumPy's pickles create an empty array."""
    return PickledArray()


def _scalar(dtype: _PickledDtype, content: bytes) -> np.generic:
    """Replaces the function with which NumPy's pickles create a scalar."""
    if not isinstance(dtype, _PickledDtype) or not isinstance(content, bytes):
        raise ValueError("a scalar that is not a number")
    if len(content) != dtype.dtype.itemsize:
        raise ValueError("a scalar whose dtype does not match its content")
    value: np.generic = np.frombuffer(content, dtype.dtype).astype(dtype.dtype.newbyteorder("="))[0]
    return value


def _numpy_names() -> list[Any]:
    """Names in pickles of NumPy 1 and 2 scalars and arrays, with their replacements here."""
    functions = {"scalar": _scalar, "_reconstruct": _reconstruct}
    named = [(f, f"numpy.{core}.multiarray.{name}") for core in ("core", "_core") for name, f in functions.items()]
    return [*named, (PickledArray, "numpy.ndarray"), (_PickledDtype, "numpy.dtype")]
