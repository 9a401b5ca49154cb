"""Optimizers by name."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from driftproof._arguments import ArgumentError
from driftproof._registry import OPTIMIZERS
from driftproof.settings.optimizers import DEFAULT_OPTIMIZER, DEFAULTS, unused_by_optimizer
from driftproof.settings.unused import refuse_unused


def optimizer_in_policy_kwargs(
    policy_kwargs: Mapping[str, Any], optimizer: str | type[Optimizer], options: Mapping[str, Any]
) -> tuple[dict[str, Any], str | type[Optimizer], dict[str, Any]]:
    """Take the optimizer from ``policy_kwargs``, where Stable-Baselines3 has it.

    Args:
        policy_kwargs: The agent's argument, perhaps with ``optimizer_class`` and ``optimizer_kwargs``.
        optimizer: The agent's argument ``optimizer_class``.
        options: The agent's argument ``optimizer_kwargs``.

    Returns:
        ``policy_kwargs`` without them, the optimizer and its arguments.

    Raises:
        ValueError: Two different optimizers are given.
    """
    rest = dict(policy_kwargs)
    kind, kwargs = rest.pop("optimizer_class", None), rest.pop("optimizer_kwargs", None)
    if kind is not None:
        if optimizer != DEFAULT_OPTIMIZER and optimizer_class(optimizer) is not optimizer_class(kind):
            raise ArgumentError(
                f"two optimizers: optimizer_class={optimizer!r} and policy_kwargs['optimizer_class']={kind!r}; give one"
            )
        optimizer = kind
    if not kwargs:
        return rest, optimizer, dict(options)
    if not isinstance(kwargs, Mapping):
        raise TypeError(f"policy_kwargs['optimizer_kwargs'] must be a mapping from names to values, not {kwargs!r}")
    if options and dict(options) != dict(kwargs):
        raise ArgumentError("optimizer_kwargs differ from policy_kwargs['optimizer_kwargs']: give one of them")
    return rest, optimizer, dict(kwargs)


def optimizer_class(optimizer: str | type[Optimizer]) -> type[Optimizer]:
    """The class of that name, in any spelling, or the class itself."""
    return OPTIMIZERS.load(optimizer)


def unused_options(optimizer: str | type[Optimizer], options: Mapping[str, Any]) -> dict[str, str]:
    """Arguments of an optimizer without effect next to the others, each with what it needs."""
    return unused_by_optimizer(OPTIMIZERS.name(optimizer), options)


def check_options(optimizer: str | type[Optimizer], options: Mapping[str, Any]) -> None:
    """Refuse arguments of an optimizer without effect next to the others."""
    refuse_unused(options, DEFAULTS, unused_options(optimizer, options), "optimizer_kwargs: ")


def make_optimizer(
    kind: type[Optimizer],
    parameters: Iterable[nn.Parameter],
    lr: float,
    kwargs: Mapping[str, Any],
    capturable: bool = False,
) -> Optimizer:
    """Build the optimizer, in its fused form where torch's own has one.

    Args:
        kind: Class of the optimizer.
        parameters: Parameters to optimize.
        lr: Learning rate.
        kwargs: Further arguments of the optimizer.
        capturable: Keep all state, and the learning rate, on the device, as CUDA graphs and masked steps need.
    """
    parameters = list(parameters)
    arguments: dict[str, Any] = {**kwargs, "lr": lr}
    if capturable:
        arguments["lr"] = torch.tensor(lr, device=parameters[0].device)
        if "capturable" in inspect.signature(kind).parameters:
            arguments["capturable"] = True
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        # Stable-Baselines3's default for PPO.
        arguments.setdefault("eps", 1e-5)
    if kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD) and not {"foreach", "fused"} & set(arguments):
        arguments["fused"] = True
    try:
        return kind(parameters, **arguments)
    except TypeError as error:
        raise TypeError(f"optimizer_kwargs {dict(kwargs)!r} do not fit {kind.__name__}: {error}") from error
