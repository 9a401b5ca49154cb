"""Where members train: in this process, or in others of this machine. Clusters: :mod:`driftproof.pbt.ray_backend`."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections import deque
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Protocol

import torch
from stable_baselines3.common.vec_env.base_vec_env import CloudpickleWrapper

from driftproof._arguments import check_count
from driftproof._signals import left_to_this_process
from driftproof.pbt.work import Failure, Host, Order, Report, Work

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

    A process has ``member % workers`` in its care and trains them in turn. The machine's cores are divided among the
    processes, for torch threads of two that are on one core stall each other.

    Args:
        workers: Processes. ``None``: as many as there are cores, and not more than members.
        threads: Of torch, in each process. ``None``: the cores divided by the processes.
    """

    def __init__(self, workers: int | None = None, threads: int | None = None) -> None:
        for name, count in (("workers", workers), ("threads", threads)):
            if count is not None:
                check_count(name, count, at_least=1)
        self.workers, self.threads = workers, threads
        self._workers: list[_Worker] = []

    def start(self, work: Work) -> None:
        count = min(self.workers or _cores(), work.members)
        self._work, self._threads = work, self.threads or max(1, _cores() // count)
        self._workers = []
        with left_to_this_process():  # Also: an interruption waits until all are there to be closed.
            for _ in range(count):
                self._workers.append(_Worker(work, self._threads))

    @property
    def pids(self) -> list[int | None]:
        """Of the processes."""
        return [worker.process.pid for worker in self._workers]

    def submit(self, order: Order) -> None:
        self._workers[order.member % len(self._workers)].submit(order)

    def wait(self) -> Report | Failure:
        by_connection = {worker.connection: worker for worker in self._workers}
        worker = by_connection[wait(list(by_connection))[0]]  # type: ignore[index]
        try:
            return worker.receive()
        except (EOFError, OSError):
            return self._replace(worker)

    def hold(self) -> None:
        for worker in self._workers:
            worker.holds = True

    def training(self) -> set[int]:
        return {worker.busy_with for worker in self._workers if worker.busy_with is not None}

    def release(self, member: int) -> None:
        pass

    def close(self) -> None:
        # First tell all, so that whoever is idle ends even if this is interrupted.
        for worker in self._workers:
            worker.connection.close()
        for worker in self._workers:
            worker.end()

    def _replace(self, dead: _Worker) -> Failure:
        """A new process for one that has died, with it all members in its care."""
        place = self._workers.index(dead)
        dead.process.join()
        with left_to_this_process():
            self._workers[place] = _Worker(self._work, self._threads)
        self._workers[place].holds = dead.holds
        lost = tuple(range(place, self._work.members, len(self._workers)))
        return Failure(dead.busy_with, lost, f"its process {dead.process.pid} {_end(dead.process.exitcode)}")


class _Worker:
    """A process, its end of the line, and the orders that wait for it."""

    def __init__(self, work: Work, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.process: BaseProcess = context.Process(target=_serve, args=(other, CloudpickleWrapper(work), threads))
        self.process.start()
        other.close()
        self.busy_with: int | None = None
        self.holds = False
        self._orders: deque[Order] = deque()

    def submit(self, order: Order) -> None:
        self._orders.append(order)
        self._send_next()

    def receive(self) -> Report | Failure:
        result: Report | Failure = self.connection.recv()
        self.busy_with = None
        self._send_next()
        return result

    def end(self) -> None:
        """See that the process ends, by itself if it has nothing to do."""
        if self.busy_with is None:
            self.process.join(_PATIENCE)
        self.process.terminate()
        self.process.join(_PATIENCE)
        self.process.kill()
        self.process.join()

    def _send_next(self) -> None:
        if self.holds or self.busy_with is not None or not self._orders:
            return
        order = self._orders.popleft()
        self.busy_with = order.member
        # If it has died, whoever receives from it will see.
        with contextlib.suppress(OSError):
            self.connection.send(order)


def _serve(connection: Connection, work: CloudpickleWrapper, threads: int) -> None:
    """Carry out orders until there is nobody to give any."""
    # Also where it cannot be kept away: Ctrl-C is for the one who gives orders.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(os, "register_at_fork"):
        # As long as an environment's process had this end too, nobody would see that this one has died.
        os.register_at_fork(after_in_child=connection.close)
    torch.set_num_threads(threads)
    host = Host(work.var)
    try:
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
