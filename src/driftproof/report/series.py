"""Time series of metrics: interpolation, quantiles over agents, and thinning."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[np.float64]

POINTS = 2_000
"""Largest number of points of a line."""
_KEPT = 5
"""Of one stretch of a line: its ends, its extremes, and a gap."""


class Life:
    """Logged metrics of one agent, or of a population.

    Args:
        rows: Rows in the order of steps, each with a ``"step"`` and metrics.
    """

    def __init__(self, rows: Sequence[Mapping[str, float]]) -> None:
        found: dict[str, tuple[array[float], array[float]]] = {}
        for row in rows:
            step = row["step"]
            for name, value in row.items():
                if name not in found:
                    found[name] = array("d"), array("d")
                steps, values = found[name]
                steps.append(step)
                values.append(value)
        self.steps = [int(step) for step in found.pop("step", (array("d"), array("d")))[0]]
        self._columns = {name: (np.array(x), np.array(y)) for name, (x, y) in found.items()}

    @property
    def metrics(self) -> set[str]:
        return set(self._columns)

    @property
    def end(self) -> int:
        """The last step."""
        return self.steps[-1]

    def column(self, name: str) -> tuple[Array, Array]:
        """Steps at which a metric was logged, and its values."""
        return self._columns.get(name, (np.empty(0), np.empty(0)))

    def last(self, name: str) -> float:
        """The last finite value of a metric; NaN if there is none."""
        _, values = self.column(name)
        finite = values[np.isfinite(values)]
        return float(finite[-1]) if len(finite) else math.nan

    def phases(self) -> list[tuple[float, float]]:
        """Steps at which the drift entered another phase, and the phases."""
        steps, values = self.column("drift/phase")
        steps, values = steps[np.isfinite(values)], values[np.isfinite(values)]
        begins = np.concatenate([np.ones(min(len(values), 1), bool), values[1:] != values[:-1]])
        return list(zip(steps[begins].tolist(), values[begins].tolist(), strict=True))


def together(lives: Sequence[Life], name: str) -> tuple[Array, Array]:
    """All steps at which any agent logged a metric, and all agents' values ``[lives, steps]``.

    Values between an agent's own steps are interpolated; before its first and after its last step, they are NaN.
    """
    columns = [life.column(name) for life in lives]
    steps = np.unique(np.concatenate([steps for steps, _ in columns])) if columns else np.empty(0)
    values = np.full((len(columns), len(steps)), math.nan)
    for row, (own_steps, own_values) in zip(values, columns, strict=True):
        if len(own_steps):
            inside = (steps >= own_steps[0]) & (steps <= own_steps[-1])
            row[inside] = np.interp(steps[inside], own_steps, own_values)
    return steps, values


def spread(values: Array) -> tuple[Array, Array, Array]:
    """Quantiles 0.1, 0.5 and 0.9 over agents at every step, of finite values."""
    # Like numpy.nanquantile, which would call a Python function for every step.
    ordered = np.sort(np.where(np.isfinite(values), values, math.nan), axis=0)
    last = np.maximum(np.isfinite(ordered).sum(0) - 1, 0)
    columns = np.arange(values.shape[1])

    def quantile(level: float) -> Array:
        place = level * last
        below = place.astype(int)
        low, high = ordered[below, columns], ordered[np.minimum(below + 1, last), columns]
        between: Array = low + (place - below) * (high - low)
        return between

    return quantile(0.1), quantile(0.5), quantile(0.9)


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
    """Numbers for JSON, with seven digits; ``None`` where they are not finite. The nesting stays."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim > 1:
        return [plain(row) for row in array]
    return [_short(float(x)) if math.isfinite(x) else None for x in array]


def _short(x: float) -> float | int:
    return int(x) if x.is_integer() and abs(x) < 2**53 else float(f"{x:.7g}")
