"""Splits a state tree into tensors by path and a JSON-compatible rest, and joins them again.

In the rest, JSON's own types are stored directly. Others are objects with a key that starts with ``$``: ``{"$tensor":
path}``, ``{"$array": path}``, ``{"$scalar": path}``, ``{"$bytes": path}``, ``{"$tuple": [...]}``, ``{"$int": "0x…"}``,
``{"$float": "nan"}``, and ``{"$dict": [[key, value], …]}`` for dicts whose keys are not all plain strings.

Paths are tuples of keys, and rendered only when needed, so that long keys in a hostile file cost no time.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

Path = tuple[Any, ...]

MAX_DEPTH = 64
"""Limit of nesting, which a tree that contains itself exceeds."""
MAX_REFERENCES = 50_000
"""Limit of references to tensors in a file: each becomes an object that is much larger than its text."""

ALLOWED = (
    "dicts with keys str, int, bool, float or None, lists, tuples, tensors, NumPy arrays and scalars of numbers, "
    "None, bool, int, float, str and bytes"
)

TENSOR_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.complex64: "C64",
}
"""dtypes of safetensors, with their names there. complex128 is stored as pairs of float64."""

_ARRAY_DTYPES = {np.dtype(code) for code in "?bBhHiIlLqQefdFD"}  # in the machine's byte order
_JSON_INTEGERS = 2**53  # other readers of JSON round larger ones
_ESCAPED = re.compile("[%/\x00-\x1f\x7f\ud800-\udfff]")


def component(key: Any) -> str:
    """A key as part of a path; unique within a dict, whatever the types of its keys."""
    return _text(key) if type(key) is str else repr(key)


@functools.lru_cache(2**12)
def _text(key: str) -> str:
    escaped = _ESCAPED.sub(lambda match: f"%{ord(match[0]):02X}", key)
    return f"'{escaped}" if _needs_quote(key) else escaped


def _needs_quote(key: str) -> bool:
    """Whether a key could be mistaken for a number, None, a quoted key, or the metadata of safetensors."""
    if key in ("", "None", "True", "False", "__metadata__") or key[0] == "'":
        return True
    try:
        float(key)
    except ValueError:
        return False
    return True


def render(path: Path) -> str:
    return "/".join(map(component, path))


def place(path: Path) -> str:
    """A path as shown in messages."""
    return shortened(render(path), 200) if path else "the root of the tree"


def check_depth(depth: int, path: Path) -> None:
    if depth > MAX_DEPTH:
        raise ValueError(f"{place(path)} is nested deeper than {MAX_DEPTH} levels; does the tree contain itself?")


def check_key(key: Any, path: Path) -> None:
    """Raise unless ``key`` may be a key of a dict in a tree."""
    if key is not None and type(key) not in (str, int, bool, float):
        raise TypeError(f"{place(path)} has a key of type {_name(key)}; keys may be str, int, bool, float or None")
    if type(key) is float and math.isnan(key):
        raise TypeError(f"{place(path)} has the key nan, which does not equal itself")
    if type(key) is int and not -(2**63) <= key < 2**63:
        raise TypeError(f"{place(path)} has an int key of more than 64 bits")


def kind_of(value: Any, path: Path) -> str:
    """Kind of a value in a tree: ``"dict"``, ``"list"``, ``"tuple"`` or the kind of a leaf.

    Raises:
        TypeError: A tree cannot hold the value.
    """
    exact = _KINDS.get(type(value))
    if exact is not None:
        return exact
    if isinstance(value, Tensor):
        _check_tensor(value, path)
        return "tensor"
    if type(value) is np.ndarray or isinstance(value, np.generic):
        if value.dtype not in _ARRAY_DTYPES:
            raise TypeError(f"{place(path)} is a NumPy {_name(value)} of dtype {value.dtype}; allowed are {ALLOWED}")
        return "array" if type(value) is np.ndarray else "scalar"
    if isinstance(value, dict):
        return "dict"
    raise TypeError(f"{place(path)} is of type {_name(value)}; allowed are {ALLOWED}")


_KINDS: dict[type, str] = {
    type(None): "None",
    **{kind: kind.__name__ for kind in (bool, int, float, str, bytes, dict, list, tuple)},
}
PLAIN = _KINDS.keys() - {dict, list, tuple}
"""Types of leaves that cannot change."""


def _check_tensor(tensor: Tensor, path: Path) -> None:
    if is_lazy(tensor):
        raise TypeError(f"{place(path)} is a parameter without a shape yet: run the model once before taking its state")
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.device.type == "meta":
        raise TypeError(
            f"{place(path)} is a sparse, nested, quantized or meta tensor; allowed are dense ones with data"
        )
    if tensor.dtype not in TENSOR_DTYPES and tensor.dtype != torch.complex128:
        raise TypeError(f"{place(path)} is a tensor of {tensor.dtype}, which the file format does not have")


def _name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def memory_key(value: Tensor | np.ndarray[Any, Any]) -> tuple[Any, ...] | None:
    """A key that is equal for tensors, or arrays, that are the same view of the same memory; None if empty."""
    if isinstance(value, Tensor):
        if value.numel() == 0:
            return None
        conjugate = value.is_conj(), value.is_neg()
        return "tensor", value.device, value.data_ptr(), value.shape, value.stride(), value.dtype, conjugate
    if value.size == 0:
        return None
    return "array", value.ctypes.data, value.shape, value.strides, value.dtype


def copy_to_tensor(value: np.ndarray[Any, Any] | np.generic) -> Tensor:
    # View by code: torch does not know NumPy's alias dtypes such as longlong.
    return torch.from_numpy(np.array(value, order="C").view(value.dtype.str))


def flatten(tree: Any) -> tuple[dict[str, Tensor], Any]:
    """The tensors of a tree by path, and the rest, with references to them.

    Tensors stay on their devices and share their memory with the tree; arrays are copied. Tensors that are the same
    view of the same memory appear once.

    Raises:
        TypeError: Something in the tree is neither a tensor nor a plain value.
        ValueError: There are too many tensors.
    """
    encoder = _Encoder()
    plain = encoder.encode(tree, (), 0)
    return encoder.tensors, plain


def unflatten(tensors: Mapping[str, Tensor], plain: Any) -> Any:
    """Inverse of :func:`flatten`. Tensors that shared memory share it again.

    Raises:
        ValueError: The two do not belong together, or ``plain`` is not an output of :func:`flatten`.
    """
    decoder = _Decoder(tensors)
    tree = decoder.decode(plain, (), 0)
    if unused := sorted(tensors.keys() - decoder.used):
        raise ValueError(f"{len(unused)} tensors have no place in the tree: {', '.join(map(repr, unused[:5]))}")
    return tree


class _Encoder:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._references = 0
        self._paths: dict[tuple[Any, ...], str] = {}

    def encode(self, value: Any, path: Path, depth: int) -> Any:
        check_depth(depth, path)
        kind = kind_of(value, path)
        if kind == "dict":
            return self._dict(value, path, depth)
        if kind in ("list", "tuple"):
            items = [self.encode(item, (*path, i), depth + 1) for i, item in enumerate(value)]
            return items if kind == "list" else {"$tuple": items}
        if kind in ("tensor", "array", "scalar", "bytes"):
            self._references += 1
            if self._references > MAX_REFERENCES:
                raise ValueError(f"the tree has more than {MAX_REFERENCES:,} tensors: put many numbers into one array")
        if kind in ("tensor", "array"):
            return self._shared(kind, value, path)
        if kind == "scalar":
            return self._store(kind, copy_to_tensor(value), render(path))
        if kind == "bytes":
            return self._store(kind, copy_to_tensor(np.frombuffer(value, np.uint8)), render(path))
        return _encode_plain(value)

    def _dict(self, value: dict[Any, Any], path: Path, depth: int) -> Any:
        pairs = []
        for key, item in value.items():
            check_key(key, path)
            pairs.append((key, self.encode(item, (*path, key), depth + 1)))
        if all(type(key) is str and not key.startswith("$") for key, _ in pairs):
            return dict(pairs)
        return {"$dict": [[_encode_plain(key), item] for key, item in pairs]}

    def _shared(self, kind: str, value: Any, path: Path) -> Any:
        key, name = memory_key(value), render(path)
        if key is not None and self._paths.setdefault(key, name) is not name:
            return _reference(kind, self._paths[key], value)
        return self._store(kind, value.detach() if kind == "tensor" else copy_to_tensor(value), name)

    def _store(self, kind: str, tensor: Tensor, name: str) -> Any:
        reference = _reference(kind, name, tensor)
        self.tensors[name] = torch.view_as_real(tensor.resolve_conj()) if tensor.dtype == torch.complex128 else tensor
        return reference


def _reference(kind: str, path: str, value: Any) -> dict[str, str]:
    wide = value.dtype in (torch.complex128, np.complex128)
    return {f"${kind}": path, **({"dtype": "complex128"} if wide else {})}


def _encode_plain(value: Any) -> Any:
    if type(value) is int and abs(value) >= _JSON_INTEGERS:
        return {"$int": hex(value)}
    if type(value) is float and not math.isfinite(value):
        return {"$float": repr(value)}
    return value


class _Decoder:
    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.used: set[str] = set()
        self._references = 0
        self._tensors = tensors
        self._built: dict[tuple[str, str, bool], Any] = {}
        self._tags: dict[str, Callable[[Any, Path, int], Any]] = {
            "$tuple": self._tuple,
            "$dict": self._dict,
            "$int": self._int,
            "$float": self._float,
        }

    def decode(self, plain: Any, path: Path, depth: int) -> Any:
        check_depth(depth, path)
        kind = type(plain)
        if plain is None or kind in (bool, str):
            return plain
        if (kind is int and abs(plain) < _JSON_INTEGERS) or (kind is float and math.isfinite(plain)):
            return plain
        if kind is list:
            return [self.decode(item, (*path, i), depth + 1) for i, item in enumerate(plain)]
        if kind is not dict:
            raise ValueError(f"{place(path)} is not a plain value: {shortened(plain)}")
        if not all(type(key) is str for key in plain):
            raise ValueError(f"{place(path)} has keys that are not strings")
        tags = [key for key in plain if key.startswith("$")]
        if not tags:
            return {key: self.decode(item, (*path, key), depth + 1) for key, item in plain.items()}
        return self._tagged(tags[0], plain, path, depth)

    def _tagged(self, tag: str, plain: dict[str, Any], path: Path, depth: int) -> Any:
        if tag in _REFERENCES:
            return self._referenced(tag, plain, path)
        if tag not in self._tags:
            raise ValueError(f"{place(path)} has the unknown tag {shortened(tag)}")
        if len(plain) != 1:
            raise ValueError(f"{place(path)} has more than the tag {tag}: {shortened(plain)}")
        return self._tags[tag](plain[tag], path, depth)

    def _tuple(self, items: Any, path: Path, depth: int) -> tuple[Any, ...]:
        if type(items) is not list:
            raise ValueError(f"{place(path)} is a tuple without a list of items: {shortened(items)}")
        return tuple(self.decode(items, path, depth))

    def _dict(self, pairs: Any, path: Path, depth: int) -> dict[Any, Any]:
        if type(pairs) is not list or not all(type(pair) is list and len(pair) == 2 for pair in pairs):
            raise ValueError(f"{place(path)} is a dict without a list of pairs: {shortened(pairs)}")
        result = {}
        for encoded, item in pairs:
            key = self.decode(encoded, path, depth + 1)
            try:
                check_key(key, path)
            except TypeError as error:
                raise ValueError(str(error)) from error
            if key in result:
                raise ValueError(f"{place(path)} has the key {shortened(key)} twice")
            result[key] = self.decode(item, (*path, key), depth + 1)
        return result

    def _int(self, text: Any, path: Path, depth: int) -> int:
        if type(text) is not str or not re.fullmatch("-?0x[0-9a-f]+", text):
            raise ValueError(f"{place(path)} is not an int: {shortened(text)}")
        return int(text, 16)

    def _float(self, text: Any, path: Path, depth: int) -> float:
        if text not in ("nan", "inf", "-inf"):
            raise ValueError(f"{place(path)} is not a float: {shortened(text)}")
        return float(text)

    def _referenced(self, tag: str, plain: dict[str, Any], path: Path) -> Any:
        self._references += 1
        if self._references > MAX_REFERENCES:
            raise ValueError(f"more than {MAX_REFERENCES:,} references to tensors")
        name, wide = plain[tag], plain.get("dtype") == "complex128"
        if type(name) is not str or len(plain) != 1 + wide:
            raise ValueError(f"{place(path)} is not a reference: {shortened(plain)}")
        if name not in self._tensors:
            raise ValueError(f"{place(path)} refers to {shortened(name)}, but there is no such tensor")
        self.used.add(name)
        if (tag, name, wide) not in self._built:
            tensor = self._tensors[name]
            if wide:
                if tensor.dtype != torch.float64 or tensor.ndim == 0 or tensor.shape[-1] != 2:
                    raise ValueError(f"{place(path)} is complex128, but {shortened(name)} has no pairs of float64")
                tensor = torch.view_as_complex(tensor.contiguous())
            self._built[tag, name, wide] = _REFERENCES[tag](tensor, path)
        return self._built[tag, name, wide]


def _as_tensor(tensor: Tensor, path: Path) -> Tensor:
    return tensor


def _as_array(tensor: Tensor, path: Path) -> np.ndarray[Any, Any]:
    try:
        return tensor.cpu().numpy()
    except TypeError as error:
        raise ValueError(f"{place(path)} is an array, but NumPy has no {tensor.dtype}") from error


def _as_scalar(tensor: Tensor, path: Path) -> Any:
    if tensor.ndim != 0:
        raise ValueError(f"{place(path)} is a scalar of shape {tuple(tensor.shape)}")
    return _as_array(tensor, path)[()]


def _as_bytes(tensor: Tensor, path: Path) -> bytes:
    if tensor.ndim != 1 or tensor.dtype != torch.uint8:
        raise ValueError(f"{place(path)} is bytes of shape {tuple(tensor.shape)} and {tensor.dtype}")
    return _as_array(tensor, path).tobytes()


_REFERENCES: dict[str, Callable[[Tensor, Path], Any]] = {
    "$tensor": _as_tensor,
    "$array": _as_array,
    "$scalar": _as_scalar,
    "$bytes": _as_bytes,
}


def shortened(value: Any, length: int = 60) -> str:
    """A short representation of a value, without rendering a large one in full."""
    if isinstance(value, str):
        return repr(value if len(value) <= length else value[: length - 3] + "...")
    if isinstance(value, dict | list):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, int) and abs(value) >= 10**20:
        return "a large int"
    return repr(value)
