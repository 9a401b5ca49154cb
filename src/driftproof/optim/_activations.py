"""Recording the activations of any model: of modules by hooks, of functions by a mode of torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

FUNCTIONS = frozenset(
    [
        "relu",
        "relu6",
        "leaky_relu",
        "elu",
        "celu",
        "selu",
        "gelu",
        "silu",
        "mish",
        "prelu",
        "tanh",
        "sigmoid",
        "softplus",
        "softsign",
        "hardtanh",
        "hardswish",
        "hardsigmoid",
    ]
)
"""Activation functions by name: of ``torch``, of ``torch.nn.functional``, and methods of tensors."""

_CHANNELS_FIRST = (nn.modules.batchnorm._NormBase, nn.GroupNorm)
_CHANNELS_LAST = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Embedding, nn.RNNBase, nn.MultiheadAttention)


class Recorder:
    """Activations as ``[samples, units]`` by name.

    Args:
        model: Its modules are recorded while :meth:`attach` is in force.
        kinds: Which of them.
        functions: Whether activation functions outside of these modules are recorded too.
    """

    def __init__(self, model: nn.Module, kinds: tuple[type[nn.Module], ...], functions: bool) -> None:
        self.recorded: dict[str, Tensor] = {}
        self.was_called = False
        self.mode = _Functions(self._record_function) if functions else None
        self._model, self._kinds = model, kinds
        self._running: list[tuple[str, nn.Module, Counter[str]]] = []
        """Modules in their forward pass, the innermost last, with counts of the functions that each has called."""
        self._layout: tuple[torch.Size, int] | None = None
        """Shape of the output of the last module that says which axis its units are, and that axis."""
        self._handles: list[Any] = []

    def attach(self) -> None:
        """Begin to record."""
        for name, module in self._model.named_modules():
            self._handles += [
                module.register_forward_pre_hook(self._enter(name)),
                module.register_forward_hook(self._leave, always_call=True),
            ]

    def detach(self) -> None:
        """Stop recording."""
        for handle in self._handles:
            handle.remove()

    def _enter(self, name: str) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, inputs: Any) -> None:
            self.was_called = True
            self._running.append((name, module, Counter()))

        return hook

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        name, _, _ = self._running.pop()
        tensor = _first_tensor(output)
        if tensor is None:
            return
        if isinstance(module, self._kinds):
            self._record(name, tensor)
        axis = _unit_axis(module, tensor)
        if axis is not None:
            self._layout = tensor.shape, axis

    def _record_function(self, function: str, output: Any) -> None:
        if not self._running or not isinstance(output, Tensor):
            return
        name, module, calls = self._running[-1]
        if isinstance(module, self._kinds):
            return  # Its output is recorded.
        calls[function] += 1
        number = f"_{calls[function]}" if calls[function] > 1 else ""
        self._record(f"{name}.{function}{number}".lstrip("."), output)

    def _record(self, name: str, output: Tensor) -> None:
        if not output.is_floating_point() or output.dim() == 0:
            return
        rows = self._rows(output.detach())
        units = rows.shape[1]
        key = name if name not in self.recorded or self.recorded[name].shape[1] == units else f"{name} ({units} units)"
        self.recorded[key] = torch.cat([self.recorded[key], rows]) if key in self.recorded else rows

    def _rows(self, values: Tensor) -> Tensor:
        """A copy, for later modules may work in place, ``[samples, units]``."""
        if values.is_nested:
            return torch.cat([each.reshape(-1, each.shape[-1]) for each in values.unbind()])
        axis = 1 if values.dim() >= 4 else -1
        if self._layout is not None and self._layout[0] == values.shape:
            axis = self._layout[1]
        units_last = values.movedim(axis, -1)
        return units_last.clone().reshape(-1, units_last.shape[-1])


class _Functions(TorchFunctionMode):
    """Reports the output of each activation function."""

    def __init__(self, report: Callable[[str, Any], None]) -> None:
        super().__init__()
        self._report = report

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "").rstrip("_")
        if name in FUNCTIONS:
            self._report(name, output)
        return output


def _first_tensor(output: Any) -> Tensor | None:
    """The output of a module, or the first of several."""
    if isinstance(output, nn.utils.rnn.PackedSequence):
        return output.data
    if isinstance(output, Mapping):
        output = tuple(output.values())
    if isinstance(output, (tuple, list)):
        return _first_tensor(output[0]) if output else None
    return output if isinstance(output, Tensor) else None


def _unit_axis(module: nn.Module, output: Tensor) -> int | None:
    """The axis of a module's output that its units are, if its kind says so."""
    if output.is_nested:
        return None
    if isinstance(module, nn.modules.conv._ConvNd):
        return output.dim() - module.weight.dim() + 1
    if isinstance(module, _CHANNELS_FIRST):
        return 1
    return -1 if isinstance(module, _CHANNELS_LAST) and output.dim() > 0 else None
