"""Environments that show what is done to them."""

from __future__ import annotations

import gymnasium
import numpy as np
from gymnasium import spaces


class Echo(gymnasium.Env):
    """Observes 1, 2, 3, ..., in any space; remembers the last action; rewards 1. Episodes have three steps."""

    def __init__(self, observation_space=None, action_space=None):
        self.observation_space = observation_space or spaces.Box(0, 10, (4,), np.float32)
        self.action_space = action_space or spaces.Discrete(4)
        self.action, self.age = None, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.age = 0
        return self._observe(), {}

    def step(self, action):
        self.action = action
        self.age += 1
        return self._observe(), 1.0, False, self.age == 3, {}

    def _observe(self):
        if isinstance(self.observation_space, spaces.Dict):
            return {key: _counted(space) for key, space in self.observation_space.items()}
        return _counted(self.observation_space)


class Counter(Echo):
    """Tells where it is."""

    def state_dict(self):
        return {"age": self.age}

    def load_state_dict(self, state):
        self.age = state["age"]


def _counted(space):
    if isinstance(space, spaces.Discrete):
        return 1
    return np.arange(1, 1 + np.prod(space.shape)).reshape(space.shape).astype(space.dtype)


def play(env, steps, action=None):
    """Observations, rewards and drifts of so many steps, through the ends of episodes."""
    observation, info = env.reset(seed=0)
    seen = [(observation, 0.0, info["drift"])]
    for _ in range(steps):
        observation, reward, terminated, truncated, info = env.step(
            env.action_space.sample() if action is None else action
        )
        seen.append((observation, reward, info["drift"]))
        if terminated or truncated:
            env.reset()
    return seen
