"""How commands end: exit codes, and one line for a mistake of the user."""

from __future__ import annotations

import os
import re
import sys
from typing import Any

import typer

from driftproof._text import printable

USER_ERROR = 1
"""Something in a file, an argument or the system is at fault. 2, of wrong usage, is the parser's."""
INTERRUPTED = 130

_OURS = (
    ("driftproof.config", "ConfigError"),
    ("driftproof.state", "CheckpointError"),
    ("driftproof.ppo", "RolloutError"),
    ("driftproof.ppo", "TrainingError"),
    ("driftproof.envs", "MarketDataError"),
    ("driftproof.pbt", "FolderTakenError"),
    ("driftproof._files", "RunFolderError"),
)
_MOST_LINES = 20
_LONGEST_LINE = 580
"""Of what is told: a file may hold any number of mistakes, of any length."""


class CommandError(Exception):
    """A command cannot do what it was asked to; the message says why, and what to do."""


class Stopped(Exception):  # noqa: N818  It is no error.
    """Somebody interrupted a command; the message says where it is, and how to go on."""


def say(text: str = "") -> None:
    """Print lines of a command's answer, which may hold names from files."""
    typer.echo("\n".join(printable(line, _LONGEST_LINE) for line in text.split("\n")))


def is_mistake(error: BaseException) -> bool:
    """Whether an error tells users all that they need, without a traceback."""
    kinds: list[Any] = [CommandError, OSError, MemoryError]
    for module, name in _OURS:
        # What has not been imported has not been raised.
        if module in sys.modules and hasattr(sys.modules[module], name):
            kinds.append(getattr(sys.modules[module], name))
    return isinstance(error, tuple(kinds))


def as_lines(error: BaseException) -> list[str]:
    """What is wrong, a line for every problem, safe to print and not too long."""
    problems = getattr(error, "problems", [_described(error)])
    if (more := len(problems) - _MOST_LINES) > 0:
        problems = [*problems[:_MOST_LINES], f"{more:,} more problems"]
    return [as_line(problem) for problem in problems]


def as_line(text: object) -> str:
    """Text of a message, which may hold names from files, on one line of a terminal."""
    return f"driftproof: {printable(_spaced(str(text)), _LONGEST_LINE)}"


def _spaced(text: str) -> str:
    """Without line breaks. Of a long text, no more than is printed."""
    if len(text) > 4 * _LONGEST_LINE:
        text = f"{text[: 2 * _LONGEST_LINE]} … {text[-2 * _LONGEST_LINE :]}"
    return re.sub(r"[ \t\r\n]+", " ", text).strip()


def _described(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return f"there is not enough memory: {error}" if str(error) else "there is not enough memory for this"
    if isinstance(error, OSError) and error.strerror and error.filename:
        name = os.fsdecode(error.filename) if isinstance(error.filename, bytes) else error.filename
        return f"{name}: {error.strerror}"
    return str(error) or type(error).__name__
