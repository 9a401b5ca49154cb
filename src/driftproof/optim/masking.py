"""Masked step of any optimizer: a flag on the device decides whether it is taken, without waiting for the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from driftproof.optim._optimizer import UPGDBase


@torch.no_grad()
def step_where(optimizer: Optimizer, proceed: Tensor) -> None:
    """Take the optimizer's step if a flag is true; otherwise parameters and state stay exactly the same.

    The optimizers of this package and the fused ones of torch mask the step themselves. Others take it, and
    their parameters and state are restored from copies if the flag is false.

    Args:
        optimizer: Any optimizer that has state already: new state is zero where the step is not taken.
        proceed: A 0-dim bool tensor.
    """
    if isinstance(optimizer, UPGDBase) or getattr(optimizer, "_step_supports_amp_scaling", False):
        # torch.amp.GradScaler sets it for a step that overflowed.
        masked: Any = optimizer
        masked.grad_scale, masked.found_inf = None, (~proceed).float()
        try:
            optimizer.step()
        finally:
            del masked.grad_scale, masked.found_inf
        return
    before = {id(tensor): (tensor, tensor.clone()) for tensor in _tensors(optimizer)}
    optimizer.step()
    for tensor in _tensors(optimizer):
        _, old = before.get(id(tensor), (tensor, torch.zeros_like(tensor)))
        tensor.copy_(torch.where(proceed, tensor, old))


def _tensors(optimizer: Optimizer) -> list[Tensor]:
    """Everything that a step changes."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [*params, *(t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor))]
