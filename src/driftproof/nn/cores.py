"""Recurrent cores: LSTM, GRU or none.

A state is a tuple of tensors ``[layers, B, units]``: hidden and cell state of an LSTM, hidden state of a GRU, empty
without recurrence.

Identical cores, such as those of a population's members, run as one if their weights have a leading group axis, passed
by ``torch.func.functional_call``. All shapes then have that axis: states ``[G, layers, B, units]`` and sequences
``[G, T, B, features]``.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor, nn

from driftproof._arguments import ArgumentError, check_flag, check_number
from driftproof._registry import CORES
from driftproof._text import printable
from driftproof.nn.grouped import gru_cell, linear, lstm_cell
from driftproof.nn.recurrence import reason_against_kernels, recurrence
from driftproof.nn.segments import Segments

State: TypeAlias = tuple[Tensor, ...]
Step: TypeAlias = Callable[[Tensor, State], tuple[Tensor, State]]
CoreName: TypeAlias = Literal["lstm", "gru", "none"]


class Core(nn.Module, ABC):
    """Base class of recurrent cores: from a sequence of features to one of outputs. Subclasses need :meth:`step` only.

    Args:
        features: Width of the inputs.
        units: Width of the outputs, and of the state.
        layers: Number of stacked layers.
    """

    parts: ClassVar[int]
    """Number of tensors in a state."""

    def __init__(self, features: int, units: int, layers: int) -> None:
        super().__init__()
        self.features, self.units, self.layers = features, units, layers

    def initial_state(self, batch: int, device: torch.device | str | None = None) -> State:
        """Zeros for ``batch`` sequences."""
        return tuple(torch.zeros(self.layers, batch, self.units, device=device) for _ in range(self.parts))

    def initialise(self) -> None:
        """Initialise weights for the width of the inputs."""

    @abstractmethod
    def step(self, inputs: Tensor, state: State) -> tuple[Tensor, State]:
        """One step of time ``[B, features]``: output ``[B, units]`` and the state after it."""

    @property
    def has_kernels(self) -> bool:
        """Whether :meth:`masked` is one kernel, and thus the fastest form for sequences in which episodes start."""
        return False

    def stepper(self) -> Step:
        """A fast form of :meth:`step` without gradients; weights must not change while it is used."""
        return self.step

    def forward(self, inputs: Tensor, state: State, segments: Segments | None = None) -> Tensor:
        """Whole sequences ``[T, B, features]`` at once: outputs ``[T, B, units]``.

        Args:
            inputs: Input sequences.
            state: The state before the first step.
            segments: Where episodes start; ``None``: nowhere after the first step.
        """
        if segments is None:
            return self.run(inputs, state)[0]
        flat = inputs.flatten(-3, -2)
        state = tuple(part[..., segments.sequences, :] * segments.carries for part in state)
        outputs = []
        for slab in segments.slabs:
            rows = slab.shape[1]
            state = tuple(part[..., :rows, :].contiguous() for part in state)
            output, state = self.run(flat[..., slab, :], state)
            outputs.append(output.flatten(-3, -2))
        return torch.cat(outputs, -2)[..., segments.positions, :].view(*inputs.shape[:-1], self.units)

    def run(self, inputs: Tensor, state: State) -> tuple[Tensor, State]:
        """Whole sequences in which no episode starts: outputs, and the state after the last step."""
        outputs = []
        for x in inputs.unbind(-3):
            output, state = self.step(x, state)
            outputs.append(output)
        return torch.stack(outputs, -3), state

    def masked(self, inputs: Tensor, state: State, keep: Tensor) -> Tensor:
        """:meth:`forward` step by step, with shapes that do not depend on episodes, as CUDA graphs need.

        Args:
            inputs: Input sequences ``[T, B, features]``.
            state: The state before the first step.
            keep: 0 where an episode starts, 1 elsewhere ``[T, B]``.
        """
        outputs = []
        for x, k in zip(inputs.unbind(-3), keep.unsqueeze(-1).unbind(-3), strict=True):
            output, state = self.step(x, mask_state(state, k))
            outputs.append(output)
        return torch.stack(outputs, -3)


class NoCore(Core):
    """No recurrence: the identity."""

    parts = 0

    def __init__(self, features: int) -> None:
        super().__init__(features, features, 0)

    def step(self, inputs: Tensor, state: State) -> tuple[Tensor, State]:
        return inputs, state

    def forward(self, inputs: Tensor, state: State, segments: Segments | None = None) -> Tensor:
        return inputs

    def run(self, inputs: Tensor, state: State) -> tuple[Tensor, State]:
        return inputs, state

    def masked(self, inputs: Tensor, state: State, keep: Tensor) -> Tensor:
        return inputs


class _TorchCore(Core):
    """A core around ``nn.LSTM`` or ``nn.GRU``.

    There is one cell, in :mod:`driftproof.nn.grouped`, and fast forms of it for a single core: ATen's for a step, and
    oneDNN's or cuDNN's for a sequence.
    """

    module: ClassVar[type[nn.LSTM] | type[nn.GRU]]

    def __init__(self, features: int, units: int, layers: int = 1, *, bias: bool = True, dropout: float = 0.0) -> None:
        super().__init__(features, units, layers)
        self.recurrence = self.module(features, units, layers, bias=bias, dropout=dropout)

    def initialise(self) -> None:
        """Initialise input weights orthogonally, so that gates see inputs at their own scale.

        torch's initial weights shrink with the number of units, so that few inputs hardly move the gates. Recurrent
        weights stay torch's: with orthogonal ones, learning starts more slowly.
        """
        for name, parameter in self.recurrence.named_parameters():
            if name.startswith("weight_ih"):
                for gate in torch.split(parameter.data, self.units):
                    nn.init.orthogonal_(gate, gain=math.sqrt(max(1.0, self.units / gate.shape[1])))

    @abstractmethod
    def _cell(self, inputs: Tensor, state: State, weights: list[Any]) -> State:
        """One layer's next state ``[B, units]``, hidden state first."""

    @abstractmethod
    def _grouped_cell(self, input_gates: Tensor, hidden_gates: Tensor, state: State) -> State:
        """:meth:`_cell` for groups ``[G, B, units]``, from the gates' arguments by inputs and by hidden state."""

    @abstractmethod
    def _biases(self, b_ih: Tensor, b_hh: Tensor) -> tuple[Tensor, Tensor | None]:
        """Biases of the gates without regard to the state, and the one that a GRU's reset gate scales."""

    @property
    def _is_grouped(self) -> bool:
        weight: Any = self.recurrence.weight_hh_l0
        return bool(weight.dim() == 3)

    def _between(self, layer: int, inputs: Tensor) -> Tensor:
        """Input of a layer from the outputs of the previous one: dropout, except for the first."""
        if layer == 0 or not self.training:
            return inputs
        return nn.functional.dropout(inputs, self.recurrence.dropout)

    def _layer_weights(self, layer: int) -> list[Any]:
        """Input weights, recurrent weights and their biases; ``None`` for absent biases."""
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        return [getattr(self.recurrence, f"{name}_l{layer}", None) for name in names]

    def step(self, inputs: Tensor, state: State) -> tuple[Tensor, State]:
        new = []
        for layer in range(self.layers):
            weights, before = self._layer_weights(layer), tuple(part.select(-3, layer) for part in state)
            inputs = self._between(layer, inputs)
            if self._is_grouped:
                w_ih, w_hh, b_ih, b_hh = weights
                new.append(self._grouped_cell(linear(inputs, w_ih, b_ih), linear(before[0], w_hh, b_hh), before))
            else:
                new.append(self._cell(inputs, before, weights))
            inputs = new[-1][0]
        if self.layers == 1:  # Without a copy.
            return inputs, tuple(part.unsqueeze(-3) for part in new[0])
        return inputs, tuple(torch.stack(parts, -3) for parts in zip(*new, strict=True))

    def run(self, inputs: Tensor, state: State) -> tuple[Tensor, State]:
        if self._is_grouped:
            return self._run_grouped(inputs, state)
        with _full_precision() if inputs.is_cuda else contextlib.nullcontext():
            output, new = self.recurrence(inputs, state if self.parts > 1 else state[0])
        return output, new if self.parts > 1 else (new,)

    @property
    def has_kernels(self) -> bool:
        weight: Any = self.recurrence.weight_hh_l0
        return reason_against_kernels(weight) is None

    def masked(self, inputs: Tensor, state: State, keep: Tensor) -> Tensor:
        if self._is_grouped or self.has_kernels:
            return self.masked_as_one([self], [inputs], [state], keep)[0]
        return super().masked(inputs, state, keep)

    def masked_as_one(
        self, cores: Sequence[Any], inputs: Sequence[Tensor], states: Sequence[State], keep: Tensor
    ) -> tuple[Tensor, ...]:
        """:meth:`masked` of cores like this one."""
        grouped = self._is_grouped
        state = tuple(_joined(parts, grouped) for parts in zip(*states, strict=True))
        outputs, _ = self._run_grouped(_joined(inputs, grouped), state, _joined([keep] * len(cores), grouped), cores)
        return outputs.chunk(len(cores)) if grouped else outputs.unbind()

    def is_like(self, other: Core) -> bool:
        """Whether cores differ in weights alone."""
        if type(other) is not type(self):
            return False
        sizes = [(core.features, core.units, core.layers, core.recurrence.bias) for core in (self, other)]
        return sizes[0] == sizes[1]

    def _run_grouped(
        self, inputs: Tensor, state: State, keep: Tensor | None = None, cores: Sequence[Any] = ()
    ) -> tuple[Tensor, State]:
        """:meth:`run` and :meth:`masked` of cores layer by layer, with one product of all inputs over time."""
        new = []
        for layer in range(self.layers):
            weights = [core._layer_weights(layer) for core in cores or [self]]
            w_ih, w_hh, b_ih, b_hh = (_joined(each, self._is_grouped) for each in zip(*weights, strict=True))
            bias, candidate_bias = (None, None) if b_ih is None else self._biases(b_ih, b_hh)
            gates = linear(self._between(layer, inputs), w_ih, bias)
            before = tuple(part.select(-3, layer) for part in state)
            inputs, after = recurrence(gates, w_hh, candidate_bias, before, keep)
            new.append(after)
        return inputs, tuple(torch.stack(parts, -3) for parts in zip(*new, strict=True))


class LSTMCore(_TorchCore):
    """Long short-term memory."""

    parts = 2
    module = nn.LSTM

    def initialise(self) -> None:
        """Initialise as every core, and the gates' biases such that a new cell is a leaky average of unit gain.

        The cell starts as ``0.27 c + 0.73 candidate``, the output gate at 0.73. With biases around 0 the outputs are
        half as large, and a forget gate that is open at first mixes all steps: both make the first updates learn
        less. The ``short`` part of benchmarks/learning.py has the numbers.
        """
        super().initialise()
        for layer in range(self.layers if self.recurrence.bias else 0):
            bias = getattr(self.recurrence, f"bias_ih_l{layer}").data
            input_gate, forget_gate, _, output_gate = torch.split(bias, self.units)
            input_gate += 1
            forget_gate -= 1
            output_gate += 1

    def _cell(self, inputs: Tensor, state: State, weights: list[Any]) -> State:
        hidden, cell = torch.lstm_cell(inputs, state, *weights)
        return hidden, cell

    def _grouped_cell(self, input_gates: Tensor, hidden_gates: Tensor, state: State) -> State:
        if input_gates.is_cuda and input_gates.dtype is hidden_gates.dtype is state[1].dtype:
            # The kernel of torch.lstm_cell, which takes no groups: all their sequences are rows of one.
            rows = (part.flatten(0, -2) for part in (input_gates, hidden_gates, state[1]))
            hidden, cell, _ = torch.ops.aten._thnn_fused_lstm_cell(*rows)
            return hidden.view(state[1].shape), cell.view(state[1].shape)
        return lstm_cell(input_gates + hidden_gates, state[1])

    def _biases(self, b_ih: Tensor, b_hh: Tensor) -> tuple[Tensor, Tensor | None]:
        return b_ih + b_hh, None

    @property
    def can_fuse(self) -> bool:
        """Whether :meth:`fused_weights` can be used: on a CPU, with biases."""
        weight: Any = self.recurrence.weight_hh_l0
        return self.recurrence.bias and bool(weight.is_cpu) and not self._is_grouped

    def fused_weights(self, layer: int) -> tuple[Tensor, Tensor]:
        """Weights ``[features + units, 4 * units]`` for input and hidden state together, and their biases."""
        w_ih, w_hh, b_ih, b_hh = (w.detach() for w in self._layer_weights(layer))
        return torch.cat((w_ih, w_hh), 1).t(), b_ih + b_hh

    def stepper(self) -> Step:
        if not self.can_fuse:
            return self.step
        # One product for input and hidden state together.
        fused = []
        for layer in range(self.layers):
            weight, bias = self.fused_weights(layer)
            fused.append((weight.contiguous(), bias))

        def step(inputs: Tensor, state: State) -> tuple[Tensor, State]:
            hiddens, cells = [], []
            for layer, (weight, bias) in enumerate(fused):
                gates = torch.addmm(bias, torch.cat((inputs, state[0][layer]), 1), weight)
                inputs, cell = lstm_cell(gates, state[1][layer])
                hiddens.append(inputs)
                cells.append(cell)
            if len(fused) == 1:
                return inputs, (inputs.unsqueeze(0), cell.unsqueeze(0))
            return inputs, (torch.stack(hiddens), torch.stack(cells))

        return step


class GRUCore(_TorchCore):
    """Gated recurrent unit."""

    parts = 1
    module = nn.GRU

    def _cell(self, inputs: Tensor, state: State, weights: list[Any]) -> State:
        return (torch.gru_cell(inputs, state[0], *weights),)

    def _grouped_cell(self, input_gates: Tensor, hidden_gates: Tensor, state: State) -> State:
        return (gru_cell(input_gates, hidden_gates, state[0]),)

    def _biases(self, b_ih: Tensor, b_hh: Tensor) -> tuple[Tensor, Tensor | None]:
        gates, candidate = torch.split(b_hh, [2 * self.units, self.units], -1)
        return b_ih + nn.functional.pad(gates, (0, self.units)), candidate


def masked_pair(
    cores: tuple[Core, Core], inputs: tuple[Tensor, Tensor], states: tuple[State, State], keep: Tensor
) -> tuple[Tensor, Tensor]:
    """:meth:`Core.masked` of two cores: in one kernel, if they have kernels and differ in weights alone."""
    first, second = cores
    if not (isinstance(first, _TorchCore) and first.has_kernels and first.is_like(second)):
        return first.masked(inputs[0], states[0], keep), second.masked(inputs[1], states[1], keep)
    return first.masked_as_one([first, second], inputs, states, keep)  # type: ignore[return-value]


def _joined(parts: Sequence[Any], is_grouped: bool) -> Any:
    """Tensors of several cores along one group axis, in front of those of single cores; ``None`` if they are absent."""
    if parts[0] is None:
        return None
    if is_grouped:
        return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))
    if all(part is parts[0] for part in parts):
        return parts[0].expand(len(parts), *parts[0].shape)
    return torch.stack(tuple(parts))


PairStep: TypeAlias = Callable[[Tensor, State, State], tuple[tuple[Tensor, State], tuple[Tensor, State]]]


def paired_stepper(first: Core, second: Core) -> PairStep:
    """The steppers of two cores with the same inputs as one function, faster if the cores are alike."""
    if not (_is_simple(first) and _is_simple(second) and first.units == second.units):
        steps = first.stepper(), second.stepper()
        return lambda inputs, one, other: (steps[0](inputs, one), steps[1](inputs, other))
    weights, biases = [], []
    for core in (first, second):
        assert isinstance(core, LSTMCore)
        core_weight, core_bias = core.fused_weights(0)
        weights.append(core_weight)
        biases.append(core_bias.unsqueeze(0))
    weight, bias = torch.stack(weights), torch.stack(biases)

    def step(inputs: Tensor, one: State, other: State) -> tuple[tuple[Tensor, State], tuple[Tensor, State]]:
        hidden, cell = torch.cat((one[0], other[0])), torch.cat((one[1], other[1]))  # [2, B, units]
        both = torch.cat((inputs.expand(2, -1, -1), hidden), 2)
        hidden, cell = lstm_cell(torch.baddbmm(bias, both, weight), cell)
        (h1, h2), (c1, c2) = torch.split(hidden, 1), torch.split(cell, 1)
        return (h1[0], (h1, c1)), (h2[0], (h2, c2))

    return step


def _is_simple(core: Core) -> bool:
    """Whether it is an LSTM of one layer on a CPU."""
    return isinstance(core, LSTMCore) and core.layers == 1 and core.can_fuse


def check_core_options(core: str | type[Core], options: Mapping[str, Any]) -> None:
    """Refuse arguments of ``nn.LSTM`` and ``nn.GRU`` that a core does not pass on, and invalid values."""
    if CORES.load(core) not in (LSTMCore, GRUCore, NoCore):
        return
    for name in options:
        if name not in ("bias", "dropout"):
            raise ArgumentError(
                f"lstm_kwargs has {printable(name, 50)!r}: a policy takes 'dropout' and 'bias' there; units and layers "
                "are lstm_hidden_size and n_lstm_layers"
            )
    check_flag("lstm_kwargs['bias']", options.get("bias", True))
    check_number("lstm_kwargs['dropout']", options.get("dropout", 0.0), at_least=0, at_most=1)


def make_core(
    core: str | type[Core], features: int, units: int, layers: int, options: Mapping[str, Any] | None = None
) -> Core:
    """Build a core.

    Args:
        core: ``"lstm"``, ``"gru"``, ``"none"``, the name of one in an installed package, or a class.
        features: Width of the inputs.
        units: Width of the outputs.
        layers: Number of layers.
        options: Further arguments: of ``nn.LSTM`` and ``nn.GRU``, ``dropout`` between layers and ``bias``.
    """
    kind: type[Core] = CORES.load(core)
    return NoCore(features) if kind is NoCore else kind(features, units, layers, **(options or {}))


@contextlib.contextmanager
def _full_precision() -> Iterator[None]:
    """Disable TF32 in cuDNN, so that a training pass computes the same outputs as the rollout."""
    settings: Any = torch.backends.cudnn.rnn
    before = settings.fp32_precision
    settings.fp32_precision = "ieee"
    try:
        yield
    finally:
        settings.fp32_precision = before


def mask_state(state: State, keep: Tensor) -> State:
    """The state ``[..., layers, B, units]``, set to zero where ``keep`` ``[..., B, 1]`` is 0."""
    if keep.dim() > 2:
        keep = keep.unsqueeze(-3)
    return tuple(part * keep for part in state)
