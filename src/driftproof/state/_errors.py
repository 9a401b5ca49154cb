"""The error of invalid checkpoints and states."""

from __future__ import annotations

from driftproof._text import printable


class CheckpointError(ValueError):
    """A file is not a valid checkpoint, or a state does not fit. The message says what is wrong and what to do.

    Text that comes from a file is shown without control characters and shortened to a few lines.
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(printable(message))
