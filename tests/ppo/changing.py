"""A world that changes: which action is rewarded in which place."""

from __future__ import annotations

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv

from driftproof.ppo import DistributionalPPO

from .scripted import small_networks

STEPS, ENVS, LENGTH = 32, 16, 9


class Rooms(gymnasium.Env):
    """Episodes of nine steps, of which rollouts are no multiple, or of other lengths.

    The reward is 1 for the action that belongs to the sign of the observation, or else 0.

    Args:
        worlds: From the first step of a world to what it is: ``"right"``, ``"wrong"`` (the other action is rewarded),
            ``"poor"`` (nothing is), or one with rewards of another size.
        length: Steps of an episode.
    """

    def __init__(self, worlds, length=LENGTH):
        self.observation_space = spaces.Box(-3, 3, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.worlds, self.length, self.clock = worlds, length, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.age = 0
        return self._see(), {}

    def step(self, action):
        world = self.worlds[max(first for first in self.worlds if first <= self.clock)]
        belongs = action == (self.place > 0) if world != "wrong" else action != (self.place > 0)
        reward = float(belongs) * {"poor": 0, "meagre": 0.2, "lean": 0.7, "rich": 3}.get(world, 1)
        self.clock += 1
        self.age += 1
        return self._see(), reward, self.age == self.length, False, {}

    def _see(self):
        self.place = float(self.np_random.choice([-1, 1]))
        return np.array([self.place, self.np_random.normal() / 4], np.float32)

    def state_dict(self):
        return {"clock": self.clock, "age": self.age, "place": self.place}

    def load_state_dict(self, state):
        self.clock, self.age, self.place = state["clock"], state["age"], state["place"]


def rooms(worlds):
    """A VecEnv; ``worlds`` counts updates."""
    by_step = {update * STEPS: world for update, world in worlds.items()}
    return DummyVecEnv([lambda: Rooms(by_step)] * ENVS)


def agent_in(worlds, seed=3, policy="MlpPolicy", env=None, **settings):
    """A small agent, quick to learn."""
    return DistributionalPPO(
        policy,
        rooms(worlds) if env is None else env,
        **{
            "n_steps": STEPS,
            "batch_size": 128,
            "n_epochs": 2,
            "learning_rate": 3e-3,
            "gamma": 0.9,
            "policy_kwargs": small_networks(policy, width=16, quantiles=8),
            "seed": seed,
            "device": "cpu",
            "drift_kit": False,
            "drift_alarm": True,
            **settings,
        },
    )


class Metrics(BaseCallback):
    """Keeps the metrics of every update, but for the last."""

    def __init__(self):
        super().__init__()
        self.updates = []

    def _on_rollout_start(self):
        if "drift/alarm" in self.logger.name_to_value:
            self.updates.append(dict(self.logger.name_to_value))
            self.logger.name_to_value.clear()

    def _on_step(self):
        return True

    def column(self, name):
        return [numbers.get(name) for numbers in self.updates]

    def alarms(self):
        """Numbers of the updates with an alarm."""
        return [i for i, raised in enumerate(self.column("drift/alarm")) if raised]


def learned(agent, updates, steps=STEPS * ENVS):
    """Train, and return the metrics of every update."""
    metrics = Metrics()
    agent.learn((updates + 1) * steps, metrics, log_interval=None, reset_num_timesteps=False)
    return metrics


def spoiled(agent, update):
    """Let an update invert what the policy prefers, as training that fails may do."""
    optimize, updates = agent.learner._optimize, iter(range(10**6))

    def spoil(*arguments):
        steps = optimize(*arguments)
        if next(updates) == update:
            with torch.no_grad():
                for parameter in agent.policy.action_net.parameters():
                    parameter.neg_()
        return steps

    agent.learner._optimize = spoil
    return agent
