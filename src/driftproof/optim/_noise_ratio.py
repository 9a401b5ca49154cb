"""A warning where variance gradient scaling shrinks a direction, but not the noise on it."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from driftproof.optim._optimizer import UPGDBase
    from driftproof.optim.vgs import VarianceGradientScaler

MESSAGE = (
    "variance gradient scaling shrinks the gradient, which is UPGD's direction, but not noise of a fixed sigma: at a "
    "factor of 1/4, the ratio of noise to direction is four times what sigma says. Set adaptive_noise=True, or "
    'apply_to="update" in the scaler, or sigma=0'
)

_scalers: Any = WeakIdKeyDictionary()
"""Parameters whose gradients are scaled, each with a reference to its scaler."""


def register(params: Iterable[Tensor], scaler: VarianceGradientScaler) -> None:
    """Note that a scaler follows these parameters."""
    reference = weakref.ref(scaler)
    for param in params:
        _scalers[param] = reference


def warn_once(optimizer: UPGDBase, params: Iterable[Tensor], stacklevel: int) -> None:
    """Warn, at most once for an optimizer, if gradients of these parameters are scaled and the noise is not."""
    if optimizer.moment_keys is not None or optimizer._warned_of_noise:
        return  # Adam-like directions do not shrink with the gradient.
    if not any(group["sigma"] > 0 and not group["adaptive_noise"] for group in optimizer.param_groups):
        return
    for param in params:
        scaler = reference() if (reference := _scalers.get(param)) is not None else None
        if scaler is not None and scaler.enabled and scaler.apply_to == "gradient":
            optimizer._warned_of_noise = True
            warnings.warn(MESSAGE, UserWarning, stacklevel=stacklevel + 1)
            return
