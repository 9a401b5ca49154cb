"""Agents that explore by gSDE: when matrices are drawn, what they act on, and that learning goes on as it should."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv

from driftproof.adversarial import SAPPOConfig, evaluate_under_attack
from driftproof.ppo import DistributionalPPO
from driftproof.state import CheckpointError

from .scripted import StepSpy, agent, learn, scripted, small_networks

BOX = spaces.Box(-2, 2, (2,), np.float32)


class Still(gymnasium.Env):
    """Nothing ever changes but the action that was told."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = BOX

    def reset(self, *, seed=None, options=None):
        return np.array([0.3, -0.8], np.float32), {}

    def step(self, action):
        return np.array([0.3, -0.8], np.float32), -float(np.abs(action).sum()), False, False, {}


def explorer(env=None, policy="MlpPolicy", **settings):
    env = DummyVecEnv([Still] * 3) if env is None else env
    return agent(env, policy, **{"use_sde": True, **settings})


def moving(**arguments):
    """Environments whose observations, and episodes, come and go."""
    return scripted([3, 5], [4], [7, 2], action_space=BOX, **arguments)


def deviations(model):
    """How far actions of the rollout were from their means ``[T, N, dim]``."""
    rollout = model._rollout
    return rollout.actions - rollout.parameters[..., : rollout.actions.shape[-1]]


@pytest.mark.parametrize(("freq", "expected"), [(-1, 8), (4, 4), (3, 3), (1, 1)])
def test_matrices_are_drawn_when_rollouts_begin_and_every_so_many_steps(freq, expected):
    seen = []
    learn(explorer(sde_sample_freq=freq), 3, before=lambda model: seen.append(deviations(model).clone()))
    for noise in seen:
        same = (noise[1:] - noise[:-1]).abs().amax((1, 2)) < 1e-5
        assert [bool(s) for s in same] == [(step + 1) % expected != 0 for step in range(7)]
        # Each environment has its own.
        assert (noise[0, 0] - noise[0, 1]).abs().min() > 1e-3
    assert (seen[0][-1] - seen[1][0]).abs().min() > 1e-3


def test_without_it_noise_is_drawn_at_every_step():
    model = explorer(use_sde=False)
    learn(model, 1)
    noise = deviations(model)
    assert (noise[1:] - noise[:-1]).abs().amin((1, 2)).min() > 1e-5


@pytest.mark.parametrize("squash_output", [False, True])
@pytest.mark.parametrize("policy", ["MlpPolicy", "MlpLstmPolicy", "MlpGruPolicy"])
def test_training_recomputes_the_log_probabilities_of_the_rollout(policy, squash_output, monkeypatch):
    spy = StepSpy(monkeypatch)
    kwargs = {"squash_output": squash_output, "log_std_init": -1.0}
    model = explorer(moving(), policy, policy_kwargs=kwargs, sde_sample_freq=2, target_kl=0.5, kl_penalty=True)
    learn(model, 1)
    assert 0 <= spy.facts[0]["approx_kl"] < 1e-9
    assert 0 <= spy.facts[0]["kl"] < 1e-9
    # The spread differs from state to state.
    assert spy.batches[0].parameters[..., 2:].std() > 1e-3


def test_prediction_uses_the_matrices_in_force():
    model = explorer()
    learn(model, 2)
    seen = model.get_env().reset()
    actions = model.predict(seen)[0]
    np.testing.assert_array_equal(actions, model.predict(seen)[0])
    assert len(np.unique(actions[:, 0])) == 3
    # Those of the rollout, where there is one for each environment, and otherwise that of the first.
    np.testing.assert_allclose(model.predict(seen[0])[0], actions[0], rtol=1e-5)
    np.testing.assert_allclose(model.predict(seen[:2])[0], actions[[0, 0]], rtol=1e-5)
    model.policy.reset_noise(3)
    again = model.predict(seen)[0]
    assert (np.abs(again - actions) > 1e-4).any()
    model.policy.reset_noise()
    np.testing.assert_allclose(*np.split(model.predict(seen[:2])[0], 2), rtol=1e-5)
    still = model.predict(seen, deterministic=True)[0]
    np.testing.assert_allclose(still, still[[0, 0, 0]], rtol=1e-5)


def test_what_is_learned_of_noise_reaches_the_matrix():
    """Actions should be zero, so noise does harm: it becomes smaller."""
    model = explorer(n_steps=32, n_epochs=4, learning_rate=1e-2, policy_kwargs={"log_std_init": -1.0})
    learn(model, 20)
    assert model.policy.log_std.mean() < -1.2


@pytest.mark.parametrize("policy", ["MlpPolicy", "MlpLstmPolicy"])
def test_file_has_settings_weights_and_matrices(policy, tmp_path):
    kwargs = {"full_std": False, "use_expln": True, "log_std_init": -2.0}
    model = explorer(policy=policy, sde_sample_freq=4, policy_kwargs=kwargs)
    learn(model, 1)
    model.save(tmp_path / "agent.zip")
    for env in (DummyVecEnv([Still] * 3), DummyVecEnv([Still] * 2), None):
        loaded = DistributionalPPO.load(tmp_path / "agent.zip", env=env)
        assert (loaded.use_sde, loaded.sde_sample_freq) == (True, 4)
        assert (loaded.policy.exploration.full_std, loaded.policy.exploration.use_expln) == (False, True)
        assert torch.equal(loaded.policy.log_std, model.policy.log_std)
        seen = model.get_env().reset()
        np.testing.assert_array_equal(loaded.predict(seen)[0], model.predict(seen)[0])


def test_matrices_are_drawn_as_often_as_is_asked_for_when_loading(tmp_path):
    explorer(sde_sample_freq=4).save(tmp_path / "agent.zip")
    loaded = DistributionalPPO.load(tmp_path / "agent.zip", env=DummyVecEnv([Still] * 3), sde_sample_freq=2)
    learn(loaded, 1)
    assert (deviations(loaded)[2:4] - deviations(loaded)[2]).abs().max() < 1e-5
    assert (deviations(loaded)[2] - deviations(loaded)[1]).abs().min() > 1e-5


@pytest.mark.parametrize(
    "matrices", [torch.zeros(0, 5, 2), torch.zeros(3, 2, 5), torch.full((1, 5, 2), torch.inf), None]
)
def test_wrong_matrices_in_a_state_change_nothing(matrices):
    model = explorer()
    learn(model, 1)
    tree, before = model.state_tree(), model.policy.exploration.matrices
    tree["rollout"]["exploration"] = matrices
    with pytest.raises(CheckpointError, match="exploration"):
        model.load_state_tree(tree)
    assert torch.equal(model.policy.exploration.matrices, before)


class Camera(Still):
    observation_space = spaces.Box(0, 255, (36, 36, 1), np.uint8)

    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 0.0, False, False, {}


@pytest.mark.parametrize("policy", ["CnnPolicy", "CnnLstmPolicy"])
def test_images(policy):
    kwargs = small_networks(policy, {"features_extractor_kwargs": {"features_dim": 8}})
    env = DummyVecEnv([Camera] * 2)
    model = DistributionalPPO(policy, env, n_steps=8, batch_size=16, n_epochs=1, use_sde=True, policy_kwargs=kwargs)
    model.learn(16)
    assert model.policy.log_std.shape == (5, 2)
    assert model.policy.log_std.isfinite().all()


def test_attacks():
    model = explorer(moving(), "MlpLstmPolicy", adversarial=SAPPOConfig(warmup_updates=0), n_epochs=2)
    learn(model, 2)
    evaluate_under_attack(model, moving(truncated=True), episodes=3, deterministic=False)


@pytest.mark.parametrize("env", [DummyVecEnv([lambda: gymnasium.make("CartPole-v1")]), "CartPole-v1"])
def test_choices_are_refused(env):
    with pytest.raises(ValueError, match="continuous actions"):
        DistributionalPPO("MlpPolicy", env, use_sde=True)


def test_choices_are_refused_when_networks_are_built_later():
    model = DistributionalPPO("MlpPolicy", use_sde=True, _init_setup_model=False)
    model.set_env(gymnasium.make("CartPole-v1"))
    with pytest.raises(ValueError, match=r"use_sde=True needs continuous actions: a Box, not Discrete"):
        model._setup_model()


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"use_sde": 1}, "use_sde"),
        ({"sde_sample_freq": -2}, "sde_sample_freq: -2"),
        ({"sde_sample_freq": 1.5}, "sde_sample_freq: 1.5"),
        ({"policy_kwargs": {"full_std": None}}, "full_std"),
        ({"policy_kwargs": {"use_expln": "yes"}}, "use_expln"),
    ],
)
def test_bad_settings_are_named(settings, problem):
    with pytest.raises(ValueError, match=f"Invalid {problem}"):
        explorer(**settings)


def test_policy_has_it_from_the_agent():
    with pytest.raises(TypeError, match="argument of the agent"):
        explorer(policy_kwargs={"use_sde": True})


@pytest.mark.parametrize(
    "settings", [{"sde_sample_freq": 4}, {"policy_kwargs": {"full_std": False}}, {"policy_kwargs": {"use_expln": True}}]
)
def test_settings_without_it_are_taken_with_a_warning(settings):
    with pytest.warns(UserWarning, match="has no effect without use_sde=True"):
        explorer(use_sde=False, **settings)


def test_there_is_no_matrix_to_draw_without_it():
    with pytest.raises(ValueError, match="use_sde=True"):
        explorer(use_sde=False).policy.reset_noise()
    with pytest.raises(ValueError, match="Invalid n_envs: 0"):
        explorer().policy.reset_noise(0)
