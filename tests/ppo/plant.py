"""A world with dynamics that a model can learn, in which sensors, actions, rewards or the dynamics change."""

from __future__ import annotations

import gymnasium
import numpy as np
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv

from driftproof.ppo import DistributionalPPO

from .scripted import small_networks

STEPS, ENVS, LENGTH = 128, 4, 16
UPDATE = STEPS * ENVS
CHANGE = 24
"""Update at which the world changes."""
BACK = 48
"""Update at which it is again as it was, if it is a world that does so."""


class Plant(gymnasium.Env):
    """Three numbers, of which each drives the next, and the action the first. The reward is for its sign.

    Args:
        change: What is changed from the step ``CHANGE * STEPS`` on: ``"sensors"``, ``"actions"``, ``"rewards"``, which
            become small, ``"ease"``, where other dynamics reward whatever is done until ``BACK``, or nothing.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = spaces.Discrete(3)
    order, signs, actions = np.array([0, 2, 1]), np.array([-1.0, 1.0, -1.0]), np.array([2, 0, 1])

    def __init__(self, change=None):
        self.change, self.clock = change, 0

    @property
    def is_changed(self):
        return self.clock >= CHANGE * STEPS and not (self.change == "ease" and self.clock >= BACK * STEPS)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.age, self.x = 0, self.np_random.normal([0.0, 0.5, -1.0], 0.3)
        return self._see(), {}

    def step(self, action):
        action = self.actions[action] if self.change == "actions" and self.is_changed else action
        first, second, third = self.x
        reward = float(action == 1 + np.sign(first) * (abs(first) > 0.3))
        means = [0.3 * first - 0.9 * (action - 1), 0.6 * second + 0.7 * first, 0.7 * third - 0.6 * second]
        if self.change == "rewards" and self.is_changed:
            reward *= 0.1
        if self.change == "ease" and self.is_changed:
            reward, means = 1.0, [-0.3 * first, 0.6 * second - 0.7 * first, 0.7 * third]
        self.x = self.np_random.normal(means, [0.5, 0.3, 0.2])
        self.clock += 1
        self.age += 1
        return self._see(), reward, self.age == LENGTH, False, {}

    def _see(self):
        is_rewired = self.change == "sensors" and self.is_changed
        return (self.x[self.order] * self.signs if is_rewired else self.x).astype(np.float32)

    def state_dict(self):
        return {"clock": self.clock, "age": self.age, "x": self.x.copy()}

    def load_state_dict(self, state):
        self.clock, self.age, self.x = state["clock"], state["age"], np.array(state["x"])


def plants(change):
    return DummyVecEnv([lambda: Plant(change)] * ENVS)


def agent_in(change, policy="MlpPolicy", seed=0, **settings):
    return DistributionalPPO(
        policy,
        plants(change),
        **{
            "n_steps": STEPS,
            "batch_size": 128,
            "n_epochs": 4,
            "learning_rate": 5e-3,
            "gamma": 0.5,
            "policy_kwargs": small_networks(policy, width=16, quantiles=8, units=16),
            "seed": seed,
            "device": "cpu",
            "drift_kit": True,
            **settings,
        },
    )
