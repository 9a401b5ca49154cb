"""An agent's settings as plain values, and back: nothing is imported or called because a file says so."""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import stable_baselines3.common.torch_layers as layers
import torch
from gymnasium import spaces
from stable_baselines3.common.utils import ConstantSchedule, LinearSchedule

from driftproof import optim
from driftproof.nn.policies import NAMED_POLICIES
from driftproof.ppo.schedules import Cosine, Linear
from driftproof.ppo.spaces import decode_space, encode_space
from driftproof.state import CheckpointError

_CLASSES: dict[str, type[Any]] = {
    f"{kind.__module__}.{kind.__qualname__}": kind
    for kind in (
        *(kind for kind in vars(torch.nn.modules.activation).values() if isinstance(kind, type)),
        *(kind for kind in vars(torch.optim).values() if isinstance(kind, type)),
        *(optim.UPGD, optim.AdaptiveUPGD, optim.UPGDW),
        *(layers.FlattenExtractor, layers.NatureCNN, layers.CombinedExtractor),
        *NAMED_POLICIES.values(),
    )
}
"""Classes that a file may name."""

_SCHEDULES: dict[str, Callable[..., Callable[[float], float]]] = {
    "Linear": Linear,
    "Cosine": Cosine,
    "LinearSchedule": LinearSchedule,
    "ConstantSchedule": ConstantSchedule,
}


_CONFIGS: dict[str, type[Any]] = {}
"""Dataclasses of settings that a file may name, once their rooms are imported."""

_ROOMS = {"SAPPOConfig": "driftproof.adversarial", "PerturbationConfig": "driftproof.adversarial"}
"""Where those are that this room does not know: what imports point away from, files may still need."""

_Config = TypeVar("_Config", bound=type[Any])


def storable(kind: _Config) -> _Config:
    """A decorator for dataclasses of settings that files hold by their fields.

    A class method ``from_file(fields)``, if there is one, makes it of them.
    """
    _CONFIGS[kind.__name__] = kind
    return kind


def is_known(kind: Any) -> bool:
    """Whether a file may name this class."""
    return _CLASSES.get(_name(kind)) is kind


def encode(value: Any) -> Any:
    """Settings as plain values. Classes and functions that are neither ours nor torch's become their names."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float | np.floating):
        return float(value)
    if isinstance(value, np.integer | np.bool_):
        return value.item()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, spaces.Space):
        return {"$space": encode_space(value)}
    if isinstance(value, Mapping):
        return {str(key): encode(part) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(encode(part) for part in value)
    if isinstance(value, list):
        return [encode(part) for part in value]
    if type(value).__name__ in _SCHEDULES and isinstance(value, _SCHEDULES[type(value).__name__]):  # type: ignore[arg-type]
        return {"$schedule": type(value).__name__, **_arguments(value)}
    if _CONFIGS.get(type(value).__name__) is type(value):
        fields = {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"$config": type(value).__name__, **fields}
    return {"$class": _name(value)} if is_known(value) else {"$foreign": _name(value)}


def foreign_places(settings: Any) -> set[str]:
    """Settings that a file only names."""
    if not isinstance(settings, dict):
        return set()
    return {name for name, value in settings.items() if isinstance(value, dict) and "$foreign" in value}


def decode(value: Any, given: Mapping[str, Any], place: str = "") -> Any:
    """Settings from plain values.

    Args:
        value: What :func:`encode` returned.
        given: What stands for names that are not ours: by place, such as ``features_extractor_class``, or by name.
        place: Of this value, for errors.

    Raises:
        CheckpointError: There is no such class, or it has to be given.
    """
    if isinstance(value, list | tuple):
        return type(value)(decode(part, given, place) for part in value)
    if not isinstance(value, dict):
        return value
    tag = next((key for key in value if key.startswith("$")), None)
    if tag is None:
        return {key: decode(part, given, f"{place}.{key}" if place else key) for key, part in value.items()}
    try:
        return _decode_tagged(tag, value, given, place)
    except CheckpointError:
        raise
    except (KeyError, TypeError, ValueError, AssertionError) as error:
        raise CheckpointError(f"the setting {place} cannot be read: {value!r} ({error})") from error


def _decode_tagged(tag: str, value: dict[str, Any], given: Mapping[str, Any], place: str) -> Any:
    content = value[tag]
    if tag == "$space":
        return decode_space(content)
    if tag == "$schedule":
        return _SCHEDULES[content](**{key: float(number) for key, number in value.items() if key != tag})
    if tag == "$class":
        return _CLASSES[content]
    if tag == "$config":
        if content not in _CONFIGS:
            importlib.import_module(_ROOMS[content])
        kind = _CONFIGS[content]
        fields = {key: decode(part, given, place) for key, part in value.items() if key != tag}
        return kind.from_file(fields) if hasattr(kind, "from_file") else kind(**fields)
    if tag != "$foreign":
        raise ValueError(f"unknown kind {tag}")
    for name in (place, place.rpartition(".")[2], content, content.rpartition(".")[2]):
        if name in given:
            return given[name]
    key = place.rpartition(".")[2]
    raise CheckpointError(
        f"the agent was made with {place}={content}, which files only name: pass it again, "
        f"load(..., custom_objects={{{key!r}: {content.rpartition('.')[2]}}})"
    )


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', '?')}.{getattr(value, '__qualname__', type(value).__qualname__)}"


def _arguments(schedule: Any) -> dict[str, float]:
    if dataclasses.is_dataclass(schedule) and not isinstance(schedule, type):
        return dataclasses.asdict(schedule)
    return {key: float(number) for key, number in vars(schedule).items()}
