"""Reads checkpoints of earlier formats, without running code in them.

- Population members, ``member_<i>_step_<n>.pt``: ``{"format_version": "v2_full_parameters", "data": ..., "step": ...,
  "performance": ...}``, or ``"v1_policy_only"`` with the policy's state dict as ``data``.
- The same without the envelope: what ``get_parameters()`` returned, ``{"model_state_dict": ...,
  "optimizer_state_dict": ..., "vgs_state_dict": ...}``, or the policy's state dict alone.
- Zip files of Stable-Baselines3, with every ``*.pth`` in them.

All of them are pickles, read with ``weights_only=True``: only tensors, plain values and NumPy numbers.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from driftproof._text import printable
from driftproof.state._codec import MAX_DEPTH, Path, check_key, kind_of, render
from driftproof.state._errors import CheckpointError
from driftproof.state._pickles import PickledArray, read_content
from driftproof.state._reader import MAX_JSON_VALUES, open_regular

Format: TypeAlias = Literal["v2_full_parameters", "v1_policy_only", "parameters", "state_dict", "stable_baselines3"]
"""``parameters`` and ``state_dict`` are the first two without ``format_version``."""

_STATE_DICTS = {"model_state_dict": "policy", "optimizer_state_dict": "policy.optimizer", "vgs_state_dict": "vgs_state"}
"""Keys of hand-made checkpoints, and the names of the same states in ``get_parameters()``."""

_AGENT = {
    "optimizer": "policy.optimizer",
    "vgs": "vgs_state",
    "kl_penalty": "kl_penalty_state",
    "return_scale": "return_scale_state",
    "normalizer": "normalizer_state",
}
"""Components of an agent besides its policy, and their names in ``get_parameters()``."""


@dataclass(frozen=True)
class LegacyCheckpoint:
    """Content of a file of an earlier format."""

    source: str
    """Path of the file."""
    format: Format
    components: dict[str, dict[Any, Any]]
    """States by the names that ``get_parameters()`` uses; ``policy`` is always one of them."""
    empty: list[str]
    """Components that are ``None`` in the file, because the agent did not have them."""
    extras: dict[str, Any]
    """Everything else in the file, such as ``step`` and ``performance``."""
    dropped: list[str]
    """Paths of values that a state tree cannot hold."""

    @property
    def is_policy_only(self) -> bool:
        """Whether the file has neither an optimizer nor statistics."""
        return not any(name in self.components for name in _AGENT.values())

    @property
    def missing(self) -> list[str]:
        """Components of an agent that are not in the file."""
        return [part for part, name in _AGENT.items() if name not in self.components and name not in self.empty]


def read(source: str | os.PathLike[str], device: torch.device | str = "cpu") -> LegacyCheckpoint:
    """Read a file of an earlier format, without running code in it.

    Warns with a ``FutureWarning`` if the file holds only a policy.

    Raises:
        CheckpointError: It is not such a file, or holds anything but tensors and plain values.
        FileNotFoundError: There is no such file.
    """
    name = os.fspath(source)
    with open_regular(source) as file:
        size = file.seek(0, io.SEEK_END)
        content, is_zip = read_content(file, name, device)
    cleaner = _Cleaner(name, limit=4 * size + 2**20)
    content = cleaner.clean(content, ())
    version, parameters, extras = ("stable_baselines3", content, {}) if is_zip else _opened(content, name)
    states, empty, others = _sorted_out(parameters)
    if not states.get("policy"):
        raise CheckpointError(f"{name} holds no policy as files of earlier formats do; it has {_listed(content)}")
    found = LegacyCheckpoint(name, version, states, empty, {**others, **extras}, cleaner.dropped)
    if found.is_policy_only:
        warnings.warn(
            f"{name} ({found.format}) holds a policy only, without the state of {', '.join(found.missing)}",
            FutureWarning,
            stacklevel=2,
        )
    return found


def match(
    state: Mapping[str, Tensor], wanted: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], list[str], list[str], list[str]]:
    """The tensors of ``state`` that ``wanted`` has too, by name and shape.

    Returns:
        These tensors, then the names of unused tensors, of missing ones, and of those with another shape.
    """
    shared = state.keys() & wanted.keys()
    fitting = {
        name: tensor
        for name, tensor in state.items()
        if name in shared and isinstance(tensor, Tensor) and tensor.shape == wanted[name].shape
    }
    unused = [name for name in state if name not in shared]
    missing = [name for name in wanted if name not in shared]
    wrong_shape = [name for name in wanted if name in shared and name not in fitting]
    return fitting, unused, missing, wrong_shape


class _Cleaner:
    """Converts unpickled content to a state tree, and drops values that a tree cannot hold."""

    def __init__(self, name: str, limit: int) -> None:
        self.dropped: list[str] = []
        self._name = name
        self._values = 0
        self._bytes_left = limit

    def clean(self, value: Any, path: Path) -> Any:
        """The cleaned value, or ``_DROPPED``."""
        self._values += 1
        # A small pickle can expand exponentially, by lists that contain the same list twice.
        if self._values > MAX_JSON_VALUES or len(path) > MAX_DEPTH:
            raise CheckpointError(f"{self._name} has too many values, or is nested too deeply")
        if isinstance(value, torch.Size):
            return tuple(value)
        if isinstance(value, PickledArray):
            value = value.array
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
            # A tensor may state a larger size than it has in the file.
            self._bytes_left -= value.nbytes
            if self._bytes_left < 0:
                raise CheckpointError(f"{self._name} holds tensors larger than the file")
        return value.detach() if kind == "tensor" else value


_DROPPED = object()


def _opened(content: Any, name: str) -> tuple[Format, dict[Any, Any], dict[str, Any]]:
    """The format, the states in its envelope, and all other entries."""
    if not isinstance(content, dict) or not content:
        raise CheckpointError(f"{name} holds no dict of an agent's states")
    if "format_version" not in content:
        if _is_state_dict(content):
            return "state_dict", {"policy": content}, {}
        states = {_STATE_DICTS.get(key, key): value for key, value in content.items()}
        return "parameters", states, {}
    extras = {str(key): value for key, value in content.items() if key not in ("format_version", "data")}
    version, data = content["format_version"], content.get("data")
    if version not in ("v2_full_parameters", "v1_policy_only"):
        raise CheckpointError(
            f"{name} has the format_version {printable(repr(version), 60)}, which this driftproof does not know"
        )
    if not isinstance(data, dict):
        raise CheckpointError(f"{name} ({version}) holds no states under 'data'; it has {_listed(content)}")
    return version, {"policy": data} if _is_state_dict(data) else data, extras


def _sorted_out(parameters: dict[Any, Any]) -> tuple[dict[str, dict[Any, Any]], list[str], dict[str, Any]]:
    """States by name, names of those that are ``None``, and the rest."""
    states = {str(key): value for key, value in parameters.items() if isinstance(value, dict)}
    empty = [str(key) for key, value in parameters.items() if value is None]
    others = {str(key): value for key, value in parameters.items() if value is not None and not isinstance(value, dict)}
    return states, empty, others


def _is_state_dict(value: dict[Any, Any]) -> bool:
    return bool(value) and all(type(key) is str and isinstance(item, Tensor) for key, item in value.items())


def _listed(content: dict[Any, Any]) -> str:
    return ", ".join(printable(repr(key), 40) for key in list(content)[:10]) or "nothing"
