"""Numbers of price files, also as web sites show them: $1,234.50, and 12.5M shares."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt

from driftproof.envs.market_data import Place

_DECORATED = re.compile(r"\s*(?P<sign>-?)[$€£¥]?(?P<digits>\d{1,3}(?:,\d{3})+|\d+)(?P<rest>\.\d*)?(?P<unit>[KMB]?)\s*")
_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9}


def read_numbers(name: str, cells: Any, place: Place, which: Any = slice(None)) -> npt.NDArray[np.float64]:
    """A column as numbers.

    Args:
        name: Name of the column, for messages.
        cells: Texts, or an array of numbers.
        place: Where the cells came from.
        which: The rows that are wanted.

    Raises:
        MarketDataError: A cell is no number.
    """
    if isinstance(cells, np.ndarray):
        numbers: npt.NDArray[np.float64] = cells[which].astype(np.float64)
        return numbers
    if not isinstance(which, slice):
        cells = [cells[i] for i in which]
    try:
        return np.array(list(map(float, cells)))
    except ValueError:
        return np.array([_decorated(name, cell, place, i) for i, cell in enumerate(cells)])


def _decorated(name: str, cell: str, place: Place, i: int) -> float:
    """A number that may have a currency sign, thousands separators and a unit."""
    try:
        return float(cell)
    except ValueError as error:
        if (match := _DECORATED.fullmatch(cell)) is not None:
            digits = match["sign"] + match["digits"].replace(",", "") + (match["rest"] or "")
            return float(digits) * _UNITS[match["unit"]]
        what = f"{cell!r} is not a number" if cell.strip() else "is empty"
        raise place.error(i, f"{name} {what}") from error
