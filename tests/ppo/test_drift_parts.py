"""Parts of the drift kit in networks and losses, through ``learn()`` and files."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces

from driftproof.config import loads
from driftproof.config.build import agent_arguments
from driftproof.config.from_agent import config_from
from driftproof.ppo import DistributionalPPO

from .scripted import StepSpy, agent, learn, scripted, weights

SPACES = {
    "Discrete": spaces.Discrete(3),
    "MultiDiscrete": spaces.MultiDiscrete([2, 3]),
    "MultiBinary": spaces.MultiBinary(2),
    "Box": spaces.Box(-1, 1, (2,), np.float32),
}


def learner(space="Discrete", **arguments):
    return agent(scripted([3], [5, 1], [20], action_space=SPACES[space], reward=lambda *_: 0), **arguments)


def reloaded(model, tmp_path):
    model.save(tmp_path / "agent.zip")
    return DistributionalPPO.load(tmp_path / "agent.zip", device="cpu")


class TestExplorationFloor:
    @pytest.mark.parametrize("space", SPACES)
    def test_leads_a_certain_policy_back(self, space):
        def spoil(model):
            with torch.no_grad():
                if space == "Box":
                    model.policy.log_std.fill_(-6.0)
                model.policy.action_head.bias.copy_(torch.tensor([9.0, -9.0] * 3)[: len(model.policy.action_head.bias)])

        divergences = {}
        for floor in (0.0, 1.0):
            model = learner(space, exploration_floor=floor, learning_rate=0.03, n_epochs=30)
            spoil(model)
            logs = learn(model, 3)
            parameters = model.policy.evaluate_actor(torch.zeros(1, 1, 3), model.policy.initial_state(1))
            divergences[floor] = model.policy.distribution.uniform_divergence(parameters).item()
            assert ("train/uniform_divergence" in logs[0]) == (floor > 0)
        assert logs[-1]["train/uniform_divergence"] < logs[0]["train/uniform_divergence"]
        assert logs[-1]["train/exploration_floor"] == 1.0
        assert divergences[1.0] < divergences[0.0] / 3

    def test_is_part_of_the_loss(self, monkeypatch):
        spy = StepSpy(monkeypatch)
        learn(learner(exploration_floor=0.3))
        for facts in spy.facts:
            value = (facts["critic_loss_1"] + facts["critic_loss_2"]) / 2
            expected = facts["policy_loss"] + 0.5 * value + 0.3 * facts["uniform_divergence"]
            assert facts["loss"] == pytest.approx(expected, abs=1e-5)

    def test_is_a_hyperparameter(self, tmp_path):
        model = learner()
        assert model.hyperparams["exploration_floor"] == model.exploration_floor == 0
        model.hyperparams["exploration_floor"] = 0.2
        assert learn(model)[0]["train/exploration_floor"] == 0.2
        assert reloaded(model, tmp_path).exploration_floor == 0.2
        with pytest.raises(ValueError, match="Invalid exploration_floor: -1"):
            model.exploration_floor = -1
        with pytest.raises((TypeError, ValueError), match="exploration_floor"):
            model.exploration_floor = None

    def test_a_state_without_it_has_none(self):
        model, other = learner(), learner(exploration_floor=0.1)
        state = model.get_parameters()
        del state["hyperparams"]["exploration_floor"]
        model.set_parameters(state)
        with pytest.warns(UserWarning, match="exploration_floor"):
            other.set_parameters(state)

    def test_in_configurations(self):
        config = loads("drift: {exploration_floor: 0.01}")
        assert agent_arguments(config)["exploration_floor"] == 0.01
        assert config_from(learner(exploration_floor=0.02).settings(), 3, {}).drift.exploration_floor == 0.02


def test_parts_that_are_off_change_nothing():
    ends = []
    for arguments in ({}, {"exploration_floor": 0.0}):
        model = learner(**arguments)
        learn(model, 2)
        ends.append(weights(model))
    assert torch.equal(*ends)
