"""The terminal of a command, which may be closed while the command goes on."""

from __future__ import annotations

import contextlib
import os

_terminals: list[int] = []


def find() -> None:
    """Note which of the standard streams are terminals."""
    _terminals[:] = [stream for stream in (0, 1, 2) if os.isatty(stream)]


def leave() -> None:
    """Read nothing from the terminal any more, and write nothing to it; may be called by a signal handler."""
    with contextlib.suppress(OSError):
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in _terminals:
            os.dup2(nowhere, stream)
        os.close(nowhere)


def leave_if_closed() -> None:
    """Do not fail to write to a terminal that is gone, as that of a process that ``disown`` keeps from hang-ups."""
    if not all(os.isatty(stream) for stream in _terminals):
        leave()
        _terminals.clear()
