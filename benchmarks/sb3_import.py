"""Agents of Stable-Baselines3 before and after they become agents of driftproof.

    python benchmarks/sb3_import.py            # six minutes
    python benchmarks/sb3_import.py --quick    # a minute, agents that have hardly learned

PPO and RecurrentPPO learn CartPole, are saved, and converted. Then: how many of 1,000 deterministic actions are the
same in the same episodes, and how returns go on, of the converted agent with an optimizer that begins anew and with the
moments of Adam, and of Stable-Baselines3 itself: RecurrentPPO is not steady on this task, and may lose some return in
the updates that follow, whoever takes them. Returns are of 24 episodes with random actions, as training takes them,
means over three seeds; the KL divergence is that of the first update. One torch thread.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import show_table, write_result
from sb3_contrib import RecurrentPPO
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import KVWriter, Logger
from stable_baselines3.common.vec_env import VecEnv

from driftproof.ppo import from_sb3

ENVS, EPISODES, UPDATES, SEEDS = 8, 24, 4, (2, 3, 4)
SMALL_LSTM = {"policy_kwargs": {"lstm_hidden_size": 64}}
KINDS: dict[str, tuple[type[Any], dict[str, Any], int]] = {
    "PPO": (PPO, {"policy": "MlpPolicy", "n_steps": 256, "batch_size": 64}, 40_000),
    "RecurrentPPO": (
        RecurrentPPO,
        {"policy": "MlpLstmPolicy", "n_steps": 128, "batch_size": 256, "n_epochs": 5, **SMALL_LSTM},
        30_000,
    ),
}


def envs(seed: int) -> VecEnv:
    return make_vec_env("CartPole-v1", ENVS, seed=seed)


class Recorder(KVWriter):
    """Keeps what is logged."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, Any], step: int = 0) -> None:
        self.rows.append(dict(key_values))


def same_actions(theirs: Any, ours: Any, steps: int = 1000) -> int:
    """How many deterministic actions are the same, in episodes that the first of the two plays."""
    env = make_vec_env("CartPole-v1", 1, seed=1)
    observation, start = env.reset(), np.ones(1, bool)
    state = other = None
    equal = 0
    for _ in range(steps):
        action, state = theirs.predict(observation, state, start, deterministic=True)
        converted, other = ours.predict(observation, other, start, deterministic=True)
        equal += int(np.array_equal(action, converted))
        observation, _, start, _ = env.step(action)
    return equal


def mean_return(agent: Any) -> float:
    return float(evaluate_policy(agent, envs(100), EPISODES, deterministic=False)[0])


def returns(agent: Any) -> tuple[list[float], float]:
    """Returns before training goes on and after each of some updates, and the KL divergence of the first update."""
    recorder = Recorder()
    agent.set_logger(Logger(None, [recorder]))
    found = [mean_return(agent)]
    for i in range(UPDATES):
        agent.learn(agent.n_steps * ENVS, reset_num_timesteps=i == 0)
        agent.logger.dump()
        found.append(mean_return(agent))
    kls = [row["train/approx_kl"] for row in recorder.rows if "train/approx_kl" in row]
    return found, float(kls[0])


def measure(name: str, folder: Path, quick: bool) -> list[list[str]]:
    kind, settings, steps = KINDS[name]
    model = kind(env=envs(0), seed=0, device="cpu", **settings).learn(2_048 if quick else steps)
    path = folder / f"{name}.zip"
    model.save(path)
    equal = same_actions(model, from_sb3(path, envs(0), device="cpu"))
    makers: dict[str, Callable[[int], Any]] = {
        "driftproof": lambda seed: from_sb3(path, envs(seed), seed=seed, device="cpu"),
        "driftproof, moments of Adam": lambda seed: from_sb3(
            path, envs(seed), seed=seed, device="cpu", adam_moments=True
        ),
        "Stable-Baselines3": lambda seed: seeded(kind.load(path, envs(seed), device="cpu"), seed),
    }
    rows = []
    for who, make in makers.items():
        runs = [returns(make(seed)) for seed in SEEDS]
        found = np.mean([each for each, _ in runs], axis=0)
        rest = ", ".join(f"{value:.0f}" for value in found[1:])
        kl = np.mean([each for _, each in runs])
        same = f"{equal:,}" if who.startswith("driftproof") else ""
        rows.append([name, who, same, f"{found[0]:.0f}", rest, f"{found[1:].mean() / found[0]:.0%}", f"{kl:.4f}"])
    return rows


def seeded(model: Any, seed: int) -> Any:
    model.set_random_seed(seed)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", UserWarning)  # of a GPU that PPO does not need
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for name in KINDS for row in measure(name, Path(folder), options.quick)]
    columns = [
        "agent",
        "goes on as",
        "same of 1,000 actions",
        "return before",
        f"after updates 1 to {UPDATES}",
        "mean of these",
        "KL",
    ]
    table = show_table("CartPole, before and after conversion", columns, rows)
    if not options.quick:
        write_result("sb3_import", " ".join(["python", *sys.argv]), [table])


if __name__ == "__main__":
    main()
