"""The plain recurrence of LSTM and GRU with a member axis: torch's modules, reset where episodes start."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from driftproof.nn.cores import GRUCore, LSTMCore, masked_pair
from driftproof.nn.recurrence import plain, reason_against_kernels, recurrence
from tests.nn.recurrences import random_case


def torch_module(module, weight, bias, member):
    """torch's module with these weights, and inputs that are the gates' arguments themselves."""
    gates, units = weight.shape[1:]
    own = module(gates, units, dtype=weight.dtype)
    with torch.no_grad():
        own.weight_ih_l0.copy_(torch.eye(gates))
        own.weight_hh_l0.copy_(weight[member])
        own.bias_ih_l0.zero_()
        own.bias_hh_l0.zero_()
        if bias is not None:
            own.bias_hh_l0[2 * units :] = bias[member]
    return own


@given(
    module=st.sampled_from([nn.LSTM, nn.GRU]),
    members=st.integers(1, 3),
    steps=st.integers(1, 9),
    batch=st.integers(1, 4),
    units=st.integers(1, 6),
    seed=st.integers(0, 10_000),
)
def test_plain_form_equals_the_modules_of_torch(module, members, steps, batch, units, seed):
    inputs, weight, bias, state, keep = random_case(module, members, steps, batch, units, seed)
    outputs, last = recurrence(inputs, weight, bias, state, keep)
    for member in range(members):
        own, now = torch_module(module, weight, bias, member), tuple(part[member : member + 1] for part in state)
        for step in range(steps):
            now = tuple(part * keep[member, step, :, None] for part in now)
            output, new = own(inputs[member, step : step + 1], now if len(now) > 1 else now[0])
            now = new if len(now) > 1 else (new,)
            torch.testing.assert_close(outputs[member, step], output[0], atol=1e-12, rtol=1e-12)
        for ours, theirs in zip(last, now, strict=True):
            torch.testing.assert_close(ours[member], theirs[0], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("module", [nn.LSTM, nn.GRU])
def test_gradients_of_the_plain_form_are_finite_differences(module):
    inputs, weight, bias, state, keep = random_case(module, 2, 4, 2, 3, seed=1)
    tensors = [tensor.requires_grad_() for tensor in (inputs, weight, *state, *([] if bias is None else [bias]))]

    def run(inputs, weight, *rest):
        state, bias = (rest, None) if module is nn.LSTM else (rest[:1], rest[1])
        outputs, last = plain.run(inputs, weight, bias, state, keep)
        return outputs, *last

    assert torch.autograd.gradcheck(run, tensors)


def test_the_plain_form_says_why_it_runs():
    assert reason_against_kernels(torch.zeros(2, 512, 128)) in ("Triton is not installed", "the weights are on cpu")


@pytest.mark.parametrize("core_class", [LSTMCore, GRUCore])
def test_two_cores_as_one_group_equal_each_alone(core_class):
    torch.manual_seed(0)
    cores = tuple(core_class(3, 5, 2) for _ in range(2))
    inputs, keep = tuple(torch.randn(7, 4, 3) for _ in range(2)), (torch.rand(7, 4) > 0.2).float()
    states = tuple(tuple(torch.randn(2, 4, 5) for _ in range(core_class.parts)) for _ in range(2))
    together = cores[0].masked_as_one(cores, inputs, states, keep)
    for ours, alone in zip(together, masked_pair(cores, inputs, states, keep), strict=True):
        torch.testing.assert_close(ours, alone, atol=1e-6, rtol=1e-5)
