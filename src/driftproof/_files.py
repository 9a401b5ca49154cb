"""Reading files of a run folder without trusting them: regular files only, of bounded size, every value checked.

Nothing here imports torch, so that reading configurations and reporting errors is fast.
"""

from __future__ import annotations

import json
import os
import reprlib
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn, TypeVar

from driftproof._text import printable

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

    Model = TypeVar("Model", bound=BaseModel)

MAX_BYTES = 64 * 2**20
MAX_VALUES = 4_000_000
"""Limits of a JSON file: what is parsed takes many times the memory of its text."""
MAX_DIGITS = 40
"""Largest number of digits of an integer; those of a NumPy generator's state have 39."""

DAMAGES = (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError)
"""Exceptions that a damaged value raises when it is read."""
_RESTORE = "restore it from a copy"


class RunFolderError(ValueError):
    """A file of a run folder is damaged or of another kind. The message says which, why, and what to do."""


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file of a run folder to read, unless it is a link, a pipe, a device or a folder.

    Raises:
        RunFolderError: It is one of these.
        OSError: It cannot be opened; ``FileNotFoundError`` if it does not exist.
    """
    return _opened(path, os.O_RDONLY)


def open_to_append(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file of a run folder to append, like :func:`open_regular`; it is created if it does not exist.

    A file with further hard links is refused, since they would be written to as well.
    """
    file = _opened(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    if os.fstat(file.fileno()).st_nlink > 1:
        file.close()
        raise RunFolderError(f"{path} has hard links, which would all be written to; replace it by a copy of itself")
    return file


def _opened(path: str | os.PathLike[str], flags: int) -> BinaryIO:
    # Without O_NONBLOCK, opening a pipe without a writer blocks forever.
    for name in ("O_NONBLOCK", "O_NOFOLLOW", "O_BINARY"):
        flags |= getattr(os, name, 0)
    try:
        descriptor = os.open(path, flags, 0o666)
    except ValueError as error:  # A path with a NUL character.
        raise RunFolderError(f"{path} cannot be opened: {error}") from error
    except IsADirectoryError as error:
        raise RunFolderError(f"{path} is a folder; there should be a file") from error
    except OSError as error:
        if os.path.islink(path):
            raise RunFolderError(f"{path} is a link, which a run does not follow; put the file itself there") from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise RunFolderError(f"{path} is no regular file; remove it, or {_RESTORE}")
    return os.fdopen(descriptor, "rb" if flags & os.O_ACCMODE == os.O_RDONLY else "r+b")


def read_bytes(path: str | os.PathLike[str], limit: int = MAX_BYTES) -> bytes:
    """The content of a file of a run folder.

    Raises:
        RunFolderError: It is not a regular file, or larger than any that a run writes.
        OSError: It cannot be read.
    """
    with open_regular(path) as file:
        # Not read(limit): it would allocate a buffer of that size beforehand.
        data = file.read(min(os.fstat(file.fileno()).st_size, limit) + 1)
    if len(data) > limit:
        raise RunFolderError(f"{path} cannot be read: it has more than {limit:,} bytes; {_RESTORE}")
    return data


def read_json(
    path: str | os.PathLike[str], model: type[Model], *, advice: str = _RESTORE, allow_nan: bool = False
) -> Model:
    """The content of a small JSON file of a run folder, with every value checked.

    Args:
        path: The file.
        model: Type that it must have.
        advice: What to do if it has another, for the message.
        allow_nan: Whether ``NaN`` and ``Infinity`` are allowed, which Python writes and JSON does not have.

    Raises:
        RunFolderError: It holds something else.
        OSError: It cannot be read.
    """
    with damage_told(path, advice):
        return model.model_validate(parse_json(read_bytes(path), allow_nan=allow_nan))


def parse_json(data: bytes, *, allow_nan: bool = False) -> Any:
    """Parse JSON without duplicate keys or overlong numbers.

    Raises:
        ValueError: It is not JSON, or too large.
        RecursionError: It is nested too deeply.
    """
    values = sum(data.count(mark) for mark in (b",", b"[", b"{"))
    if values > MAX_VALUES:
        raise ValueError(f"it has about {values:,} values, and the limit is {MAX_VALUES:,}")
    constant = None if allow_nan else refuse_constant
    return json.loads(
        data.decode("utf-8"), object_pairs_hook=unique_keys, parse_constant=constant, parse_int=bounded_int
    )


def bounded_int(text: str) -> int:
    """Parse an integer of bounded length.

    Raises:
        ValueError: It has too many digits.
    """
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a whole number has {len(text):,} digits")
    return int(text)


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object without duplicate keys."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key occurs twice")
    return result


def refuse_constant(name: str) -> NoReturn:
    """Refuse NaN and the infinities, which Python reads and JSON does not have."""
    raise ValueError(f"{name} is no JSON")


@contextmanager
def damage_told(path: str | os.PathLike[str], advice: str = _RESTORE) -> Iterator[None]:
    """Turn errors of reading a damaged file into one that names it.

    Raises:
        RunFolderError: The block raised one, or an exception that a damaged file causes.
    """
    try:
        yield
    except RunFolderError:
        raise
    except DAMAGES as error:
        raise RunFolderError(f"{path} cannot be read: {described(error)}; {advice}") from error


def described(error: BaseException) -> str:
    """Short description of an error."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, MemoryError):
        return "it needs more memory than there is"
    if isinstance(error, UnicodeDecodeError):
        return f"it is not text in UTF-8 (byte {error.start:,})"
    if isinstance(error, KeyError):
        return f"there is no {printable(error, 80)}"
    if hasattr(error, "errors") and hasattr(error, "title"):
        return _first_problem(error)  # type: ignore[arg-type]
    name = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return name + printable(error, 200)


def _first_problem(error: ValidationError) -> str:
    problems = error.errors(include_url=False, include_context=False)
    first = problems[0]
    place = ".".join(map(str, first["loc"]))
    more = f" (and {len(problems) - 1:,} more)" if len(problems) > 1 else ""
    known = {"missing": "is missing", "extra_forbidden": "is nothing that belongs there"}
    what = known.get(first["type"], first["msg"].removeprefix("Value error, ").replace("Input should", "should", 1))
    given = (
        "" if first["type"] in ("missing", "extra_forbidden", "value_error") else f", not {shortened(first['input'])}"
    )
    return f"{printable(place, 120)}: {printable(what, 160)}{given}{more}" if place else f"{printable(what, 200)}{more}"


def shortened(value: Any, limit: int = 60) -> str:
    """Short representation of a value, without formatting all of a large one first."""
    return printable(_few.repr(value), limit)


_few = reprlib.Repr()
_few.maxlevel, _few.maxstring, _few.maxother = 2, 60, 60
