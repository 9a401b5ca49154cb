"""Handling of Ctrl-C (SIGINT), termination requests (SIGTERM) and a closed terminal (SIGHUP).

The handlers are installed once, before a command starts, and stay until it ends, so that no signal is lost. By default
the first signal raises ``KeyboardInterrupt``; inside :meth:`Interrupts.asking` it requests that training finishes and
saves; inside :meth:`Interrupts.held` it is deferred. A second signal raises ``KeyboardInterrupt``. Requests are
recorded: if code catches the exception, the next :meth:`Interrupts.check` raises it again.
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
    """Handlers of the signals that stop a command.

    Signals that were ignored before, as SIGHUP is under ``nohup``, stay ignored.
    """

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._reset()

    def _reset(self) -> None:
        self.came = False
        """Whether a signal has requested a stop."""
        self._is_urgent = False
        self._answer: Callable[[], object] | None = None
        self._is_shielded = False

    def __enter__(self) -> Interrupts:
        self._reset()
        self._before = {}
        terminal.find()
        if threading.current_thread() is threading.main_thread():  # Only it may install handlers.
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
        """Reinstall the handlers, after a library may have replaced them."""
        for number in self._before:
            if signal.getsignal(number) != self._handle:
                signal.signal(number, self._handle)

    @contextmanager
    def asking(self, stop: Callable[[], object]) -> Iterator[None]:
        """Inside the block, the first signal calls ``stop``, which makes the running code finish and save.

        Raises:
            KeyboardInterrupt: A signal came before the block, or a second one inside.
        """
        before = self._answer
        # A signal received before the block was not passed to stop.
        self.check()
        self._answer = stop
        try:
            yield
        finally:
            self._answer = before

    @contextmanager
    def held(self) -> Iterator[None]:
        """Defer the first signal until the end of the block, so that the block completes.

        Raises:
            KeyboardInterrupt: At the end, if a signal came; at once, if it is the second one.
        """
        with self.asking(_wait):
            yield
        self.check()

    @contextmanager
    def shielded(self) -> Iterator[None]:
        """Block all signals inside a short block of code."""
        before, self._is_shielded = self._is_shielded, True
        try:
            yield
        finally:
            self._is_shielded = before

    def check(self) -> None:
        """Raise if a stop was requested, unless the running code is already finishing because of it.

        Raises:
            KeyboardInterrupt: A stop was requested.
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
        elif is_hangup:  # Shells send SIGHUP repeatedly.
            return
        else:
            self._is_urgent = True
        self.check()


def _wait() -> None:
    pass


interrupts = Interrupts()
"""Signal handling of this process."""
