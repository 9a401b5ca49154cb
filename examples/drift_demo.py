"""An agent with the drift kit and Stable-Baselines3's PPO, side by side, while the sensors of CartPole are moved.

    python examples/drift_demo.py             # two minutes on two cores; make demo-drift
    python examples/drift_demo.py --quick     # shows that it runs, not what it learns

In every phase another constant vector is added to all observations, as in Continual Gym (N(0, 2²), none in the first
phase). Nobody tells the agents. Both see the same drift, and have the same networks and batches.
"""

from __future__ import annotations

import argparse
import multiprocessing
import queue
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv

from driftproof.envs import ObservationOffset, Sudden, drifting

ENVS, DEVIATION, SHOWN = 8, 2.0, 40
COMMON = {"n_steps": 64, "batch_size": 128, "n_epochs": 10, "learning_rate": 1e-3, "gamma": 0.98, "gae_lambda": 0.9}
AGENTS = {"driftproof": "#0b6e4f", "SB3 PPO": "#c8553d"}
BARS = " ▁▂▃▄▅▆▇█"


def make_env(steps: int, seed: int) -> gymnasium.Env[Any, Any]:
    """CartPole with another vector added to all observations in every phase of so many steps."""
    return drifting("CartPole-v1", ObservationOffset(Sudden(every=steps), deviation=DEVIATION), seed)


class Tell(BaseCallback):
    """Puts the mean return of the last episodes into a queue after every rollout."""

    def __init__(self, name: str, told: Any) -> None:
        super().__init__()
        self._name, self._told = name, told
        self._returns: list[float] = []

    def _on_step(self) -> bool:
        self._returns += [info["episode"]["r"] for info in self.locals["infos"] if "episode" in info]
        return True

    def _on_rollout_end(self) -> None:
        recent = self._returns[-20:]
        self._told.put((self._name, self.num_timesteps, float(np.mean(recent)) if recent else float("nan")))


def train(name: str, phases: int, steps: int, seed: int, told: Any) -> None:
    """Train one agent through all phases."""
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.monitor import Monitor

    from driftproof.ppo import DistributionalPPO

    torch.set_num_threads(1)
    maker = partial(make_env, steps // ENVS, seed)
    envs = DummyVecEnv([lambda: Monitor(maker())] * ENVS)
    kind, kit = (PPO, {}) if name == "SB3 PPO" else (DistributionalPPO, {"drift_kit": True})
    agent = kind("MlpPolicy", envs, seed=seed, device="cpu", **COMMON, **kit)
    agent.learn(phases * steps, Tell(name, told))
    told.put((name, None, 0.0))


def view(curves: dict[str, list[tuple[int, float]]], phases: int, steps: int) -> Group:
    """The returns so far, as a table."""
    table = Table.grid(padding=(0, 2))
    table.add_row("", "[dim]step", "[dim]phase", "[dim]return", "[dim]returns so far, of 500")
    for name, curve in curves.items():
        step, value = curve[-1] if curve else (0, float("nan"))
        bars = "".join(BARS[round(min(max(y, 0), 500) / 500 * 8)] for y in resampled(curve, phases * steps))
        phase = min(step // steps, phases - 1) + 1
        table.add_row(
            f"[{AGENTS[name]}]{name}", f"{step:,}", f"{phase}/{phases}", f"{value:.0f}", Text(bars, AGENTS[name])
        )
    marks = "".join("│" if i % (SHOWN // phases) == 0 else " " for i in range(SHOWN))
    table.add_row("", "", "", "", f"[dim]{marks}")
    return Group("[bold]CartPole; in every phase, all sensors are moved by an unknown vector", table)


def resampled(curve: Sequence[tuple[int, float]], total: int) -> list[float]:
    """Means of a curve in parts of the whole time, as far as it has come."""
    parts: list[list[float]] = [[] for _ in range(SHOWN)]
    for step, value in curve:
        parts[min((step - 1) * SHOWN // total, SHOWN - 1)].append(value)
    means, last = [], 0.0
    for part in parts[: 1 + max((i for i, part in enumerate(parts) if part), default=-1)]:
        last = float(np.nanmean(part)) if part and not np.isnan(part).all() else last
        means.append(last)
    return means


def draw(curves: dict[str, list[tuple[int, float]]], phases: int, steps: int, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 4))
    for phase in range(1, phases, 2):
        axes.axvspan(phase * steps, (phase + 1) * steps, color="#eceff3", linewidth=0)
    for name, curve in curves.items():
        x, y = np.array(curve).T
        axes.plot(x, y, color=AGENTS[name], linewidth=2)
        axes.annotate(name, (1.01, y[-1]), xycoords=("axes fraction", "data"), color=AGENTS[name], va="center")
    axes.set_title("CartPole: in every phase, all sensors are moved by an unknown vector", loc="left", fontsize=11)
    axes.set(xlabel="environment steps", ylabel="return, last 20 episodes", xlim=(0, phases * steps), ylim=(0, 510))
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, bbox_inches="tight")


def by_phase(curve: Sequence[tuple[int, float]], phases: int, steps: int) -> list[float]:
    """Mean over the second half of every phase."""
    x, y = np.array(curve).T
    halves = [(x > (i + 0.5) * steps) & (x <= (i + 1) * steps) for i in range(phases)]
    return [float(np.nanmean(y[half])) if half.any() else float("nan") for half in halves]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--phases", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20_480, help="steps of a phase")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("drift_demo.png"), help="picture")
    arguments = parser.parse_args()
    phases, steps = (2, 1024) if arguments.quick else (arguments.phases, arguments.steps)

    context = multiprocessing.get_context("spawn")
    told = context.Queue()
    workers = [
        context.Process(target=train, args=(name, phases, steps, arguments.seed, told), daemon=True) for name in AGENTS
    ]
    for worker in workers:
        worker.start()
    curves: dict[str, list[tuple[int, float]]] = {name: [] for name in AGENTS}
    left = set(AGENTS)
    with Live(view(curves, phases, steps), refresh_per_second=4) as live:
        while left:
            try:
                name, step, value = told.get(timeout=1)
            except queue.Empty:
                if any(worker.exitcode for worker in workers):
                    raise SystemExit("an agent failed; its error is above") from None
                continue
            if step is None:
                left.discard(name)
            else:
                curves[name].append((step, value))
                live.update(view(curves, phases, steps))
    print("\nreturn in the second half of every phase:")
    for name, curve in curves.items():
        print(f"  {name:12}" + "".join(f"{value:6.0f}" for value in by_phase(curve, phases, steps)))
    draw(curves, phases, steps, arguments.output)
    print(f"picture: {arguments.output}")


if __name__ == "__main__":
    main()
