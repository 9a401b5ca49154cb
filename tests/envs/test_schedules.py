"""Schedules say how a number of a world changes over time."""

from __future__ import annotations

import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftproof.envs import Cyclic, Gradual, RandomWalk, Sudden, schedule
from driftproof.envs.schedules import Course

NUMBERS = st.floats(-100, 100)
TIMES = st.integers(1, 50)
UNITS = st.sampled_from(["steps", "episodes"])


@st.composite
def schedules(draw):
    low = draw(NUMBERS)
    high = low + draw(st.floats(0.1, 10))
    kind = draw(st.sampled_from([Sudden, Gradual, Cyclic, RandomWalk]))
    unit = draw(UNITS)
    if kind is Gradual:
        return Gradual(low, high, draw(TIMES), draw(TIMES), unit=unit)
    if kind is Cyclic:
        return Cyclic(high, low, 1 + draw(TIMES), draw(st.sampled_from(["sine", "triangle", "square"])), unit=unit)
    if kind is RandomWalk:
        return RandomWalk(low, high, (high - low) * draw(st.floats(0.01, 1)), every=draw(TIMES), unit=unit)
    times = draw(st.one_of(TIMES, st.lists(st.integers(1, 100), min_size=1, max_size=5, unique=True).map(sorted)))
    when = {"every": times} if isinstance(times, int) else {"at": times}
    values = draw(
        st.sampled_from(
            [
                {"low": low, "high": high},
                {"values": [low, high, low - 1]},
                {"values": [high, low], "order": "random"},
                {},
            ]
        )
    )
    return Sudden(**when, **values, unit=unit)


def values(course, times):
    seen = []
    for time in times:
        course.go_to(time)
        seen.append(course.value)
    return seen


@given(schedules())
def test_they_stay_within_their_bounds(drawn):
    low, high = drawn.bounds
    course = Course(drawn, (1, 2))
    for time in range(200):
        course.go_to(time)
        assert low - 1e-9 <= course.value <= high + 1e-9


@given(schedules(), st.integers(0, 2**31))
def test_the_same_seed_is_the_same_drift(drawn, seed):
    assert values(Course(drawn, (seed,)), range(150)) == values(Course(drawn, (seed,)), range(150))


@given(schedules())
def test_plain_values_make_the_same_schedule(drawn):
    assert schedule(json.loads(json.dumps(drawn.to_dict()))) == drawn


@given(schedules(), st.integers(0, 100))
def test_a_state_goes_on_where_it_was(drawn, when):
    whole, first, second = (Course(drawn, (seed,)) for seed in (1, 1, 2))
    values(whole, range(when))
    values(first, range(when))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())), max(when - 1, 0))
    later = range(when, when + 50)
    assert values(second, later) == values(whole, later)


@given(schedules(), st.lists(st.integers(0, 300), min_size=1).map(sorted))
def test_what_happens_does_not_depend_on_who_looks_when(drawn, times):
    always = dict(enumerate(values(Course(drawn, (7,)), range(times[-1] + 1))))
    assert values(Course(drawn, (7,)), times) == [always[time] for time in times]


def test_sudden_changes_at_once():
    course = Course(Sudden(every=3, values=[1, 5, 2]), (0,))
    assert values(course, range(10)) == [1, 1, 1, 5, 5, 5, 2, 2, 2, 1]
    assert course.phase == 3
    course = Course(Sudden(at=[2, 7], values=[1, 5]), (0,))
    assert values(course, range(9)) == [1, 1, 5, 5, 5, 5, 5, 1, 1]
    assert values(Course(Sudden(every=2), (0,)), range(6)) == [0, 0, 1, 1, 2, 2]


def test_random_order_never_repeats_at_once():
    seen = values(Course(Sudden(every=1, values=[1, 2, 3], order="random"), (0,)), range(100))
    assert set(seen) == {1, 2, 3}
    assert all(a != b for a, b in itertools.pairwise(seen))


def test_draws_from_a_range_differ():
    assert len(set(values(Course(Sudden(every=1, low=0, high=1), (0,)), range(20)))) == 20


def test_gradual_goes_straight_and_stays():
    line = Gradual(1, 3, over=4, begin=2)
    assert values(Course(line, (0,)), range(9)) == [1, 1, 1, 1.5, 2, 2.5, 3, 3, 3]
    assert [line.phase(time) for time in range(9)] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_cyclic_goes_there_and_back():
    for shape, expected in {
        "sine": [0, 1 - math.sqrt(0.5), 1, 1 + math.sqrt(0.5), 2, 1 + math.sqrt(0.5), 1, 1 - math.sqrt(0.5), 0],
        "triangle": [0, 0.5, 1, 1.5, 2, 1.5, 1, 0.5, 0],
        "square": [0, 0, 0, 0, 2, 2, 2, 2, 0],
    }.items():
        assert values(Course(Cyclic(0, 2, 8, shape), (0,)), range(9)) == pytest.approx(expected)
    assert [Cyclic(0, 2, 8).phase(time) for time in range(9)] == [0, 0, 0, 0, 1, 1, 1, 1, 2]


def test_a_random_walk_moves_by_its_deviation_and_visits_its_whole_range():
    seen = values(Course(RandomWalk(0, 1, 0.1, start=0.2), (3,)), range(5000))
    assert seen[0] == 0.2
    steps = [b - a for a, b in itertools.pairwise(seen) if 0.4 < a < 0.6]
    assert math.sqrt(sum(step**2 for step in steps) / len(steps)) == pytest.approx(0.1, rel=0.1)
    # At an end it turns round, and does not appear at the other one.
    assert max(abs(b - a) for a, b in itertools.pairwise(seen)) < 0.5
    assert min(seen) < 0.02
    assert max(seen) > 0.98
    assert sum(seen) / len(seen) == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Sudden(values=[1, 2]), "every or at"),
        (lambda: Sudden(every=1, at=[1]), "every or at"),
        (lambda: Sudden(every=0), "Invalid every: 0"),
        (lambda: Sudden(at=[3, 2]), "must increase"),
        (lambda: Sudden(every=1, low=1), "both low and high"),
        (lambda: Sudden(every=1, low=1, high=2, values=[1]), "not both"),
        (lambda: Sudden(every=1, low=2, high=1), "Invalid high: 1"),
        (lambda: Sudden(every=1, values=[1, 1], order="random"), "two different values"),
        (lambda: Sudden(every=1, values=[]), "at least one value"),
        (lambda: Sudden(every=1, values=[math.nan]), "Invalid values: nan"),
        (lambda: Gradual(0, math.inf, 1), "Invalid end: inf"),
        (lambda: Gradual(0, 1, 0), "Invalid over: 0"),
        (lambda: Cyclic(0, 1, 1), "Invalid period: 1"),
        (lambda: Cyclic(0, 1, 4, "saw"), "Invalid shape: 'saw'"),
        (lambda: RandomWalk(0, 1, 2), "Invalid deviation: 2"),
        (lambda: RandomWalk(0, 1, 0.1, start=3), "Invalid start: 3"),
        (lambda: Gradual(0, 1, 1, unit="days"), "Invalid unit: 'days'"),
        (lambda: schedule({"kind": "suden"}), "did you mean 'sudden'"),
        (lambda: schedule({"every": 3}), "lacks 'kind'"),
        (lambda: schedule({"kind": "gradual", "start": 1, "ende": 2}), r"'ende' \(did you mean 'end'\?\)"),
        (lambda: schedule({"kind": "gradual", "start": 1}), "lacks 'end', 'over'"),
    ],
)
def test_nonsense_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("schedule", "until", "expected"),
    [
        (Sudden(every=10), 25, [0, 10, 20]),
        (Sudden(every=10), 0, [0]),
        (Sudden(every=10, values=[1, 2, 3]), 5, [0, 10, 20]),
        (Sudden(at=[3, 50]), 5, [0, 3, 50]),
        (Sudden(at=[]), 5, [0]),
        (Sudden(every=10, low=0, high=1), 15, [0, 10]),
        (Gradual(0, 1, over=100, begin=20), 5, [0, 70, 120]),
        (Cyclic(0, 1, period=9), 0, [0, 5]),
        (Cyclic(0, 1, period=10), 12, [0, 5, 10]),
        (RandomWalk(0, 1, 0.1), 8, [0, 2, 4, 6, 8]),
    ],
)
def test_moments_stand_for_the_whole_schedule(schedule, until, expected):
    assert schedule.moments(until) == expected


def test_moments_of_many_phases_are_some_of_them():
    moments = Sudden(every=3).moments(10**9)
    assert len(moments) == 1_000
    assert (moments[0], moments[-1]) == (0, 10**9 // 3 * 3)
    assert all(moment % 3 == 0 for moment in moments)


def test_a_schedule_that_is_no_mapping_is_refused():
    with pytest.raises(TypeError, match="must be a mapping"):
        schedule("sudden")
