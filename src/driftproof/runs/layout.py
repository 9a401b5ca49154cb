"""Names of the files in a run folder, and the kind of run by which of them exist."""

from __future__ import annotations

import os
from pathlib import Path

from driftproof._files import RunFolderError

CONFIG = "config.yaml"
"""Settings of the run; a folder with this file is a run folder."""
OWNER = "owner.json"
"""Record that this user started the run."""
METRICS = "metrics.jsonl"
"""Logged metrics, one row per line."""
TENSORBOARD = "tensorboard"
"""The same metrics for TensorBoard."""
CHECKPOINTS = "checkpoints"
"""Checkpoints of a single agent."""
MEMBERS = "members"
"""Checkpoints of a population's members."""
POPULATION_STATE = "population_state.json"
"""Training state of a population."""
EVENTS = "population.json"
"""Events of a population's members."""
EVALUATION = "evaluation.json"
ATTACK_RESULTS = "attacks.json"
"""Results of evaluation under attack."""
PHASE_RESULTS = "phases.json"
"""Results of evaluation in every phase of the drift."""
SOURCES = "sources.json"
"""Data and code that the run was started with, when and where."""
SIGNALS = "signals.csv"
BACKTEST = "backtest.json"
REPORT = "report.html"
WRITTEN_IN_PLACE = (MEMBERS, CHECKPOINTS, TENSORBOARD, METRICS)
"""Files and folders that a run appends to or removes files from, never through a link. All others are replaced."""

RETURN = "rollout/ep_rew_mean"
LENGTH = "rollout/ep_len_mean"
SUCCESS = "rollout/success_rate"
"""Metrics of recent episodes, as Stable-Baselines3 names them."""

PHASE = "drift/phase"
"""Metric: phase of the environment's drift."""
ALARM = "drift/alarm"
"""Metric: whether the agent noticed a harmful change in an update."""
DRIFT_RETURN = "drift/return"
"""Mean return of the episodes that ended in a rollout, where the environment drifts."""
ALARMS = "drift/alarms"
LEVEL = "drift/level"
"""Metrics: alarms so far, and how far the agent's response to the last one has gone, an index of ``RESPONSES``."""
RESPONSES = ("none", "forgets and explores", "partly fresh weights", "fresh weights")
TRIAL = "drift/trial"
"""Metric: whether the agent tries weights that it has kept from an earlier phase."""
ANCHOR_MOVES = "drift/anchor_moves"
"""Metric: shifts of observations that the observation normaliser has followed so far."""


def is_population(folder: Path) -> bool:
    """Whether a run folder holds a population."""
    return os.path.lexists(folder / POPULATION_STATE)


def is_single(folder: Path) -> bool:
    """Whether a run folder holds a single agent."""
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
        raise RunFolderError(
            f"{path} is a link, which is not followed in a run folder; replace it by the file or folder it leads to"
        )
    return path
