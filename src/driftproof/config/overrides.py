"""Settings from the command line, such as ``ppo.learning_rate=1e-4``, which override those of a file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from driftproof.config import keys
from driftproof.config.model import Config
from driftproof.settings.run import BACKEND_OF

_LEARNING_RATE = ("ppo", "learning_rate")
_LR = ("optimizer", "kwargs", "lr")
_BACKEND = ("pbt", "backend")
_SWITCHES = (("vgs", "enabled"), ("adversarial", "enabled"))


def put_override(placed: keys.Placed, override: str, parse: Callable[[str], Any]) -> set[keys.Path]:
    """Override one setting, also inside of lists (by index) and mappings (by key); returns the paths that were set.

    Args:
        placed: All settings.
        override: Name, ``=`` and value.
        parse: Parses the text of a value.

    Raises:
        ValueError: The override is malformed, or its path does not exist.
    """
    name, equals, text = override.partition("=")
    path = tuple(name.strip().split("."))
    if not equals or not all(path):
        raise ValueError("must be name=value, such as ppo.learning_rate=1e-4")
    value = parse(text)
    place = keys.place_of(path, value)
    return set(_put(placed, place, value, (f"--set {override}",)))


def ignore_other_backends(placed: keys.Placed, typed: Collection[keys.Path]) -> dict[keys.Path, Any]:
    """Remove the file's settings of other backends, if ``pbt.backend`` is overridden; returns what was removed.

    Args:
        placed: All settings.
        typed: Paths that were overridden.
    """
    pbt = placed.data.get("pbt")
    if _BACKEND not in typed or not isinstance(pbt, dict):
        return {}
    removed: dict[keys.Path, Any] = {}
    for name, backend in BACKEND_OF.items():
        path: keys.Path = ("pbt", name)
        if name in pbt and pbt["backend"] != backend and not any(each[:2] == path for each in typed):
            removed[path] = pbt.pop(name)
    return removed


def _put(placed: keys.Placed, place: keys.Path, value: Any, origin: keys.Path) -> Iterator[keys.Path]:
    if place == _LR:
        place = _LEARNING_RATE
    if isinstance(value, Mapping) and keys.is_place_of_section(place):
        for name, part in value.items():
            yield from _put(placed, (*place, str(name)), part, origin)
        return
    if place in _SWITCHES and value is False:
        # Switching a section off discards its other settings in the file.
        placed.data[str(place[0])] = {}
        placed.origins = {path: known for path, known in placed.origins.items() if path[0] != place[0]}
    if place == _LR[:-1] and isinstance(value, Mapping) and "lr" in value:
        yield from _put(placed, _LEARNING_RATE, value["lr"], origin)
        value = {name: part for name, part in value.items() if name != "lr"}
    target: Any = placed.data
    for depth, part in enumerate(place[:-1], start=1):
        target = _entered(target, part, place[:depth])
    if isinstance(target, list):
        target[_index(target, place[-1], place)] = value
    else:
        target[place[-1]] = value
    placed.origins[place] = origin
    yield place


def _entered(target: Any, part: str | int, place: keys.Path) -> Any:
    """The list or mapping at a path; created if missing, from its default if there is one."""
    if isinstance(target, list):
        return target[_index(target, part, place)]
    if not isinstance(target.get(part), dict | list):
        target[part] = _default_at(place) if part not in target else {}
    return target[part]


def _default_at(place: keys.Path) -> Any:
    value: Any = Config().model_dump()
    for part in place:
        value = value.get(part) if isinstance(value, dict) else None
    return value if isinstance(value, list) else {}


def _index(items: list[Any], part: str | int, place: keys.Path) -> int:
    if not str(part).isdecimal() or int(part) >= len(items):
        where = keys.dotted(place[: place.index(part)])
        if not items:
            raise ValueError(f"{where} is an empty list: set the whole list, {where}=[...]")
        raise ValueError(f"{where} is a list of {len(items)}: use an index from 0 to {len(items) - 1}, not {part!r}")
    return int(part)
