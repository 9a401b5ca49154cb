"""Recognises run folders that this user created, by a code of their configurations made with this user's key."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from driftproof._files import DAMAGES, parse_json, read_bytes
from driftproof.runs import OWNER

_KEY_BYTES = 32
_LARGEST_MARK = 2**14


@dataclass(frozen=True)
class Owned:
    """A configuration that this user wrote.

    Attributes:
        home: Folder where the run was started, if modules that it names are there.
    """

    home: str | None


def mark(folder: Path, configurations: Iterable[bytes], home: str | None = None) -> None:
    """Mark a run's configuration as written by this user; nothing is written without a key.

    Args:
        folder: Run folder.
        configurations: Content of its configuration file. If it is about to change, the old and the new content, so
            that either is recognised after a crash.
        home: Folder of modules that it names, if they are not installed.
    """
    from driftproof.state import write_atomically

    if (key := _key(create=True)) is not None:
        codes = [_code(key, content, home) for content in configurations]
        content = json.dumps({"codes": codes, "home": home}).encode()
        write_atomically(folder / OWNER, [content], follow_links=False)


def owned(folder: Path, configuration: bytes) -> Owned | None:
    """The mark of a configuration that this user wrote; ``None`` if it is from elsewhere, or was changed since.

    Args:
        folder: Folder of the configuration.
        configuration: Content of the file.
    """
    try:
        content = parse_json(read_bytes(folder / OWNER, _LARGEST_MARK))
        codes, home = content["codes"], content["home"]
        is_valid = isinstance(codes, list) and (home is None or isinstance(home, str))
    except (OSError, *DAMAGES):
        return None
    if not is_valid or (key := _key(create=False)) is None:
        return None
    expected = _code(key, configuration, home)
    given = [code for code in codes if isinstance(code, str) and code.isascii()]
    return Owned(home) if any(hmac.compare_digest(code, expected) for code in given) else None


def _code(key: bytes, configuration: bytes, home: str | None) -> str:
    message = json.dumps(["driftproof run", hashlib.sha256(configuration).hexdigest(), home])
    return hmac.new(key, message.encode(), hashlib.sha256).hexdigest()


def _key(create: bool) -> bytes | None:
    """This user's key; ``None`` if there is none, or others may have read or written it."""
    try:
        path = _key_path()
        if create and not path.exists():
            _create_key(path)
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            key = file.read(_KEY_BYTES + 1)
    except (OSError, RuntimeError):  # RuntimeError: there is no home directory
        return None
    is_private = not hasattr(os, "getuid") or (
        status.st_uid == os.getuid() and not stat.S_IMODE(status.st_mode) & (stat.S_IRWXG | stat.S_IRWXO)
    )
    return key if is_private and len(key) == _KEY_BYTES else None


def _key_path() -> Path:
    base = os.environ.get("XDG_STATE_HOME", "")
    # The XDG specification requires to ignore relative paths.
    folder = Path(base) if os.path.isabs(base) else Path.home() / ".local" / "state"
    return folder / "driftproof" / "owner.key"


def _create_key(path: Path) -> None:
    """Write a new key, unless another process does so at the same time."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()
