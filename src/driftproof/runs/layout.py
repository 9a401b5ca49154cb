"""Names of the files in a run folder, and what can be told from which of them are there."""

from __future__ import annotations

import os
from pathlib import Path

from driftproof._files import RunFolderError

CONFIG = "config.yaml"
"""Settings of the run; makes a folder one of a run."""
OWNER = "owner.json"
"""Says that this user started the run."""
METRICS = "metrics.jsonl"
"""What agents logged, row by row."""
TENSORBOARD = "tensorboard"
"""The same, for TensorBoard."""
CHECKPOINTS = "checkpoints"
"""Of a single agent."""
MEMBERS = "members"
"""Checkpoints of a population's members."""
POPULATION_STATE = "population_state.json"
"""Where a population is in its training."""
EVENTS = "population.json"
"""What happened to its members."""
EVALUATION = "evaluation.json"
ATTACK_RESULTS = "attacks.json"
"""Evaluation under attack."""
SIGNALS = "signals.csv"
REPORT = "report.html"
WRITTEN_IN_PLACE = (MEMBERS, CHECKPOINTS, TENSORBOARD, METRICS)
"""What a run appends to and removes files from, never by way of a link. All other files are replaced."""

RETURN = "rollout/ep_rew_mean"
LENGTH = "rollout/ep_len_mean"
SUCCESS = "rollout/success_rate"
"""Metrics of recent episodes, as Stable-Baselines3 names them."""


def is_population(folder: Path) -> bool:
    """Whether it holds more than one agent."""
    return os.path.lexists(folder / POPULATION_STATE)


def is_single(folder: Path) -> bool:
    """Whether it holds one agent that has been saved."""
    return os.path.lexists(folder / CHECKPOINTS)


def has_saved(folder: Path) -> bool:
    """Whether a run has saved an agent."""
    return is_population(folder) or any((folder / CHECKPOINTS).glob("*.zip"))


def own_file(folder: Path, name: str) -> Path:
    """A file or folder in a run folder, to be read or written.

    Raises:
        RunFolderError: It is a link, which may lead out of the folder to any file of the user.
    """
    path = folder / name
    if path.is_symlink():
        raise RunFolderError(f"{path} is a link, which a run does not follow; remove it, or put what it leads to there")
    return path
