"""Handling of a terminal that is closed while a command runs."""

from __future__ import annotations

import contextlib
import os

_terminals: list[int] = []


def find() -> None:
    """Record which standard streams are terminals."""
    _terminals[:] = [stream for stream in (0, 1, 2) if os.isatty(stream)]


def leave() -> None:
    """Redirect the terminal's streams to the null device; safe in signal handlers."""
    with contextlib.suppress(OSError):
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in _terminals:
            os.dup2(nowhere, stream)
        os.close(nowhere)


def leave_if_closed() -> None:
    """Redirect the streams if the terminal was closed, as after ``disown``, so that writing does not fail."""
    if not all(os.isatty(stream) for stream in _terminals):
        leave()
        _terminals.clear()
