"""The return scale: its statistics, its snapshot, and how the two move."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from driftproof.learner.return_scale import ReturnScale
from driftproof.nn.heads import QuantileHead


def rollout(update, steps=4, envs=3):
    """Returns that tell where they are from: update * 100 + step * 10 + environment."""
    return update * 100.0 + torch.arange(steps).unsqueeze(1) * 10.0 + torch.arange(envs)


def plain_statistics(rollouts, decay):
    """Weights of a first value and exponential averages after it, for returns and their squares."""
    mean = square = None
    for numbers in rollouts:
        m = math.fsum(numbers) / len(numbers)
        s = math.fsum(x * x for x in numbers) / len(numbers)
        mean = m if mean is None else decay * mean + (1 - decay) * m
        square = s if square is None else decay * square + (1 - decay) * s
    return mean, math.sqrt(square - mean * mean)


@given(
    decay=st.floats(0, 0.99),
    rollouts=st.lists(st.lists(st.floats(-100, 100), min_size=2, max_size=8), min_size=1, max_size=6),
)
def test_statistics_are_exponential_averages_of_returns_and_squares(decay, rollouts):
    scale = ReturnScale(decay)
    for numbers in rollouts:
        scale.observe(torch.tensor(numbers))
    mean, std = plain_statistics(rollouts, decay)
    assert scale.value.mean.item() == pytest.approx(mean, rel=1e-4, abs=1e-3)
    if std > 1e-2:
        assert scale.value.std.item() == pytest.approx(std, rel=1e-3, abs=1e-3)


def test_the_first_rollout_sets_the_statistics_and_later_ones_move_them_by_the_decay():
    scale = ReturnScale(decay=0.75)
    assert not scale.initialised
    scale.observe(rollout(1))
    assert scale.initialised
    assert scale.value.mean.item() == pytest.approx(116)
    scale.observe(rollout(2))
    assert scale.value.mean.item() == pytest.approx(116 + 25)
    scale.observe(rollout(2))
    assert scale.value.mean.item() == pytest.approx(141 + 75 / 4)


def test_a_small_spread_far_from_zero_is_seen():
    scale = ReturnScale()
    for _ in range(50):
        scale.observe(1e4 + torch.randn(2000))
    assert scale.value.std.item() == pytest.approx(1, rel=0.02)


def test_only_valid_returns_count():
    scale = ReturnScale()
    returns = rollout(1)
    valid = torch.ones_like(returns, dtype=torch.bool)
    valid[2] = False
    returns[2] = math.nan
    scale.observe(returns, valid)
    assert scale.value.mean.item() == pytest.approx(100 + 40 / 3 + 1)
    before = scale.value
    scale.observe(rollout(5), torch.zeros_like(valid))
    assert scale.value == before


def test_a_rollout_without_valid_returns_does_not_take_the_place_of_the_first():
    scale = ReturnScale()
    scale.observe(rollout(5), torch.zeros(4, 3, dtype=torch.bool))
    scale.observe(rollout(1))
    assert scale.value.mean.item() == pytest.approx(116)


@pytest.mark.parametrize("level", [0.0, 0.1, -3.7, 1e6])
def test_equal_returns_have_a_spread_of_one(level):
    scale = ReturnScale()
    for _ in range(3):
        scale.observe(torch.full((128, 8), level))
        scale.refresh()
    assert scale.snapshot.std.item() == 1
    assert scale.normalize(torch.tensor(level + 1.0)).item() == pytest.approx(1, rel=0.2)


def test_rounding_is_no_spread():
    scale = ReturnScale()
    level = torch.full((100, 7), 123_456.7)
    level[::2] = torch.nextafter(level[::2], torch.tensor(0.0))
    assert level.std() > 1e-3
    scale.observe(level)
    assert scale.value.std.item() == 1


@pytest.mark.parametrize("size", [1e-5, 1.0, 1e6])
def test_a_real_spread_is_used_whatever_the_units(size):
    scale = ReturnScale()
    scale.observe(size * torch.randn(100, 8))
    scale.refresh()
    assert scale.normalize(size * torch.randn(100, 8)).std().item() == pytest.approx(1, rel=0.2)


def test_the_snapshot_moves_only_when_refreshed():
    scale = ReturnScale()
    scale.observe(rollout(1))
    assert tuple(map(float, scale.snapshot)) == (0, 1)
    assert scale.decode(torch.tensor(2.0)).item() == 2
    scale.refresh()
    assert scale.snapshot == scale.value
    decoded, normalised = scale.decode(torch.tensor(2.0)), scale.normalize(torch.tensor(2.0))
    scale.observe(rollout(9))
    assert scale.snapshot != scale.value
    assert scale.decode(torch.tensor(2.0)) == decoded
    assert scale.normalize(torch.tensor(2.0)) == normalised


def test_refresh_returns_copies_of_both_snapshots():
    scale = ReturnScale()
    scale.observe(rollout(1))
    first = scale.refresh()
    numbers = [tuple(map(float, s)) for s in first]
    scale.observe(rollout(9))
    second = scale.refresh()
    assert [tuple(map(float, s)) for s in first] == numbers
    assert first[1] == second[0]
    assert second[1] == scale.value
    second[1].mean.fill_(-1)
    scale.value.mean.fill_(-1)
    scale.snapshot.std.fill_(-1)
    assert scale.snapshot == scale.value
    assert scale.snapshot.mean > 0
    assert scale.snapshot.std > 0


@given(mean=st.floats(-1e3, 1e3), std=st.floats(0.1, 1e3))
def test_decode_undoes_normalize(mean, std):
    scale = ReturnScale()
    scale.observe(mean + std * torch.tensor([-1.0, 1.0]))
    scale.refresh()
    returns = mean + std * torch.linspace(-3, 3, 7)
    expected = torch.linspace(-3, 3, 7)
    torch.testing.assert_close(scale.normalize(returns), expected, atol=1e-2, rtol=1e-3)
    torch.testing.assert_close(scale.decode(scale.normalize(returns)), returns, atol=1e-3, rtol=1e-5)


def test_gradients_flow_through_decode():
    scale = ReturnScale()
    scale.observe(torch.tensor([-3.0, 3.0]))
    scale.refresh()
    x = torch.zeros((), requires_grad=True)
    scale.decode(x).backward()
    assert x.grad.item() == pytest.approx(3)


def test_decoded_values_of_a_rescaled_head_do_not_change():
    scale, head, features = ReturnScale(), QuantileHead(5), torch.randn(7, 5)
    for update in range(4):
        scale.observe(rollout(update * update))
        before = scale.decode(head(features))
        head.rescale(*scale.refresh())
        mean, std = scale.snapshot
        assert (scale.decode(head(features)) - before).abs().max() <= 1e-5 * (std + mean.abs())


def test_metrics_are_the_statistics():
    scale = ReturnScale()
    scale.observe(rollout(3))
    metrics = scale.metrics()
    assert list(metrics) == ["return_scale/mean", "return_scale/std"]
    assert tuple(metrics.values()) == tuple(scale.value)


class TestState:
    def test_a_loaded_scale_goes_on_like_the_saved_one(self):
        scale = ReturnScale()
        for update in range(3):
            scale.observe(rollout(update))
            if update < 2:
                scale.refresh()
        other = ReturnScale()
        other.load_state_dict(scale.state_dict())
        assert other.initialised
        for one in (scale, other):
            one.observe(rollout(5))
        assert scale.normalize(torch.tensor(7.0)) == other.normalize(torch.tensor(7.0))
        assert scale.refresh() == other.refresh()

    def test_a_loaded_fresh_scale_is_still_to_be_set_by_its_first_rollout(self):
        other = ReturnScale()
        other.observe(rollout(9))
        other.load_state_dict(ReturnScale().state_dict())
        assert not other.initialised
        other.observe(rollout(1))
        assert other.value.mean.item() == pytest.approx(116)

    def test_the_state_is_a_copy(self):
        scale = ReturnScale()
        state = scale.state_dict()
        scale.observe(rollout(1))
        scale.refresh()
        assert [float(value) for value in state.values()] == [0, 0, 0, 0, 1, 0]

    def test_loading_keeps_the_tensors(self):
        scale = ReturnScale()
        tensors = {name: tensor.data_ptr() for name, tensor in scale.tensors().items()}
        scale.load_state_dict(ReturnScale().state_dict())
        scale.observe(rollout(1))
        scale.refresh()
        assert tensors == {name: tensor.data_ptr() for name, tensor in scale.tensors().items()}

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("mean", torch.tensor(math.nan)),
            ("variance", torch.tensor(math.inf)),
            ("variance", torch.tensor(-1.0)),
            ("updates", torch.tensor(-1.0)),
            ("snapshot_mean", torch.zeros(2)),
            ("snapshot_mean", "1"),
            ("snapshot_mean", 1e39),
            ("snapshot_std", torch.tensor(0.0)),
            ("initialised", 1),
            ("initialised", None),
            ("unknown", 1),
        ],
    )
    def test_a_bad_entry_is_named_and_nothing_is_loaded(self, key, value):
        donor, scale = ReturnScale(), ReturnScale()
        donor.observe(rollout(1))
        scale.observe(rollout(2))
        before = scale.state_dict()
        with pytest.raises(ValueError, match=key):
            scale.load_state_dict({**donor.state_dict(), key: value})
        assert scale.state_dict() == before

    @pytest.mark.parametrize("key", list(ReturnScale().state_dict()))
    def test_a_missing_entry_is_named(self, key):
        state = ReturnScale().state_dict()
        del state[key]
        with pytest.raises(ValueError, match=f"'{key}'"):
            ReturnScale().load_state_dict(state)


@pytest.mark.parametrize("decay", [-0.1, 1.0, math.nan, "0.9", True])
def test_bad_decay(decay):
    with pytest.raises(ValueError, match="decay"):
        ReturnScale(decay)


def test_a_mask_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"^valid has shape"):
        ReturnScale().observe(torch.ones(3, 2), torch.ones(3, dtype=torch.bool))


def test_nothing_waits_for_the_device():
    scale = ReturnScale(device="meta")
    returns, valid = torch.empty(4, 3, device="meta"), torch.ones(4, 3, dtype=torch.bool, device="meta")
    for _ in range(2):
        scale.observe(returns, valid)
        scale.refresh()
        scale.decode(scale.normalize(returns))
        scale.metrics()
        state = scale.state_dict()
    scale.load_state_dict(ReturnScale().state_dict())
    with pytest.raises(RuntimeError, match="meta"):
        scale.load_state_dict(state)
