"""The entropy coefficient: its decay, when that begins, its boost and its bounds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftproof.learner.entropy import EntropySchedule
from driftproof.settings.agent import AgentSettings


def update(schedule, base, progress, explained_variance, mean_return):
    """The coefficient of an update that follows a rollout with this explained variance."""
    schedule.explained_variance = explained_variance
    return schedule.update(base, progress, mean_return)


def run(schedule, returns, base=1.0, updates=None, explained_variance=1.0, first=0):
    """The coefficients of training in which update ``i`` of ``updates`` has the mean return ``returns[i]``."""
    updates = updates or len(returns)
    return [
        update(schedule, base, 1 - (first + i) / updates, explained_variance, mean_return)
        for i, mean_return in enumerate(returns)
    ]


def after_plateau(patience):
    return EntropySchedule(ent_coef_final=0.0, ent_coef_start="plateau", ent_plateau_patience=patience)


class TestDecay:
    @given(base=st.floats(0, 1), final=st.floats(0, 1), progress=st.floats(0, 1))
    def test_is_linear_from_base_to_final(self, base, final, progress):
        coefficient = update(EntropySchedule(ent_coef_final=final), base, progress, 1.0, None)
        assert coefficient == pytest.approx(final + (base - final) * progress)

    @given(base=st.floats(0, 1), final=st.floats(0, 1))
    def test_begins_and_ends_exactly(self, base, final):
        schedule = EntropySchedule(ent_coef_final=final)
        assert update(schedule, base, 1.0, 1.0, None) == base
        assert update(schedule, base, 0.0, 1.0, None) == final

    def test_without_a_final_coefficient_it_is_constant(self):
        schedule = EntropySchedule()
        assert [update(schedule, 0.3, progress, 1.0, None) for progress in (1.0, 0.4, 0.0)] == [0.3] * 3

    def test_progress_outside_of_its_range_counts_as_its_end(self):
        schedule = EntropySchedule(ent_coef_final=0.1)
        assert update(schedule, 1.0, -0.02, 1.0, None) == 0.1
        assert update(schedule, 1.0, 1.5, 1.0, None) == 1.0

    def test_a_base_that_changes_is_followed(self):
        schedule = EntropySchedule(ent_coef_final=0.0)
        assert update(schedule, 0.2, 0.5, 1.0, None) == pytest.approx(0.1)
        assert update(schedule, 0.4, 0.5, 1.0, None) == pytest.approx(0.2)

    def test_minimum(self):
        schedule = EntropySchedule(ent_coef_final=0.2, ent_coef_min=0.2)
        assert update(schedule, 1.0, 0.0, 1.0, None) == 0.2
        assert update(schedule, 0.1, 1.0, 1.0, None) == 0.2


class TestPlateau:
    def test_decay_begins_when_the_return_stops_improving_and_ends_at_final(self):
        # Improves until update 4, whose progress is 0.6; three updates later, at 0.3, that is a plateau.
        schedule = after_plateau(3)
        coefficients = run(schedule, [1, 2, 3, 4, 5, 5, 5, 5, 5, 5], base=0.6)
        assert coefficients == pytest.approx([0.6] * 8 + [0.4, 0.2])
        assert update(schedule, 0.6, 0.0, 1.0, None) == 0

    def test_no_decay_while_it_improves(self):
        schedule = after_plateau(1)
        assert run(schedule, [1.1**i for i in range(50)]) == [1.0] * 50

    def test_improvement_is_relative_and_adds_up(self):
        # Steps of 0.4 % do not count one by one, but every third makes 1 %.
        slow = [100 * 1.004**i for i in range(30)]
        assert run(after_plateau(3), slow)[-1] == 1
        assert run(after_plateau(2), slow)[-1] < 1

    def test_negative_returns_improve_upwards(self):
        rising = [-100 * 0.9**i for i in range(30)]
        assert run(after_plateau(2), rising)[-1] == 1
        assert run(after_plateau(2), rising[::-1])[-1] < 1
        assert run(after_plateau(2), [-100.0] * 30)[-1] < 1

    @pytest.mark.parametrize("missing", [None, math.nan])
    def test_updates_without_a_finished_episode_do_not_count(self, missing):
        schedule = after_plateau(2)
        assert run(schedule, [missing] * 5 + [1.0] + [missing] * 5 + [1.0] + [missing] * 5)[-1] == 1
        assert run(schedule, [1.0, 1.0])[-1] < 1

    def test_a_later_improvement_does_not_end_the_decay(self):
        schedule = after_plateau(1)
        coefficients = run(schedule, [1, 1, 50, 100, 200])
        assert coefficients == sorted(coefficients, reverse=True)
        assert coefficients[-1] == pytest.approx(0.2 / 0.8)

    def test_prolonged_training_does_not_exceed_the_base(self):
        schedule = after_plateau(1)
        run(schedule, [1.0, 1.0])
        assert update(schedule, 1.0, 0.9, 1.0, 1.0) == 1.0

    def test_a_plateau_at_the_very_end(self):
        schedule = EntropySchedule(ent_coef_final=0.1, ent_coef_start="plateau", ent_plateau_patience=1)
        update(schedule, 1.0, 1.0, 1.0, 5.0)
        assert update(schedule, 1.0, 0.0, 1.0, 5.0) == 0.1


class TestBoost:
    def test_acts_while_the_explained_variance_is_bad(self):
        schedule = EntropySchedule(ent_boost_factor=2.0, ent_boost_below=0.1)
        given = (-1.0, 0.09, 0.1, 1.0, math.nan)
        assert [update(schedule, 0.3, 1.0, ev, None) for ev in given] == [0.6, 0.6, 0.3, 0.3, 0.3]

    def test_is_capped_and_never_lowers(self):
        schedule = EntropySchedule(ent_coef_final=0.0, ent_boost_factor=3.0, ent_boost_below=0.1, ent_boost_cap=0.5)
        progress = (1.0, 0.4, 0.3, 0.1)
        assert [update(schedule, 1.0, p, 0.0, None) for p in progress] == pytest.approx([1.0, 0.5, 0.5, 0.3])

    def test_acts_on_the_clamped_coefficient(self):
        schedule = EntropySchedule(ent_coef_final=0.1, ent_coef_min=0.1, ent_boost_factor=2.0, ent_boost_below=0.1)
        assert update(schedule, 1.0, 0.0, 0.0, None) == pytest.approx(0.2)
        assert update(schedule, 0.05, 1.0, 0.0, None) == pytest.approx(0.2)

    @given(
        base=st.floats(0, 1),
        progress=st.floats(0, 1),
        explained_variance=st.floats(-1, 1),
        minimum=st.floats(0, 0.2),
        cap=st.floats(0.2, 2),
        factor=st.floats(1.01, 5),
    )
    def test_stays_within_all_bounds(self, base, progress, explained_variance, minimum, cap, factor):
        arguments = {"ent_coef_final": 0.2, "ent_coef_min": minimum}
        boosted = EntropySchedule(**arguments, ent_boost_factor=factor, ent_boost_below=0.0, ent_boost_cap=cap)
        plain = update(EntropySchedule(**arguments), base, progress, explained_variance, None)
        coefficient = update(boosted, base, progress, explained_variance, None)
        assert max(plain, minimum) <= coefficient <= max(plain, min(cap, factor * plain))


class TestState:
    def test_a_loaded_schedule_goes_on_like_the_saved_one(self):
        returns = [1.0, 2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0]
        for cut in range(len(returns)):
            schedule, other = (after_plateau(3) for _ in range(2))
            run(schedule, returns[:cut], updates=10)
            other.load_state_dict(schedule.state_dict())
            rest = returns[cut:]
            expected = run(schedule, rest, updates=10, first=cut)
            assert run(other, rest, updates=10, first=cut) == expected
            assert expected[-1] < 1

    def test_a_boost_that_is_due_comes_after_loading(self):
        schedule, other = (EntropySchedule(ent_boost_factor=2.0) for _ in range(2))
        schedule.explained_variance = -0.5
        other.load_state_dict(schedule.state_dict())
        assert other.update(0.1, 1.0, None) == 0.2

    def test_what_was_saved_elsewhere_does_not_keep_an_immediate_decay_from_beginning(self):
        schedule = EntropySchedule(ent_coef_final=0.0)
        schedule.load_state_dict(EntropySchedule(ent_coef_final=0.0, ent_coef_start="plateau").state_dict())
        assert update(schedule, 1.0, 0.5, 1.0, None) == 0.5

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("plateau", 1.5),
            ("plateau", math.nan),
            ("best_return", math.inf),
            ("best_return", "1"),
            ("stale_updates", -1),
            ("stale_updates", None),
            ("stale_updates", 1.5),
            ("explained_variance", None),
            ("unknown", 1),
        ],
    )
    def test_a_bad_entry_is_named_and_nothing_is_loaded(self, key, value):
        donor, schedule = (after_plateau(2) for _ in range(2))
        run(donor, [1.0, 1.0, 1.0])
        before = schedule.state_dict()
        with pytest.raises(ValueError, match=key):
            schedule.load_state_dict({**donor.state_dict(), key: value})
        assert schedule.state_dict() == before

    @pytest.mark.parametrize("key", ["plateau", "best_return", "stale_updates", "explained_variance"])
    def test_a_missing_entry_is_named(self, key):
        state = EntropySchedule().state_dict()
        del state[key]
        with pytest.raises(ValueError, match=f"'{key}'"):
            EntropySchedule().load_state_dict(state)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ent_coef_final": 0.1, "ent_coef_min": 0.2}, "ent_coef_final"),
        ({"ent_coef_final": -0.1}, "ent_coef_final"),
        ({"ent_coef_min": -0.1}, "ent_coef_min"),
        ({"ent_coef_start": "later"}, "ent_coef_start"),
        ({"ent_coef_start": "plateau"}, "ent_coef_final"),
        ({"ent_plateau_patience": 0}, "ent_plateau_patience"),
        ({"ent_plateau_patience": 1.5}, "ent_plateau_patience"),
        ({"ent_boost_factor": 0.5}, "ent_boost_factor"),
        ({"ent_boost_below": 1.5}, "ent_boost_below"),
        ({"ent_boost_factor": 2.0, "ent_coef_min": 0.2, "ent_boost_cap": 0.1}, "ent_boost_cap"),
        ({"ent_boost_cap": 0.1}, "ent_boost_factor"),
        ({"ent_boost_below": 0.1}, "ent_boost_factor"),
        ({"ent_plateau_patience": 5}, "ent_coef_start"),
    ],
)
def test_contradictions_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        EntropySchedule(**arguments)


def test_a_base_below_the_minimum_is_refused():
    assert AgentSettings(ent_coef=0.1, ent_coef_min=0.1).ent_coef == 0.1
    with pytest.raises(ValueError, match=r"ent_coef 0\.01 is below ent_coef_min 0\.1"):
        AgentSettings(ent_coef=0.01, ent_coef_min=0.1)
    for bad in (-1.0, math.nan, "0.1"):
        with pytest.raises(ValueError, match="ent_coef"):
            AgentSettings(ent_coef=bad, ent_coef_min=0.1)
