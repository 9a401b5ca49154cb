"""Converts dataclasses to plain dicts for JSON and YAML, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from driftproof._registry import Registry
from driftproof._text import did_you_mean
from driftproof._trust import Trust

T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """The fields of a dataclass that are not at their defaults, as plain values."""
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    if not hasattr(value, "__dataclass_fields__"):
        return value
    plain = {"kind": value.registry.name(type(value))} if hasattr(value, "registry") else {}
    for field in fields(value):
        item = getattr(value, field.name)
        if field.default is MISSING or item != field.default:
            plain[field.name] = to_plain(item)
    return plain


def of_kind(registry: Registry, spec: Any, trust: Trust | None = None, place: str = "") -> Any:
    """Build an object from a dict whose ``kind`` names the class.

    Args:
        registry: Classes by name.
        spec: The dict.
        trust: Modules that the dict may name, as ``module:Class``.
        place: Path of the dict in a configuration.
    """
    what = registry.what
    if not isinstance(spec, Mapping):
        example = next(iter(registry.built_in))
        raise TypeError(f"a {what} must be a mapping such as {{'kind': {example!r}, ...}}, got {spec!r}")
    if "kind" not in spec:
        raise ValueError(f"the {what} {dict(spec)} lacks 'kind', one of {', '.join(map(repr, registry.names))}")
    kind = registry.load(spec["kind"], trust, place)
    return from_plain(f"{what} {spec['kind']!r}", {key: value for key, value in spec.items() if key != "kind"}, kind)


def from_plain(what: str, spec: Mapping[str, Any], kind: type[T]) -> T:
    """Make an instance of a dataclass, with an error that names what it does not know, and what it lacks."""
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    for name in spec:
        if name not in known:
            raise ValueError(f"{what} has no {name!r}{nearest(name, known)}; it has {', '.join(map(repr, known))}")
    missing = [name for name, field in known.items() if field.default is MISSING and name not in spec]
    if missing:
        raise ValueError(f"{what} lacks {', '.join(map(repr, missing))}")
    return kind(**spec)


def nearest(name: object, known: Iterable[str]) -> str:
    """A hint, if something known reads like it."""
    hint = did_you_mean(name, known, otherwise="")
    return f" ({hint})" if hint else ""
