"""Run folders: layout, locks, atomic writes, metrics, events, and which member is best.

Used by single runs, populations, the command line and reports. Importing it imports no torch: commands look for run
folders before they need it.
"""

from driftproof.runs.layout import (
    ATTACK_RESULTS,
    CHECKPOINTS,
    CONFIG,
    EVALUATION,
    EVENTS,
    LENGTH,
    MEMBERS,
    METRICS,
    OWNER,
    POPULATION_STATE,
    REPORT,
    RETURN,
    SIGNALS,
    SUCCESS,
    TENSORBOARD,
    has_saved,
    is_population,
    is_single,
    own_file,
)

__all__ = [
    "ATTACK_RESULTS",
    "CHECKPOINTS",
    "CONFIG",
    "EVALUATION",
    "EVENTS",
    "LENGTH",
    "MEMBERS",
    "METRICS",
    "OWNER",
    "POPULATION_STATE",
    "REPORT",
    "RETURN",
    "SIGNALS",
    "SUCCESS",
    "TENSORBOARD",
    "has_saved",
    "is_population",
    "is_single",
    "own_file",
]
