"""Forks processes that save in a loop, for tests to kill.

    python -m tests.state.saver FOLDER

For each step on its input it forks a process that saves from this step on and writes each step after its save. It
writes the id of that process, and "dead" once the process has ended.
"""

from __future__ import annotations

import os
import sys

import torch

from driftproof.state.store import CheckpointStore


def tree(step: int) -> dict[str, torch.Tensor]:
    return {"step": torch.tensor(step), "weights": torch.full((50_000,), float(step))}


def say(line: object) -> None:
    """Write a line in one piece: `print` writes its newline apart with PYTHONUNBUFFERED, and may be killed between."""
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


def save_for_ever(folder: str, step: int) -> None:
    store = CheckpointStore(folder, keep_last=3)
    while True:
        store.save(tree(step), step, score=float(-step))
        say(step)
        step += 1


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            save_for_ever(sys.argv[1], int(line))
        say(f"process {child}")
        os.waitpid(child, 0)
        say("dead")


if __name__ == "__main__":
    main()
