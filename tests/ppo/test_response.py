"""The response to a drift alarm: as little as is needed, up to fresh weights, and former weights if they fit again."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.vec_env import DummyVecEnv

from driftproof.learner.episode_returns import Look, expected_return
from driftproof.learner.renewal import restart_optimizer
from driftproof.ppo import DistributionalPPO
from driftproof.state import CheckpointError, compare

from .changing import ENVS, LENGTH, STEPS, Rooms, agent_in, learned, rooms, spoiled

CHANGE, AGAIN = 40, 75
"""Updates at which the world changes."""
UPDATE = STEPS * ENVS


class Written(ActorCriticPolicy):
    """A policy that somebody wrote for Stable-Baselines3."""


def responding(worlds, **settings):
    return agent_in(worlds, drift_response=True, **settings)


def test_useless_weights_are_replaced_and_the_new_world_is_learned():
    metrics = learned(responding({0: "right", CHANGE: "wrong"}), CHANGE + 25)
    levels = metrics.column("drift/level")
    assert levels[:CHANGE] == [0] * CHANGE
    assert 1 in levels
    assert 2 not in levels
    restart = levels.index(3)
    assert restart <= CHANGE + 8
    assert levels[-1] == 0
    assert metrics.column("drift/alarms")[-1] == 1
    returns = metrics.column("drift/episode_return")
    assert returns[restart] < LENGTH / 4
    assert returns[restart + 1] > LENGTH / 4, "an untrained policy chooses the right action every other time"
    assert returns[-1] > 0.8 * LENGTH


def test_weights_that_still_earn_something_lose_their_last_layers_unless_that_does_not_help():
    agent = responding({0: "right", CHANGE: "lean"})
    metrics = learned(agent, CHANGE + 22)
    levels, returns = (metrics.column(f"drift/{name}") for name in ("level", "episode_return"))
    begin = levels.index(1)
    span = 2 * agent.drift_patience
    assert levels[begin:] == [1] * span + [2] * span + [0] * (len(levels) - begin - 2 * span)
    assert returns[begin + span + 2] < 0.6 * LENGTH, "last layers are halfway to random ones"
    assert returns[-1] > 0.65 * LENGTH, "as much as there is in this world"


def test_fresh_weights_that_earn_less_than_the_former_ones_are_taken_back():
    agent = responding({0: "right", CHANGE: "meagre"})
    metrics = learned(agent, CHANGE + 7)
    assert metrics.column("drift/level")[-1] == 3
    agent.learning_rate = 1e-9
    metrics = learned(agent, 25)
    levels, returns = (metrics.column(f"drift/{name}") for name in ("level", "episode_return"))
    assert 0.05 * LENGTH < returns[0] < 0.15 * LENGTH
    assert levels[-1] == 0
    assert returns[-1] > 0.18 * LENGTH


def test_nothing_is_replaced_if_returns_come_back():
    agent = responding({0: "right", CHANGE: "poor", CHANGE + 3: "right"})
    metrics = learned(agent, CHANGE + 12)
    levels = metrics.column("drift/level")
    assert set(levels) == {0, 1}
    assert levels[-1] == 0
    assert metrics.column("drift/episode_return")[-1] > 0.9 * LENGTH


@pytest.mark.parametrize("policy", ["MlpPolicy", "MlpLstmPolicy"])
def test_spoiled_weights_give_way_to_the_last_good_ones_and_no_alarm_is_raised(policy):
    agent = spoiled(responding({0: "right"}, policy=policy), CHANGE)
    metrics = learned(agent, CHANGE + 12)
    returns, trials = metrics.column("drift/episode_return"), metrics.column("drift/trial")
    check = trials.index(1)
    assert CHANGE <= check <= CHANGE + 5
    assert trials[check + 1 :] == [0] * len(trials[check + 1 :])
    assert returns[check] < LENGTH / 2
    assert min(returns[check + 1 :]) > 0.9 * LENGTH
    assert metrics.alarms() == []
    assert not any(metrics.column("drift/level"))
    assert metrics.column("drift/recovered")[-1] == 1
    assert agent.learner.drift_response.archive == []
    assert agent.learner.drift_response._good is not None, "for the next suspicion"


def test_a_world_that_is_a_little_worse_than_before_is_no_change():
    """The last rollout completed no episode: the last one that did counts."""
    agent = spoiled(responding({0: "right"}), CHANGE)
    alarm, update = agent.learner.drift_alarm, agent.learner.drift_alarm.update

    def without_episodes(calibration, rollout):
        is_suspicious = update(calibration, rollout)
        if is_suspicious:
            alarm.mean_return = None
        return is_suspicious

    alarm.update = without_episodes
    metrics = learned(agent, CHANGE + 12)
    assert metrics.alarms() == []
    assert metrics.column("drift/recovered")[-1] == 1


@pytest.mark.parametrize("policy", ["MlpPolicy", "MlpLstmPolicy"])
def test_weights_on_trial_have_time_for_an_episode_however_short_rollouts_are(policy):
    """Four rollouts make an episode, and no rollout sees one from beginning to end."""
    steps = 16
    worlds = {0: "right", 1500: "wrong", 3500: "right"}
    env = DummyVecEnv([lambda: Rooms(worlds, length=64)] * 8)
    agent = agent_in({0: "right"}, policy=policy, env=env, n_steps=steps, drift_response=True)
    metrics = learned(agent, 5500 // steps, steps * 8)
    rewarded = np.array([r for r in metrics.column("drift/episode_return") if r is not None])
    assert metrics.column("drift/alarms")[-1] == 2
    back = metrics.column("drift/trial")[3500 // steps :]
    assert sum(back) > 0
    assert 3 not in metrics.column("drift/level")[3500 // steps :], "the first weights fit again"
    assert rewarded[-5:].mean() > 0.8 * 64


def test_a_trial_that_is_shorter_than_episodes_counts_what_they_have_returned():
    """Of ten weights that hold a pole for ever, some still let it fall soon; those episodes end first."""
    seen = Look(steps=1000, episodes=2, returns=80.0)
    assert expected_return(seen, np.array([100.0] * 8), has_time=True) == 440
    assert expected_return(Look(steps=1000), np.array([100.0] * 8), has_time=True) is None
    assert expected_return(Look(steps=1000), np.array([-300.0, -100.0]), has_time=False) == -200


def test_exploration_rises_with_the_alarm_and_fades():
    metrics = learned(responding({0: "right", CHANGE: "poor", CHANGE + 3: "right"}), CHANGE + 26)
    floors = [floor or 0.0 for floor in metrics.column("train/exploration_floor")]
    alarm = metrics.alarms()[0]
    assert floors[alarm] == 0
    assert floors[alarm + 1] == pytest.approx(0.02)
    assert floors[alarm + 11] == pytest.approx(0.01)
    assert floors[alarm + 22] == 0


@pytest.mark.parametrize("policy", ["MlpPolicy", "MlpLstmPolicy"])
def test_former_weights_return_with_their_world(policy):
    metrics = learned(responding({0: "right", CHANGE: "wrong", AGAIN: "right"}, policy=policy), AGAIN + 8)
    trials = metrics.column("drift/trial")
    trial = trials.index(1, AGAIN)
    assert AGAIN < trial <= AGAIN + 3
    assert trials[trial:] == [1, 1] + [0] * (len(trials) - trial - 2), "the last good weights, then those of the first"
    returns = metrics.column("drift/episode_return")
    assert max(returns[trial : trial + 2]) < LENGTH / 2
    assert min(returns[trial + 2 :]) > 0.9 * LENGTH
    assert metrics.column("drift/archived")[CHANGE - 1] == 0
    assert metrics.column("drift/archived")[-1] == 1, "those of the second world remain"


def test_a_change_soon_after_a_response_is_seen():
    soon = AGAIN + 12
    metrics = learned(responding({0: "right", CHANGE: "wrong", AGAIN: "right", soon: "wrong"}), soon + 8)
    returns, trials = metrics.column("drift/episode_return"), metrics.column("drift/trial")
    assert min(returns[soon - 5 : soon]) > 0.9 * LENGTH, "the response has ended"
    assert 1 in trials[soon : soon + 4]
    assert min(returns[-3:]) > 0.9 * LENGTH


def test_weights_that_do_not_fit_are_put_back():
    agent = responding({0: "right", CHANGE: "wrong", AGAIN: "poor"})
    metrics = learned(agent, AGAIN + 5)
    trials = metrics.column("drift/trial")
    first = trials.index(1, AGAIN)
    assert trials[first : first + 3] == [1, 1, 0]
    assert metrics.column("drift/level")[first + 2] == 1
    assert len(agent.learner.drift_response.archive) == 2


def test_archive_is_bounded():
    agent = responding({0: "right", CHANGE: "wrong", AGAIN: "poor"}, drift_worlds=1)
    metrics = learned(agent, AGAIN + 4)
    assert metrics.column("drift/archived")[-1] == 1
    assert sum(metrics.column("drift/trial")) == 2, "only the last good weights act, to see whether the world changed"


def told(agent):
    """The agent's state, but for an option that torch adds when loading."""
    tree = agent.state_tree()
    for group in tree["optimizer"]["param_groups"]:
        group.pop("differentiable", None)
    return tree


def cut_at(update, worlds, total, tmp_path, **settings):
    """An agent that was saved after an update, loaded and trained on, and one that was not."""
    whole = responding(worlds, **settings)
    whole.learn(total * UPDATE, log_interval=None)
    expected = told(whole)
    cut = responding(worlds, **settings)
    cut.pause_at = update * UPDATE
    cut.learn(total * UPDATE, log_interval=None)
    cut.save(tmp_path / "cut.zip")
    torch.rand(7)
    resumed = DistributionalPPO.load(tmp_path / "cut.zip", rooms(worlds), device="cpu")
    stage = resumed.learner.drift_response.metrics()
    resumed.resume(log_interval=None)
    return stage, compare(expected, told(resumed))


@pytest.mark.parametrize(
    ("policy", "after", "stage"),
    [
        ("MlpPolicy", CHANGE - 3, {"drift/level": 0}),
        ("MlpPolicy", CHANGE + 3, {"drift/level": 1}),
        ("MlpLstmPolicy", CHANGE + 7, {"drift/level": 3}),
    ],
    ids=["before", "level 1", "restarted"],
)
def test_resume_equals_uninterrupted(policy, after, stage, tmp_path):
    found, differences = cut_at(after, {0: "right", CHANGE: "wrong"}, CHANGE + 10, tmp_path, policy=policy)
    assert found.items() >= stage.items()
    assert not differences, "\n".join(map(str, differences[:10]))


@pytest.mark.parametrize("policy", ["MlpPolicy", pytest.param("MlpLstmPolicy", marks=pytest.mark.slow)])
def test_resume_in_the_middle_of_a_trial_equals_uninterrupted(policy, tmp_path):
    worlds = {0: "right", CHANGE: "wrong", AGAIN: "poor"}
    found, differences = cut_at(AGAIN + 2, worlds, AGAIN + 6, tmp_path, policy=policy)
    assert found["drift/trial"] == 1
    assert not differences, "\n".join(map(str, differences[:10]))


def test_another_agent_takes_it_over():
    agent, other = (responding({0: "right", CHANGE: "wrong"}, seed=seed) for seed in (3, 4))
    learned(agent, CHANGE + 4)
    other.learn(UPDATE, log_interval=None)
    other.set_parameters(agent.get_parameters())
    own, taken = told(agent), told(other)
    assert len(taken["drift_response"]["archive"]) == 1
    assert not [name for name in ("policy", "drift_alarm", "drift_response") if compare(own[name], taken[name])]
    other.learn(2 * UPDATE, log_interval=None, reset_num_timesteps=False)


def test_wrong_states_are_refused_and_nothing_changes():
    agent = responding({0: "right", CHANGE: "wrong"})
    learned(agent, CHANGE + 3)
    before = agent.state_tree()
    state = before["drift_response"]
    world = state["archive"][0]
    cut = {**world, "policy": {name: tensor[:1] for name, tensor in world["policy"].items()}}
    for wrong in ({"level": 4}, {"trial": 5}, {"archive": [None]}, {"archive": [cut]}, {"window": [float("nan")]}):
        with pytest.raises(CheckpointError):
            agent.load_state_tree({**before, "drift_response": {**state, **wrong}})
        assert not compare(before, agent.state_tree())


def test_it_needs_the_alarm():
    with pytest.raises(ValueError, match="drift_alarm"):
        agent_in({0: "right"}, drift_alarm=False, drift_response=True)


@pytest.mark.parametrize("policy", ["MlpPolicy", "MlpLstmPolicy", "MlpGruPolicy", Written])
def test_fresh_networks_are_alike_and_others(policy):
    networks = {"net_arch": [5]} if policy is Written else None
    settings = {} if networks is None else {"policy_kwargs": networks}
    agent = responding({0: "right"}, policy=policy, **settings)
    before = agent.state_tree()["policy"]
    fresh = agent.policy.fresh()
    assert not compare(before, agent.state_tree()["policy"])
    shapes = {name: tensor.shape for name, tensor in before.items()}
    assert shapes == {name: tensor.shape for name, tensor in fresh.state_dict().items()}
    assert compare(before, dict(fresh.state_dict()))
    last = agent.policy.last_parameters()
    assert [p.shape for p in last] == [p.shape for p in fresh.last_parameters()]
    assert len(last) > 0
    agent.learn(2 * UPDATE, log_interval=None)


@pytest.mark.parametrize("optimizer", ["AdaptiveUPGD", "UPGDW", torch.optim.Adam, torch.optim.SGD])
def test_a_restarted_optimizer_steps_like_a_new_one(optimizer):
    agents = [agent_in({0: "right"}, optimizer_class=optimizer, learning_rate=1e-2) for _ in range(2)]
    used, new = agents
    used.learn(UPDATE, log_interval=None)
    used.policy.load_state_dict(new.policy.state_dict())
    restart_optimizer(used.learner)
    for agent in agents:
        torch.manual_seed(0)
        for parameter in agent.policy.parameters():
            parameter.grad = torch.ones_like(parameter)
        agent.optimizer.step()
    for own, other in zip(used.policy.parameters(), new.policy.parameters(), strict=True):
        np.testing.assert_allclose(own.detach(), other.detach(), rtol=1e-5, atol=1e-7)


class Leavable(gymnasium.Env):
    """Every step is rewarded, or costs as much; who wants to leaves at once."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self):
        self.clock = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.age = 0
        return self._see(), {}

    def step(self, action):
        self.clock += 1
        self.age += 1
        reward = -1.0 if COSTS <= self.clock // STEPS < PAYS else 1.0
        return self._see(), reward, bool(action) or self.age == 3 * LENGTH, False, {}

    def _see(self):
        return np.float32([self.age / 3 / LENGTH, self.np_random.normal() / 9])


COSTS, PAYS = 30, 90


@pytest.mark.parametrize("worlds", [1, 3])
def test_weights_for_rewards_of_another_sign_return_with_them(worlds):
    """Who has learned to leave earns more when steps are rewarded again, which is no alarm, but could earn more."""
    settings = {"gamma": 0.95, "drift_exploration": 0.0, "drift_worlds": worlds}
    agent = agent_in({}, env=DummyVecEnv([Leavable] * ENVS), drift_response=True, **settings)
    returns = (metrics := learned(agent, PAYS + 6)).column("drift/episode_return")
    assert returns[COSTS - 1] > 2 * LENGTH
    assert -1.5 < returns[PAYS - 1] < 0
    assert returns[PAYS] < 2
    assert min(returns[PAYS + 3 :]) > 2 * LENGTH
    assert max(metrics.alarms()) < PAYS
    assert not any(metrics.column("drift/level")[PAYS:])


def test_only_weights_that_earned_more_are_tried_for_other_rewards():
    settings = {"gamma": 0.95, "drift_exploration": 0.0, "drift_worlds": 2}
    agent = agent_in({}, env=DummyVecEnv([Leavable] * ENVS), drift_response=True, **settings)
    learned(agent, PAYS - 2)
    response = agent.learner.drift_response
    (steady,) = response.archive
    own = {**response._worlds.copy(), "return": -1.0, "length": 1.0}
    response.archive[:] = [own, steady]
    metrics = learned(agent, 8)
    assert metrics.column("drift/trial").count(1) == 1
    assert metrics.column("drift/episode_return")[-1] > 2 * LENGTH
    assert [world["return"] < 0 for world in response.archive] == [True]
