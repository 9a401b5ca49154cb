"""Optimizers by name."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from driftproof._optimizer_names import optimizer_name
from driftproof._unused import OPTIMIZER_DEFAULTS, refuse_unused, unused_by_optimizer
from driftproof.optim import UPGD, UPGDW, AdaptiveUPGD

OPTIMIZERS: dict[str, type[Optimizer]] = {
    "adaptive_upgd": AdaptiveUPGD,
    "upgd": UPGD,
    "upgdw": UPGDW,
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
}


def optimizer_class(optimizer: str | type[Optimizer]) -> type[Optimizer]:
    """The class of that name, in any spelling, or the class itself."""
    if isinstance(optimizer, type) and issubclass(optimizer, Optimizer):
        return optimizer
    if isinstance(optimizer, str):
        return OPTIMIZERS[optimizer_name(optimizer)]
    raise ValueError(f"Unknown optimizer {optimizer!r}; use one of {', '.join(OPTIMIZERS)}, or a class of torch.optim")


def unused_options(optimizer: str | type[Optimizer], options: Mapping[str, Any]) -> dict[str, str]:
    """Arguments of an optimizer that have no effect beside the others, each with what it needs."""
    kind = optimizer_class(optimizer)
    name = next((name for name, known in OPTIMIZERS.items() if known is kind), "")
    return unused_by_optimizer(name, options)


def check_options(optimizer: str | type[Optimizer], options: Mapping[str, Any]) -> None:
    """Refuse arguments of an optimizer that have no effect beside the others."""
    refuse_unused(options, OPTIMIZER_DEFAULTS, unused_options(optimizer, options), "optimizer_kwargs: ")


def make_optimizer(
    kind: type[Optimizer],
    parameters: Iterable[nn.Parameter],
    lr: float,
    kwargs: Mapping[str, Any],
    capturable: bool = False,
) -> Optimizer:
    """The optimizer, in its fast form where torch's own has one.

    Args:
        kind: Its class.
        parameters: What it optimizes.
        lr: Learning rate.
        kwargs: More arguments.
        capturable: Keep all state, and the learning rate, on the device, as CUDA graphs and undone steps want it.
    """
    parameters = list(parameters)
    arguments: dict[str, Any] = {**kwargs, "lr": lr}
    if capturable:
        arguments["lr"] = torch.tensor(lr, device=parameters[0].device)
        if "capturable" in inspect.signature(kind).parameters:
            arguments["capturable"] = True
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        # As Stable-Baselines3 has it for PPO.
        arguments.setdefault("eps", 1e-5)
    if kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD) and not {"foreach", "fused"} & set(arguments):
        arguments["fused"] = True
    try:
        return kind(parameters, **arguments)
    except TypeError as error:
        raise TypeError(f"optimizer_kwargs {dict(kwargs)!r} do not fit {kind.__name__}: {error}") from error
