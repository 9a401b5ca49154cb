"""A population in a drifting world, for drift_suite.py: members share the steps that a single agent would have.

Each member has a world of its own with the same tasks, in which everything happens as many times sooner as there are
members. A member is judged by its returns in the last quarter of a task; weak ones take over the whole state of strong
ones, with another learning rate.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from drift_methods import Method
from drift_scenarios import Recorder, Scenario
from stable_baselines3.common.vec_env import DummyVecEnv

from driftproof.pbt import HyperparamConfig, PBTConfig, PBTRunner
from driftproof.ppo import DistributionalPPO

DECISIONS = 4
"""In each task."""
RANGE = 2.0
"""Learning rates are at most so many times larger or smaller than a single agent's."""


class DriftPopulation:
    """A population, and the recorder of its returns: iterations of the members take turns.

    Args:
        scenario: The world of a single agent.
        method: The members' settings, and how many there are.
        seed: Seed of the tasks.
        overrides: Settings of the agents instead of the method's own.
    """

    def __init__(self, scenario: Scenario, method: Method, seed: int, overrides: Mapping[str, Any]) -> None:
        if scenario.iterations % (method.members * DECISIONS):
            raise SystemExit(
                f"{method.members} members that share {scenario.iterations} iterations a task: make it a multiple of "
                f"{method.members * DECISIONS}, with --scale"
            )
        self.method, self.seed, self.overrides = method, seed, overrides
        self.world = replace(scenario, iterations=scenario.iterations // method.members)
        self.interval = self.world.iterations // DECISIONS
        self.worlds = [self.world.make(seed) for _ in range(method.members)]
        self._recorders: dict[int, Recorder] = {}
        """By the agent's id."""

    @property
    def steps(self) -> int:
        """Steps of all members."""
        return sum(recorder.steps for _, recorder in self.worlds)

    def returns(self) -> dict[str, list[Any]]:
        """As :meth:`Recorder.returns`."""
        each = [recorder.returns() for _, recorder in self.worlds]
        return {name: list(chain.from_iterable(zip(*(r[name] for r in each), strict=True))) for name in each[0]}

    def train(self) -> None:
        """Train through all tasks."""
        members, rate = self.method.members, self.method.arguments(self.overrides)["learning_rate"]
        config = PBTConfig(
            population_size=members,
            perturbation_interval=self.interval,
            hyperparams=[HyperparamConfig("learning_rate", rate / RANGE, rate * RANGE, is_log_scale=True)],
            truncation_ratio=1 / members,
        )
        updates = self.world.tasks * self.world.iterations
        with tempfile.TemporaryDirectory() as folder:
            PBTRunner(config, self._make, updates, folder, self.seed, self._performance, synchronous=True).run()

    def _make(self, member: int) -> DistributionalPPO:
        env, recorder = self.worlds[member]
        agent = self.method.make(DummyVecEnv([lambda: env]), 1000 * self.seed + member, self.overrides)
        assert isinstance(agent, DistributionalPPO)
        self._recorders[id(agent)] = recorder
        return agent

    def _performance(self, agent: DistributionalPPO) -> float:
        """Mean return of the iterations since the last decision."""
        last = self._recorders[id(agent)].returns()["published"][-self.interval :]
        known = [value for value in last if value is not None]
        return sum(known) / len(known) if known else float("nan")
