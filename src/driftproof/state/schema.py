"""Validation of a component's state before it is loaded.

A rule is a function of a value and its path in the tree that raises :class:`CheckpointError`. Rules are composed::

    rule = table({"mean": numbers((4,)), "count": number(at_least=0), "best": optional(number())})
    check("normalizer", state, rule)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

import numpy as np
import torch
from torch import Tensor

from driftproof.state._codec import Path, render, shortened
from driftproof.state._errors import CheckpointError

Rule: TypeAlias = Callable[[Any, Path], None]

LARGEST_COUNT = 2**53
"""Doubles count exactly up to here."""
_LARGEST_FLOAT32 = torch.finfo(torch.float32).max


def check(name: str, state: Any, rule: Rule) -> None:
    """Check the state of a component.

    Raises:
        CheckpointError: The state is invalid; the message says where, and what is expected.
    """
    rule(state, (name,))


def fail(path: Path, value: Any, expected: str) -> NoReturn:
    """Raise the error of an invalid value."""
    raise CheckpointError(f"Invalid {render(path)}: {shown(value)}; must be {expected}")


def shown(value: Any) -> str:
    """A short description of a value."""
    if isinstance(value, Tensor | np.ndarray):
        kind = "a tensor" if isinstance(value, Tensor) else "an array"
        return f"{kind} of shape {_shape(tuple(value.shape))} and {value.dtype}"
    if value is None or isinstance(value, bool | int | float | str | dict | list | np.number | np.bool_):
        return shortened(value)
    return f"a {type(value).__name__}"


def _shape(shape: tuple[int, ...]) -> str:
    return str(shape) if len(shape) <= 8 else f"of {len(shape)} dimensions"


def number(
    *,
    at_least: float = -math.inf,
    above: float = -math.inf,
    below: float = math.inf,
    at_most: float = math.inf,
    finite: bool = True,
) -> Rule:
    """A number that is not a bool, within bounds; NaN and infinities only with ``finite=False``."""
    signs = {">=": at_least, ">": above, "<=": at_most, "<": below}
    bounds = " and ".join(f"{sign} {bound:g}" for sign, bound in signs.items() if math.isfinite(bound))
    expected = f"a {'finite ' if finite else ''}number {bounds}".rstrip()

    def rule(value: Any, path: Path) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
            fail(path, value, expected)
        try:
            given = float(value)
        except OverflowError:
            fail(path, value, expected)
        if not finite and not math.isfinite(given):
            return
        if not (math.isfinite(given) and at_least <= given <= at_most and above < given < below):
            fail(path, value, expected)

    return rule


def scalar(**bounds: float) -> Rule:
    """A number within float32's range, or a tensor or an array of one such number."""
    given = {"at_least": -_LARGEST_FLOAT32, "at_most": _LARGEST_FLOAT32, **bounds}
    inner = number(**given)  # type: ignore[arg-type]

    def rule(value: Any, path: Path) -> None:
        if isinstance(value, Tensor | np.ndarray):
            if math.prod(value.shape) != 1 or not _is_numeric(value):
                fail(path, value, "one number")
            value = value.item()
        inner(value, path)

    return rule


def scalars(members: int | None, **bounds: float) -> Rule:
    """:func:`scalar` for a single agent, or a tensor or an array with a number per member."""
    one = scalar(**bounds)
    if members is None:
        return one
    shape = numbers((members,), finite=False)

    def rule(value: Any, path: Path) -> None:
        shape(value, path)
        for i, each in enumerate(value.tolist()):
            one(each, (*path, i))

    return rule


def count(at_least: int = 0, at_most: int = LARGEST_COUNT) -> Rule:
    """A whole number that is not a bool."""

    def rule(value: Any, path: Path) -> None:
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or not at_least <= value <= at_most:
            fail(path, value, f"a whole number >= {at_least} and <= {at_most}")

    return rule


def flag(value: Any, path: Path) -> None:
    """True or False."""
    if not isinstance(value, bool | np.bool_):
        fail(path, value, "True or False")


def text(value: Any, path: Path) -> None:
    """A str."""
    if not isinstance(value, str):
        fail(path, value, "text")


def anything(value: Any, path: Path) -> None:
    """Any value that a tree may hold."""


def one_of(*options: str) -> Rule:
    """One of these texts."""

    def rule(value: Any, path: Path) -> None:
        if not isinstance(value, str) or value not in options:
            fail(path, value, f"one of {', '.join(map(repr, options))}" if options[1:] else repr(options[0]))

    return rule


def optional(inner: Rule) -> Rule:
    """None, or a value that satisfies the rule."""

    def rule(value: Any, path: Path) -> None:
        if value is not None:
            inner(value, path)

    return rule


def numbers(
    shape: Sequence[int | None] | None = None,
    dtypes: Sequence[torch.dtype | np.dtype[Any] | type] | None = None,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    finite: bool = True,
    tensors_only: bool = False,
) -> Rule:
    """A tensor or an array.

    Args:
        shape: ``None`` for a dimension of any length, or for any shape.
        dtypes: The allowed ones, of torch or NumPy; ``None``: floating-point numbers.
        at_least: The least number; NaN is not compared.
        at_most: The largest number.
        finite: Whether NaN and infinities are refused; otherwise NaN is allowed, and infinities are not.
        tensors_only: Whether NumPy's arrays are refused.
    """
    allowed = None if dtypes is None else {_name(dtype) for dtype in dtypes}

    def rule(value: Any, path: Path) -> None:
        if not isinstance(value, Tensor | np.ndarray) or (tensors_only and not isinstance(value, Tensor)):
            fail(path, value, "a tensor" if tensors_only else "a tensor or an array")
        if shape is not None and not _has_shape(value, shape):
            fail(path, value, f"of shape {_shape(tuple(shape))}")  # type: ignore[arg-type]
        if not (_is_floating(value) if allowed is None else _name(value.dtype) in allowed):
            fail(path, value, "of floating-point numbers" if allowed is None else f"of {', '.join(sorted(allowed))}")
        _check_values(torch.as_tensor(value), path, at_least, at_most, finite)

    return rule


def _check_values(values: Tensor, path: Path, at_least: float | None, at_most: float | None, finite: bool) -> None:
    if values.numel() == 0:
        return
    if values.is_floating_point() or values.is_complex():
        wrong = ~values.isfinite() if finite else values.isinf()
        if wrong.any():
            raise CheckpointError(f"Invalid {render(path)}: {int(wrong.sum())} of its numbers are not finite")
    if at_least is not None and (values < at_least).any():
        raise CheckpointError(f"Invalid {render(path)}: it has numbers below {at_least:g}")
    if at_most is not None and (values > at_most).any():
        raise CheckpointError(f"Invalid {render(path)}: it has numbers above {at_most:g}")


def table(required: Mapping[Any, Rule], optional_keys: Mapping[Any, Rule] | None = None) -> Rule:
    """A dict with the required keys, possibly the optional ones, and no others."""
    rules = {**required, **(optional_keys or {})}

    def rule(value: Any, path: Path) -> None:
        if not isinstance(value, dict):
            fail(path, value, "a dict")
        for problem, keys in (
            ("lacks", required.keys() - value.keys()),
            ("has unknown", value.keys() - rules.keys()),
        ):
            if keys:
                listed = ", ".join(sorted(shortened(key) for key in keys)[:5])
                raise CheckpointError(f"the state of {render(path)} {problem} {listed}")
        for key, item in value.items():
            rules[key](item, (*path, key))

    return rule


def mapping(item: Rule, key: Rule = text) -> Rule:
    """A dict whose keys and values satisfy the rules."""

    def rule(value: Any, path: Path) -> None:
        if not isinstance(value, dict):
            fail(path, value, "a dict")
        for name, content in value.items():
            key(name, path)
            item(content, (*path, name))

    return rule


def items(item: Rule, length: int | None = None) -> Rule:
    """A list or tuple whose values satisfy the rule."""

    def rule(value: Any, path: Path) -> None:
        if not isinstance(value, list | tuple):
            fail(path, value, "a list")
        if length is not None and len(value) != length:
            raise CheckpointError(f"Invalid {render(path)}: it has {len(value)} entries; must have {length}")
        for i, content in enumerate(value):
            item(content, (*path, i))

    return rule


def row(*entries: Rule) -> Rule:
    """A list or tuple with one value for each of the rules."""
    shape = items(anything, len(entries))

    def rule(value: Any, path: Path) -> None:
        shape(value, path)
        for i, entry in enumerate(entries):
            entry(value[i], (*path, i))

    return rule


def like(example: Any) -> Rule:
    """A value like the example: the same keys, types, lengths, shapes and dtypes, with other finite numbers."""
    if isinstance(example, dict):
        return table({key: like(item) for key, item in example.items()})
    if isinstance(example, list | tuple):
        return row(*map(like, example))
    if isinstance(example, Tensor | np.ndarray):
        return numbers(tuple(example.shape), [example.dtype])
    if isinstance(example, bool | np.bool_):
        return flag
    if isinstance(example, int | np.integer):
        return count(-LARGEST_COUNT)
    if isinstance(example, float | np.floating):
        return number()
    return text if isinstance(example, str) else anything


def _has_shape(value: Any, shape: Sequence[int | None]) -> bool:
    return len(value.shape) == len(shape) and all(
        want is None or have == want for have, want in zip(value.shape, shape, strict=True)
    )


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else np.dtype(dtype).name


def _is_floating(value: Any) -> bool:
    return value.is_floating_point() if isinstance(value, Tensor) else value.dtype.kind == "f"


def _is_numeric(value: Any) -> bool:
    return not value.is_complex() if isinstance(value, Tensor) else value.dtype.kind in "fiub"
