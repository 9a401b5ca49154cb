"""A folder with the newest, the latest and the best checkpoints; and writing in the background."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import threading
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch

from driftproof._arguments import check_count, check_option
from driftproof._files import parse_json, read_bytes
from driftproof.state._atomic import remove_abandoned, write_atomically
from driftproof.state.files import Checkpoint, CheckpointError, Serialized, read, serialize

_NAME = re.compile(r"checkpoint_(\d{12,})\.zip")
_MAX_POINTER_BYTES = 4096

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Pointer:
    """Content of the files ``latest`` and ``best``."""

    file: str
    step: int
    score: float | None = None


class CheckpointStore:
    """Checkpoints of one run in one folder, ``checkpoint_000000001024.zip`` and so on.

    ``latest`` and ``best`` beside them are small JSON files that name one of them. All files are written atomically: a
    process that is killed leaves a folder from which the last completed save can be loaded. Several stores, of several
    processes, may use a folder.

    Args:
        folder: The folder, created by the first save.
        keep_last: How many of the last written checkpoints to keep; None for all. Those that ``latest`` and ``best``
            name are always kept.
        mode: Whether the best score is the highest or the lowest.
    """

    def __init__(
        self, folder: str | os.PathLike[str], keep_last: int | None = 5, mode: Literal["max", "min"] = "max"
    ) -> None:
        if keep_last is not None:
            check_count("keep_last", keep_last, at_least=1)
        check_option("mode", mode, ("max", "min"))
        self.folder = Path(folder)
        self.keep_last = keep_last
        self.mode = mode

    def save(
        self,
        tree: Any,
        step: int,
        *,
        config: Mapping[str, Any] | None = None,
        exact: bool = True,
        score: float | None = None,
    ) -> Path:
        """Write a checkpoint, update ``latest`` and (if its score is the best) ``best``, then remove old checkpoints.

        A checkpoint of the same step is replaced. A score of NaN counts as none.

        Returns:
            The path of the checkpoint.
        """
        return self.save_serialized(serialize(tree, config=config, exact=exact), step, score=score)

    def save_serialized(self, serialized: Serialized, step: int, *, score: float | None = None) -> Path:
        """:meth:`save` for a tree that :func:`driftproof.state.files.serialize` has serialized."""
        check_count("step", step)
        path = self.folder / f"checkpoint_{step:012d}.zip"
        write_atomically(path, serialized.parts(), follow_links=False)
        self._point("latest", _Pointer(path.name, int(step)))
        self._update_best(path.name, int(step), None if score is None or math.isnan(score) else float(score))
        self._rotate()
        return path

    def list(self) -> list[Path]:
        """Paths of the checkpoints in the folder, intact or not, by step."""
        return [self.folder / name for name in _names_by_step(self.folder)]

    def _by_age(self) -> Sequence[Path]:
        """Paths of the checkpoints by time of writing: a run may go back to an earlier step."""
        ages = {}
        for path in self.list():
            with contextlib.suppress(FileNotFoundError):  # removed by another process in the meantime
                ages[path] = path.stat().st_mtime_ns
        return sorted(ages, key=ages.__getitem__)

    def latest(self) -> Path | None:
        """Path of the newest checkpoint that can be loaded, None if there is none.

        That is the one that ``latest`` names, else the one written last. Warns about each damaged one.
        """
        found = self._newest("cpu")
        return None if found is None else found[0]

    def load_latest(self, device: torch.device | str = "cpu") -> Checkpoint | None:
        """Read the checkpoint of :meth:`latest`."""
        found = self._newest(device)
        return None if found is None else found[1]

    def best(self) -> Path | None:
        """Path of the checkpoint with the best score; None if there is none, or (with a warning) if it is damaged."""
        pointer = self._pointer("best")
        if pointer is None:
            return None
        path = self.folder / pointer.file
        return None if self._read(path, "cpu") is None else path

    def best_score(self) -> float | None:
        """The score of :meth:`best`."""
        pointer = self._pointer("best")
        return None if pointer is None else pointer.score

    def _newest(self, device: torch.device | str) -> tuple[Path, Checkpoint] | None:
        candidates = [*self._by_age()][::-1]
        pointer = self._pointer("latest")
        if pointer is not None:
            candidates.insert(0, self.folder / pointer.file)
        for path in dict.fromkeys(candidates):
            checkpoint = self._read(path, device)
            if checkpoint is not None:
                return path, checkpoint
        return None

    def _read(self, path: Path, device: torch.device | str) -> Checkpoint | None:
        try:
            return read(path, device)
        except FileNotFoundError:  # removed by another process in the meantime
            return None
        except CheckpointError as error:
            warnings.warn(f"skipped a checkpoint: {error}", stacklevel=4)
            return None

    def _pointer(self, name: str) -> _Pointer | None:
        """Read ``latest`` or ``best``; None if it is invalid, or its checkpoint is missing."""
        try:
            # A score may be infinite.
            content = parse_json(read_bytes(self.folder / name, _MAX_POINTER_BYTES), allow_nan=True)
        except (OSError, ValueError, RecursionError):
            return None
        if not isinstance(content, dict) or content.keys() != {"file", "step", "score"}:
            return None
        file_name, step, score = content["file"], content["step"], content["score"]
        # Only a checkpoint's name, never a path out of the folder.
        if not isinstance(file_name, str) or not _NAME.fullmatch(file_name) or not (self.folder / file_name).is_file():
            return None
        is_score = score is None or (type(score) is float and not math.isnan(score))
        if type(step) is not int or not is_score:
            return None
        return _Pointer(file_name, step, score)

    def _point(self, name: str, pointer: _Pointer) -> None:
        write_atomically(self.folder / name, [json.dumps(vars(pointer)).encode()], follow_links=False)

    def _update_best(self, file: str, step: int, score: float | None) -> None:
        best = self._pointer("best")
        replaced = best is not None and best.file == file
        if score is None:
            if replaced:  # the checkpoint with the best score was overwritten
                (self.folder / "best").unlink(missing_ok=True)
            return
        if best is None or best.score is None or replaced or self._is_better(score, best.score):
            self._point("best", _Pointer(file, step, score))

    def _is_better(self, score: float, than: float) -> bool:
        return score > than if self.mode == "max" else score < than

    def _rotate(self) -> None:
        remove_abandoned(self.folder)
        if self.keep_last is None:
            return
        pointers = [self._pointer("latest"), self._pointer("best")]
        kept = {pointer.file for pointer in pointers if pointer is not None}
        for path in self._by_age()[: -self.keep_last]:
            if path.name not in kept:
                path.unlink(missing_ok=True)


def _names_by_step(folder: Path) -> list[str]:
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    matches = [match for match in map(_NAME.fullmatch, names) if match]
    return [match[0] for match in sorted(matches, key=lambda match: int(match[1]))]


class AsyncWriter:
    """Saves to a store in a background thread, one tree at a time, in the order of calls.

    :meth:`save` copies the tree and returns. While one tree is written, one more may wait, and a newer tree replaces
    it: a slow disk makes checkpoints rarer instead of slowing down training. A waiting tree is still written when the
    interpreter exits.

    Args:
        store: The store to save to.
        keep_all: Keep all waiting trees instead of the newest, whatever memory that takes.
    """

    def __init__(self, store: CheckpointStore, keep_all: bool = False) -> None:
        self.store = store
        self.keep_all = keep_all
        self._changed = threading.Condition()
        self._waiting: deque[tuple[int, Callable[[], Path]]] = deque()
        self._thread: threading.Thread | None = None
        self._failure: tuple[int, BaseException] | None = None
        self._closed = False

    def save(
        self,
        tree: Any,
        step: int,
        *,
        config: Mapping[str, Any] | None = None,
        exact: bool = True,
        score: float | None = None,
    ) -> None:
        """Copy the tree, and save it with :meth:`CheckpointStore.save` in the background.

        Raises:
            RuntimeError: An earlier write failed (see its cause). This tree is not saved; the next call will be.
        """
        self._raise_failure()
        if self._closed:
            raise RuntimeError("this writer is closed")
        check_count("step", step)
        # Serialize here: in the thread it would compete with training for the interpreter lock.
        serialized = serialize(tree, config=config, exact=exact, copied=True)

        def job() -> Path:
            return self.store.save_serialized(serialized, step, score=score)

        with self._changed:
            if self._thread is None:
                # Ends when nothing waits. Not a daemon, so that the interpreter's exit waits for it.
                thread = threading.Thread(target=self._work, name="checkpoint writer", daemon=False)
                thread.start()
                self._thread = thread
            # One assignment, so that an interrupt leaves either the old or the new one waiting.
            self._waiting = deque([*(self._waiting if self.keep_all else ()), (step, job)])

    def wait(self) -> None:
        """Block until all accepted trees are on disk.

        Raises:
            RuntimeError: A write failed (see its cause).
        """
        with self._changed:
            self._changed.wait_for(lambda: self._thread is None)
        self._raise_failure()

    def close(self) -> None:
        """Wait for pending writes, and accept no more.

        Raises:
            RuntimeError: A write failed (see its cause).
        """
        self._closed = True
        self.wait()

    def __enter__(self) -> AsyncWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._thread = None
                    self._changed.notify_all()
                    return
                step, job = self._waiting.popleft()
            try:
                job()
            except BaseException as error:
                # Logged now, because the process may end before save() or wait() raises it.
                _log.exception("writing the checkpoint of step %d failed", step)
                with self._changed:
                    self._failure = self._failure or (step, error)
            del job  # frees the tree while waiting for the next

    def _raise_failure(self) -> None:
        with self._changed:
            failure, self._failure = self._failure, None
        if failure is not None:
            step, error = failure
            raise RuntimeError(f"writing the checkpoint of step {step} in the background failed: {error}") from error
