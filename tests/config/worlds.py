"""An environment, a features extractor and an optimizer of one's own, which configurations name."""

from __future__ import annotations

import gymnasium
import torch
from gymnasium.envs.classic_control import CartPoleEnv
from stable_baselines3.common.torch_layers import FlattenExtractor


class Extractor(FlattenExtractor):
    pass


class Optimizer(torch.optim.Adam):
    pass


class Strange(CartPoleEnv):
    """CartPole by another name, with an argument."""

    def __init__(self, force: float = 10.0) -> None:
        super().__init__()
        self.force_mag = force


if "Strange-v0" not in gymnasium.registry:
    gymnasium.register("Strange-v0", Strange, max_episode_steps=50)
