"""Trees for tests: drawn at random, and one with a bit of everything."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

TENSOR_DTYPES = [
    torch.bool,
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.complex64, torch.complex128),
]
ARRAY_DTYPES = [np.dtype(code) for code in "?bBhHiIlLqQefdFD"]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Of any bit pattern, dtype, few dimensions, and layout."""
    dtype = draw(st.sampled_from(TENSOR_DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    tensor = _from_bits(draw(st.integers(0, 2**32)), math.prod(shape), dtype).reshape(shape)
    layout = draw(st.sampled_from(["plain", "transposed", "expanded", "strided"]))
    if layout == "transposed" and tensor.ndim >= 2:
        return tensor.transpose(0, 1)
    if layout == "expanded":
        return tensor.unsqueeze(0).expand(2, *tensor.shape)
    if layout == "strided" and tensor.ndim >= 1:
        return tensor[::2]
    return tensor


def _from_bits(seed: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.from_numpy(np.random.default_rng(seed).random(count) < 0.5)
    data = bytearray(np.random.default_rng(seed).bytes(count * dtype.itemsize))
    return torch.frombuffer(data, dtype=dtype) if count else torch.empty(0, dtype=dtype)


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    dtype = draw(st.sampled_from(ARRAY_DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    bits = np.random.default_rng(draw(st.integers(0, 2**32))).bytes(math.prod(shape) * dtype.itemsize)
    array = (np.frombuffer(bits, np.uint8) % 2).astype(bool) if dtype.kind == "b" else np.frombuffer(bits, dtype)
    array = array.reshape(shape)
    layout = draw(st.sampled_from(["read-only", "writable", "transposed", "reversed", "scalar"]))
    if layout == "writable":
        return array.copy()
    if layout == "transposed":
        return array.T
    if layout == "reversed" and array.ndim:
        return array[::-1]
    return array.reshape(-1)[0] if layout == "scalar" and array.size else array


plain_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(2**52, 2**130) | st.integers(-(2**130), -(2**52)),
    st.floats(),
    st.text(st.characters(), max_size=8),
    st.text(st.sampled_from("$%/'.0\ud800\x00é"), max_size=4),
    st.binary(max_size=8),
)
keys = st.one_of(
    st.text(st.characters(), max_size=6),
    st.text(st.sampled_from("$%/'.01e_-"), max_size=3),
    st.sampled_from(["__metadata__", "None", "True", "nan", "inf", "$tensor", "$dict"]),
    st.integers(-(2**63), 2**63 - 1) | st.integers(0, 3),
    st.floats(allow_nan=False),
    st.booleans(),
    st.none(),
)
trees = st.recursive(
    plain_values | tensors() | arrays(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | inner.map(lambda value: {"twice": [value, value]})
    ),
    max_leaves=12,
)


def example() -> dict[str, Any]:
    """What an agent's tree is like."""
    model = torch.nn.LSTM(3, 4)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(2, 5, 3))[0].sum().backward()
    optimizer.step()
    shared = torch.randn(3, 4)
    return {
        "policy": dict(model.state_dict()),
        "policy.optimizer": optimizer.state_dict(),
        "shared": {"first": shared, "second": shared, "transposed": shared.T, "row": shared[1]},
        "normalizer": {"mean": np.arange(3.0), "count": np.float64(17), "empty": np.zeros((0, 2), np.uint32)},
        "hyperparams": {"lr": 3e-4, "clip": (0.2, None), "target": math.inf, "on": True, "name": "vgs"},
        "random": {
            "python": random.Random(0).getstate(),
            "numpy": np.random.default_rng(0).bit_generator.state,
            "torch": torch.get_rng_state(),
        },
        "rollout": {"state": {"hidden": torch.zeros(1, 2, 4)}, "starts": np.array([True, False]), "env": b"\x00\xff"},
    }
