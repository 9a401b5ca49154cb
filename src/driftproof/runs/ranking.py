"""Ranking of scores, and means over episodes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


def ranking(scores: Sequence[float | None] | npt.NDArray[np.float64], lower_is_better: bool = False) -> list[int]:
    """Indices of scores, best first; ties in the order given. ``None`` and NaN come last.

    Args:
        scores: Performances of members.
        lower_is_better: Whether the lowest score is the best.
    """
    numbers = np.array([math.nan if score is None else score for score in scores], dtype=np.float64)
    costs = np.where(np.isnan(numbers), math.inf, numbers if lower_is_better else -numbers)
    order: list[int] = np.argsort(costs, kind="stable").tolist()
    return order


def episode_mean(episodes: Iterable[Mapping[str, Any]] | None, name: str = "r") -> float | None:
    """Mean over recent episodes; ``None`` if none has ended yet.

    Args:
        episodes: An agent's ``ep_info_buffer``.
        name: ``"r"`` for their returns, ``"l"`` for their lengths.
    """
    values = [episode[name] for episode in episodes or ()]
    return float(np.mean(values)) if values else None
