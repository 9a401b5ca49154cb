"""Schema of ``population_state.json``: every value is validated before it is used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Protocol, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, model_validator

from driftproof.runs.ranking import ranking

VERSION = 2
CheckpointFormat: TypeAlias = Literal["v2_full_parameters", "v1_policy_only"]
"""``agent.get_parameters()``, or only the policy's state dict."""
Name: TypeAlias = Annotated[str, StringConstraints(max_length=200)]
"""Name of a method, validated by ``PBTConfig``."""
MAX_MEMBERS = 4096
"""Largest population that is read from a file."""
MAX_COUNT = 2**53
"""Largest number of steps or updates: a double counts exactly up to here."""

Count: TypeAlias = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Id: TypeAlias = Annotated[int, Field(ge=0, lt=MAX_MEMBERS)]
Number: TypeAlias = Annotated[float, Field(allow_inf_nan=False)]
MAX_PERFORMANCE = 1e100
"""A member with a larger performance counts as diverged: differences and squares must stay finite."""
Performance: TypeAlias = Annotated[float, Field(ge=-MAX_PERFORMANCE, le=MAX_PERFORMANCE)]
Value: TypeAlias = bool | Annotated[int, Field(ge=-(2**63), lt=2**64)] | Number | str | None
"""Value of a hyper-parameter."""
Values: TypeAlias = Annotated[dict[str, Value], Field(max_length=1000)]


def _is_report(pair: list[Any]) -> list[Any]:
    if not isinstance(pair[0], int) or isinstance(pair[1], bool):
        raise ValueError("must be a step and a performance")
    return pair


Report: TypeAlias = Annotated[
    list[Count | Performance | None], Field(min_length=2, max_length=2), AfterValidator(_is_report)
]
"""Step and performance."""
MemberFile: TypeAlias = Annotated[str, StringConstraints(pattern=r"^member_[0-9]{4,9}_[0-9]{9,18}\.zip$")]


class Saved(BaseModel):
    """Part of a file: strict types, unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=True)


class SavedHyperparam(Saved):
    """A searched hyper-parameter; see :class:`driftproof.pbt.HyperparamConfig`."""

    name: str
    min_value: int | Number | None
    max_value: int | Number | None
    values: list[Value] | None
    perturbation_factor: Number
    resample_probability: Number
    is_log_scale: bool
    is_whole: bool | None


class SavedConfig(Saved):
    """Configuration of the search; see :class:`driftproof.pbt.PBTConfig`."""

    population_size: Annotated[int, Field(ge=2, le=MAX_MEMBERS)]
    perturbation_interval: Count
    hyperparams: Annotated[list[SavedHyperparam], Field(max_length=1000)]
    exploit_method: Name
    explore_method: Name
    truncation_ratio: Number
    checkpoint_dir: Annotated[str, StringConstraints(max_length=4096)] | None
    metric_name: str
    metric_mode: Literal["max", "min"]
    ready_percentage: Number
    min_ready_members: Count
    ready_check_max_wait: Count
    optimizer_exploit_strategy: Name
    explore_strong: bool


class SavedPlace(Saved):
    """Training progress of one member."""

    hyperparams: Values
    updates: Count
    file: MemberFile | None
    offered: MemberFile | None
    donor: MemberFile | None
    is_anew: bool
    waits: bool
    performance: Performance | None
    not_taken_over: str | None


class Place(Protocol):
    """Training progress of one member."""

    @property
    def file(self) -> str | None:
        """File name of its checkpoint; ``None``: it has not reported yet."""

    @property
    def performance(self) -> float | None:
        """Performance at its last report; ``None``: its training diverged."""


def best_first(members: Sequence[Place], mode: str) -> list[int]:
    """Saved members by the performance of their last report, best first; ties in the order of ids.

    Args:
        members: All members.
        mode: ``"max"`` or ``"min"``: whether a higher or a lower performance is better.
    """
    saved = [i for i, place in enumerate(members) if place.file is not None]
    return [saved[i] for i in ranking([members[i].performance for i in saved], mode == "min")]


class SavedBeforeExploit(Saved):
    hyperparams: Values
    performance: Performance | None
    interval_start: Count


class SavedMember(Saved):
    """The scheduler's record of one member; see :class:`driftproof.pbt.PopulationMember`."""

    id: Id
    hyperparams: Values
    performance: Performance | None
    step: Count
    reports: Count
    history: list[Report]
    lineage: list[Annotated[list[Count], Field(min_length=2, max_length=2)]]
    checkpoint_format: CheckpointFormat | None
    checkpoint_step: Count | None
    checkpoint_hyperparams: Values | None
    interval_start: Count
    tries: Count
    before_exploit: SavedBeforeExploit | None
    baseline: Report | None
    unobserved: bool

    @model_validator(mode="after")
    def _has_exploited(self) -> SavedMember:
        if self.before_exploit is not None and not self.lineage:
            raise ValueError("before_exploit is set, but the lineage has no exploit")
        if self.baseline is not None and self.baseline[1] is None:
            raise ValueError("the baseline has no performance")
        return self


class SavedEvent(Saved):
    """An event; see :class:`driftproof.pbt.Event`."""

    kind: Literal["start", "exploit", "explore", "replace", "undo", "restart"]
    member: Id
    step: Count
    donor: Id | None = None
    donor_step: Count | None = None
    format: str | None = None
    mutated: dict[str, Annotated[list[Value], Field(min_length=2, max_length=2)]] = Field(
        default_factory=dict, max_length=1000
    )
    hyperparams: Values = Field(default_factory=dict)
    detail: str = ""


class SavedEvents(Saved):
    """``population.json``."""

    format: Literal["driftproof population"]
    version: Literal[1]
    events: list[SavedEvent]


class SavedObservation(Saved):
    """An observation; see :class:`driftproof.pbt.explore.Observation`."""

    time: Annotated[float, Field(ge=0, le=MAX_COUNT)]
    hyperparams: Values
    change: Annotated[float, Field(ge=-1e120, le=1e120)] | None


class SavedCounts(Saved):
    judged: Count
    improved: Count
    transferred: Count
    not_transferred: Count


class SavedGeneratorNumbers(Saved):
    state: Annotated[int, Field(ge=0)]
    inc: Annotated[int, Field(ge=0)]

    @model_validator(mode="after")
    def _fit(self) -> SavedGeneratorNumbers:
        # Bounds that are too large for pydantic; and the increment of PCG64 is always odd.
        if max(self.state, self.inc) >= 2**128 or self.inc % 2 == 0:
            raise ValueError("is not a state of PCG64")
        return self


class SavedGenerator(Saved):
    """State of NumPy's PCG64."""

    bit_generator: Literal["PCG64"]
    state: SavedGeneratorNumbers
    has_uint32: Annotated[int, Field(ge=0, le=1)]
    uinteger: Annotated[int, Field(ge=0, lt=2**32)]


class SavedScheduler(Saved):
    """State of the scheduler; see :meth:`driftproof.pbt.PBTScheduler.state_dict`."""

    members: Annotated[list[SavedMember], Field(max_length=MAX_MEMBERS)]
    events: list[SavedEvent]
    observations: list[SavedObservation]
    counts: SavedCounts
    generator: SavedGenerator

    @model_validator(mode="after")
    def _knows_its_members(self) -> SavedScheduler:
        size = len(self.members)
        for index, member in enumerate(self.members):
            if member.id != index:
                raise ValueError(f"member {index} has the id {member.id}")
            if any(donor >= size for _, donor in member.lineage):
                raise ValueError(f"the lineage of member {index} names a member that does not exist")
        if any(max(event.member, event.donor or 0) >= size for event in self.events):
            raise ValueError("an event names a member that does not exist")
        return self

    def all_hyperparams(self) -> Iterator[dict[str, Value]]:
        """All hyper-parameters in the state: current, stored, before an exploit, and observed ones."""
        for member in self.members:
            yield member.hyperparams
            if member.checkpoint_hyperparams is not None:
                yield member.checkpoint_hyperparams
            if member.before_exploit is not None:
                yield member.before_exploit.hyperparams
        for observation in self.observations:
            yield observation.hyperparams


class SavedPopulation(Saved):
    """The whole file."""

    version: Literal[2]
    saves: Count
    seed: Annotated[int, Field(ge=0)]
    total_updates: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    synchronous: bool
    config: SavedConfig
    scheduler: SavedScheduler
    members: Annotated[list[SavedPlace], Field(max_length=MAX_MEMBERS)]

    @model_validator(mode="after")
    def _fit_together(self) -> SavedPopulation:
        size = self.config.population_size
        for found in (len(self.members), len(self.scheduler.members)):
            if found != size:
                raise ValueError(f"it has {found} members, but population_size is {size}")
        for index, place in enumerate(self.members):
            is_begun = place.updates > 0 and place.file is None and not place.is_anew
            if is_begun or place.updates > self.total_updates:
                raise ValueError(
                    f"member {index} has done {place.updates} of {self.total_updates} updates, in {place.file!r}"
                )
        return self

    @property
    def ranking(self) -> list[int]:
        """Ids of saved members by the performance of their last report, best first."""
        return best_first(self.members, self.config.metric_mode)
