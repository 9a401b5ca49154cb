"""``population.json``: what became of every member, event by event."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from driftproof.state import write_atomically

EventKind: TypeAlias = Literal["start", "exploit", "explore", "replace", "undo", "restart"]

_FORMAT = "driftproof population"
_VERSION = 1


@dataclass(frozen=True)
class Event:
    """One thing that happened to one member."""

    kind: EventKind
    """``exploit`` took over from a donor, ``explore`` only mutated, ``replace`` is an exploit that the runner asked for
    since the member was lost, ``undo`` takes the last exploit back, ``restart`` began again from its last state after a
    failure."""
    member: int
    step: int
    """Updates that the member had done."""
    donor: int | None = None
    donor_step: int | None = None
    """Updates that the donor had done when it gave its parameters."""
    format: str | None = None
    mutated: dict[str, list[Any]] = field(default_factory=dict)
    """What changed on the way, by name: the donor's value (or the member's own) and the new one."""
    hyperparams: dict[str, Any] = field(default_factory=dict)
    """In force from now on."""
    detail: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Event:
        known = {item.name for item in fields(cls)}
        if not {"kind", "member", "step"} <= set(values) <= known or values["kind"] not in get_args(EventKind):
            raise ValueError(f"not an event of a population: {dict(values)!r}")
        event = cls(**copy.deepcopy(dict(values)))
        numbers = (event.member, event.step, event.donor or 0, event.donor_step or 0)
        pairs = event.mutated.values() if isinstance(event.mutated, dict) else [None]
        if not (
            all(isinstance(number, int) for number in numbers)
            and all(isinstance(pair, list) and len(pair) == 2 for pair in pairs)
            and isinstance(event.hyperparams, dict)
            and isinstance(event.detail, str)
        ):
            raise ValueError(f"not an event of a population: {dict(values)!r}")
        return event


def read_events(path: str | os.PathLike[str]) -> list[Event]:
    """All events of a file, oldest first; none if there is no file.

    Raises:
        ValueError: It is not such a file, or of a newer version.
    """
    path = Path(path)
    if not path.exists():
        return []
    try:
        content = json.loads(path.read_bytes())
        if content["format"] != _FORMAT:
            raise ValueError(f"its format is {content['format']!r}")
        if content["version"] > _VERSION:
            raise ValueError(f"its version is {content['version']!r}, and this driftproof reads {_VERSION}")
        return [Event.from_dict(item) for item in content["events"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a record of a population that can be read: {error}") from error


def append_events(path: str | os.PathLike[str], events: Iterable[Event]) -> None:
    """Add events at the end. The file is replaced atomically; what was in it stays.

    One process may write a file at a time.

    Raises:
        ValueError: There is a file that is not such a record; it is left alone.
        OSError: It cannot be written; it is as it was.
    """
    if added := list(events):
        write_events(path, [*read_events(path), *added])


def write_events(path: str | os.PathLike[str], events: Iterable[Event]) -> None:
    """Replace the file by one with these events, atomically."""
    items = [event.as_dict() for event in events]
    head = json.dumps({"format": _FORMAT, "version": _VERSION})
    lines = ",\n".join(json.dumps(item, allow_nan=False) for item in items)
    write_atomically(path, [f'{head[:-1]}, "events": [\n{lines}\n]}}\n'.encode()])
