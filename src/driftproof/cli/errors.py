"""How commands end: exit codes, and one line for a mistake of the user."""

from __future__ import annotations

import sys
from typing import Any

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
)


class CommandError(Exception):
    """A command cannot do what it was asked to; the message says why, and what to do."""


class Stopped(Exception):  # noqa: N818  It is no error.
    """Somebody interrupted a command; the message says where it is, and how to go on."""


def is_mistake(error: BaseException) -> bool:
    """Whether an error tells users all that they need, without a traceback."""
    kinds: list[Any] = [CommandError, OSError]
    for module, name in _OURS:
        # What has not been imported has not been raised.
        if module in sys.modules and hasattr(sys.modules[module], name):
            kinds.append(getattr(sys.modules[module], name))
    return isinstance(error, tuple(kinds))


def as_lines(error: BaseException) -> list[str]:
    """What is wrong, a line for every problem."""
    problems = getattr(error, "problems", [_described(error)])
    return [f"driftproof: {' '.join(str(problem).split())}" for problem in problems]


def _described(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error)
