"""Ctrl-C (SIGINT), a request to end (SIGTERM) and a closed terminal (SIGHUP), answered in one place.

The handlers are installed once, before a command begins, and stay until it has ended, so that there is no moment in
which a signal is lost. What the first signal does depends on what the command is doing: it raises
``KeyboardInterrupt``; or, in :meth:`Interrupts.asking`, asks a training to finish and save; or, in
:meth:`Interrupts.held`, waits. A second one raises ``KeyboardInterrupt``. Requests are remembered: code that swallows
the exception delays the end of a command until somebody calls :meth:`Interrupts.check`.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from driftproof._process_signals import INTERRUPTING
from driftproof.cli import terminal


class Interrupts:
    """Answers the signals that ask a command to stop.

    Signals that were ignored before, as SIGHUP is under ``nohup``, still are.
    """

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._reset()

    def _reset(self) -> None:
        self.came = False
        """Whether somebody has asked to stop."""
        self._is_urgent = False
        self._answer: Callable[[], object] | None = None
        self._is_shielded = False

    def __enter__(self) -> Interrupts:
        self._reset()
        self._before = {}
        terminal.find()
        if threading.current_thread() is threading.main_thread():  # Others cannot.
            for number in INTERRUPTING:
                # None: a handler that is not Python's.
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def renew(self) -> None:
        """Be in charge again, after a library may have put its own handlers in place."""
        for number in self._before:
            if signal.getsignal(number) != self._handle:
                signal.signal(number, self._handle)

    @contextmanager
    def asking(self, stop: Callable[[], object]) -> Iterator[None]:
        """The first signal calls ``stop``, which asks what runs meanwhile to finish and save.

        Raises:
            KeyboardInterrupt: A signal came before; or a second one.
        """
        before = self._answer
        # First asked whether one came: it was not answered by stop.
        self.check()
        self._answer = stop
        try:
            yield
        finally:
            self._answer = before

    @contextmanager
    def held(self) -> Iterator[None]:
        """The first signal waits until the end: for what must not be left half-made.

        Raises:
            KeyboardInterrupt: At the end, if a signal came; at once, if it is the second one.
        """
        with self.asking(_wait):
            yield
        self.check()

    @contextmanager
    def shielded(self) -> Iterator[None]:
        """No signal interrupts what is short and has to be completed."""
        before, self._is_shielded = self._is_shielded, True
        try:
            yield
        finally:
            self._is_shielded = before

    def check(self) -> None:
        """Stop if that was asked for, and what runs is not finishing because of it.

        Raises:
            KeyboardInterrupt: It was.
        """
        if self.came and not self._is_shielded and (self._is_urgent or self._answer is None):
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        is_hangup = number == getattr(signal, "SIGHUP", None)
        if is_hangup:
            terminal.leave()
        if not self.came:
            self.came = True
            if self._answer is not None:
                self._answer()
        elif is_hangup:  # Shells repeat it.
            return
        else:
            self._is_urgent = True
        self.check()


def _wait() -> None:
    pass


interrupts = Interrupts()
"""Those of the command that this process runs."""
