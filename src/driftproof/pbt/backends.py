"""Where members train: in this process, or in others of this machine. Clusters: :mod:`driftproof.pbt.ray_backend`."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Literal, Protocol, TypeAlias, get_args

import torch
from stable_baselines3.common.vec_env.base_vec_env import CloudpickleWrapper

from driftproof._arguments import check_count, check_option
from driftproof._process_signals import follow_parent, left_to_this_process
from driftproof.pbt.work import Failure, Host, Order, Report, Work

BackendName: TypeAlias = Literal["inline", "process", "ray"]

_PATIENCE = 10.0
"""Seconds for a process to close its environments."""


class Backend(Protocol):
    """Has orders carried out, in any order, and tells of each what came of it."""

    def start(self, work: Work) -> None:
        """Get ready. No member is there yet."""

    def submit(self, order: Order) -> None:
        """Have an order carried out; never waits for a member to train."""

    def wait(self) -> Report | Failure:
        """What came of some order, as soon as there is one; only called while there are orders."""

    def hold(self) -> None:
        """Begin no more orders until the next start; may be called at any moment, also by a signal handler."""

    def training(self) -> set[int]:
        """Members whose orders have begun, and of which nobody has been told what came of it."""

    def release(self, member: int) -> None:
        """A member has no more to do."""

    def close(self) -> None:
        """Give everything up, also what has not come to its end, and what a start that failed has left."""


class InlineBackend:
    """All members in this process, one after the other."""

    def __init__(self) -> None:
        self._host: Host | None = None

    def start(self, work: Work) -> None:
        self._host = Host(work)
        self._orders: deque[Order] = deque()

    def submit(self, order: Order) -> None:
        self._orders.append(order)

    def wait(self) -> Report | Failure:
        assert self._host is not None
        return self._host.carry_out(self._orders.popleft())

    def hold(self) -> None:
        pass  # Orders begin when they are waited for.

    def training(self) -> set[int]:
        return set()

    def release(self, member: int) -> None:
        pass

    def close(self) -> None:
        if self._host is not None:
            self._host.close()


class ProcessBackend:
    """Members in processes of this machine, which have nothing in common.

    A process has ``member % workers`` in its care and trains them in turn. It is started, also again after it has died,
    when there is something to do for it. The machine's cores are divided among the processes, for torch threads of two
    that are on one core stall each other.

    Args:
        workers: Processes. ``None``: as many as there are cores, and not more than members.
        threads: Of torch, in each process. ``None``: the cores divided by the processes.
    """

    def __init__(self, workers: int | None = None, threads: int | None = None) -> None:
        for name, count in (("workers", workers), ("threads", threads)):
            if count is not None:
                check_count(name, count, at_least=1)
        self.workers, self.threads = workers, threads
        self._workers: dict[int, _Worker] = {}

    def start(self, work: Work) -> None:
        self._work, self._count = work, min(self.workers or _cores(), work.members)
        self._threads = self.threads or max(1, _cores() // self._count)
        self._workers = {}
        self._holds = False

    @property
    def pids(self) -> list[int | None]:
        """Of the processes."""
        return [worker.process.pid for worker in self._workers.values()]

    def submit(self, order: Order) -> None:
        place = order.member % self._count
        if place not in self._workers:
            with left_to_this_process():  # Also: an interruption waits until it is there to be closed.
                self._workers[place] = _Worker(self._work, self._threads, lambda: self._holds)
        self._workers[place].submit(order)

    def wait(self) -> Report | Failure:
        result = None
        while result is None:
            places = {worker.connection: place for place, worker in self._workers.items()}
            place = places[wait(list(places))[0]]  # type: ignore[index]
            try:
                result = self._workers[place].receive()
            except (EOFError, OSError):
                result = self._bury(place)
        return result

    def hold(self) -> None:
        self._holds = True

    def training(self) -> set[int]:
        return {worker.busy_with for worker in self._workers.values() if worker.busy_with is not None}

    def release(self, member: int) -> None:
        pass

    def close(self) -> None:
        # First tell all, so that whoever is idle ends even if this is interrupted.
        for worker in self._workers.values():
            worker.connection.close()
        for worker in self._workers.values():
            worker.end()

    def _bury(self, place: int) -> Failure:
        """A process has died, with it all members in its care."""
        dead = self._workers.pop(place)
        dead.process.join()
        lost = tuple(range(place, self._work.members, self._count))
        reason = f"its process {dead.process.pid} {_end(dead.process.exitcode)}"
        if not dead.is_ready and dead.process.exitcode == 1:
            reason += (
                " before it could begin, as it does if make_agent needs what is not there, or if a script has no "
                'if __name__ == "__main__": around what it runs'
            )
        return Failure(dead.busy_with, lost, reason)


class _Worker:
    """A process, its end of the line, and the orders that wait for it."""

    def __init__(self, work: Work, threads: int, is_held: Callable[[], bool]) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.process: BaseProcess = context.Process(target=_serve, args=(other, CloudpickleWrapper(work), threads))
        self.process.start()
        other.close()
        self.is_ready, self._is_held = False, is_held
        self._orders: deque[Order] = deque()
        self._current: Order | None = None

    @property
    def busy_with(self) -> int | None:
        """Whose order it carries out."""
        return None if self._current is None else self._current.member

    def submit(self, order: Order) -> None:
        self._orders.append(order)
        self._begin_next()

    def receive(self) -> Report | Failure | None:
        """What came of an order; ``None``: it is ready for the first."""
        result: Report | Failure | None = self.connection.recv()
        if result is None:
            self.is_ready = True
            self._send()
        else:
            self._current = None
            self._begin_next()
        return result

    def end(self) -> None:
        """See that the process ends, by itself if it has nothing to do."""
        if self.busy_with is None:
            self.process.join(_PATIENCE)
        self.process.kill()
        self.process.join()

    def _begin_next(self) -> None:
        if self._is_held() or self._current is not None or not self._orders:
            return
        self._current = self._orders.popleft()
        self._send()

    def _send(self) -> None:
        # One that does not listen yet would have everybody wait until it has taken all of a large order.
        if self._current is None or not self.is_ready:
            return
        # If it has died, whoever receives from it will see.
        with contextlib.suppress(OSError):
            self.connection.send(self._current)


def _serve(connection: Connection, work: CloudpickleWrapper, threads: int) -> None:
    """Carry out orders until there is nobody to give any."""
    follow_parent()
    if hasattr(os, "register_at_fork"):
        # As long as an environment's process had this end too, nobody would see that this one has died.
        os.register_at_fork(after_in_child=connection.close)
    torch.set_num_threads(threads)
    host = Host(work.var)
    try:
        connection.send(None)
        while True:
            connection.send(host.carry_out(connection.recv()))
    except (EOFError, OSError):
        pass
    finally:
        host.close()


def _end(exit_code: int | None) -> str:
    """How a process ended, in words."""
    if exit_code is None or exit_code >= 0:
        return f"ended with exit code {exit_code}"
    names = {item.value: item.name for item in signal.Signals}
    return f"was killed by {names.get(-exit_code, f'signal {-exit_code}')}"


def _cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def backend_named(name: BackendName) -> Backend:
    """A backend with its default options."""
    check_option("backend", name, get_args(BackendName))
    if name == "ray":
        from driftproof.pbt.ray_backend import RayBackend

        return RayBackend()
    return InlineBackend() if name == "inline" else ProcessBackend()
