"""The kernels of the recurrence against the plain form in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from driftproof.nn import recurrence as module
from driftproof.nn.cores import GRUCore, LSTMCore, NoCore, masked_pair
from driftproof.nn.recurrence import plain, reason_against_kernels, recurrence
from tests.nn.recurrences import random_case

pytestmark = pytest.mark.gpu

TOLERANCE = {"highest": 1e-5, "high": 3e-3, "bf16": 1e-2}
"""Relative errors, in the Euclidean norm of each tensor, by the precision of products."""


def results(run, inputs, weight, bias, state, keep, seed):
    """Outputs, last state and gradients of everything, by random gradients of outputs and last state."""
    tensors = [tensor.requires_grad_() for tensor in (inputs, weight, *state, *([] if bias is None else [bias]))]
    outputs, last = run(inputs, weight, bias, state, keep)
    generator = torch.Generator().manual_seed(seed)
    given = [torch.randn(part.shape, generator=generator).to(part) for part in (outputs, *last)]
    gradients = torch.autograd.grad([outputs, *last], tensors, given)
    return [outputs.detach(), *(part.detach() for part in last), *gradients]


def worst_error(kind, shape, precision, seed=0):
    case = random_case(kind, *shape, seed)
    exact = results(plain.run, *case, seed)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32

    def moved(part, dtype=torch.float32):
        return None if part is None else part.detach().to("cuda", dtype)

    inputs, weight, bias, state, keep = case
    arguments = moved(inputs, dtype), moved(weight), moved(bias), tuple(map(moved, state)), moved(keep)
    assert reason_against_kernels(arguments[1], dtype) is None
    ours = results(recurrence, *arguments, seed)
    # Inputs in bfloat16 are rounded before the recurrence: that error is not the kernels'.
    if precision == "bf16":
        exact = results(plain.run, arguments[0].double().cpu(), *case[1:], seed)
    return max(float((a.double().cpu() - b).norm() / b.norm()) for a, b in zip(ours, exact, strict=True))


@pytest.fixture(params=["highest", "high", "bf16"])
def precision(request):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest" if request.param == "bf16" else request.param)
    yield request.param
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 8), (2, 5, 3, 20), (2, 7, 17, 32), (3, 16, 16, 128), (2, 64, 16, 128), (70, 3, 33, 100)]
)
def test_kernels_equal_the_plain_form(kind, shape, precision):
    assert worst_error(kind, shape, precision) < TOLERANCE[precision]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("shape", [(2, 9, 5, 160), (2, 64, 16, 256), (64, 5, 17, 256), (3, 8, 16, 512)])
def test_weights_of_wide_cores_are_split_among_programs(kind, shape):
    assert worst_error(kind, shape, "bf16") < TOLERANCE["bf16"]


def test_random_shapes_and_masks(precision):
    rng = np.random.default_rng(0)
    for seed in range(8):
        shape = tuple(int(rng.integers(1, most)) for most in (6, 40, 40, 129))
        kind = (nn.LSTM, nn.GRU)[seed % 2]
        # Roundings of very few units do not average out.
        tolerance = TOLERANCE[precision] * (2 if shape[-1] < 8 else 1)
        assert worst_error(kind, shape, precision, seed) < tolerance, (shape, kind)


def test_all_programs_meet_many_times():
    """Groups of programs that wait for each other, many more than fit on the chip, again and again."""
    inputs, weight, bias, state, keep = (
        part.to("cuda", torch.float32) if isinstance(part, torch.Tensor) else part
        for part in random_case(nn.LSTM, 100, 20, 32, 256, 0)
    )
    state, inputs = tuple(part.to("cuda", torch.float32) for part in state), inputs.bfloat16()
    first = recurrence(inputs, weight, bias, state, keep)[0]
    for _ in range(20):
        assert torch.equal(recurrence(inputs, weight, bias, state, keep)[0], first)


@pytest.mark.parametrize("core_class", [LSTMCore, GRUCore])
def test_shapes_without_kernels_run_in_the_plain_form(core_class):
    core = core_class(3, 600).cuda()
    weight = core.recurrence.weight_hh_l0
    assert "do not fit" in reason_against_kernels(weight)
    state = tuple(part.cuda() for part in core.initial_state(2))
    keep = torch.ones(4, 2, device="cuda")
    inputs = torch.randn(4, 2, 3, device="cuda")
    torch.testing.assert_close(core.masked(inputs, state, keep), core(inputs, state), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "other", [LSTMCore(3, 8), LSTMCore(3, 16), GRUCore(3, 8), NoCore(3)], ids=["alike", "wider", "gru", "none"]
)
def test_two_cores_equal_each_alone(other):
    torch.manual_seed(0)
    cores = LSTMCore(3, 8).cuda(), other.cuda()
    states = tuple(tuple(torch.randn_like(part) for part in core.initial_state(5, "cuda")) for core in cores)
    inputs = torch.randn(6, 5, 3, device="cuda")
    keep = (torch.rand(6, 5, device="cuda") > 0.2).float()
    together = masked_pair(cores, (inputs, inputs), states, keep)
    for core, state, ours in zip(cores, states, together, strict=True):
        torch.testing.assert_close(ours, core.masked(inputs, state, keep), atol=1e-6, rtol=1e-5)


def test_without_triton_the_plain_form_runs(monkeypatch):
    monkeypatch.setattr(module, "fused", None)
    assert reason_against_kernels(torch.zeros(1, 512, 128, device="cuda")) == "Triton is not installed"
