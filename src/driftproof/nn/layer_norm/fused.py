"""Layer normalisation in two Triton kernels, one forward and one backward."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from driftproof.nn.layer_norm import kernels

WIDEST = 4096
"""Width up to which a program's registers hold a row."""
INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether kernels are interpreted, on a CPU, as TRITON_INTERPRET=1 asks for."""
_ELEMENTS = 4096
"""Elements of a program."""


def run(inputs: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
    """Normalised rows ``[..., width]`` of a type."""
    result: Tensor = _Fused.apply(inputs, epsilon, dtype)  # type: ignore[no-untyped-call]
    return result


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
        inputs = inputs.contiguous()
        outputs = torch.empty_like(inputs, dtype=dtype)
        _launch(kernels.forward, inputs, outputs, epsilon=epsilon)
        ctx.save_for_backward(inputs)
        ctx.epsilon = epsilon
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_outputs: Tensor) -> tuple[Tensor, None, None]:
        (inputs,) = ctx.saved_tensors
        d_inputs = torch.empty_like(inputs)
        _launch(kernels.backward, inputs, d_outputs.contiguous(), d_inputs, epsilon=ctx.epsilon)
        return d_inputs, None, None


def _launch(kernel: Any, *tensors: Tensor, epsilon: float) -> None:
    units = tensors[0].shape[-1]
    count = tensors[0].numel() // units
    width = int(triton.next_power_of_2(units))
    rows = max(1, _ELEMENTS // width)
    with torch.cuda.device_of(tensors[0]):  # type: ignore[no-untyped-call]
        kernel[(-(-count // rows),)](*tensors, epsilon, count, UNITS=units, WIDTH=width, ROWS=rows, num_warps=4)
