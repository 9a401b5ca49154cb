"""Signals that a terminal sends to all of its processes, of which one is in charge."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

_TO_ALL = ("SIGINT", "SIGHUP")


@contextmanager
def left_to_this_process() -> Iterator[None]:
    """Processes that are started meanwhile, and those that these start, do not hear of Ctrl-C or a closed terminal.

    Whoever started them does, and tells them what to do. Signals that come meanwhile wait.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    # Started by the first process that is, it would let Ctrl-C through again.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {getattr(signal, name) for name in _TO_ALL})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
