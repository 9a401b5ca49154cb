"""Who learns what, how well, and how fast?

    python benchmarks/learning.py --quick                              # all tasks, a few steps, about two minutes
    python benchmarks/learning.py                                      # everything, hours on two cores
    python benchmarks/learning.py --tasks memory --algorithms driftproof --set 'optimizer_class="adam"' --seeds 3
    python benchmarks/learning.py --report                             # table and picture of what has been run

Stable-Baselines3's PPO, sb3-contrib's RecurrentPPO and driftproof with and without memory, with the same settings
(learning_tasks.py). After training, the deterministic policy plays 100 episodes in fresh environments, the same for
all. A finished run is kept in learning.json at once and not run again, so a campaign can be interrupted; seeds count
from 0, and more of them can be added later. Averages are interquartile means over seeds.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
from learning_tasks import ALGORITHMS, TASKS, Task
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecNormalize, sync_envs_normalization

from driftproof.ppo import Linear

POINTS = 100
"""Of a stored learning curve."""
WINDOW = 100
"""Episodes averaged for a point of the curve."""
EVALUATION_SEED = 1_000_000

Entry = dict[str, Any]
"""What is kept of a finished run."""


def sb3_ppo(**arguments: Any) -> BaseAlgorithm:
    from stable_baselines3 import PPO

    return PPO("MlpPolicy", **arguments)


def recurrent_ppo(**arguments: Any) -> BaseAlgorithm:
    from sb3_contrib import RecurrentPPO

    return RecurrentPPO("MlpLstmPolicy", **arguments)


def driftproof(**arguments: Any) -> BaseAlgorithm:
    from driftproof.ppo import DistributionalPPO

    return DistributionalPPO("MlpLstmPolicy", **arguments)


def driftproof_no_memory(**arguments: Any) -> BaseAlgorithm:
    from driftproof.ppo import DistributionalPPO

    return DistributionalPPO("MlpPolicy", **arguments)


def driftproof_gru(**arguments: Any) -> BaseAlgorithm:
    from driftproof.ppo import DistributionalPPO

    return DistributionalPPO("MlpGruPolicy", **arguments)


MAKERS = dict(zip(ALGORITHMS, (sb3_ppo, recurrent_ppo, driftproof, driftproof_no_memory, driftproof_gru), strict=True))
NETWORKS: dict[str, dict[str, Any]] = {"RecurrentPPO": {"policy_kwargs": {"lstm_hidden_size": 128}}}
"""As many units as driftproof has by default; RecurrentPPO's own 256 take several times longer on a CPU."""


@dataclass(frozen=True)
class Run:
    """One training: a task, an algorithm under a name, and a seed."""

    task: str
    algorithm: str
    label: str
    seed: int
    steps: int
    episodes: int
    n_envs: int
    arguments: Mapping[str, Any]

    @property
    def key(self) -> str:
        return f"{self.task}/{self.label}/{self.seed}"

    @property
    def settings(self) -> dict[str, Any]:
        """What two runs of one label must have in common."""
        shared = {"algorithm": self.algorithm, "steps": self.steps, "episodes": self.episodes, "n_envs": self.n_envs}
        return shared | dict(self.arguments)


def merge(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Later layers win; in ``policy_kwargs``, name by name."""
    merged: dict[str, Any] = {}
    for layer in layers:
        policy_kwargs = {**merged.get("policy_kwargs", {}), **layer.get("policy_kwargs", {})}
        merged |= layer
        if policy_kwargs:
            merged["policy_kwargs"] = policy_kwargs
    return merged


def plan(
    tasks: Mapping[str, Task],
    algorithms: Sequence[str] | None,
    seeds: int,
    steps: int | None = None,
    changes: Mapping[str, Any] | None = None,
    label: str | None = None,
) -> list[Run]:
    """All runs, seed by seed, so that an interrupted campaign has something of everything.

    Args:
        tasks: By name.
        algorithms: Each task's own choice if None.
        seeds: How many.
        steps: Instead of the task's.
        changes: Arguments of driftproof's constructor.
        label: Name of the only algorithm; by default its name and the changes.
    """
    runs = []
    for seed in range(seeds):
        for name, task in tasks.items():
            for algorithm in algorithms or task.algorithms:
                own = (changes or {}) if algorithm.startswith("driftproof") else {}
                text = ", ".join(f"{key}={value!r}" for key, value in own.items())
                runs.append(
                    Run(
                        task=name,
                        algorithm=algorithm,
                        label=label or (f"{algorithm}, {text}" if own else algorithm),
                        seed=seed,
                        steps=steps or task.steps,
                        episodes=task.episodes,
                        n_envs=task.n_envs,
                        arguments=merge(
                            NETWORKS.get(algorithm, {}), task.settings, task.overrides.get(algorithm, {}), own
                        ),
                    )
                )
    return runs


class Episodes(BaseCallback):
    """Collects returns of training episodes, and says five times how far a run is."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        self.steps: list[int] = []
        self.returns: list[float] = []
        self.next_line = run.steps / 5

    def _on_step(self) -> bool:
        for info in self.locals["infos"]:
            if "episode" in info:
                self.steps.append(self.num_timesteps)
                self.returns.append(info["episode"]["r"])
        if self.num_timesteps >= self.next_line:
            self.next_line += self.run.steps / 5
            mean = np.mean(self.returns[-WINDOW:]) if self.returns else np.nan
            print(f"  {self.run.key}: {self.num_timesteps:,} steps, return {mean:.4g}", flush=True)
        return True


def curve(steps: Sequence[int], returns: Sequence[float], total: int) -> list[float | None]:
    """At ``POINTS`` even steps up to ``total``, the mean of the last ``WINDOW`` episodes; None before the first one."""
    ends = np.searchsorted(steps, np.linspace(total / POINTS, total, POINTS), side="right")
    return [float(f"{np.mean(returns[max(0, end - WINDOW) : end]):.5g}") if end else None for end in ends]


def area_under(points: Sequence[float | None]) -> float:
    """The mean of a learning curve; before the first episode has ended, it is that of the first."""
    known = [point for point in points if point is not None]
    return float(np.mean([known[0]] * (len(points) - len(known)) + known)) if known else float("nan")


def make_envs(task: Task, count: int, is_evaluation: bool = False) -> VecEnv:
    envs = DummyVecEnv([lambda: Monitor(task.make())] * count)
    if not task.normalize:
        return envs
    return VecNormalize(envs, training=not is_evaluation, norm_reward=not is_evaluation)


def with_schedules(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """``"linear 1e-3"`` as a schedule."""
    return {
        name: Linear(float(value.removeprefix("linear "))) if str(value).startswith("linear ") else value
        for name, value in arguments.items()
    }


def train(run: Run, callbacks: Sequence[BaseCallback] = ()) -> Entry:
    """Train, evaluate, and return what is kept."""
    torch.set_num_threads(1)
    task = TASKS[run.task]
    envs = make_envs(task, run.n_envs)
    # Environment i of a run is seeded with seed + i: far apart, so that no two runs share one.
    model = MAKERS[run.algorithm](
        env=envs, seed=1000 * run.seed, device="cpu", verbose=0, **with_schedules(run.arguments)
    )
    episodes = Episodes(run)
    start = time.perf_counter()
    model.learn(run.steps, callback=[episodes, *callbacks])
    seconds = time.perf_counter() - start
    fresh = make_envs(task, min(10, run.episodes), is_evaluation=True)
    sync_envs_normalization(envs, fresh)
    envs.close()
    fresh.seed(EVALUATION_SEED)
    finals, _ = evaluate_policy(model, fresh, run.episodes, deterministic=True, return_episode_rewards=True)
    fresh.close()
    return {
        "task": run.task,
        "label": run.label,
        "seed": run.seed,
        "settings": run.settings,
        "final": float(np.mean(finals)),
        "steps_per_second": round(model.num_timesteps / seconds, 1),
        "curve": curve(episodes.steps, episodes.returns, run.steps),
        **alarms(model),
    }


def alarms(model: BaseAlgorithm) -> dict[str, int]:
    """Drift alarms, all of them false in these tasks, weights that were taken back, and updates."""
    learner = getattr(model, "learner", None)
    if getattr(learner, "drift_alarm", None) is None:
        return {}
    response = learner.drift_response
    return {
        "alarms": learner.drift_alarm.alarms,
        "recovered": 0 if response is None else response.recoveries,
        "updates": model.num_timesteps // (model.n_steps * model.n_envs),
    }


def load(path: Path) -> dict[str, Entry]:
    return json.loads(path.read_text()) if path.exists() else {}


def save(path: Path, results: Mapping[str, Entry]) -> None:
    """One run a line; the file is whole at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{json.dumps(key)}: {json.dumps(results[key])}" for key in sorted(results)]
    part = path.with_suffix(".part")
    part.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    os.replace(part, path)


def left_to_do(runs: Sequence[Run], results: Mapping[str, Entry]) -> list[Run]:
    """Runs that are not finished. Raises if one is, with other settings: mixing them would compare nothing."""
    for run in runs:
        if run.key in results and (kept := results[run.key]["settings"]) != (asked := as_json(run.settings)):
            differ = sorted(name for name in kept.keys() | asked.keys() if kept.get(name) != asked.get(name))
            raise SystemExit(
                f"{run.key} was run with another {', '.join(differ)}. "
                "Give a --label, another --folder, or --fresh to run it again."
            )
    return [run for run in runs if run.key not in results]


def as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def without(runs: Sequence[Run], results: Mapping[str, Entry]) -> dict[str, Entry]:
    """Results less all seeds of the labels that are to run again."""
    again = {(run.task, run.label) for run in runs}
    return {key: entry for key, entry in results.items() if (entry["task"], entry["label"]) not in again}


def run_all(
    runs: Sequence[Run], path: Path, workers: int = 1, train: Callable[[Run], Entry] = train
) -> dict[str, Entry]:
    """Do what is left to do, keep each result at once, and return everything in the file.

    A run that fails is told of and does not stop the others; at the end, the failures raise.

    Args:
        runs: What there shall be.
        path: Where results are kept.
        workers: Processes of one thread each; with 1, everything happens in this one.
        train: Does a run.
    """
    todo = left_to_do(runs, load(path))
    failed = []
    if len(todo) < len(runs):
        common.console.print(f"{len(runs) - len(todo)} of {len(runs)} runs are finished already: {path}")
    start = time.perf_counter()
    for i, (run, result) in enumerate(outcomes(todo, workers, train), 1):
        try:
            entry = result()
        except Exception:
            traceback.print_exc()
            failed.append(run.key)
            continue
        # Read again: another campaign may have written meanwhile.
        save(path, load(path) | {run.key: entry})
        minutes = (time.perf_counter() - start) / 60
        common.console.print(
            f"[{i}/{len(todo)}] {run.key}: final return {entry['final']:.4g}, "
            f"{entry['steps_per_second']:.0f} steps/s, {minutes:.1f} minutes so far",
            markup=False,
        )
    if failed:
        raise SystemExit(f"{len(failed)} of {len(todo)} runs failed: {'; '.join(failed)}")
    return load(path)


def outcomes(
    runs: Sequence[Run], workers: int, train: Callable[[Run], Entry]
) -> Iterator[tuple[Run, Callable[[], Entry]]]:
    """Each run once it is done, and a call that returns its result or raises its error."""
    if workers == 1:
        yield from ((run, functools.partial(train, run)) for run in runs)
        return
    # Before torch is loaded there: two pools of spinning threads on the same cores stall each other.
    os.environ["OMP_NUM_THREADS"] = "1"
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(train, run): run for run in runs}
        yield from ((futures[future], future.result) for future in as_completed(futures))


def iqm(values: np.ndarray, axis: int = 0) -> np.ndarray:
    """Interquartile mean: without the lowest and the highest quarter, rounded down.

    Agarwal et al. 2021, https://arxiv.org/abs/2108.13264.
    """
    ordered = np.moveaxis(np.sort(values, axis), axis, 0)
    cut = len(ordered) // 4
    return ordered[cut : len(ordered) - cut].mean(0)


def iqm_interval(values: np.ndarray, level: float = 0.95, draws: int = 2_000) -> tuple[np.ndarray, ...]:
    """IQM over seeds of ``[seeds, ...]``, and its bootstrap interval; whole seeds are drawn."""
    seeds = len(values)
    drawn = np.random.default_rng(0).integers(seeds, size=(draws, seeds))
    low, high = np.quantile(iqm(values[drawn], axis=1), [(1 - level) / 2, (1 + level) / 2], axis=0)
    return iqm(values), low, high


def by_label(results: Mapping[str, Entry], task: str) -> dict[str, list[Entry]]:
    """A task's runs, the known algorithms first."""
    entries = sorted((e for e in results.values() if e["task"] == task), key=lambda e: e["seed"])
    labels = sorted({e["label"] for e in entries}, key=lambda x: (ALGORITHMS.index(x) if x in ALGORITHMS else 99, x))
    return {label: [e for e in entries if e["label"] == label] for label in labels}


def report(results: Mapping[str, Entry]) -> list[str]:
    """Tables, printed, and in Markdown with the settings."""
    sections = []
    for name, task in TASKS.items():
        groups = by_label(results, name)
        if not groups:
            continue
        rows = []
        for label, entries in groups.items():
            finals = np.array([e["final"] for e in entries])
            middle, low, high = iqm_interval(finals)
            speed = np.median([e["steps_per_second"] for e in entries])
            reached = f"{(finals >= task.threshold).sum()} of {len(finals)}"
            area = "{:.4g} [{:.4g}, {:.4g}]".format(*iqm_interval(np.array([area_under(e["curve"]) for e in entries])))
            rows.append([label, f"{middle:.4g} [{low:.4g}, {high:.4g}]", reached, area, f"{speed:,.0f}"])
        columns = ["algorithm", "final return, 95% interval", f"seeds at {task.threshold:g} or more"]
        columns += ["mean return while training", "steps/s"]
        sections += [common.show_table(task.title, columns, rows), describe_settings(groups)]
    return sections


def describe_settings(groups: Mapping[str, Sequence[Entry]]) -> str:
    """The settings all have in common, then what each has besides."""
    settings = {label: entries[0]["settings"] for label, entries in groups.items()}
    first = next(iter(settings.values()))
    common_ones = {k: v for k, v in first.items() if all(k in s and s[k] == v for s in settings.values())}
    lines = ["Settings: " + write_out(common_ones)]
    for label, own in settings.items():
        rest = {k: v for k, v in own.items() if k not in common_ones and k != "algorithm"}
        lines += [f"- {label}: {write_out(rest)}"] if rest else []
    return "\n".join(lines) + "\n"


def write_out(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"`{name}={value!r}`" for name, value in settings.items())


COLOURS = {
    "SB3 PPO": "#8a8f98",
    "RecurrentPPO": "#3c6e9f",
    "driftproof": "#0b6e4f",
    "driftproof, no memory": "#7fb69e",
}
MORE_COLOURS = ("#c8553d", "#e39774", "#8e5572", "#d4a017")


def plot(results: Mapping[str, Entry], path: Path) -> None:
    """Training curves: IQM over seeds and its interval."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [name for name in TASKS if by_label(results, name)]
    columns = min(3, len(names))
    rows = -(-len(names) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(5.2 * columns, 3.8 * rows), squeeze=False)
    for axes in grid.flat[len(names) :]:
        axes.set_axis_off()
    for axes, name in zip(grid.flat, names, strict=False):
        more = 0
        for label, entries in by_label(results, name).items():
            colour = COLOURS.get(label) or MORE_COLOURS[more % len(MORE_COLOURS)]
            more += label not in COLOURS
            curves = np.array([e["curve"] for e in entries], float)
            x = np.linspace(0, entries[0]["settings"]["steps"], POINTS + 1)[1:]
            known = ~np.isnan(curves).any(0)
            middle, low, high = iqm_interval(curves[:, known])
            axes.plot(x[known], middle, color=colour, linewidth=2, label=label)
            axes.fill_between(x[known], low, high, color=colour, alpha=0.15, linewidth=0)
        axes.axhline(TASKS[name].threshold, color=common.COLOURS["ink"], linewidth=0.8, linestyle=":")
        axes.set_title(TASKS[name].title, loc="left", fontsize=11)
        axes.set_xlabel("steps")
        axes.set_xlim(0, None)
        axes.set_ylabel(f"return, last {WINDOW} episodes")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k" if value else "0")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)
    common.console.print(f"picture: {path}")


def setting(text: str) -> tuple[str, Any]:
    """``name=value`` from the command line."""
    name, equals, value = text.partition("=")
    try:
        return name.strip(), ast.literal_eval(value.strip())
    except (ValueError, SyntaxError):
        hint = f"""'{name}="{value}"'""" if equals else "'gamma=0.99'"
        raise argparse.ArgumentTypeError(f"{text!r} is not name=value with a Python literal, such as {hint}") from None


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few steps of everything; writes no result")
    parser.add_argument("--report", action="store_true", help="run nothing, rebuild table and picture")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, help="instead of each task's own choice")
    parser.add_argument("--seeds", type=int, default=5, help="how many, from 0")
    parser.add_argument("--steps", type=int, help="instead of the task's; to try things, give another --folder")
    parser.add_argument(
        "--set",
        nargs="+",
        action="extend",
        type=setting,
        default=[],
        dest="changes",
        metavar="NAME=VALUE",
        help="arguments of driftproof's constructor, as Python literals",
    )
    parser.add_argument("--label", help="name in the results; with one of --algorithms only")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--folder", type=Path, default=common.RESULTS, help="of the results; Markdown only by default")
    parser.add_argument("--fresh", action="store_true", help="forget the chosen tasks' and algorithms' results first")
    arguments = parser.parse_args()
    if arguments.label and len(arguments.algorithms or []) != 1:
        parser.error("--label names one algorithm: choose it with --algorithms")
    if arguments.changes and not any(a.startswith("driftproof") for a in arguments.algorithms or ALGORITHMS):
        parser.error("--set is for driftproof, which is not among --algorithms")
    return arguments


def main() -> None:
    arguments = parse()
    tasks = {name: TASKS[name] for name in arguments.tasks}
    seeds, steps, folder = arguments.seeds, arguments.steps, arguments.folder
    if arguments.quick:
        tasks = {name: replace(task, episodes=10) for name, task in tasks.items()}
        seeds, steps, folder = 1, steps or 4_096, Path("runs") / "learning-quick"
        save(folder / "learning.json", {})
    path = folder / "learning.json"
    if arguments.report:
        results = load(path)
    else:
        runs = plan(tasks, arguments.algorithms, seeds, steps, dict(arguments.changes), arguments.label)
        if arguments.fresh:
            save(path, without(runs, load(path)))
        results = run_all(runs, path, arguments.workers)
    if not results:
        raise SystemExit(f"no results in {path}")
    sections = report(results)
    plot(results, folder / "learning.png")
    if folder == common.RESULTS:
        note = (
            ". Final return: mean of 100 episodes of the deterministic policy; interquartile mean over seeds and its "
            "bootstrap interval. Mean return while training: the area under the learning curve. Speed: training alone, "
            "median over seeds, one thread a run; runs were made on several "
            "machines, throughput.md compares on one."
        )
        common.write_result("learning", "python benchmarks/learning.py", sections, note)


if __name__ == "__main__":
    main()
