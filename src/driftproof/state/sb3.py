"""Settings in files of Stable-Baselines3: plain values are read, pickles are skipped."""

from __future__ import annotations

import json
import os
import zipfile
from typing import Any

from driftproof.state._errors import CheckpointError
from driftproof.state._reader import MAX_JSON_BYTES, excess, open_regular

_MEMBER = "data"
_PICKLE = ":serialized:"


def read_data(source: str | os.PathLike[str]) -> dict[str, Any]:
    """Settings of an agent by name, from the member ``data`` of a zip file of Stable-Baselines3 or sb3-contrib.

    That member is JSON. Values that JSON cannot represent are pickles in text form, beside a readable description. The
    description is returned; the pickle is not read.

    Returns:
        The values; empty if the file has no such member, because it holds parameters only.

    Raises:
        CheckpointError: It is not a file of Stable-Baselines3, or is damaged.
        FileNotFoundError: There is no such file.
    """
    name = os.fspath(source)
    try:
        with open_regular(source) as file, zipfile.ZipFile(file) as archive:
            if _MEMBER not in archive.namelist():
                return {}
            info = archive.getinfo(_MEMBER)
            if info.compress_type != zipfile.ZIP_STORED or info.file_size > MAX_JSON_BYTES:
                raise CheckpointError(f"{name}: its member {_MEMBER!r} is compressed, or too large")
            text = archive.read(_MEMBER)
    except (CheckpointError, FileNotFoundError):
        raise
    except (zipfile.BadZipFile, ValueError, EOFError, NotImplementedError, OSError, RuntimeError) as error:
        raise CheckpointError(f"{name} is damaged: {error}; take another copy of it") from error
    if problem := excess(text):
        raise CheckpointError(f"{name} is damaged: its member {_MEMBER!r} has {problem}")
    try:
        found = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name} is damaged: its member {_MEMBER!r} is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{name} is damaged: its member {_MEMBER!r} is not a mapping of settings")
    return {key: _readable(value) for key, value in found.items()}


def _readable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: part for key, part in value.items() if key != _PICKLE}
    return value
