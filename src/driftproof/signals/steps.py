"""Fast single steps of an actor, for observations that depend on the last action.

In double precision: rounding depends on the number of markets, and would propagate through recurrent states.
"""

from __future__ import annotations

import copy
import math
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from stable_baselines3.common.torch_layers import FlattenExtractor
from torch import Tensor, nn

from driftproof.nn.cores import LSTMCore
from driftproof.nn.layer_norm import LayerNorm
from driftproof.nn.policies import DistributionalPolicy

Array = npt.NDArray[np.float32]
Wide = npt.NDArray[np.float64]
M = TypeVar("M", bound=nn.Module)


class Step(Protocol):
    """A step of an actor, with its recurrent state.

    Attributes:
        state: Recurrent state, which can be saved and restored.
    """

    state: Any

    def __call__(self, seen: Array) -> tuple[Wide, Wide]:
        """Outputs for actions ``[B, m]`` and of the core ``[B, units]``, from observations ``[B, n]``.

        Both may be overwritten by the next call.
        """

    def keep(self, count: int) -> None:
        """Drop all but the first ``count`` rows of the batch."""


def make_step(policy: DistributionalPolicy, batch: int) -> Step:
    """Create a step of the policy's actor with an initial recurrent state."""
    return NumpyStep(policy, batch) if NumpyStep.suits(policy) else TorchStep(policy, batch)


class TorchStep:
    """Step with the policy's own modules, for any policy."""

    def __init__(self, policy: DistributionalPolicy, batch: int) -> None:
        self._policy = policy
        self._step = wide(policy.actor_core).stepper()
        self._network = wide(nn.Sequential(policy.actor_network, policy.action_head))
        self.state = tuple(part.double() for part in policy.initial_state(batch).actor)

    @torch.inference_mode()
    def __call__(self, seen: Array) -> tuple[Wide, Wide]:
        policy = self._policy
        observations = torch.as_tensor(seen, device=policy.device)
        features: Any = policy.extract_features(observations, policy.features_extractor)
        memory, self.state = self._step(features.double(), self.state)
        return self._network(memory).cpu().numpy(), memory.cpu().numpy()

    def keep(self, count: int) -> None:
        self.state = tuple(part[:, :count].contiguous() for part in self.state)


class NumpyStep:
    """Step of a one-layer LSTM and networks of tanh or ReLU, with or without layer normalisation, with reused buffers.

    Matrix products use torch; everything else uses NumPy, whose calls have a fraction of torch's overhead.
    Gates are in the order input, forget, output, candidate. All go through one tanh, since
    ``sigmoid(x) = (1 + tanh(x / 2)) / 2``; halving weights is exact.
    """

    def __init__(self, policy: DistributionalPolicy, batch: int) -> None:
        core = policy.actor_core
        recurrence: Any = core.recurrence
        bias = recurrence.bias_ih_l0 + recurrence.bias_hh_l0
        weight = torch.cat((recurrence.weight_ih_l0, bias.unsqueeze(1), recurrence.weight_hh_l0), 1).detach().double()
        input_gate, forget_gate, candidate, output_gate = weight.chunk(4)
        self._weight = torch.cat((input_gate / 2, forget_gate / 2, output_gate / 2, candidate)).t().contiguous()
        self._layers: list[_Layer] = []
        self._input_epsilon: float | None = None
        for layer in wide(nn.Sequential(*policy.actor_network, policy.action_head)):
            if isinstance(layer, nn.Linear):
                self._layers.append(_Layer(layer.weight.t().contiguous(), layer.bias.numpy()))
            elif not isinstance(layer, nn.LayerNorm):
                self._layers[-1] = self._layers[-1]._replace(activation=_ACTIVATIONS[type(layer)])
            elif self._layers:
                self._layers[-1] = self._layers[-1].normalized(layer.eps)
            else:
                self._input_epsilon = layer.eps
        self._averaging = np.full((core.units, 1), 1 / core.units)
        inputs = np.zeros((batch, core.features + 1 + core.units))
        inputs[:, core.features] = 1  # For the bias.
        self._make_room(inputs, np.zeros((batch, core.units)))

    @staticmethod
    def suits(policy: DistributionalPolicy) -> bool:
        """Whether the policy is such a network, on a CPU."""
        return (
            isinstance(policy.actor_core, LSTMCore)
            and policy.actor_core.layers == 1
            and policy.actor_core.recurrence.bias
            and type(policy.features_extractor) is FlattenExtractor
            and policy.device.type == "cpu"
            and all(type(layer) in (nn.Linear, LayerNorm, *_ACTIVATIONS) for layer in policy.actor_network)
            and not any(getattr(layer, "elementwise_affine", False) for layer in policy.actor_network)
        )

    def _make_room(self, inputs: Wide, cell: Wide) -> None:
        batch, units = cell.shape
        self._inputs, self._cell, self._squashed = inputs, cell, np.empty_like(cell)
        self._seen, self._hidden = inputs[:, : -units - 1], inputs[:, -units:]
        self._gates = np.empty((batch, 4 * units))
        self._sigmoids = self._gates[:, : 3 * units]
        self._input_gate, self._forget_gate, self._output_gate, self._candidate = np.split(self._gates, 4, axis=1)
        results = [np.empty((batch, layer.bias.size)) for layer in self._layers]
        # Views of the same buffers as torch tensors.
        self._inputs_tensor, self._gates_tensor = torch.from_numpy(inputs), torch.from_numpy(self._gates)
        self._normalized = self._hidden if self._input_epsilon is None else np.empty_like(cell)
        x = torch.from_numpy(self._normalized)
        self._work = []
        for layer, result in zip(self._layers, results, strict=True):
            self._work.append((x, layer, result, torch.from_numpy(result)))
            x = self._work[-1][-1]

    def __call__(self, seen: Array) -> tuple[Wide, Wide]:
        gates, sigmoids, cell, squashed = self._gates, self._sigmoids, self._cell, self._squashed
        self._seen[:] = seen
        torch.mm(self._inputs_tensor, self._weight, out=self._gates_tensor)
        np.tanh(gates, out=gates)
        sigmoids *= 0.5
        sigmoids += 0.5
        cell *= self._forget_gate
        self._input_gate *= self._candidate
        cell += self._input_gate
        np.tanh(cell, out=squashed)
        np.multiply(self._output_gate, squashed, out=self._hidden)
        if self._input_epsilon is not None:
            np.subtract(self._hidden, self._hidden.dot(self._averaging), out=self._normalized)
            _divide_by_deviations(self._normalized, self._input_epsilon)
        for x, (weight, bias, epsilon, activation), result, tensor in self._work:
            torch.mm(x, weight, out=tensor)
            result += bias
            if epsilon is not None:
                _divide_by_deviations(result, epsilon)
            if activation is not None:
                activation(result, out=result)
        return result, self._hidden

    @property
    def state(self) -> Any:
        return self._inputs.copy(), self._cell.copy()

    @state.setter
    def state(self, state: Any) -> None:
        self._inputs[:], self._cell[:] = state

    def keep(self, count: int) -> None:
        if count < len(self._cell):
            self._make_room(self._inputs[:count].copy(), self._cell[:count].copy())


class _Layer(NamedTuple):
    """A dense layer of :class:`NumpyStep`.

    Attributes:
        weight: Weights ``[inputs, outputs]``.
        bias: Bias ``[outputs]``.
        epsilon: Added to the variance by layer normalisation; ``None``: there is none.
        activation: Activation function.
    """

    weight: Tensor
    bias: Wide
    epsilon: float | None = None
    activation: Any = None

    def normalized(self, epsilon: float) -> _Layer:
        """The layer with layer normalisation of its results, whose mean its weights subtract already."""
        weight = self.weight - self.weight.mean(1, keepdim=True)
        return self._replace(weight=weight, bias=self.bias - self.bias.mean(), epsilon=epsilon)


def _divide_by_deviations(centred: Wide, epsilon: float) -> None:
    """Divide rows of mean 0 by their standard deviations."""
    if len(centred) == 1:  # A number costs less than an array of one number.
        centred *= 1 / math.sqrt(float(np.vdot(centred, centred)) / centred.size + epsilon)
        return
    variances = np.einsum("ij,ij->i", centred, centred)
    variances /= centred.shape[1]
    variances += epsilon
    centred /= np.sqrt(variances, out=variances)[:, None]


_ACTIVATIONS: dict[type[nn.Module], Any] = {nn.Tanh: np.tanh, nn.ReLU: lambda x, out: np.maximum(x, 0, out=out)}


def wide(module: M) -> M:
    """A copy in double precision, without gradients."""
    return copy.deepcopy(module).double().requires_grad_(False)
