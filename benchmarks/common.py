"""What the benchmarks share: the machine in words, alternating timing, intervals, tables, files."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
COLOURS = {"ours": "#0b6e4f", "theirs": "#b0b7bf", "warn": "#c8553d", "ink": "#222222"}

console = Console(width=140 if not os.environ.get("COLUMNS") else None)


def machine() -> str:
    """Processor, cores, GPU and versions, in one line."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        model = names[0] if names else model
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{model}, {os.cpu_count()} cores{gpu}; Python {platform.python_version()}, torch {torch.__version__}"


def alternate(
    candidates: dict[str, Callable[[], object]],
    rounds: int,
    repeats: int,
    synchronize: Callable[[], object] | None = None,
) -> dict[str, np.ndarray]:
    """Seconds per call of each candidate, one median per round. Candidates take turns, so that all feel the same load.

    Args:
        candidates: What to call.
        rounds: How often each has its turn.
        repeats: Calls per turn, after one to warm up.
        synchronize: Waits for the device, for timing a whole turn at once.
    """
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for call in candidates.values():
        for _ in range(5):
            call()
    for _ in range(rounds):
        for name, call in candidates.items():
            call()
            if synchronize is not None:
                synchronize()
                start = time.perf_counter()
                for _ in range(repeats):
                    call()
                synchronize()
                times[name].append((time.perf_counter() - start) / repeats)
            else:
                single = []
                for _ in range(repeats):
                    start = time.perf_counter()
                    call()
                    single.append(time.perf_counter() - start)
                times[name].append(float(np.median(single)))
    return {name: np.array(values) for name, values in times.items()}


def ratio(times: dict[str, np.ndarray], name: str, baseline: str) -> float:
    """Median over rounds of a candidate's time relative to the baseline's of the same round."""
    return float(np.median(times[name] / times[baseline]))


def interval(samples: Sequence[float], level: float = 0.95, draws: int = 10_000) -> tuple[float, float, float]:
    """Mean and bootstrap interval of the mean."""
    values = np.asarray(samples, dtype=float)
    rng = np.random.default_rng(0)
    means = rng.choice(values, size=(draws, len(values))).mean(1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(values.mean()), float(low), float(high)


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Print a table, and return it in Markdown."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    lines = [f"### {title}", "", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def write_result(
    name: str, command: str, sections: Sequence[str], note: str = "", folder: Path = RESULTS, on: str | None = None
) -> Path:
    """Write a benchmark's output as Markdown, with the command and the machine, this one or ``on``, on top."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.md"
    head = f"# {name}\n\n`{command}`{note}\n\n{on or machine()}\n"
    path.write_text("\n".join([head, *sections]))
    console.print(f"written: {path}")
    return path
