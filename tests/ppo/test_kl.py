"""KL divergence: the estimate, the stop, and the controlled penalty, alone and with something to control."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributions import Normal, kl_divergence

from driftproof.learner.kl import KLPenalty, KLStop, approximate_kl


class TestEstimate:
    @given(st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=20))
    def test_equals_the_formula_and_is_never_negative(self, ratios):
        estimate = approximate_kl(torch.tensor(ratios))
        assert (estimate >= 0).all()
        expected = [math.expm1(d) - d for d in ratios]
        torch.testing.assert_close(estimate, torch.tensor(expected), rtol=1e-5, atol=1e-5)

    def test_rounding_does_not_make_it_negative(self, monkeypatch):
        # Where expm1 is off by one in the last place, as it may be on an accelerator.
        monkeypatch.setattr(torch, "expm1", lambda d: torch.nextafter(d, torch.tensor(-1.0)))
        assert (approximate_kl(torch.linspace(-1e-4, 1e-4, 101)) == 0).all()

    def test_its_mean_under_the_old_policy_is_the_divergence(self):
        old, new = Normal(0.0, 1.0), Normal(0.2, 1.2)
        actions = old.sample((200_000,))
        estimate = approximate_kl(new.log_prob(actions) - old.log_prob(actions)).mean()
        assert estimate.item() == pytest.approx(kl_divergence(old, new).item(), rel=0.03)


def plain_stop(kls, target, mode, tolerance, patience, fraction):
    """Whether to go on after each minibatch."""
    going, above, row, result = True, 0, 0, []
    for kl in kls:
        exceeds = target is not None and kl > tolerance * target
        above += exceeds
        row = row + 1 if exceeds else 0
        stop = {"absolute": exceeds, "consecutive": row >= patience, "fraction": above > fraction * len(kls)}
        going = going and not stop[mode]
        result.append(float(going))
    return result


def flags(stop, kls):
    return [stop.observe(torch.tensor(kl)).item() for kl in kls]


class TestStop:
    @given(
        kls=st.lists(st.sampled_from([0.0, 0.01, 0.02, 0.04, math.inf, math.nan]), min_size=1, max_size=30),
        target=st.sampled_from([None, 0.01, 0.02]),
        mode=st.sampled_from(["absolute", "consecutive", "fraction"]),
        patience=st.integers(1, 4),
        fraction=st.sampled_from([0.0, 0.125, 0.25, 0.5]),
    )
    def test_equals_the_plain_rules(self, kls, target, mode, patience, fraction):
        stop = KLStop(target, mode, patience=patience, fraction=fraction)
        for _ in range(2):
            stop.reset(len(kls))
            assert flags(stop, kls) == plain_stop(kls, target, mode, 1.5, patience, fraction)

    def test_absolute_stops_at_once_and_stays_stopped_until_reset(self):
        stop = KLStop(0.01)
        stop.reset(4)
        assert flags(stop, [0.015, 0.0151, 0.0, 0.0]) == [1, 0, 0, 0]
        stop.reset(4)
        assert flags(stop, [0.0]) == [1]

    def test_consecutive_wants_them_in_a_row(self):
        stop = KLStop(0.01, "consecutive", patience=2)
        stop.reset(6)
        assert flags(stop, [1.0, 0.0, 1.0, 0.0, 1.0, 1.0]) == [1, 1, 1, 1, 1, 0]

    def test_fraction_is_of_the_whole_update(self):
        stop = KLStop(0.01, "fraction", fraction=0.25)
        stop.reset(8)
        assert flags(stop, [1.0, 0.0, 1.0, 0.0, 1.0]) == [1, 1, 1, 1, 0]

    def test_a_share_that_is_reached_exactly_is_not_exceeded(self):
        # In floating point, 0.29 * 100 is less than 29.
        stop = KLStop(0.01, "fraction", fraction=0.29)
        stop.reset(100)
        assert flags(stop, [1.0] * 30) == [1] * 29 + [0]

    def test_the_target_can_be_changed(self):
        stop = KLStop(0.01)
        stop.set_target(0.1)
        assert flags(stop, [0.14]) == [1]
        stop.set_target(0.01)
        assert flags(stop, [0.14]) == [0]
        stop.reset(1)
        stop.set_target(None)
        assert flags(stop, [1e30, math.inf]) == [1, 1]

    def test_a_flag_that_was_returned_does_not_change(self):
        stop = KLStop(0.01)
        first = stop.observe(torch.tensor(0.0))
        stop.observe(torch.tensor(1.0))
        assert first.item() == 1

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("target", 0.0),
            ("target", math.inf),
            ("mode", "relative"),
            ("tolerance", 0),
            ("patience", 0),
            ("patience", 1.5),
            ("fraction", 1.0),
            ("fraction", -0.1),
        ],
    )
    def test_bad_arguments_are_named(self, name, value):
        with pytest.raises(ValueError, match=f"Invalid {name}: {value!r}"):
            KLStop(**{"target": 0.01, name: value})


def plain_penalty(kls, target, kp, ki, kd, max_coef, init_coef):
    """The coefficients after each update."""
    integral, previous, result = init_coef, None, []
    for kl in kls:
        error = kl / target - 1
        reaction = kp * error + (0 if previous is None else kd * (error - previous))
        room = max_coef - (reaction + integral) if error > 0 else -(reaction + integral)
        step = ki * error
        if step * room <= 0:
            step = 0
        elif abs(step) > abs(room):
            step = room
        integral = min(max(integral + step, 0), max_coef)
        result.append(min(max(reaction + integral, 0), max_coef))
        previous = error
    return result


def coefficients(penalty, kls):
    result = []
    for kl in kls:
        penalty.update(torch.tensor(kl))
        result.append(penalty.coefficient.item())
    return result


def closed_loop(penalty, kl_of, updates):
    """The KL of every update, where each update's KL follows from the coefficient that the last one left."""
    kls = []
    for t in range(updates):
        kls.append(kl_of(penalty.coefficient.item(), t))
        penalty.update(torch.tensor(kls[-1]))
    return kls


TARGET = 0.01
PLANTS = [
    (power, excess, sensitivity)
    for power in (1, 2)
    for excess in (1.5, 3.0, 10.0, 30.0)
    for sensitivity in (0.1, 0.3, 1.0)
    if (excess ** (1 / power) - 1) / sensitivity < 8
]
"""``kl = target * excess / (1 + sensitivity * coefficient) ** power``, where the target is within reach."""


class TestPenalty:
    @given(
        kls=st.lists(st.sampled_from([0.0, 0.005, 0.01, 0.02, 0.1, 1.0]), min_size=1, max_size=30),
        kp=st.sampled_from([0.0, 0.1, 1.0]),
        ki=st.sampled_from([0.0, 0.2, 1.0]),
        kd=st.sampled_from([0.0, 0.1]),
        init_coef=st.sampled_from([0.0, 0.5, 3.0]),
    )
    def test_equals_the_plain_controller(self, kls, kp, ki, kd, init_coef):
        penalty = KLPenalty(TARGET, kp, ki, kd, max_coef=3.0, init_coef=init_coef)
        expected = plain_penalty(kls, TARGET, kp, ki, kd, 3.0, init_coef)
        assert coefficients(penalty, kls) == pytest.approx(expected, rel=1e-4, abs=1e-4)

    def test_the_first_coefficient_is_the_one_given(self):
        assert KLPenalty(TARGET).coefficient.item() == 0
        penalty = KLPenalty(TARGET, init_coef=2.0)
        assert penalty.coefficient.item() == 2
        assert coefficients(penalty, [TARGET]) == pytest.approx([2.0])

    def test_the_derivative_is_zero_at_first_and_then_that_of_the_error(self):
        penalty = KLPenalty(TARGET, kp=0, ki=0, kd=1.0)
        assert coefficients(penalty, [2 * TARGET, 5 * TARGET, 4 * TARGET]) == pytest.approx([0, 3, 0], abs=1e-5)

    @pytest.mark.parametrize(("power", "excess", "sensitivity"), PLANTS)
    def test_the_divergence_comes_to_the_target(self, power, excess, sensitivity):
        kls = closed_loop(KLPenalty(TARGET), lambda c, t: TARGET * excess / (1 + sensitivity * c) ** power, 80)
        assert kls[0] == pytest.approx(excess * TARGET)
        assert kls[40:] == pytest.approx([TARGET] * 40, rel=0.1)

    def test_default_gains_hold_noisy_plants_that_change_near_the_target(self):
        def mean_deviation(gains):
            deviations = []
            for power, excess, sensitivity in PLANTS:
                clean = []

                def kl_of(c, t, power=power, excess=excess, sensitivity=sensitivity, clean=clean):
                    now = excess if t < 75 else 1 + (excess - 1) / 2
                    clean.append(now / (1 + sensitivity * c) ** power)
                    return TARGET * clean[-1] * math.exp(0.25 * torch.randn(()).item())

                closed_loop(KLPenalty(TARGET, **gains), kl_of, 150)
                deviations += [abs(math.log(kl)) for kl in clean]
            return sum(deviations) / len(deviations)

        assert mean_deviation({"kp": 0, "ki": 0}) > 0.9
        default = mean_deviation({})
        assert default < 0.14
        for worse in ({"ki": 0.1}, {"ki": 1.5}, {"kp": 1.0}, {"kd": 0.4}):
            assert default < mean_deviation(worse)

    def test_no_penalty_where_updates_stay_below_the_target(self):
        assert closed_loop(KLPenalty(TARGET, init_coef=1.0), lambda c, t: 0.5 * TARGET, 20)[-1] < TARGET
        penalty = KLPenalty(TARGET, init_coef=1.0)
        assert coefficients(penalty, [0.5 * TARGET] * 20)[-1] == 0

    @pytest.mark.parametrize("saturated", [30, 3000])
    def test_recovers_from_saturation_however_long_it_was(self, saturated):
        # At first nothing helps, and the coefficient is at its bound; then 1 is what it takes.
        penalty = KLPenalty(TARGET)
        closed_loop(penalty, lambda c, t: 3 * TARGET, saturated)
        assert penalty.coefficient.item() == penalty.max_coef
        kls = closed_loop(penalty, lambda c, t: 2 * TARGET / (1 + c), 60)
        assert kls[40:] == pytest.approx([TARGET] * 20, rel=0.1)
        assert penalty.coefficient.item() == pytest.approx(1, rel=0.05)

    @pytest.mark.parametrize("saturated", [30, 3000])
    def test_recovers_at_once_if_the_bound_is_near(self, saturated):
        penalty = KLPenalty(TARGET, max_coef=2.0)
        closed_loop(penalty, lambda c, t: 3 * TARGET, saturated)
        kls = closed_loop(penalty, lambda c, t: 2 * TARGET / (1 + c), 20)
        assert kls[8:] == pytest.approx([TARGET] * 12, rel=0.1)

    @pytest.mark.parametrize("saturated", [1, 1000])
    def test_a_divergence_out_of_all_bounds_leaves_no_trace(self, saturated):
        penalty = KLPenalty(TARGET, init_coef=1.0)
        assert coefficients(penalty, [math.inf] * saturated)[-1] == penalty.max_coef
        assert coefficients(penalty, [TARGET] * 2) == pytest.approx([1, 1])

    @pytest.mark.parametrize("below", [1, 1000])
    def test_does_not_wind_up_below_zero_either(self, below):
        penalty = KLPenalty(TARGET)
        assert coefficients(penalty, [0.0] * below)[-1] == 0
        assert coefficients(penalty, [2 * TARGET])[-1] == pytest.approx(penalty.kp + penalty.ki)

    @given(st.lists(st.floats(0, 1e30), max_size=30))
    def test_stays_within_its_bounds(self, kls):
        penalty = KLPenalty(TARGET, kd=0.3)
        assert all(0 <= coefficient <= penalty.max_coef for coefficient in coefficients(penalty, kls))
        assert all(tensor.isfinite() for tensor in penalty.state_dict().values())

    def test_nan_changes_nothing(self):
        penalty = KLPenalty(TARGET, kd=0.1)
        assert penalty.state_dict()["updates"] == 0
        coefficients(penalty, [math.nan])
        assert penalty.state_dict() == KLPenalty(TARGET).state_dict()
        coefficients(penalty, [0.03, 0.02])
        before = penalty.state_dict()
        coefficients(penalty, [math.nan])
        assert penalty.state_dict() == before

    def test_the_target_can_be_changed(self):
        penalty = KLPenalty(TARGET, kp=1.0, ki=0)
        penalty.set_target(2 * TARGET)
        assert coefficients(penalty, [4 * TARGET]) == pytest.approx([1.0])

    def test_the_coefficient_is_changed_in_place(self):
        penalty = KLPenalty(TARGET)
        held = penalty.coefficient
        coefficients(penalty, [0.05])
        penalty.load_state_dict(penalty.state_dict())
        assert held is penalty.coefficient
        assert held > 0

    def test_a_loaded_penalty_goes_on_like_the_saved_one(self):
        kls = [0.03, 0.005, 0.02, 0.04, 0.001, 0.02]
        for cut in range(len(kls)):
            penalty, other = KLPenalty(TARGET, kd=0.2), KLPenalty(TARGET, kd=0.2)
            coefficients(penalty, kls[:cut])
            other.load_state_dict(penalty.state_dict())
            assert other.coefficient == penalty.coefficient
            assert coefficients(penalty, kls[cut:]) == coefficients(other, kls[cut:])

    def test_the_state_is_a_copy_with_these_keys(self):
        penalty = KLPenalty(TARGET)
        state = penalty.state_dict()
        coefficients(penalty, [0.05])
        assert list(state) == ["coefficient", "integral", "previous_error", "updates"]
        assert all(value == 0 for value in state.values())

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("coefficient", math.nan),
            ("coefficient", -1.0),
            ("integral", -1.0),
            ("previous_error", math.inf),
            ("updates", -1.0),
            ("integral", torch.zeros(2)),
            ("unknown", 0.0),
        ],
    )
    def test_a_bad_entry_is_named_and_nothing_is_loaded(self, key, value):
        donor, penalty = KLPenalty(TARGET), KLPenalty(TARGET)
        coefficients(donor, [0.05, 0.04])
        before = penalty.state_dict()
        with pytest.raises(ValueError, match=key):
            penalty.load_state_dict({**donor.state_dict(), key: value})
        assert penalty.state_dict() == before

    @pytest.mark.parametrize("key", ["coefficient", "integral", "previous_error", "updates"])
    def test_a_missing_entry_is_named(self, key):
        state = KLPenalty(TARGET).state_dict()
        del state[key]
        with pytest.raises(ValueError, match=f"'{key}'"):
            KLPenalty(TARGET).load_state_dict(state)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("target", 0.0),
            ("target", None),
            ("kp", -1),
            ("ki", -1),
            ("kd", math.nan),
            ("max_coef", 0),
            ("init_coef", 11.0),
            ("init_coef", -1.0),
        ],
    )
    def test_bad_arguments_are_named(self, name, value):
        with pytest.raises(ValueError, match=f"Invalid {name}: {value!r}"):
            KLPenalty(**{"target": TARGET, name: value})


@pytest.mark.parametrize("mode", ["absolute", "consecutive", "fraction"])
def test_nothing_waits_for_the_device(mode):
    stop, penalty = KLStop(0.01, mode, device="meta"), KLPenalty(0.01, device="meta")
    for target in (0.01, 0.02):
        stop.set_target(target)
        penalty.set_target(target)
        stop.reset(3)
        for _ in range(3):
            kl = approximate_kl(torch.empty(5, device="meta")).mean()
            assert stop.observe(kl).is_meta
        penalty.update(kl)
    penalty.load_state_dict(KLPenalty(0.01).state_dict())
    with pytest.raises(RuntimeError, match="meta"):
        penalty.load_state_dict(penalty.state_dict())
