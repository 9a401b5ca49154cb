"""Ctrl-C, a request to end (SIGTERM) and a closed terminal (SIGHUP), while something is at work that is to be saved."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")


class Interrupts:
    """The first asks to stop, a second one stops at once, with a ``KeyboardInterrupt``.

    Signals that were ignored before, as under ``nohup``, still are.

    Args:
        stop: Asks; called by a signal handler.
    """

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop = stop
        self._before: dict[int, Any] = {}
        self._terminals = [stream for stream in (0, 1, 2) if os.isatty(stream)]
        self.came = False
        """Whether there was one."""

    def __enter__(self) -> Interrupts:
        for number in (getattr(signal, name) for name in _NAMES if hasattr(signal, name)):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def renew(self) -> None:
        """Be in charge again, after a library, as Ray does when it starts, has put its own handlers in place."""
        for number in self._before:
            signal.signal(number, self._handle)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        is_hangup = number == getattr(signal, "SIGHUP", None)
        if is_hangup:
            self._leave_terminal()
        if not self.came:
            self.came = True
            self._stop()
        elif not is_hangup:  # Which a shell may repeat.
            raise KeyboardInterrupt

    def _leave_terminal(self) -> None:
        """Write to nowhere what can no longer be written."""
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in self._terminals:
            os.dup2(nowhere, stream)
        os.close(nowhere)
