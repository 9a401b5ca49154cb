"""Populations for tests, which processes of their own can make too."""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from pathlib import Path

from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from driftproof.pbt import HyperparamConfig, PBTConfig, PBTRunner, ProcessBackend
from driftproof.ppo import DistributionalPPO
from driftproof.state import read
from tests.ppo.resuming import walk
from tests.ppo.scripted import small_networks


def make_agent(member, env=walk, policy="MlpLstmPolicy"):
    envs = VecNormalize(DummyVecEnv([env] * 2), norm_reward=False)
    settings = {"n_steps": 16, "batch_size": 16, "n_epochs": 1, "seed": 10 + member, "device": "cpu"}
    kwargs = {"policy_kwargs": small_networks(policy), "vgs_kwargs": {"warmup_steps": 2}}
    return DistributionalPPO(policy, envs, **kwargs, **settings)


def config(**changes):
    hyperparams = [
        HyperparamConfig("learning_rate", 1e-5, 1e-1, is_log_scale=True),
        HyperparamConfig("optimizer.sigma", 1e-4, 1e-2, is_log_scale=True),
    ]
    return PBTConfig(**{"population_size": 3, "perturbation_interval": 2, "hyperparams": hyperparams, **changes})


def states(runner):
    """Whole trees of all members, as they last reported, but for what the clock says."""
    trees = [read(runner.path_of(member)).tree for member in range(runner.config.population_size)]
    for tree in trees:
        tree["rollout"]["episodes"].pop("t", None)
        for group in tree["optimizer"]["param_groups"]:
            group.pop("differentiable", None)
    return trees


class Broken:
    """Makes agents of which some fail: whenever the folder has a file of the member's name.

    A name that ends in ``once`` is removed by the one who stumbles over it.
    """

    def __init__(self, folder):
        self.folder = Path(folder)

    def __call__(self, member):
        return make_agent(member, partial(self.walk, member))

    def walk(self, member):
        env = walk()
        step = env.unwrapped.step

        def failing(action):
            if (self.folder / f"{member}.once").exists():
                (self.folder / f"{member}.once").unlink()
                raise ValueError(f"the world of {member} broke once")
            if (self.folder / str(member)).exists():
                raise ValueError(f"the world of {member} is broken")
            return step(action)

        env.unwrapped.step = failing
        return env


class NoteUpdates(BaseCallback):
    """Logs how many rollouts it has seen."""

    def __init__(self):
        super().__init__()
        self.rollouts = 0

    def _on_step(self):
        return True

    def _on_rollout_end(self):
        self.rollouts += 1
        self.logger.record("noted/rollouts", self.rollouts)


def slow_zero(member):
    """Makes agents of which the first is slow."""

    def waiting():
        env = walk()
        step = env.unwrapped.step

        def slow(action):
            time.sleep(0.02)
            return step(action)

        env.unwrapped.step = slow
        return env

    return make_agent(member, waiting if member == 0 else walk)


def main(folder, updates, backend):
    """Begin a run, or go on with it, in this process."""
    where = ProcessBackend(2) if backend == "process" else backend
    if (Path(folder) / "population_state.json").exists():
        runner = PBTRunner.resume(folder, make_agent, backend=where)
    else:
        runner = PBTRunner(config(), make_agent, int(updates), folder, seed=3, backend=where, synchronous=True)
    runner.run()


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main(*sys.argv[1:])
