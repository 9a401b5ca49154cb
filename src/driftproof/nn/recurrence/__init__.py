"""The recurrence of LSTM and GRU over whole sequences of ``M`` members, with episode starts as a mask.

On CUDA it is one Triton kernel forward and one backward; see :func:`reason_against_kernels` for when it is not.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TypeAlias

import torch
from torch import Tensor

from driftproof.nn.recurrence import plain

fused: ModuleType | None
try:
    fused = importlib.import_module("driftproof.nn.recurrence.fused")
except ModuleNotFoundError:  # Triton is a part of torch's builds for CUDA only.
    fused = None

Recurrence: TypeAlias = tuple[Tensor, tuple[Tensor, ...]]


def recurrence(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: tuple[Tensor, ...],
    keep: Tensor | None = None,
) -> Recurrence:
    """Outputs ``[M, T, B, units]`` and the state after the last step.

    Args:
        inputs: The gates' arguments by inputs and biases ``[M, T, B, gates * units]``, in torch's order of gates.
        weight: Recurrent weights ``[M, gates * units, units]``.
        bias: Recurrent bias of a GRU's candidate ``[M, units]``, which its reset gate multiplies.
        state: Hidden and cell state of an LSTM, hidden state of a GRU, before the first step ``[M, B, units]``.
        keep: 0 at steps before which the state is set to zero, 1 elsewhere ``[M, T, B]``; ``None``: always 1.
    """
    if fused is None or reason_against_kernels(weight, inputs.dtype) is not None:
        return plain.run(inputs, weight, bias, state, keep)
    if keep is None:
        keep = torch.ones(inputs.shape[:3], device=inputs.device)
    result: Recurrence = fused.run(inputs, weight, bias, state, keep, product_precision(inputs.dtype))
    return result


def reason_against_kernels(weight: Tensor, dtype: torch.dtype | None = None) -> str | None:
    """Why the plain form runs for these recurrent weights; ``None``: the kernels do.

    Args:
        weight: Recurrent weights, of one or more members.
        dtype: Type of the inputs; ``None``: that of products at present, which autocast may change.
    """
    if dtype is None:
        device = weight.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    if fused is None:
        return "Triton is not installed"
    if not weight.is_cuda and not fused.INTERPRETED:
        return f"the weights are on {weight.device.type}"
    if weight.dtype is not torch.float32 or dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"weights are {weight.dtype} and inputs {dtype}"
    if weight.is_cuda and torch.cuda.get_device_capability(weight.device) < (8, 0):
        return "the device has no tensor cores for bfloat16 and TF32"
    units, gates = weight.shape[-1], weight.shape[-2] // weight.shape[-1]
    if fused.Plan.of(units, gates, product_precision(dtype), weight.device) is None:
        return f"weights of {units} units do not fit on the chip"
    return None


def product_precision(dtype: torch.dtype) -> str:
    """Precision of products: that of half-precision inputs, otherwise torch's setting for matrix products."""
    if dtype is not torch.float32:
        return "bf16"
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"
