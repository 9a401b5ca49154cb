"""Text from files in a form that is safe to print."""

from __future__ import annotations

from collections.abc import Iterable

_GAP = " … "


def printable(text: object, limit: int = 500) -> str:
    r"""Text on one line that a terminal, a log or a page can show as it stands, in at most ``limit`` characters.

    Control characters, escape sequences, bidirectional overrides and lone surrogates are written as ``\x1b`` or
    ``\u202e``. Of longer text, the middle is left out: messages begin with what is wrong and end with what to do.

    Args:
        text: Anything; ``str()`` of it is shown.
        limit: Most characters of the result, at least 20.
    """
    text = str(text)
    if len(text) <= limit and text.isprintable():
        return text
    # Of text that is far too long, the middle never matters: escaping only makes it longer.
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
    """The first of the pieces, as many as have room. Escapes are never cut in two."""
    taken, left = [], limit
    for piece in pieces:
        left -= len(piece)
        if left < 0:
            break
        taken.append(piece)
    return taken
