"""States of the variance gradient scaler in an earlier format."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

_AVERAGES = ("grad_mean_ema", "grad_var_ema", "grad_norm_ema", "grad_max_ema")

EARLIER_STATE = (
    "the state is of an earlier version, without averages for each tensor: norm, variance and largest magnitude of the "
    "whole gradient are kept, the scaling factor begins anew, with its warm-up"
)


def is_earlier_state(state_dict: Mapping[str, Any]) -> bool:
    """Whether a state has ``step_count`` and numbers such as ``grad_norm_ema``, and nothing for each tensor."""
    return "step_count" in state_dict and not {"statistic", "keys"} & set(state_dict)


def with_earlier_averages(initial: dict[str, Any], earlier: Mapping[str, Any]) -> dict[str, Any]:
    """An initial state with the averages over the whole gradient that both formats have.

    Args:
        initial: The state of a new scaler.
        earlier: Has ``grad_norm_ema``, ``grad_var_ema``, ``grad_mean_ema`` and perhaps ``grad_max_ema``, each a number,
            or ``None`` before the first step. The rest is ignored.

    Raises:
        ValueError: A value is not a finite number.
    """
    mean, variance, norm, largest = (_number(name, earlier.get(name)) for name in _AVERAGES)
    state = dict(initial)
    if norm is not None and variance is not None:
        # Weight, norm and mean square; a weight of 1 is that of an average over many steps.
        state["norms"] = initial["norms"].new_tensor([1.0, norm, variance + (mean or 0.0) ** 2])
    if largest is not None:
        state["largest"] = initial["largest"].new_tensor([1.0, largest])
    return state


def _number(name: str, value: Any) -> float | None:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(value, bool | str) or not abs(number) < 1e18 or (number < 0 and name != "grad_mean_ema"):
        raise ValueError(f"Invalid {name}: must be a finite number, or None")
    return number
