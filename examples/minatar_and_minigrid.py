"""Registers MinAtar's and MiniGrid's environments with observations that the agents can read.

pip install minatar minigrid
cd examples
driftproof train --env minatar_and_minigrid:MinAtar/Breakout-v1
driftproof train --env minatar_and_minigrid:Vector/MiniGrid-DoorKey-5x5-v0

MinAtar has to be asked to register its ids. MiniGrid's observations hold a text; ``Vector/MiniGrid-…`` has only the
visible part of the grid: 7 × 7 cells, each with its object, its colour and the state of a door, as zeros and ones.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box

KINDS = 11, 6, 3  # objects, colours, states of a door


class GridVector(gym.ObservationWrapper):
    """The visible part of the grid as one-hot vectors of each cell's three values."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        height, width, _ = env.observation_space["image"].shape
        self.observation_space = Box(0.0, 1.0, (height * width * sum(KINDS),), np.float32)

    def observation(self, observation: dict[str, Any]) -> np.ndarray:
        image = observation["image"]
        parts = [np.eye(kinds, dtype=np.float32)[image[..., i]] for i, kinds in enumerate(KINDS)]
        return np.concatenate(parts, -1).ravel()


def make(name: str, **kwargs: Any) -> gym.Env:
    return GridVector(gym.make(name, **kwargs))


def register() -> None:
    import minatar.gym
    import minigrid  # noqa: F401  # registers its ids

    if "MinAtar/Breakout-v1" not in gym.registry:
        minatar.gym.register_envs()
    for name in [name for name in gym.registry if name.startswith("MiniGrid-")]:
        if f"Vector/{name}" not in gym.registry:
            gym.register(f"Vector/{name}", partial(make, name))


register()

if __name__ == "__main__":
    for family in ("MinAtar/", "Vector/MiniGrid-"):
        print(f"{sum(name.startswith(family) for name in gym.registry)} environments {family}*")
