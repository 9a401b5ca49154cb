"""What a population costs on Ray, against processes of one machine: seconds per decision, and until it has started.

    python benchmarks/ray_costs.py --quick     # 4 and 8 members, one round
    python benchmarks/ray_costs.py             # 4, 8, 16 and 32 members, three rounds

The same synchronous population of small agents on two Ray actors and in two processes, in turn. A decision is one
member's slice: an order, an update of a few milliseconds, and the report with the member's whole state.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import common
import numpy as np
import ray
from stable_baselines3.common.env_util import make_vec_env

from driftproof.pbt import Backend, HyperparamConfig, PBTConfig, PBTRunner, ProcessBackend
from driftproof.pbt.ray_backend import RayBackend
from driftproof.pbt.work import Report
from driftproof.ppo import DistributionalPPO

WORKERS = 2


def make_agent(member: int) -> DistributionalPPO:
    settings = {"n_steps": 16, "batch_size": 16, "n_epochs": 1, "seed": member, "device": "cpu"}
    return DistributionalPPO("MlpPolicy", make_vec_env("CartPole-v1", 1), vgs_kwargs={"warmup_steps": 1}, **settings)


def measured(members: int, slices: int, backend: Backend) -> tuple[float, float]:
    """Seconds until all members have reported once, and per decision after that."""
    config = PBTConfig(
        population_size=members,
        perturbation_interval=1,
        hyperparams=[HyperparamConfig("learning_rate", 1e-4, 1e-3, is_log_scale=True)],
    )
    times: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        runner = PBTRunner(config, make_agent, slices, folder, backend=backend, synchronous=True)
        receive = runner._receive

        def noting(report: Report) -> list[int]:
            found = receive(report)
            times.append(time.perf_counter())
            return found

        runner._receive = noting  # type: ignore[method-assign]
        start = time.perf_counter()
        runner.run()
    began = times[members - 1]
    return began - start, (times[-1] - began) / (len(times) - members)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small, and not kept")
    parser.add_argument("--folder", type=Path, default=common.RESULTS)
    args = parser.parse_args()
    counts, rounds, slices = ((4, 8), 1, 3) if args.quick else ((4, 8, 16, 32), 3, 5)
    ray.init(
        address="local", num_cpus=WORKERS, log_to_driver=False, include_dashboard=False, logging_level=logging.WARNING
    )
    backends: dict[str, Callable[[], Backend]] = {
        "ray": RayBackend,
        "process": partial(ProcessBackend, WORKERS, threads=1),
    }
    rows = []
    for members in counts:
        found = {name: [] for name in backends}
        for _ in range(rounds):
            for name, make in backends.items():
                found[name].append(measured(members, slices, make()))
        per = {name: np.array(values) for name, values in found.items()}  # [round, (start, decision)]
        decision = {name: 1e3 * float(np.median(values[:, 1])) for name, values in per.items()}
        ratios = per["ray"] / per["process"]
        rows.append(
            [
                str(members),
                *(f"{decision[name]:.0f} ms" for name in backends),
                f"{1e3 * float(np.median(per['ray'][:, 1] - per['process'][:, 1])):+.0f} ms",
                f"{np.median(ratios[:, 1]):.2f} ({ratios[:, 1].min():.2f} to {ratios[:, 1].max():.2f})",
                f"{np.median(ratios[:, 0]):.2f} ({ratios[:, 0].min():.2f} to {ratios[:, 0].max():.2f})",
            ]
        )
        print(rows[-1], flush=True)
    ray.shutdown()
    columns = ["members", "Ray, decision", "processes, decision", "difference", "ratio", "ratio of the time to start"]
    title = f"Ray against processes, {WORKERS} of each; medians of {rounds} rounds, and range"
    section = common.show_table(title, columns, rows)
    if not args.quick:
        note = (
            "\n\nThe machine was shared with other work: times are those of a busy machine, and backends took turns, "
            "so compare them by their ratios. A decision of Ray or of processes includes the update itself."
        )
        common.write_result("ray_costs", "python benchmarks/ray_costs.py", [section], note, args.folder)


if __name__ == "__main__":
    main()
