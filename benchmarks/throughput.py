"""Training speed on CartPole: this library, sb3-contrib's RecurrentPPO and SB3's PPO, taking turns.

    python benchmarks/throughput.py                # 1 and 2 torch threads, about 10 minutes
    python benchmarks/throughput.py --quick        # 2 minutes
    python benchmarks/throughput.py --threads 1 --rounds 3 --candidates "driftproof, same network" RecurrentPPO

Everyone has 8 environments of 128 steps, minibatches of 256, 4 epochs, and the same environments. "Same network" has
RecurrentPPO's: two LSTMs of 256 and two networks of 64 and 64 behind them, one critic, Adam, no gradient scaling.
Each turn is `--updates` rollouts and updates; ratios are of turns next to each other.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from common import console, show_table, write_result

SETTINGS: dict[str, Any] = {"n_steps": 128, "batch_size": 256, "n_epochs": 4, "seed": 0, "device": "cpu"}
PLAIN: dict[str, Any] = {"optimizer_class": "adam", "variance_gradient_scaling": False}
SAME: dict[str, Any] = {"lstm_hidden_size": 256, "twin_critics": False}
BASELINE = "RecurrentPPO"
ENVS = 8


def driftproof(policy: str = "MlpLstmPolicy", **settings: Any) -> Any:
    from driftproof.ppo import DistributionalPPO

    return DistributionalPPO(policy, environments(), **SETTINGS, **settings)


def recurrent_ppo() -> Any:
    from sb3_contrib import RecurrentPPO

    return RecurrentPPO("MlpLstmPolicy", environments(), **SETTINGS)


def sb3_ppo() -> Any:
    from stable_baselines3 import PPO

    return PPO("MlpPolicy", environments(), **SETTINGS)


def environments() -> Any:
    from stable_baselines3.common.env_util import make_vec_env

    return make_vec_env("CartPole-v1", ENVS, seed=0)


CANDIDATES: dict[str, Callable[[], Any]] = {
    BASELINE: recurrent_ppo,
    "driftproof, same network": lambda: driftproof(policy_kwargs=SAME, **PLAIN),
    "driftproof, same network, all techniques": lambda: driftproof(policy_kwargs={**SAME, "twin_critics": True}),
    "driftproof, default network": driftproof,
    "driftproof, default network, plain": lambda: driftproof(policy_kwargs={"twin_critics": False}, **PLAIN),
    "driftproof, GRU": lambda: driftproof("MlpGruPolicy"),
    "driftproof, no memory": lambda: driftproof("MlpPolicy"),
    "SB3 PPO": sb3_ppo,
}


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
        self.model.learn(2 * ENVS * SETTINGS["n_steps"])

    def turn(self, updates: int) -> tuple[float, float]:
        """Steps per second, and the share of time in updates."""
        self.update = 0.0
        steps = updates * ENVS * SETTINGS["n_steps"]
        start = time.perf_counter()
        self.model.learn(steps, reset_num_timesteps=False)
        seconds = time.perf_counter() - start
        return steps / seconds, self.update / seconds


def measure(threads: int, rounds: int, updates: int, names: list[str]) -> dict[str, list[tuple[float, float]]]:
    torch.set_num_threads(threads)
    clocks = {name: Clock(CANDIDATES[name]) for name in names}
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for _ in range(rounds):
        for name, clock in clocks.items():
            turns[name].append(clock.turn(updates))
    return turns


def table(threads: int, turns: dict[str, list[tuple[float, float]]]) -> str:
    rows = []
    for name, values in turns.items():
        speed, share = np.array(values).T
        ratio = "" if BASELINE not in turns else f"{np.median(speed / np.array(turns[BASELINE])[:, 0]):.2f}"
        update = np.median(share)
        rows.append([name, f"{np.median(speed):,.0f}", ratio, f"{1 - update:.0%}", f"{update:.0%}"])
    title = f"{threads} torch thread{'s' if threads > 1 else ''}"
    return show_table(title, ["", "steps/s", f"times {BASELINE}", "rollout", "update"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--updates", type=int, default=4, help="per turn")
    parser.add_argument("--candidates", nargs="+", choices=CANDIDATES, default=list(CANDIDATES), metavar="NAME")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.updates = 2, 2
    warnings.filterwarnings("ignore")
    if args.worker:
        print(json.dumps(measure(args.threads[0], args.rounds, args.updates, args.candidates)))
        return
    sections = []
    for threads in args.threads:
        # Each in a process of its own: a pool of threads, once started, stays.
        options = ["--threads", str(threads), "--rounds", str(args.rounds), "--updates", str(args.updates)]
        command = [sys.executable, __file__, "--worker", *options, "--candidates", *args.candidates]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        sections.append(table(threads, json.loads(output.splitlines()[-1])))
    if args.candidates == list(CANDIDATES) and not args.quick:
        write_result("throughput", f"python benchmarks/throughput.py --rounds {args.rounds}", sections)
    else:
        console.print("Not written: a run of all candidates, not quick, would be.")


if __name__ == "__main__":
    main()
