"""The scheduler's record of each member, its decisions, and the metrics of a population."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, TypeAlias

from driftproof.pbt.earlier_names import EarlierMemberNames
from driftproof.pbt.stores import CheckpointFormat, TreeStore
from driftproof.runs.events import Event
from driftproof.runs.population_state import SavedMember


@dataclass
class PopulationMember(EarlierMemberNames):
    """The scheduler's record of one member."""

    id: int
    hyperparams: dict[str, Any]
    performance: float | None = None
    """Last reported performance; ``None``: not reported yet, or not finite. An exploit does not change it."""
    step: int = 0
    """Updates done, as last reported."""
    reports: int = 0
    history: list[tuple[int, float | None]] = field(default_factory=list)
    """Step and performance of the latest reports."""
    lineage: list[tuple[int, int]] = field(default_factory=list)
    """Step and donor of every exploit."""
    checkpoint_format: CheckpointFormat | None = None
    checkpoint_step: int | None = None
    checkpoint_hyperparams: dict[str, Any] | None = None
    """Hyper-parameters at the time of the stored parameters; the member's own may have changed since."""
    interval_start: int = 0
    """Step of the last decision."""
    tries: int = 0
    """Consecutive decisions that were postponed because too few members had reported."""
    before_exploit: dict[str, Any] | None = None
    """Values to restore if the last exploit is undone; ``None`` after the next report."""
    baseline: tuple[int, float] | None = None
    """Step and performance from which this interval's change is measured."""
    unobserved: bool = False
    """Whether its hyper-parameters are new and their effect unknown."""

    def state_dict(self) -> dict[str, Any]:
        state = asdict(self)
        state["history"] = [list(item) for item in self.history]
        state["lineage"] = [list(item) for item in self.lineage]
        state["baseline"] = None if self.baseline is None else list(self.baseline)
        return state

    @classmethod
    def of(cls, saved: SavedMember) -> PopulationMember:
        """A member from its saved :meth:`state_dict`."""
        values = saved.model_dump()
        values["history"] = [(step, performance) for step, performance in values["history"]]
        values["lineage"] = [(step, donor) for step, donor in values["lineage"]]
        values["baseline"] = None if values["baseline"] is None else tuple(values["baseline"])
        return cls(**values)


FormatOf: TypeAlias = Callable[[int], CheckpointFormat | None]
"""Returns the format of a member's stored parameters, by its id; ``None``: there are none."""


class Decision(NamedTuple):
    """A decision for a member.

    Attributes:
        donor: Id of the member whose parameters to copy; ``None``: it keeps its own.
        hyperparams: Hyper-parameters to train with next.
    """

    donor: int | None
    hyperparams: dict[str, Any]


class Fetched:
    """Fetches parameters from a store, and keeps the last ones.

    Args:
        store: The store.
    """

    def __init__(self, store: TreeStore) -> None:
        self._store = store
        self.tree: Any = None
        self.format: CheckpointFormat | None = None

    def format_of(self, member: int) -> CheckpointFormat | None:
        try:
            self.tree, self.format = self._store.get(member)
        except KeyError:
            self.tree = self.format = None
        return self.format


def vital_signs(
    statistics: Mapping[str, Any], members: Sequence[PopulationMember], events: Sequence[Event]
) -> dict[str, float]:
    """Metrics of a population, logged after each decision.

    Args:
        statistics: The scheduler's ``statistics()``.
        members: All members.
        events: All events.
    """
    finite = [member.performance for member in members if member.performance is not None]
    spread = statistics["diversity"]
    signs: dict[str, float | None] = {
        "best_performance": statistics["best_performance"],
        "mean_performance": sum(finite) / len(finite) if finite else None,
        "diversity/performance": spread["performance"],
        "exploits": statistics["exploits"],
        "exploit_success_rate": statistics["exploit_success_rate"],
        "transfer_success_rate": statistics["transfer_success_rate"],
        "restarts": sum(event.kind == "restart" for event in events),
    }
    signs |= {f"diversity/{name}": value for name, value in spread["hyperparams"].items()}
    signs |= {f"format/{name}": count for name, count in statistics["checkpoint_formats"].items()}
    return {f"population/{name}": float(value) for name, value in signs.items() if value is not None}
