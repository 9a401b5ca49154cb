"""Drawing and mutating: within the range, on the right scale, and only by the generator that was passed."""

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from driftproof._registry import EXPLORE_METHODS
from driftproof.pbt import HyperparamConfig, PBTConfig
from driftproof.pbt.explore import Both, History, from_unit, perturb, sample, to_unit

NOTHING = History([], [], 0.0)


@st.composite
def ranges(draw):
    whole, log = draw(st.booleans()), draw(st.booleans())
    number = st.integers(-1000, 1000) if whole else st.floats(-1e6, 1e6)
    if log:
        number = st.integers(1, 1000) if whole else st.floats(1e-9, 1e6)
    low, high = sorted(draw(st.tuples(number, number).filter(lambda pair: pair[0] != pair[1])))
    factor = draw(st.floats(1.001, 10))
    return HyperparamConfig("x", low, high, perturbation_factor=factor, is_log_scale=log)


seeds = st.integers(0, 2**32)


@given(ranges(), seeds)
def test_values_are_drawn_and_stay_in_range(hyperparam, seed):
    rng = np.random.default_rng(seed)
    value = sample(hyperparam, rng)
    kind = int if hyperparam.is_whole else float
    for _ in range(20):
        assert hyperparam.min_value <= value <= hyperparam.max_value
        assert type(value) is kind
        value = perturb(hyperparam, value, rng)


@given(ranges(), seeds)
def test_whole_numbers_really_change(hyperparam, seed):
    rng = np.random.default_rng(seed)
    value = sample(hyperparam, rng)
    for _ in range(10):
        moved = perturb(hyperparam, value, rng)
        assert moved != value or not hyperparam.is_whole or value == 0
        value = moved


@given(ranges(), st.floats(0, 1))
def test_the_place_in_a_range_and_the_value_are_one(hyperparam, unit):
    value = from_unit(hyperparam, unit)
    assert hyperparam.min_value <= value <= hyperparam.max_value
    back = from_unit(hyperparam, to_unit(hyperparam, value))
    assert back == (value if hyperparam.is_whole else pytest.approx(value, rel=1e-6, abs=1e-6))
    assert 0 <= to_unit(hyperparam, value) <= 1


@pytest.mark.parametrize("log", [False, True])
def test_whole_numbers_stand_amid_their_shares(log):
    hyperparam = HyperparamConfig("n", 1, 1000, is_log_scale=log)
    assert all(from_unit(hyperparam, to_unit(hyperparam, n)) == n for n in range(1, 1001))


def test_a_logarithmic_scale_gives_every_decade_its_share():
    rng = np.random.default_rng(0)
    drawn = np.array([sample(HyperparamConfig("lr", 1e-6, 1e-2, is_log_scale=True), rng) for _ in range(4000)])
    shares = np.histogram(np.log10(drawn), bins=[-6, -5, -4, -3, -2])[0] / len(drawn)
    np.testing.assert_allclose(shares, 0.25, atol=0.03)
    drawn = np.array([sample(HyperparamConfig("lr", 1e-6, 1e-2), rng) for _ in range(1000)])
    assert (drawn > 1e-3).mean() > 0.85


@pytest.mark.parametrize("log", [False, True])
def test_every_whole_number_is_drawn(log):
    hyperparam, rng = HyperparamConfig("n", 1, 8, is_log_scale=log), np.random.default_rng(0)
    counts = np.bincount([sample(hyperparam, rng) for _ in range(8000)])
    expected = [math.log((k + 1) / k) / math.log(9) if log else 1 / 8 for k in range(1, 9)]
    np.testing.assert_allclose(counts[1:] / 8000, expected, atol=0.02)


def test_a_perturbation_is_the_factor_or_its_inverse():
    hyperparam, rng = HyperparamConfig("x", 0.0, 10.0, perturbation_factor=1.5), np.random.default_rng(0)
    assert {perturb(hyperparam, 3.0, rng) for _ in range(50)} == {4.5, 2.0}
    assert {perturb(hyperparam, 9.0, rng) for _ in range(50)} == {10.0, 6.0}
    # As far as multiplication goes: what is 0 is drawn anew.
    assert len({perturb(hyperparam, 0.0, rng) for _ in range(5)}) == 5


def test_a_perturbed_whole_number_moves_by_one_at_least():
    hyperparam, rng = HyperparamConfig("n", 2, 20), np.random.default_rng(0)
    assert {perturb(hyperparam, 10, rng) for _ in range(50)} == {12, 8}
    assert {perturb(hyperparam, 3, rng) for _ in range(50)} == {4, 2}
    assert {perturb(hyperparam, 2, rng) for _ in range(50)} == {3}
    assert {perturb(hyperparam, 20, rng) for _ in range(50)} == {17, 19}


def test_of_values_a_neighbour_is_taken():
    hyperparam, rng = HyperparamConfig("x", values=["a", "b", "c", "d"]), np.random.default_rng(0)
    assert {perturb(hyperparam, "b", rng) for _ in range(50)} == {"a", "c"}
    assert {perturb(hyperparam, "a", rng) for _ in range(50)} == {"b"}
    assert {perturb(hyperparam, "d", rng) for _ in range(50)} == {"c"}
    assert {perturb(hyperparam, "e", rng) for _ in range(50)} == {"a", "b", "c", "d"}
    assert {sample(hyperparam, rng) for _ in range(50)} == {"a", "b", "c", "d"}


@pytest.mark.parametrize(("method", "share"), [("perturb", 0.0), ("both", 0.3), ("resample", 1.0)])
def test_methods_of_exploring(method, share):
    probability = {"resample_probability": share} if method == "both" else {}
    lr = HyperparamConfig("lr", 1e-6, 1.0, is_log_scale=True, **probability)
    config, rng, own = (
        PBTConfig(hyperparams=[lr], explore_method=method),
        np.random.default_rng(0),
        {"lr": 0.01, "y": 3},
    )
    explored = [EXPLORE_METHODS.load(method)(config).explore(own, NOTHING, rng) for _ in range(2000)]
    perturbed = [item["lr"] in (0.01 * 1.2, 0.01 / 1.2) for item in explored]
    assert 1 - np.mean(perturbed) == pytest.approx(share, abs=0.03)
    assert {item["y"] for item in explored} == {3}
    assert own == {"lr": 0.01, "y": 3}


def test_global_generators_are_untouched_and_the_same_seed_gives_the_same():
    config = PBTConfig(hyperparams=[HyperparamConfig("x", 0.0, 1.0), HyperparamConfig("y", values=[1, 2, 3])])
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    first, second, other = (
        [Both(config).explore({"x": 0.5, "y": 2}, NOTHING, rng) for _ in range(20)]
        for rng in map(np.random.default_rng, (1, 1, 2))
    )
    assert first == second != other
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
