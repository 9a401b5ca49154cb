"""Where members train: in this process or in worker processes.

Clusters: :mod:`driftproof.pbt.ray_backend`; all members as one: :mod:`driftproof.pbt.vectorized`.
"""

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

BackendName: TypeAlias = Literal["inline", "process", "ray", "vectorized"]

_PATIENCE = 10.0
"""Seconds that an idle worker process has to close its environments before it is killed."""


class CannotStartError(RuntimeError):
    """A backend cannot start a run: it cannot be reached, or no member could ever train there."""


class Backend(Protocol):
    """Executes orders, in any order, and returns one report or failure for each."""

    def start(self, work: Work) -> None:
        """Prepare for a run; members are created by their first orders.

        Raises:
            CannotStartError: No member could be trained.
        """

    def submit(self, order: Order) -> None:
        """Queue an order; does not block."""

    def wait(self) -> Report | Failure:
        """Block until an order is finished, and return its result. Only called while orders are outstanding."""

    def hold(self) -> None:
        """Start no more orders until the next :meth:`start`; safe to call from a signal handler."""

    def training(self) -> set[int]:
        """Members whose orders have started and whose results have not been returned yet."""

    def release(self, member: int) -> None:
        """Free the resources of a member that has finished training."""

    def close(self) -> None:
        """Free all resources, also of unfinished orders and of a failed :meth:`start`."""


class InlineBackend:
    """Trains all members in this process, one after the other."""

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
        pass  # Orders start in wait().

    def training(self) -> set[int]:
        return set()

    def release(self, member: int) -> None:
        pass

    def close(self) -> None:
        if self._host is not None:
            self._host.close()


class ProcessBackend:
    """Trains members in worker processes of this machine.

    Worker ``member % workers`` trains a member, one member at a time. A worker process is started on the first order
    for it, and again after it has died. The cores are divided among the workers, because torch threads of two processes
    on one core slow each other down.

    Args:
        workers: Processes. ``None``: as many as there are cores, and not more than members.
        threads: Torch threads per process. ``None``: the number of cores divided by the number of processes.
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
        """Process ids of the workers."""
        return [worker.process.pid for worker in self._workers.values()]

    def submit(self, order: Order) -> None:
        place = order.member % self._count
        if place not in self._workers:
            with left_to_this_process():  # Delays an interrupt until close() knows of the worker.
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
                result = self._remove_dead(place)
        return result

    def hold(self) -> None:
        self._holds = True

    def training(self) -> set[int]:
        return {worker.busy_with for worker in self._workers.values() if worker.busy_with is not None}

    def release(self, member: int) -> None:
        pass

    def close(self) -> None:
        # Close all connections first, so that idle workers end even if this is interrupted.
        for worker in self._workers.values():
            worker.connection.close()
        for worker in self._workers.values():
            worker.end()

    def _remove_dead(self, place: int) -> Failure:
        """The failure of a worker process that has died, and of all its members."""
        dead = self._workers.pop(place)
        dead.process.join()
        lost = tuple(range(place, self._work.members, self._count))
        reason = f"its process {dead.process.pid} {_end(dead.process.exitcode)}"
        if not dead.is_ready and dead.process.exitcode == 1:
            reason += (
                " while starting: make_agent may need a module that cannot be imported there, or the script lacks "
                'if __name__ == "__main__":'
            )
        return Failure(dead.busy_with, lost, reason)


class _Worker:
    """A worker process, the connection to it, and its queue of orders."""

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
        """Member whose order is being executed."""
        return None if self._current is None else self._current.member

    def submit(self, order: Order) -> None:
        self._orders.append(order)
        self._begin_next()

    def receive(self) -> Report | Failure | None:
        """The result of an order; ``None``: the process has started and is ready for orders."""
        result: Report | Failure | None = self.connection.recv()
        if result is None:
            self.is_ready = True
            self._send()
        else:
            self._current = None
            self._begin_next()
        return result

    def end(self) -> None:
        """End the process; an idle one gets time to close its environments."""
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
        # Sending a large order to a process that is still starting would block until it reads from the pipe.
        if self._current is None or not self.is_ready:
            return
        # If it has died, receive() will notice.
        with contextlib.suppress(OSError):
            self.connection.send(self._current)


def _serve(connection: Connection, work: CloudpickleWrapper, threads: int) -> None:
    """Main function of a worker process: execute orders until the connection is closed."""
    follow_parent()
    if hasattr(os, "register_at_fork"):
        # A forked environment process that inherits this end would keep the pipe open after this process has died.
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
    """Description of how a process ended."""
    if exit_code is None or exit_code >= 0:
        return f"ended with exit code {exit_code}"
    names = {item.value: item.name for item in signal.Signals}
    return f"was killed by {names.get(-exit_code, f'signal {-exit_code}')}"


def _cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def backend_named(name: BackendName) -> Backend:
    """A backend with its default options."""
    check_option("backend", name, get_args(BackendName))
    if name == "ray":
        from driftproof.pbt.ray_backend import RayBackend

        return RayBackend()
    if name == "vectorized":
        from driftproof.pbt.vectorized.backend import VectorizedBackend

        return VectorizedBackend()
    return InlineBackend() if name == "inline" else ProcessBackend()
