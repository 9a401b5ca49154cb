"""Trainings that are interrupted, or not: what test_resume.py runs, each in a process of its own."""

from __future__ import annotations

import os

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecFrameStack, VecNormalize

from driftproof.envs import Cyclic, Dynamics, LastStep, ObservationNoise, ObservationScale, RandomWalk, Sudden, drifting
from driftproof.ppo import DistributionalPPO, SaveCheckpoints
from driftproof.state import CheckpointStore, write

from .scripted import small_networks

STEPS, ENVS, UPDATES = 16, 2, 6
HALF = STEPS * ENVS * UPDATES // 2


class Walk(gymnasium.Env):
    """A random walk that can be saved and goes on: episodes of random length, rewards for being near zero."""

    def __init__(self):
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = spaces.Discrete(3)
        self.position, self.left = 0.0, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position, self.left = self.np_random.normal(), int(self.np_random.integers(5, 40))
        return self._see(), {}

    def step(self, action):
        self.position += 0.3 * (action - 1) + 0.1 * self.np_random.normal()
        self.left -= 1
        return self._see(), -abs(self.position), self.left <= 0, False, {}

    def _see(self):
        return np.array([self.position, self.left / 10], np.float32)

    def state_dict(self):
        return {"position": self.position, "left": self.left}

    def load_state_dict(self, state):
        self.position, self.left = state["position"], state["left"]


class ContinuousWalk(Walk):
    """One that is pushed by a number."""

    def __init__(self):
        super().__init__()
        self.action_space = spaces.Box(-1, 1, (1,), np.float32)

    def step(self, action):
        return super().step(1 + float(action[0]))


def walk():
    return Monitor(gymnasium.wrappers.TimeLimit(Walk(), 30))


def continuous_walk():
    return Monitor(gymnasium.wrappers.TimeLimit(ContinuousWalk(), 30))


DRIFT = [
    ObservationScale(RandomWalk(0.5, 2.0, 0.1)),
    ObservationNoise(Cyclic(0.0, 0.1, period=20)),
    ObservationNoise(Sudden(every=2, values=[0.0, 0.2, 0.4], order="random", unit="episodes")),
]
"""Everything that has something to remember."""


def drifting_walk():
    return Monitor(drifting(gymnasium.wrappers.TimeLimit(Walk(), 30), DRIFT))


def drifting_cart_pole():
    return drifting("CartPole-v1", [*DRIFT, Dynamics(Sudden(every=10, low=0.5, high=2.0), "length")])


def remembering_walk():
    return LastStep(walk())


def remembering_cart_pole():
    return LastStep(gymnasium.make("CartPole-v1"))


def make_env(scenario):
    drift, kind = scenario.get("drift"), SubprocVecEnv if scenario.get("subproc") else DummyVecEnv
    if drift in ("sync", "async"):
        return gymnasium.make_vec("CartPole-v1", ENVS, drift, wrappers=[lambda env: drifting(env, DRIFT)])
    if scenario.get("continues"):
        own = continuous_walk if scenario.get("continuous") else walk
        own = remembering_walk if scenario.get("remembers") else own
        env = kind([drifting_walk if drift else own] * ENVS)
    else:
        known = "Pendulum-v1" if scenario.get("continuous") else "CartPole-v1"
        known = remembering_cart_pole if scenario.get("remembers") else known
        env = make_vec_env(drifting_cart_pole if drift else known, ENVS, vec_env_cls=kind)
    if scenario.get("normalize"):
        env = VecNormalize(env, norm_reward=False)
    if scenario.get("stack"):
        env = VecFrameStack(env, 3)
    return env


def make_agent(scenario):
    policy = scenario.get("policy", "MlpLstmPolicy")
    return DistributionalPPO(
        policy,
        make_env(scenario),
        n_steps=STEPS,
        batch_size=16,
        n_epochs=2,
        learning_rate=1e-3,
        policy_kwargs=small_networks(policy, {"lasting_memory": True} if scenario.get("remembers") else None),
        seed=3,
        device="cpu",
        vgs_kwargs={"warmup_steps": 5, **scenario.get("vgs", {})},
        **scenario.get("settings", {}),
    )


def checkpoints(scenario, folder):
    return SaveCheckpoints(
        folder / "checkpoints",
        every=scenario.get("every", UPDATES // 2),
        restart_environments=not scenario.get("continues"),
        background=False,
        keep_last=None,
    )


class Dies(BaseCallback):
    """Ends the process as a kill would, at a step in the middle of a rollout."""

    def __init__(self, at):
        super().__init__()
        self.at = at

    def _on_step(self):
        if self.num_timesteps >= self.at:
            os._exit(17)
        return True


def tell(agent, path):
    """Everything about the agent, and what it would do next."""
    observation = np.linspace(-1, 1, int(np.prod(agent.observation_space.shape)), dtype=np.float32)
    actions = [agent.predict(observation)[0] for _ in range(5)]
    write(path, {**agent.state_tree(), "actions": np.array(actions)}, config=agent.config())


def whole(scenario, folder):
    """Train without interruption."""
    torch.set_num_threads(1)
    agent = make_agent(scenario)
    agent.learn(2 * HALF, checkpoints(scenario, folder))
    tell(agent, folder / "whole.zip")


def first(scenario, folder, death):
    """Begin to train, and die."""
    torch.set_num_threads(1)
    make_agent(scenario).learn(2 * HALF, [checkpoints(scenario, folder), Dies(death)])


def rest(scenario, folder, death=None):
    """Go on from the last checkpoint, to the end or until death."""
    torch.set_num_threads(1)
    latest = CheckpointStore(folder / "checkpoints").latest()
    agent = DistributionalPPO.load(latest, make_env(scenario), device="cpu")
    agent.resume([checkpoints(scenario, folder), *([] if death is None else [Dies(death)])])
    tell(agent, folder / "resumed.zip")
