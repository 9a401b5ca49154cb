"""The recurrence in two Triton kernels, one forward and one backward; weights' gradients are one product after them."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from driftproof.nn.recurrence import kernels

if TYPE_CHECKING:
    from driftproof.nn.recurrence import Recurrence

Precision: TypeAlias = Literal["bf16", "tf32", "tf32x3", "ieee"]
ROWS = 16
"""Sequences of a program: the least that matrix units multiply."""
_WIDEST: dict[Precision, int] = {"bf16": 512, "tf32": 256, "tf32x3": 128, "ieee": 128}
"""Widths up to which a warp's registers hold the states that it multiplies."""
INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether kernels are interpreted, on a CPU, as TRITON_INTERPRET=1 asks for."""


class Plan(NamedTuple):
    """How the kernels of a shape run.

    Attributes:
        width: Units of the state, up to a power of two.
        columns: Units of a program, whose weights it holds on the chip.
        warps: Warps of a program.
        fast: Use the approximate tanh of the hardware, with an error below that of bfloat16.
    """

    width: int
    columns: int
    warps: int
    fast: bool

    @property
    def parts(self) -> int:
        """Programs that share the units of a member."""
        return self.width // self.columns

    @staticmethod
    def of(units: int, gates: int, precision: Precision, device: torch.device) -> Plan | None:
        """The fewest programs whose shared memory holds the weights; ``None``: there is no such plan."""
        width = max(16, int(triton.next_power_of_2(units)))
        if width > _WIDEST[precision]:
            return None
        plan = Plan(width, width, 8 if width >= 128 else 4, precision == "bf16" and not INTERPRETED)
        if device.type != "cuda":  # Interpreted programs run one after the other, and cannot wait for each other.
            return plan
        memory, multiprocessors = _chip(device.index or 0)
        size = 2 if precision == "bf16" else 4
        # Three TF32 products keep the rounded weights and the rest of each apart.
        weight_size = 2 * size if precision == "tf32x3" else size
        while plan.columns >= 16 and width * (gates * plan.columns * weight_size + 4 * ROWS * size) > memory:
            plan = plan._replace(columns=plan.columns // 2)
        # While some programs of a group wait for the others to start, other kernels of the kind must not fill the chip.
        return plan if plan.columns >= 16 and plan.parts <= multiprocessors // 4 else None


@lru_cache
def _chip(device: int) -> tuple[int, int]:
    """Bytes of shared memory that a program can use, and multiprocessors."""
    properties = triton.runtime.driver.active.utils.get_device_properties(device)
    return properties["max_shared_mem"], properties["multiprocessor_count"]


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
        plan = Plan.of(units, gates, precision, inputs.device)
        assert plan is not None
        small = torch.bfloat16 if precision == "bf16" else torch.float32
        shape = (members, steps, batch, units)
        outputs = torch.empty(shape, device=inputs.device)
        cells = outputs if cell is None else torch.empty_like(outputs)
        previous = torch.empty(shape, device=inputs.device, dtype=small)
        activations = torch.empty(members, steps, batch, 4 * units, device=inputs.device, dtype=small)
        cell = None if cell is None else cell.contiguous()
        groups = members * -(-batch // ROWS)
        with torch.cuda.device_of(inputs):  # type: ignore[no-untyped-call]
            kernels.forward[(groups * plan.parts,)](
                *(
                    inputs,
                    weight,
                    hidden if bias is None else bias.contiguous(),
                    hidden,
                    hidden if cell is None else cell,
                ),
                *(keep, outputs, cells, activations, previous, _meeting(groups, plan, keep), steps, batch),
                **_constants(plan, units, cell is None, precision),
                BIAS=bias is not None,
            )
        ctx.save_for_backward(weight, hidden if cell is None else cell, keep, cells, activations, previous)
        ctx.precision, ctx.is_gru, ctx.has_bias = precision, cell is None, bias is not None
        ctx.dtype = inputs.dtype
        ctx.set_materialize_grads(False)
        return outputs, None if cell is None else cells[:, -1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_outputs: Tensor | None, d_last: Tensor | None) -> tuple[Any, ...]:
        weight, cell, keep, cells, activations, previous = ctx.saved_tensors
        members, steps, batch, units = previous.shape
        gates = weight.shape[1] // units
        plan = Plan.of(units, gates, ctx.precision, weight.device)
        assert plan is not None
        d_outputs = torch.zeros_like(cells) if d_outputs is None else d_outputs.contiguous()
        d_inputs = torch.empty(members, steps, batch, gates * units, device=cells.device, dtype=ctx.dtype)
        d_products = torch.empty_like(d_inputs) if ctx.is_gru else d_inputs
        d_hidden = torch.empty(members, batch, units, device=cells.device)
        d_cell = d_hidden if ctx.is_gru else torch.empty_like(d_hidden)
        groups = members * -(-batch // ROWS)
        with torch.cuda.device_of(weight):  # type: ignore[no-untyped-call]
            kernels.backward[(groups * plan.parts,)](
                *(weight, cell, keep, cells, activations, previous, d_outputs),
                *(d_hidden if d_last is None else d_last.contiguous(), d_inputs, d_products, d_hidden, d_cell),
                *(_meeting(groups, plan, keep), steps, batch),
                **_constants(plan, units, ctx.is_gru, ctx.precision),
                LAST=d_last is not None,
            )
        rows = d_products.flatten(1, 2)
        d_weight = torch.bmm(rows.mT.to(previous.dtype), previous.flatten(1, 2)).float()
        d_bias = rows[..., 2 * units :].sum(1, dtype=torch.float32) if ctx.has_bias else None
        return d_inputs, d_weight, d_bias, d_hidden, None if ctx.is_gru else d_cell, None, None


def _meeting(groups: int, plan: Plan, unused: Tensor) -> Tensor:
    """Counters where the programs of a group meet."""
    return unused if plan.parts == 1 else torch.zeros(32 * (1 + groups), dtype=torch.int32, device=unused.device)


def _constants(plan: Plan, units: int, is_gru: bool, precision: Precision) -> dict[str, Any]:
    return {
        "UNITS": units,
        "WIDTH": plan.width,
        "COLUMNS": plan.columns,
        "ROWS": ROWS,
        "GRU": is_gru,
        "PRECISION": precision,
        "FAST": plan.fast,
        "num_warps": plan.warps,
        "num_stages": 1,
    }
