"""``population.json``: what became of every member, event by event."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

from pydantic import ValidationError

from driftproof._files import described, read_json
from driftproof.runs.population_state import SavedEvent, SavedEvents
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
        """From what :meth:`as_dict` returned.

        Raises:
            ValueError: It is something else.
        """
        try:
            return cls.of(SavedEvent.model_validate(dict(values)))
        except ValidationError as error:
            raise ValueError(f"not an event of a population: {described(error)}") from error

    @classmethod
    def of(cls, saved: SavedEvent) -> Event:
        """From an event of a file."""
        return cls(**saved.model_dump())


def read_events(path: str | os.PathLike[str]) -> list[Event]:
    """All events of a file, oldest first; none if there is no file.

    Raises:
        RunFolderError: It is not such a file, or of a newer version.
        OSError: It cannot be read.
    """
    if not os.path.lexists(path):
        return []
    saved = read_json(path, SavedEvents, advice="remove it to go without what became of its members")
    return [Event.of(event) for event in saved.events]


def append_events(path: str | os.PathLike[str], events: Iterable[Event]) -> None:
    """Add events at the end. The file is replaced atomically; what was in it stays.

    One process may write a file at a time.

    Raises:
        RunFolderError: There is a file that is not such a record; it is left alone.
        OSError: It cannot be written; it is as it was.
    """
    if added := list(events):
        write_events(path, [*read_events(path), *added])


def write_events(path: str | os.PathLike[str], events: Iterable[Event]) -> None:
    """Replace the file by one with these events, atomically."""
    items = [event.as_dict() for event in events]
    head = json.dumps({"format": _FORMAT, "version": _VERSION})
    lines = ",\n".join(json.dumps(item, allow_nan=False) for item in items)
    write_atomically(path, [f'{head[:-1]}, "events": [\n{lines}\n]}}\n'.encode()], follow_links=False)
