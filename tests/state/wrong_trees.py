"""Trees that are nearly right: a real one with something wrong at one place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

Path = tuple[Any, ...]

MISSING = object()


def nested(depth: int) -> list[Any]:
    result: list[Any] = []
    for _ in range(depth):
        result = [result]
    return result


PLAIN: list[Any] = [
    *(None, "x", "\x1b[31m\u202e\ud800", b"x", True, -1, 0.5, 2**40, 2**70, 2**200, 10**400),
    *(float("nan"), float("inf"), -float("inf"), 1e308, np.float64("nan"), [], {}, (), [1], {"a": 1}),
    *(
        nested(5),
        nested(100),
        torch.zeros(3, 5, 7),
        torch.tensor(float("nan")),
        torch.tensor([1 + 1j]),
        np.ones((2, 9)),
    ),
    *(np.array(["a", "b"]), object()),
]
"""What hardly any leaf may be."""


def places(tree: Any, path: Path = ()) -> Iterator[Path]:
    """Every place in a tree, leaves and what holds them."""
    if path:
        yield path
    if isinstance(tree, dict):
        for key, item in tree.items():
            yield from places(item, (*path, key))
    elif isinstance(tree, list | tuple):
        for i, item in enumerate(tree):
            yield from places(item, (*path, i))


def at(tree: Any, path: Path) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def replaced(tree: Any, path: Path, value: Any) -> Any:
    """The tree with another value at a place, or nothing if it is ``MISSING``. The rest is shared."""
    if not path:
        return value
    key, rest = path[0], path[1:]
    if isinstance(tree, dict):
        result = dict(tree)
        if not rest and value is MISSING:
            del result[key]
        else:
            result[key] = replaced(result[key], rest, value) if key in result else value
        return result
    items = list(tree)
    if not rest and value is MISSING:
        del items[key]
    else:
        items[key] = replaced(items[key], rest, value)
    return type(tree)(items)


def wrong_values(value: Any) -> list[Any]:
    """What could stand there instead of a value: most of it is wrong."""
    if isinstance(value, dict):
        return [MISSING, {**value, "unknown": 1}, {**value, 7: None}, dict(list(value.items())[1:]), *PLAIN[:16]]
    if isinstance(value, list | tuple):
        return [MISSING, [*value, 1], (*value, None), list(value)[1:], dict(enumerate(value)), *PLAIN]
    if isinstance(value, torch.Tensor):
        return [MISSING, *_wrong_tensors(value), *PLAIN]
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return [MISSING, *(tensor.numpy() for tensor in _wrong_tensors(torch.tensor(value))), *PLAIN]
    return [MISSING, *PLAIN]


def _wrong_tensors(value: torch.Tensor) -> list[torch.Tensor]:
    result = [value[None], torch.zeros(0), value.cfloat(), value.bool(), value.to(torch.int16), value.double()]
    if value.ndim == 2 and value.shape[0] != value.shape[1]:
        result.append(value.T.contiguous())
    if value.numel() > 1:
        result.append(value.flatten()[1:].clone())
    if value.is_floating_point():
        result += [torch.full_like(value, x) for x in (float("nan"), float("inf"), -float("inf"), -1.0)]
    else:
        result.append(torch.full_like(value, 127 if value.dtype != torch.bool else 1))
    return result
