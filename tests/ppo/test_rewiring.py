"""Sensors and actions that are swapped and inverted while an agent learns: it goes on with reordered weights."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.vec_env import DummyVecEnv

from driftproof.nn.types import Rewiring
from driftproof.pbt.member import Trainee
from driftproof.ppo import DistributionalPPO
from driftproof.state import CheckpointError, compare

from .changing import Metrics
from .plant import CHANGE, LENGTH, STEPS, UPDATE, Plant, agent_in, plants


def told(agent):
    tree = agent.state_tree()
    for group in tree["optimizer"]["param_groups"]:
        group.pop("differentiable", None)
    return tree


class Saves(Metrics):
    """Saves the agent after two updates with swapped sensors, when reordered weights are about to be tried."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def _on_rollout_start(self):
        super()._on_rollout_start()
        if self.num_timesteps == (CHANGE + 2) * UPDATE:
            self.model.save(self.path)


@pytest.fixture(scope="module", params=["MlpPolicy", pytest.param("MlpLstmPolicy", marks=pytest.mark.slow)])
def trained(request, tmp_path_factory):
    """State of an agent whose sensors were swapped, its metrics, and the file that it wrote during the trial."""
    metrics = Saves(tmp_path_factory.mktemp("trained") / "agent.zip")
    agent = agent_in("sensors", request.param, init_decay=0.01).learn((CHANGE + 6) * UPDATE, metrics, None)
    return told(agent), metrics


@pytest.fixture
def trying(trained):
    """An agent that was loaded during the trial."""
    return DistributionalPPO.load(trained[1].path, plants("sensors"), device="cpu")


def test_swapped_sensors_are_found(trained):
    _, metrics = trained
    returns = metrics.column("drift/episode_return")
    assert metrics.column("drift/rewired") == [0] * (CHANGE + 2) + [1, 1, 1]
    assert metrics.column("drift/trial") == [0] * (CHANGE + 1) + [1, 0, 0, 0]
    assert metrics.column("drift/archived") == [0] * (CHANGE + 1) + [2, 1, 1, 1]
    assert not any(metrics.column("drift/level"))
    assert max(returns[CHANGE : CHANGE + 2]) < 0.6 * LENGTH
    assert min(returns[CHANGE + 2 :]) > 0.95 * returns[CHANGE - 1] > 0.8 * LENGTH


def test_all_that_belongs_to_the_weights_is_reordered(trying):
    world, good = trying.learner.drift_response.archive
    order, signs = torch.from_numpy(Plant.order), torch.from_numpy(Plant.signs)
    assert torch.equal(world["observations"][""]["mean"], good["observations"][""]["mean"][order] * signs)
    squares = [each["model"]["moments"].diagonal()[1 + 3 : 1 + 3 + 3] for each in (world, good)]
    assert torch.equal(squares[0], squares[1][order]), "of the model of transitions"
    weight = "actor_core.recurrence.weight_ih_l0" if trying.policy.is_recurrent else "actor_network.0.weight"
    for part in ("policy", "initial_weights"):
        assert torch.equal(world[part][weight], (good[part][weight][:, order] * signs).float())


def test_resume_in_the_middle_of_the_trial_equals_uninterrupted(trained, trying):
    assert trying.learner.drift_response.metrics()["drift/trial"] == 1
    trying.resume(log_interval=None)
    differences = compare(trained[0], told(trying))
    assert not differences, "\n".join(map(str, differences[:10]))


def test_another_agent_takes_a_trial_over(trying):
    other = agent_in("sensors", type(trying.policy), seed=1, init_decay=0.01)
    other.learn(UPDATE, log_interval=None)
    Trainee(other, 1).inherit(trying.get_parameters(), "v2_full_parameters", {})
    assert other.learner.drift_response.metrics()["drift/trial"] == 1
    assert not compare(told(trying)["drift_response"], told(other)["drift_response"])
    other.learn(UPDATE, log_interval=None, reset_num_timesteps=False)


class Starts(Metrics):
    """Keeps whether an episode starts with a rollout in which other weights act, and their recurrent states."""

    def __init__(self):
        super().__init__()
        self.starts, self.states = [], []

    def _on_rollout_start(self):
        super()._on_rollout_start()
        if self.updates and self.updates[-1]["drift/trial"]:
            self.starts.append(self.model._last_episode_starts.any())
            self.states.append(any(part.any() for part in self.model.state.actor))


@pytest.mark.parametrize("policy", ["MlpPolicy", "MlpLstmPolicy"])
def test_swapped_actions_are_found(policy):
    metrics = Starts()
    # Rollouts end within episodes.
    agent = agent_in("actions", policy, drift_worlds=0, n_steps=STEPS - 3, batch_size=STEPS - 3)
    agent.learn((CHANGE + 4) * UPDATE, metrics, log_interval=None)
    assert metrics.starts, "other weights have acted"
    assert not any(metrics.starts), "within the same episodes: their observations are not taken for first ones"
    assert not any(metrics.states)
    assert metrics.column("drift/rewired")[-1] == 1
    assert agent.learner.drift_response.archive == [], "reordered weights are tried without an archive, too"
    returns = metrics.column("drift/episode_return")
    assert returns[-1] > 0.85 * max(returns)


def test_it_is_a_part_of_the_kit_that_can_be_switched_off():
    agent = agent_in("sensors", drift_rewiring=False)
    assert agent.learner.drift_response.model is None
    assert agent_in("sensors", observation_normalizer=False).learner.drift_response.model is None
    for missing in ({"drift_response": False}, {"observation_normalizer": False}):
        with pytest.raises(ValueError, match="drift_rewiring"):
            agent_in("sensors", drift_rewiring=True, **missing)


class Written(ActorCriticPolicy):
    """A policy that somebody wrote for Stable-Baselines3."""


class Sampled(gymnasium.Env):
    """Any observations and actions."""

    def __init__(self, observation_space, action_space):
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 1.0, bool(self.np_random.random() < 0.1), False, {}


VECTOR = spaces.Box(-1, 1, (2,))
MANY = {
    "written by somebody": (Written, VECTOR, spaces.Discrete(2), False),
    "dict": ("MultiInputPolicy", spaces.Dict({"a": VECTOR, "b": VECTOR}), spaces.Discrete(2), False),
    "many sensors": ("MlpPolicy", spaces.Box(-1, 1, (25,)), spaces.Discrete(2), False),
    "many actions": ("MlpPolicy", VECTOR, spaces.Discrete(25), False),
    "MultiDiscrete": ("MlpPolicy", VECTOR, spaces.MultiDiscrete([2, 3]), True),
    "MultiBinary": ("MlpGruPolicy", VECTOR, spaces.MultiBinary(3), True),
    "matrices": ("MlpPolicy", spaces.Box(-1, 1, (2, 3)), spaces.Box(-1, 1, (2, 2)), True),
}


@pytest.mark.parametrize("kind", MANY)
def test_agents_with_other_observations_and_actions(kind):
    policy, observations, actions, has_model = MANY[kind]
    env = DummyVecEnv([lambda: Sampled(observations, actions)] * 2)
    settings = {"policy_kwargs": {"net_arch": [4]}, "n_steps": 32, "batch_size": 32, "n_epochs": 1, "drift_kit": True}
    agent = DistributionalPPO(policy, env, device="cpu", seed=0, **settings)
    agent.learn(3 * 64, log_interval=None)
    model = agent.learner.drift_response.model
    assert (model is not None) == has_model
    if model is not None:
        assert model.count > 0
        agent.learner.policy.rewire(unchanged(model))


def unchanged(model):
    n, m = model.sensors, model.actions
    return Rewiring(np.arange(n), np.ones(n), np.arange(m), np.ones(m))


def test_a_state_that_is_loaded_during_a_rollout_leaves_out_its_transitions():
    agent = agent_in(None)

    class Loads(Metrics):
        def _on_step(self):
            if self.n_calls == STEPS // 2:
                agent.learner.normalizer.load_state_dict(agent.learner.normalizer.state_dict())
            return True

    agent.learn(UPDATE, Loads(), log_interval=None)
    assert not agent.learner.drift_response.model.recent
    agent.learn(UPDATE, log_interval=None, reset_num_timesteps=False)
    assert agent.learner.drift_response.model.recent or agent.learner.drift_response.model.count


def test_wrong_states_are_refused_and_nothing_changes(trying):
    before = trying.state_tree()
    state = before["drift_response"]
    model = state["model"]
    for wrong in (
        {"rewired": 5},
        {"rewirings": -1},
        {"model": None},
        {"model": {**model, "moments": model["moments"][1:]}},
        {"model": {**model, "moments": model["moments"] * float("nan")}},
        {"model": {**model, "count": -1.0}},
        {"model": {**model, "recent": [{}]}},
    ):
        with pytest.raises(CheckpointError):
            trying.load_state_tree({**before, "drift_response": {**state, **wrong}})
        assert not compare(before, trying.state_tree())
