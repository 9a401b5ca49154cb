"""Schemas of random generators' states.

Some generators accept invalid states and later read out of bounds, such as NumPy's Mersenne Twister with a position out
of range; others draw NaN from then on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from driftproof.state._codec import Path
from driftproof.state._errors import CheckpointError
from driftproof.state.schema import Rule, count, fail, number, numbers, one_of, optional, row, table

_UINT32, _UINT64, _UINT128 = (2**bits - 1 for bits in (32, 64, 128))
_CPU_BYTES = 5056
"""Size of the state of torch's CPU generator."""

_BUFFERED = {"has_uint32": count(0, 1), "uinteger": count(0, _UINT32)}
_GAUSS = {"has_gauss": count(0, 1), "gauss": number()}


def _odd(value: Any, path: Path) -> None:
    count(0, _UINT128)(value, path)
    if value % 2 == 0:
        fail(path, value, "odd")


_PCG64 = {"state": table({"state": count(0, _UINT128), "inc": _odd}), **_BUFFERED}
_FIELDS: dict[str, dict[str, Rule]] = {
    "MT19937": {"state": table({"key": numbers((624,), [np.uint32]), "pos": count(0, 624)})},
    "PCG64": _PCG64,
    "PCG64DXSM": _PCG64,
    "Philox": {
        "state": table({"counter": numbers((4,), [np.uint64]), "key": numbers((2,), [np.uint64])}),
        "buffer": numbers((4,), [np.uint64]),
        "buffer_pos": count(0, 4),
        **_BUFFERED,
    },
    "SFC64": {"state": table({"state": numbers((4,), [np.uint64])}), **_BUFFERED},
}


def numpy_generator(kind: str | None = None) -> Rule:
    """State of one of NumPy's bit generators.

    Args:
        kind: Name of the bit generator; ``None``: any of NumPy's own.
    """
    if kind is not None and kind not in _FIELDS:
        return _named(kind)

    def rule(value: Any, path: Path) -> None:
        if not isinstance(value, dict):
            fail(path, value, "a dict")
        named: Any = value.get("bit_generator")
        one_of(*([kind] if kind else _FIELDS))(named, (*path, "bit_generator"))
        # The Mersenne Twister's state has a cached Gaussian if it is of a RandomState.
        cached = _GAUSS if "has_gauss" in value or "gauss" in value else {}
        table({"bit_generator": one_of(*_FIELDS), **_FIELDS[named], **cached})(value, path)

    return rule


def _named(kind: str) -> Rule:
    """State of a custom bit generator, of which only the name can be checked."""

    def rule(value: Any, path: Path) -> None:
        if not isinstance(value, dict):
            fail(path, value, "a dict")
        one_of(kind)(value.get("bit_generator"), (*path, "bit_generator"))

    return rule


def python_generator(value: Any, path: Path) -> None:
    """State of ``random.getstate()`` with its words as an array: version, 624 words and a position, cached Gaussian."""
    row(count(3, 3), numbers((625,), [np.uint32]), optional(number()))(value, path)
    if value[1][624] > 624:
        fail((*path, 1, 624), int(value[1][624]), "a position <= 624")


def torch_generator(device: torch.device) -> Rule:
    """State of torch's generator of a device; a new generator must accept it and return it unchanged."""

    def rule(value: Any, path: Path) -> None:
        numbers((None,), [torch.uint8], tensors_only=True)(value, path)
        given = value.detach().cpu()
        generator = torch.Generator(device)
        if given.shape != generator.get_state().shape:
            fail(path, value, f"{len(generator.get_state())} bytes, the state of a generator on {device.type}")
        try:
            generator.set_state(given)
        except RuntimeError as error:
            raise CheckpointError(f"Invalid {'/'.join(map(str, path))}: {error}") from error
        if not torch.equal(generator.get_state(), given) or not _caches_are_finite(given):
            fail(path, value, "a possible state of a generator")

    return rule


def _caches_are_finite(state: Tensor) -> bool:
    """Whether the cached normal samples in the C struct of a CPU generator's state are finite."""
    if len(state) != _CPU_BYTES:
        return True
    doubles, single = state[5016:5040].clone().view(torch.float64), state[5048:5052].clone().view(torch.float32)
    return bool(doubles.isfinite().all() and single.isfinite().all())


def check_generators_within(tree: Any, path: Path) -> None:
    """Check every state of a NumPy generator anywhere in a tree, such as those of environments."""
    if isinstance(tree, dict):
        if "bit_generator" in tree and isinstance(tree["bit_generator"], str) and tree["bit_generator"] in _FIELDS:
            numpy_generator()(tree, path)
            return
        for key, part in tree.items():
            check_generators_within(part, (*path, key))
    elif isinstance(tree, list | tuple):
        for i, part in enumerate(tree):
            check_generators_within(part, (*path, i))
