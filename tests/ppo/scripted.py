"""Environments whose every step can be recognised, and ways to look at an agent while it learns."""

from __future__ import annotations

import math
from itertools import cycle
from typing import ClassVar

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from stable_baselines3.common.vec_env import DummyVecEnv

from driftproof.learner.step import OptimizerStep
from driftproof.ppo import DistributionalPPO
from tests.helpers import weights as weights


def small_networks(policy, changes=None, units=6, width=5, quantiles=4):
    """``policy_kwargs`` of networks that take no time, with these changes."""
    changes = changes or {}
    networks = {"net_arch": [width]}
    name = getattr(policy, "__name__", policy)
    if changes.get("core", "none" if name in ("MlpPolicy", "CnnPolicy", "MultiInputPolicy") else "lstm") != "none":
        networks["lstm_hidden_size"] = units
    if changes.get("value_head", "quantile") == "quantile":
        networks["num_quantiles"] = quantiles
    return networks | changes


class Scripted(gymnasium.Env):
    """Episodes of given lengths, in which observations and rewards tell the step and the environment.

    The first number of an observation is ``(step * 10 + index) / 1000``, where steps count over all episodes; the
    second is the age of the episode in tenths. The reward is ``step * 10 + index`` unless there is a function for it.

    Args:
        index: Which environment this is.
        lengths: Of its episodes, over and over again.
        truncated: Whether they end by a time limit.
        reward: From step, index and action to the reward.
        action_space: Two actions, if not given.
    """

    def __init__(self, index, lengths, truncated=False, reward=None, action_space=None):
        self.observation_space = spaces.Box(-10, 10, (3,), np.float32)
        self.action_space = action_space or spaces.Discrete(2)
        self.index, self.truncated, self.reward = index, truncated, reward
        self._lengths = cycle(lengths)
        self.clock = 0

    def reset(self, *, seed=None, options=None):
        self.age, self.length = 0, next(self._lengths)
        return self._observation(), {}

    def step(self, action):
        step = self.clock
        reward = step * 10 + self.index if self.reward is None else self.reward(step, self.index, action)
        self.clock += 1
        self.age += 1
        ended = self.age == self.length
        return self._observation(), float(reward), ended and not self.truncated, ended and self.truncated, {}

    def _observation(self):
        number = self.clock * 10 + self.index
        return np.array([number / 1000, self.age / 10, math.sin(1.7 * number)], np.float32)


def scripted(*lengths, **arguments):
    """A VecEnv of one scripted environment for each list of lengths."""
    return DummyVecEnv([lambda i=i, own=own: Scripted(i, own, **arguments) for i, own in enumerate(lengths)])


class Lottery(VectorEnv):
    """Episodes of one step, whose reward is drawn from one distribution.

    Args:
        num_envs: How many at a time.
        draw: From a generator and a count to rewards.
        seed: Of the generator.
    """

    metadata: ClassVar = {"autoreset_mode": AutoresetMode.DISABLED}

    def __init__(self, num_envs, draw, seed=0):
        self.num_envs = num_envs
        self.single_observation_space = spaces.Box(-1, 1, (1,), np.float32)
        self.single_action_space = spaces.Discrete(2)
        self._observations = np.ones((num_envs, 1), np.float32)
        self._draw, self._generator = draw, np.random.default_rng(seed)

    def reset(self, *, seed=None, options=None):
        return self._observations, {}

    def step(self, actions):
        rewards = self._draw(self._generator, self.num_envs)
        ended = np.ones(self.num_envs, bool)
        return self._observations, rewards, ended, ~ended, {}


def identities(observations):
    """``step * 10 + index`` from observations ``[..., 3]``."""
    return (observations[..., 0] * 1000).round().long()


def agent(env, policy="MlpPolicy", **arguments):
    """A small agent whose log-probabilities depend on what it sees, and what it remembers, more than they usually do.

    With plain Adam, and without variance gradient scaling and the drift kit, unless asked for.
    """
    kwargs = {
        "n_steps": 8,
        "n_epochs": 1,
        "optimizer_class": "adam",
        "variance_gradient_scaling": False,
        "drift_kit": False,
        "seed": 0,
        "device": "cpu",
        **arguments,
    }
    kwargs["policy_kwargs"] = small_networks(policy, kwargs.get("policy_kwargs"))
    kwargs.setdefault("batch_size", kwargs["n_steps"] * env.num_envs)
    model = DistributionalPPO(policy, env, **kwargs)
    with torch.no_grad():
        model.policy.action_head.weight.mul_(100)
    return model


def learn(model, updates=1, *, before=None, after=None, **arguments):
    """Learn from so many rollouts; what was logged of each update.

    Args:
        model: The agent.
        updates: How many.
        before: Called with the agent after each rollout, before its update.
        after: Called after each update.
        arguments: Of ``learn()``.
    """
    log, train = [], type(model).train

    def watched_train():
        if before is not None:
            before(model)
        train(model)
        log.append(dict(model.logger.name_to_value))
        if after is not None:
            after(model)

    model.train = watched_train
    try:
        model.learn(updates * model.n_steps * model.n_envs, **arguments)
    finally:
        del model.train
    return log


class StepSpy:
    """Sees every minibatch before its optimizer step, and the numbers of the step after it.

    Attributes:
        batches: All minibatches.
        facts: For each, the numbers by name.
    """

    def __init__(self, monkeypatch, before=None, after=None):
        self.batches, self.facts = [], []
        take_step = OptimizerStep.__call__

        def step(this, batch, coefficients):
            self.batches.append(batch)
            if before is not None:
                batch = before(this, batch, coefficients) or batch
            numbers = take_step(this, batch, coefficients)
            self.facts.append(dict(zip(numbers.names, numbers.values.tolist(), strict=True)))
            if after is not None:
                after(this, batch, coefficients)
            return numbers

        monkeypatch.setattr(OptimizerStep, "__call__", step)


def plain_gae(rewards, values, last_value, ends, end_values, gamma, gae_lambda):
    """Advantages of one environment, from its last step to its first."""
    advantages, running, next_value = [], 0.0, last_value
    for t in reversed(range(len(rewards))):
        if ends[t]:
            running, next_value = 0.0, end_values[t]
        running = rewards[t] + gamma * next_value - values[t] + gamma * gae_lambda * running
        advantages.append(running)
        next_value = values[t]
    return advantages[::-1]
