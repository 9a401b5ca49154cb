"""One toy of every kind that can be registered, each as small as its kind allows."""

from dataclasses import dataclass

import torch
from torch import nn

from driftproof.adversarial.methods import Attack
from driftproof.envs.changes import RewardChange
from driftproof.envs.schedules import Schedule
from driftproof.nn.cores import Core
from driftproof.nn.heads import QuantileHead
from driftproof.pbt import ExploreMethod


class SignDescent(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, damping=1.0):
        super().__init__(params, {"lr": lr, "damping": damping})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter -= group["lr"] * group["damping"] * parameter.grad.sign()


class MedianHead(QuantileHead):
    """Expects the median in place of the mean."""

    def __init__(self, features, width=5):
        super().__init__(features, width)

    def mean(self, prediction):
        return prediction.median(-1).values


class LeakyCore(Core):
    """Remembers a leaky average of a projection of what it saw."""

    parts = 1

    def __init__(self, features, units, layers, leak=0.5):
        super().__init__(features, units, layers)
        self.project, self.leak = nn.Linear(features, units), leak

    def step(self, inputs, state):
        hidden = self.leak * state[0][-1] + (1 - self.leak) * torch.tanh(self.project(inputs))
        return hidden, (hidden.expand(self.layers, -1, -1),)


class Halve(ExploreMethod):
    """Half of everything, within its range."""

    def explore(self, hyperparams, history, rng):
        searched = {item.name: item for item in self.config.hyperparams}
        return {
            name: max(value / 2, searched[name].bounds[0]) if name in searched else value
            for name, value in hyperparams.items()
        }


class Straight(Attack):
    """One step of the whole radius against every feature but the first."""

    def plan(self, radius, starts_anywhere):
        return 1, radius

    def direction(self, gradient, rank, step):
        kept = torch.ones_like(gradient)
        kept[..., 0] = 0
        return gradient * kept


@dataclass(frozen=True)
class RewardOffset(RewardChange):
    """Something is added to rewards."""

    sign: float = 1.0

    def reward(self, reward, value):
        return reward + self.sign * value


@dataclass(frozen=True)
class Staircase(Schedule):
    """One more after every ``every`` steps, up to ``top``."""

    every: int = 10
    top: int = 3

    @property
    def bounds(self):
        return 0.0, float(self.top)

    def phase(self, time):
        return min(time // self.every, self.top)

    def value(self, time, level):
        return float(self.phase(time))
