"""The tasks of learning.py: environments, thresholds, and settings that all algorithms share.

Settings begin with those that the RL zoo tuned for Stable-Baselines3's PPO. What differs: no state-dependent
exploration (not every algorithm has it), and minibatches of 128 to 256 steps, without which recurrent policies take
hours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
from stable_baselines3.common.envs import IdentityEnvBox, IdentityEnvMultiBinary

from driftproof.envs.memory import HideVelocities, MemoryCue, RepeatPrevious

ALGORITHMS = ("SB3 PPO", "RecurrentPPO", "driftproof", "driftproof, no memory", "driftproof, GRU")


def cartpole() -> gym.Env:
    return gym.make("CartPole-v1")


def masked_cartpole() -> gym.Env:
    return HideVelocities(gym.make("CartPole-v1"))


def pendulum() -> gym.Env:
    return gym.make("Pendulum-v1")


def memory() -> gym.Env:
    return MemoryCue()


def copy() -> gym.Env:
    return RepeatPrevious()


def identity_bits() -> gym.Env:
    return IdentityEnvMultiBinary(4)


def identity_box() -> gym.Env:
    return IdentityEnvBox(eps=0.5)


def lunarlander() -> gym.Env:
    return gym.make("LunarLander-v3")


@dataclass(frozen=True)
class Task:
    title: str
    make: Callable[[], gym.Env]
    steps: int
    threshold: float
    """Mean return of the final evaluation from which on the task counts as learned."""
    n_envs: int
    settings: Mapping[str, Any]
    """Constructor arguments, the same for all algorithms."""
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By algorithm: constructor arguments that go before ``settings``."""
    algorithms: Sequence[str] = ALGORITHMS[:4]
    """Who runs by default."""
    episodes: int = 100
    """Of the final evaluation."""
    normalize: bool = False
    """Whether ``VecNormalize`` scales observations and rewards."""


CARTPOLE = {
    "learning_rate": "linear 5e-4",
    "n_steps": 128,
    "batch_size": 256,
    "n_epochs": 10,
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "clip_range": 0.2,
    "ent_coef": 0.0,
}
"""SB3's own; the zoo's rollouts of 32 steps and 20 epochs are slow with a memory."""

TASKS = {
    "cartpole": Task("CartPole", cartpole, steps=100_000, threshold=475, n_envs=8, settings=CARTPOLE),
    "cartpole-masked": Task(
        "CartPole without velocities", masked_cartpole, steps=200_000, threshold=450, n_envs=8, settings=CARTPOLE
    ),
    "pendulum": Task(
        "Pendulum",
        pendulum,
        steps=200_000,
        threshold=-250,
        n_envs=4,
        settings={
            "learning_rate": "linear 1e-3",
            "n_steps": 1024,
            "batch_size": 256,
            "n_epochs": 10,
            "gamma": 0.9,
            "gae_lambda": 0.95,
            "clip_range": 0.2,
            "ent_coef": 0.0,
        },
    ),
    "memory": Task(
        "Memory: name one of 4 cues, 8 steps after it was shown",
        memory,
        steps=200_000,
        threshold=0.95,
        n_envs=8,
        settings={
            "learning_rate": 1e-3,
            "n_steps": 128,
            "batch_size": 256,
            "n_epochs": 10,
            "gamma": 0.99,
            "gae_lambda": 0.95,
            "clip_range": 0.2,
            "ent_coef": 0.01,
        },
    ),
    "lunarlander": Task(
        "LunarLander",
        lunarlander,
        steps=200_000,
        threshold=200,
        n_envs=8,
        settings={
            "learning_rate": 3e-4,
            "n_steps": 512,
            "batch_size": 128,
            "n_epochs": 10,
            "gamma": 0.999,
            "gae_lambda": 0.98,
            "clip_range": 0.2,
            "ent_coef": 0.01,
        },
    ),
    "short-masked": Task(
        "Short: CartPole without velocities, 50,000 steps, settings of sb3-contrib's own test",
        masked_cartpole,
        steps=50_000,
        threshold=450,
        n_envs=8,
        settings={
            "learning_rate": 7e-4,
            "n_steps": 128,
            "batch_size": 256,
            "n_epochs": 10,
            "gae_lambda": 0.98,
            "max_grad_norm": 1,
            "policy_kwargs": {
                "net_arch": {"vf": [64], "pi": []},
                "lstm_hidden_size": 64,
                "ortho_init": False,
                "enable_critic_lstm": True,
            },
        },
        algorithms=("RecurrentPPO", "driftproof"),
        episodes=20,
        normalize=True,
    ),
    "short-copy": Task(
        "Short: name the symbol of four steps ago",
        copy,
        steps=82_000,
        threshold=0.75,
        n_envs=8,
        settings={"learning_rate": 1e-3, "n_steps": 128, "batch_size": 256, "n_epochs": 10, "ent_coef": 0.01},
        algorithms=("RecurrentPPO", "driftproof", "driftproof, GRU"),
    ),
    "short-bits": Task(
        "Short: repeat four bits, 1,200 steps, settings of Stable-Baselines3's own test",
        identity_bits,
        steps=1_200,
        threshold=90,
        n_envs=1,
        settings={"gamma": 0.4, "learning_rate": 0.002, "n_epochs": 4, "n_steps": 256},
        algorithms=("SB3 PPO", "driftproof, no memory"),
        episodes=20,
    ),
    "short-box": Task(
        "Short: repeat a number, 1,000 steps, settings of Stable-Baselines3's own test",
        identity_box,
        steps=1_000,
        threshold=90,
        n_envs=1,
        settings={"learning_rate": 1e-3, "n_epochs": 4, "n_steps": 256},
        algorithms=("SB3 PPO", "driftproof, no memory"),
        episodes=20,
    ),
}
