"""Population-based training (PBT): weak members copy better ones (exploit) and mutate hyper-parameters (explore)."""

from driftproof._requirements import require

require("driftproof.pbt", "rl", "gymnasium", "pydantic", "stable_baselines3")

from driftproof.pbt.backends import Backend, CannotStartError, InlineBackend, ProcessBackend
from driftproof.pbt.config import check_against
from driftproof.pbt.explore import ExploreMethod, History
from driftproof.pbt.member import Trainee, mean_reward
from driftproof.pbt.population import Decision, PopulationMember
from driftproof.pbt.runner import PBTRunner
from driftproof.pbt.scheduler import PBTScheduler
from driftproof.pbt.stores import CheckpointFormat, FolderStore, MemoryStore, TreeStore
from driftproof.runs.events import Event, append_events, read_events
from driftproof.runs.folder import FolderTakenError
from driftproof.runs.metrics import read_metrics
from driftproof.settings.population import HyperparamConfig, PBTConfig

__all__ = [
    "Backend",
    "CannotStartError",
    "CheckpointFormat",
    "Decision",
    "Event",
    "ExploreMethod",
    "FolderStore",
    "FolderTakenError",
    "History",
    "HyperparamConfig",
    "InlineBackend",
    "MemoryStore",
    "PBTConfig",
    "PBTRunner",
    "PBTScheduler",
    "PopulationMember",
    "ProcessBackend",
    "Trainee",
    "TreeStore",
    "append_events",
    "check_against",
    "mean_reward",
    "read_events",
    "read_metrics",
]
