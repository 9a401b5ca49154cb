"""Triton kernels of a step of ``MEMBERS`` members, whose parameters lie side by side ``[MEMBERS, ELEMENTS]``.

A step waits twice for numbers of all of a member's elements: for norms, which decide whether and how far it goes, and
for the extremes of its utilities. Hence three passes over memory, of which only the last one writes: :func:`measure`,
:func:`find_extremes` and :func:`move`. What a member's numbers say to skip is neither read nor written.

No argument may be called ``params``, ``specialization`` or ``options``, as variables of Triton's launcher are.

All is float32. Numbers of a member are a column of ``numbers`` ``[..., MEMBERS]``, whose rows the launcher names.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

_INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _lerp(start, end, weight):
    """As torch computes it."""
    difference = end - start
    return tl.where(weight < 0.5, start + weight * difference, end - difference * (1 - weight))


@triton.jit
def _utility(grad, param, utility, weight):
    """The utility after the step, by the weight of the old one less one."""
    return utility + weight * (utility + grad * param)


@triton.jit
def measure(
    grads,
    moments,
    weights,
    starts,
    lengths,
    results,
    CHUNKS,
    ELEMENTS,
    MOMENTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum of squares and largest magnitude of a chunk's gradients, and sum of squares of its moments after the step.

    The moments count as if all members took the step. Results are ``[3, MEMBERS, CHUNKS]``: squares of gradients, of
    moments, magnitudes.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    member, chunk = program // CHUNKS, program % CHUNKS
    offsets = tl.arange(0, BLOCK)
    mask = offsets < tl.load(lengths + chunk)
    places = member.to(tl.int64) * ELEMENTS + tl.load(starts + chunk) + offsets
    grad = tl.load(grads + places, mask, 0.0)
    tl.store(results + program, tl.sum(grad * grad, 0))
    tl.store(results + 2 * programs + program, tl.max(tl.abs(grad), 0))
    if MOMENTS:
        moment = _lerp(tl.load(moments + places, mask, 0.0), grad, tl.load(weights + member))
        tl.store(results + programs + program, tl.sum(moment * moment, 0))


@triton.jit
def gather(
    chunks,
    firsts,
    results,
    CHUNKS,
    PARAMETERS,
    MOMENTS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Results of :func:`measure` of all chunks of a parameter: ``[3, MEMBERS, PARAMETERS]``."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    member, parameter = program // PARAMETERS, program % PARAMETERS
    first = tl.load(firsts + parameter)
    places = first + tl.arange(0, WIDTH)
    mask = places < tl.load(firsts + parameter + 1)
    places += member * CHUNKS
    plane = (programs // PARAMETERS) * CHUNKS
    tl.store(results + program, tl.sum(tl.load(chunks + places, mask, 0.0), 0))
    tl.store(results + 2 * programs + program, tl.max(tl.load(chunks + 2 * plane + places, mask, 0.0), 0))
    if MOMENTS:
        tl.store(results + programs + program, tl.sum(tl.load(chunks + plane + places, mask, 0.0), 0))


@triton.jit
def _number(numbers, row, member, MEMBERS):
    return tl.load(numbers + row * MEMBERS + member)


@triton.jit
def _block(numbers, BLOCKS, ELEMENTS, BLOCK: tl.constexpr):
    """A program's member, places of its elements, and which of them there are: none if the member does not proceed."""
    program = tl.program_id(0)
    member = program // BLOCKS
    offsets = (program % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    count = tl.where(tl.load(numbers + member) != 0, ELEMENTS, 0)
    return member, member.to(tl.int64) * ELEMENTS + offsets, offsets < count


@triton.jit
def find_extremes(
    grads,
    values,
    utilities,
    numbers,
    results,
    MEMBERS,
    BLOCKS,
    ELEMENTS,
    BLOCK: tl.constexpr,
):
    """The largest utility of a block after the step, and the largest negative of one: ``[2, MEMBERS, BLOCKS]``."""
    member, places, mask = _block(numbers, BLOCKS, ELEMENTS, BLOCK)
    grad = tl.load(grads + places, mask, 0.0) * _number(numbers, 1, member, MEMBERS)
    param, utility = tl.load(values + places, mask, 0.0), tl.load(utilities + places, mask, 0.0)
    utility = _utility(grad, param, utility, _number(numbers, 2, member, MEMBERS))
    program, programs = tl.program_id(0), tl.num_programs(0)
    tl.store(results + program, tl.max(tl.where(mask, utility, -_INFINITY), 0))
    tl.store(results + programs + program, tl.max(tl.where(mask, -utility, -_INFINITY), 0))


@triton.jit
def _mobility(utility, gates, member, MEMBERS, MINMAX: tl.constexpr):
    """``1 - s`` of the gate ``s``."""
    quotient = utility / _number(gates, 0, member, MEMBERS)
    if MINMAX:
        rank = (quotient - _number(gates, 1, member, MEMBERS)) * _number(gates, 2, member, MEMBERS)
        rank = tl.minimum(tl.maximum(rank, 0.0), 1.0) - 0.5
        quotient = rank * _number(gates, 3, member, MEMBERS)
    # The derivative of softplus, as torch computes it: beyond 50 it counts as 1, and the exponential is finite.
    power = tl.exp(tl.minimum(-quotient, 50.0))
    return tl.where(-quotient > 50.0, 1.0, power / (power + 1))


@triton.jit
def move(
    grads,
    values,
    utilities,
    first_moments,
    second_moments,
    moments,
    noise,
    followed,
    numbers,
    gates,
    MEMBERS,
    BLOCKS,
    ELEMENTS,
    ADAM: tl.constexpr,
    NOISE: tl.constexpr,
    MINMAX: tl.constexpr,
    MOMENTS: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update a block of utilities, of moments and of averages of gradients, and move its parameters.

    Without moments, also write the gradients that the step has followed.
    """
    member, places, mask = _block(numbers, BLOCKS, ELEMENTS, BLOCK)
    # All loads come first: the compiler moves none of them before a store.
    raw = tl.load(grads + places, mask, 0.0)
    param = tl.load(values + places, mask, 0.0)
    utility = tl.load(utilities + places, mask, 0.0)
    if ADAM:
        first = tl.load(first_moments + places, mask, 0.0)
        second = tl.load(second_moments + places, mask, 0.0)
    if MOMENTS:
        moment = tl.load(moments + places, mask, 0.0)
    if NOISE:
        drawn = tl.load(noise + places, mask, 0).to(tl.float32)

    grad = raw * _number(numbers, 1, member, MEMBERS)
    utility = _utility(grad, param, utility, _number(numbers, 2, member, MEMBERS))
    tl.store(utilities + places, utility, mask)
    if MOMENTS:
        tl.store(moments + places, _lerp(moment, raw, _number(numbers, 3, member, MEMBERS)), mask)
    step = grad
    if ADAM:
        first = _lerp(first, grad, _number(numbers, 4, member, MEMBERS))
        second = _lerp(second, grad * grad, _number(numbers, 5, member, MEMBERS))
        tl.store(first_moments + places, first, mask)
        tl.store(second_moments + places, second, mask)
        scale, offset = _number(numbers, 6, member, MEMBERS), _number(numbers, 7, member, MEMBERS)
        step = first / (offset + tl.sqrt(second) * scale)
    else:
        tl.store(followed + places, grad, mask)
    if NOISE:
        step += drawn * _number(numbers, 8, member, MEMBERS)
    step *= _mobility(utility, gates, member, MEMBERS, MINMAX)
    moved = param * _number(numbers, 9, member, MEMBERS) + step * _number(numbers, 10, member, MEMBERS)
    if SCALED:
        moved = param + _number(numbers, 11, member, MEMBERS) * (moved - param)
    tl.store(values + places, moved, mask)
