"""The recurrence in two Triton kernels, one forward and one backward; weights' gradients are one product after them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from driftproof.nn.recurrence import kernels

if TYPE_CHECKING:
    from driftproof.nn.recurrence import Recurrence

Precision: TypeAlias = Literal["bf16", "tf32", "tf32x3", "ieee"]
_RESIDENT_BYTES = 2**17
"""Largest weights that are held in registers: half of those of a multiprocessor."""
INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether kernels are interpreted, on a CPU, as TRITON_INTERPRET=1 asks for."""


class Plan(NamedTuple):
    """How the kernels of a shape run.

    Attributes:
        columns: Columns of a tile of weights; 0: all weights are resident.
        depth: Rows of a tile.
        warps: Warps of a program.
        stages: Tiles in flight.
        rows: Sequences of a program.
        fast: Use the approximate tanh of the hardware, with an error below that of bfloat16.
    """

    columns: int
    depth: int
    warps: int
    stages: int
    rows: int = 16
    fast: bool = False

    @staticmethod
    def of(units: int, gates: int, precision: Precision, backward: bool) -> Plan:
        """The fastest form known."""
        width, size = width_of(units), 2 if precision == "bf16" else 4
        fast = precision == "bf16" and not INTERPRETED
        if gates * width * width * size <= _RESIDENT_BYTES:
            return Plan(0, 0, 8 if width >= 128 else 4, 1, fast=fast)
        tile = 64 if size == 2 else 32
        return Plan(64, min(width, 2 * tile if backward else tile), 8, 3, fast=fast)


def width_of(units: int) -> int:
    """Units of a state in a kernel: a power of two."""
    return max(16, int(triton.next_power_of_2(units)))


def run(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: tuple[Tensor, ...],
    keep: Tensor,
    precision: Precision,
) -> Recurrence:
    """What :func:`driftproof.nn.recurrence.recurrence` returns."""
    cell = state[1] if len(state) == 2 else None
    outputs, last = _Fused.apply(inputs, weight, bias, state[0], cell, keep, precision)  # type: ignore[no-untyped-call]
    return outputs, (outputs[:, -1],) if last is None else (outputs[:, -1], last)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        hidden: Tensor,
        cell: Tensor | None,
        keep: Tensor,
        precision: Precision,
    ) -> tuple[Tensor, Tensor | None]:
        members, steps, batch, _ = inputs.shape
        units = hidden.shape[-1]
        gates = inputs.shape[-1] // units
        inputs, hidden, keep = inputs.contiguous(), hidden.contiguous(), keep.contiguous()
        weight = weight.contiguous()
        plan = Plan.of(units, gates, precision, backward=False)
        small = torch.bfloat16 if precision == "bf16" else torch.float32
        if plan.columns:  # A conversion at every step would cost more than this one.
            weight = weight.to(small)
        shape = (members, steps, batch, units)
        outputs = torch.empty(shape, device=inputs.device)
        cells = outputs if cell is None else torch.empty_like(outputs)
        previous = torch.empty(shape, device=inputs.device, dtype=small)
        activations = torch.empty(members, steps, batch, 4 * units, device=inputs.device, dtype=small)
        cell = None if cell is None else cell.contiguous()
        kernel = kernels.forward_streaming if plan.columns else kernels.forward_resident
        kernel[_grid(members, batch, plan)](
            *(inputs, weight, hidden if bias is None else bias.contiguous(), hidden, hidden if cell is None else cell),
            *(keep, outputs, cells, activations, previous, steps, batch),
            **_constants(plan, units, cell is None, precision),
            BIAS=bias is not None,
        )
        ctx.save_for_backward(weight, hidden if cell is None else cell, keep, cells, activations, previous)
        ctx.precision, ctx.is_gru, ctx.has_bias = precision, cell is None, bias is not None
        ctx.dtypes = inputs.dtype, weight.dtype
        ctx.set_materialize_grads(False)
        return outputs, None if cell is None else cells[:, -1]

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, d_outputs: Tensor | None, d_last: Tensor | None) -> tuple[Any, ...]:
        weight, cell, keep, cells, activations, previous = ctx.saved_tensors
        members, steps, batch, units = previous.shape
        gates = weight.shape[1] // units
        plan = Plan.of(units, gates, ctx.precision, backward=True)
        d_outputs = torch.zeros_like(cells) if d_outputs is None else d_outputs.contiguous()
        dtype = ctx.dtypes[0]
        d_inputs = torch.empty(members, steps, batch, gates * units, device=cells.device, dtype=dtype)
        d_products = torch.empty_like(d_inputs) if ctx.is_gru else d_inputs
        d_hidden = torch.empty(members, batch, units, device=cells.device)
        d_cell = d_hidden if ctx.is_gru else torch.empty_like(d_hidden)
        kernel = kernels.backward_streaming if plan.columns else kernels.backward_resident
        kernel[_grid(members, batch, plan)](
            *(weight, cell, keep, cells, activations, previous, d_outputs),
            *(d_hidden if d_last is None else d_last.contiguous(), d_inputs, d_products, d_hidden, d_cell),
            *(steps, batch),
            **_constants(plan, units, ctx.is_gru, ctx.precision),
            LAST=d_last is not None,
        )
        rows = d_products.flatten(1, 2)
        d_weight = torch.bmm(rows.mT.to(previous.dtype), previous.flatten(1, 2)).float()
        d_bias = rows[..., 2 * units :].sum(1, dtype=torch.float32) if ctx.has_bias else None
        return d_inputs, d_weight, d_bias, d_hidden, None if ctx.is_gru else d_cell, None, None


def _grid(members: int, batch: int, plan: Plan) -> tuple[int, int]:
    return members, -(-batch // plan.rows)


def _constants(plan: Plan, units: int, is_gru: bool, precision: Precision) -> dict[str, Any]:
    tiles = {"COLUMNS": plan.columns, "DEPTH": plan.depth} if plan.columns else {}
    return {
        "UNITS": units,
        "WIDTH": width_of(units),
        "ROWS": plan.rows,
        "GRU": is_gru,
        "PRECISION": precision,
        "FAST": plan.fast,
        "num_warps": plan.warps,
        "num_stages": plan.stages,
        **tiles,
    }
