"""A run folder: locks, and writes in an order such that a crash at any moment loses at most one slice of training."""

from __future__ import annotations

import json
import math
import os
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO

from driftproof._files import RunFolderError, damage_told, open_to_append, parse_json, read_bytes, shortened
from driftproof._requirements import is_installed
from driftproof._text import printable
from driftproof.runs.events import Event, write_events
from driftproof.runs.layout import EVENTS, MEMBERS, METRICS, POPULATION_STATE, TENSORBOARD, WRITTEN_IN_PLACE, own_file
from driftproof.runs.population_state import VERSION, SavedPopulation
from driftproof.state import write_atomically
from driftproof.state._atomic import remove_abandoned

_MEMBER = re.compile(r"member_[0-9]{4,9}_[0-9]{9,18}\.zip")
_MARK = ".run"
"""File with the same random content in the run folder and in a separate folder of its members."""
_MAX_MEMBER_BYTES = 8 * 2**30


class FolderTakenError(RuntimeError):
    """Another process is using a run's folder, or has since it was loaded; the run itself is intact."""


class RunFolder:
    """The files of one run, which only one process at a time may write.

    Args:
        path: The folder; made absolute, so that it does not depend on the working directory.
        members: Folder of the members' states; by default ``members`` in the run folder.
    """

    def __init__(self, path: str | os.PathLike[str], members: str | os.PathLike[str] | None = None) -> None:
        self.path = Path(path).absolute()
        self.members = self.path / MEMBERS if members is None else Path(members).absolute()
        self._writers: dict[str, Any] = {}

    @property
    def is_taken(self) -> bool:
        """Whether the folder holds a run."""
        return (self.path / POPULATION_STATE).exists()

    @property
    def has_guests(self) -> bool:
        """Whether the separate folder of members already holds those of another run."""
        return self._is_elsewhere and not self.is_taken and bool(self._names())

    @property
    def _is_elsewhere(self) -> bool:
        return self.members.parent != self.path

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder for this process.

        Raises:
            FolderTakenError: Another process is using the run, or the members' folder belongs to another run.
        """
        for name in WRITTEN_IN_PLACE:
            own_file(self.path, name)
        if self._is_elsewhere and self.is_taken:
            self._check_owner()  # Before anything is created there: the state may name any folder.
        with ExitStack() as stack:
            for folder in {self.path, self.members} if self._is_elsewhere else {self.path}:
                folder.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(open_to_append(folder / ".lock"))
                _locks.add(file)
                stack.callback(_locks.discard, file)
                if not _lock(file.fileno()):
                    raise FolderTakenError(f"{folder}: another process is using this run; wait for it, or end it")
            if self._is_elsewhere:
                self._check_owner()
            for folder in filter(Path.is_dir, (self.path, self.members)):
                remove_abandoned(folder)
            try:
                yield
            finally:
                for writer in self._writers.values():
                    writer.close()
                self._writers.clear()

    def _check_owner(self) -> None:
        """Check that both folders hold the same mark, so that nothing is removed from a folder of another run."""
        marks = [self.path / _MARK, self.members / _MARK]
        if not self._names() and not self.is_taken:
            mark = uuid.uuid4().hex.encode()
            for path in marks:
                write_atomically(path, [mark], follow_links=False)
        elif not all(path.exists() for path in marks) or len({read_bytes(path, 100) for path in marks}) > 1:
            raise FolderTakenError(f"{self.members} holds members of another run, not of {self.path}")

    def read_state(self) -> SavedPopulation:
        """Read and validate what :meth:`write_state` wrote last.

        Raises:
            FileNotFoundError: The folder holds no run.
            RunFolderError: The file is damaged, or was written by a newer driftproof.
        """
        path = self.path / POPULATION_STATE
        if not os.path.lexists(path):
            raise FileNotFoundError(f"{self.path} holds no population: there is no {POPULATION_STATE}")
        with damage_told(path, self._advice):
            content = parse_json(read_bytes(path))
            if not isinstance(content, dict):
                raise ValueError(f"it holds {shortened(content)}, not a mapping")
            version = content.get("version")
            if type(version) is int and version != VERSION:
                age = "a newer" if version > VERSION else "an older"
                raise RunFolderError(
                    f"{path} was written by {age} driftproof: its version is {version}, not {VERSION}; use that one"
                )
            return SavedPopulation.model_validate(content)

    _advice = "restore it from a copy, or start another run"

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Name the state's file in errors that its values raise inside the block."""
        with damage_told(self.path / POPULATION_STATE, self._advice):
            yield

    def write_state(self, state: Mapping[str, Any]) -> None:
        """Write the state of the run."""
        text = json.dumps({"version": VERSION, **state}, default=_plain, allow_nan=False)
        write_atomically(self.path / POPULATION_STATE, [text.encode()], follow_links=False)

    def follow_state(self, events: Iterable[Event], used: Iterable[str]) -> None:
        """Write events, and remove members' files that the state written before does not use."""
        write_events(self.path / EVENTS, events)
        for name in self._names() - set(used):
            (self.members / name).unlink(missing_ok=True)

    def write_member(self, member: int, updates: int, state: bytes) -> str:
        """Write a member's state; returns the file's name, to be passed to :meth:`write_state`."""
        name = f"member_{member:04d}_{updates:09d}.zip"
        write_atomically(self.member_path(name), [state], follow_links=False)
        return name

    def read_member(self, name: str) -> bytes:
        return read_bytes(self.member_path(name), _MAX_MEMBER_BYTES)

    def member_path(self, name: str) -> Path:
        """Path of a member's state.

        Raises:
            RunFolderError: The name is not one of a member's state.
        """
        if not _MEMBER.fullmatch(name):
            raise RunFolderError(f"{printable(name, 80)!r} is not the file name of a member's state")
        return own_file(self.members, name)

    def log(self, member: int | None, rows: Sequence[Mapping[str, float]]) -> None:
        """Append metrics of a member, or of the population, to ``metrics.jsonl``, and to TensorBoard's files.

        Without the package tensorboard there are no such files.
        """
        if not rows:
            return
        with open_to_append(self.path / METRICS) as file:
            if not _ends_line(file):
                file.write(b"\n")  # After a line that was cut off by an interruption.
            for row in rows:
                finite = {name: x if math.isfinite(x) else None for name, x in row.items()}
                file.write(json.dumps({"member": member, **finite}).encode() + b"\n")
        if not is_installed("tensorboard"):
            return
        writer = self._writer("population" if member is None else f"member_{member:04d}")
        for row in rows:
            for name, value in row.items():
                if name != "step":
                    writer.add_scalar(printable(name, 200), value, int(row["step"]))
        writer.flush()

    def _writer(self, name: str) -> Any:
        if name not in self._writers:
            from torch.utils.tensorboard import SummaryWriter  # takes seconds to import

            self._writers[name] = SummaryWriter(str(own_file(self.path / TENSORBOARD, name)))
        return self._writers[name]

    def _names(self) -> set[str]:
        """File names of members' states."""
        return {path.name for path in self.members.glob("member_*.zip") if _MEMBER.fullmatch(path.name)}


def _ends_line(file: BinaryIO) -> bool:
    if not file.seek(0, os.SEEK_END):
        return True
    file.seek(-1, os.SEEK_END)
    return file.read() == b"\n"


def _plain(value: Any) -> Any:
    """NumPy numbers and paths as JSON values."""
    return value.item() if hasattr(value, "item") else os.fspath(value)


def is_in_use(folder: Path) -> bool:
    """Whether a process is working on a run."""
    path = folder / ".lock"
    if not path.is_file() or path.is_symlink():
        return False
    with path.open("rb") as file:
        return not _lock(file.fileno())


_locks: set[IO[bytes]] = set()
"""Lock files that this process has open."""


def _leave_locks() -> None:
    """Close lock files in a forked child (such as an environment's), which would keep the run locked."""
    for file in _locks:
        file.close()
    _locks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_locks)


def _lock(descriptor: int) -> bool:
    """Take a lock that the operating system releases when the process ends, however it ends."""
    try:
        import fcntl
    except ImportError:  # Windows
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
