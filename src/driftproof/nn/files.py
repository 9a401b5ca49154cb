"""Files of policies without their agents: constructor arguments, weights, and the scale of values."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, BinaryIO, Protocol, TypeAlias, TypeVar

import numpy as np
import stable_baselines3.common.torch_layers as layers
import torch
from gymnasium import spaces
from torch import Tensor, nn

from driftproof._trust import Trust, UntrustedError, WrongKindError, of_kind
from driftproof.nn.cores import Core
from driftproof.nn.heads import Scale, ValueHead
from driftproof.nn.normalization import WHOLE, Moments
from driftproof.nn.spaces import decode_space, encode_space
from driftproof.state import CheckpointError, printable, read, write
from driftproof.state.schema import check, numbers, table

File: TypeAlias = "str | os.PathLike[str] | BinaryIO"
Policy = TypeVar("Policy", bound=nn.Module)


def class_name(kind: Any) -> str:
    """Name of a class in files."""
    return f"{getattr(kind, '__module__', '?')}.{getattr(kind, '__qualname__', type(kind).__qualname__)}"


def subclasses(module: ModuleType, kind: type[Any]) -> list[type[Any]]:
    """Subclasses of ``kind`` in a module."""
    return [each for each in vars(module).values() if isinstance(each, type) and issubclass(each, kind)]


KNOWN_CLASSES: dict[str, type[Any]] = {
    class_name(kind): kind
    for kind in (
        *subclasses(torch.nn.modules.activation, nn.Module),
        *(layers.FlattenExtractor, layers.NatureCNN, layers.CombinedExtractor),
    )
}
"""Classes among a policy's arguments that are loaded by name."""

_KINDS: dict[str, type[Any]] = {
    "activation_fn": nn.Module,
    "core": Core,
    "features_extractor_class": layers.BaseFeaturesExtractor,
    "value_head": ValueHead,
}
"""Arguments that are classes, and their required base classes."""

_CONFIG, _MOMENTS = {"policy", "value_scale"}, "observations"


class ValueScale(Protocol):
    """Scale of the returns that critics predict."""

    @property
    def snapshot(self) -> Scale:
        """Mean and standard deviation of returns."""


@dataclass(frozen=True)
class FixedScale:
    """Scale of a policy that was loaded without its agent."""

    snapshot: Scale


def write_policy(
    path: File,
    arguments: Mapping[str, Any],
    state: Mapping[str, Tensor],
    scale: ValueScale | None,
    moments: Mapping[str, Moments] | None = None,
) -> None:
    """Write a policy.

    Args:
        path: File name, or an open file.
        arguments: Arguments of the policy's constructor.
        state: State dict of the policy.
        scale: Scale of its values.
        moments: Moments that its observations are normalised by.
    """
    units = None if scale is None else [float(number) for number in scale.snapshot]
    config = {"policy": {name: _encode(name, value) for name, value in arguments.items()}, "value_scale": units}
    tree: dict[str, Any] = {"policy": dict(state)}
    if moments is not None:
        tree[_MOMENTS] = {key: each._asdict() for key, each in moments.items()}
    write(path, tree, config=config)


def read_policy(
    kind: type[Policy], path: File, device: torch.device, given: Mapping[str, Any], trusted: Iterable[str]
) -> tuple[Policy, ValueScale | None, dict[str, Moments] | None]:
    """Read a policy, the scale of its values, and the moments of its observations.

    Args:
        kind: Class of the policy.
        path: File name, or an open file.
        device: Device of the policy.
        given: Classes that the file holds by name only, by argument.
        trusted: Modules that such classes may be imported from.

    Raises:
        CheckpointError: The file has another format, or does not fit the class.
    """
    checkpoint = read(path)
    config, tree = checkpoint.config, checkpoint.tree
    if set(config) != _CONFIG or not isinstance(config["policy"], dict) or not isinstance(tree.get("policy"), dict):
        raise CheckpointError(
            f"{path} is not the file of a policy, which its save() wrote; a policy in the file of an agent is "
            "DistributionalPPO.load(path).policy"
        )
    trust = Trust.of(trusted)
    try:
        units = config["value_scale"]
        scale = None if units is None else FixedScale(Scale(*(float(number) for number in units)))
        arguments = {name: _decode(name, value, given, trust) for name, value in config["policy"].items()}
        _check_size(kind, arguments, tree["policy"])
        policy = kind(**arguments)
        policy.load_state_dict(tree["policy"])
        moments = _moments(tree[_MOMENTS], arguments["observation_space"]) if _MOMENTS in tree else None
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError, AssertionError, OverflowError) as error:
        raise CheckpointError(f"{path} does not fit {kind.__name__}: {printable(error, 300)}") from error
    return policy.to(device), scale, moments


def _moments(state: Any, space: Any) -> dict[str, Moments]:
    parts = getattr(space, "spaces", {WHOLE: space})
    if not isinstance(state, dict) or not state.keys() <= parts.keys():
        raise CheckpointError(f"it has moments of observations that are not in {space}")
    shapes = {key: tuple(parts[key].shape) for key in state}
    rules = {
        key: table({"mean": numbers(shape, [torch.float64]), "std": numbers(shape, [torch.float64], at_least=0)})
        for key, shape in shapes.items()
    }
    check(_MOMENTS, state, table(rules))
    return {key: Moments(each["mean"], each["std"]) for key, each in state.items()}


def _check_size(kind: type[nn.Module], arguments: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Refuse arguments whose networks do not match the weights in the file, before memory is allocated for them."""
    if any(isinstance(value, type) and value not in KNOWN_CLASSES.values() for value in arguments.values()):
        return  # Users' own classes need not work on the meta device.
    layer_count = arguments.get("n_lstm_layers", 1)
    if not isinstance(layer_count, int) or layer_count > len(state):
        raise ValueError("its settings have more layers than it has weights")
    with torch.device("meta"):
        expected = {name: tuple(tensor.shape) for name, tensor in kind(**arguments).state_dict().items()}
    held = {name: tuple(tensor.shape) for name, tensor in state.items()}
    if expected != held:
        wrong = sorted(name for name in expected.keys() | held.keys() if expected.get(name) != held.get(name))
        raise ValueError(f"its settings and its weights differ in {', '.join(wrong[:5])}")


def _encode(place: str, value: Any) -> Any:
    """An argument as plain values; classes become their names."""
    if isinstance(value, spaces.Space):
        return {"$space": encode_space(value)}
    if isinstance(value, type):
        return {"$class": class_name(value)}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {str(key): _encode(str(key), part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(place, part) for part in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f"the policy's argument {place} has a {type(value).__name__}, which a file cannot hold: use plain values and "
        "classes, or save the agent"
    )


def _decode(place: str, value: Any, given: Mapping[str, Any], trust: Trust) -> Any:
    if isinstance(value, list):
        return [_decode(place, part, given, trust) for part in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {"$space"}:
        return decode_space(value["$space"])
    if set(value) == {"$class"}:
        return _class(place, value["$class"], given, trust)
    return {key: _decode(key, part, given, trust) for key, part in value.items()}


def _class(place: str, name: Any, given: Mapping[str, Any], trust: Trust) -> type[Any]:
    """Resolve a class name in a file: a known class, one that the caller passed, or one of a trusted module."""
    kind = _KINDS.get(place, object)
    shown = printable(name, 100)
    try:
        if place in given or name in given:
            return of_kind(shown, given.get(place, given.get(name)), kind)
        if name in KNOWN_CLASSES:
            return of_kind(shown, KNOWN_CLASSES[name], kind)
        module, _, attribute = str(name).rpartition(".")
        if place in _KINDS:
            return trust.resolved(f"{module}:{attribute}", kind)
    except UntrustedError:
        pass
    except (WrongKindError, ImportError) as error:
        raise CheckpointError(f"the argument {place} cannot be read: {printable(error, 200)}") from error
    short = shown.rpartition(".")[2]
    raise CheckpointError(
        f"the policy was built with {place}={shown}, which the file holds by name only: pass it with "
        f"load(..., custom_objects={{{place!r}: {short}}}), or trust its module with "
        f"load(..., trusted=[{shown.partition('.')[0]!r}])"
    )
