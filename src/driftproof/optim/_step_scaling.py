"""Shrinking an optimizer's steps from outside, through its hooks."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


class StepScaling:
    """Turns the step of the attached optimizer from ``p_new`` into ``p_old + factor * (p_new - p_old)``.

    A copy of it is attached to nothing: hooks belong to an optimizer, and copies of optimizers come without them.
    """

    def __init__(self) -> None:
        self._optimizer: weakref.ref[Optimizer] | None = None
        self._handles: list[RemovableHandle] = []
        self._armed: tuple[list[Tensor], Tensor] | None = None
        self._old_values: dict[int, Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]

    @property
    def attached(self) -> bool:
        """Whether there is an optimizer whose steps can be scaled."""
        return self._optimizer is not None and self._optimizer() is not None

    def attach(self, optimizer: Optimizer) -> None:
        """Scale the steps of ``optimizer``, and of no other."""
        self.detach()
        self._optimizer = weakref.ref(optimizer)
        self._handles = [
            optimizer.register_step_pre_hook(lambda *_: self._remember()),
            optimizer.register_step_post_hook(lambda *_: self._shrink()),
        ]

    def detach(self) -> None:
        """Leave the attached optimizer, if any, alone."""
        for handle in self._handles:
            handle.remove()
        self.__init__()  # type: ignore[misc]

    def arm(self, params: list[Tensor], factor: Tensor) -> None:
        """Have the next step, and only that, scaled by a factor (0-dim) for these parameters."""
        self._armed = (params, factor)

    @torch.no_grad()
    def _remember(self) -> None:
        if self._armed is None:
            return
        params, _ = self._armed
        for param in params:
            old = self._old_values.get(id(param))
            if old is None or old.shape != param.shape or old.device != param.device:
                self._old_values[id(param)] = torch.empty_like(param)
        torch._foreach_copy_([self._old_values[id(param)] for param in params], params)

    @torch.no_grad()
    def _shrink(self) -> None:
        if self._armed is None:
            return
        params, factor = self._armed
        self._armed = None
        for param in params:
            torch.lerp(self._old_values[id(param)], param, factor.to(param.device, param.dtype), out=param)
