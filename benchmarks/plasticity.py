"""Who keeps learning when the task keeps changing?

    python benchmarks/plasticity.py --demo     # three optimizers, one picture, under two minutes
    python benchmarks/plasticity.py --quick    # all methods, short streams, about three minutes
    python benchmarks/plasticity.py            # the whole table, about an hour on two cores

Three problems, learned one sample at a time. *Label permutation*: digits (8×8) whose labels are permuted every 2,500
samples, 100 times. *Input permutation*: pixels permuted every 5,000 samples, 50 times. *Bit flipping*: regression on
twenty bits of which one changes every 10,000 steps, a million steps. All methods of a seed see the same stream and
start from the same weights; every method is shown with the best of its settings, and all settings are in the result.
"""

from __future__ import annotations

import argparse
import multiprocessing
import queue
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
from plasticity_methods import Config
from plasticity_problems import Stream, bit_flipping, digit_stream
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

COST = {
    "SGD": 1.0,
    "SGD + L2": 1.0,
    "SGD + L2 to init": 1.5,
    "shrink and perturb": 4.0,
    "continual backprop": 2.0,
    "Adam": 2.5,
    "AdamW": 2.5,
}
"""Rough cost of a step, for sharing work between two processes; UPGD's is 4."""


@dataclass(frozen=True)
class Problem:
    """A stream, the network that meets it, and what counts."""

    name: str
    title: str
    run: Callable[..., dict[Config, np.ndarray]]
    stream: Stream
    quick: Stream
    configs: Sequence[Config]
    higher_is_better: bool = True

    def score(self, results: np.ndarray) -> np.ndarray:
        """One number for each seed, from ``[seeds, tasks]``: the last fifth of accuracies, or the error throughout."""
        return last_fifth(results) if self.higher_is_better else results.mean(1)


def run_label(*args: Any) -> dict[Config, np.ndarray]:
    return digit_stream("label", *args)


def run_input(*args: Any) -> dict[Config, np.ndarray]:
    return digit_stream("input", *args)


def first_fifth(results: np.ndarray) -> np.ndarray:
    return results[:, : max(1, results.shape[1] // 5)].mean(1)


def last_fifth(results: np.ndarray) -> np.ndarray:
    return results[:, -max(1, results.shape[1] // 5) :].mean(1)


UPGD = Config("UPGD", 0.01)
ADAPTIVE = Config("AdaptiveUPGD", 1e-3, decay=1e-3, sigma=1e-3, beta_utility=0.999)
UPGDW = Config("UPGDW", 1e-3, decay=0.01, sigma=1e-3, beta_utility=0.999)
FROZEN = Config("UPGD, frozen gate", 0.01, temperature=0.0)

BASELINES = [
    *(Config("SGD", lr) for lr in (0.003, 0.01, 0.03)),
    *(Config("SGD + L2", 0.01, decay) for decay in (1e-3, 1e-2)),
    *(Config("SGD + L2 to init", 0.01, decay) for decay in (1e-3, 1e-2)),
    *(Config("shrink and perturb", 0.01, decay, 1e-2) for decay in (1e-3, 1e-2)),
    *(Config("Adam", lr) for lr in (1e-4, 3e-4, 1e-3)),
    *(Config("AdamW", lr, decay=0.01) for lr in (1e-4, 3e-4, 1e-3)),
    *(Config("continual backprop", lr) for lr in (0.003, 0.01)),
]

LABELS = [
    *BASELINES,
    # The gate alone, at several rates; then sharper, with noise, with decay, with a long memory; then the other gate.
    *(replace(UPGD, lr=lr) for lr in (0.01, 0.02)),
    replace(UPGD, temperature=3.0),
    *(replace(UPGD, sigma=sigma) for sigma in (1e-3, 1e-1)),
    replace(UPGD, sigma=1e-3, gaussian=True),
    replace(UPGD, decay=1e-3),
    replace(UPGD, decay=1e-2, sigma=1e-1),
    replace(UPGD, beta_utility=0.999),
    replace(UPGD, gate="minmax"),
    *(replace(FROZEN, sigma=sigma) for sigma in (0.0, 1e-3)),
    *(replace(ADAPTIVE, lr=lr) for lr in (3e-4, 1e-3)),
    replace(ADAPTIVE, lr=3e-4, beta_utility=0.9),
    *(replace(UPGDW, lr=lr) for lr in (3e-4, 1e-3)),
]

INPUTS = [
    *BASELINES,
    *(replace(UPGD, lr=lr) for lr in (0.005, 0.01, 0.02)),
    replace(UPGD, decay=1e-2, sigma=1e-1),
    replace(UPGD, beta_utility=0.999),
    replace(FROZEN, sigma=1e-3),
    *(replace(ADAPTIVE, lr=lr) for lr in (3e-4, 1e-3)),
    *(replace(UPGDW, lr=lr) for lr in (3e-4, 1e-3)),
]

LONG = replace(UPGD, beta_utility=0.999)
BITS = [
    *(Config("SGD", lr) for lr in (1e-3, 3e-3, 1e-2)),
    Config("SGD + L2", 0.01, 1e-2),
    *(Config("SGD + L2 to init", 0.01, decay) for decay in (3e-3, 1e-2)),
    *(Config("shrink and perturb", 0.01, decay, 0.3) for decay in (1e-3, 1e-2)),
    *(Config("Adam", lr) for lr in (1e-4, 1e-3, 1e-2)),
    *(Config("AdamW", lr, decay=0.01) for lr in (1e-4, 1e-3, 1e-2)),
    *(Config("continual backprop", lr) for lr in (1e-3, 1e-2)),
    # With and without each of gate, noise and decay; then the short memory that serves best on labels.
    *(replace(base, sigma=s, decay=d) for base in (LONG, FROZEN) for s in (0.0, 0.3) for d in (0.0, 1e-2)),
    replace(UPGD, decay=1e-2, sigma=0.3),
    replace(ADAPTIVE, lr=1e-3),
    *(replace(ADAPTIVE, lr=lr, decay=1e-4 / lr, sigma=0.1) for lr in (1e-3, 1e-2)),
    *(replace(UPGDW, lr=lr) for lr in (1e-3, 1e-2)),
]

PROBLEMS = [
    Problem(
        "bits",
        "Bit-flipping regression: mean squared error, lower is better",
        bit_flipping,
        Stream(100, 10_000),
        Stream(30, 1_000),
        BITS,
        higher_is_better=False,
    ),
    Problem("label", "Label permutation: online accuracy", run_label, Stream(100, 2_500), Stream(15, 1_000), LABELS),
    Problem("input", "Input permutation: online accuracy", run_input, Stream(50, 5_000), Stream(8, 2_000), INPUTS),
]


@dataclass(frozen=True)
class Job:
    problem: Problem
    stream: Stream
    configs: Sequence[Config]
    seeds: Sequence[int]


def work(jobs: Any, results: Any) -> None:
    """A process: take jobs until there are none; report every task, then the results."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    while True:
        try:
            job = jobs.get(timeout=1)
        except queue.Empty:
            return
        ticks = len(job.configs)
        outcome = job.problem.run(job.stream, job.configs, job.seeds, lambda n=ticks: results.put(n))
        results.put((job.problem.name, outcome))


def run_all(problems: Sequence[Problem], quick: bool, seeds: int) -> dict[str, dict[Config, np.ndarray]]:
    """Every problem's configurations, shared between two processes of one thread each."""
    jobs_list = []
    for problem in problems:
        halves: list[list[Config]] = [[], []]
        loads = [0.0, 0.0]
        # What shares a rule stays together: the number of operations counts, then that of networks.
        for kind in sorted(by_kind(problem.configs), key=cost, reverse=True):
            lighter = int(loads[1] < loads[0])
            halves[lighter] += kind
            loads[lighter] += cost(kind)
        stream = problem.quick if quick else problem.stream
        jobs_list += [Job(problem, stream, half, range(seeds)) for half in halves]
    context = multiprocessing.get_context("spawn")
    jobs, results = context.Queue(), context.Queue()
    for job in jobs_list:
        jobs.put(job)
    outcomes: dict[str, dict[Config, np.ndarray]] = {problem.name: {} for problem in problems}
    workers = [context.Process(target=work, args=(jobs, results)) for _ in range(2)]
    for worker in workers:
        worker.start()
    with progress_bar() as progress:
        bar = progress.add_task("learning", total=sum(len(job.configs) * job.stream.tasks for job in jobs_list))
        for _ in range(sum(job.stream.tasks + 1 for job in jobs_list)):
            message = get_alive(results, workers)
            if isinstance(message, int):
                progress.advance(bar, message)
            else:
                outcomes[message[0]].update(message[1])
    for worker in workers:
        worker.join()
    return outcomes


def by_kind(configs: Sequence[Config]) -> list[list[Config]]:
    kinds = defaultdict(list)
    for config in configs:
        kinds[config.kind].append(config)
    return list(kinds.values())


def cost(kind: Sequence[Config]) -> float:
    """Of a step of configurations that share a rule: the operations cost about as much as six networks."""
    return COST.get(kind[0].method, 4) * (6 + len(kind))


def get_alive(results: Any, workers: Sequence[Any]) -> Any:
    """The next message, or an error if a worker died."""
    while True:
        try:
            return results.get(timeout=5)
        except queue.Empty:
            if any(worker.exitcode not in (None, 0) for worker in workers):
                raise RuntimeError("a worker process died") from None


def progress_bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=common.console,
    )


def best_of(problem: Problem, outcome: dict[Config, np.ndarray]) -> dict[str, Config]:
    """The best configuration of each method, best method first."""
    sign = 1 if problem.higher_is_better else -1
    scores = {config: sign * problem.score(results).mean() for config, results in outcome.items()}
    best: dict[str, Config] = {}
    for config in sorted(scores, key=scores.__getitem__, reverse=True):
        best.setdefault(config.method, config)
    return best


def table_row(problem: Problem, config: Config, results: np.ndarray) -> list[str]:
    def text(values: np.ndarray) -> str:
        mean, low, high = common.interval(values)
        return f"{mean:.3f} [{low:.3f}, {high:.3f}]"

    row = [config.method, config.label, text(first_fifth(results)), text(last_fifth(results))]
    return row if problem.higher_is_better else [*row, text(results.mean(1))]


def report(problem: Problem, outcome: dict[Config, np.ndarray]) -> list[str]:
    """The table of the best, printed, and the table of all, for the file."""
    columns = ["method", "settings", "first fifth of tasks", "last fifth of tasks"]
    columns += [] if problem.higher_is_better else ["all tasks"]
    best = best_of(problem, outcome)
    seeds = len(next(iter(outcome.values())))
    rows = [table_row(problem, config, outcome[config]) for config in best.values()]
    title = f"{problem.title} (best setting of each, {seeds} seeds, 95% intervals)"
    sections = [common.show_table(title, columns, rows)]
    order = [config for method in best for config in outcome if config.method == method]
    lines = [f"#### {problem.name}: all settings", "", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(table_row(problem, config, outcome[config])) + " |" for config in order]
    return [*sections, "\n".join(lines) + "\n"]


STYLE = {
    "AdamW": ("#c8553d", "-"),
    "Adam": ("#e39774", "-"),
    "SGD": ("#8a8f98", "-"),
    "SGD + L2 to init": ("#8a8f98", "--"),
    "continual backprop": ("#3c6e9f", "-"),
    "shrink and perturb": ("#3c6e9f", "--"),
    "UPGD": ("#0b6e4f", "-"),
    "AdaptiveUPGD": ("#0b6e4f", "--"),
}


def plot(outcomes: dict[str, dict[Config, np.ndarray]], problems: Sequence[Problem], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, all_axes = plt.subplots(1, len(problems), figsize=(6.4 * len(problems), 4.2), squeeze=False)
    for axes, problem in zip(all_axes[0], problems, strict=True):
        outcome = outcomes[problem.name]
        ends = []
        for method, config in best_of(problem, outcome).items():
            if method not in STYLE:
                continue
            results = outcome[config]
            width = max(1, results.shape[1] // 20)
            smooth = np.apply_along_axis(lambda row, w=width: np.convolve(row, np.ones(w) / w, "valid"), 1, results)
            x = np.arange(width, results.shape[1] + 1)
            colour, line = STYLE[method]
            axes.plot(x, smooth.mean(0), line, color=colour, linewidth=2)
            axes.fill_between(x, smooth.min(0), smooth.max(0), color=colour, alpha=0.12, linewidth=0)
            ends.append((smooth[:, -1].mean(), method, colour))
        label_ends(axes, ends)
        axes.set_title(problem.title, loc="left", fontsize=11)
        axes.set_xlabel("task")
        axes.set_xlim(1, None)
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    common.console.print(f"picture: {path}")


def label_ends(axes: Any, ends: list[tuple[float, str, str]]) -> None:
    """Names at the right end of the lines, pushed apart where they would overlap."""
    low, high = axes.get_ylim()
    gap = 0.055 * (high - low)
    ends = sorted(ends)
    places = [value for value, _, _ in ends]
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + gap)
    places[-1] = min(places[-1], high)
    for i in range(len(places) - 2, -1, -1):
        places[i] = min(places[i], places[i + 1] - gap)
    for y, (value, method, colour) in zip(places, ends, strict=True):
        axes.annotate(
            method,
            (1.0, value),
            (1.02, y),
            xycoords=("axes fraction", "data"),
            textcoords=("axes fraction", "data"),
            color=colour,
            fontsize=9,
            va="center",
        )


def demo() -> None:
    """Label permutation with three optimizers."""
    configs = [Config("AdamW", 1e-3, decay=0.01), Config("SGD", 0.01), replace(UPGD, lr=0.02)]
    problem = replace(PROBLEMS[1], configs=configs, stream=Stream(60, 2_500))
    common.console.print(
        "Digits are shown one at a time. Every 2,500 digits, all labels are swapped, and there is all to learn again.\n"
        "Does a network still learn after 60 such tasks?\n"
    )
    outcomes = run_all([problem], quick=False, seeds=3)
    report(problem, outcomes[problem.name])
    plot(outcomes, [problem], Path("runs") / "demo.png")
    best, worst = (last_fifth(outcomes[problem.name][c]).mean() for c in (configs[2], configs[0]))
    common.console.print(
        f"\nIn the last twelve tasks the network answers {best:.0%} rightly with UPGD, {worst:.0%} with AdamW: "
        "there it has lost the ability to learn."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", action="store_true", help="three optimizers and a picture")
    parser.add_argument("--quick", action="store_true", help="short streams and two seeds; writes no result")
    parser.add_argument("--problem", choices=[p.name for p in PROBLEMS], help="only this one; writes no result")
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.demo:
        demo()
        return
    start = time.perf_counter()
    problems = [p for p in PROBLEMS if arguments.problem in (None, p.name)]
    outcomes = run_all(problems, arguments.quick, 2 if arguments.quick else arguments.seeds)
    sections = [section for problem in problems for section in report(problem, outcomes[problem.name])]
    minutes = (time.perf_counter() - start) / 60
    common.console.print(f"{minutes:.1f} minutes")
    if not arguments.quick and arguments.problem is None:
        plot(outcomes, problems, common.RESULTS / "plasticity.png")
        common.write_result("plasticity", "python benchmarks/plasticity.py", sections, f" ({minutes:.0f} minutes)")


if __name__ == "__main__":
    main()
