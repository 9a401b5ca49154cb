"""Dataclasses as plain dicts, which JSON and YAML have, and back again."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar

T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """The fields of a dataclass that are not at their defaults, as plain values."""
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    if not hasattr(value, "__dataclass_fields__"):
        return value
    plain = {"kind": value.kind} if hasattr(value, "kind") else {}
    for field in fields(value):
        item = getattr(value, field.name)
        if field.default is MISSING or item != field.default:
            plain[field.name] = to_plain(item)
    return plain


def of_kind(what: str, spec: Any, kinds: Mapping[str, type[T]]) -> T:
    """Make what a dict describes, where ``kind`` names the class.

    Args:
        what: Is made, for messages.
        spec: The dict.
        kinds: Classes by name.
    """
    if not isinstance(spec, Mapping):
        raise TypeError(f"a {what} must be a mapping such as {{'kind': {next(iter(kinds))!r}, ...}}, got {spec!r}")
    if "kind" not in spec:
        raise ValueError(f"the {what} {dict(spec)} lacks 'kind', one of {', '.join(map(repr, kinds))}")
    kind = spec["kind"]
    if kind not in kinds:
        raise ValueError(f"unknown {what} {kind!r}{nearest(kind, kinds)}; known are {', '.join(map(repr, kinds))}")
    return from_plain(f"{what} {kind!r}", {key: value for key, value in spec.items() if key != "kind"}, kinds[kind])


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
    matches = difflib.get_close_matches(str(name), list(known), n=1)
    return f" (did you mean {matches[0]!r}?)" if matches else ""
