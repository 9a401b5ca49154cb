"""``population.json``: the events of a population."""

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
    """One event of one member."""

    kind: EventKind
    """``exploit``: copied a donor and mutated hyper-parameters; ``explore``: only mutated them; ``replace``: an exploit
    because the member kept failing; ``undo``: the last exploit was undone; ``restart``: restarted from its last state
    after a failure."""
    member: int
    step: int
    """Updates that the member had done."""
    donor: int | None = None
    donor_step: int | None = None
    """Updates that the donor had done when its parameters were saved."""
    format: str | None = None
    mutated: dict[str, list[Any]] = field(default_factory=dict)
    """Mutated hyper-parameters by name: the donor's value (or the member's own) and the new one."""
    hyperparams: dict[str, Any] = field(default_factory=dict)
    """Hyper-parameters after the event."""
    detail: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Event:
        """Create an event from what :meth:`as_dict` returned.

        Raises:
            ValueError: The values are not those of an event.
        """
        try:
            return cls.of(SavedEvent.model_validate(dict(values)))
        except ValidationError as error:
            raise ValueError(f"not an event of a population: {described(error)}") from error

    @classmethod
    def of(cls, saved: SavedEvent) -> Event:
        """Create an event from a saved one."""
        return cls(**saved.model_dump())


def read_events(path: str | os.PathLike[str]) -> list[Event]:
    """All events of a file, oldest first; an empty list if there is no file.

    Raises:
        RunFolderError: It is not a file of events, or of a newer version.
        OSError: The file cannot be read.
    """
    if not os.path.lexists(path):
        return []
    saved = read_json(path, SavedEvents, advice="remove it to continue without the events so far")
    return [Event.of(event) for event in saved.events]


def append_events(path: str | os.PathLike[str], events: Iterable[Event]) -> None:
    """Append events. The file is replaced atomically; earlier events stay.

    Only one process at a time may write a file.

    Raises:
        RunFolderError: The existing file is not a file of events; it stays unchanged.
        OSError: The file cannot be written; it stays unchanged.
    """
    if added := list(events):
        write_events(path, [*read_events(path), *added])


def write_events(path: str | os.PathLike[str], events: Iterable[Event]) -> None:
    """Write these events, replacing the file atomically."""
    items = [event.as_dict() for event in events]
    head = json.dumps({"format": _FORMAT, "version": _VERSION})
    lines = ",\n".join(json.dumps(item, allow_nan=False) for item in items)
    write_atomically(path, [f'{head[:-1]}, "events": [\n{lines}\n]}}\n'.encode()], follow_links=False)
