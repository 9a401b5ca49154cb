"""Triton kernels of the recurrence of LSTM and GRU: the loop over time runs inside of a kernel.

A program runs ``ROWS`` sequences of one member and holds its recurrent weights on the chip. Weights that do not fit
there are split by units among ``WIDTH / COLUMNS`` programs, which exchange their parts of the state through memory, and
wait for each other, at every step.

Matrix products are in bfloat16 or TF32, in three TF32 products (as exact as float32), or in float32; sums and states
are float32.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import triton
import triton.language as tl

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _tanh(x, FAST: tl.constexpr):
    if FAST:
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _sigmoid(x, FAST: tl.constexpr):
    if FAST:
        return 0.5 * _tanh(0.5 * x, True) + 0.5
    else:
        return tl.sigmoid(x)


@triton.jit
def _product(a, b, total, PRECISION: tl.constexpr):
    """``total + a @ b``."""
    if PRECISION == "bf16":
        if _INTERPRETED:  # Its products of bfloat16 multiply the bits.
            return tl.dot(a.to(tl.bfloat16).to(tl.float32), b.to(tl.bfloat16).to(tl.float32), total)
        else:
            return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), total)
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision=PRECISION)


@triton.jit
def _weight(pointer, rows, columns, UNITS: tl.constexpr, PRECISION: tl.constexpr):
    """A tile of one gate's weights ``[rows, columns]`` of ``[UNITS, UNITS]`` in the precision of products."""
    places = rows[:, None] * UNITS + columns[None, :]
    tile = tl.load(pointer + places, (rows < UNITS)[:, None] & (columns < UNITS)[None, :], 0.0)
    return tile.to(tl.bfloat16) if PRECISION == "bf16" else tile.to(tl.float32)


@triton.jit
def _lstm(a0, a1, a2, a3, cell, FAST: tl.constexpr):
    """Gates, hidden state and cell from the gates' arguments."""
    g0, g1 = _sigmoid(a0, FAST), _sigmoid(a1, FAST)
    g2, g3 = _tanh(a2, FAST), _sigmoid(a3, FAST)
    cell = g1 * cell + g0 * g2
    return g0, g1, g2, g3, g3 * _tanh(cell, FAST), cell


@triton.jit
def _gru(a0, a1, x2, a2, hidden, FAST: tl.constexpr):
    """Gates and hidden state; the candidate's argument is ``x2 + reset * a2``."""
    g0, g1 = _sigmoid(a0, FAST), _sigmoid(a1, FAST)
    g2 = _tanh(x2 + g0 * a2, FAST)
    return g0, g1, g2, g2 + g1 * (hidden - g2)


@triton.jit
def _lstm_gradients(g0, g1, g2, g3, cell, before, d_hidden, d_cell, FAST: tl.constexpr):
    """Gradients of the four gates' arguments, and of the cell before the step."""
    squashed = _tanh(cell, FAST)
    d_cell += d_hidden * g3 * (1 - squashed * squashed)
    d0, d1 = d_cell * g2 * g0 * (1 - g0), d_cell * before * g1 * (1 - g1)
    d2, d3 = d_cell * g0 * (1 - g2 * g2), d_hidden * squashed * g3 * (1 - g3)
    return d0, d1, d2, d3, d_cell * g1


@triton.jit
def _gru_gradients(g0, g1, g2, product, before, d_hidden):
    """Gradients of the gates' arguments, of the candidate's recurrent product, and of the hidden state before."""
    d1 = d_hidden * (before - g2) * g1 * (1 - g1)
    d2 = d_hidden * (1 - g1) * (1 - g2 * g2)
    return d2 * product * g0 * (1 - g0), d1, d2, d2 * g0, d_hidden * g1


@triton.jit
def _place(meeting, PARTS: tl.constexpr):
    """This program's part of the units, its group, and the counter where the programs of its group meet.

    Parts are numbered in the order in which programs start: all parts of earlier groups then run or have ended, so that
    a group whose parts have not all started waits for groups that end, and never for itself.
    """
    program = tl.program_id(0)
    if PARTS > 1:
        program = tl.atomic_add(meeting, 1)
    group = program // PARTS
    return program % PARTS, group, meeting + 32 * (1 + group)  # A line of the cache for each.


@triton.jit
def _arrive(meeting, PARTS: tl.constexpr):
    """Let the group's other programs see what all threads of this program have written."""
    if PARTS > 1:
        tl.debug_barrier()
        tl.atomic_add(meeting, 1, sem="release")


@triton.jit
def _wait(meeting, times, PARTS: tl.constexpr):
    """Wait until all programs of the group have arrived so many times."""
    if PARTS > 1:
        while tl.atomic_add(meeting, 0, sem="acquire") < times * PARTS:
            pass
        tl.debug_barrier()


@triton.jit
def forward(
    inputs, weight, bias, hidden, cell, keep, outputs, cells, gates, previous, meeting, STEPS, BATCH,
    UNITS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, GRU: tl.constexpr,
    BIAS: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """All steps; writes outputs, cells, gates and the masked hidden states before each step."""
    GATES: tl.constexpr = 3 if GRU else 4
    PARTS: tl.constexpr = WIDTH // COLUMNS
    part, group, meeting = _place(meeting, PARTS)
    blocks = tl.cdiv(BATCH, ROWS)
    member, rows = (group // blocks).to(tl.int64), group % blocks * ROWS + tl.arange(0, ROWS)
    units, inner = part * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, WIDTH)
    present = rows < BATCH
    mask = present[:, None] & (units < UNITS)[None, :]
    whole = present[:, None] & (inner < UNITS)[None, :]
    weight += member * GATES * UNITS * UNITS
    w0 = tl.trans(_weight(weight, units, inner, UNITS, PRECISION))
    w1 = tl.trans(_weight(weight + UNITS * UNITS, units, inner, UNITS, PRECISION))
    w2 = tl.trans(_weight(weight + 2 * UNITS * UNITS, units, inner, UNITS, PRECISION))
    if not GRU:
        w3 = tl.trans(_weight(weight + 3 * UNITS * UNITS, units, inner, UNITS, PRECISION))
    # Places in [M, B, units], and in a step of [M, T, B, units], of [M, T, B, gates * units] and of [M, T, B].
    places = rows[:, None] * UNITS + units[None, :]
    h = tl.load(hidden + member * BATCH * UNITS + places, mask, 0.0).to(tl.float32)
    if GRU:
        b = tl.zeros([COLUMNS], tl.float32)
        if BIAS:
            b += tl.load(bias + member * UNITS + units, units < UNITS, 0.0)
    else:
        c = tl.load(cell + member * BATCH * UNITS + places, mask, 0.0).to(tl.float32)
    start = member * STEPS * BATCH
    keep += start + rows
    outputs += start * UNITS + places
    cells += start * UNITS + places
    all_previous = previous + start * UNITS + rows[:, None] * UNITS + inner[None, :]
    previous += start * UNITS + places
    inputs += start * GATES * UNITS + rows[:, None] * (GATES * UNITS) + units[None, :]
    gates += start * 4 * UNITS + rows[:, None] * (4 * UNITS) + units[None, :]
    # Inputs are loaded a step ahead, as the loads take longer than the products.
    x0 = tl.load(inputs, mask, 0.0)
    x1 = tl.load(inputs + UNITS, mask, 0.0)
    x2 = tl.load(inputs + 2 * UNITS, mask, 0.0)
    if not GRU:
        x3 = tl.load(inputs + 3 * UNITS, mask, 0.0)
    kept = tl.load(keep, present, 0.0)
    h *= kept[:, None]
    tl.store(previous, h, mask)
    _arrive(meeting, PARTS)
    for step in range(STEPS):
        ahead = mask & (step + 1 < STEPS)
        inputs += BATCH * GATES * UNITS
        keep += BATCH
        previous += BATCH * UNITS
        y0 = tl.load(inputs, ahead, 0.0)
        y1 = tl.load(inputs + UNITS, ahead, 0.0)
        y2 = tl.load(inputs + 2 * UNITS, ahead, 0.0)
        if not GRU:
            y3 = tl.load(inputs + 3 * UNITS, ahead, 0.0)
        kept_next = tl.load(keep, present & (step + 1 < STEPS), 0.0)
        if PARTS > 1:
            _wait(meeting, step + 1, PARTS)
            before = tl.load(all_previous, whole, 0.0, cache_modifier=".cg")
            all_previous += BATCH * UNITS
        else:
            before = h
        a0 = _product(before, w0, x0.to(tl.float32), PRECISION)
        a1 = _product(before, w1, x1.to(tl.float32), PRECISION)
        if GRU:
            a2 = _product(before, w2, tl.zeros([ROWS, COLUMNS], tl.float32), PRECISION) + b[None, :]
            g0, g1, g2, output = _gru(a0, a1, x2.to(tl.float32), a2, h, FAST)
            g3 = a2
        else:
            a2 = _product(before, w2, x2.to(tl.float32), PRECISION)
            a3 = _product(before, w3, x3.to(tl.float32), PRECISION)
            g0, g1, g2, g3, output, c = _lstm(a0, a1, a2, a3, c * kept[:, None], FAST)
        h = output * kept_next[:, None]
        tl.store(previous, h, ahead)
        _arrive(meeting, PARTS)
        if not GRU:
            tl.store(cells, c, mask)
        tl.store(outputs, output, mask)
        tl.store(gates, g0, mask)
        tl.store(gates + UNITS, g1, mask)
        tl.store(gates + 2 * UNITS, g2, mask)
        tl.store(gates + 3 * UNITS, g3, mask)
        outputs += BATCH * UNITS
        cells += BATCH * UNITS
        gates += BATCH * 4 * UNITS
        x0, x1, x2, kept = y0, y1, y2, kept_next
        if not GRU:
            x3 = y3


@triton.jit
def backward(
    weight, cell, keep, cells, gates, previous, d_outputs, d_cell_last, d_inputs, d_products, d_hidden, d_cell, meeting,
    STEPS, BATCH,
    UNITS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, GRU: tl.constexpr,
    LAST: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """All steps, the last first: gradients of inputs, of recurrent products (GRU only) and of the initial state."""
    GATES: tl.constexpr = 3 if GRU else 4
    PARTS: tl.constexpr = WIDTH // COLUMNS
    part, group, meeting = _place(meeting, PARTS)
    blocks = tl.cdiv(BATCH, ROWS)
    member, rows = (group // blocks).to(tl.int64), group % blocks * ROWS + tl.arange(0, ROWS)
    units, inner = part * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, WIDTH)
    present = rows < BATCH
    mask = present[:, None] & (units < UNITS)[None, :]
    whole = present[:, None] & (inner < UNITS)[None, :]
    weight += member * GATES * UNITS * UNITS
    w0 = _weight(weight, inner, units, UNITS, PRECISION)
    w1 = _weight(weight + UNITS * UNITS, inner, units, UNITS, PRECISION)
    w2 = _weight(weight + 2 * UNITS * UNITS, inner, units, UNITS, PRECISION)
    if not GRU:
        w3 = _weight(weight + 3 * UNITS * UNITS, inner, units, UNITS, PRECISION)
    places = rows[:, None] * UNITS + units[None, :]
    first = member * BATCH * UNITS + places
    start = (member * STEPS + STEPS - 1) * BATCH
    keep += start + rows
    d_outputs += start * UNITS + places
    cells += start * UNITS + places
    previous += start * UNITS + places
    wide = start * GATES * UNITS + rows[:, None] * (GATES * UNITS)
    d_inputs += wide + units[None, :]
    all_products = d_products + wide + inner[None, :]
    d_products += wide + units[None, :]
    gates += start * 4 * UNITS + rows[:, None] * (4 * UNITS) + units[None, :]
    zeros = tl.zeros([ROWS, COLUMNS], tl.float32)
    dh = zeros
    if not GRU:
        dc = zeros
        if LAST:
            dc += tl.load(d_cell_last + first, mask, 0.0)
        c_first = tl.load(cell + first, mask, 0.0).to(tl.float32)
        c = tl.load(cells, mask, 0.0)
        cells -= BATCH * UNITS
        before = tl.load(cells, mask & (STEPS > 1), 0.0)
    else:
        before = tl.load(previous, mask, 0.0)
    # As in the forward pass, the next step is loaded before this one is computed.
    kept = tl.load(keep, present, 0.0)
    g0 = tl.load(gates, mask, 0.0)
    g1 = tl.load(gates + UNITS, mask, 0.0)
    g2 = tl.load(gates + 2 * UNITS, mask, 0.0)
    g3 = tl.load(gates + 3 * UNITS, mask, 0.0)
    d_output = tl.load(d_outputs, mask, 0.0)
    for left in range(STEPS - 1, -1, -1):
        keep -= BATCH
        d_outputs -= BATCH * UNITS
        cells -= BATCH * UNITS
        previous -= BATCH * UNITS
        gates -= BATCH * 4 * UNITS
        ahead = mask & (left > 0)
        next_kept = tl.load(keep, present & (left > 0), 0.0)
        next0 = tl.load(gates, ahead, 0.0)
        next1 = tl.load(gates + UNITS, ahead, 0.0)
        next2 = tl.load(gates + 2 * UNITS, ahead, 0.0)
        next3 = tl.load(gates + 3 * UNITS, ahead, 0.0)
        next_d_output = tl.load(d_outputs, ahead, 0.0)
        g0, g1, g2, g3 = g0.to(tl.float32), g1.to(tl.float32), g2.to(tl.float32), g3.to(tl.float32)
        dh += d_output.to(tl.float32)
        if GRU:
            next_before = tl.load(previous, ahead, 0.0)
            d0, d1, d_input, d2, dh = _gru_gradients(g0, g1, g2, g3, before.to(tl.float32), dh)
            tl.store(d_inputs, d0, mask)
            tl.store(d_inputs + UNITS, d1, mask)
            tl.store(d_inputs + 2 * UNITS, d_input, mask)
        else:
            next_before = tl.load(cells, mask & (left > 1), 0.0)
            before = tl.where(left > 0, before, c_first)
            d0, d1, d2, d3, dc = _lstm_gradients(g0, g1, g2, g3, c, before * kept[:, None], dh, dc, FAST)
            dc *= kept[:, None]
            c = before
            dh = zeros
            tl.store(d_products + 3 * UNITS, d3, mask)
        tl.store(d_products, d0, mask)
        tl.store(d_products + UNITS, d1, mask)
        tl.store(d_products + 2 * UNITS, d2, mask)
        if PARTS > 1:
            _arrive(meeting, PARTS)
            _wait(meeting, STEPS - left, PARTS)
            d0 = tl.load(all_products, whole, 0.0, cache_modifier=".cg")
            d1 = tl.load(all_products + UNITS, whole, 0.0, cache_modifier=".cg")
            d2 = tl.load(all_products + 2 * UNITS, whole, 0.0, cache_modifier=".cg")
            if not GRU:
                d3 = tl.load(all_products + 3 * UNITS, whole, 0.0, cache_modifier=".cg")
            all_products -= BATCH * GATES * UNITS
        # A total for each product: a single one would wait for the product before.
        dh = _product(d0, w0, dh, PRECISION) + _product(d1, w1, zeros, PRECISION)
        if GRU:
            dh += _product(d2, w2, zeros, PRECISION)
        else:
            dh += _product(d2, w2, zeros, PRECISION) + _product(d3, w3, zeros, PRECISION)
        dh *= kept[:, None]
        d_inputs -= BATCH * GATES * UNITS
        d_products -= BATCH * GATES * UNITS
        g0, g1, g2, g3 = next0, next1, next2, next3
        kept, before, d_output = next_kept, next_before, next_d_output
    tl.store(d_hidden + first, dh, mask)
    if not GRU:
        tl.store(d_cell + first, dc, mask)
