"""The state tree: nested dicts, lists and tuples of tensors, arrays and plain values, and operations on it."""

from __future__ import annotations

import difflib
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from driftproof.state._codec import (
    PLAIN,
    Path,
    check_depth,
    check_key,
    component,
    copy_to_tensor,
    flatten,
    kind_of,
    memory_key,
    render,
    unflatten,
)

__all__ = [
    "Difference",
    "Leaf",
    "Stateful",
    "compare",
    "copy_tree",
    "describe",
    "flatten",
    "merge",
    "select",
    "to_device",
    "unflatten",
    "without",
]


class Stateful(Protocol):
    """An object whose state consists of tensors and plain values."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


def copy_tree(tree: Any) -> Any:
    """A deep copy. Tensors stay on their devices; tensors that shared memory share it in the copy."""
    return _map(tree, lambda tensor: tensor.detach().clone(), lambda array: array.copy())


def to_device(tree: Any, device: torch.device | str) -> Any:
    """The tree with its tensors on ``device``; arrays, and tensors already on it, are not copied."""
    return _map(tree, lambda tensor: tensor.to(device), lambda array: array)


def _map(tree: Any, on_tensor: Callable[[Tensor], Tensor], on_array: Callable[[Any], Any]) -> Any:
    """The tree with new containers and mapped leaves; tensors that share memory are mapped once."""
    mapped: dict[tuple[Any, ...], Any] = {}

    def visit(value: Any, path: Path, depth: int) -> Any:
        check_depth(depth, path)
        kind = kind_of(value, path)
        if kind == "dict":
            for key in value:
                check_key(key, path)
            # Plain values without a visit: states of many members are mostly that.
            return {k: v if type(v) in PLAIN else visit(v, (*path, k), depth + 1) for k, v in value.items()}
        if kind in ("list", "tuple"):
            items = [visit(item, (*path, i), depth + 1) for i, item in enumerate(value)]
            return items if kind == "list" else tuple(items)
        if kind not in ("tensor", "array"):
            return value
        convert = on_tensor if kind == "tensor" else on_array
        key = memory_key(value)
        if key is None:
            return convert(value)
        if key not in mapped:
            mapped[key] = convert(value)
        return mapped[key]

    return visit(tree, (), 0)


def select(tree: Mapping[Any, Any], names: Iterable[str]) -> dict[Any, Any]:
    """A tree with only the named parts, at their places.

    Args:
        tree: The state tree; leaves are not copied.
        names: Keys, or paths of keys through dicts with ``/`` or ``.`` between them: ``"rollout/state"``. A name that
            is itself a key (``"policy.optimizer"``) means that key.

    Raises:
        KeyError: There is no such part; the message lists similar names.
    """
    result: dict[Any, Any] = {}
    for keys in [_find(tree, name) for name in names]:
        part: Any = tree
        for key in keys:
            part = part[key]
        for key in reversed(keys):
            part = {key: part}
        result = merge(result, part)
    return result


def without(tree: Mapping[Any, Any], names: Iterable[str], missing_ok: bool = False) -> dict[Any, Any]:
    """The tree without the named parts; names are as in :func:`select`.

    Raises:
        KeyError: There is no such part, and ``missing_ok`` is not set; the message lists similar names.
    """
    result = dict(tree)
    for keys in [_find(tree, name) for name in names if not missing_ok or _matches(tree, name) is not None]:
        inner: dict[Any, Any] | None = result
        for key in keys[:-1]:
            if inner is None or key not in inner:  # removed by another name
                inner = None
                break
            inner[key] = dict(inner[key])
            inner = inner[key]
        if inner is not None:
            inner.pop(keys[-1], None)
    return result


def _find(tree: Any, name: str) -> list[Any]:
    """The keys that lead to the part with this name."""
    found = _matches(tree, name)
    if found is None:
        known = list(_places(tree, ()))
        near = difflib.get_close_matches(name, known, n=5, cutoff=0.5) or sorted(map(component, tree))
        raise KeyError(f"the tree has no {name!r}; it has {', '.join(near) or 'nothing'}")
    return found


def _matches(tree: Any, name: str) -> list[Any] | None:
    if not isinstance(tree, dict):
        return None
    parts = {component(key): key for key in tree}
    if name in parts:
        return [parts[name]]
    for part in sorted(parts, key=len, reverse=True):
        if name.startswith((f"{part}/", f"{part}.")):
            rest = _matches(tree[parts[part]], name[len(part) + 1 :])
            if rest is not None:
                return [parts[part], *rest]
    return None


def _places(tree: Any, path: Path) -> Iterator[str]:
    """Names of parts, down to the third level."""
    if path:
        yield render(path)
    if isinstance(tree, dict) and len(path) < 3:
        for key, item in tree.items():
            yield from _places(item, (*path, key))


def merge(base: Mapping[Any, Any], over: Mapping[Any, Any]) -> dict[Any, Any]:
    """A new tree with the parts of both; values of ``over`` win. Leaves are not copied."""
    merged = dict(base)
    for key, value in over.items():
        mine = merged.get(key)
        if isinstance(mine, dict) and isinstance(value, dict):
            merged[key] = merge(mine, value)
        else:
            merged[key] = merge({}, value) if isinstance(value, dict) else value
    return merged


@dataclass(frozen=True)
class Difference:
    """One difference between two trees."""

    path: str
    kind: Literal["missing", "type", "shape", "dtype", "value"]
    detail: str
    max_abs: float | None = None
    """Largest absolute difference of numbers; NaN if one of the two is NaN."""

    def __str__(self) -> str:
        return f"{self.path or 'the root of the tree'}: {self.detail}"


def compare(a: Any, b: Any) -> list[Difference]:
    """Differences between two trees; empty if they are equal bit for bit.

    NaN equals NaN, 0.0 does not equal -0.0, the order of keys and the devices of tensors do not count.
    """
    return list(_differences(a, b, (), 0))


def _differences(a: Any, b: Any, path: Path, depth: int) -> Iterator[Difference]:
    check_depth(depth, path)
    kind, other = kind_of(a, path), kind_of(b, path)
    if kind != other:
        yield Difference(render(path), "type", f"{kind} and {other}")
    elif kind == "dict":
        yield from _differences_of_dicts(a, b, path, depth)
    elif kind in ("list", "tuple"):
        if len(a) != len(b):
            yield Difference(render(path), "shape", f"{kind}s of {len(a)} and {len(b)} items")
        for i, (left, right) in enumerate(zip(a, b, strict=False)):
            yield from _differences(left, right, (*path, i), depth + 1)
    elif kind in ("tensor", "array", "scalar"):
        yield from _differences_of_tensors(a, b, path)
    elif kind == "float":
        if struct.pack("d", a) != struct.pack("d", b) and not (a != a and b != b):
            yield Difference(render(path), "value", f"{a!r} and {b!r}", abs(a - b))
    elif a != b:
        yield Difference(
            render(path), "value", f"{_short(a)} and {_short(b)}", _distance(a, b) if kind == "int" else None
        )


def _differences_of_dicts(a: dict[Any, Any], b: dict[Any, Any], path: Path, depth: int) -> Iterator[Difference]:
    # By component: True and 1 are the same key in a dict, but not in a file.
    left, right = ({component(key): (key, item) for key, item in tree.items()} for tree in (a, b))
    for part, (key, item) in {**right, **left}.items():
        inner = (*path, key)
        if part not in right:
            yield Difference(render(inner), "missing", "only in the first tree")
        elif part not in left:
            yield Difference(render(inner), "missing", "only in the second tree")
        else:
            yield from _differences(item, right[part][1], inner, depth + 1)


def _differences_of_tensors(a: Any, b: Any, path: Path) -> Iterator[Difference]:
    if a.dtype != b.dtype:
        yield Difference(render(path), "dtype", f"{a.dtype} and {b.dtype}")
    elif a.shape != b.shape:
        yield Difference(render(path), "shape", f"shapes {tuple(a.shape)} and {tuple(b.shape)}")
    else:
        left, right = _elements(a), _elements(b)
        unequal = (left.view(_INTEGERS[left.itemsize]) != right.view(_INTEGERS[right.itemsize])).nonzero()[:, 0]
        left, right = left.double()[unequal], right.double()[unequal]  # float8 and uint64 have few operations
        different = ~(left.isnan() & right.isnan())
        if different.any():
            largest = (left - right)[different].abs().max().item()
            count = int(different.sum())
            yield Difference(render(path), "value", f"{count} numbers differ by up to {largest:g}", largest)


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _elements(value: Any) -> Tensor:
    """The numbers as a vector on the CPU, complex ones as two each."""
    tensor = value.detach().cpu() if isinstance(value, Tensor) else copy_to_tensor(value)
    tensor = tensor.resolve_conj().resolve_neg().reshape(-1)
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)


def _distance(a: int, b: int) -> float:
    try:
        return float(abs(a - b))
    except OverflowError:
        return float("inf")


def _short(value: Any) -> str:
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an int of {value.bit_length()} bits"
    text = repr(value[:60] if isinstance(value, str | bytes) else value)
    return text if len(text) <= 80 else text[:77] + "..."


@dataclass(frozen=True)
class Leaf:
    """One tensor or plain value of a tree."""

    path: str
    kind: str
    """``tensor``, ``array``, ``scalar``, ``None``, ``bool``, ``int``, ``float``, ``str`` or ``bytes``."""
    dtype: str | None
    shape: tuple[int, ...] | None
    bytes: int
    """Size in bytes; 0 if an earlier leaf shares the memory."""
    same_as: str | None = None
    """Path of the earlier leaf with the same memory."""


def describe(tree: Any) -> list[Leaf]:
    """Every leaf of a tree, in its order."""
    return list(_leaves(tree, (), 0, {}))


def _leaves(value: Any, path: Path, depth: int, seen: dict[tuple[Any, ...], str]) -> Iterator[Leaf]:
    check_depth(depth, path)
    kind, name = kind_of(value, path), render(path)
    if kind == "dict":
        for key, item in value.items():
            yield from _leaves(item, (*path, key), depth + 1, seen)
    elif kind in ("list", "tuple"):
        for i, item in enumerate(value):
            yield from _leaves(item, (*path, i), depth + 1, seen)
    elif kind in ("tensor", "array", "scalar"):
        memory = None if kind == "scalar" else memory_key(value)
        first = name if memory is None else seen.setdefault(memory, name)
        dtype = str(value.dtype).removeprefix("torch.")
        if first == name:
            yield Leaf(name, kind, dtype, tuple(value.shape), value.nbytes)
        else:
            yield Leaf(name, kind, dtype, tuple(value.shape), 0, same_as=first)
    else:
        yield Leaf(name, kind, None, None, _size(value))


def _size(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    if value is None or isinstance(value, bool):
        return 1
    return max(8, (value.bit_length() + 7) // 8) if isinstance(value, int) else 8
