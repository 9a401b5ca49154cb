"""Weights of earlier times, and rewards of another size: what the model of transitions tells the drift response."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from driftproof.learner.earlier import EarlierWeights
from driftproof.learner.rewiring import Starts
from driftproof.ppo import DistributionalPPO
from driftproof.state import compare

from .changing import LENGTH as ROOMS_LENGTH
from .changing import Metrics, learned, spoiled
from .changing import agent_in as rooms_agent
from .plant import BACK, CHANGE, LENGTH, UPDATE, agent_in, plants


def test_rewards_of_another_size_replace_no_weights():
    """Returns fall to a tenth, below those of an untrained policy, but the policy does what it always did."""
    metrics = Metrics()
    agent_in("rewards").learn((CHANGE + 16) * UPDATE, metrics, log_interval=None)
    returns = metrics.column("drift/episode_return")
    assert metrics.alarms()
    assert not any(metrics.column("drift/level"))
    assert min(returns[CHANGE + 1 :]) > 0.09 * returns[CHANGE - 1] > 0.08 * LENGTH


def test_wrong_choices_are_not_taken_for_small_rewards():
    """Where observations do not depend on actions, a policy that is wrong sees what it always saw."""
    agent = rooms_agent({0: "right", CHANGE: "wrong"}, drift_kit=True)
    assert agent.learner.drift_response.model is not None
    metrics = learned(agent, CHANGE + 25)
    returns = metrics.column("drift/episode_return")
    assert 1 in metrics.column("drift/level")
    assert 0 < min(returns[CHANGE:]) < 0.2 * ROOMS_LENGTH
    assert returns[-1] > 0.8 * ROOMS_LENGTH


@pytest.fixture(scope="module")
def forgetful():
    """An agent that has unlearned its task in a world where nobody noticed, and then is needed again; its metrics."""
    agent, metrics = spoiled(agent_in("ease"), CHANGE + 12), Metrics()
    agent.learn((BACK + 8) * UPDATE, metrics, log_interval=None)
    return agent, metrics


def test_weights_of_an_earlier_time_return_with_its_dynamics(forgetful):
    agent, metrics = forgetful
    returns, response = metrics.column("drift/episode_return"), agent.learner.drift_response
    trial = BACK + metrics.column("drift/trial")[BACK:].index(1)
    assert len(metrics.alarms()) == 1
    assert returns[BACK] < LENGTH / 2
    assert returns[trial] < LENGTH / 2, "the last good ones of the easy world fail"
    assert min(returns[trial + 2 :]) > 0.9 * returns[CHANGE - 1] > 0.7 * LENGTH
    assert not any(metrics.column("drift/level"))
    assert metrics.column("drift/rewired")[-1] == 0
    assert len(response.archive) == 1, "the last good ones only"
    assert [world["time"] for world in response.earlier.worlds] == sorted(
        world["time"] for world in response.earlier.worlds
    )


def test_earlier_weights_are_saved_and_loaded(forgetful, tmp_path):
    agent, _ = forgetful
    agent.save(tmp_path / "agent.zip")
    loaded = DistributionalPPO.load(tmp_path / "agent.zip", plants("ease"), device="cpu")
    own, other = (each.learner.drift_response.state_dict()["earlier_weights"] for each in (agent, loaded))
    assert own["worlds"]
    assert not compare(own, other)


def test_without_archived_worlds_there_are_no_earlier_weights_either():
    agent = agent_in(None, drift_worlds=0)
    agent.learn(CHANGE * UPDATE, log_interval=None)
    assert agent.learner.drift_response.earlier.worlds == []


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(0, 2_000))
def test_times_are_spread_over_all_of_the_past(limit, updates):
    earlier = EarlierWeights(limit)
    for _ in range(updates):
        earlier.observe({"return": 1.0})
    ages = [updates - world["time"] for world in earlier.worlds]
    assert len(ages) == min(limit, updates // 16)
    assert ages == sorted(ages, reverse=True)
    if ages:
        assert ages[-1] < 16, "the newest"
    if len(ages) > 1:
        assert updates - ages[0] == 16, "the oldest"
    if len(ages) > 2:
        ratios = np.array(ages[:-1]) / np.array(ages[1:]).clip(16)
        assert (ratios <= 3 * (updates / 16) ** (1 / (limit - 1))).all(), "no gap is much wider than it must be"


def test_a_state_with_times_of_the_future_does_no_harm():
    earlier = EarlierWeights(2)
    state = {"worlds": [{"return": 1.0, "time": 10**9}, {"return": 1.0, "time": 16}], "time": 31}
    EarlierWeights.rule({"return": lambda value, path: None})(state, ())
    earlier.load_state_dict(state, lambda world: world)
    earlier.observe({"return": 1.0})
    assert len(earlier.worlds) == 2


def test_what_is_usual_is_told_from_transitions():
    """The policy of a trained agent is where it usually is; one that does the opposite is not."""
    agent = agent_in(None)
    agent.learn(CHANGE * UPDATE, log_interval=None)
    model = agent.learner.drift_response.model

    def see(updates):
        agent.learning_rate = 1e-9
        model.recent = []
        learn, model.learn = model.learn, lambda: None
        agent.learn(updates * UPDATE, log_interval=None, reset_num_timesteps=False)
        model.learn = learn

    see(2)
    assert model.is_usual(LENGTH)
    assert not model.is_usual(2 * LENGTH), "episodes are shorter than usual"
    with torch.no_grad():
        for parameter in agent.policy.action_net.parameters():
            parameter.neg_()
    see(2)
    assert not model.is_usual(LENGTH), "the wrong actions lead elsewhere"


@pytest.mark.parametrize("size", [0.0, 1e-300, 1e150])
def test_any_moments_of_a_file_can_be_compared(size):
    agent = agent_in(None)
    model = agent.learner.drift_response.model
    moments = torch.full(model.state_dict()["moments"].shape, size, dtype=torch.float64)
    sums = {"moments": moments, "count": 2e3, "starts": torch.full((2, 3), size, dtype=torch.float64), "episodes": 9.0}
    state = {"moments": moments, "count": 2e3, "recent": [sums]}
    model.rule()(state, ())
    model.load_state_dict(state)
    assert model.is_usual(LENGTH) in (True, False)
    assert model.misfit(state, Starts(np.zeros(3), np.full(3, size))) >= 0
