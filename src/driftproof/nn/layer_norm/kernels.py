"""Triton kernels of layer normalisation: a program takes as many rows as its registers hold.

Statistics are float32, for any type of inputs and results.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def _normalised(inputs, places, mask, epsilon, UNITS: tl.constexpr):
    """Normalised rows, and the inverse of each row's standard deviation."""
    x = tl.load(inputs + places, mask, 0.0).to(tl.float32)
    x = tl.where(mask, x - (tl.sum(x, 1) / UNITS)[:, None], 0.0)
    factor = tl.rsqrt(tl.sum(x * x, 1) / UNITS + epsilon)
    return x * factor[:, None], factor


@triton.jit
def _places(COUNT, UNITS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Places of a program's elements, and which of them there are."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    units = tl.arange(0, WIDTH)
    return rows[:, None] * UNITS + units[None, :], (rows < COUNT)[:, None] & (units < UNITS)[None, :]


@triton.jit
def forward(inputs, outputs, epsilon, COUNT, UNITS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Write normalised rows."""
    places, mask = _places(COUNT, UNITS, WIDTH, ROWS)
    y, _ = _normalised(inputs, places, mask, epsilon, UNITS)
    tl.store(outputs + places, y, mask)


@triton.jit
def backward(inputs, d_outputs, d_inputs, epsilon, COUNT, UNITS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Write gradients of the inputs; the rows' statistics are computed anew, which costs less than reading them."""
    places, mask = _places(COUNT, UNITS, WIDTH, ROWS)
    y, factor = _normalised(inputs, places, mask, epsilon, UNITS)
    d = tl.load(d_outputs + places, mask, 0.0).to(tl.float32)
    along = (tl.sum(d * y, 1) / UNITS)[:, None]
    d = (d - (tl.sum(d, 1) / UNITS)[:, None] - y * along) * factor[:, None]
    tl.store(d_inputs + places, d, mask)
