"""Agents of markets that are quick to make, and say something else of every bar."""

import functools

import gymnasium
import numpy as np
import torch
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from driftproof.envs import Bars, FeatureConfig, regime_bars
from driftproof.ppo import DistributionalPPO

from ..ppo.scripted import small_networks

FEATURES = FeatureConfig(window=8, horizons=(1, 4))


@functools.cache
def agent(policy="MlpLstmPolicy", actions="continuous", position=False, normalised=False, networks=()):
    """One that has learned for a moment in a market, whose actions have been made decisive.

    Args:
        policy: Its policy.
        actions: ``"continuous"`` or ``"discrete"``.
        position: Whether it observes its position.
        normalised: Whether its observations are normalised.
        networks: Items of ``policy_kwargs``.
    """
    options = {"actions": actions, "observe_position": position, "features": FEATURES, "episode_length": 64}
    env = DummyVecEnv([lambda: gymnasium.make("driftproof/RegimeMarket-v0", **options)])
    if normalised:
        env = VecNormalize(env, norm_reward=False, clip_obs=2.0)
    networks = small_networks(policy, dict(networks), units=8, width=8)
    model = DistributionalPPO(
        policy, env, n_steps=64, batch_size=32, n_epochs=1, seed=0, device="cpu", policy_kwargs=networks
    )
    model.learn(128)
    with torch.no_grad():
        model.policy.action_head.weight.mul_(100)
    return model


def market(rows=120, seed=0, symbol="REGIME"):
    return regime_bars(rows, seed=seed, symbol=symbol)


def first(bars, rows):
    """The first bars."""
    return Bars(bars.timestamps[:rows], *(prices[:rows] for prices in bars.prices), symbol=bars.symbol)


def numbers(signals):
    return np.stack([signals.score, signals.p10, signals.p50, signals.p90, signals.cvar], 1)
