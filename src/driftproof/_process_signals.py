"""Signals and the processes that this library starts: one process answers signals, the others follow it.

Ctrl-C and a closed terminal reach every process of a terminal, and service managers send SIGTERM to every process of a
service. If workers and environments died of them, the process in charge could not finish and save what they do.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from types import FrameType

INTERRUPTING = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)  # Windows has no SIGHUP.
"""Signals that ask a process to stop."""

_children: weakref.WeakSet[BaseProcess] = weakref.WeakSet()


@contextmanager
def left_to_this_process() -> Iterator[None]:
    """Block :data:`INTERRUPTING` in processes that the block starts with ``multiprocessing``, method ``"spawn"``.

    They start with these signals blocked, and call :func:`follow_parent` as soon as they run. Those that still run when
    this process exits are killed.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    others = set(multiprocessing.active_children())
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        # The first process of multiprocessing starts the resource tracker, which unblocks SIGINT and SIGTERM: start it
        # before.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTING)
        yield
    finally:
        _children.update(set(multiprocessing.active_children()) - others)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def follow_parent() -> None:
    """Leave signals to the process that started this one, and end when that ends, even if it is killed.

    Ctrl-C and hang-ups stay blocked, also in programs that this process starts. SIGTERM is not blocked, so that these
    programs can be terminated.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Where nothing can be blocked.
    if hasattr(signal, "pthread_sigmask"):
        # Not SIG_IGN, which started programs would inherit.
        signal.signal(signal.SIGTERM, _disregard)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent,), name="waits for the parent's end", daemon=True).start()


@contextmanager
def kept_handlers() -> Iterator[None]:
    """Restore signal handlers after the block, which may call a library that replaces them."""
    if threading.current_thread() is not threading.main_thread():  # Other threads cannot replace handlers.
        yield
        return
    before = {number: signal.getsignal(number) for number in INTERRUPTING}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)


def _disregard(number: int, frame: FrameType | None) -> None:
    pass


def _end_with(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


def _kill_children() -> None:
    for process in list(_children):
        if process.is_alive():
            process.kill()


# Registered after, and so called before multiprocessing's, which sends SIGTERM and waits.
atexit.register(_kill_children)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_children.clear)
