"""Run folders that somebody has damaged or forged, and commands that are given them."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import json
import os
import random
import shutil
import sys
import threading
import traceback
import warnings
from pathlib import Path

import yaml

from driftproof.cli.app import main

ESCAPES = "\x1b[31m\x07\x00\u202e\ud800\x9b2J\u2028"
"""Colours, a bell, a NUL, text from right to left, half a character, and line breaks that are none."""
DIGITS, DEPTH, INFINITE, NOT_A_NUMBER = object(), object(), object(), object()
_RAW = {DIGITS: "9" * 5000, DEPTH: "[" * 50_000 + "]" * 50_000, INFINITE: "1e999", NOT_A_NUMBER: "NaN"}
"""Values that are written as text: no JSON library makes them."""
WILD = (
    *(None, True, -1, 0, 3, 10**15, 10**30, 0.5, -1e308, "", "x", f"x{ESCAPES}", "y" * 30_000, "../../x", [], {}),
    *([1, 2], {"x": 1}, ["x"] * 50, DIGITS, DEPTH, INFINITE, NOT_A_NUMBER),
)
TEXTS = (
    *(b"", b"\0", b"\xff\xfe\0\0", b"{}", b"[]", b"null", b"3", b'"x"', b"{", b"[" * 100_000, b"a: [1", b"- 1"),
    *(b"9" * 5000, b'{"version": 2}', b'{"version": 99}', b'{"a": 1, "a": 2}', b'{"a": NaN}', b"\n" * 1000),
    *(ESCAPES.encode("utf-8", "surrogatepass"), json.dumps({ESCAPES: ESCAPES}).encode(), b"PK\x03\x04" + b"\0" * 100),
    b"a: &a [x, x]\n" + b"".join(b"%c: &%c [%s]\n" % (i, i, b"*%c, " % (i - 1) * 9) for i in range(98, 110)),
)
LONGEST_LINE = 600


def command(*arguments):
    """Exit code and output of a command in this process, and the traceback that a user would have seen."""
    hook, argv, handlers = threading.excepthook, sys.argv, sys.stdin
    sys.argv = ["driftproof", *map(str, arguments)]
    out, err, code, trace = io.StringIO(), io.StringIO(), 0, ""
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        trace = traceback.format_exc()
    finally:
        threading.excepthook, sys.argv, sys.stdin = hook, argv, handlers
    return code, out.getvalue(), err.getvalue(), trace


def problem(folder, *arguments):
    """What is wrong with how a command ends, given a folder that may be damaged; ``None`` if nothing is."""
    before = content(folder)
    code, output, errors, trace = command(*arguments)
    if trace:
        return f"a traceback:\n{trace[-1500:]}"
    if code not in (0, 1, 2):
        return f"exit code {code}"
    for line in (output + errors).split("\n"):
        if len(line) > LONGEST_LINE:
            return f"a line of {len(line)} characters: {line[:200]!r}"
        if not line.isprintable():
            return f"control characters: {line[:200]!r}"
    if code == 1:
        told = [line for line in errors.splitlines() if not line.startswith("driftproof: warning: ")]
        is_damaged_file = arguments[0] == "inspect" and "DAMAGED" in output
        if not is_damaged_file and not (told and all(line.startswith("driftproof: ") for line in told)):
            return f"no clear line: {errors!r}"
        if content(folder) != before:
            changed = {name for name, _ in before.items() ^ content(folder).items()}
            return f"it failed ({errors!r}) and the folder has changed: {sorted(changed)[:5]}"
    return None


def content(folder):
    """Everything in a folder, by name."""
    found = {}
    for path in sorted(Path(folder).rglob("*")):
        name = os.fsencode(path.relative_to(folder))
        if path.is_symlink():
            found[name] = f"link to {os.readlink(path)}"
        elif path.is_file():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            found[name] = f"mode {path.lstat().st_mode:o}"
    return found


def leaves(value, path=()):
    """Places of all values in plain data, also of those that hold others."""
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from leaves(value[key], (*path, key))
    elif isinstance(value, list):
        for index in range(len(value)):
            yield from leaves(value[index], (*path, index))


def changed(value, path, new):
    """Plain data with another value at one place."""
    if not path:
        return new
    value = copy.deepcopy(value)
    inner = value
    for part in path[:-1]:
        inner = inner[part]
    inner[path[-1]] = new
    return value


def as_json(value, path, new):
    """JSON of plain data with another value at one place, also one that only text can hold."""
    raw = _RAW[new] if type(new) is object else None
    text = json.dumps(changed(value, path, "<here>" if raw is not None else new))
    return text if raw is None else text.replace('"<here>"', raw)


def wild_leaves(path):
    """All changes of one value in a file, as a description and the new content."""
    text = path.read_text()
    plain = yaml.safe_load(text) if path.suffix == ".yaml" else json.loads(text)
    for place in leaves(plain):
        for new in WILD:
            shown = _RAW[new][:6] + "…" if type(new) is object else repr(new)[:60]
            yield f"{path.name} {place} = {shown}", as_json(plain, place, new)
    if isinstance(plain, dict):
        for key in plain:
            yield f"{path.name} without {key}", json.dumps({k: v for k, v in plain.items() if k != key})
        yield f"{path.name} with {ESCAPES!r}", json.dumps({**plain, f"{ESCAPES}{'z' * 5000}": 1})


def sample(items, count, seed=0):
    """Some of many, always the same."""
    items = list(items)
    return random.Random(seed).sample(items, min(count, len(items)))


class Copies:
    """Fresh copies of a folder to damage, one at a time."""

    def __init__(self, original, place):
        self.original, self.path = original, place / original.name

    def fresh(self):
        if self.path.is_symlink() or self.path.exists():
            shutil.rmtree(self.path)
        shutil.copytree(self.original, self.path, symlinks=True)
        return self.path
