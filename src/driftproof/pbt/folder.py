"""The folder of a population's run: what it writes, in which order, so that a crash at any moment loses one slice."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from driftproof.pbt.records import Event, write_events
from driftproof.pbt.work import Row
from driftproof.state import write_atomically

_STATE = "population_state.json"
_VERSION = 2


class RunFolder:
    """Files of one run, which one process at a time may write.

    Args:
        path: The folder.
        members: Where members' states lie; ``members`` in the folder if not given.
    """

    def __init__(self, path: str | os.PathLike[str], members: str | os.PathLike[str] | None = None) -> None:
        self.path = Path(path)
        self.members = self.path / "members" if members is None else Path(members)
        self._writers: dict[str, Any] = {}

    @property
    def is_taken(self) -> bool:
        """Whether there is a run in it."""
        return (self.path / _STATE).exists()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """For this process alone.

        Raises:
            RuntimeError: Another process runs the same population.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with open(self.path / ".lock", "a") as file:
            if not _lock(file.fileno()):
                raise RuntimeError(f"{self.path}: another process runs this population; wait for it, or end it")
            try:
                yield
            finally:
                for writer in self._writers.values():
                    writer.close()
                self._writers.clear()

    def read_state(self) -> dict[str, Any]:
        """What :meth:`write_state` wrote last.

        Raises:
            FileNotFoundError: There is no run.
            ValueError: It is damaged, or was written by a newer driftproof.
        """
        path = self.path / _STATE
        if not path.exists():
            raise FileNotFoundError(f"{self.path} holds no population: there is no {_STATE}")
        try:
            state: dict[str, Any] = json.loads(path.read_bytes())
            version = int(state["version"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
        if version != _VERSION:
            age = "a newer" if version > _VERSION else "an older"
            raise ValueError(f"{path} was written by {age} driftproof: its version is {version}, not {_VERSION}")
        return state

    def write_state(self, state: Mapping[str, Any], events: Sequence[Event], used: Iterable[str]) -> None:
        """Write where the run is, and then remove members' states that it does not use."""
        text = json.dumps({"version": _VERSION, **state}, default=os.fspath)
        write_atomically(self.path / _STATE, [text.encode()])
        # After the state that they follow from: a run that is resumed writes them again.
        write_events(self.path / "population.json", events)
        for name in self._names() - set(used):
            (self.members / name).unlink(missing_ok=True)

    def write_member(self, member: int, updates: int, state: bytes) -> str:
        """Write a member's state; the name of the file. Nothing uses it before it is named in :meth:`write_state`."""
        name = f"member_{member:04d}_{updates:09d}.zip"
        write_atomically(self.members / name, [state])
        return name

    def read_member(self, name: str) -> bytes:
        return (self.members / name).read_bytes()

    def log(self, member: int | None, rows: Sequence[Mapping[str, float]]) -> None:
        """Append what a member, or the population, measured to ``metrics.jsonl``, and for TensorBoard."""
        if not rows:
            return
        with open(self.path / "metrics.jsonl", "a") as file:
            for row in rows:
                finite = {name: x if math.isfinite(x) else None for name, x in row.items()}
                file.write(json.dumps({"member": member, **finite}) + "\n")
        writer = self._writer("population" if member is None else f"member_{member:04d}")
        for row in rows:
            for name, value in row.items():
                if name != "step":
                    writer.add_scalar(name, value, int(row["step"]))
        writer.flush()

    def _writer(self, name: str) -> Any:
        if name not in self._writers:
            from torch.utils.tensorboard import SummaryWriter  # takes seconds to import

            self._writers[name] = SummaryWriter(str(self.path / "tensorboard" / name))
        return self._writers[name]

    def _names(self) -> set[str]:
        """Of members' states, and of nothing else that may lie there."""
        return {path.name for path in self.members.glob("member_????_?????????.zip")}


def read_metrics(path: str | os.PathLike[str]) -> dict[int | None, list[Row]]:
    """What was logged in a run's ``metrics.jsonl``, by member, in the order of steps; ``None``: of the population.

    A slice that was trained twice, because its run was interrupted, counts with its last try; a line that an
    interruption cut short counts for nothing.

    Raises:
        ValueError: A line is JSON, but not a row of metrics.
    """
    found: dict[int | None, dict[int, Row]] = {}
    with open(path) as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
            except ValueError:
                continue
            try:
                member, step = row.pop("member"), int(row["step"])
                values = {name: math.nan if x is None else float(x) for name, x in row.items()}
                found.setdefault(None if member is None else int(member), {})[step] = {**values, "step": step}
            except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {number}: not a row of metrics ({error}): {line[:80]!r}") from error
    return {member: [rows[step] for step in sorted(rows)] for member, rows in found.items()}


def _lock(descriptor: int) -> bool:
    """Take a lock that the system gives back when the process ends, however it ends."""
    try:
        import fcntl
    except ImportError:  # Windows
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
