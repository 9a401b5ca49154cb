"""What pbt.py trains on: a world in which the right learning rate changes, and agents for it and for other worlds."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from driftproof.ppo import DistributionalPPO

EPISODE = 20
"""Steps."""


class NoisyTarget(gymnasium.Env[np.ndarray, np.ndarray]):
    """The right action is a linear map of what is seen. In the second half of the training, rewards get noisy.

    Finding the map wants a large learning rate. Once it is found, there is nothing to follow but the noise, of which
    nothing is left in the return of an episode, and a small one does better.

    Args:
        seed: Of the map.
        total_steps: Steps of one environment in a whole training; ``None``: without noise, for evaluation.
    """

    observation_space = spaces.Box(-1, 1, (6,), np.float32)
    action_space = spaces.Box(-1, 1, (3,), np.float32)
    noise = (0.3, 8.0)
    """Standard deviation, in either half, of what is added to a reward and taken from the next one."""

    def __init__(self, seed: int, total_steps: int | None = None) -> None:
        self.map = np.random.default_rng(seed).normal(size=(3, 6)) * 0.35
        self.half = None if total_steps is None else total_steps // 2
        self.now, self.left, self.extra = 0, 0, 0.0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.left = EPISODE
        return self._see(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        reward = -float(np.square(action - self.map @ self.seen).sum())
        if self.half is not None:
            if self.left % 2 == 0:
                self.extra = self.noise[self.now >= self.half] * self.np_random.normal()
            reward += self.extra if self.left % 2 == 0 else -self.extra
        self.now += 1
        self.left -= 1
        return self._see(), reward, False, self.left == 0, {}

    def _see(self) -> np.ndarray:
        self.seen = self.np_random.uniform(-1, 1, 6).astype(np.float32)
        return self.seen

    def state_dict(self) -> dict[str, Any]:
        return {"now": self.now, "left": self.left, "extra": self.extra, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.now, self.left, self.extra, self.seen = (state[name] for name in ("now", "left", "extra", "seen"))


def finder(seed: int, updates: int, member: int, **changes: Any) -> DistributionalPPO:
    """A member that looks for the target."""
    steps = 16
    env = DummyVecEnv([lambda: Monitor(NoisyTarget(seed, updates * steps))] * 32)
    settings: dict[str, Any] = {"n_steps": steps, "batch_size": 256, "n_epochs": 4, "gamma": 0.0, "drift_kit": False}
    settings |= {"policy_kwargs": {"net_arch": [32]}, "vgs_kwargs": {"warmup_steps": 20}}
    return DistributionalPPO("MlpPolicy", env, **settings, seed=1000 * seed + member, device="cpu", **changes)


def return_on_target(agent: DistributionalPPO, seed: int) -> float:
    """Mean return of fresh, deterministic episodes without noise."""
    env = NoisyTarget(seed)
    observation, _ = env.reset(seed=10_000 + seed)
    rewards = []
    for _ in range(100 * EPISODE):
        action, _ = agent.predict(observation, deterministic=True)
        observation, reward, _, _, _ = env.step(action)
        rewards.append(reward)
    return EPISODE * float(np.mean(rewards))


def normalized(env_id: str, count: int) -> VecNormalize:
    return VecNormalize(DummyVecEnv([lambda: Monitor(gymnasium.make(env_id))] * count), norm_reward=False)


def learner(env_id: str, seed: int, member: int, **changes: Any) -> DistributionalPPO:
    """A member without memory on an environment of Gymnasium, with normalised observations."""
    settings: dict[str, Any] = {"n_steps": 256, "batch_size": 256, "n_epochs": 6, "gae_lambda": 0.98}
    settings |= {"seed": 1000 * seed + member, "device": "cpu", "drift_kit": False} | changes
    return DistributionalPPO("MlpPolicy", normalized(env_id, 8), **settings)
