"""Training speed with different numbers of torch threads, which the default of `run.threads` is chosen by.

    python benchmarks/threads.py                   # on this machine as it is: some minutes
    python benchmarks/threads.py --load 2          # with two processes that keep as many cores busy
    python benchmarks/threads.py --rounds 2        # quick

Each turn is one rollout and its update; numbers of threads take turns, so that all feel the same load. Steps per second
are medians over turns.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from typing import Any

import numpy as np
import torch
from common import console, machine, show_table, write_result
from stable_baselines3.common.env_util import make_vec_env

from driftproof.cli.threads import MACS_PER_STEP, chosen_threads
from driftproof.ppo import DistributionalPPO

NETWORKS: dict[str, tuple[str, dict[str, Any], int]] = {
    "64, 64": ("MlpPolicy", {"net_arch": [64, 64]}, 64),
    "256, 256": ("MlpPolicy", {"net_arch": [256, 256]}, 256),
    "LSTM 64": ("MlpLstmPolicy", {"lstm_hidden_size": 64}, 256),
    "LSTM 256": ("MlpLstmPolicy", {"lstm_hidden_size": 256}, 256),
    "1024, 1024": ("MlpPolicy", {"net_arch": [1024, 1024]}, 1024),
}
"""Policy, its arguments, and samples of a minibatch, by name."""


def burn() -> None:
    while True:
        np.random.default_rng(0).normal(size=(200, 200)) @ np.ones((200, 200))


def speeds(name: str, threads: list[int], rounds: int) -> tuple[dict[int, float], DistributionalPPO]:
    """Steps per second for each number of threads."""
    policy, kwargs, batch = NETWORKS[name]
    env = make_vec_env("CartPole-v1", n_envs=8)
    agent = DistributionalPPO(
        policy,
        env,
        n_steps=64,
        batch_size=batch,
        n_epochs=2,
        policy_kwargs=kwargs,
        seed=0,
        device="cpu",
        drift_kit=False,
    )
    steps = agent.n_steps * agent.n_envs
    agent.learn(steps)
    times: dict[int, list[float]] = {count: [] for count in threads}
    for _ in range(rounds):
        for count in threads:
            torch.set_num_threads(count)
            start = time.perf_counter()
            agent.learn(steps, reset_num_timesteps=False)
            times[count].append(time.perf_counter() - start)
    return {count: steps / float(np.median(seconds)) for count, seconds in times.items()}, agent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--load", type=int, default=0, help="processes that keep cores busy meanwhile")
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS))
    options = parser.parse_args()
    cores = os.cpu_count() or 1
    threads = sorted({1, 2, cores // 2 or 1, cores})
    burning = [multiprocessing.Process(target=burn, daemon=True) for _ in range(options.load)]
    for process in burning:
        process.start()
    rows, load = [], os.getloadavg()[0]
    for name in options.networks:
        found, agent = speeds(name, threads, options.rounds)
        count, _ = chosen_threads(agent, cores, load)
        parameters = sum(each.numel() for each in agent.policy.parameters())
        best = max(found, key=lambda each: found[each])
        cells = [f"{found[each]:,.0f}{' *' if each == best else ''}" for each in threads]
        rows.append([name, str(NETWORKS[name][2]), f"{parameters:,}", *cells, str(count)])
    for process in burning:
        process.terminate()
    title = f"Steps per second by torch threads; load average {load:.1f}, {options.load} burning processes"
    columns = ["network", "minibatch", "parameters", *(f"{each} threads" for each in threads), "default"]
    text = show_table(title, columns, rows)
    console.print(f"{machine()}; the default changes at {MACS_PER_STEP:,} multiplications per optimizer step")
    suffix = f"_load_{options.load}" if options.load else ""
    write_result(f"threads{suffix}", "python benchmarks/threads.py", [text])


if __name__ == "__main__":
    main()
