"""An agent's settings as plain values, and back: nothing is imported or called because a file says so."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import stable_baselines3.common.torch_layers as layers
import torch
from gymnasium import spaces
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.sb2_compat.rmsprop_tf_like import RMSpropTFLike
from stable_baselines3.common.utils import ConstantSchedule, FloatSchedule, LinearSchedule

from driftproof import optim
from driftproof._registry import ATTACKS, CORES, OPTIMIZERS, VALUE_HEADS, Registry
from driftproof._trust import Trust, UntrustedError, WrongKindError, of_kind
from driftproof.nn.files import KNOWN_CLASSES, subclasses
from driftproof.nn.files import class_name as _name
from driftproof.nn.policies import NAMED_POLICIES
from driftproof.nn.spaces import decode_space, encode_space
from driftproof.settings.agent import HYPERPARAMETERS
from driftproof.settings.schedules import Cosine, Linear
from driftproof.state import CheckpointError, printable

_CLASSES: dict[str, type[Any]] = {
    **KNOWN_CLASSES,
    **{
        _name(kind): kind
        for kind in (
            *subclasses(torch.optim, torch.optim.Optimizer),
            *(optim.UPGD, optim.AdaptiveUPGD, optim.UPGDW, RMSpropTFLike),
            *NAMED_POLICIES.values(),
        )
    },
}
"""Classes that are loaded by the name in a file."""

_KINDS: dict[str, type[Any] | Registry] = {
    "policy": BasePolicy,
    "optimizer_class": OPTIMIZERS,
    "policy_kwargs.activation_fn": torch.nn.Module,
    "policy_kwargs.core": CORES,
    "policy_kwargs.features_extractor_class": layers.BaseFeaturesExtractor,
    "policy_kwargs.optimizer_class": OPTIMIZERS,
    "policy_kwargs.value_head": VALUE_HEADS,
    "adversarial.perturbation.attack_method": ATTACKS,
}
"""Required base class, or registry, of the classes in a setting."""

FUNCTIONS = tuple(name for name, each in HYPERPARAMETERS.items() if each.is_scheduled)
"""Settings that may be functions, but not classes."""
_POINTS = (1.0, 0.5, 0.0)
"""Remaining progress at which values of functions are stored in files, to recognise the same function later."""

_SCHEDULES: dict[str, Callable[..., Callable[[float], float]]] = {
    "Linear": Linear,
    "Cosine": Cosine,
    "LinearSchedule": LinearSchedule,
    "ConstantSchedule": ConstantSchedule,
}


_CONFIGS: dict[str, type[Any]] = {}
"""Dataclasses of settings that are loaded by the name in a file, once their packages are imported."""

_PACKAGES = {"SAPPOConfig": "driftproof.adversarial", "PerturbationConfig": "driftproof.adversarial"}
"""Packages of dataclasses that this package does not import, loaded when a file needs them."""

_Config = TypeVar("_Config", bound=type[Any])


def storable(kind: _Config) -> _Config:
    """Decorator for dataclasses of settings that files store by their fields.

    A class method ``from_file(fields)``, if there is one, constructs it from them.
    """
    _CONFIGS[kind.__name__] = kind
    return kind


def is_known(kind: Any) -> bool:
    """Whether this class is loaded by its name in a file."""
    return _CLASSES.get(_name(kind)) is kind


def encode(value: Any) -> Any:
    """Settings as plain values. Classes and functions that are neither ours nor torch's become their names."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, FloatSchedule):
        return encode(value.value_schedule)
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


def encode_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """An agent's settings as plain values."""
    encoded: dict[str, Any] = encode(settings)
    for name in foreign_places(encoded) & set(FUNCTIONS):
        encoded[name]["points"] = [float(settings[name](remaining)) for remaining in _POINTS]
    return encoded


def is_plain(value: Any) -> bool:
    """Whether it is a plain value that a file can hold: a number, a string, or lists and dicts of these."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and is_plain(part) for key, part in value.items())
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | np.integer | np.floating | np.bool_)


def foreign_places(settings: Any) -> set[str]:
    """Settings that a file holds by name only."""
    if not isinstance(settings, dict):
        return set()
    return {name for name, value in settings.items() if isinstance(value, dict) and "$foreign" in value}


def replaced_settings(given: Mapping[str, Any], settings: Any) -> set[str]:
    """Names of settings that were passed with another value than the file's.

    A function with the same values as the one in the file counts as the same.
    """
    named = foreign_places(settings)
    return {name for name in given if name not in named or not _is_same(settings[name], given[name])}


def _is_same(encoded: Mapping[str, Any], value: Any) -> bool:
    if "points" not in encoded:
        return callable(value)
    return callable(value) and [float(value(remaining)) for remaining in _POINTS] == encoded["points"]


def differing(given: Mapping[str, Any], settings: Any) -> list[str]:
    """Names of passed settings that a file has with another value, or not at all."""
    held = settings if isinstance(settings, dict) else {}
    return [name for name, value in given.items() if name not in held or held[name] != encode(value)]


def decode(value: Any, given: Mapping[str, Any], place: str = "", trust: Trust | None = None) -> Any:
    """Settings from plain values.

    Args:
        value: Result of :func:`encode`.
        given: Classes and functions for foreign names, by setting, such as ``features_extractor_class``, or by name.
        place: Name of the setting, for errors.
        trust: Modules from which other classes may be imported; ``None``: none.

    Raises:
        CheckpointError: The class does not exist, must be passed, or has the wrong kind.
    """
    decoded = _decode(value, given, place, trust or Trust())
    _check_kind(place, decoded)
    return decoded


def _decode(value: Any, given: Mapping[str, Any], place: str, trust: Trust) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_decode(part, given, place, trust) for part in value)
    if not isinstance(value, dict):
        return value
    tag = next((key for key in value if key.startswith("$")), None)
    if tag is None:
        return {key: decode(part, given, f"{place}.{key}" if place else key, trust) for key, part in value.items()}
    try:
        return _decode_tagged(tag, value, given, place, trust)
    except CheckpointError:
        raise
    except (KeyError, TypeError, ValueError, AssertionError) as error:
        raise CheckpointError(
            f"the setting {place} cannot be read: {printable(value, 200)} ({printable(error)})"
        ) from error


def _base(place: str) -> type[Any]:
    kind = _KINDS[place]
    return kind.base if isinstance(kind, Registry) else kind


def _check_kind(place: str, value: Any) -> None:
    """Refuse classes and functions of the wrong kind before they are called."""
    try:
        if place in _KINDS and value is not None and not isinstance(value, str):
            of_kind(_name(value), value, _base(place))
        elif place in FUNCTIONS and inspect.isclass(value):
            raise WrongKindError(f"{_name(value)!r} is a class, not a function")
    except WrongKindError as error:
        raise CheckpointError(f"the setting {place} cannot be read: {error}") from error


def _decode_tagged(tag: str, value: dict[str, Any], given: Mapping[str, Any], place: str, trust: Trust) -> Any:
    content = value[tag]
    if tag == "$space":
        return decode_space(content)
    if tag == "$schedule":
        return _SCHEDULES[content](**{key: float(number) for key, number in value.items() if key != tag})
    if tag == "$class":
        return _CLASSES[content]
    if tag == "$config":
        if content not in _CONFIGS:
            importlib.import_module(_PACKAGES[content])
        kind = _CONFIGS[content]
        fields = {key: decode(part, given, f"{place}.{key}", trust) for key, part in value.items() if key != tag}
        return kind.from_file(fields) if hasattr(kind, "from_file") else kind(**fields)
    if tag != "$foreign":
        raise ValueError(f"unknown kind {tag}")
    return _foreign(content, given, place, trust)


def _foreign(content: str, given: Mapping[str, Any], place: str, trust: Trust) -> Any:
    """Resolve a foreign name in a file: an object that the caller passed, or a class of a trusted module."""
    for name in (place, place.rpartition(".")[2], content, content.rpartition(".")[2]):
        if name in given:
            return given[name]
    key, shown = place.rpartition(".")[2], printable(content, 100)
    how = f"pass it with load(..., custom_objects={{{key!r}: {shown.rpartition('.')[2]}}})"
    if place in _KINDS:
        if (found := _trusted_class(content, _base(place), trust)) is not None:
            return found
        how += f", or trust its module with load(..., trusted=[{shown.partition('.')[0]!r}])"
    raise CheckpointError(f"the agent was built with {place}={shown}, which the file holds by name only: {how}")


def _trusted_class(content: str, kind: type[Any], trust: Trust) -> type[Any] | None:
    """The class ``module.Class`` of a trusted module; ``None`` if it is not trusted."""
    module, _, name = content.rpartition(".")
    try:
        return trust.resolved(f"{module}:{name}", kind)
    except UntrustedError:
        return None
    except WrongKindError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{printable(content, 100)} cannot be imported ({type(error).__name__}: {printable(error, 200)}): pass the "
            "class with custom_objects={...}"
        ) from error


def _arguments(schedule: Any) -> dict[str, float]:
    if dataclasses.is_dataclass(schedule) and not isinstance(schedule, type):
        return dataclasses.asdict(schedule)
    return {key: float(number) for key, number in vars(schedule).items()}
