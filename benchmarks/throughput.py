"""Training speed on CartPole: this library, sb3-contrib's RecurrentPPO and SB3's PPO, taking turns.

    python benchmarks/throughput.py                # with memory on 1 and 2 torch threads, without on 1: 20 minutes
    python benchmarks/throughput.py --quick        # 3 minutes
    python benchmarks/throughput.py --parts recurrent --threads 1 --rounds 3 \\
        --candidates "driftproof, same network" RecurrentPPO
    python benchmarks/throughput.py --parts feed-forward --rounds 20
    python benchmarks/throughput.py --parts drift-kit --rounds 20     # what drift_kit costs where nothing drifts

With memory, everyone has 8 environments of 128 steps, minibatches of 256, 4 epochs, and the same environments. "Same
network" has RecurrentPPO's: two LSTMs of 256 and two networks of 64 and 64 behind them, one critic, Adam, no gradient
scaling, no layer normalisation and no exploration floor; so has "plain". Without memory, the peer is SB3's PPO with the
same network, 1024 samples a rollout and 10 epochs, which are the defaults of both. "Equal work" is one critic, one
quantile, Adam, no gradient scaling; "defaults" are twin quantile critics, AdaptiveUPGD and variance gradient scaling,
without the drift kit.
Each turn is `--updates` rollouts and updates, without memory one; ratios are of turns next to each other: median, 10th
and 90th percentile. Ratios of CPU time are less sensitive to what else the machine does. The drift kit is compared with
the defaults, by CPU time only.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from common import console, show_table, write_result

PLAIN: dict[str, Any] = {
    "optimizer_class": "adam",
    "variance_gradient_scaling": False,
    "layer_norm": False,
    "exploration_floor": 0.0,
}
SAME: dict[str, Any] = {"lstm_hidden_size": 256, "twin_critics": False}
EQUAL: dict[str, Any] = {"twin_critics": False, "num_quantiles": 1}
RECURRENT_BASELINE = "RecurrentPPO"
BASELINE = "SB3 PPO"
FEED_FORWARD = [
    *((1, 32, (256, 256, 256)), (1, 64, (64, 64)), (1, 256, (64, 64))),
    *((8, 32, (64, 64)), (8, 64, (64, 64)), (8, 256, (64, 64))),
]
"""Environments, batch size and hidden layers of each comparison without memory."""


DRIFT_KIT: dict[str, tuple[str, int, dict[str, Any]]] = {
    "1 environment, 64-64": ("MlpPolicy", 1, {"net_arch": [64, 64]}),
    "8 environments, 64-64": ("MlpPolicy", 8, {"net_arch": [64, 64]}),
    "1 environment, 256-256-256": ("MlpPolicy", 1, {"net_arch": [256, 256, 256]}),
    "8 environments, LSTM": ("MlpLstmPolicy", 8, {}),
}
"""Policy, environments and networks of each comparison with and without the drift kit."""


class Setup(NamedTuple):
    """What all candidates of a comparison have in common."""

    envs: int
    n_steps: int
    batch_size: int
    n_epochs: int

    def make(self, kind: str, policy: str, **settings: Any) -> Any:
        """An agent of this library, of SB3 or of sb3-contrib, on environments of its own."""
        import sb3_contrib
        import stable_baselines3
        from stable_baselines3.common.env_util import make_vec_env

        from driftproof.ppo import DistributionalPPO

        agents = {"ours": DistributionalPPO, "PPO": stable_baselines3.PPO, "RecurrentPPO": sb3_contrib.RecurrentPPO}
        shared = {"n_steps": self.n_steps, "batch_size": self.batch_size, "n_epochs": self.n_epochs, "seed": 0}
        envs = make_vec_env("CartPole-v1", self.envs, seed=0)
        if kind == "ours":
            settings = {"drift_kit": False, **settings}  # A part of its own says what the kit costs.
        return agents[kind](policy, envs, device="cpu", **shared, **settings)


def recurrent_candidates() -> dict[str, Callable[[], Any]]:
    make = Setup(envs=8, n_steps=128, batch_size=256, n_epochs=4).make
    ours = partial(make, "ours", "MlpLstmPolicy")
    return {
        RECURRENT_BASELINE: partial(make, "RecurrentPPO", "MlpLstmPolicy"),
        "driftproof, same network": partial(ours, policy_kwargs=SAME, **PLAIN),
        "driftproof, same network, all techniques": partial(ours, policy_kwargs={**SAME, "twin_critics": True}),
        "driftproof, default network": ours,
        "driftproof, default network, plain": partial(ours, policy_kwargs={"twin_critics": False}, **PLAIN),
        "driftproof, GRU": partial(make, "ours", "MlpGruPolicy"),
        "driftproof, no memory": partial(make, "ours", "MlpPolicy"),
        BASELINE: partial(make, "PPO", "MlpPolicy"),
    }


def feed_forward_candidates(envs: int, batch_size: int, layers: tuple[int, ...]) -> dict[str, Callable[[], Any]]:
    make = Setup(envs, 1024 // envs, batch_size, n_epochs=10).make
    network = {"net_arch": list(layers)}
    return {
        BASELINE: partial(make, "PPO", "MlpPolicy", policy_kwargs=network),
        "equal work": partial(make, "ours", "MlpPolicy", policy_kwargs={**network, **EQUAL}, **PLAIN),
        "defaults": partial(make, "ours", "MlpPolicy", policy_kwargs=network),
    }


def drift_kit_candidates(policy: str, envs: int, network: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    batches = {"batch_size": 256, "n_epochs": 4} if "Lstm" in policy else {"batch_size": 64, "n_epochs": 10}
    make = partial(Setup(envs, 1024 // envs, **batches).make, "ours", policy, policy_kwargs=network)
    return {"without": make, "with": partial(make, drift_kit=True)}


RECURRENT = recurrent_candidates()


class Turn(NamedTuple):
    """Steps per second, steps per second of CPU time, and the share of time in updates."""

    speed: float
    cpu_speed: float
    update: float


class Clock:
    """Trains a model in turns, and knows how long updates took of it."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.model = make()
        self.update = 0.0
        train = self.model.train

        def timed() -> None:
            start = time.perf_counter()
            train()
            self.update += time.perf_counter() - start

        self.model.train = timed
        self.samples = self.model.n_steps * self.model.n_envs
        self.model.learn(2 * self.samples)

    def turn(self, updates: int) -> Turn:
        self.update = 0.0
        steps = updates * self.samples
        start, cpu_start = time.perf_counter(), time.process_time()
        self.model.learn(steps, reset_num_timesteps=False)
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        return Turn(steps / seconds, steps / cpu_seconds, self.update / seconds)


def measure(candidates: dict[str, Callable[[], Any]], rounds: int, updates: int) -> dict[str, list[Turn]]:
    clocks = {name: Clock(make) for name, make in candidates.items()}
    turns: dict[str, list[Turn]] = {name: [] for name in clocks}
    for i in range(rounds):
        for name, clock in list(clocks.items())[:: 1 if i % 2 == 0 else -1]:
            turns[name].append(clock.turn(updates))
    return turns


def in_a_process(part: str, threads: int, args: argparse.Namespace, names: list[str]) -> Any:
    """What :func:`work` prints in a process of its own: a pool of threads, once started, stays."""
    options = ["--threads", str(threads), "--rounds", str(args.rounds), "--updates", str(args.updates)]
    command = [sys.executable, __file__, "--worker", "--parts", part, *options, "--candidates", *names]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def work(part: str, args: argparse.Namespace) -> Any:
    torch.set_num_threads(args.threads[0])
    if part == "recurrent":
        return measure({name: RECURRENT[name] for name in args.candidates}, args.rounds, args.updates)
    if part == "drift-kit":
        return [measure(drift_kit_candidates(*row), args.rounds, updates=1) for row in DRIFT_KIT.values()]
    return [measure(feed_forward_candidates(*row), args.rounds, updates=1) for row in FEED_FORWARD]


def recurrent_table(threads: int, turns: dict[str, list[Turn]]) -> str:
    rows = []
    for name, values in turns.items():
        speed, _, share = np.array(values).T
        baseline = turns.get(RECURRENT_BASELINE)
        ratio = "" if baseline is None else f"{np.median(speed / np.array(baseline)[:, 0]):.2f}"
        update = np.median(share)
        rows.append([name, f"{np.median(speed):,.0f}", ratio, f"{1 - update:.0%}", f"{update:.0%}"])
    title = f"{threads} torch thread{'s' if threads > 1 else ''}"
    return show_table(title, ["", "steps/s", f"times {RECURRENT_BASELINE}", "rollout", "update"], rows)


def feed_forward_table(comparisons: list[dict[str, list[Turn]]]) -> str:
    rows = []
    for (envs, batch_size, layers), turns in zip(FEED_FORWARD, comparisons, strict=True):
        speeds = {name: np.array(values) for name, values in turns.items()}
        row = [f"{envs} environment{'s' if envs > 1 else ''}, batches of {batch_size}, {'-'.join(map(str, layers))}"]
        row.append(f"{np.median(speeds[BASELINE][:, 0]):,.0f}")
        for name in ("equal work", "defaults"):
            ratios = speeds[name] / speeds[BASELINE]
            low, middle, high = np.quantile(ratios[:, 0], [0.1, 0.5, 0.9])
            row += [f"{middle:.2f} ({low:.2f} to {high:.2f})", f"{np.median(ratios[:, 1]):.2f}"]
        rows.append(row)
    columns = ["", f"{BASELINE}, steps/s", "equal work, times", "by CPU time", "defaults, times", "by CPU time"]
    return show_table("Without memory, 1 torch thread", columns, rows)


def drift_kit_table(comparisons: list[dict[str, list[Turn]]]) -> str:
    rows = []
    for name, turns in zip(DRIFT_KIT, comparisons, strict=True):
        without, with_kit = (np.array(turns[which])[:, 1] for which in ("without", "with"))
        low, middle, high = np.quantile(with_kit / without, [0.1, 0.5, 0.9])
        rows.append([name, f"{np.median(without):,.0f}", f"{middle:.2f} ({low:.2f} to {high:.2f})"])
    return show_table("With drift_kit, 1 torch thread", ["", "without, steps per CPU second", "with it, times"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=("recurrent", "feed-forward", "drift-kit"))
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="of the part with memory")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--updates", type=int, default=4, help="per turn, with memory")
    parser.add_argument("--candidates", nargs="+", choices=RECURRENT, default=list(RECURRENT), metavar="NAME")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.updates = 2, 2
    warnings.filterwarnings("ignore")
    if args.worker:
        print(json.dumps(work(args.parts[0], args)))
        return
    parts = args.parts or ["recurrent", "feed-forward", "drift-kit"]
    sections = []
    if "recurrent" in parts:
        for threads in args.threads:
            sections.append(recurrent_table(threads, in_a_process("recurrent", threads, args, args.candidates)))
    if "feed-forward" in parts:
        sections.append(feed_forward_table(in_a_process("feed-forward", 1, args, args.candidates)))
    if "drift-kit" in parts:
        section = drift_kit_table(in_a_process("drift-kit", 1, args, args.candidates))
        sections.append(section)
        if parts == ["drift-kit"] and not args.quick:
            command = f"python benchmarks/throughput.py --parts drift-kit --rounds {args.rounds}"
            write_result("drift_kit_cost", command, [section])
            return
    if args.parts is None and args.candidates == list(RECURRENT) and not args.quick:
        write_result("throughput", f"python benchmarks/throughput.py --rounds {args.rounds}", sections)
    else:
        console.print("Not written: a run of all parts and candidates, not quick, would be.")


if __name__ == "__main__":
    main()
