"""``population_state.json`` to the last value: what a file must hold before anything is made of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Protocol, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, model_validator

from driftproof.runs.ranking import ranking

VERSION = 2
CheckpointFormat: TypeAlias = Literal["v2_full_parameters", "v1_policy_only"]
"""What ``agent.get_parameters()`` returns, or no more than the policy's state dict."""
Name: TypeAlias = Annotated[str, StringConstraints(max_length=200)]
"""Checked where a search is made of it."""
MAX_MEMBERS = 4096
"""Of a population that is read from a file."""
MAX_COUNT = 2**53
"""Of steps and updates: what a double still counts one by one."""

Count: TypeAlias = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Id: TypeAlias = Annotated[int, Field(ge=0, lt=MAX_MEMBERS)]
Number: TypeAlias = Annotated[float, Field(allow_inf_nan=False)]
MAX_PERFORMANCE = 1e100
"""Beyond it a member counts as diverged: differences and squares of performances must stay finite."""
Performance: TypeAlias = Annotated[float, Field(ge=-MAX_PERFORMANCE, le=MAX_PERFORMANCE)]
Value: TypeAlias = bool | Annotated[int, Field(ge=-(2**63), lt=2**64)] | Number | str | None
"""Of a hyper-parameter."""
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
    """A part of a file: nothing of another kind, and nothing that is not known."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=True)


class SavedHyperparam(Saved):
    """One that is searched; see :class:`driftproof.pbt.HyperparamConfig`."""

    name: str
    min_value: int | Number | None
    max_value: int | Number | None
    values: list[Value] | None
    perturbation_factor: Number
    resample_probability: Number
    is_log_scale: bool
    is_whole: bool | None


class SavedConfig(Saved):
    """The search; see :class:`driftproof.pbt.PBTConfig`."""

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
    """Where one member is in its training."""

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
    """Where one member is in its training."""

    @property
    def file(self) -> str | None:
        """Its checkpoint; ``None``: it has not reported yet."""

    @property
    def performance(self) -> float | None:
        """At its last report; ``None``: its training diverged."""


def best_first(members: Sequence[Place], mode: str) -> list[int]:
    """Members that have been saved, the best at their last report first; of equals, the first.

    Args:
        members: All of them.
        mode: ``"max"`` or ``"min"``: which performance is the best.
    """
    saved = [i for i, place in enumerate(members) if place.file is not None]
    return [saved[i] for i in ranking([members[i].performance for i in saved], mode == "min")]


class SavedBeforeExploit(Saved):
    hyperparams: Values
    performance: Performance | None
    interval_start: Count


class SavedMember(Saved):
    """What the scheduler knows of one member; see :class:`driftproof.pbt.PopulationMember`."""

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
            raise ValueError("an exploit can be undone, and the lineage knows of none")
        if self.baseline is not None and self.baseline[1] is None:
            raise ValueError("the baseline has no performance")
        return self


class SavedEvent(Saved):
    """See :class:`driftproof.pbt.Event`."""

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
    """See :class:`driftproof.pbt.pb2.Observation`."""

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
        # Beyond what pydantic can compare to, and an even increment is no generator.
        if max(self.state, self.inc) >= 2**128 or self.inc % 2 == 0:
            raise ValueError("is no state of PCG64")
        return self


class SavedGenerator(Saved):
    """State of NumPy's PCG64."""

    bit_generator: Literal["PCG64"]
    state: SavedGeneratorNumbers
    has_uint32: Annotated[int, Field(ge=0, le=1)]
    uinteger: Annotated[int, Field(ge=0, lt=2**32)]


class SavedScheduler(Saved):
    """See :meth:`driftproof.pbt.PBTScheduler.state_dict`."""

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
                raise ValueError(f"member {index} has taken over from a member that there is not")
        if any(max(event.member, event.donor or 0) >= size for event in self.events):
            raise ValueError("an event is of a member that there is not")
        return self

    def all_hyperparams(self) -> Iterator[dict[str, Value]]:
        """Wherever a member's are kept."""
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
                raise ValueError(f"it has {found} members, and population_size is {size}")
        for index, place in enumerate(self.members):
            is_begun = place.updates > 0 and place.file is None and not place.is_anew
            if is_begun or place.updates > self.total_updates:
                raise ValueError(
                    f"member {index} has done {place.updates} of {self.total_updates} updates, in {place.file!r}"
                )
        return self

    @property
    def ranking(self) -> list[int]:
        """Members that have been saved, the best at their last report first."""
        return best_first(self.members, self.config.metric_mode)
