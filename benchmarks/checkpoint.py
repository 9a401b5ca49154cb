"""Time to save and load a checkpoint: this library against the least that can be done, taking turns.

    python benchmarks/checkpoint.py                # half a minute
    python benchmarks/checkpoint.py --quick        # a few seconds
    python benchmarks/checkpoint.py --folder /mnt/disk

A million parameters with the two moments of Adam, 12 MB. Saving is compared to `safetensors.torch.save_file` and fsync,
which writes the same tensors, without the rest of the tree, without checksums, and over the old file; loading to
reading the bytes and one SHA-256 over them. Ratios are of turns next to each other.
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

from driftproof.state import files
from driftproof.state.tree import flatten


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
    if not args.quick:
        write_result("checkpoint", " ".join(["python", *sys.argv]), sections)


if __name__ == "__main__":
    main()
