"""Exit codes, and one-line messages for user errors."""

from __future__ import annotations

import os
import re
import sys
from typing import Any

import typer

from driftproof._text import printable

USER_ERROR = 1
"""Exit code for an error in a file, an argument or the system; 2 is the argument parser's, for wrong usage."""
INTERRUPTED = 130

_OURS = (
    ("driftproof.config", "ConfigError"),
    ("driftproof.state", "CheckpointError"),
    ("driftproof.ppo", "RolloutError"),
    ("driftproof.ppo", "TrainingError"),
    ("driftproof.envs", "MarketDataError"),
    ("driftproof.pbt", "CannotStartError"),
    ("driftproof.pbt", "FolderTakenError"),
    ("driftproof._files", "RunFolderError"),
    ("driftproof._requirements", "MissingPackageError"),
)
_MOST_LINES = 20
_LONGEST_LINE = 580
"""Limits of error messages, since a file may cause any number of errors, of any length."""


class CommandError(Exception):
    """A command failed; the message gives the cause and the remedy."""


class Stopped(Exception):  # noqa: N818  Not an error.
    """A command was interrupted; the message gives the command that resumes it."""


def say(text: str = "") -> None:
    """Print output without the control characters that names from files may contain."""
    typer.echo("\n".join(printable(line, _LONGEST_LINE) for line in text.split("\n")))


def is_mistake(error: BaseException) -> bool:
    """Whether an error is a user error, shown by its message without a traceback."""
    kinds: list[Any] = [CommandError, OSError, MemoryError]
    for module, name in _OURS:
        # A class whose module is not imported cannot have been raised.
        if module in sys.modules and hasattr(sys.modules[module], name):
            kinds.append(getattr(sys.modules[module], name))
    return isinstance(error, tuple(kinds))


def as_lines(error: BaseException) -> list[str]:
    """An error's message, one shortened and printable line per problem."""
    problems = getattr(error, "problems", [_described(error)])
    if (more := len(problems) - _MOST_LINES) > 0:
        problems = [*problems[:_MOST_LINES], f"{more:,} more problems"]
    return [as_line(problem) for problem in problems]


def as_line(text: object) -> str:
    """A message as one printable line."""
    return f"driftproof: {printable(_spaced(str(text)), _LONGEST_LINE)}"


def _spaced(text: str) -> str:
    """Text without line breaks; a long text is shortened first."""
    if len(text) > 4 * _LONGEST_LINE:
        text = f"{text[: 2 * _LONGEST_LINE]} … {text[-2 * _LONGEST_LINE :]}"
    return re.sub(r"[ \t\r\n]+", " ", text).strip()


def _described(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return f"not enough memory: {error}" if str(error) else "not enough memory"
    if isinstance(error, OSError) and error.strerror and error.filename:
        name = os.fsdecode(error.filename) if isinstance(error.filename, bytes) else error.filename
        return f"{name}: {error.strerror}"
    return str(error) or type(error).__name__
