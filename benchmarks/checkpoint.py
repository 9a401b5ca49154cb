"""Time to save and load a checkpoint: this library against the least that can be done, taking turns.

    python benchmarks/checkpoint.py                # four minutes
    python benchmarks/checkpoint.py --quick        # a few seconds
    python benchmarks/checkpoint.py --folder /mnt/disk

A million parameters with the two moments of Adam, 12 MB. Saving is compared to `safetensors.torch.save_file` and fsync,
which writes the same tensors, without the rest of the tree, without checksums, and over the old file; loading to
reading the bytes and one SHA-256 over them. Ratios are of turns next to each other. Training is CartPole with the
default agent and one torch thread; every update is saved in the background.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from common import alternate, ratio, show_table, write_result
from stable_baselines3.common.env_util import make_vec_env

from driftproof.ppo import DistributionalPPO, SaveCheckpoints
from driftproof.state import files
from driftproof.state.tree import flatten

STEPS, ENVS = 128, 8


def agent_tree() -> dict[str, Any]:
    """What an agent of two recurrent cores and two small networks saves, but for its environment."""
    shapes = [(1024, 176), (1024, 256), (1024,), (1024,)] * 2 + [(256, 256), (256,), (256, 256)]
    parameters = {f"layer_{i}": torch.randn(shape) for i, shape in enumerate(shapes)}
    moments = {
        i: {"step": torch.tensor(100.0), "exp_avg": torch.randn(shape), "exp_avg_sq": torch.rand(shape)}
        for i, shape in enumerate(shapes)
    }
    groups = [{"lr": 3e-4, "betas": (0.9, 0.999), "params": list(range(len(shapes)))}]
    return {
        "policy": parameters,
        "policy.optimizer": {"state": moments, "param_groups": groups},
        "random": {"numpy": np.random.default_rng(0).bit_generator.state, "torch": torch.get_rng_state()},
        "hyperparams": {f"value_{i}": float(i) for i in range(20)},
    }


def save_safetensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    safetensors.torch.save_file(tensors, path)
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def read_and_hash(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest()


def files_section(folder: Path, rounds: int, repeats: int) -> str:
    tree = agent_tree()
    tensors, _ = flatten(tree)
    ours, theirs = folder / "ours.zip", folder / "theirs.safetensors"
    candidates = {
        "save": lambda: files.write(ours, tree, exact=True),
        "save_file and fsync": lambda: save_safetensors(tensors, theirs),
        "load": lambda: files.read(ours),
        "read and SHA-256": lambda: read_and_hash(ours),
    }
    times = alternate(candidates, rounds, repeats)
    baselines = {"save": "save_file and fsync", "load": "read and SHA-256"}
    rows = []
    for name in candidates:
        against = f"{ratio(times, name, baselines[name]):.2f}" if name in baselines else "1"
        rows.append([name, f"{np.median(times[name]) * 1e3:.1f}", against])
    count = sum(tensor.numel() for tensor in tree["policy"].values())
    title = f"{count:,} parameters with moments, {ours.stat().st_size / 1e6:.1f} MB"
    return show_table(title, ["", "ms", "times the least"], rows)


def training_section(folder: Path, rounds: int, updates: int, batch_size: int, epochs: int) -> str:
    """Training as fast as it goes, and while every update is saved in the background, taking turns."""
    agents = {name: training_agent(batch_size, epochs) for name in ("no checkpoints", "one at every update")}
    saving = SaveCheckpoints(folder / f"checkpoints_{epochs}", keep_last=3)
    callbacks = {"no checkpoints": None, "one at every update": saving}
    steps = updates * STEPS * ENVS
    candidates = {
        name: lambda name=name: agents[name].learn(steps, callbacks[name], reset_num_timesteps=False) for name in agents
    }
    times = alternate(candidates, rounds, 1)
    slower = ratio(times, "one at every update", "no checkpoints")
    rows = [
        [name, f"{steps / np.median(seconds):,.0f}", f"{slower - 1:.1%}" if name in list(agents)[1:] else ""]
        for name, seconds in times.items()
    ]
    title = f"Training, {ENVS} x {STEPS} steps, {epochs} epochs of minibatches of {batch_size}"
    return show_table(title, ["", "steps/s", "time lost"], rows)


def training_agent(batch_size: int, epochs: int) -> DistributionalPPO:
    settings = {"n_steps": STEPS, "batch_size": batch_size, "n_epochs": epochs, "seed": 0, "device": "cpu"}
    settings["drift_kit"] = False
    agent = DistributionalPPO("MlpLstmPolicy", make_vec_env("CartPole-v1", ENVS, seed=0), **settings)
    return agent.learn(2 * STEPS * ENVS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder if not given")
    parser.add_argument("--quick", action="store_true", help="a few seconds, and no file of results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rounds, repeats = (5, 2) if args.quick else (args.rounds, args.repeats)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        sections = [files_section(Path(folder), rounds, repeats)]
        # The agent's own minibatches and epochs, and those of throughput.py, which are the fewest anyone uses.
        for updates, batch_size, epochs in ((2, 64, 10), (8, 256, 4)):
            turns = 1 if args.quick else updates
            sections.append(training_section(Path(folder), rounds, turns, batch_size, epochs))
    if not args.quick:
        write_result("checkpoint", " ".join(["python", *sys.argv]), sections)


if __name__ == "__main__":
    main()
