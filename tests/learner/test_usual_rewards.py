"""Rewards that a world usually gives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftproof.learner.alarm import CalibrationAlarm
from driftproof.learner.response import DriftResponse
from driftproof.learner.usual_rewards import UsualRewards, span_of


def usual(*spans):
    rewards = UsualRewards()
    for span in spans:
        rewards.observe(span)
    return rewards


@pytest.mark.parametrize("span", [(-1.0, -1.0), (10.0, 10.0), (0.1, 0.1), (-10.0, -6.0), (0.0, 0.4)])
def test_another_sign_or_scale_is_another_world(span):
    assert usual((1.0, 1.0)).are_others(span)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ((1.0, 1.0), (0.9, 1.0)),  # They overlap.
        ((1.0, 1.0), (1.2, 1.2)),  # They are close.
        ((0.2, 0.5), (0.55, 0.7)),  # An agent that improves.
        ((0.0, 1.0), (1.5, 2.5)),  # Not further away than they vary.
        ((0.0, 0.0), (0.0, 1.0)),  # The first success.
    ],
)
def test_these_are_the_same_world(before, now):
    assert not usual(before).are_others(now)
    assert not UsualRewards().are_others(now)


def test_they_are_averaged_but_for_those_of_another_world():
    assert usual((0.0, 1.0), (0.0, 2.0)).state_dict() == {"low": 0.0, "high": 1.1}
    assert usual((1.0, 1.0), (100.0, 100.0)).state_dict() == {"low": 100.0, "high": 100.0}


@given(st.floats(-100, 100), st.floats(0.01, 100), st.floats(0.02, 50))
def test_the_scale_has_changed_as_returns_have(before, largest, factor):
    rewards = usual((0.0, largest))
    is_known = abs(before) > 1e-100  # Products of smaller numbers are rounded to 0.
    assert not is_known or rewards.have_scaled((0.0, largest * factor), before, before * factor)
    assert not rewards.have_scaled((0.0, largest * factor), before, 3 * before * factor)
    assert not rewards.have_scaled((0.0, largest * factor), before, -before * factor)


def test_only_rewards_of_transitions_count():
    class Rollout:
        rewards, valid = np.array([[5.0, -2.0], [1.0, 9.0]]), np.array([[False, True], [True, False]])

    assert span_of(Rollout) == (-2.0, 1.0)
    Rollout.valid, Rollout.rewards = np.ones((1, 1), bool), np.array([[1e300]])
    assert np.isfinite(np.square(span_of(Rollout))).all()


@pytest.mark.parametrize(("reward", "is_valid"), [(1.0, False), (np.nan, True)])
def test_rollouts_without_a_reward_tell_nothing(reward, is_valid):
    class Rollout:
        rewards, valid = np.array([[reward]]), np.array([[is_valid]])

    rewards = usual((1.0, 1.0), span_of(Rollout))
    assert rewards.state_dict() == {"low": 1.0, "high": 1.0}
    assert not rewards.are_others(span_of(Rollout))
    assert not rewards.have_scaled(span_of(Rollout), 1.0, 1.0)


@pytest.mark.parametrize("mean_return", [None, 9.0])
def test_others_wait_for_an_episode_that_tells_what_they_return(mean_return):
    response, alarm = DriftResponse(), CalibrationAlarm()
    for _ in range(3):
        alarm.observe(0.5, -9.0)
        response._remember(alarm, (-1.0, -1.0))
    alarm.observe(0.5, mean_return)
    response._remember(alarm, (1.0, 1.0))
    assert response.state_dict()["rewards"]["low"] == (-1.0 if mean_return is None else 1.0)
