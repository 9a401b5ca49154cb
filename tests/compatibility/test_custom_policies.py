"""Policy classes that people wrote for Stable-Baselines3."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.policies import (
    ActorCriticCnnPolicy,
    ActorCriticPolicy,
    MultiInputActorCriticPolicy,
)
from torch import nn

from driftproof.export import export_onnx
from driftproof.nn import policies as own
from driftproof.ppo import DistributionalPPO
from driftproof.signals import infer
from driftproof.state import CheckpointError
from tests.helpers import weights


class TwoTowers(nn.Module):
    """A network of one's own, as Stable-Baselines3's documentation shows it."""

    latent_dim_pi, latent_dim_vf = 12, 6

    def __init__(self, features):
        super().__init__()
        self.policy_net = nn.Sequential(nn.Linear(features, 12), nn.ReLU())
        self.value_net = nn.Sequential(nn.Linear(features, 6), nn.ReLU())

    def forward(self, features):
        return self.forward_actor(features), self.forward_critic(features)

    def forward_actor(self, features):
        return self.policy_net(features)

    def forward_critic(self, features):
        return self.value_net(features)


class CustomPolicy(ActorCriticPolicy):
    def __init__(self, observation_space, action_space, lr_schedule, *args, **kwargs):
        super().__init__(observation_space, action_space, lr_schedule, *args, **{**kwargs, "ortho_init": False})

    def _build_mlp_extractor(self):
        self.mlp_extractor = TwoTowers(self.features_dim)


class ConstantValue(ActorCriticPolicy):
    constant = 2.0

    def forward(self, obs, deterministic=False):
        actions, values, log_prob = super().forward(obs, deterministic)
        return actions, torch.full_like(values, self.constant), log_prob


class OwnEvaluation(ActorCriticPolicy):
    def evaluate_actions(self, obs, actions):
        return super().evaluate_actions(obs, actions)


class OwnRecurrence(RecurrentActorCriticPolicy):
    pass


class World(gym.Env):
    """Pays 1 at the end of episodes of 8 steps."""

    def __init__(self, action_space, observation_space=None):
        self.action_space = action_space
        self.observation_space = observation_space or spaces.Box(-1, 1, (3,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.steps += 1
        return self.observation_space.sample(), float(self.steps == 8), self.steps == 8, False, {}


ACTIONS = {
    "discrete": spaces.Discrete(4),
    "multi-discrete": spaces.MultiDiscrete([2, 3]),
    "multi-binary": spaces.MultiBinary(3),
    "box": spaces.Box(-2, 2, (2,)),
    "box of two dimensions": spaces.Box(-2, 2, (2, 2)),
}


def small(policy=CustomPolicy, env="CartPole-v1", **arguments):
    return DistributionalPPO(policy, env, **{"n_steps": 16, "n_epochs": 2, "seed": 0, "device": "cpu", **arguments})


class Rollouts(BaseCallback):
    """Keeps what the buffer says after every rollout."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def _on_step(self):
        return True

    def _on_rollout_end(self):
        buffer, policy = self.model.rollout_buffer, self.model.policy
        observations = torch.as_tensor(buffer.observations).flatten(0, 1)
        actions = torch.as_tensor(buffer.actions).flatten(0, 1)
        if isinstance(policy.action_space, spaces.Discrete):
            actions = actions.flatten()
        with torch.no_grad():
            values, log_probs, entropies = policy.evaluate_actions(observations, actions)
            again = policy.distribution.entropy(policy.evaluate_actor(observations.unsqueeze(0)))
        self.seen.append((buffer.values, buffer.log_probs, buffer.advantages, buffer.returns))
        np.testing.assert_allclose(buffer.log_probs.flatten(), log_probs, atol=1e-5)
        np.testing.assert_allclose(again.flatten(), entropies, atol=1e-5)
        if type(policy).forward is ActorCriticPolicy.forward:
            np.testing.assert_allclose(buffer.values.flatten(), values.flatten(), atol=1e-5)


@pytest.mark.parametrize("actions", ACTIONS.values(), ids=ACTIONS)
def test_its_methods_say_what_the_rollout_holds(actions):
    model, rollouts = small(env=make_vec_env(lambda: World(actions), 2)), Rollouts()
    before = weights(model)
    model.learn(96, rollouts)
    assert len(rollouts.seen) == 3
    assert not torch.equal(weights(model), before)
    assert isinstance(model.policy, CustomPolicy)
    assert isinstance(model.policy.mlp_extractor, TwoTowers)


@pytest.mark.parametrize("gae_lambda", [1.0, 0.9])
def test_values_of_its_forward_make_advantages(gae_lambda):
    model = small(ConstantValue, World(ACTIONS["box"]), gamma=0.9, gae_lambda=gae_lambda)
    for constant in (2.0, -1.0):
        model.policy.constant, rollouts = constant, Rollouts()
        model.learn(16, rollouts)
        values, _, advantages, returns = rollouts.seen[0]
        expected, after = np.zeros(8), 0.0
        for step in reversed(range(8)):
            following = 0.0 if step == 7 else 0.9 * constant
            expected[step] = float(step == 7) + following - constant + 0.9 * gae_lambda * after
            after = expected[step]
        np.testing.assert_allclose(values, constant)
        np.testing.assert_allclose(advantages.flatten(), np.tile(expected, 2), atol=1e-5)
        np.testing.assert_allclose(returns.flatten(), np.tile(expected, 2) + constant, atol=1e-5)


class Guess(gym.Env):
    """Pays 1 for the action that is shown, over episodes of 20 steps."""

    observation_space, action_space = spaces.Discrete(3), spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.shown = 0, int(self.np_random.integers(3))
        return self.shown, {}

    def step(self, action):
        reward, self.steps, self.shown = float(action == self.shown), self.steps + 1, int(self.np_random.integers(3))
        return self.shown, reward, self.steps == 20, False, {}


def test_it_learns_to_act_and_to_value():
    settings = {"n_steps": 64, "n_epochs": 10, "learning_rate": 0.01, "gamma": 0.5}
    model = small(env=make_vec_env(Guess, 4, seed=0), **settings).learn(6000)
    assert evaluate_policy(model, model.get_env(), n_eval_episodes=5)[0] > 18
    values = model.policy.predict_values(torch.arange(3)).detach()
    np.testing.assert_allclose(values, 2.0, atol=0.3)  # 1 / (1 - gamma)
    np.testing.assert_allclose(model.predict_quantiles(np.arange(3))[0][0], values, atol=1e-5)


def test_files_name_the_class_and_training_goes_on(tmp_path):
    model = small().learn(32)
    model.save(tmp_path / "agent.zip")
    with pytest.raises(CheckpointError, match=r"custom_objects={'policy': CustomPolicy}"):
        DistributionalPPO.load(tmp_path / "agent.zip")
    loaded = DistributionalPPO.load(tmp_path / "agent.zip", "CartPole-v1", custom_objects={"policy": CustomPolicy})
    assert torch.equal(weights(loaded), weights(model))
    loaded.learn(32, reset_num_timesteps=False)
    assert not torch.equal(weights(loaded), weights(model))
    with pytest.raises(CheckpointError, match="is not a subclass of"):
        DistributionalPPO.load(tmp_path / "agent.zip", custom_objects={"policy": TwoTowers})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (ActorCriticPolicy, own.MlpPolicy),
        (ActorCriticCnnPolicy, own.CnnPolicy),
        (MultiInputActorCriticPolicy, own.MultiInputPolicy),
        (RecurrentActorCriticPolicy, own.MlpLstmPolicy),
    ],
)
def test_the_libraries_own_classes_mean_ours(given, expected):
    assert small(given, None, _init_setup_model=False).policy_class is expected
    assert PPO.policy_aliases["MlpPolicy"] is ActorCriticPolicy


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": OwnEvaluation}, r"evaluate_actions\(\) of its own.*get_distribution\(\) and predict_values"),
        ({"policy": OwnRecurrence}, "derive it from driftproof.nn.policies.MlpLstmPolicy"),
        ({"use_sde": True, "env": "Pendulum-v1"}, "use_sde=True needs a policy of driftproof"),
        ({"cvar_alpha": 0.5}, "cvar_alpha=0.5 needs a policy of driftproof"),
        ({"env": World(spaces.Discrete(3, start=1))}, "needs actions that start at 0"),
        ({"policy_kwargs": {"net_arhc": [8]}}, "did you mean 'net_arch'"),
        ({"policy_kwargs": {"num_quantiles": 8}}, "which is not an argument of CustomPolicy"),
        ({"value_clip_mode": "per_quantile", "clip_range_vf": 0.2}, "needs value_head='quantile'"),
    ],
)
def test_what_is_refused(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        small(**arguments)


def test_what_the_drift_kit_leaves_alone_is_off(tmp_path):
    """Networks are the user's, and so are the observations that they get; the alarm and its response need neither."""
    model = small().learn(32)
    model.save(tmp_path / "agent.zip")
    loaded = DistributionalPPO.load(tmp_path / "agent.zip", custom_objects={"policy": CustomPolicy})
    for each in (model, loaded):
        assert (each.layer_norm, each.observation_normalizer, each.drift_rewiring) == (False, False, False)
        assert (each.drift_alarm, each.drift_response, each.exploration_floor) == (True, True, 0.003)


def test_risk_needs_distributions_later_too():
    model = small()
    model.cvar_alpha = 0.5
    with pytest.raises(ValueError, match="needs a policy that predicts distributions"):
        model.learn(16)


def test_export_and_signals_need_our_networks(tmp_path):
    with pytest.raises(TypeError, match=r"CustomPolicy.*export policies of driftproof"):
        export_onnx(small(), tmp_path / "agent.onnx")
    with pytest.raises(TypeError, match=r"CustomPolicy.*signals need a policy of driftproof"):
        infer(small(), tmp_path / "market.csv")
