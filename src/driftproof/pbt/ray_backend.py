"""Members as actors of a Ray cluster, or of Ray on one machine."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from driftproof._process_signals import kept_handlers
from driftproof.pbt.work import Failure, Host, Order, Report, Work

try:
    import ray
except ImportError as error:
    raise ImportError('backend="ray" needs Ray: pip install "driftproof[ray]"') from error


_PATIENCE = 5.0
"""Seconds without a report after which the backend checks for actors that cannot be placed."""


class RayBackend:
    """Trains each member in a Ray actor; orders and reports go through Ray's object store.

    Args:
        resources_per_member: Options of Ray for placing an actor: ``num_cpus`` (1 if not given; also the number of
            torch threads), ``num_gpus``, ``resources``, ``memory``, … Fractions let members share.
        address: Address of a running cluster, ``"auto"`` for the one that this machine is part of. ``None``: the Ray
            instance that this process is connected to, or else a new one on this machine.
    """

    def __init__(self, resources_per_member: Mapping[str, Any] | None = None, address: str | None = None) -> None:
        self.resources = {"num_cpus": 1, **(resources_per_member or {})}
        self.address = address
        self._is_ours = False
        self._actors: dict[int, Any] = {}

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
        self._running: dict[Any, int] = {}
        self._began: dict[int, Any] = {}
        """Ray references that become ready when a member's actor has been placed."""
        if scarce := self._scarce():
            if self._is_ours:
                ray.shutdown()
            needs = ", ".join(f"{need:g} {name}, of which there are {there:g}" for name, need, there in scarce)
            raise ValueError(
                f"{work.members} members with {self.resources} each need {needs}: use smaller resources_per_member "
                "(fractions let members share), a smaller population, or a larger cluster"
            )

    def submit(self, order: Order) -> None:
        if order.member not in self._actors:
            self._actors[order.member] = self._place(order.member)
        self._running[self._actors[order.member].carry_out.remote(order)] = order.member

    def wait(self) -> Report | Failure:
        while True:
            ready, _ = ray.wait(list(self._running), num_returns=1, timeout=_PATIENCE)
            if ready:
                break
            if stuck := self._stuck():
                for member in stuck:
                    self.release(member)
                return Failure(None, stuck, "the cluster has too few resources to place their actors")
        member = self._running.pop(ready[0])
        try:
            result: Report | Failure = ray.get(ready[0])
        except ray.exceptions.RayError as error:
            self.release(member)
            return Failure(member, (member,), f"{type(error).__name__}: {error}")
        return result

    def hold(self) -> None:
        pass  # Every member has its own actor, which has started its order.

    def training(self) -> set[int]:
        return set(self._running.values())

    def release(self, member: int) -> None:
        self._running = {order: other for order, other in self._running.items() if other != member}
        self._began.pop(member, None)
        actor = self._actors.pop(member, None)
        if actor is not None:
            ray.kill(actor)

    def close(self) -> None:
        for member in list(self._actors):
            self.release(member)
        if self._is_ours:
            ray.shutdown()

    def _place(self, member: int) -> Any:
        """Create a member's actor; Ray starts it as soon as there are resources for it."""
        options = dict(self.resources)
        if scarce := self._scarce():
            missing = ", ".join(f"{need:g} {name}, now {there:g}" for name, need, there in scarce)
            warnings.warn(f"member {member} shares a core, because the cluster has lost some: {missing}", stacklevel=2)
            options["num_cpus"] = 0
        actor = ray.remote(_Actor).options(**options).remote(self._work, max(1, int(self.resources["num_cpus"])))
        if not scarce:
            self._began[member] = actor.__ray_ready__.remote()
        return actor

    def _stuck(self) -> tuple[int, ...]:
        """Members whose actors wait for resources of lost nodes."""
        if not self._scarce():
            return ()
        return tuple(member for member, began in self._began.items() if not ray.wait([began], timeout=0)[0])

    def _scarce(self) -> list[tuple[str, float, float]]:
        """Resources of which the cluster has too few: name, amount needed by all members, amount available."""
        each = {"CPU": self.resources["num_cpus"], "GPU": self.resources.get("num_gpus", 0)}
        each |= dict(self.resources.get("resources", {}))
        there = ray.cluster_resources()
        needs = {name: need * self._members for name, need in each.items()}
        return [(name, need, there.get(name, 0)) for name, need in needs.items() if need > there.get(name, 0) + 1e-6]


class _Actor:
    """Ray actor that trains one member."""

    def __init__(self, work: Work, threads: int) -> None:
        torch.set_num_threads(threads)
        self._host = Host(work)

    def carry_out(self, order: Order) -> Report | Failure:
        return self._host.carry_out(order)
