"""Environments that can be held up from outside."""

from __future__ import annotations

import time
from pathlib import Path

import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv


class Held(CartPoleEnv):
    """Stands still while there is a file ``hold`` in its folder, and leaves a file ``held`` there.

    If the file holds a number, it stands still after that many steps only.
    """

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = Path(folder)
        self.steps = 0

    def step(self, action):
        self.steps += 1
        hold = self.folder / "hold"
        if hold.exists() and self.steps > int(hold.read_text() or 0):
            (self.folder / "held").touch()
            while hold.exists():
                time.sleep(0.01)
        return super().step(action)


class Broken(CartPoleEnv):
    """Breaks after some steps."""

    steps = 0

    def step(self, action):
        self.steps += 1
        if self.steps > 20:
            raise ValueError("the pole has burst")
        return super().step(action)


class Fixed(CartPoleEnv):
    """Always begins alike, and ends after four steps."""

    steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=0)
        self.steps = 0
        return super().reset(seed=0)

    def step(self, action):
        self.steps += 1
        seen, reward, ended, _, info = super().step(action)
        return seen, reward, ended, self.steps == 4, info


class ThreeActions(CartPoleEnv):
    """Has an action that CartPole has not."""

    def __init__(self) -> None:
        super().__init__()
        self.action_space = gymnasium.spaces.Discrete(3)


for _name, _kind in (("Held-v0", Held), ("Broken-v0", Broken), ("ThreeActions-v0", ThreeActions)):
    if _name not in gymnasium.registry:
        gymnasium.register(_name, _kind, max_episode_steps=50)
gymnasium.register("Fixed-v0", Fixed)
