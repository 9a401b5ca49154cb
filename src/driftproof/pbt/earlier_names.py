"""Method and attribute names of the earlier system's scheduler, so that loops written for it still run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from driftproof.runs.events import Event

if TYPE_CHECKING:
    from driftproof.pbt.population import PopulationMember
    from driftproof.settings.population import PBTConfig


class EarlierMemberNames:
    """Earlier attribute names of a population's member."""

    id: int
    checkpoint_path: str | None = None
    """File with the member's parameters; ``None``: it has none, or the store keeps no files."""

    @property
    def member_id(self) -> int:
        """The same as ``id``."""
        return self.id


class EarlierSchedulerNames:
    """Earlier method names of the scheduler."""

    config: PBTConfig
    members: list[PopulationMember]
    events: list[Event]

    def is_ready(self, member: int | PopulationMember) -> bool:
        """Whether a member's perturbation interval is over."""
        raise NotImplementedError

    @property
    def population(self) -> list[PopulationMember]:
        """The same as ``members``."""
        return self.members

    def initialize_population(
        self, initial_hyperparams: Sequence[Mapping[str, Any]] | None = None
    ) -> list[PopulationMember]:
        """The members, with initial hyper-parameters that the constructor has drawn or that are given here.

        Args:
            initial_hyperparams: For each member, a value for every searched hyper-parameter, within its range.

        Raises:
            ValueError: The number of members, a name or a value is wrong.
            RuntimeError: Members have reported already.
        """
        if initial_hyperparams is None:
            return self.members
        if len(initial_hyperparams) != len(self.members):
            raise ValueError(
                f"Invalid initial_hyperparams length: {len(initial_hyperparams)}; must be population_size, which is "
                f"{len(self.members)}"
            )
        if any(member.reports for member in self.members):
            raise RuntimeError("initial_hyperparams can only be set before the first member has reported")
        for index, given in enumerate(initial_hyperparams):
            self._check_initial(index, given)
        starts = {event.member: i for i, event in enumerate(self.events) if event.kind == "start"}
        for member, given in zip(self.members, initial_hyperparams, strict=True):
            member.hyperparams = dict(given)
            self.events[starts[member.id]] = Event("start", member.id, 0, hyperparams=dict(given))
        return self.members

    def should_exploit_and_explore(self, member: int | PopulationMember) -> bool:
        """The same as :meth:`is_ready`: whether it is time to call ``exploit_and_explore``."""
        return self.is_ready(member)

    def get_stats(self) -> dict[str, float]:
        """Metrics for a log, named ``pbt/...``; ``statistics()`` has more.

        Performances are 0 while no member has reported one.
        """
        performances = [member.performance for member in self.members if member.performance is not None]
        kinds = [event.kind for event in self.events]
        taken = kinds.count("exploit") + kinds.count("replace")
        numbers = np.array(performances or [0.0])
        return {
            "pbt/population_size": len(self.members),
            "pbt/ready_members": len(performances),
            "pbt/mean_performance": float(numbers.mean()),
            "pbt/std_performance": float(numbers.std()),
            "pbt/min_performance": float(numbers.min()),
            "pbt/max_performance": float(numbers.max()),
            "pbt/exploitation_count": taken,
            "pbt/exploration_count": taken + kinds.count("explore"),
        }

    def _check_initial(self, index: int, given: Mapping[str, Any]) -> None:
        searched = {item.name: item for item in self.config.hyperparams}
        if wrong := sorted(set(given) ^ set(searched)):
            raise ValueError(
                f"initial_hyperparams[{index}] must have exactly the searched hyper-parameters "
                f"({', '.join(searched) or 'none'}); unknown or missing: {', '.join(map(repr, wrong))}"
            )
        for name, value in given.items():
            if not searched[name].allows(value):
                raise ValueError(f"initial_hyperparams[{index}]: {name}={value!r} is outside the search space")


def stored_path(store: object, member_id: int) -> str | None:
    """Path of a member's parameters, if the store keeps files."""
    path = getattr(store, "path", None)
    return None if path is None else str(path(member_id))
