"""Tensor environments as a VecEnv: ordinary agents train in them, and resume exactly."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecNormalize

from driftproof.envs import tensor
from driftproof.ppo import DistributionalPPO, TensorVecEnv

MARKET = {"episode_length": 20, "features": {"window": 8, "horizons": [1, 4]}}
SETTINGS = {"n_steps": 16, "batch_size": 32, "n_epochs": 1, "seed": 3, "policy_kwargs": {"lstm_hidden_size": 8}}


def market(num_envs=4):
    return tensor.make("driftproof/RegimeMarket-v0", num_envs, **MARKET)


def agent(env, **settings):
    return DistributionalPPO("MlpLstmPolicy", env, **{**SETTINGS, **settings})


def assert_equal_weights(one, other):
    for ours, theirs in zip(one.policy.parameters(), other.policy.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_infos_are_those_that_stable_baselines_expects():
    env = TensorVecEnv(tensor.make("CartPole-v1", 3, max_episode_steps=12))
    assert env.env_is_wrapped(Monitor) == [True] * 3
    env.seed(5)
    first = env.reset()
    np.testing.assert_array_equal(first, tensor.make("CartPole-v1", 3).reset(5).numpy())
    ends = 0
    for step in range(36):
        observation, rewards, dones, infos = env.step(np.full(3, step % 2))
        assert rewards.dtype == np.float32
        for i in np.flatnonzero(dones):
            ends += 1
            info = infos[i]
            assert info["episode"]["r"] == info["episode"]["l"] <= 12
            assert info["TimeLimit.truncated"] == (np.abs(info["terminal_observation"][2]) < 0.2094)
            assert np.abs(observation[i]).max() < 0.05
    assert ends >= 9
    assert env.get_attr("episode_lengths", 1)[0].item() == env.env.episode_lengths[1].item()
    assert not env.has_attr("nothing")


def test_agents_take_tensor_environments_as_they_are():
    model = agent(tensor.make("CartPole-v1", 4)).learn(256)
    assert len(model.ep_info_buffer) > 3
    assert isinstance(model.get_env(), TensorVecEnv)
    same = agent(TensorVecEnv(tensor.make("CartPole-v1", 4))).learn(256)
    assert_equal_weights(model, same)


@pytest.mark.parametrize("is_normalized", [False, True])
def test_resume_equals_uninterrupted(tmp_path, is_normalized):
    def world():
        return VecNormalize(TensorVecEnv(market()), norm_reward=False) if is_normalized else market()

    whole = agent(world()).learn(3 * 64).learn(3 * 64, reset_num_timesteps=False)
    agent(world()).learn(3 * 64).save(tmp_path / "agent.zip")
    resumed = DistributionalPPO.load(tmp_path / "agent.zip", env=world(), force_reset=False)
    assert_equal_weights(whole, resumed.learn(3 * 64, reset_num_timesteps=False))


def test_states_of_other_environments_are_not_taken(tmp_path):
    others = make_vec_env("driftproof/RegimeMarket-v0", 4, env_kwargs=MARKET)
    for here, there in ((market(), others), (others, market())):
        agent(here).learn(64).save(tmp_path / "agent.zip")
        with pytest.warns(UserWarning, match="cannot restore the saved state"):
            loaded = DistributionalPPO.load(tmp_path / "agent.zip", env=there)
        loaded.learn(64, reset_num_timesteps=False)
        assert loaded.num_timesteps == 128
