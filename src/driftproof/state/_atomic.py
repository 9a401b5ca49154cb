"""Atomic writing of files."""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import re
import secrets
import threading
import time
from collections.abc import Iterable
from pathlib import Path

_HOST = re.sub("[^A-Za-z0-9-]", "-", platform.node())[:32] or "host"
_TEMPORARY = re.compile(r"\..+\.(?P<host>[A-Za-z0-9-]+)\.(?P<pid>\d+)\.[0-9a-f]{8}\.tmp")
_ABANDONED_AFTER = 24 * 3600.0
"""Seconds after which a temporary file of another machine, whose processes are invisible here, counts as abandoned."""

_ours: set[str] = set()
_ours_lock = threading.Lock()


def write_atomically(
    path: str | os.PathLike[str], parts: Iterable[bytes | memoryview], *, follow_links: bool = True
) -> None:
    """Write a file so that at any moment, and after any crash, either the old or the new content is there.

    The folder is created if needed.

    Args:
        path: Path of the file.
        parts: Content of the file, in pieces.
        follow_links: Replace a link's target instead of the link itself. Use False in untrusted folders, where a link
            may lead to any file of the user.

    Raises:
        OSError: The file could not be written; the folder is unchanged. The error names the path.
    """
    target = Path(os.path.realpath(path) if follow_links else path)
    try:
        if target.exists() and not target.is_file() and not target.is_symlink():
            raise OSError(errno.EEXIST, "exists and is not a regular file")
        target.parent.mkdir(parents=True, exist_ok=True)
        _write(target, parts)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def _write(target: Path, parts: Iterable[bytes | memoryview]) -> None:
    temporary = target.with_name(f".{target.name}.{_HOST}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    with _ours_lock:
        _ours.add(temporary.name)
    try:
        with open(temporary, "xb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
        _sync_folder(target.parent)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        with _ours_lock:
            _ours.discard(temporary.name)


def _sync_folder(folder: Path) -> None:
    """Make the renaming survive a power cut."""
    if os.name == "nt":  # Windows cannot sync folders.
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_abandoned(folder: Path) -> None:
    """Remove temporary files in ``folder`` whose writers are dead."""
    for entry in list(os.scandir(folder)):
        match = _TEMPORARY.fullmatch(entry.name)
        if match and _is_abandoned(entry, match["host"], int(match["pid"])):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(entry)


def _is_abandoned(entry: os.DirEntry[str], host: str, pid: int) -> bool:
    if host != _HOST or os.name == "nt":
        try:
            return time.time() - entry.stat(follow_symlinks=False).st_mtime > _ABANDONED_AFTER
        except FileNotFoundError:
            return False
    if pid == os.getpid():
        with _ours_lock:
            return entry.name not in _ours  # left by a former process with our id, if not by one of our threads
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        return False
    return False
