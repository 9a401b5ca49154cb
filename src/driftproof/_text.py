"""Text for messages: safe printing of names from files, tables, and hints at misspelled names."""

from __future__ import annotations

import difflib
import io
from collections.abc import Iterable, Sequence

_GAP = " … "
_WIDEST = 100_000
"""Width of a table in characters, large enough not to wrap."""


def printable(text: object, limit: int = 500) -> str:
    r"""Text on one line that a terminal, a log or a page can show as it stands, in at most ``limit`` characters.

    Control characters, escape sequences, bidirectional overrides and lone surrogates are written as ``\x1b`` or
    ``\u202e``. Of longer text, the middle is left out: messages begin with what is wrong and end with what to do.

    Args:
        text: Anything; ``str()`` of it is shown.
        limit: Largest length of the result, at least 20.
    """
    text = str(text)
    if len(text) <= limit and text.isprintable():
        return text
    # Cut overlong text before escaping, which only makes it longer.
    if len(text) > 2 * limit:
        text = text[:limit] + "\0" + text[-limit:]
    shown = [_escaped(character) for character in text]
    if sum(map(len, shown)) <= limit:
        return "".join(shown)
    end = _fitting(reversed(shown), limit // 3)[::-1]
    start = _fitting(shown, limit - len(_GAP) - sum(map(len, end)))
    return "".join([*start, _GAP, *end])


def _escaped(character: str) -> str:
    if character.isprintable():
        return character
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


def _fitting(pieces: Iterable[str], limit: int) -> list[str]:
    """The first pieces that fit into the limit. Escapes are never split."""
    taken, left = [], limit
    for piece in pieces:
        left -= len(piece)
        if left < 0:
            break
        taken.append(piece)
    return taken


def table(rows: Iterable[Iterable[str]], numbers_from: int | None = None) -> str:
    """Rows as aligned columns of plain text.

    Args:
        rows: Rows of cells; the first row is the header.
        numbers_from: First of the right-aligned columns; ``None``: there are none.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    cells = [list(row) for row in rows]
    grid = Table.grid(padding=(0, 2))
    for i in range(len(cells[0])):
        is_number = numbers_from is not None and i >= numbers_from
        grid.add_column(justify="right" if is_number else "left", no_wrap=True)
    for row in cells:
        grid.add_row(*map(Text, row))
    console = Console(width=_WIDEST, color_system=None, legacy_windows=False, file=io.StringIO())
    with console.capture() as capture:
        console.print(grid)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def shortlist(values: Sequence[object], most: int = 4) -> str:
    """Values in a row; of more than ``most``, the first two and the last."""
    shown = values if len(values) <= most else [*values[:2], "…", values[-1]]
    return ", ".join(map(str, shown))


def closest(name: object, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name most similar to another; ``None`` if none is similar."""
    spellings = {each.lower(): each for each in known}
    near = difflib.get_close_matches(str(name).lower(), spellings, n=1, cutoff=cutoff)
    return spellings[near[0]] if near else None


def did_you_mean(name: object, known: Iterable[str], otherwise: str | None = None) -> str:
    """Hint for an unknown name.

    Args:
        name: The unknown name.
        known: Known names.
        otherwise: Hint if no known name is similar; ``None``: a list of the known names.
    """
    known = list(known)
    if (near := closest(name, known)) is not None:
        return f"did you mean {near!r}?"
    return f"there are {', '.join(known)}" if otherwise is None else otherwise
