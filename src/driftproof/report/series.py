"""Numbers over time: what several agents did at the same steps, in as few points as a picture needs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[np.float64]

POINTS = 2_000
"""Of one line, at most."""
_KEPT = 5
"""Of one stretch of a line: its ends, its extremes, and a gap."""


def column(rows: Sequence[Mapping[str, float]], name: str) -> tuple[Array, Array]:
    """Steps at which a metric was logged, and its values; NaN where they were no numbers."""
    found = [(row["step"], row[name]) for row in rows if name in row]
    table = np.array(found, dtype=np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def together(lives: Sequence[Sequence[Mapping[str, float]]], name: str) -> tuple[Array, Array]:
    """All steps at which anybody logged a metric, and everybody's values then ``[lives, steps]``.

    Between two steps of its own, a life's value is interpolated; before its first and after its last, it is NaN.
    """
    columns = [column(rows, name) for rows in lives]
    steps = np.unique(np.concatenate([steps for steps, _ in columns])) if columns else np.empty(0)
    values = np.full((len(columns), len(steps)), math.nan)
    for row, (own_steps, own_values) in zip(values, columns, strict=True):
        if len(own_steps):
            inside = (steps >= own_steps[0]) & (steps <= own_steps[-1])
            row[inside] = np.interp(steps[inside], own_steps, own_values)
    return steps, values


def spread(values: Array) -> tuple[Array, Array, Array]:
    """The middle 80 % of lives at every step, and their median: quantiles 0.1, 0.5 and 0.9 of what is finite."""
    finite = np.where(np.isfinite(values), values, math.nan)
    known = np.isfinite(finite).any(0)
    result = np.full((3, values.shape[1]), math.nan)
    result[:, known] = np.nanquantile(finite[:, known], (0.1, 0.5, 0.9), axis=0)
    return result[0], result[1], result[2]


def thin(x: Array, y: Array, limit: int = POINTS) -> tuple[Array, Array]:
    """Fewer points of the same line, with every peak, every dip and every gap still in it.

    The line is cut into stretches of as many points. Each keeps its first and last point, its lowest and its highest,
    and one that is not finite if there is any.
    """
    if len(x) <= limit:
        return x, y
    keep: set[int] = set()
    for stretch in np.array_split(np.arange(len(x)), max(limit // _KEPT, 1)):
        keep |= {int(stretch[0]), int(stretch[-1])}
        finite = stretch[np.isfinite(y[stretch])]
        if len(finite):
            keep |= {int(finite[np.argmin(y[finite])]), int(finite[np.argmax(y[finite])])}
        if len(finite) < len(stretch):
            keep.add(int(stretch[~np.isfinite(y[stretch])][0]))
    indices = sorted(keep)
    return x[indices], y[indices]


def plain(values: npt.ArrayLike) -> list[Any]:
    """Numbers as JSON has them, fractions to seven digits; ``None`` where they are not finite. Nested as they were."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim > 1:
        return [plain(row) for row in array]
    return [_short(float(x)) if math.isfinite(x) else None for x in array]


def _short(x: float) -> float | int:
    return int(x) if x.is_integer() and abs(x) < 2**53 else float(f"{x:.7g}")


def phases(rows: Sequence[Mapping[str, float]]) -> list[tuple[float, float]]:
    """Steps at which the world entered another phase of its drift, and which, beginning with the first known."""
    result: list[tuple[float, float]] = []
    for step, phase in zip(*column(rows, "drift/phase"), strict=True):
        if math.isfinite(phase) and (not result or phase != result[-1][1]):
            result.append((float(step), float(phase)))
    return result
