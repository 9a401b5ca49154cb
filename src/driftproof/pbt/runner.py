"""Trains a population on any backend, saves it, and resumes it after an interruption."""

from __future__ import annotations

import dataclasses
import io
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from driftproof._arguments import check_count, check_flag
from driftproof._trust import Trust
from driftproof.pbt.backends import Backend, BackendName, backend_named
from driftproof.pbt.config import check_against
from driftproof.pbt.member import MakeAgent, MakeCallback, Metric, mean_reward
from driftproof.pbt.population import Decision, vital_signs
from driftproof.pbt.saved import check_values, config_of
from driftproof.pbt.scheduler import PBTScheduler
from driftproof.pbt.stores import CheckpointFormat, MemoryStore
from driftproof.pbt.work import Failure, Order, Report, Work
from driftproof.ppo import DistributionalPPO
from driftproof.ppo.generators import unchanged_generators
from driftproof.runs.events import Event
from driftproof.runs.folder import FolderTakenError, RunFolder
from driftproof.runs.metrics import Row
from driftproof.runs.population_state import MAX_PERFORMANCE, SavedPopulation, best_first
from driftproof.settings.population import PBTConfig
from driftproof.state import read


@dataclass
class _Place:
    """Progress of one member, and its next order."""

    hyperparams: dict[str, Any]
    updates: int = 0
    file: str | None = None
    """File with its whole state, as last reported."""
    offered: str | None = None
    """File that other members may copy from; an older one while its last report waits for a decision."""
    donor: str | None = None
    """File of the donor to copy before training goes on."""
    is_anew: bool = False
    """Whether its own state is discarded."""
    waits: bool = False
    """Whether its last report waits for a decision."""
    performance: float | None = None
    not_taken_over: str | None = None


class PBTRunner:
    """Trains a population and saves it in a run folder.

    Every member has its own environments, random generators and counters; global random generators stay untouched.
    Members train in slices of ``config.perturbation_interval`` updates. After each slice, a member's whole state is
    written to the folder, and the scheduler decides about exploit and explore. A member that fails, or whose process or
    machine dies, restarts from its last saved state; after more than ``max_restarts`` failures in a row, as a copy of
    one of the best. :meth:`resume` continues a run that was interrupted or killed.

    Args:
        config: Configuration of the search. ``checkpoint_dir``: folder of the members' states, by default ``members``
            in the run folder.
        make_agent: Returns the agent of a member, by its id; use the id in the seed so that members differ. Also called
            to check the configuration, and whenever a member is recreated elsewhere.
        total_updates: Updates that each member trains.
        run_dir: Run folder; neither it nor ``checkpoint_dir`` may hold another run.
        seed: Seed of the scheduler's decisions.
        metric: Returns the performance of an agent; by default the mean return of recent episodes.
        backend: Where members train: ``"inline"``, one after the other in this process; ``"process"``, in parallel on
            this machine; ``"ray"``, on a cluster; ``"vectorized"``, all at once on one device, with synchronous
            decisions; or a backend with options, as ``ProcessBackend(workers=4)``.
        synchronous: Decide for all members once all have done the same number of updates: the result is then
            reproducible, whatever the members' speed. Otherwise no member waits for another.
        max_restarts: How many times in a row a member may fail before it is replaced.
        callback: Creates a callback for each member's training, in the process that trains it. A callback that stops
            the training makes the member fail; use :meth:`stop` to end a run.
        on_change: Called with the runner when a run starts, and after each report of a member.
    """

    def __init__(
        self,
        config: PBTConfig,
        make_agent: MakeAgent,
        total_updates: int,
        run_dir: str | os.PathLike[str],
        seed: int = 0,
        metric: Metric = mean_reward,
        *,
        backend: BackendName | Backend = "inline",
        synchronous: bool = False,
        max_restarts: int = 3,
        callback: MakeCallback | None = None,
        on_change: Callable[[PBTRunner], None] | None = None,
        _saved: SavedPopulation | None = None,
        _trust: Trust | None = None,
    ) -> None:
        check_count("total_updates", total_updates, at_least=1)
        check_count("seed", seed)
        check_flag("synchronous", synchronous)
        check_count("max_restarts", max_restarts)
        self._backend = backend_named(backend) if isinstance(backend, str) else backend
        self._trains_together = getattr(self._backend, "trains_together", False)
        self.total_updates, self.seed, self.synchronous = total_updates, seed, synchronous
        self.max_restarts = max_restarts
        self._folder = RunFolder(run_dir, config.checkpoint_dir)
        if _saved is None and self._folder.is_taken:
            raise FileExistsError(
                f"{run_dir} already holds a population: choose another folder, or resume it with "
                "PBTRunner.resume(run_dir, make_agent)"
            )
        if self._folder.has_guests:
            raise FileExistsError(f"{self._folder.members} holds members of another population: choose another folder")
        if config.checkpoint_dir is not None:
            config = dataclasses.replace(config, checkpoint_dir=self._folder.members)
        self._make_agent, self._metric, self._make_callback = make_agent, metric, callback
        self.on_change = on_change
        self.config = _checked(config, make_agent)
        # The runner keeps parameters in files itself, so that the scheduler's store stays empty.
        self.scheduler = PBTScheduler(self.config, seed, store=MemoryStore(), trust=_trust)
        self._places = [_Place(hyperparams) for hyperparams in self.scheduler.initial_hyperparams()]
        self._saves = 0
        if _saved is not None:
            with self._folder.explaining():
                self._load(_saved)
        self._began = 0.0
        self._live: set[int] = set()
        self._busy: set[int] = set()
        self._failures = [0] * self.config.population_size
        self._is_stopping = False
        self.latest: dict[int, Row] = {}
        """Latest metrics of each member that has reported since the runner was created."""

    @classmethod
    def resume(
        cls,
        run_dir: str | os.PathLike[str],
        make_agent: MakeAgent,
        metric: Metric = mean_reward,
        *,
        backend: BackendName | Backend = "inline",
        max_restarts: int = 3,
        callback: MakeCallback | None = None,
        on_change: Callable[[PBTRunner], None] | None = None,
        trusted: Iterable[str] | Trust = (),
    ) -> PBTRunner:
        """Load a run as of the last report of a member.

        Args:
            run_dir: The run folder.
            make_agent: The same as in the constructor; code is not saved.
            metric: The same as in the constructor.
            backend: As in the constructor; may differ from before.
            max_restarts: As in the constructor; may differ from before.
            callback: As in the constructor; may differ from before.
            on_change: As in the constructor; may differ from before.
            trusted: Modules from which an explore method named in the folder may be imported.

        Raises:
            FileNotFoundError: There is no run in the folder.
            RunFolderError: A file of the run is damaged, or was written by another version.
        """
        folder = RunFolder(run_dir)
        saved = folder.read_state()
        with folder.explaining():
            config = config_of(saved.config)
        return cls(
            config,
            make_agent,
            saved.total_updates,
            run_dir,
            saved.seed,
            metric,
            backend=backend,
            synchronous=saved.synchronous,
            max_restarts=max_restarts,
            callback=callback,
            on_change=on_change,
            _saved=saved,
            _trust=Trust.of(trusted),
        )

    @property
    def run_dir(self) -> Path:
        return self._folder.path

    @property
    def updates(self) -> list[int]:
        """Updates that each member has done."""
        return [place.updates for place in self._places]

    @property
    def best_member(self) -> int:
        """Id of the best member by its last report; 0 if none has reported yet."""
        return next(iter(best_first(self._places, self.config.metric_mode)), 0)

    @property
    def best(self) -> DistributionalPPO:
        """The agent of :attr:`best_member`."""
        return self.load_member(self.best_member)

    def path_of(self, member: int) -> Path | None:
        """A member's last checkpoint, which ``DistributionalPPO.load`` loads; ``None`` if it has not reported yet."""
        name = self._places[member].file
        return None if name is None else self._folder.member_path(name)

    def load_member(self, member: int) -> DistributionalPPO:
        """A member's agent as of its last report, with its own environments."""
        name = self._places[member].file
        with unchanged_generators():
            agent = self._make_agent(member)
            if name is not None:
                agent.load_state_tree(read(io.BytesIO(self._folder.read_member(name))).tree)
        return agent

    def run(self, updates: int | None = None) -> DistributionalPPO:
        """Train all members, to the end or until each has done ``updates`` updates, and return the best agent.

        Raises:
            CannotStartError: The backend cannot start; nothing was written.
            FolderTakenError: Another process is training the population, or has since this one loaded it.
            RuntimeError: A member keeps failing, also as a copy of another.
            OSError: A file could not be written. The folder is intact, and the run can be resumed.
        """
        if updates is not None:
            check_count("updates", updates, at_least=1)
        goal = min(self.total_updates, updates or self.total_updates)
        strategy = self.config.optimizer_exploit_strategy
        size = self.config.population_size
        shared = (self._make_agent, self._metric, size, self.total_updates, strategy, self._make_callback)
        work = Work(*shared, self.synchronous)
        self._began = time.monotonic()
        try:
            self._backend.start(work)  # First, so that no folder is created for a run that cannot start.
            with self._folder.locked():
                self._check_is_latest()
                self._live, self._busy = set(), set()
                self._decide(self._due())
                if any(self.updates):
                    with _advised():
                        self._save()  # The decisions above, which an interruption has kept from being saved.
                # Members that are behind first, as after an interruption.
                self._send(sorted(range(size), key=lambda member: self._places[member].updates), goal)
                self._notify()
                while self._awaited():
                    self._send(self._handle(self._backend.wait()), goal)
                    self._notify()
        finally:
            self._is_stopping = False
            self._backend.close()
        return self.best

    def stop(self) -> None:
        """Let :meth:`run` return once the members that are training have reported; safe in signal handlers.

        Queued orders are not started. If no run is in progress, the next one returns at once.
        """
        self._is_stopping = True
        self._backend.hold()

    def _check_is_latest(self) -> None:
        if self._folder.is_taken and self._folder.read_state().saves != self._saves:
            raise FolderTakenError(
                f"{self.run_dir}: another process has trained this run since it was loaded; call PBTRunner.resume again"
            )

    def _notify(self) -> None:
        if self.on_change is not None:
            self.on_change(self)

    def _awaited(self) -> set[int]:
        """Members whose reports are outstanding."""
        if self._is_stopping:
            self._busy &= self._backend.training()
        return self._busy

    def _send(self, members: Iterable[int], goal: int) -> None:
        """Submit the next orders of members that have not reached the goal."""
        for member in members:
            place = self._places[member]
            if place.updates >= goal:
                self._backend.release(member)
                self._live.discard(member)
            elif not place.waits and not self._is_stopping:
                self._backend.submit(self._order(member))
                self._busy.add(member)
                self._live.add(member)

    def _order(self, member: int) -> Order:
        place, restore, start_at = self._places[member], None, None
        if place.is_anew:
            start_at = place.updates
        elif member not in self._live and place.file is not None:
            restore = self._folder.read_member(place.file)
        donor_member = self._present_donor(place)
        donor = None
        if place.donor is not None and donor_member is None:
            donor = self._folder.read_member(place.donor)
        updates = min(self.config.perturbation_interval, self.total_updates - place.updates)
        return Order(member, updates, place.hyperparams, restore, start_at, donor, donor_member)

    def _present_donor(self, place: _Place) -> int | None:
        """The donor of a member, if the backend has it in the state that it is to be copied in."""
        if place.donor is None or not self._trains_together:
            return None
        return next((member for member in self._live if self._places[member].file == place.donor), None)

    def _handle(self, result: Report | Failure) -> list[int]:
        """Process the result of an order; the members to submit next."""
        with _advised():
            return self._recover(result) if isinstance(result, Failure) else self._receive(result)

    def _receive(self, report: Report) -> list[int]:
        """Save and log a member's report, and decide if all reports needed are there."""
        member, place = report.member, self._places[report.member]
        self._busy.discard(member)
        self._failures[member] = 0
        place.file = self._folder.write_member(member, report.updates, report.state)
        place.updates = report.updates
        place.performance = report.performance if abs(report.performance) <= MAX_PERFORMANCE else None
        place.not_taken_over, place.is_anew, place.waits = report.not_taken_over, False, True
        self._folder.log(member, report.rows)
        if report.rows:
            self.latest[member] = report.rows[-1]
        due = self._due()
        self._decide(due)
        if due:
            scheduler = self.scheduler
            signs = vital_signs(scheduler.statistics(), scheduler.members, scheduler.events)
            elapsed = time.monotonic() - self._began
            self._folder.log(None, [{"step": sum(self.updates), "time/time_elapsed": elapsed, **signs}])
        # Last: after an interruption, a slice that is not in the state yet is trained and logged again.
        self._save()
        return due

    def _due(self) -> list[int]:
        """Members whose reports wait for a decision that can be made now."""
        waiting = [member for member, place in enumerate(self._places) if place.waits]
        ahead = max((self._places[member].updates for member in waiting), default=0)
        decides_for_all = self.synchronous or self._trains_together
        if decides_for_all and any(not place.waits and place.updates < ahead for place in self._places):
            return []
        return waiting

    def _decide(self, members: list[int]) -> None:
        """Report these members to the scheduler, and apply its decisions."""
        for member in members:
            place = self._places[member]
            if place.donor is not None:
                self.scheduler.report_transfer(member, ok=place.not_taken_over is None)
            place.donor = place.not_taken_over = None
            place.offered, place.waits = place.file, False
            self.scheduler.offer(member, place.updates)
            self.scheduler.update_performance(member, place.performance, place.updates)
        for member in members:
            place = self._places[member]
            if place.updates < self.total_updates:
                self._apply_decision(member, self.scheduler.decide(member, self._format_of))

    def _apply_decision(self, member: int, decision: Decision) -> None:
        """Set the donor and the hyper-parameters of a member's next order."""
        place = self._places[member]
        place.donor = None if decision.donor is None else self._places[decision.donor].offered
        place.hyperparams = decision.hyperparams

    def _format_of(self, member: int) -> CheckpointFormat | None:
        return None if self._places[member].offered is None else "v2_full_parameters"

    def _recover(self, failure: Failure) -> list[int]:
        """Restart lost members; returns those to submit again."""
        again = [member for member in failure.lost if member in self._busy]
        self._live -= set(failure.lost)
        self._busy -= set(failure.lost)
        if failure.member is None:
            return again
        member, place = failure.member, self._places[failure.member]
        self._failures[member] += 1
        self._note("restart", member, failure.reason)
        if self._failures[member] > self.max_restarts:
            self._give_up(member, failure.reason)
        self._save()
        assert place.updates < self.total_updates
        return again

    def _give_up(self, member: int, reason: str) -> None:
        """Replace a member that keeps failing by a copy of one of the best."""
        place = self._places[member]
        tries = self._failures[member]
        self._failures[member] = 0
        if place.is_anew:
            raise RuntimeError(f"member {member} failed {tries} times in a row, also as a copy of another:\n{reason}")
        try:
            self._apply_decision(member, self.scheduler.decide_replacement(member, self._format_of))
        except RuntimeError as error:
            raise RuntimeError(f"{error}, and it failed {tries} times in a row:\n{reason}") from None
        place.is_anew = True

    def _note(self, kind: Literal["restart"], member: int, detail: str) -> None:
        place = self._places[member]
        last = detail.strip().splitlines()[-1]
        self.scheduler.events.append(
            Event(kind, member, place.updates, hyperparams=dict(place.hyperparams), detail=last)
        )

    def _save(self) -> None:
        state = {
            "saves": self._saves + 1,
            "seed": self.seed,
            "total_updates": self.total_updates,
            "synchronous": self.synchronous,
            "config": dataclasses.asdict(self.config),
            "scheduler": self.scheduler.state_dict(),
            "members": [dataclasses.asdict(place) for place in self._places],
        }
        used = {name for place in self._places for name in (place.file, place.offered, place.donor) if name}
        self._folder.write_state(state)
        self._saves += 1
        self._folder.follow_state(self.scheduler.events, used)

    def _load(self, saved: SavedPopulation) -> None:
        check_values(saved, self.config)
        self.scheduler.load_state_dict(saved.scheduler.model_dump())
        self._saves = saved.saves
        self._places = [_Place(**each.model_dump()) for each in saved.members]
        for place in self._places:
            for name in filter(None, (place.file, place.offered, place.donor)):
                self._folder.member_path(name)  # raises if it is a link


@contextmanager
def _advised() -> Iterator[None]:
    """Add to an ``OSError`` how to continue."""
    try:
        yield
    except OSError as error:
        advice = f"{error.strerror or error} (the saved run is intact: fix the cause, then resume it)"
        raise OSError(error.errno, advice, error.filename) from error


def _checked(config: PBTConfig, make_agent: MakeAgent) -> PBTConfig:
    """The configuration, checked against the agent of member 0."""
    with unchanged_generators():
        agent = make_agent(0)
        try:
            interval = config.perturbation_interval * agent.optimizer_steps_per_update
            return check_against(config, agent.hyperparams, steps_per_interval=interval)
        finally:
            if agent.env is not None:
                agent.env.close()
