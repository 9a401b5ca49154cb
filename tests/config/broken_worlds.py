"""Environments of one's own, each with another mistake."""

from __future__ import annotations

import gymnasium
import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv


class Unlicensed(CartPoleEnv):
    def __init__(self) -> None:
        raise RuntimeError("no licence found")


class NoReset(CartPoleEnv):
    def reset(self, *, seed=None, options=None):
        raise ZeroDivisionError("there is no floor")


class NoStep(CartPoleEnv):
    def step(self, action):
        raise KeyError("sensor")


class OtherShape(CartPoleEnv):
    def reset(self, *, seed=None, options=None):
        return np.zeros(3, np.float32), {}


class Texts(CartPoleEnv):
    def __init__(self) -> None:
        super().__init__()
        self.observation_space = gymnasium.spaces.Text(5)


class Spaceless(gymnasium.Env):
    pass


for _kind in (Unlicensed, NoReset, NoStep, OtherShape, Texts, Spaceless):
    if f"{_kind.__name__}-v0" not in gymnasium.registry:
        gymnasium.register(f"{_kind.__name__}-v0", _kind)
