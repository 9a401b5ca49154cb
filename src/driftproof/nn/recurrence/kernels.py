"""Triton kernels of the recurrence of LSTM and GRU: the loop over time runs inside of a kernel.

One program runs ``ROWS`` sequences of one member. *Resident* kernels hold all recurrent weights of a member on the
chip, in registers, and the state with them. *Streaming* kernels, for weights that do not fit, read them tile by tile at
every step, from the L2 cache if it can hold them; there the state passes from step to step through memory.

Matrix products are in bfloat16 or TF32, in three TF32 products (as exact as float32), or in float32; sums and states
are float32.
"""

# Kernels are compiled from their source: types of arguments are those of the call, and constants are in capitals.
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
def forward_resident(
    inputs, weight, bias, hidden, cell, keep, outputs, cells, gates, previous, STEPS, BATCH,
    UNITS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, GRU: tl.constexpr, BIAS: tl.constexpr,
    PRECISION: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """All steps; writes outputs, cells, gates and the masked hidden states before each step."""
    GATES: tl.constexpr = 3 if GRU else 4
    member = tl.program_id(0).to(tl.int64)
    rows, units = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    present = rows < BATCH
    mask = present[:, None] & (units < UNITS)[None, :]
    weight += member * GATES * UNITS * UNITS
    w0 = tl.trans(_weight(weight, units, units, UNITS, PRECISION))
    w1 = tl.trans(_weight(weight + UNITS * UNITS, units, units, UNITS, PRECISION))
    w2 = tl.trans(_weight(weight + 2 * UNITS * UNITS, units, units, UNITS, PRECISION))
    if not GRU:
        w3 = tl.trans(_weight(weight + 3 * UNITS * UNITS, units, units, UNITS, PRECISION))
    # Places in [M, B, units], and in a step of [M, T, B, units], of [M, T, B, gates * units] and of [M, T, B].
    places = rows[:, None] * UNITS + units[None, :]
    h = tl.load(hidden + member * BATCH * UNITS + places, mask, 0.0).to(tl.float32)
    if GRU:
        b = tl.zeros([WIDTH], tl.float32)
        if BIAS:
            b += tl.load(bias + member * UNITS + units, units < UNITS, 0.0)
    else:
        c = tl.load(cell + member * BATCH * UNITS + places, mask, 0.0).to(tl.float32)
    start = member * STEPS * BATCH
    keep += start + rows
    outputs += start * UNITS + places
    cells += start * UNITS + places
    previous += start * UNITS + places
    wide = rows[:, None] * (GATES * UNITS) + units[None, :]
    inputs += start * GATES * UNITS + wide
    gates += start * 4 * UNITS + rows[:, None] * (4 * UNITS) + units[None, :]
    # Inputs are loaded a step ahead, as the loads take longer than the products.
    x0 = tl.load(inputs, mask, 0.0)
    x1 = tl.load(inputs + UNITS, mask, 0.0)
    x2 = tl.load(inputs + 2 * UNITS, mask, 0.0)
    if not GRU:
        x3 = tl.load(inputs + 3 * UNITS, mask, 0.0)
    kept = tl.load(keep, present, 0.0)
    for step in range(STEPS):
        ahead = mask & (step + 1 < STEPS)
        inputs += BATCH * GATES * UNITS
        keep += BATCH
        y0 = tl.load(inputs, ahead, 0.0)
        y1 = tl.load(inputs + UNITS, ahead, 0.0)
        y2 = tl.load(inputs + 2 * UNITS, ahead, 0.0)
        if not GRU:
            y3 = tl.load(inputs + 3 * UNITS, ahead, 0.0)
        kept_next = tl.load(keep, present & (step + 1 < STEPS), 0.0)
        h *= kept[:, None]
        tl.store(previous, h, mask)
        a0 = _product(h, w0, x0.to(tl.float32), PRECISION)
        a1 = _product(h, w1, x1.to(tl.float32), PRECISION)
        if GRU:
            a2 = _product(h, w2, tl.zeros([ROWS, WIDTH], tl.float32), PRECISION) + b[None, :]
            g0, g1, g2, h = _gru(a0, a1, x2.to(tl.float32), a2, h, FAST)
            g3 = a2
        else:
            a2 = _product(h, w2, x2.to(tl.float32), PRECISION)
            a3 = _product(h, w3, x3.to(tl.float32), PRECISION)
            g0, g1, g2, g3, h, c = _lstm(a0, a1, a2, a3, c * kept[:, None], FAST)
            tl.store(cells, c, mask)
        tl.store(outputs, h, mask)
        tl.store(gates, g0, mask)
        tl.store(gates + UNITS, g1, mask)
        tl.store(gates + 2 * UNITS, g2, mask)
        tl.store(gates + 3 * UNITS, g3, mask)
        outputs += BATCH * UNITS
        cells += BATCH * UNITS
        previous += BATCH * UNITS
        gates += BATCH * 4 * UNITS
        x0, x1, x2, kept = y0, y1, y2, kept_next
        if not GRU:
            x3 = y3


@triton.jit
def backward_resident(
    weight, cell, keep, cells, gates, previous, d_outputs, d_cell_last, d_inputs, d_products, d_hidden, d_cell,
    STEPS, BATCH,
    UNITS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, GRU: tl.constexpr, LAST: tl.constexpr,
    PRECISION: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """All steps, the last first: gradients of inputs, of recurrent products (GRU only) and of the initial state."""
    GATES: tl.constexpr = 3 if GRU else 4
    member = tl.program_id(0).to(tl.int64)
    rows, units = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    present = rows < BATCH
    mask = present[:, None] & (units < UNITS)[None, :]
    weight += member * GATES * UNITS * UNITS
    w0 = _weight(weight, units, units, UNITS, PRECISION)
    w1 = _weight(weight + UNITS * UNITS, units, units, UNITS, PRECISION)
    w2 = _weight(weight + 2 * UNITS * UNITS, units, units, UNITS, PRECISION)
    if not GRU:
        w3 = _weight(weight + 3 * UNITS * UNITS, units, units, UNITS, PRECISION)
    places = rows[:, None] * UNITS + units[None, :]
    first = member * BATCH * UNITS + places
    dh = tl.zeros([ROWS, WIDTH], tl.float32)
    start = (member * STEPS + STEPS - 1) * BATCH
    keep += start + rows
    d_outputs += start * UNITS + places
    cells += start * UNITS + places
    previous += start * UNITS + places
    wide = start * GATES * UNITS + rows[:, None] * (GATES * UNITS) + units[None, :]
    d_inputs += wide
    d_products += wide
    gates += start * 4 * UNITS + rows[:, None] * (4 * UNITS) + units[None, :]
    if not GRU:
        dc = tl.zeros([ROWS, WIDTH], tl.float32)
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
    zeros = tl.zeros([ROWS, WIDTH], tl.float32)
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
            d0, d1, d2, d3, dh = _gru_gradients(g0, g1, g2, g3, before.to(tl.float32), dh)
            tl.store(d_products, d0, mask)
            tl.store(d_products + UNITS, d1, mask)
            tl.store(d_products + 2 * UNITS, d3, mask)
            # A total for each product: a single one would wait for the product before.
            dh = _product(d0, w0, dh, PRECISION)
            dh += _product(d1, w1, zeros, PRECISION) + _product(d3, w2, zeros, PRECISION)
        else:
            next_before = tl.load(cells, mask & (left > 1), 0.0)
            before = tl.where(left > 0, before, c_first)
            d0, d1, d2, d3, dc = _lstm_gradients(g0, g1, g2, g3, c, before * kept[:, None], dh, dc, FAST)
            dc *= kept[:, None]
            c = before
            tl.store(d_inputs + 3 * UNITS, d3, mask)
            dh = _product(d0, w0, zeros, PRECISION) + _product(d1, w1, zeros, PRECISION)
            dh += _product(d2, w2, zeros, PRECISION) + _product(d3, w3, zeros, PRECISION)
        tl.store(d_inputs, d0, mask)
        tl.store(d_inputs + UNITS, d1, mask)
        tl.store(d_inputs + 2 * UNITS, d2, mask)
        dh *= kept[:, None]
        d_inputs -= BATCH * GATES * UNITS
        d_products -= BATCH * GATES * UNITS
        g0, g1, g2, g3 = next0, next1, next2, next3
        kept, before, d_output = next_kept, next_before, next_d_output
    tl.store(d_hidden + first, dh, mask)
    if not GRU:
        tl.store(d_cell + first, dc, mask)


@triton.jit
def forward_streaming(
    inputs, weight, bias, hidden, cell, keep, outputs, cells, gates, previous, STEPS, BATCH,
    UNITS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, GRU: tl.constexpr, BIAS: tl.constexpr,
    PRECISION: tl.constexpr, FAST: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """As :func:`forward_resident`, with tiles of ``DEPTH`` by ``COLUMNS`` weights."""
    GATES: tl.constexpr = 3 if GRU else 4
    member = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    present = rows < BATCH
    start = member * STEPS * BATCH
    weight += member * GATES * UNITS * UNITS
    keep += start + rows
    outputs += start * UNITS
    cells += start * UNITS
    previous += start * UNITS
    inputs += start * GATES * UNITS
    gates += start * 4 * UNITS
    hidden += member * BATCH * UNITS
    cell += member * BATCH * UNITS
    kept = tl.load(keep, present, 0.0)
    for column in range(0, WIDTH, COLUMNS):
        units = column + tl.arange(0, COLUMNS)
        mask = present[:, None] & (units < UNITS)[None, :]
        places = rows[:, None] * UNITS + units[None, :]
        h = tl.load(hidden + places, mask, 0.0).to(tl.float32)
        tl.store(previous + places, h * kept[:, None], mask)
    for step in range(STEPS):
        tl.debug_barrier()  # The state was written by other threads.
        kept_next = tl.load(keep + BATCH, present & (step + 1 < STEPS), 0.0)
        for column in range(0, WIDTH, COLUMNS):
            units = column + tl.arange(0, COLUMNS)
            mask = present[:, None] & (units < UNITS)[None, :]
            places = rows[:, None] * UNITS + units[None, :]
            wide = rows[:, None] * (GATES * UNITS) + units[None, :]
            a0 = tl.load(inputs + wide, mask, 0.0).to(tl.float32)
            a1 = tl.load(inputs + UNITS + wide, mask, 0.0).to(tl.float32)
            x2 = tl.load(inputs + 2 * UNITS + wide, mask, 0.0).to(tl.float32)
            if GRU:
                a2 = tl.zeros([ROWS, COLUMNS], tl.float32)
                if BIAS:
                    a2 += tl.load(bias + member * UNITS + units, units < UNITS, 0.0)[None, :]
            else:
                a2 = x2
                a3 = tl.load(inputs + 3 * UNITS + wide, mask, 0.0).to(tl.float32)
            for depth in range(0, WIDTH, DEPTH):
                inner = depth + tl.arange(0, DEPTH)
                h = tl.load(
                    previous + rows[:, None] * UNITS + inner[None, :],
                    present[:, None] & (inner < UNITS)[None, :], 0.0,
                )  # fmt: skip
                w0 = _weight(weight, units, inner, UNITS, PRECISION)
                w1 = _weight(weight + UNITS * UNITS, units, inner, UNITS, PRECISION)
                w2 = _weight(weight + 2 * UNITS * UNITS, units, inner, UNITS, PRECISION)
                a0 = _product(h, tl.trans(w0), a0, PRECISION)
                a1 = _product(h, tl.trans(w1), a1, PRECISION)
                a2 = _product(h, tl.trans(w2), a2, PRECISION)
                if not GRU:
                    w3 = _weight(weight + 3 * UNITS * UNITS, units, inner, UNITS, PRECISION)
                    a3 = _product(h, tl.trans(w3), a3, PRECISION)
            is_first = step == 0
            if GRU:
                before = tl.load(outputs - BATCH * UNITS + places, mask & (step > 0), 0.0)
                before += tl.load(hidden + places, mask & is_first, 0.0).to(tl.float32)
                g0, g1, g2, new = _gru(a0, a1, x2, a2, before * kept[:, None], FAST)
                g3 = a2
            else:
                before = tl.load(cells - BATCH * UNITS + places, mask & (step > 0), 0.0)
                before += tl.load(cell + places, mask & is_first, 0.0).to(tl.float32)
                g0, g1, g2, g3, new, c = _lstm(a0, a1, a2, a3, before * kept[:, None], FAST)
                tl.store(cells + places, c, mask)
            tl.store(outputs + places, new, mask)
            tl.store(previous + BATCH * UNITS + places, new * kept_next[:, None], mask & (step + 1 < STEPS))
            tall = gates + rows[:, None] * (4 * UNITS) + units[None, :]
            tl.store(tall, g0, mask)
            tl.store(tall + UNITS, g1, mask)
            tl.store(tall + 2 * UNITS, g2, mask)
            tl.store(tall + 3 * UNITS, g3, mask)
        kept = kept_next
        keep += BATCH
        outputs += BATCH * UNITS
        cells += BATCH * UNITS
        previous += BATCH * UNITS
        inputs += BATCH * GATES * UNITS
        gates += BATCH * 4 * UNITS


@triton.jit
def backward_streaming(
    weight, cell, keep, cells, gates, previous, d_outputs, d_cell_last, d_inputs, d_products, d_hidden, d_cell,
    STEPS, BATCH,
    UNITS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, GRU: tl.constexpr, LAST: tl.constexpr,
    PRECISION: tl.constexpr, FAST: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """As :func:`backward_resident`, with tiles of weights; the initial state's gradients hold those of every step."""
    GATES: tl.constexpr = 3 if GRU else 4
    member = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    present = rows < BATCH
    start = (member * STEPS + STEPS - 1) * BATCH
    weight += member * GATES * UNITS * UNITS
    keep += start + rows
    d_outputs += start * UNITS
    cells += start * UNITS
    previous += start * UNITS
    d_inputs += start * GATES * UNITS
    d_products += start * GATES * UNITS
    gates += start * 4 * UNITS
    cell += member * BATCH * UNITS
    d_hidden += member * BATCH * UNITS
    d_cell += member * BATCH * UNITS
    d_cell_last += member * BATCH * UNITS
    for left in range(STEPS):
        kept = tl.load(keep, present, 0.0)
        later, is_first = left > 0, left == STEPS - 1
        for column in range(0, WIDTH, COLUMNS):
            units = column + tl.arange(0, COLUMNS)
            mask = present[:, None] & (units < UNITS)[None, :]
            places = rows[:, None] * UNITS + units[None, :]
            tall = gates + rows[:, None] * (4 * UNITS) + units[None, :]
            g0 = tl.load(tall, mask, 0.0).to(tl.float32)
            g1 = tl.load(tall + UNITS, mask, 0.0).to(tl.float32)
            g2 = tl.load(tall + 2 * UNITS, mask, 0.0).to(tl.float32)
            g3 = tl.load(tall + 3 * UNITS, mask, 0.0).to(tl.float32)
            dh = tl.load(d_outputs + places, mask, 0.0).to(tl.float32)
            dh += tl.load(d_hidden + places, mask & later, 0.0)
            wide = rows[:, None] * (GATES * UNITS) + units[None, :]
            if GRU:
                before = tl.load(previous + places, mask, 0.0).to(tl.float32)
                d0, d1, d2, d3, dh = _gru_gradients(g0, g1, g2, g3, before, dh)
                tl.store(d_products + wide, d0, mask)
                tl.store(d_products + UNITS + wide, d1, mask)
                tl.store(d_products + 2 * UNITS + wide, d3, mask)
                tl.store(d_hidden + places, dh, mask)
            else:
                dc = tl.load(d_cell + places, mask & later, 0.0)
                if LAST:
                    dc += tl.load(d_cell_last + places, mask & (left == 0), 0.0)
                c = tl.load(cells + places, mask, 0.0)
                before = tl.load(cells - BATCH * UNITS + places, mask & (left < STEPS - 1), 0.0)
                before += tl.load(cell + places, mask & is_first, 0.0).to(tl.float32)
                d0, d1, d2, d3, dc = _lstm_gradients(g0, g1, g2, g3, c, before * kept[:, None], dh, dc, FAST)
                tl.store(d_cell + places, dc * kept[:, None], mask)
                tl.store(d_inputs + 3 * UNITS + wide, d3, mask)
            tl.store(d_inputs + wide, d0, mask)
            tl.store(d_inputs + UNITS + wide, d1, mask)
            tl.store(d_inputs + 2 * UNITS + wide, d2, mask)
        tl.debug_barrier()  # Products take gradients that other threads wrote.
        for column in range(0, WIDTH, COLUMNS):
            units = column + tl.arange(0, COLUMNS)
            mask = present[:, None] & (units < UNITS)[None, :]
            places = rows[:, None] * UNITS + units[None, :]
            dh = tl.zeros([ROWS, COLUMNS], tl.float32)
            if GRU:
                dh += tl.load(d_hidden + places, mask, 0.0)
            for depth in range(0, GATES * UNITS, DEPTH):
                inner = depth + tl.arange(0, DEPTH)
                d = tl.load(
                    d_products + rows[:, None] * (GATES * UNITS) + inner[None, :],
                    present[:, None] & (inner < GATES * UNITS)[None, :], 0.0,
                )  # fmt: skip
                tile = tl.load(
                    weight + inner[:, None] * UNITS + units[None, :],
                    (inner < GATES * UNITS)[:, None] & (units < UNITS)[None, :], 0.0,
                )  # fmt: skip
                dh = _product(d, tile, dh, PRECISION)
            tl.store(d_hidden + places, dh * kept[:, None], mask)
        tl.debug_barrier()
        keep -= BATCH
        d_outputs -= BATCH * UNITS
        cells -= BATCH * UNITS
        previous -= BATCH * UNITS
        gates -= BATCH * 4 * UNITS
        d_inputs -= BATCH * GATES * UNITS
        d_products -= BATCH * GATES * UNITS
