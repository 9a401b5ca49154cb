"""Networks of dense layers after the recurrent core, of the actor and of each critic."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor, NatureCNN
from torch import Tensor, nn

from driftproof._arguments import ArgumentError
from driftproof.nn.heads import ValueHead
from driftproof.nn.layer_norm import LayerNorm


class Critic(nn.Module):
    """Dense network and value head of one critic, on the output of the critics' core."""

    def __init__(self, network: nn.Sequential, head: ValueHead) -> None:
        super().__init__()
        self.network, self.head = network, head

    def forward(self, memory: Tensor) -> Tensor:
        """The head's prediction ``[..., outputs]``."""
        prediction: Tensor = self.head(self.network(memory))
        return prediction


def layer_widths(
    net_arch: Sequence[int] | Mapping[str, Sequence[int]] | None, extractor: BaseFeaturesExtractor
) -> tuple[list[int], list[int]]:
    """Widths of the actor's and of the critics' layers from a ``net_arch``, of which ``None`` is the default.

    Raises:
        ValueError: It has unknown keys or invalid widths.
    """
    if isinstance(net_arch, list) and len(net_arch) == 1 and isinstance(net_arch[0], Mapping):
        warnings.warn(
            f"net_arch={net_arch!r} is the form of Stable-Baselines3 before 1.8: use {net_arch[0]!r}", stacklevel=3
        )
        net_arch = net_arch[0]
    if net_arch is None:
        net_arch = [] if isinstance(extractor, NatureCNN) else [64, 64]
    if isinstance(net_arch, Mapping):
        unknown = set(net_arch) - {"pi", "vf"}
        if unknown:
            raise ArgumentError(f'Invalid net_arch: {dict(net_arch)!r}; its keys must be "pi" and "vf"')
        actor, critic = net_arch.get("pi", []), net_arch.get("vf", [])
    else:
        actor = critic = net_arch
    for widths in (actor, critic):
        if not isinstance(widths, Sequence) or not all(_is_width(width) for width in widths):
            raise ArgumentError(f"Invalid net_arch: {net_arch!r}; widths must be whole numbers of at least 1")
    # Hyper-parameter searches pass NumPy numbers.
    return [int(width) for width in actor], [int(width) for width in critic]


def _is_width(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= 1)


def dense_network(
    width: int, widths: Sequence[int], activation: type[nn.Module], layer_norm: bool = False, input_norm: bool = False
) -> nn.Sequential:
    """Dense layers of these widths, each with an activation, for inputs of a given width.

    Layer normalisation has no parameters, and parameters have the same names with and without it.

    Args:
        width: Width of the inputs.
        widths: Widths of the layers.
        activation: Class of the activations.
        layer_norm: Normalise before each activation.
        input_norm: Normalise the inputs.
    """
    if not callable(activation):
        raise TypeError(f"activation_fn must be a class of torch.nn, not {activation!r}")
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    if input_norm:
        layers["input_norm"] = LayerNorm(width)
    for i, next_width in enumerate(widths):
        layers[f"{2 * i}"] = nn.Linear(width, next_width)
        if layer_norm:
            layers[f"norm_{i}"] = LayerNorm(next_width)
        layers[f"{2 * i + 1}"] = activation()
        width = next_width
    return nn.Sequential(layers)


def layer_steppers(network: nn.Sequential) -> list[Callable[[Tensor], Tensor]]:
    """A network's layers as plain functions, without hooks; weights must not change while they are used."""
    return [_stepper(layer) for layer in network]


def _stepper(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    # Positional arguments: keywords take a third of the time of a small layer.
    weight: Any
    bias: Any
    if type(layer) is nn.Linear:
        weight, bias = layer.weight, layer.bias
        return lambda x: F.linear(x, weight, bias)
    if type(layer) is LayerNorm:
        shape, epsilon, scale = list(layer.normalized_shape), layer.eps, layer.scale
        return lambda x: torch.layer_norm(x, shape, scale(x), None, epsilon)
    return layer.forward


def output_width(network: nn.Sequential, before: int) -> int:
    """Output width of a network; without layers, that of its inputs."""
    widths = [layer.out_features for layer in network if isinstance(layer, nn.Linear)]
    return widths[-1] if widths else before
