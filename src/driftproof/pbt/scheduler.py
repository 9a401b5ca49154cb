"""Decides about exploit and explore: which member copies which, with which hyper-parameters."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from numbers import Integral
from typing import Any

import numpy as np
from pydantic import ValidationError

from driftproof._arguments import check_count
from driftproof._files import described
from driftproof._registry import EXPLORE_METHODS
from driftproof._trust import Trust
from driftproof.pbt.earlier_names import EarlierSchedulerNames, stored_path
from driftproof.pbt.explore import MAX_OBSERVATIONS, ExploreMethod, History, Observation, sample, to_unit
from driftproof.pbt.population import Decision, Fetched, FormatOf, PopulationMember
from driftproof.pbt.stores import CheckpointFormat, FolderStore, MemoryStore, TreeStore
from driftproof.runs.events import Event, EventKind
from driftproof.runs.population_state import SavedScheduler
from driftproof.runs.ranking import ranking
from driftproof.settings.population import PBTConfig

_HISTORY = 200
"""Reports kept per member."""


class PBTScheduler(EarlierSchedulerNames):
    """Decides about exploit and explore for the members of a population.

    Members have the ids 0 to ``population_size - 1``. A training loop reports each member's performance
    (:meth:`update_performance`), and asks for its next decision (:meth:`exploit_and_explore`), in any order. Decisions
    are determined by the configuration, the seed, and the calls so far.

    Args:
        config: Configuration of the search.
        seed: Seed of the scheduler's own random generator. ``None``: a random one.
        store: Store of the members' parameters. ``None``: in ``config.checkpoint_dir``, or in memory.
        trust: Modules that may be imported if ``config.explore_method`` is a text ``module:Class``.
    """

    def __init__(
        self,
        config: PBTConfig,
        seed: int | None = None,
        *,
        store: TreeStore | None = None,
        trust: Trust | None = None,
    ) -> None:
        self._explore: ExploreMethod = EXPLORE_METHODS.load(config.explore_method, trust)(config)
        if store is None:
            store = MemoryStore() if config.checkpoint_dir is None else FolderStore(config.checkpoint_dir)
        self.config = config
        self.store = store
        self.members: list[PopulationMember] = []
        self.events: list[Event] = []
        """All events, oldest first."""
        self._warned_of_state_dicts = False
        self._rng = np.random.default_rng(seed)
        self._observations: list[Observation] = []
        self._counts = {"judged": 0, "improved": 0, "transferred": 0, "not_transferred": 0}
        # Performances as arrays for ranking: larger is better, -inf the worst.
        self._scores = np.full(config.population_size, -math.inf)
        self._reported = np.zeros(config.population_size, dtype=bool)
        for index in range(config.population_size):
            drawn = {item.name: sample(item, self._rng) for item in config.hyperparams}
            self.members.append(PopulationMember(index, drawn))
            self.events.append(Event("start", index, 0, hyperparams=dict(drawn)))

    def initial_hyperparams(self) -> list[dict[str, Any]]:
        """Initial hyper-parameters of each member; the same at every call."""
        starts = [event for event in self.events if event.kind == "start"]
        return [dict(event.hyperparams) for event in starts]

    def update_performance(
        self,
        member: int | PopulationMember,
        performance: float | None,
        step: int,
        model_parameters: Any = None,
        model_state_dict: Any = None,
    ) -> None:
        """Report a member's performance, and store its parameters if given.

        Args:
            member: The member, or its id.
            performance: Its performance; ``None`` and values that are not finite count as worst.
            step: Updates that it has done in total, not environment steps.
            model_parameters: ``agent.get_parameters()``, to be stored. Without them, other members copy those that were
                given before.
            model_state_dict: Deprecated: the policy's state dict only. Does not replace ``model_parameters`` that were
                given before.
        """
        member = self._member(member)
        check_count("step", step)
        value = None if performance is None else float(performance)
        if value is not None and not math.isfinite(value):
            value = None
        if model_state_dict is not None and not self._warned_of_state_dicts:
            self._warned_of_state_dicts = True
            warnings.warn(
                "model_state_dict= carries a policy without its optimizer, gradient scaling, KL penalty, return scale "
                "and normaliser; give model_parameters=agent.get_parameters()",
                FutureWarning,
                stacklevel=2,
            )
        if model_parameters is not None:
            self._put(member, model_parameters, step, "v2_full_parameters")
        elif model_state_dict is not None and member.checkpoint_format != "v2_full_parameters":
            self._put(member, model_state_dict, step, "v1_policy_only")
        self._judge(member, value)
        member.performance = value
        member.step = int(step)
        member.reports += 1
        member.history = [*member.history[1 - _HISTORY :], (member.step, value)]
        # A member that was restarted from older parameters trains a whole interval again.
        member.interval_start = min(member.interval_start, member.step)
        if member.baseline is None and value is not None:
            member.baseline = (member.step, value)
        self._rank(member)

    def is_ready(self, member: int | PopulationMember) -> bool:
        """Whether a member's perturbation interval is over."""
        member = self._member(member)
        return member.step - member.interval_start >= self.config.perturbation_interval

    def exploit_and_explore(
        self, member: int | PopulationMember
    ) -> tuple[Any | None, dict[str, Any], CheckpointFormat | None]:
        """:meth:`decide`, with the donor's parameters from the store.

        Returns:
            The donor's parameters, or ``None`` to keep its own; the new hyper-parameters; the format of the parameters.
        """
        fetched = Fetched(self.store)
        decision = self.decide(member, fetched.format_of)
        return fetched.tree, decision.hyperparams, fetched.format if decision.donor is not None else None

    def replace(self, member: int | PopulationMember) -> tuple[Any, dict[str, Any], CheckpointFormat | None]:
        """:meth:`decide_replacement`, with the donor's parameters from the store."""
        fetched = Fetched(self.store)
        decision = self.decide_replacement(member, fetched.format_of)
        return fetched.tree, decision.hyperparams, fetched.format

    def decide(self, member: int | PopulationMember, format_of: FormatOf) -> Decision:
        """Decide what a member does next, if its interval is over and enough members have reported.

        Args:
            member: The member, or its id.
            format_of: Returns the format of a member's stored parameters, by its id; ``None``: there are none.

        Returns:
            The donor, and a mutated copy of its hyper-parameters; or no donor, and the member's own hyper-parameters
            (mutated with ``explore_strong``, unchanged otherwise).
        """
        member = self._member(member)
        if not self.is_ready(member) or not self._population_is_ready(member):
            return Decision(None, dict(member.hyperparams))
        member.tries = 0
        self._observe(member)
        if (found := self._choose(self._donors(member), member, format_of)) is not None:
            return self._exploit(member, *found, "exploit")
        member.interval_start = member.step
        if self.config.explore_strong:
            own = dict(member.hyperparams)
            member.hyperparams = self._explored(member, own)
            member.unobserved = True
            self._record("explore", member, own)
        return Decision(None, dict(member.hyperparams))

    def decide_replacement(self, member: int | PopulationMember, format_of: FormatOf) -> Decision:
        """Replace a lost member by a copy of one of the best, whatever its interval and performance.

        Raises:
            RuntimeError: No other member can be the donor.
        """
        member = self._member(member)
        others = [i for i in self.ranking() if i != member.id and self.members[i].performance is not None]
        best = self._truncated(len(others))
        found = self._choose(others[:best], member, format_of) or self._choose(others[best:], member, format_of)
        if found is None:
            raise RuntimeError(
                f"member {member.id} cannot be replaced: no other member has both a performance and parameters"
            )
        return self._exploit(member, *found, "replace")

    def offer(self, member: int | PopulationMember, step: int, format: CheckpointFormat = "v2_full_parameters") -> None:
        """Record that other members may copy a member's current parameters, which the caller keeps.

        Args:
            member: The member, or its id.
            step: Updates that it has done.
            format: Format of the parameters.
        """
        member = self._member(member)
        member.checkpoint_format, member.checkpoint_step = format, int(step)
        member.checkpoint_hyperparams = dict(member.hyperparams)

    def report_transfer(self, member: int | PopulationMember, ok: bool) -> None:
        """Report whether a member could load the parameters of its last exploit.

        If not, the exploit is undone: the member has its former hyper-parameters again, and is ready for a decision.
        """
        member = self._member(member)
        self._counts["transferred" if ok else "not_transferred"] += 1
        before = member.before_exploit
        if ok or before is None:
            return
        member.before_exploit = None
        taken = dict(member.hyperparams)
        _, donor = member.lineage.pop()
        member.hyperparams = dict(before["hyperparams"])
        member.interval_start = before["interval_start"]
        member.baseline, member.unobserved = None, False
        self._record("undo", member, taken, donor=donor, detail="the parameters could not be taken over")

    def ranking(self) -> list[int]:
        """Ids of the members that have reported, best first; of equals, the lower id first."""
        reported = np.flatnonzero(self._reported)
        return [int(reported[i]) for i in ranking(self._scores[reported])]

    def statistics(self) -> dict[str, Any]:
        """Statistics of the population as plain values; rates are ``None`` while there is nothing to count."""
        taken = [event for event in self.events if event.kind in ("exploit", "replace")]
        formats: dict[str, int] = {}
        for event in taken:
            formats[str(event.format)] = formats.get(str(event.format), 0) + 1
        counts = self._counts
        transfers = counts["transferred"] + counts["not_transferred"]
        finite = [member.performance for member in self.members if member.performance is not None]
        order = self.ranking()
        best = self.members[order[0]] if order else None
        return {
            "exploits": len(taken),
            "explores": sum(event.kind == "explore" for event in self.events),
            "exploit_success_rate": counts["improved"] / counts["judged"] if counts["judged"] else None,
            "checkpoint_formats": formats,
            "transfers": transfers,
            "transfer_success_rate": counts["transferred"] / transfers if transfers else None,
            "diversity": {
                "performance": float(np.std(finite)) if finite else None,
                "hyperparams": {item.name: self._spread(item.name) for item in self.config.hyperparams},
            },
            "best_member": None if best is None or best.performance is None else best.id,
            "best_performance": None if best is None else best.performance,
            "lineage": {member.id: list(member.lineage) for member in self.members},
        }

    def state_dict(self) -> dict[str, Any]:
        """The whole state except for stored parameters, as JSON-compatible values."""
        return {
            "members": [member.state_dict() for member in self.members],
            "events": [event.as_dict() for event in self.events],
            "observations": [asdict(item) for item in self._observations],
            "counts": dict(self._counts),
            "generator": self._rng.bit_generator.state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a scheduler; all of it, or nothing if it is invalid.

        Raises:
            ValueError: The state is damaged, or has another number of members or other hyper-parameters.
        """
        try:
            saved = SavedScheduler.model_validate(dict(state))
        except ValidationError as error:
            raise ValueError(f"not a state of a PBTScheduler: {described(error)}") from error
        if len(saved.members) != self.config.population_size:
            raise ValueError(
                f"the state has {len(saved.members)} members, but population_size is {self.config.population_size}"
            )
        names = {item.name for item in self.config.hyperparams}
        for held in saved.all_hyperparams():
            if set(held) != names:
                raise ValueError(
                    f"the state's members have the hyper-parameters {sorted(held)}, and the configuration "
                    f"{sorted(names)}"
                )
        members = [PopulationMember.of(member) for member in saved.members]
        events = [Event.of(event) for event in saved.events]
        observations = [Observation(**item.model_dump()) for item in saved.observations]
        generator = np.random.default_rng()
        generator.bit_generator.state = saved.generator.model_dump()
        counts = saved.counts.model_dump()
        self.members, self.events, self._observations = members, events, observations
        self._counts, self._rng = counts, generator
        for member in members:
            self._rank(member)
            if member.checkpoint_format is not None:
                member.checkpoint_path = stored_path(self.store, member.id)

    def _member(self, member: int | PopulationMember) -> PopulationMember:
        index: Any = member.id if isinstance(member, PopulationMember) else member
        if isinstance(index, bool) or not isinstance(index, Integral) or not 0 <= int(index) < len(self.members):
            raise ValueError(f"Invalid member: {member!r}; must be an id from 0 to {len(self.members) - 1}")
        return self.members[int(index)]

    def _put(self, member: PopulationMember, tree: Any, step: int, kind: CheckpointFormat) -> None:
        self.store.put(member.id, tree, step, kind)
        self.offer(member, step, kind)
        member.checkpoint_path = stored_path(self.store, member.id)

    def _rank(self, member: PopulationMember) -> None:
        sign = 1 if self.config.metric_mode == "max" else -1
        self._scores[member.id] = -math.inf if member.performance is None else sign * member.performance
        self._reported[member.id] = member.reports > 0

    def _judge(self, member: PopulationMember, performance: float | None) -> None:
        """Count whether the last exploit improved the member, at its first report afterwards."""
        before, member.before_exploit = member.before_exploit, None
        if before is None:
            return
        former = before["performance"]
        gain = performance is not None and (former is None or self._gain(former, performance) > 0)
        self._counts["judged"] += 1
        self._counts["improved"] += gain

    def _gain(self, before: float, after: float) -> float:
        return after - before if self.config.metric_mode == "max" else before - after

    def _population_is_ready(self, member: PopulationMember) -> bool:
        """Whether enough members have reported for a decision; counts this try."""
        reported = int(self._reported.sum())
        share = math.ceil(self.config.ready_percentage * self.config.population_size - 1e-9)
        if reported >= max(share, self.config.min_ready_members):
            return True
        member.tries += 1
        return member.tries >= self.config.ready_check_max_wait and reported >= self.config.min_ready_members

    def _truncated(self, count: int) -> int:
        return max(1, int(count * self.config.truncation_ratio + 1e-9))

    def _donors(self, member: PopulationMember) -> list[int]:
        """Possible donors of a member; empty if it does not exploit."""
        if self.config.exploit_method == "truncation":
            order = self.ranking()
            count = self._truncated(len(order))
            candidates = order[:count] if member.id in order[-count:] else []
        else:
            others = np.flatnonzero(self._reported)
            others = others[others != member.id]
            candidates = [int(self._rng.choice(others))] if len(others) else []
        # Only strictly better members: never itself, nor one without a performance.
        return [i for i in candidates if self._scores[i] > self._scores[member.id]]

    def _choose(
        self, donors: list[int], member: PopulationMember, format_of: FormatOf
    ) -> tuple[PopulationMember, CheckpointFormat] | None:
        """One of the donors at random, and the format of its parameters; ``None`` if none has any."""
        donors = list(donors)
        while donors:
            donor = donors.pop(int(self._rng.integers(len(donors))))
            if (found := format_of(donor)) is not None:
                return self.members[donor], found
            warnings.warn(
                f"member {member.id} cannot copy member {donor}, which has no stored parameters: pass model_parameters "
                "to update_performance",
                stacklevel=4,
            )
        return None

    def _exploit(
        self,
        member: PopulationMember,
        donor: PopulationMember,
        parameters_format: CheckpointFormat,
        kind: EventKind,
    ) -> Decision:
        inherited = donor.checkpoint_hyperparams or donor.hyperparams
        hyperparams = self._explored(member, inherited)
        member.before_exploit = {
            "hyperparams": dict(member.hyperparams),
            "performance": member.performance,
            "interval_start": member.interval_start,
        }
        member.hyperparams = hyperparams
        member.interval_start = member.step
        member.lineage.append((member.step, donor.id))
        member.baseline = None if donor.performance is None else (member.step, donor.performance)
        member.unobserved = True
        step = donor.checkpoint_step
        self._record(kind, member, inherited, donor=donor.id, donor_step=step, format=parameters_format)
        return Decision(donor.id, dict(hyperparams))

    def _explored(self, member: PopulationMember, hyperparams: Mapping[str, Any]) -> dict[str, Any]:
        pending = [other.hyperparams for other in self.members if other.unobserved and other is not member]
        history = History(self._observations, pending, member.step / self.config.perturbation_interval)
        explored = self._explore.explore(hyperparams, history, self._rng)
        if explored.keys() != hyperparams.keys():
            raise ValueError(f"explore_method {self.config.explore_method!r} must return {list(hyperparams)}")
        for item in self.config.hyperparams:
            if not item.allows(explored[item.name]):
                raise ValueError(
                    f"explore_method {self.config.explore_method!r} returned {item.name}={explored[item.name]!r}, "
                    "which is outside the search space"
                )
        return explored

    def _observe(self, member: PopulationMember) -> None:
        """Record an observation of the member's last interval for the explore method."""
        if not self._explore.uses_observations:
            return
        interval = self.config.perturbation_interval
        if member.baseline is not None and member.step > member.baseline[0]:
            step, former = member.baseline
            change = None
            if member.performance is not None:
                change = self._gain(former, member.performance) * interval / (member.step - step)
            self._observations.append(Observation(step / interval, dict(member.hyperparams), change))
            del self._observations[:-MAX_OBSERVATIONS]
        member.baseline = None if member.performance is None else (member.step, member.performance)
        member.unobserved = False

    def _record(self, kind: EventKind, member: PopulationMember, former: Mapping[str, Any], **more: Any) -> None:
        new = member.hyperparams
        mutated = {name: [former[name], new[name]] for name in new if former[name] != new[name]}
        self.events.append(Event(kind, member.id, member.step, mutated=mutated, hyperparams=dict(new), **more))

    def _spread(self, name: str) -> float:
        """Diversity of a hyper-parameter: standard deviation relative to the range, or normalised entropy of values."""
        item = next(item for item in self.config.hyperparams if item.name == name)
        held = [member.hyperparams[name] for member in self.members]
        if item.values is None:
            return float(np.std([to_unit(item, value) for value in held]))
        shares = np.array([held.count(value) for value in item.values if value in held]) / len(held)
        return float(-(shares * np.log(shares)).sum() / math.log(len(item.values)) + 0.0)
