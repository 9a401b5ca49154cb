"""Spaces of observations and actions as plain values, and back, once it is known that they take little memory."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from driftproof.state import CheckpointError
from driftproof.state.schema import Rule, anything, count, fail, items, number, one_of, row, table, text

_MOST_NUMBERS = 2**22
"""Largest size of an observation as networks see it, all parts together; a file with more is refused."""
_MOST_DIMENSIONS = 32
_DTYPES = (
    *("float16", "float32", "float64", "bool"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
)
_INT64 = 2**63 - 1


def encode_space(space: spaces.Space[Any]) -> dict[str, Any]:
    """A space as plain values."""
    if isinstance(space, spaces.Box):
        bounds = {"low": _encode_bound(space.low), "high": _encode_bound(space.high)}
        return {"kind": "Box", **bounds, "shape": list(space.shape), "dtype": str(space.dtype)}
    if isinstance(space, spaces.Discrete):
        return {"kind": "Discrete", "n": int(space.n), "start": int(space.start)}
    if isinstance(space, spaces.MultiDiscrete):
        return {"kind": "MultiDiscrete", "nvec": space.nvec.tolist(), "start": space.start.tolist()}
    if isinstance(space, spaces.MultiBinary):
        return {"kind": "MultiBinary", "n": list(space.shape)}
    assert isinstance(space, spaces.Dict)
    return {"kind": "Dict", "spaces": [[key, encode_space(part)] for key, part in space.items()]}


def decode_space(value: Any) -> spaces.Space[Any]:
    """The space from the result of :func:`encode_space`.

    Raises:
        CheckpointError: They are not of a space, or the space is too large; nothing has been allocated for it.
    """
    if _numbers(value, ("space",)) > _MOST_NUMBERS:
        raise CheckpointError(f"the space has too many numbers, more than {_MOST_NUMBERS:,}")
    return _decoded(value)


def _numbers(value: Any, path: tuple[Any, ...]) -> int:
    """Size of a space as networks see it, with categories one-hot; checks it too."""
    table({"kind": one_of(*_RULES)}, dict.fromkeys(value, anything) if isinstance(value, dict) else None)(value, path)
    kind = value["kind"]
    table({"kind": text, **_RULES[kind]})(value, path)
    if kind == "Dict":
        keys = [key for key, _ in value["spaces"]]
        if len(set(keys)) != len(keys):
            raise CheckpointError("the space has a duplicate key")
        return sum(_numbers(part, (*path, key)) for key, part in value["spaces"])
    if kind == "Discrete":
        return int(value["n"])
    if kind == "MultiDiscrete":
        return sum(_flat(value["nvec"]))
    total: int = math.prod(value["shape" if kind == "Box" else "n"])
    for name in ("low", "high") if kind == "Box" else ():
        if isinstance(value[name], list) and len(value[name]) != total:
            raise CheckpointError(f"the space has {len(value[name])} bounds {name} for {total} numbers")
    return total


def _category_counts(value: Any, path: tuple[Any, ...]) -> None:
    _nested(count(1, _MOST_NUMBERS), value, path)


def _starts(value: Any, path: tuple[Any, ...]) -> None:
    _nested(count(-_INT64, _INT64), value, path)


def _nested(rule: Rule, value: Any, path: tuple[Any, ...]) -> None:
    """Check nested lists of equal lengths, with ``rule`` for the innermost numbers."""
    items(anything)(value, path)
    for i, item in enumerate(value):
        if isinstance(item, list):
            _nested(rule, item, (*path, i))
        else:
            rule(item, (*path, i))
    if len({len(item) if isinstance(item, list) else -1 for item in value}) != 1:
        fail(path, value, "a list of numbers, or of lists of equal lengths")


def _flat(nested: Any) -> list[int]:
    return [n for item in nested for n in _flat(item)] if isinstance(nested, list) else [nested]


def _shape(value: Any, path: tuple[Any, ...]) -> None:
    items(count(0, _MOST_NUMBERS))(value, path)
    if len(value) > _MOST_DIMENSIONS:
        fail(path, value, f"of at most {_MOST_DIMENSIONS} dimensions")


def _sizes(value: Any, path: tuple[Any, ...]) -> None:
    _shape(value, path)
    items(count(1))(value, path)
    if not value:
        fail(path, value, "of at least one dimension")


def _bound(value: Any, path: tuple[Any, ...]) -> None:
    if isinstance(value, bool):
        return
    rule = number(finite=False)
    (items(_bound) if isinstance(value, list) else rule)(value, path)


_RULES: dict[str, dict[str, Rule]] = {
    "Box": {"low": _bound, "high": _bound, "shape": _shape, "dtype": one_of(*_DTYPES)},
    "Discrete": {"n": count(1), "start": count(-_INT64, _INT64)},
    "MultiDiscrete": {"nvec": _category_counts, "start": _starts},
    "MultiBinary": {"n": _sizes},
    "Dict": {"spaces": items(row(text, anything))},
}


def _decoded(value: dict[str, Any]) -> spaces.Space[Any]:
    kind = value["kind"]
    if kind == "Box":
        shape, dtype = tuple(value["shape"]), np.dtype(value["dtype"])
        low, high = (_decode_bound(value[key], shape, dtype) for key in ("low", "high"))
        return spaces.Box(low, high, shape, dtype.type)
    if kind == "Discrete":
        return spaces.Discrete(value["n"], start=value["start"])
    if kind == "MultiDiscrete":
        return spaces.MultiDiscrete(np.array(value["nvec"]), start=np.array(value["start"]))
    if kind == "MultiBinary":
        return spaces.MultiBinary(value["n"] if len(value["n"]) > 1 else value["n"][0])
    return spaces.Dict([(key, _decoded(part)) for key, part in value["spaces"]])


def _encode_bound(bound: npt.NDArray[Any]) -> Any:
    """One number if all are equal, as in images."""
    flat = bound.flatten().tolist()
    return flat[0] if flat and all(x == flat[0] for x in flat) else flat


def _decode_bound(bound: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    if not isinstance(bound, list):
        return np.full(shape, dtype.type(bound))
    return np.array([dtype.type(x) for x in bound], dtype).reshape(shape)
