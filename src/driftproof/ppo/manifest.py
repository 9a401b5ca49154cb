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
"""Classes that a file may name."""

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
"""What a class must be a subclass of, where the place says it, or what it is registered with."""

FUNCTIONS = tuple(name for name, each in HYPERPARAMETERS.items() if each.is_scheduled)
"""Settings that may be functions, and never classes."""
_POINTS = (1.0, 0.5, 0.0)
"""Remaining progress at which files hold values of functions that they only name, to know them again."""

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
    """Whether it is a plain value that a file can hold as it is: a number, a text, or lists and dicts of these."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and is_plain(part) for key, part in value.items())
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | np.integer | np.floating | np.bool_)


def foreign_places(settings: Any) -> set[str]:
    """Settings that a file only names."""
    if not isinstance(settings, dict):
        return set()
    return {name for name, value in settings.items() if isinstance(value, dict) and "$foreign" in value}


def replaced_settings(given: Mapping[str, Any], settings: Any) -> set[str]:
    """Names of settings for which something else is given than a file holds or names.

    A function with the values of the one that the file names is the same: with it, training goes on where it was.
    """
    named = foreign_places(settings)
    return {name for name in given if name not in named or not _is_same(settings[name], given[name])}


def _is_same(encoded: Mapping[str, Any], value: Any) -> bool:
    if "points" not in encoded:
        return callable(value)
    return callable(value) and [float(value(remaining)) for remaining in _POINTS] == encoded["points"]


def differing(given: Mapping[str, Any], settings: Any) -> list[str]:
    """Names of what is given otherwise than a file's settings have it, or that they do not have."""
    held = settings if isinstance(settings, dict) else {}
    return [name for name, value in given.items() if name not in held or held[name] != encode(value)]


def decode(value: Any, given: Mapping[str, Any], place: str = "", trust: Trust | None = None) -> Any:
    """Settings from plain values.

    Args:
        value: What :func:`encode` returned.
        given: What stands for names that are not ours: by place, such as ``features_extractor_class``, or by name.
        place: Of this value, for errors.
        trust: Modules from which classes may be imported that are not given; ``None``: none.

    Raises:
        CheckpointError: There is no such class, it has to be given, or it does not belong there.
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
    """Refuse what does not belong in a place, before anybody calls it."""
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
            importlib.import_module(_ROOMS[content])
        kind = _CONFIGS[content]
        fields = {key: decode(part, given, f"{place}.{key}", trust) for key, part in value.items() if key != tag}
        return kind.from_file(fields) if hasattr(kind, "from_file") else kind(**fields)
    if tag != "$foreign":
        raise ValueError(f"unknown kind {tag}")
    return _foreign(content, given, place, trust)


def _foreign(content: str, given: Mapping[str, Any], place: str, trust: Trust) -> Any:
    """What a file only names: what the caller gave for it, or a class of a trusted module."""
    for name in (place, place.rpartition(".")[2], content, content.rpartition(".")[2]):
        if name in given:
            return given[name]
    key, shown = place.rpartition(".")[2], printable(content, 100)
    how = f"pass it again, load(..., custom_objects={{{key!r}: {shown.rpartition('.')[2]}}})"
    if place in _KINDS:
        if (found := _trusted_class(content, _base(place), trust)) is not None:
            return found
        how += f", or trust its module, load(..., trusted=[{shown.partition('.')[0]!r}])"
    raise CheckpointError(f"the agent was made with {place}={shown}, which files only name: {how}")


def _trusted_class(content: str, kind: type[Any], trust: Trust) -> type[Any] | None:
    """The class of a trusted module, which a file names as ``module.Class``; ``None``: it is not trusted."""
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
            "class, custom_objects={...}"
        ) from error


def _arguments(schedule: Any) -> dict[str, float]:
    if dataclasses.is_dataclass(schedule) and not isinstance(schedule, type):
        return dataclasses.asdict(schedule)
    return {key: float(number) for key, number in vars(schedule).items()}
