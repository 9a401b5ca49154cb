"""Checks of arguments, with messages that name the argument and its value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any


class ArgumentError(ValueError, AssertionError):
    """An invalid argument. Also an ``AssertionError``, which Stable-Baselines3 raises for many and its users catch.

    Attributes:
        name: Name of the argument, where it is known.
    """

    def __init__(self, message: str, name: str = "") -> None:
        super().__init__(message)
        self.name = name


def check_number(
    name: str,
    value: Any,
    *,
    at_least: float = -math.inf,
    above: float = -math.inf,
    below: float = math.inf,
    at_most: float = math.inf,
) -> None:
    """Raise an :class:`ArgumentError` unless ``value`` is a finite number within the bounds."""
    if _is_number(value, Real) and _is_finite(value) and at_least <= value <= at_most and above < value < below:
        return
    signs = {">=": at_least, ">": above, "<=": at_most, "<": below}
    bounds = " and ".join(f"{sign} {bound:g}" for sign, bound in signs.items() if math.isfinite(bound))
    raise ArgumentError(f"Invalid {name}: {value!r}; must be a finite number {bounds}", name)


def check_count(name: str, value: Any, *, at_least: int = 0, at_most: int | None = None) -> None:
    """Raise an :class:`ArgumentError` unless ``value`` is a whole number within the bounds."""
    if _is_number(value, Integral) and at_least <= value and (at_most is None or value <= at_most):
        return
    bounds = f">= {at_least}" if at_most is None else f">= {at_least} and <= {at_most}"
    raise ArgumentError(f"Invalid {name}: {value!r}; must be a whole number {bounds}", name)


def check_flag(name: str, value: object) -> None:
    """Raise an :class:`ArgumentError` unless ``value`` is a bool."""
    if not isinstance(value, bool):
        raise ArgumentError(f"Invalid {name}: {value!r}; must be True or False", name)


def check_option(name: str, value: object, options: Sequence[str]) -> None:
    """Raise an :class:`ArgumentError` unless ``value`` is one of ``options``."""
    if value not in options:
        raise ArgumentError(f"Invalid {name}: {value!r}; must be one of {', '.join(map(repr, options))}", name)


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # An int that is larger than any float.
        return False


def _is_number(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)
