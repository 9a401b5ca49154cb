"""What a decision of a population costs on Ray, against processes of the same machine.

    python benchmarks/ray_costs.py --quick     # 4 and 8 members, two rounds
    python benchmarks/ray_costs.py             # 4, 8, 16 and 32 members

Two Ray actors and two processes train the same small agents, in turn, round by round: every member gets an order,
trains for an update of a few milliseconds, and reports its whole state. What a round takes is divided by the members.
"""

from __future__ import annotations

import argparse
import logging
import time
from pathlib import Path

import common
import numpy as np
import ray
from stable_baselines3.common.env_util import make_vec_env

from driftproof.pbt import Backend, ProcessBackend, mean_reward
from driftproof.pbt.ray_backend import RayBackend
from driftproof.pbt.work import Failure, Order, Report, Work
from driftproof.ppo import DistributionalPPO

WORKERS = 2


def make_agent(member: int) -> DistributionalPPO:
    settings = {"n_steps": 16, "batch_size": 16, "n_epochs": 1, "seed": member, "device": "cpu", "drift_kit": False}
    return DistributionalPPO("MlpPolicy", make_vec_env("CartPole-v1", 1), vgs_kwargs={"warmup_steps": 1}, **settings)


def start(backend: Backend, members: int) -> float:
    """Start a backend, and let all members begin; returns the seconds until the first of them has reported."""
    began = time.perf_counter()
    backend.start(Work(make_agent, mean_reward, members, 1_000, "copy", synchronous=True))
    for member in range(members):
        backend.submit(order(member))
    backend.wait()
    first = time.perf_counter() - began
    for _ in range(members - 1):
        check(backend.wait())
    return first


def decision(backend: Backend, members: int) -> float:
    """Seconds per decision of a round of all members."""
    began = time.perf_counter()
    for member in range(members):
        backend.submit(order(member))
    for _ in range(members):
        check(backend.wait())
    return (time.perf_counter() - began) / members


def order(member: int) -> Order:
    return Order(member, 1, {"learning_rate": 1e-3})


def check(result: Report | Failure) -> None:
    if isinstance(result, Failure):
        raise RuntimeError(result.reason)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small, and not kept")
    parser.add_argument("--folder", type=Path, default=common.RESULTS)
    args = parser.parse_args()
    counts, rounds = ((4, 8), 2) if args.quick else ((4, 8, 16, 32), 7)
    ray.init(
        address="local", num_cpus=WORKERS, log_to_driver=False, include_dashboard=False, logging_level=logging.WARNING
    )
    backends: dict[str, Backend] = {"Ray": RayBackend(), "processes": ProcessBackend(WORKERS, threads=1)}
    starts = {name: start(backend, counts[-1]) for name, backend in backends.items()}
    rows = []
    for members in counts:
        times: dict[str, list[float]] = {name: [] for name in backends}
        for _ in range(rounds):
            for name, backend in backends.items():
                times[name].append(decision(backend, members))
        found = {name: 1e3 * np.array(values) for name, values in times.items()}  # [round]
        ratios = found["Ray"] / found["processes"]
        each = [f"{np.median(values):.0f} ms" for values in found.values()]
        more = f"{np.median(found['Ray'] - found['processes']):+.0f} ms"
        rows.append([str(members), *each, more, f"{np.median(ratios):.2f} ({ratios.min():.2f} to {ratios.max():.2f})"])
    for backend in backends.values():
        backend.close()
    ray.shutdown()
    title = f"A decision, on {WORKERS} Ray actors and in {WORKERS} processes; medians of {rounds} rounds"
    section = common.show_table(title, ["members", *backends, "difference", "ratio (range)"], rows)
    first = f"Until the first member had reported: {starts['Ray'] / starts['processes']:.1f} times as long on Ray.\n"
    if not args.quick:
        note = (
            "\n\nThe machine was shared with other work, so the times are those of a busy machine. Ray and processes "
            "took turns: compare them by their ratios. A decision includes the update itself."
        )
        common.write_result("ray_costs", "python benchmarks/ray_costs.py", [section, first], note, args.folder)


if __name__ == "__main__":
    main()
