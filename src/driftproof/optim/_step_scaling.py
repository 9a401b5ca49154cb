"""Shrinking the steps of optimizers from outside, through their hooks."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


class StepScaling:
    """Turns the steps of the attached optimizers from ``p_new`` into ``p_old + factor * (p_new - p_old)``.

    A copy of it is attached to nothing: hooks belong to an optimizer, and copies of optimizers come without them.
    """

    def __init__(self) -> None:
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._handles: list[RemovableHandle] = []
        self._factor: Tensor | None = None
        self._due: dict[int, Tensor] = {}
        """Parameters whose next step is to be scaled, by id."""
        self._old_values: dict[int, Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]

    @property
    def attached(self) -> bool:
        """Whether there is an optimizer whose steps can be scaled."""
        return any(optimizer() is not None for optimizer in self._optimizers)

    @property
    def is_due(self) -> bool:
        """Whether a step was announced that no attached optimizer has taken."""
        return bool(self._due)

    def attach(self, *optimizers: Optimizer) -> None:
        """Scale the steps of these optimizers, and of no others."""
        self.detach()
        for optimizer in optimizers:
            self._optimizers.append(weakref.ref(optimizer))
            self._handles += [
                optimizer.register_step_pre_hook(lambda optimizer, *_: self._remember(optimizer)),
                optimizer.register_step_post_hook(lambda optimizer, *_: self._shrink(optimizer)),
            ]

    def detach(self) -> None:
        """Remove the hooks from all optimizers."""
        for handle in self._handles:
            handle.remove()
        self.__init__()  # type: ignore[misc]

    def announce(self, params: list[Tensor], factor: Tensor) -> None:
        """Scale the next step of these parameters, and only that, by a factor (0-dim)."""
        self._due = {id(param): param for param in params}
        self._factor = factor

    def cancel(self) -> None:
        """Cancel announced scaling."""
        self._due = {}

    @torch.no_grad()
    def _remember(self, optimizer: Optimizer) -> None:
        # All parameters and not only announced ones: a closure may announce during the step.
        params = _parameters(optimizer)
        for param in params:
            old = self._old_values.get(id(param))
            if old is None or old.shape != param.shape or old.device != param.device or old.dtype != param.dtype:
                self._old_values[id(param)] = torch.empty_like(param)
        torch._foreach_copy_([self._old_values[id(param)] for param in params], params)

    @torch.no_grad()
    def _shrink(self, optimizer: Optimizer) -> None:
        for param in _parameters(optimizer):
            if self._due.pop(id(param), None) is not None and self._factor is not None:
                old = self._old_values[id(param)]
                torch.lerp(old, param, self._factor.to(param.device, param.dtype), out=param)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]
