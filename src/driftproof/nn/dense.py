"""Dense networks with derivatives of their own: on a CPU, autograd costs small networks as much as the arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeGuard

import torch
from torch import Tensor, nn

from driftproof.nn.layer_norm import LayerNorm

_MINUS_ONE = torch.tensor(-1.0, device="cpu")
_tanh_backward = torch.ops.aten.tanh_backward.grad_input
_threshold_backward = torch.ops.aten.threshold_backward.grad_input
_layer_norm_backward = torch.ops.aten.native_layer_norm_backward.default


class _Group:
    """Networks whose hidden layers have the same widths: what is not a matrix product takes all of them at once.

    Args:
        networks: Weights, transposed weights and biases of each network's layers.
        members: Indices of the networks.
    """

    def __init__(self, networks: Sequence[Sequence[tuple[Tensor, Tensor, Tensor]]], members: Sequence[int]) -> None:
        self.networks, self.members = networks, members
        self.depth = len(networks[0]) - 1
        self.values: list[Sequence[Tensor]] = []
        """Inputs ``[rows, width]`` of each layer, by network."""
        self.joined: list[Tensor] = []
        """Results of each hidden layer ``[networks, rows, width]``."""
        self.norms: list[tuple[Tensor, Tensor, Tensor]] = []
        """Inputs of layer normalisation, their means and inverse standard deviations, by layer."""


class DenseNetworks:
    """Networks of dense layers with tanh or ReLU in between, in float32 on a CPU.

    There may be layer normalisation without parameters before each activation, and of the inputs.

    They compute what their layers would compute one by one, up to rounding: tanh(x) is 2 σ(2 x) - 1, whose error is
    below 2e-7, in a quarter of the time.

    Args:
        networks: Layers of each network.
        is_tanh: Whether the activation is tanh, or else ReLU.
        epsilon: Added to the variance by layer normalisation before activations; ``None``: there is none.
        input_epsilons: The same for each network's inputs.
    """

    def __init__(
        self,
        networks: Sequence[Sequence[nn.Linear]],
        is_tanh: bool,
        epsilon: float | None = None,
        input_epsilons: Sequence[float | None] = (),
    ) -> None:
        with torch.no_grad():
            layers = [[(layer.weight, layer.weight.t(), layer.bias) for layer in network] for network in networks]
        self._is_tanh, self._epsilon = is_tanh, epsilon
        self._input_epsilons = input_epsilons or [None] * len(networks)
        together: dict[tuple[int, ...], list[int]] = {}
        for index, network in enumerate(networks):
            together.setdefault(tuple(layer.out_features for layer in network[:-1]), []).append(index)
        self._groups = [_Group([layers[i] for i in members], members) for members in together.values()]
        # Layer normalisation scales by 2 in passing, for tanh(x) = 2 σ(2 x) - 1; without any scale it takes longer.
        scale = 2.0 if is_tanh else 1.0
        self._scales = {width: torch.full((width,), scale) for widths in together for width in widths}
        self._ones = {network[0][0].shape[1]: torch.ones(network[0][0].shape[1]) for network in layers}
        self._input_norms: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        """Inputs of layer normalisation, their means and inverse standard deviations, by the id of the result."""
        self._inputs: Sequence[Tensor] = []
        self._rows: dict[int, Tensor] = {}
        """The inputs as rows, normalised if they are to be, by the id of the input."""
        self._outputs: list[Tensor] = []

    @torch.no_grad()
    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Outputs ``[..., width]`` of each network, leaves of the graph of a loss.

        Args:
            inputs: Inputs ``[..., features]`` of each network, with as many rows each. Results of other modules get
                gradients, too.
        """
        self._inputs, self._rows, self._input_norms = inputs, {}, {}
        for x, epsilon in zip(inputs, self._input_epsilons, strict=True):
            if id(x) not in self._rows:  # Critics share theirs.
                self._rows[id(x)] = self._input_rows(x.flatten(0, -2), epsilon)
        outputs: dict[int, Tensor] = {}
        for group in self._groups:
            self._run_hidden(group, [self._rows[id(inputs[i])] for i in group.members])
            for i, network, value in zip(group.members, group.networks, group.values[-1], strict=True):
                _, transposed, bias = network[-1]
                outputs[i] = torch.addmm(bias, value, transposed).view(*inputs[i].shape[:-1], -1)
        self._outputs = [outputs[i].requires_grad_() for i in range(len(inputs))]
        return self._outputs

    def _input_rows(self, rows: Tensor, epsilon: float | None) -> Tensor:
        if epsilon is None:
            return rows
        width = rows.shape[-1]
        value, means, factors = torch.native_layer_norm(rows, (width,), self._ones[width], None, epsilon)
        self._input_norms[id(value)] = rows, means, factors
        return value

    def _run_hidden(self, group: _Group, inputs: Sequence[Tensor]) -> None:
        """Compute the inputs of each layer."""
        group.values, group.joined, group.norms = [inputs], [], []
        scale = 2 if self._is_tanh and self._epsilon is None else 1
        for i in range(group.depth):
            width = group.networks[0][i][2].numel()
            value = inputs[0].new_empty(len(group.members), len(inputs[0]), width)
            given = zip(group.networks, group.values[-1], value.unbind(), strict=True)
            for network, before, place in given:
                _, transposed, bias = network[i]
                torch.addmm(bias, before, transposed, beta=scale, alpha=scale, out=place)
            if self._epsilon is not None:
                arguments = value
                given_norm = arguments, (width,), self._scales[width], None, self._epsilon
                value, means, factors = torch.native_layer_norm(*given_norm)
                group.norms.append((arguments, means, factors))
            if self._is_tanh:
                torch.add(_MINUS_ONE, value.sigmoid_(), alpha=2, out=value)
            else:
                value.relu_()
            group.values.append(value.unbind())
            group.joined.append(value)

    @torch.no_grad()
    def backward(self, places: Mapping[int, Tensor]) -> None:
        """Add gradients from those of the last outputs to the parameters' gradients, if they have any.

        Args:
            places: Where to write gradients, by the parameters' ids; others get new memory.
        """
        of_inputs: dict[int, Tensor] = {}
        for group in self._groups:
            self._differentiate(group, places, of_inputs)
            group.values, group.joined, group.norms = [], [], []
        self._differentiate_inputs(of_inputs)
        self._inputs, self._rows, self._outputs, self._input_norms = [], {}, [], {}

    def _differentiate(self, group: _Group, places: Mapping[int, Tensor], of_inputs: dict[int, Tensor]) -> None:
        outputs = [self._outputs[i] for i in group.members]
        # Outputs that are no part of the loss have no gradient, and neither get their parameters one.
        active = [output.grad is not None for output in outputs]
        if not any(active):
            return
        gradients: Sequence[Tensor] = [
            (torch.zeros_like(output) if output.grad is None else output.grad).flatten(0, -2) for output in outputs
        ]
        for i in reversed(range(group.depth + 1)):
            for k, gradient in enumerate(gradients):
                weight, _, bias = group.networks[k][i]
                if active[k]:
                    _add(weight, torch.mm(gradient.t(), group.values[i][k], out=places.get(id(weight))))
                    _add(bias, torch.sum(gradient, 0, out=places.get(id(bias))))
            if i > 0:
                gradients = self._before_layer(group, i, gradients).unbind()
        for k, index in enumerate(group.members):
            x = self._inputs[index]
            if x.requires_grad and active[k]:
                weight, known = group.networks[k][0][0], of_inputs.get(id(x))
                result = gradients[k].mm(weight) if known is None else known.addmm_(gradients[k], weight)
                of_inputs[id(x)] = result

    def _before_layer(self, group: _Group, i: int, gradients: Sequence[Tensor]) -> Tensor:
        """Gradients of the arguments of the activations before a layer, joined, from those of its outputs."""
        value = group.joined[i - 1]
        result = torch.empty_like(value)
        for network, gradient, place in zip(group.networks, gradients, result.unbind(), strict=True):
            torch.mm(gradient, network[i][0], out=place)
        if self._is_tanh:
            result = _tanh_backward(result, value, grad_input=result)
        else:
            result = _threshold_backward(result, value, 0, grad_input=result)
        return result if self._epsilon is None else _before_normalisation(result, group.norms[i - 1])

    def _differentiate_inputs(self, gradients: Mapping[int, Tensor]) -> None:
        """Continue with autograd where inputs are results of other modules."""
        inputs = {id(x): x for x in self._inputs}
        tensors, found = [], []
        for key, gradient in gradients.items():
            norm = self._input_norms.get(id(self._rows[key]))
            tensors.append(inputs[key])
            found.append((gradient if norm is None else _before_normalisation(gradient, norm)).view_as(inputs[key]))
        if tensors:
            torch.autograd.backward(tensors, found)


def _before_normalisation(gradient: Tensor, norm: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Gradient of the inputs of layer normalisation, from that of its result without a scale."""
    arguments, means, factors = norm
    shape = gradient.shape[-1:]
    result: Tensor = _layer_norm_backward(gradient, arguments, shape, means, factors, None, None, [True, False, False])[
        0
    ]
    return result


def dense_networks(networks: Sequence[Sequence[nn.Module]]) -> DenseNetworks | None:
    """Networks for which :class:`DenseNetworks` can stand in; ``None`` if they are of another kind.

    Args:
        networks: All layers of each network, with the activations.
    """
    input_epsilons = [layers[0].eps if _is_norm(layers[0]) else None for layers in networks]
    inner = [
        layers if epsilon is None else layers[1:] for layers, epsilon in zip(networks, input_epsilons, strict=True)
    ]
    norms = [layer for layers in networks for layer in layers if _is_norm(layer)]
    epsilons = {layer.eps for layers in inner for layer in layers if _is_norm(layer)}
    if any(layer.elementwise_affine for layer in norms):
        return None
    if epsilons:
        before = [layer for layers in inner for layer in layers[1::3]]
        count = sum(_is_norm(layer) for layers in inner for layer in layers)
        if len(epsilons) > 1 or len(before) != count or any(not _is_norm(layer) for layer in before):
            return None
        inner = [[layer for layer in layers if not _is_norm(layer)] for layers in inner]
    activations = {type(layer) for layers in inner for layer in layers[1::2]}
    linears = [[layer for layer in layers[::2] if type(layer) is nn.Linear] for layers in inner]
    parameters = [parameter for layers in linears for layer in layers for parameter in (layer.weight, layer.bias)]
    is_plain = (
        all(2 * len(dense) == len(layers) + 1 for dense, layers in zip(linears, inner, strict=True))
        and len(activations) <= 1
        and activations <= {nn.Tanh, nn.ReLU}
        and all(_is_trained(parameter) for parameter in parameters)
        and len(set(map(id, parameters))) == len(parameters)
    )
    epsilon = next(iter(epsilons), None)
    return DenseNetworks(linears, nn.Tanh in activations, epsilon, input_epsilons) if is_plain else None


def _is_norm(layer: nn.Module) -> TypeGuard[nn.LayerNorm]:
    return type(layer) in (LayerNorm, nn.LayerNorm)


def is_watched(module: nn.Module) -> bool:
    """Whether hooks are registered on a module."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def _is_trained(parameter: Tensor | None) -> bool:
    return (
        parameter is not None
        and parameter.is_cpu
        and parameter.dtype is torch.float32
        and parameter.requires_grad
        and parameter.is_leaf
        and not parameter._backward_hooks
        and not parameter._post_accumulate_grad_hooks
    )


def _add(parameter: Tensor, gradient: Tensor) -> None:
    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
