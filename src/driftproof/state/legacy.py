"""Reads files of earlier formats, and makes today's of them.

These are ``.pt`` files of populations with ``format_version`` ``"v2_full_parameters"`` or ``"v1_policy_only"``, state
dicts as they are, and the parameters in files of Stable-Baselines3. All are pickles, from which tensors and plain
values are taken and nothing else.
"""

from __future__ import annotations

import io
import os
import re
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from driftproof.state._codec import MAX_DEPTH, Path, check_key, kind_of, render
from driftproof.state._reader import MAX_JSON_VALUES, CheckpointError, open_regular
from driftproof.state.files import write
from driftproof.state.tree import describe

_PARAMETERS = ("model_parameters", "parameters", "model_params")
"""Keys under which files hold what ``get_parameters()`` returns."""

_POLICY = ("policy", "model_state_dict", "policy_state_dict", "state_dict", "model_state", "policy_state")
"""Keys under which files hold the policy's state dict."""

_OTHERS = {
    "optimizer": ("policy.optimizer", "optimizer", "optimizer_state_dict", "optimizer_state"),
    "vgs": ("vgs_state", "vgs", "vgs_state_dict"),
    "kl_penalty": ("kl_penalty_state", "kl_penalty", "kl_penalty_state_dict"),
    "return_scale": ("return_scale_state", "return_scale", "return_scale_state_dict"),
    "normalizer": ("normalizer_state", "normalizer", "vec_normalize_state", "vec_normalize", "vecnormalize"),
}
"""What an agent has besides its policy, and the keys it may have in a file; the first is the one it gets."""


@dataclass(frozen=True)
class LegacyCheckpoint:
    """What a file of an earlier format holds."""

    format: str
    """``v2_full_parameters``, ``v1_policy_only``, ``state_dict`` or ``stable_baselines3``."""
    components: dict[str, dict[Any, Any]]
    """States by the names that ``get_parameters()`` uses."""
    extras: dict[str, Any]
    """Whatever else it holds."""
    missing: list[str]
    """What an agent has and this file does not."""
    dropped: list[str] = field(default_factory=list)
    """Places of values that have no place in a tree."""


def read(source: str | os.PathLike[str], device: torch.device | str = "cpu") -> LegacyCheckpoint:
    """Read a file of an earlier format. No code in it is run.

    Warns of what is missing if the file holds no more than a policy.

    Raises:
        CheckpointError: It is none, or it holds something else than tensors and plain values.
        FileNotFoundError: There is no such file.
    """
    name = os.fspath(source)
    with open_regular(source) as file:
        size = file.seek(0, io.SEEK_END)
        file.seek(0)
        content = _content(file, name, device, size)
    cleaned = _Cleaner(name, limit=4 * size + 2**20)
    found = _sorted_out(cleaned.clean(content, ()), name)
    missing = [part for part, keys in _OTHERS.items() if not found.components.keys() & set(keys)]
    found = LegacyCheckpoint(found.format, found.components, found.extras, missing, cleaned.dropped)
    if found.format != "v2_full_parameters" and missing:
        warnings.warn(
            f"{name} ({found.format}) has no state of {', '.join(missing)}: training continues with new ones",
            stacklevel=2,
        )
    return found


def convert(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> list[str]:
    """Write today's format from a file of an earlier one; extras go under ``legacy``.

    Returns:
        A report in lines: what was carried over, what was not, and what an agent has besides.

    Raises:
        CheckpointError: As :func:`read`.
        OSError: The target cannot be written.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the report says it
        found = read(source)
    tree = {**found.components, "legacy": {"format": found.format, **found.extras}}
    write(target, tree, config={"converted_from": found.format}, exact=False)
    report = [f"{os.fspath(source)}: {found.format}"]
    for name, part in tree.items():
        leaves = describe(part)
        tensors = sum(leaf.dtype is not None for leaf in leaves)
        size = sum(leaf.bytes for leaf in leaves)
        report.append(f"{name}: {tensors:,} tensors and {len(leaves) - tensors:,} values, {size:,} bytes")
    report += [f"not carried over: {place}" for place in found.dropped]
    report += [f"not in the file: {part}" for part in found.missing]
    return [*report, f"written: {os.fspath(target)}"]


def match(
    state: Mapping[str, Tensor], wanted: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], list[str], list[str], list[str]]:
    """The tensors of ``state`` that ``wanted`` has too, by name and shape.

    Returns:
        These tensors, then the names of those that nobody wants, that are missing, and that have another shape.
    """
    shared = state.keys() & wanted.keys()
    fitting = {name: tensor for name, tensor in state.items() if name in shared and tensor.shape == wanted[name].shape}
    unused = [name for name in state if name not in shared]
    missing = [name for name in wanted if name not in shared]
    wrong_shape = [name for name in wanted if name in shared and name not in fitting]
    return fitting, unused, missing, wrong_shape


def _content(file: BinaryIO, name: str, device: torch.device | str, size: int) -> Any:
    if file.read(4) != b"PK\x03\x04":
        return _unpickled(file, name, device)
    try:
        with zipfile.ZipFile(file) as archive:
            entries = {info.filename: info for info in archive.infolist()}
            # Compressed members could become any size.
            if (
                any(info.compress_type for info in entries.values())
                or sum(i.file_size for i in entries.values()) > size
            ):
                raise CheckpointError(f"{name} has compressed members, which none of our files has")
            if "policy.pth" not in entries:
                return _unpickled(file, name, device)
            parts = [entry for entry in entries if entry in ("policy.pth", "policy.optimizer.pth")]
            members = {entry: io.BytesIO(archive.read(entry)) for entry in parts}
    except (zipfile.BadZipFile, ValueError, EOFError, NotImplementedError, OSError, RuntimeError) as error:
        raise CheckpointError(f"{name} is damaged: {error}; take another copy of it") from error
    loaded = {entry.removesuffix(".pth"): _unpickled(member, name, device) for entry, member in members.items()}
    return {"format_version": "stable_baselines3", "model_parameters": loaded}


def _unpickled(file: BinaryIO, name: str, device: torch.device | str) -> Any:
    file.seek(0)
    try:
        with torch.serialization.safe_globals(_numpy_globals()), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd pickles, which load or do not
            return torch.load(file, map_location=device, weights_only=True)
    except Exception as error:  # pickles fail in every way
        # torch's own message goes on to tell how to run the code in it.
        named = re.search(r"GLOBAL ([\w.]{1,100})", str(error))
        reason = f"it names {named[1]}" if named else type(error).__name__
        raise CheckpointError(
            f"{name} is not a file of tensors and plain values ({reason}); nothing of it was loaded"
        ) from error


def _numpy_globals() -> list[Any]:
    """What pickles of NumPy scalars and arrays of numbers name, in NumPy 1 and 2."""
    functions = {"scalar": np.float64(0).__reduce__()[0], "_reconstruct": np.zeros(0).__reduce__()[0]}
    named = [(f, f"numpy.{core}.multiarray.{name}") for core in ("core", "_core") for name, f in functions.items()]
    return [*named, np.ndarray, np.dtype, *{type(np.dtype(code)) for code in "?bBhHiIlLqQefdFD"}]


class _Cleaner:
    """Makes a tree of what was unpickled: dicts, lists, tuples and leaves of the kinds that trees have."""

    def __init__(self, name: str, limit: int) -> None:
        self.dropped: list[str] = []
        self._name = name
        self._values = 0
        self._bytes_left = limit

    def clean(self, value: Any, path: Path) -> Any:
        """``_DROPPED`` for what has no place."""
        self._values += 1
        # A pickle can say "the same list again" twice, forty times over.
        if self._values > MAX_JSON_VALUES or len(path) > MAX_DEPTH:
            raise CheckpointError(f"{self._name} holds more values, or deeper, than any agent")
        if isinstance(value, torch.Size):
            return tuple(value)
        try:
            kind = kind_of(value, path)
            if kind == "dict":
                for key in value:
                    check_key(key, path)
        except TypeError:
            self.dropped.append(f"{render(path)} ({type(value).__name__})")
            return _DROPPED
        if kind == "dict":
            items = {key: self.clean(item, (*path, key)) for key, item in value.items()}
            return {key: item for key, item in items.items() if item is not _DROPPED}
        if kind in ("list", "tuple"):
            kept = [self.clean(item, (*path, i)) for i, item in enumerate(value)]
            kept = [item for item in kept if item is not _DROPPED]
            return kept if kind == "list" else tuple(kept)
        if kind in ("tensor", "array"):
            # Nor need a tensor be as large in the file as it says.
            self._bytes_left -= value.nbytes
            if self._bytes_left < 0:
                raise CheckpointError(f"{self._name} holds tensors larger than itself")
        return value.detach() if kind == "tensor" else value


_DROPPED = object()


def _sorted_out(content: Any, name: str) -> LegacyCheckpoint:
    """Find the components among the keys."""
    if not isinstance(content, dict) or not content:
        raise CheckpointError(f"{name} holds no dict of an agent's states")
    if _is_state_dict(content):
        return LegacyCheckpoint("state_dict", {"policy": content}, {}, [])
    rest = dict(content)
    version = rest.pop("format_version", "state_dict")
    if version not in ("v2_full_parameters", "v1_policy_only", "state_dict", "stable_baselines3"):
        raise CheckpointError(f"{name} has the format_version {version!r}, which this driftproof does not know")
    components: dict[str, dict[Any, Any]] = {}
    for key in _PARAMETERS:
        parameters = rest.get(key)
        if isinstance(parameters, dict):
            del rest[key]
            whole = _is_state_dict(parameters)
            components.update({"policy": parameters} if whole else _dicts(parameters))
            rest.update({} if whole else {part: value for part, value in parameters.items() if part not in components})
    for key in _POLICY:
        if "policy" not in components and isinstance(rest.get(key), dict):
            components["policy"] = rest.pop(key)
    for keys in _OTHERS.values():
        for key in keys:
            if keys[0] not in components and isinstance(rest.get(key), dict):
                components[keys[0]] = rest.pop(key)
    if not components.get("policy"):
        raise CheckpointError(f"{name} has no policy under any key of an earlier format; it has {_listed(content)}")
    return LegacyCheckpoint(version, components, rest, [])


def _is_state_dict(value: dict[Any, Any]) -> bool:
    return bool(value) and all(type(key) is str and isinstance(item, Tensor) for key, item in value.items())


def _dicts(value: dict[Any, Any]) -> dict[str, dict[Any, Any]]:
    return {str(key): item for key, item in value.items() if isinstance(item, dict)}


def _listed(content: dict[Any, Any]) -> str:
    return ", ".join(repr(str(key)[:40]) for key in list(content)[:10])
