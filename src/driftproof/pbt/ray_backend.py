"""Members, or groups of them, in actors of a Ray cluster, or of Ray on one machine."""

from __future__ import annotations

import logging
import math
import os
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from driftproof._arguments import check_count
from driftproof._process_signals import kept_handlers
from driftproof._requirements import require
from driftproof.pbt.backends import CannotStartError
from driftproof.pbt.cluster import check_resources, most_actors, too_large
from driftproof.pbt.vectorized.backend import VectorizedHost
from driftproof.pbt.work import Failure, Host, Order, Report, Work

require('backend="ray"', "ray", "ray")

import ray  # noqa: E402

_PATIENCE = 1.0
"""Seconds without a report after which the backend looks for lost and for new nodes."""
_STARTING = 60.0
"""Seconds for which a share of the members is kept for an actor that is still starting."""


class RayBackend:
    """Trains members in Ray actors; orders and reports go through Ray's object store.

    There are as many actors as the cluster has room for, and not more than members. With fewer, members take turns:
    an actor keeps the members that it has begun. Actors on lost nodes are replaced, once and where there is room; if a
    node joins, or an actor has no more to do, an asynchronous run moves waiting members there.

    Args:
        resources_per_member: Options of Ray for placing an actor: ``num_cpus`` (1 if not given; also the number of
            torch threads), ``num_gpus``, ``resources``, ``memory``, … Fractions let actors share a core or a GPU.
        address: Address of a running cluster, ``"auto"`` for the one that this machine is part of. ``None``: the Ray
            instance that this process is connected to, or the one that the environment variable ``RAY_ADDRESS`` names,
            or else a new one on this machine.
        members_per_actor: Members that train as one group, as a :class:`VectorizedPopulation`; the resources are then
            for all of them. States travel between groups as they do between members.
        runtime_env: Ray's runtime environment of the actors, such as ``{"py_modules": ["my_env.py"]}`` for modules that
            the other nodes lack. ``"working_dir": None`` stands for an empty folder: the actors then import nothing
            from the current one.

    Raises:
        CannotStartError: In :meth:`start`, if there is no cluster, or if no node has room for an actor.
    """

    def __init__(
        self,
        resources_per_member: Mapping[str, Any] | None = None,
        address: str | None = None,
        members_per_actor: int = 1,
        runtime_env: Mapping[str, Any] | None = None,
    ) -> None:
        check_count("members_per_actor", members_per_actor, at_least=1)
        self.resources = check_resources({"num_cpus": 1, **(resources_per_member or {})})
        self.address, self.members_per_actor, self.runtime_env = address, members_per_actor, runtime_env
        self._is_ours = self._holds = False
        self._actors: list[_Actor] = []

    def start(self, work: Work) -> None:
        self._holds, self._actors = False, []
        self._connect()
        self._members, self._is_synchronous = work.members, work.synchronous
        self._open = set(range(-(-work.members // self.members_per_actor)))
        """Groups with members that have not finished. Group i: ``members_per_actor`` members from i times that."""
        if problem := too_large(self.resources, ray.nodes()):
            self.close()
            who = "a member" if self.members_per_actor == 1 else f"an actor of {self.members_per_actor} members"
            raise CannotStartError(f"{who} needs {problem}; use smaller resources_per_member, or larger nodes")
        self._work = ray.put(work)
        self._queued: dict[int, list[Order]] = {}
        """Orders that have not started, by group, the longest waiting first."""
        self._results: deque[Report | Failure] = deque()
        self._released: set[int] = set()
        self._room = 0
        """Number of actors that the cluster had room for, at most one for each group."""
        self._looked = self._retry_at = -math.inf
        """When the backend looked at the cluster, and when it may try again to start actors beside those that run."""

    def submit(self, order: Order) -> None:
        self._released.discard(order.member)
        group = order.member // self.members_per_actor
        self._queued.setdefault(group, []).append(order)

    def wait(self) -> Report | Failure:
        while not self._results:
            # Members of a group begin together, once all of their last results were returned.
            self._begin_queued()
            if self._holds and not self._results and not any(actor.busy for actor in self._actors):
                waiting = tuple(order.member for orders in self._queued.values() for order in orders)
                self._queued.clear()
                return Failure(None, waiting, "the run is stopping")
            if not self._results:
                self._receive()
        return self._results.popleft()

    def hold(self) -> None:
        self._holds = True

    def training(self) -> set[int]:
        waiting = [(each.member,) if isinstance(each, Report) else each.lost for each in self._results]
        return {member for members in (*waiting, *(actor.busy for actor in self._actors)) for member in members}

    def release(self, member: int) -> None:
        self._released.add(member)
        group = member // self.members_per_actor
        if not set(self._members_of(group)) <= self._released:
            return
        self._open.discard(group)
        for actor in list(self._actors):
            actor.drop(group)
            if not actor.groups and not actor.busy and len(self._actors) > len(self._open):
                self._remove(actor)

    def close(self) -> None:
        for actor in list(self._actors):
            self._remove(actor)
        if self._is_ours:
            ray.shutdown()
            self._is_ours = False

    def _connect(self) -> None:
        if ray.is_initialized():
            given = {"address": self.address, "runtime_env": self.runtime_env}
            if unused := [name for name, value in given.items() if value is not None]:
                raise CannotStartError(
                    f"this process is connected to Ray already: call ray.shutdown() before, or leave out {unused[0]}"
                )
            return
        with ExitStack() as stack:
            runtime_env = None if self.runtime_env is None else dict(self.runtime_env)
            if runtime_env is not None and runtime_env.get("working_dir", "") is None:
                runtime_env["working_dir"] = stack.enter_context(tempfile.TemporaryDirectory())
            stack.enter_context(kept_handlers())
            try:
                # Without an address, Ray would connect to any cluster that it finds on this machine.
                ray.init(
                    address=self.address or (None if "RAY_ADDRESS" in os.environ else "local"),
                    runtime_env=runtime_env,
                    log_to_driver=False,
                    include_dashboard=False,
                    logging_level=logging.WARNING,
                )
            except SystemExit:  # Ray's SIGTERM handler raises it.
                raise KeyboardInterrupt from None
            except Exception as error:
                ray.shutdown()
                raise CannotStartError(f"Ray cannot be started or reached: {str(error).strip()}") from error
        self._is_ours = True

    def _begin_queued(self) -> None:
        """Let idle actors begin queued orders."""
        if self._holds:
            return
        if time.monotonic() - self._looked >= _PATIENCE:
            self._look()
        self._add_actors()
        for actor in self._actors:
            if actor.is_idle and (group := self._next_for(actor)) is not None:
                actor.begin(group, self._members_of(group), self._queued.pop(group))

    def _homes(self) -> dict[int, _Actor]:
        """The actors that have begun groups, by group."""
        return {group: actor for actor in self._actors for group in actor.groups}

    def _next_for(self, actor: _Actor) -> int | None:
        """The group that has waited longest, of those that the actor has begun or may begin."""
        homes, now = self._homes(), time.monotonic()
        expected = sum(each.began is None or now - each.since < _STARTING for each in self._actors)
        has_room = len(actor.groups) < -(-len(self._open) // expected)
        for group in self._queued:
            if homes.get(group) is actor or (group not in homes and has_room):
                return group
        waiting = [group for group in self._queued if group in homes and not homes[group].is_idle]
        # Moving a member would make a synchronous run depend on the speed of the actors.
        if waiting and not actor.groups and not self._is_synchronous:
            homes[waiting[0]].drop(waiting[0])
            del self._queued[waiting[0]]
            self._results.append(Failure(None, tuple(self._members_of(waiting[0])), "it moves to an idle actor"))
        return None

    def _add_actors(self) -> None:
        """Create actors while groups wait and the cluster has room."""
        homes = self._homes()
        waiting = [
            group for group in self._queued if group not in homes or not (self._is_synchronous or homes[group].is_idle)
        ]
        if time.monotonic() < self._retry_at and any(actor.began is None for actor in self._actors):
            return
        idle = sum(not actor.groups for actor in self._actors)
        for _ in range(min(self._room - len(self._actors), len(waiting) - idle)):
            self._actors.append(_Actor(self.resources, self._work, self.members_per_actor > 1))

    def _look(self) -> None:
        """Find out how many actors the cluster has room for."""
        before, self._looked = self._room, time.monotonic()
        self._room = int(min(most_actors(self.resources, ray.nodes()), len(self._open)))
        if self._room < min(before, len(self._open)):
            warnings.warn(
                f"the cluster has lost nodes: it has room for {self._room} of {len(self._open)} "
                f"{'members, which take' if self.members_per_actor == 1 else 'groups of members, which take'} turns",
                stacklevel=2,
            )
        starting = [actor for actor in self._actors if actor.began is not None]
        for actor in starting[: max(0, len(self._actors) - self._room)]:
            self._remove(actor)

    def _receive(self) -> None:
        """Wait for results, and for actors that are starting."""
        references = {}
        for actor in self._actors:
            reference = actor.order if actor.began is None else actor.began
            if reference is not None:
                references[reference] = actor
        if not references:
            time.sleep(_PATIENCE)  # until a node joins
            return
        ray.wait(list(references), num_returns=1, timeout=_PATIENCE)
        ready, _ = ray.wait(list(references), num_returns=len(references), timeout=0)
        for reference in ready:
            actor = references[reference]
            try:
                self._results.extend(actor.ended(ray.get(reference)))
            except ray.exceptions.RayError as error:
                self._lose(actor, f"{type(error).__name__}: {error}")
        self._begin_queued()  # While the results are handled.

    def _lose(self, actor: _Actor, reason: str) -> None:
        """Report an actor that has died or could not start."""
        self._remove(actor)
        self._looked = -math.inf
        groups, member = sorted(actor.groups), next(iter(actor.busy), None)
        if actor.began is not None:
            # It could not start: a group that waits for an actor has failed.
            self._retry_at = time.monotonic() + _STARTING
            groups = sorted(self._queued.keys() - self._homes().keys())[:1]
            member = min((order.member for group in groups for order in self._queued[group]), default=None)
        for group in groups:
            self._queued.pop(group, None)
        if lost := tuple(member for group in groups for member in self._members_of(group)):
            self._results.append(Failure(member, lost, reason))

    def _remove(self, actor: _Actor) -> None:
        self._actors.remove(actor)
        ray.kill(actor.handle)

    def _members_of(self, group: int) -> range:
        first = group * self.members_per_actor
        return range(first, min(first + self.members_per_actor, self._members))


def is_connected() -> bool:
    """Whether this process is connected to Ray."""
    return bool(ray.is_initialized())


class _Actor:
    """An actor of the cluster, and what it is doing."""

    def __init__(self, resources: Mapping[str, Any], work: Any, in_groups: bool) -> None:
        threads = max(1, int(resources["num_cpus"]))
        self.handle = ray.remote(_Members).options(**resources).remote(work, threads, in_groups)
        self.began: Any = self.handle.__ray_ready__.remote()
        """Ray's reference that becomes ready when the actor runs; ``None``: it does."""
        self.since = time.monotonic()
        self.groups: set[int] = set()
        """Groups that it has begun."""
        self.order: Any = None
        """Ray's reference of the results that it is working for."""
        self.busy: tuple[int, ...] = ()
        """Members that it is training."""

    @property
    def is_idle(self) -> bool:
        return self.began is None and self.order is None

    def begin(self, group: int, members: range, orders: list[Order]) -> None:
        self.groups.add(group)
        self.busy = tuple(order.member for order in orders)
        self.order = self.handle.carry_out.remote(group, members, orders)

    def ended(self, results: Any) -> list[Report | Failure]:
        """Note that it is idle now; returns the results."""
        if self.began is not None:
            self.began = None
            return []
        self.order, self.busy = None, ()
        return list(results)

    def drop(self, group: int) -> None:
        """Free what it holds of a group."""
        if group in self.groups:
            self.groups.discard(group)
            self.handle.drop.remote(group)


class _Members:
    """Ray actor that trains members, or groups of members as one."""

    def __init__(self, work: Work, threads: int, in_groups: bool) -> None:
        torch.set_num_threads(threads)
        self._work, self._host = work, None if in_groups else Host(work)
        self._groups: dict[int, VectorizedHost] = {}

    def carry_out(self, group: int, members: Sequence[int], orders: list[Order]) -> list[Report | Failure]:
        if self._host is not None:
            return [self._host.carry_out(order) for order in orders]
        if group not in self._groups:
            self._groups[group] = VectorizedHost(self._work, members)
        return self._groups[group].carry_out(orders)

    def drop(self, group: int) -> None:
        if self._host is not None:
            self._host.drop(group)
        elif group in self._groups:
            self._groups.pop(group).close()
