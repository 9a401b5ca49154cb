"""The learner alone, in a loop of your own: no Stable-Baselines3, no vector environment, no callbacks.

    python examples/own_loop.py             # ten seconds
    python examples/own_loop.py --quick     # shows that it runs, not what it learns

The environments are 16 poles on carts that NumPy moves at once. A Collector asks the policy for actions and fills a
rollout, and Learner.update() learns from it. With a recurrent policy, give Rollout the steps of a sequence.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from gymnasium import spaces

from driftproof.learner import Collector, Learner, Rollout, UpdateSettings
from driftproof.nn.policies import MlpPolicy
from driftproof.optim import AdaptiveUPGD, VarianceGradientScaler

ENVS, STEPS, LIMIT = 16, 128, 500


def step(state: np.ndarray, actions: np.ndarray) -> np.ndarray:
    """The equations of CartPole: position, speed, angle, angular speed ``[N, 4]`` a fiftieth of a second later."""
    _, speed, angle, spin = state.T
    sin, cos = np.sin(angle), np.cos(angle)
    push = (np.where(actions == 1, 10.0, -10.0) + 0.05 * spin**2 * sin) / 1.1
    turn = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
    return state + 0.02 * np.stack((speed, push - 0.05 * turn * cos / 1.1, spin, turn), 1)


def main(updates: int) -> None:
    torch.manual_seed(0)
    random = np.random.default_rng(0)
    policy = MlpPolicy(spaces.Box(-np.inf, np.inf, (4,)), spaces.Discrete(2))
    optimizer = AdaptiveUPGD(policy.parameters(), lr=1e-3)
    learner = Learner(policy, optimizer, vgs=VarianceGradientScaler(policy.named_parameters()))
    settings = UpdateSettings(batch_size=256, gamma=0.98, gae_lambda=0.9)  # the rest as in DistributionalPPO
    rollout, memory = Rollout(policy, STEPS, ENVS, chunk=1), policy.initial_state(ENVS)
    state, age, starts = random.uniform(-0.05, 0.05, (ENVS, 4)), np.zeros(ENVS), np.ones(ENVS, bool)
    for update in range(updates):
        collector, lengths = Collector(policy, rollout, memory), []
        for _ in range(STEPS):
            state, age = step(state, collector.act(state, starts)), age + 1
            fell = (np.abs(state[:, 0]) > 2.4) | (np.abs(state[:, 2]) > 0.21)
            cut_off = (age >= LIMIT) & ~fell  # by a time limit: what comes after still counts
            starts = fell | cut_off
            collector.record(np.ones(ENVS), starts, cut_off, state[cut_off])
            lengths += list(age[starts])
            state[starts], age[starts] = random.uniform(-0.05, 0.05, (starts.sum(), 4)), 0
        collector.finish(state, starts)
        memory = collector.state
        metrics = learner.update(rollout, settings)
        mean = np.mean(lengths) if lengths else float("nan")
        print(f"update {update + 1}: episodes of {mean:.0f} steps, loss {metrics['train/loss']:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two updates only")
    main(2 if parser.parse_args().quick else 15)
