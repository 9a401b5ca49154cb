"""Names of settings: their sections, alternative names, and suggestions for unknown ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias, get_args

from pydantic import BaseModel

from driftproof._text import closest
from driftproof.config import earlier
from driftproof.settings.optimizers import OPTIONS

Path: TypeAlias = tuple[str | int, ...]

SHORT = {
    "env": "id",
    "policy": "name",
    "optimizer": "name",
    "vgs": "enabled",
    "adversarial": "enabled",
}
"""Sections for which a single value stands for one of their settings: ``env: CartPole-v1``."""

_EXPLICIT: dict[str, Path] = {
    "variance_gradient_scaling": ("vgs", "enabled"),
    "optimizer_class": ("optimizer", "name"),
    "optimizer_kwargs": ("optimizer", "kwargs"),
    "env_id": ("env", "id"),
    "env_kwargs": ("env", "kwargs"),
}
_ARGUMENTS = {"vgs_kwargs": ("vgs", "vgs_"), "policy_kwargs": ("policy", "")}
"""Arguments of the agent that hold several settings: their section, and the prefix of their flat names."""
_TOO_SHORT = ("id", "drift", "core")
"""Names that are ambiguous without their section."""


class ConflictError(ValueError):
    """One setting has two values."""

    def __init__(self, first: Path, second: Path, values: tuple[Any, Any]) -> None:
        self.first, self.second = first, second
        super().__init__(
            f"{dotted(first)} is {values[0]!r} and {dotted(second)} is {values[1]!r}, but both are the same setting: "
            "remove one"
        )


@dataclass
class Placed:
    """Settings in their sections, and the paths under which they were given."""

    data: dict[str, Any] = field(default_factory=dict)
    origins: dict[Path, Path] = field(default_factory=dict)

    def put(self, path: Path, value: Any, origin: Path) -> None:
        if path in self.origins and self.origins[path] != origin:
            before = _at(self.data, path)
            if before != value or type(before) is not type(value):
                raise ConflictError(self.origins[path], origin, (before, value))
        target: Any = self.data
        for part in path[:-1]:
            target = target.setdefault(part, {})
            if not isinstance(target, dict):
                return  # A section that is not a mapping; validation reports it as a whole.
        target[str(path[-1])] = value
        self.origins[path] = origin


def dotted(path: Path) -> str:
    return ".".join(map(str, path))


@cache
def settings() -> list[Path]:
    """Paths of all settings."""
    from driftproof.config.model import Config

    return list(_settings_in(Config, ()))


def _settings_in(section: Any, path: Path) -> Iterator[Path]:
    for name, info in section.model_fields.items():
        if is_section(info.annotation):
            yield from _settings_in(info.annotation, (*path, name))
        else:
            yield (*path, name)


def at(config: BaseModel, path: Path) -> Any:
    """The value of the setting at a path."""
    value: Any = config
    for part in path:
        value = getattr(value, str(part))
    return value


def is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


@cache
def flat_keys() -> dict[str, Path]:
    """Names that work at the top level of a file, without a section, with their paths."""
    counts = Counter(path[-1] for path in settings())
    flat: dict[str, Path] = {}
    for path in settings():
        name = str(path[-1])
        if path[0] == "vgs":
            flat[f"vgs_{name}"] = path
        elif counts[name] == 1 and name not in _TOO_SHORT:
            flat[name] = path
    return flat | _EXPLICIT


def placed(raw: Mapping[Any, Any]) -> Placed:
    """Settings in their sections, whichever names they were given by.

    Raises:
        ConflictError: A setting has two values.
    """
    result = Placed()
    for key, value in raw.items():
        _place(result, (str(key),), value)
    _move_learning_rate(result)
    return result


def _place(result: Placed, path: Path, value: Any) -> None:
    place = place_of(path, value)
    is_section = is_place_of_section(place)
    if is_section and value is None:
        return  # An empty section: all its settings may be commented out.
    if isinstance(value, Mapping) and (is_section or (len(path) == 1 and path[0] in _ARGUMENTS)):
        for name, part in value.items():
            _place(result, (*path, name), part)
    else:
        result.put(place, value, path)


def _move_learning_rate(result: Placed) -> None:
    """An ``lr`` among the optimizer's arguments is the learning rate."""
    kwargs = _at(result.data, ("optimizer", "kwargs"))
    if isinstance(kwargs, Mapping) and "lr" in kwargs:
        origin = result.origins["optimizer", "kwargs"]
        rest = {name: value for name, value in kwargs.items() if name != "lr"}
        result.data["optimizer"]["kwargs"] = rest
        result.put(("ppo", "learning_rate"), kwargs["lr"], (*origin, "lr"))


def place_of(path: Path, value: Any = None) -> Path:
    """The path of a setting, or of a value inside of one, from any of its names."""
    flat, first = flat_keys(), str(path[0])
    if first in _ARGUMENTS and len(path) > 1:
        section, prefix = _ARGUMENTS[first]
        return (*flat.get(f"{prefix}{path[1]}", (section, path[1])), *path[2:])
    if first in flat:
        return (*flat[first], *path[1:])
    if len(path) == 1 and first in SHORT and isinstance(value, str | bool):
        return (first, SHORT[first])
    return path


def is_place_of_section(path: Path) -> bool:
    """Whether a path is that of a section, not of a setting."""
    return any(known[: len(path)] == path and len(known) > len(path) for known in settings())


def nearest(path: Path) -> str:
    """A suggestion for an unknown key: the likely path, or the names that exist."""
    if (known := earlier.hint(path)) is not None:
        return known
    name, section = str(path[-1]), path[:-1]
    siblings = _names_in(section)
    elsewhere = {str(known[-1]): known for known in settings()} | flat_keys()
    if (near := closest(name, siblings, cutoff=0.8)) is not None:
        return f"did you mean {dotted((*section, near))}?"
    if name in elsewhere:
        return f"it is {dotted(elsewhere[name])}"
    if name in OPTIONS:
        return f"it is optimizer.kwargs.{name}"
    if (near := closest(name, siblings)) is not None:
        return f"did you mean {dotted((*section, near))}?"
    if (near := closest(name, elsewhere)) is not None:
        return f"did you mean {dotted(elsewhere[near])}?"
    where = f"{dotted(section)} has" if section else "there are"
    return f"{where} {', '.join(siblings)}"


def _names_in(section: Path) -> list[str]:
    """Names of the settings in a section, or in a nested model."""
    from driftproof.config.model import Config

    model: Any = Config
    for part in section:
        if not isinstance(part, int):
            model = _model_in(model.model_fields[part].annotation)
    return list(model.model_fields)


def _model_in(annotation: Any) -> Any:
    """The model in an annotation, also inside a list or a union."""
    if is_section(annotation):
        return annotation
    return next((found for part in get_args(annotation) if (found := _model_in(part)) is not None), None)


def _at(data: Any, path: Path) -> Any:
    for part in path:
        data = data.get(part) if isinstance(data, Mapping) else None
    return data
