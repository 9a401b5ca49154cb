"""Recurrent cores: one call over segments says what stepping says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from driftproof.nn.cores import GRUCore, LSTMCore, NoCore, make_core, mask_state, paired_stepper
from driftproof.nn.segments import Segments

CORES = [LSTMCore, GRUCore]


def random_case(core_class, steps, batch, layers, rate, seed):
    torch.manual_seed(seed)
    core = core_class(3, 5, layers)
    starts = np.random.default_rng(seed).random((steps, batch)) < rate
    state = tuple(torch.randn(layers, batch, 5) for _ in range(core.parts))
    return core, torch.randn(steps, batch, 3), state, starts


def stepped(core, inputs, state, starts, step=None):
    """The oracle: one step after the other, forgetting where episodes start."""
    outputs = []
    for x, start in zip(inputs, torch.from_numpy(starts), strict=True):
        state = mask_state(state, (~start).float().unsqueeze(1))
        output, state = (step or core.step)(x, state)
        outputs.append(output)
    return torch.stack(outputs)


def first_masked(state, starts):
    return mask_state(state, torch.from_numpy(~starts[0]).float().unsqueeze(1))


class TestOneCall:
    @given(
        core_class=st.sampled_from(CORES),
        steps=st.integers(1, 20),
        batch=st.integers(1, 6),
        layers=st.integers(1, 2),
        rate=st.sampled_from([0.0, 0.05, 0.3, 1.0]),
        seed=st.integers(0, 10_000),
    )
    def test_equals_stepping(self, core_class, steps, batch, layers, rate, seed):
        core, inputs, state, starts = random_case(core_class, steps, batch, layers, rate, seed)
        whole = core(inputs, first_masked(state, starts), Segments.cut(starts))
        torch.testing.assert_close(whole, stepped(core, inputs, state, starts), atol=1e-6, rtol=1e-5)

    @given(core_class=st.sampled_from(CORES), rate=st.sampled_from([0.0, 0.2]), seed=st.integers(0, 10_000))
    def test_masked_recurrence_equals_stepping(self, core_class, rate, seed):
        core, inputs, state, starts = random_case(core_class, 9, 4, 2, rate, seed)
        masked = core.masked(inputs, state, torch.from_numpy(~starts).float())
        torch.testing.assert_close(masked, stepped(core, inputs, state, starts), atol=1e-6, rtol=1e-5)

    @pytest.mark.parametrize("core_class", CORES)
    def test_gradients_equal_those_of_stepping(self, core_class):
        core, inputs, state, starts = random_case(core_class, 12, 5, 2, 0.2, 3)
        weights = list(core.parameters())
        weight = torch.randn(12, 5, 5)
        whole = core(inputs.requires_grad_(), first_masked(state, starts), Segments.cut(starts))
        ours = torch.autograd.grad((whole * weight).sum(), [*weights, inputs])
        theirs = torch.autograd.grad((stepped(core, inputs, state, starts) * weight).sum(), [*weights, inputs])
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)

    @pytest.mark.parametrize("core_class", CORES)
    def test_what_came_before_a_start_has_no_influence(self, core_class):
        core, inputs, state, starts = random_case(core_class, 10, 2, 1, 0.0, 0)
        starts[6, 0] = True
        other = inputs.clone()
        other[:6] += 1
        a, b = (core(x, state, Segments.cut(starts)) for x in (inputs, other))
        assert torch.equal(a[6:, 0], b[6:, 0])
        assert not torch.allclose(a[6:, 1], b[6:, 1])


class TestStepper:
    @pytest.mark.parametrize("core_class", CORES)
    @pytest.mark.parametrize("layers", [1, 2])
    def test_equals_step(self, core_class, layers):
        core, inputs, state, starts = random_case(core_class, 9, 4, layers, 0.2, 1)
        with torch.no_grad():
            fast = stepped(core, inputs, state, starts, core.stepper())
            slow = stepped(core, inputs, state, starts)
        torch.testing.assert_close(fast, slow, atol=1e-6, rtol=1e-5)

    def test_state_given_is_not_changed(self):
        core, inputs, state, _ = random_case(LSTMCore, 1, 4, 1, 0.0, 1)
        before = [part.clone() for part in state]
        with torch.no_grad():
            core.stepper()(inputs[0], state)
        assert all(torch.equal(a, b) for a, b in zip(state, before, strict=True))


class TestSegments:
    def test_no_cut_is_no_plan(self):
        starts = np.zeros((5, 3), dtype=bool)
        starts[0] = True
        assert Segments.cut(starts) is None

    @given(
        steps=st.integers(2, 40),
        batch=st.integers(1, 8),
        rate=st.sampled_from([0.02, 0.1, 0.5]),
        seed=st.integers(0, 10_000),
    )
    def test_every_sample_is_run_once_and_found_again(self, steps, batch, rate, seed):
        starts = np.random.default_rng(seed).random((steps, batch)) < rate
        plan = Segments.cut(starts)
        if plan is None:
            return
        # The identity instead of a core: what is at position p must be p.
        run = torch.cat([slab.flatten() for slab in plan.slabs])
        assert torch.equal(run[plan.positions], torch.arange(steps * batch))

    def test_padding_stays_small(self):
        starts = np.random.default_rng(0).random((32, 64)) < 0.05
        plan = Segments.cut(starts)
        assert sum(slab.numel() for slab in plan.slabs) < 1.2 * starts.size


@pytest.mark.parametrize("core_class", CORES)
@pytest.mark.parametrize("layers", [1, 2])
def test_a_run_can_be_continued(core_class, layers):
    core, inputs, state, _ = random_case(core_class, 12, 3, layers, 0.0, 0)
    whole, after = core.run(inputs, state)
    first, between = core.run(inputs[:5], state)
    second, end = core.run(inputs[5:], between)
    torch.testing.assert_close(torch.cat((first, second)), whole)
    torch.testing.assert_close(end, after)
    torch.testing.assert_close(whole, core(inputs, state))


def test_without_memory_what_comes_in_goes_out():
    core = make_core("none", 3, 99, 1)
    inputs = torch.randn(4, 2, 3)
    assert isinstance(core, NoCore)
    assert core.initial_state(2) == ()
    assert core(inputs, ()) is inputs
    assert core.masked(inputs, (), torch.ones(4, 2)) is inputs
    assert core.step(inputs[0], ())[1] == ()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (LSTMCore(3, 8), LSTMCore(3, 8)),
        (LSTMCore(3, 8), LSTMCore(3, 5)),
        (LSTMCore(3, 8, 2), LSTMCore(3, 8, 2)),
        (GRUCore(3, 8), GRUCore(3, 8)),
        (LSTMCore(3, 8), NoCore(3)),
    ],
    ids=["alike", "widths", "layers", "gru", "none"],
)
def test_a_pair_steps_like_two(first, second):
    inputs, cores = torch.randn(4, 3), (first, second)
    states = [tuple(torch.randn_like(part) for part in core.initial_state(4)) for core in cores]
    with torch.inference_mode():
        step = paired_stepper(first, second)
        for _ in range(3):
            results = step(inputs, *states)
            for core, state, (output, new) in zip(cores, states, results, strict=True):
                expected, expected_state = core.step(inputs, state)
                torch.testing.assert_close(output, expected)
                assert [part.shape for part in new] == [part.shape for part in state]
                for part, expected_part in zip(new, expected_state, strict=True):
                    torch.testing.assert_close(part, expected_part)
            states = [new for _, new in results]
