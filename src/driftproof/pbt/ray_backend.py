"""Members, or groups of them, as actors of a Ray cluster, or of Ray on one machine."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from driftproof._arguments import check_count
from driftproof._process_signals import kept_handlers
from driftproof._requirements import require
from driftproof.pbt.vectorized.backend import VectorizedHost
from driftproof.pbt.work import Failure, Host, Order, Report, Work

require('backend="ray"', "ray", "ray")

import ray  # noqa: E402

_PATIENCE = 5.0
"""Seconds without a report after which the backend checks for actors that cannot be placed."""


class RayBackend:
    """Trains each member in a Ray actor; orders and reports go through Ray's object store.

    Args:
        resources_per_member: Options of Ray for placing an actor: ``num_cpus`` (1 if not given; also the number of
            torch threads), ``num_gpus``, ``resources``, ``memory``, … Fractions let members share.
        address: Address of a running cluster, ``"auto"`` for the one that this machine is part of. ``None``: the Ray
            instance that this process is connected to, or else a new one on this machine.
        members_per_actor: Members that train as one in each actor, as a :class:`VectorizedPopulation`; the resources
            are then for all of them. States travel between groups as they do between members.
    """

    def __init__(
        self,
        resources_per_member: Mapping[str, Any] | None = None,
        address: str | None = None,
        members_per_actor: int = 1,
    ) -> None:
        check_count("members_per_actor", members_per_actor, at_least=1)
        self.resources = {"num_cpus": 1, **(resources_per_member or {})}
        self.address, self.members_per_actor = address, members_per_actor
        self._is_ours = False
        self._actors: dict[int, Any] = {}
        """Actors by the number of their group: members ``i * members_per_actor`` and those that follow."""

    def start(self, work: Work) -> None:
        self._is_ours = not ray.is_initialized()
        if self._is_ours:
            try:
                with kept_handlers():
                    ray.init(address=self.address, log_to_driver=False, include_dashboard=False)
            except SystemExit:  # Ray's SIGTERM handler raises it.
                raise KeyboardInterrupt from None
        elif self.address is not None:
            raise RuntimeError(
                f"this process is connected to Ray already: call ray.shutdown() before address={self.address!r}, or "
                "leave out the address"
            )
        self._work, self._members = ray.put(work), work.members
        self._actors = {}
        self._queued: dict[int, list[Order]] = {}
        self._running: dict[Any, tuple[int, tuple[int, ...]]] = {}
        """The group, and its members that train, by the Ray reference of their results."""
        self._results: deque[Report | Failure] = deque()
        self._released: set[int] = set()
        self._began: dict[int, Any] = {}
        """Ray references that become ready when a group's actor has been placed."""
        if scarce := self._scarce():
            if self._is_ours:
                ray.shutdown()
            needs = ", ".join(f"{need:g} {name}, of which there are {there:g}" for name, need, there in scarce)
            raise ValueError(
                f"{self._describe()} with {self.resources} each need {needs}: use smaller resources_per_member "
                "(fractions let members share), a smaller population, or a larger cluster"
            )

    def submit(self, order: Order) -> None:
        group = order.member // self.members_per_actor
        self._released.discard(order.member)
        self._queued.setdefault(group, []).append(order)
        if self.members_per_actor == 1:
            self._begin(group)

    def wait(self) -> Report | Failure:
        while not self._results:
            # Members of a group begin together, once all of their last results were returned.
            for group in list(self._queued):
                if group not in [running for running, _ in self._running.values()]:
                    self._begin(group)
            self._receive()
        return self._results.popleft()

    def hold(self) -> None:
        pass  # Every member has its own actor, which has started its order; groups start in wait().

    def training(self) -> set[int]:
        waiting = [(each.member,) if isinstance(each, Report) else each.lost for each in self._results]
        return {member for members in (*waiting, *(busy for _, busy in self._running.values())) for member in members}

    def release(self, member: int) -> None:
        self._released.add(member)
        group = member // self.members_per_actor
        if set(self._members_of(group)) <= self._released:
            self._kill(group)

    def _begin(self, group: int) -> None:
        """Send its queued orders to a group's actor."""
        orders = self._queued.pop(group)
        if group not in self._actors:
            self._actors[group] = self._place(group)
        members = tuple(order.member for order in orders)
        self._running[self._actors[group].carry_out.remote(orders)] = group, members

    def _receive(self) -> None:
        """Wait for the results of a group."""
        ready, _ = ray.wait(list(self._running), num_returns=1, timeout=_PATIENCE)
        if not ready:
            if stuck := self._stuck():
                lost = tuple(member for group in stuck for member in self._members_of(group))
                for group in stuck:
                    self._kill(group)
                self._results.append(Failure(None, lost, "the cluster has too few resources to place their actors"))
            return
        group, members = self._running.pop(ready[0])
        try:
            self._results.extend(ray.get(ready[0]))
        except ray.exceptions.RayError as error:
            self._kill(group)
            lost = tuple(self._members_of(group))
            self._results.append(Failure(members[0], lost, f"{type(error).__name__}: {error}"))

    def _kill(self, group: int) -> None:
        self._running = {order: entry for order, entry in self._running.items() if entry[0] != group}
        self._began.pop(group, None)
        self._queued.pop(group, None)
        actor = self._actors.pop(group, None)
        if actor is not None:
            ray.kill(actor)

    def _members_of(self, group: int) -> range:
        first = group * self.members_per_actor
        return range(first, min(first + self.members_per_actor, self._members))

    def _describe(self) -> str:
        """The actors, in words."""
        if self.members_per_actor == 1:
            return f"{self._members} members"
        return f"{self._groups} actors of {self.members_per_actor} members"

    @property
    def _groups(self) -> int:
        return -(-self._members // self.members_per_actor)

    def close(self) -> None:
        for group in list(self._actors):
            self._kill(group)
        if self._is_ours:
            ray.shutdown()

    def _place(self, group: int) -> Any:
        """Create a group's actor; Ray starts it as soon as there are resources for it."""
        options = dict(self.resources)
        if scarce := self._scarce():
            missing = ", ".join(f"{need:g} {name}, now {there:g}" for name, need, there in scarce)
            member = self._members_of(group)[0]
            warnings.warn(f"member {member} shares a core, because the cluster has lost some: {missing}", stacklevel=2)
            options["num_cpus"] = 0
        threads, members = max(1, int(self.resources["num_cpus"])), self._members_of(group)
        together = members if self.members_per_actor > 1 else None
        actor = ray.remote(_Actor).options(**options).remote(self._work, threads, together)
        if not scarce:
            self._began[group] = actor.__ray_ready__.remote()
        return actor

    def _stuck(self) -> tuple[int, ...]:
        """Groups whose actors wait for resources of lost nodes."""
        if not self._scarce():
            return ()
        return tuple(group for group, began in self._began.items() if not ray.wait([began], timeout=0)[0])

    def _scarce(self) -> list[tuple[str, float, float]]:
        """Resources of which the cluster has too few: name, amount needed by all actors, amount available."""
        each = {"CPU": self.resources["num_cpus"], "GPU": self.resources.get("num_gpus", 0)}
        each |= dict(self.resources.get("resources", {}))
        there = ray.cluster_resources()
        needs = {name: need * self._groups for name, need in each.items()}
        return [(name, need, there.get(name, 0)) for name, need in needs.items() if need > there.get(name, 0) + 1e-6]


class _Actor:
    """Ray actor that trains one member, or a group of them as one."""

    def __init__(self, work: Work, threads: int, members: Sequence[int] | None) -> None:
        torch.set_num_threads(threads)
        self._host: Host | VectorizedHost = Host(work) if members is None else VectorizedHost(work, members)

    def carry_out(self, orders: list[Order]) -> list[Report | Failure]:
        if isinstance(self._host, Host):
            return [self._host.carry_out(order) for order in orders]
        return self._host.carry_out(orders)
