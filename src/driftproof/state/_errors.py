"""The one error of checkpoints and of the states in them."""

from __future__ import annotations

from driftproof._text import printable


class CheckpointError(ValueError):
    """A file is not a checkpoint, or a state does not fit. The message says what is wrong and what to do.

    Much of a message may come from a file: it is shown without control characters, and in a few lines at most.
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(printable(message))
