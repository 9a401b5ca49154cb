"""Trains a population in this process, one member after the other, and goes on with it after an interruption."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from driftproof._arguments import check_count
from driftproof.pbt.config import HyperparamConfig, PBTConfig, check_against
from driftproof.pbt.member import MakeAgent, Metric, Trainee, mean_reward
from driftproof.pbt.records import write_events
from driftproof.pbt.scheduler import PBTScheduler
from driftproof.pbt.stores import FolderStore
from driftproof.ppo import DistributionalPPO
from driftproof.ppo.persistence import unchanged_generators
from driftproof.state import read, write, write_atomically

_STATE = "population_state.json"
_VERSION = 1


class PBTRunner:
    """A population, its folder, and its training.

    Every member has its own environments, random generators and counters; those of this process are left alone. After
    each slice of ``config.perturbation_interval`` updates a member is saved whole, and the decision about it is taken.
    A run that is interrupted, even killed, goes on with :meth:`resume` exactly as it would have.

    Args:
        config: What is searched, and how. ``checkpoint_dir``: where parameters to take over lie, ``parameters`` in the
            run's folder if not given.
        make_agent: From a member's id to its agent. Called once for each; with different seeds, they differ.
        total_updates: Of each member's training.
        run_dir: Folder of the run; must not hold another.
        seed: Of decisions.
        metric: How well an agent does; by default the mean return of recent episodes.
    """

    def __init__(
        self,
        config: PBTConfig,
        make_agent: MakeAgent,
        total_updates: int,
        run_dir: str | os.PathLike[str],
        seed: int = 0,
        metric: Metric = mean_reward,
    ) -> None:
        check_count("total_updates", total_updates, at_least=1)
        check_count("seed", seed)
        self.run_dir = Path(run_dir)
        if (self.run_dir / _STATE).exists():
            raise FileExistsError(
                f"{self.run_dir} holds a population already: choose another folder, or go on with it, "
                "PBTRunner.resume(run_dir, make_agent)"
            )
        self.total_updates, self.seed = total_updates, seed
        self.trainees, self._generators = self._make_trainees(config.population_size, make_agent, metric)
        agent = self.trainees[0].agent
        steps = config.perturbation_interval * _steps_per_update(agent)
        self.config = check_against(config, agent.hyperparams, steps_per_interval=steps)
        self.scheduler = self._make_scheduler()
        self._files: dict[int, str] = {}
        for trainee, hyperparams in zip(self.trainees, self.scheduler.initial_hyperparams(), strict=True):
            trainee.set_hyperparams(hyperparams)

    @classmethod
    def resume(cls, run_dir: str | os.PathLike[str], make_agent: MakeAgent, metric: Metric = mean_reward) -> PBTRunner:
        """A run as it was when it last saved.

        Args:
            run_dir: Its folder.
            make_agent: As it was given then.
            metric: As it was given then.
        """
        folder = Path(run_dir)
        state = json.loads((folder / _STATE).read_bytes())
        if state["version"] > _VERSION:
            raise ValueError(f"{folder} was written by a newer driftproof: its version is {state['version']}")
        runner = cls.__new__(cls)
        runner.run_dir, runner.total_updates, runner.seed = folder, state["total_updates"], state["seed"]
        runner.config = _config_from(state["config"])
        size = runner.config.population_size
        runner.trainees, runner._generators = runner._make_trainees(size, make_agent, metric)
        runner.scheduler = runner._make_scheduler()
        runner.scheduler.load_state_dict(state["scheduler"])
        runner._files = {int(member): name for member, name in state["files"].items()}
        for member, trainee in enumerate(runner.trainees):
            trainee.set_hyperparams(runner.scheduler.members[member].hyperparams)
            if member in runner._files:
                with runner._as_member(member):
                    trainee.agent.load_state_tree(read(folder / "members" / runner._files[member]).tree)
        return runner

    def run(self, rounds: int | None = None) -> DistributionalPPO:
        """Train all members to their end, or for some rounds; the best of them.

        Args:
            rounds: Slices of every member; ``None``: all that are left.
        """
        while any(not trainee.is_done for trainee in self.trainees):
            if rounds is not None:
                if rounds == 0:
                    break
                rounds -= 1
            for member in self._order():
                self._advance(member)
        return self.best

    @property
    def best(self) -> DistributionalPPO:
        """The agent of the best member, by its last report."""
        ranking = self.scheduler.ranking()
        return self.trainees[ranking[0] if ranking else 0].agent

    def _order(self) -> list[int]:
        """Who is to train in this round: first those who are behind, as after an interruption."""
        updates = [trainee.updates for trainee in self.trainees]
        return [member for member, done in enumerate(updates) if done == min(updates)]

    def _advance(self, member: int) -> None:
        """One slice, what follows from it, and all of it saved."""
        trainee = self.trainees[member]
        with self._as_member(member):
            performance = trainee.train(self.config.perturbation_interval)
            parameters = trainee.agent.get_parameters()
            self.scheduler.update_performance(member, performance, trainee.updates, parameters)
            taken, hyperparams, tree_format = self.scheduler.exploit_and_explore(member)
            if taken is not None and tree_format is not None:
                strategy = self.config.optimizer_exploit_strategy
                trainee.inherit(taken, tree_format, hyperparams, strategy)
                self.scheduler.report_transfer(member, ok=True)
            else:
                trainee.set_hyperparams(hyperparams)
        self._save(member)

    def _save(self, member: int) -> None:
        """First the member's file under a new name, then the state that names it, then what nobody names any more."""
        trainee = self.trainees[member]
        with self._as_member(member):
            tree, config, exact = trainee.agent.current_states(), trainee.agent.config(), trainee.agent.edge.is_whole
        before, name = self._files.get(member), f"member_{member:04d}_{trainee.updates:09d}.zip"
        write(self.run_dir / "members" / name, tree, config=config, exact=exact)
        self._files[member] = name
        state = {
            "version": _VERSION,
            "seed": self.seed,
            "total_updates": self.total_updates,
            "config": dataclasses.asdict(self.config),
            "scheduler": self.scheduler.state_dict(),
            "files": self._files,
        }
        write_atomically(self.run_dir / _STATE, [json.dumps(state, default=os.fspath).encode()])
        # After the state that it follows from: a run that is resumed writes the same again.
        write_events(self.run_dir / "population.json", self.scheduler.events)
        if before is not None and before != name:
            (self.run_dir / "members" / before).unlink(missing_ok=True)

    def _make_trainees(
        self, count: int, make_agent: MakeAgent, metric: Metric
    ) -> tuple[list[Trainee], list[dict[str, Any]]]:
        """The members, and the state of the random generators that each goes on with."""
        trainees, generators = [], []
        with unchanged_generators():
            for member in range(count):
                agent = make_agent(member)
                trainees.append(Trainee(agent, self.total_updates, metric))
                generators.append(agent.components()["random"].state_dict())
        return trainees, generators

    def _make_scheduler(self) -> PBTScheduler:
        store = FolderStore(self.config.checkpoint_dir or self.run_dir / "parameters")
        return PBTScheduler(self.config, self.seed, store=store)

    @contextmanager
    def _as_member(self, member: int) -> Iterator[None]:
        """With a member's random generators, which nobody else draws from."""
        component = self.trainees[member].agent.components()["random"]
        with unchanged_generators():
            component.load_state_dict(self._generators[member])
            try:
                yield
            finally:
                self._generators[member] = component.state_dict()


def _steps_per_update(agent: DistributionalPPO) -> int:
    """Optimizer steps."""
    return int(agent.n_epochs) * agent.n_steps * agent.n_envs // agent.batch_size


def _config_from(values: dict[str, Any]) -> PBTConfig:
    hyperparams = [HyperparamConfig(**item) for item in values["hyperparams"]]
    return PBTConfig(**{**values, "hyperparams": hyperparams})
