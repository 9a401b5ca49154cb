"""The agent learns: what is to be remembered, what is continuous, and, slowly, the tasks that everyone knows."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import DummyVecEnv

from driftproof.ppo import DistributionalPPO


class Cue(gymnasium.Env):
    """One of two cues is shown at the first step only; the action at the last must name it."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    steps = 4

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.cue, self.time = int(self.np_random.integers(2)), 0
        return np.array([2 * self.cue - 1, 1], np.float32), {}

    def step(self, action):
        self.time += 1
        over = self.time == self.steps
        return np.zeros(2, np.float32), float(over and action == self.cue), over, False, {}


class Target(gymnasium.Env):
    """The action should be the number seen, with a time limit instead of an end."""

    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Box(-2, 2, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time, self.number = 0, self.np_random.uniform(-1, 1, 1).astype(np.float32)
        return self.number, {}

    def step(self, action):
        reward = -abs(float(action[0] - self.number[0]))
        self.time, self.number = self.time + 1, self.np_random.uniform(-1, 1, 1).astype(np.float32)
        return self.number, reward, False, self.time == 20, {}


class HiddenVelocities(gymnasium.ObservationWrapper):
    def __init__(self, env):
        super().__init__(env)
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def observation(self, observation):
        return observation[[0, 2]]


def mean_return(model, env, episodes=100):
    mean, _ = evaluate_policy(model, env, n_eval_episodes=episodes, deterministic=True, warn=False)
    return mean


def linear(start):
    return lambda progress: start * progress


QUICK = {"n_steps": 64, "batch_size": 128, "n_epochs": 6, "learning_rate": 3e-3, "seed": 0}
SMALL = {"policy_kwargs": {"lstm_hidden_size": 32, "net_arch": [32]}}


@pytest.mark.parametrize("policy", ["MlpLstmPolicy", "MlpGruPolicy"])
def test_a_cue_is_remembered(policy):
    env = DummyVecEnv([Cue] * 8)
    model = DistributionalPPO(policy, env, **QUICK, **SMALL).learn(10_240)
    assert mean_return(model, env) >= 0.99


def test_without_memory_a_cue_is_guessed():
    env = DummyVecEnv([Cue] * 8)
    model = DistributionalPPO("MlpPolicy", env, **QUICK).learn(10_240)
    assert mean_return(model, env) < 0.75


@pytest.mark.parametrize("squash_output", [False, True])
def test_a_number_is_followed(squash_output):
    env = DummyVecEnv([Target] * 8)
    kwargs = {"policy_kwargs": {**SMALL["policy_kwargs"], "squash_output": squash_output}}
    model = DistributionalPPO("MlpLstmPolicy", env, gamma=0.5, **QUICK, **kwargs).learn(15_360)
    # Saying zero gets -10.
    assert mean_return(model, env, 20) > -3


@pytest.mark.parametrize("policy", ["MlpPolicy", "MlpLstmPolicy"])
def test_a_number_is_followed_with_gsde(policy):
    env = DummyVecEnv([Target] * 8)
    networks = {"log_std_init": -1.0, **({} if policy == "MlpPolicy" else SMALL["policy_kwargs"])}
    settings = {"use_sde": True, "sde_sample_freq": 4, "policy_kwargs": networks}
    model = DistributionalPPO(policy, env, gamma=0.5, **QUICK, **settings).learn(15_360)
    assert mean_return(model, env, 20) > -3


CARTPOLE = {"n_steps": 128, "batch_size": 256, "n_epochs": 10, "learning_rate": linear(5e-4)}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(5))
def test_cartpole(seed):
    env = make_vec_env("CartPole-v1", 8, seed=1000 * seed)
    model = DistributionalPPO("MlpLstmPolicy", env, **CARTPOLE, seed=1000 * seed).learn(100_000)
    assert mean_return(model, env) >= 475


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_cartpole_without_velocities():
    env = make_vec_env("CartPole-v1", 8, seed=0, wrapper_class=HiddenVelocities)
    model = DistributionalPPO("MlpLstmPolicy", env, **CARTPOLE, seed=0).learn(200_000)
    assert mean_return(model, env) >= 450


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_pendulum():
    settings = {"n_steps": 1024, "batch_size": 256, "n_epochs": 10, "gamma": 0.9, "learning_rate": linear(1e-3)}
    env = make_vec_env("Pendulum-v1", 4, seed=0)
    model = DistributionalPPO("MlpLstmPolicy", env, **settings, seed=0).learn(200_000)
    assert mean_return(model, env) >= -250
