"""Variance gradient scaling in the agent: what the factor does, and whether it helps.

    python benchmarks/agent_vgs.py                 # CartPole and Pendulum, 5 seeds, 3 modes, about 35 minutes
    python benchmarks/agent_vgs.py --steps 20480 --seeds 2 --folder /tmp/try

Trains DistributionalPPO without scaling, scaling gradients (the default), and scaling updates. Settings are those of
learning.py's tasks. Finished runs are kept in agent_vgs.json and not run again.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import common
import learning
import numpy as np
from learning_tasks import TASKS
from stable_baselines3.common.callbacks import BaseCallback

MODES: dict[str, dict[str, Any]] = {
    "off": {"variance_gradient_scaling": False},
    "gradient": {"vgs_kwargs": {"apply_to": "gradient"}},
    "update": {"vgs_kwargs": {"apply_to": "update"}},
}
NAMES = ("cartpole", "pendulum")


class Factors(BaseCallback):
    """Collects the factor of every optimizer step after the warm-up, update by update."""

    def __init__(self) -> None:
        super().__init__()
        self.factors: list[float] = []

    def _on_step(self) -> bool:
        return True

    def _on_rollout_start(self) -> None:
        vgs = self.model.vgs
        if vgs is None:
            return
        factors = vgs._history[~vgs._history.isnan()].tolist()
        if vgs.step_count - len(factors) >= vgs.warmup_steps:
            self.factors += factors


def train(run: learning.Run) -> learning.Entry:
    """As learning.py does, and with the quantiles of the factor."""
    factors = Factors()
    entry = learning.train(run, [factors])
    if factors.factors:
        quantiles = np.quantile(factors.factors, [0.05, 0.5, 0.95])
        entry["factor"] = [round(float(q), 3) for q in quantiles]
        entry["at_the_ends"] = float(np.mean([not 0.101 < f < 0.999 for f in factors.factors]))
    return entry


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="instead of the tasks' own")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=common.RESULTS)
    args = parser.parse_args()
    tasks = {name: TASKS[name] for name in NAMES}
    runs = [
        run
        for mode, changes in MODES.items()
        for run in learning.plan(
            tasks, ["driftproof"], args.seeds, args.steps, {"drift_kit": False, **changes}, label=mode
        )
    ]
    runs.sort(key=lambda run: run.seed)
    path = args.folder / "agent_vgs.json"
    results = learning.run_all(runs, path, args.workers, train)
    sections = [table(name, results) for name in NAMES]
    if args.folder == common.RESULTS:
        common.write_result("agent_vgs", "python benchmarks/agent_vgs.py", sections)


def table(task: str, results: dict[str, learning.Entry]) -> str:
    rows = []
    for mode in MODES:
        entries = [entry for entry in results.values() if (entry["task"], entry["label"]) == (task, mode)]
        final = common.interval([entry["final"] for entry in entries])
        # The mean of the curve says how fast it was learned.
        curves = [np.mean([point for point in entry["curve"] if point is not None]) for entry in entries]
        area = common.interval(curves)
        factors = np.array([entry["factor"] for entry in entries if "factor" in entry])
        spread = " ".join(f"{q:.2f}" for q in np.median(factors, axis=0)) if len(factors) else ""
        ends = f"{np.mean([entry['at_the_ends'] for entry in entries]):.1%}" if len(factors) else ""
        means = [f"{mean:.0f} [{low:.0f}, {high:.0f}]" for mean, low, high in (final, area)]
        rows.append([mode, *means, spread, ends])
    columns = ["scaling", "final return", "mean return while training", "factor: 5%, median, 95%", "at 0.1 or 1"]
    return common.show_table(TASKS[task].title, columns, rows)


if __name__ == "__main__":
    main()
