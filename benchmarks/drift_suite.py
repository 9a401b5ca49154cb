"""Does an agent keep learning when its world changes?

    python benchmarks/drift_suite.py --quick                       # a few steps of everything, under a minute
    python benchmarks/drift_suite.py --workers 16                  # everything, days of one core
    python benchmarks/drift_suite.py --scenarios continual --methods sb3 kit --seeds 6
    python benchmarks/drift_suite.py --scale 0.25 --folder runs/drift-short    # tasks of a quarter of their length
    python benchmarks/drift_suite.py --report                      # tables and picture of what has been run
    python benchmarks/drift_suite.py --tuning --methods kit --set learning_rate=1e-3 --label "kit, 1e-3"

Scenarios (drift_scenarios.py) × methods (drift_methods.py) × seeds. A seed draws the tasks, for all methods alike.
Every run has a process of one thread and a JSON file in the folder, written at the end of every task and at the end. A
finished run is not run again. One that was cut off continues from its agent's last checkpoint, made every 50
iterations, in a new episode; without one (SB3, oracles, populations), it begins anew. Statistics are in
drift_statistics.py. Settings are tuned with --tuning: the first two tasks of CartPole and Acrobot with seeds from 1000,
which no result is made of.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # Before torch is loaded: processes share the cores.

import common
import drift_report
import torch
from drift_methods import METHODS
from drift_population import DriftPopulation
from drift_scenarios import GROUPS, ITERATION, SCENARIOS, Recorder, Scenario
from drift_statistics import Summary
from learning import setting
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv

from driftproof import state
from driftproof.ppo import DistributionalPPO

FOLDER = Path("runs") / "drift_suite"
TUNING_SEED = 1000
KEPT_EVERY = 50
"""Iterations between checkpoints of a run."""
ALARM = "drift/alarm"
"""Logged by the agent, above 0 in an update in which its detector fires."""

Entry = dict[str, Any]
"""What is kept of a run."""


@dataclass(frozen=True)
class Run:
    """One training: a scenario, a method under a label, and a seed."""

    scenario: str
    method: str
    label: str
    seed: int
    scale: float = 1.0
    tasks: int | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"{self.scenario}/{self.label}/{self.seed}"

    @property
    def world(self) -> Scenario:
        return SCENARIOS[self.scenario].scaled(self.scale, self.tasks)

    @property
    def settings(self) -> dict[str, Any]:
        """What two runs of one label must have in common."""
        world, method = self.world, METHODS[self.method]
        settings = {"method": self.method, "tasks": world.tasks, "iterations": world.iterations}
        settings |= {**method.arguments(self.overrides), **method.parts(self.overrides)}
        settings |= {"l2_init": method.l2_init} if method.l2_init else {}
        return json.loads(json.dumps(settings, default=str))

    def path(self, folder: Path) -> Path:
        return (
            folder
            / self.scenario
            / "".join(c if c.isalnum() or c in "-_.=" else "_" for c in self.label)
            / (f"{self.seed}.json")
        )


class Progress(BaseCallback):
    """Collects the detector's alarms, writes the run's file at the end of every task, and keeps the agent."""

    def __init__(self, run: Run, recorder: Recorder | DriftPopulation, path: Path) -> None:
        super().__init__()
        self.run, self.recorder, self.path = run, recorder, path
        self.alarms: list[int] = []
        self.has_detector = self.is_kept = False
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    @property
    def checkpoint(self) -> Path:
        return self.path.with_suffix(".zip")

    def state_dict(self) -> dict[str, Any]:
        assert isinstance(self.recorder, Recorder)
        detector = {"alarms": self.alarms, "has_detector": self.has_detector}
        return {**detector, "seconds": self.seconds, "recorder": self.recorder.records()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assert isinstance(self.recorder, Recorder)
        self.recorder.continue_from(state["recorder"])
        self.alarms, self.has_detector = list(state["alarms"]), state["has_detector"]
        self.wall, self.cpu = self.wall - state["seconds"][0], self.cpu - state["seconds"][1]

    @property
    def seconds(self) -> tuple[float, float]:
        """Time and processor time spent on the run."""
        return time.perf_counter() - self.wall, time.process_time() - self.cpu

    def follow(self, agent: DistributionalPPO) -> None:
        """Make the records part of an agent's state, and let it continue from the run's checkpoint, if there is one."""
        agent.register("progress", self)
        self.is_kept = True
        kept = json.loads(self.path.read_text()) if self.checkpoint.exists() and self.path.exists() else {}
        if kept.get("settings") == self.run.settings:
            agent.load_state_tree(state.read(self.checkpoint).tree)
        else:
            self.checkpoint.unlink(missing_ok=True)

    def _on_step(self) -> bool:
        return True

    def _on_rollout_start(self) -> None:
        self._read()
        iteration = self.recorder.steps // ITERATION
        if self.is_kept and iteration and iteration % KEPT_EVERY == 0:
            self.write(finished=False)
            self.model.save(self.checkpoint)

    def _on_rollout_end(self) -> None:
        if self.recorder.steps % self.run.world.task_steps == 0:
            self.write(finished=False)

    def _on_training_end(self) -> None:
        self._read()

    def _read(self) -> None:
        """The log of the last update, which is not written yet."""
        alarm = self.logger.name_to_value.get(ALARM)
        update = self.recorder.steps // ITERATION
        if alarm is not None and update:
            self.has_detector = True
            if alarm > 0 and (not self.alarms or self.alarms[-1] < update):
                self.alarms.append(update)

    def write(self, finished: bool) -> None:
        """Write what is known so far."""
        run, steps = self.run, self.recorder.steps
        entry = {
            **{name: value for name, value in asdict(run).items() if name in ("scenario", "method", "label", "seed")},
            "scale": run.scale,
            "machine": common.machine(),
            "settings": run.settings,
            "finished": finished,
            "steps": steps,
            "seconds": round(self.seconds[0], 2),
            "cpu_seconds": round(self.seconds[1], 2),
            "alarms": self.alarms if self.has_detector else None,
            "returns": self.recorder.returns(),
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(entry))
        os.replace(part, self.path)
        if finished:
            self.checkpoint.unlink(missing_ok=True)


def train(run: Run, folder: Path) -> None:
    """Do a run, and write its file."""
    torch.set_num_threads(1)
    world, method = run.world, METHODS[run.method]
    if method.members > 1:
        population = DriftPopulation(world, method, run.seed, run.overrides)
        progress = Progress(run, population, run.path(folder))
        population.train()
        progress.write(finished=True)
        return
    env, recorder = world.make(run.seed)
    envs = method.wrapped(DummyVecEnv([lambda: env]))
    progress = Progress(run, recorder, run.path(folder))
    # Far apart, so that no two runs share the seeds of their episodes.
    seed = 1000 * run.seed
    if method.restarts:
        for task in range(world.tasks):
            method.make(envs, seed + task, run.overrides).learn(world.task_steps, callback=progress)
    else:
        agent = method.make(envs, seed, run.overrides)
        if isinstance(agent, DistributionalPPO):
            progress.follow(agent)
        agent.learn(world.steps - agent.num_timesteps, callback=progress, reset_num_timesteps=agent.num_timesteps == 0)
    progress.write(finished=True)
    envs.close()


def load(folder: Path) -> list[Entry]:
    """All runs of a folder, also those that were cut off, of which whole tasks count."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*/*/*.json"))]


def left_to_do(runs: Sequence[Run], folder: Path) -> list[Run]:
    """Runs that are not finished. Raises if one is, with other settings: mixing them would compare nothing."""
    left = []
    for run in runs:
        path = run.path(folder)
        kept = json.loads(path.read_text()) if path.exists() else {"finished": False}
        if kept["finished"] and kept["settings"] != run.settings:
            names = kept["settings"].keys() | run.settings.keys()
            differ = sorted(name for name in names if kept["settings"].get(name) != run.settings.get(name))
            raise SystemExit(
                f"{run.key} was run with another {', '.join(differ)}. Give a --label or another --folder, or delete "
                f"{path.parent}."
            )
        if not kept["finished"]:
            left.append(run)
    return left


def run_all(runs: Sequence[Run], folder: Path, workers: int, minutes: float | None = None) -> list[str]:
    """Do what is left to do, each run in a process of its own; returns the keys of failed runs.

    Args:
        runs: What there shall be.
        folder: Where results are kept.
        workers: Processes at a time.
        minutes: Stop everything after so long; runs that are cut off keep their whole tasks, and continue next time.
    """
    todo = left_to_do(runs, folder)
    if len(todo) < len(runs):
        common.console.print(f"{len(runs) - len(todo)} of {len(runs)} runs are finished already: {folder}")
    context = multiprocessing.get_context("spawn")
    start, waiting, failed, done = time.perf_counter(), list(todo), [], 0
    active: dict[int, tuple[Any, Run]] = {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        while waiting or active:
            while waiting and len(active) < workers:
                run = waiting.pop(0)
                process = context.Process(target=train, args=(run, folder), daemon=True)
                process.start()
                active[process.sentinel] = process, run
            left = None if minutes is None else minutes * 60 - (time.perf_counter() - start)
            ended = multiprocessing.connection.wait(list(active), left if left is None else max(left, 0))
            if not ended:
                common.console.print(f"{minutes:g} minutes are over: {len(active) + len(waiting)} runs are left")
                break
            for sentinel in ended:
                process, run = active.pop(sentinel)
                process.join()
                done += 1
                if process.exitcode:
                    failed.append(run.key)
                    common.console.print(f"[{done}/{len(todo)}] {run.key}: failed", markup=False)
                    continue
                entry = json.loads(run.path(folder).read_text())
                spent = (time.perf_counter() - start) / 60
                common.console.print(
                    f"[{done}/{len(todo)}] {run.key}: {brief(entry)}, {spent:.1f} minutes so far", markup=False
                )
    finally:
        for process, _ in active.values():
            process.terminate()
    return failed


def brief(entry: Entry) -> str:
    """Returns by task, and speed."""
    tasks, iterations = entry["settings"]["tasks"], entry["settings"]["iterations"]
    means = []
    for task in range(tasks):
        known = [r for r in entry["returns"]["published"][task * iterations : (task + 1) * iterations] if r is not None]
        means.append(f"{sum(known) / len(known):.4g}" if known else "-")
    return f"{' '.join(means)}, {entry['steps'] / entry['seconds']:.0f} steps/s"


def plan(
    scenarios: Sequence[str],
    methods: Sequence[str],
    seeds: Sequence[int],
    scale: float = 1.0,
    tasks: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    label: str | None = None,
) -> list[Run]:
    """All runs, seed by seed, so that an interrupted campaign has something of everything.

    Scenarios and methods that lack a package or a setting are told of and left out.
    """
    for name, lacking in [(name, SCENARIOS[name].missing) for name in scenarios] + [
        (name, METHODS[name].missing) for name in methods
    ]:
        if lacking:
            common.console.print(f"{name} is left out: {lacking} is missing", markup=False)
    runs = []
    for seed in seeds:
        for scenario in scenarios:
            for method in methods:
                if SCENARIOS[scenario].missing or METHODS[method].missing:
                    continue
                own = dict(overrides or {}) if METHODS[method].ours else {}
                text = ", ".join(f"{key}={value}" for key, value in own.items())
                name = label or (f"{method}, {text}" if own else method)
                runs.append(Run(scenario, method, name, seed, scale, tasks, own))
    return runs


def chosen(names: Sequence[str]) -> list[str]:
    """Scenarios by name or by group."""
    made = [s for name in names for s in SCENARIOS if name in (s, SCENARIOS[s].group, "all")]
    return list(dict.fromkeys(made))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few steps of everything; writes no result")
    parser.add_argument(
        "--report",
        action="store_true",
        help="run nothing; tables and picture of the folder, to benchmarks/results, which keeps its other runs",
    )
    parser.add_argument(
        "--tuning", action="store_true", help="the first two tasks of CartPole and Acrobot, seeds from 1000"
    )
    parser.add_argument(
        "--scenarios",
        nargs="+",
        choices=["all", *GROUPS, *SCENARIOS],
        default=["all"],
        metavar="NAME",
        help=f"by name or group ({', '.join(GROUPS)}): {', '.join(SCENARIOS)}",
    )
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME", help=", ".join(METHODS)
    )
    parser.add_argument("--seeds", type=int, default=5, help="how many")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="length of tasks, relative to the scenario's")
    parser.add_argument("--tasks", type=int, help="only the first tasks")
    parser.add_argument(
        "--set",
        nargs="+",
        action="extend",
        type=setting,
        default=[],
        dest="overrides",
        metavar="NAME=VALUE",
        help="arguments of driftproof's constructor, as Python literals",
    )
    parser.add_argument("--label", help="name in the results; with one of --methods only")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--minutes", type=float, help="stop after so long; finished tasks count")
    parser.add_argument("--folder", type=Path, help=f"of the runs' files; by default {FOLDER}")
    given = parser.parse_args(arguments)
    if given.label and len(given.methods) != 1:
        parser.error("--label names one method: choose it with --methods")
    if given.tuning:
        given.scenarios, given.tasks = ["continual-cartpole", "continual-acrobot"], 2
        given.first_seed = given.first_seed or TUNING_SEED
    given.folder = given.folder or (FOLDER.with_name("drift_tuning") if given.tuning else FOLDER)
    return given


def quick(folder: Path) -> None:
    """Two short tasks of a scenario of every group, and of every method in CartPole, all in this process."""
    shutil.rmtree(folder, ignore_errors=True)
    shortest: dict[str, Any] = {"seeds": [0], "scale": 0.0, "tasks": 2}
    of_groups = [next(name for name in SCENARIOS if SCENARIOS[name].group == group) for group in GROUPS]
    single = [name for name, method in METHODS.items() if method.members == 1]
    shared = [name for name, method in METHODS.items() if method.members > 1]
    runs = [*plan(of_groups, ["kit"], **shortest), *plan(["continual-cartpole"], single, **shortest)]
    # Members make a few decisions in every task.
    for run in [*runs, *plan(["continual-cartpole"], shared, **{**shortest, "scale": 0.04})]:
        if not run.path(folder).exists():
            train(run, folder)
            common.console.print(f"{run.key}: {brief(json.loads(run.path(folder).read_text()))}", markup=False)


def write_report(folder: Path, target: Path, tasks: int | None = None) -> None:
    """Tables, numbers and picture.

    Args:
        folder: Of the runs.
        target: Folder to write to. Runs that its drift_suite.json has already, and the folder has not, are kept.
        tasks: Only the first tasks count, so that runs that were cut off can be compared.
    """
    sections, groups = drift_report.report(entries := load(folder), tasks, kept_in(target, entries))
    if not groups:
        raise SystemExit(f"no results in {folder}")
    drift_report.write_json(target / "drift_suite.json", groups)
    drift_report.plot(groups, target / "drift_suite.png")
    note = (
        ". Interquartile means over seeds and their 95% bootstrap intervals; sums and groups draw seeds within every "
        f"scenario.\n\n{drift_report.statistics.__doc__}"
    )
    common.write_result("drift_suite", "python benchmarks/drift_suite.py", sections, note, target)


def kept_in(target: Path, entries: Sequence[Entry]) -> list[Summary]:
    """Runs of earlier campaigns in a folder of results, without those that were run again.

    Raises if a label stands for other settings now: mixing them would compare nothing.
    """
    settings = {entry["label"]: entry["settings"] for entry in entries}
    again = {(entry["scenario"], entry["label"], entry["seed"]) for entry in entries}
    kept = [run for run in drift_report.read_json(target / "drift_suite.json") if run.key not in again]
    for run in kept:
        now = settings.get(run.label, run.settings)
        differ = sorted(name for name, value in run.settings.items() if now.get(name, value) != value)
        if differ:
            raise SystemExit(f"{run.label} had another {', '.join(differ)} in {target}: give new runs a --label")
    return kept


def main() -> None:
    arguments = parse()
    if arguments.quick:
        folder = FOLDER.with_name("drift-quick")
        quick(folder)
        write_report(folder, folder)
        return
    failed = []
    if not arguments.report:
        seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
        overrides = dict(arguments.overrides)
        scenarios = chosen(arguments.scenarios)
        runs = plan(scenarios, arguments.methods, seeds, arguments.scale, arguments.tasks, overrides, arguments.label)
        failed = run_all(runs, arguments.folder, arguments.workers, arguments.minutes)
    is_result = arguments.report and not arguments.tuning
    write_report(arguments.folder, common.RESULTS if is_result else arguments.folder, arguments.tasks)
    if failed:
        raise SystemExit(f"{len(failed)} runs failed: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
