"""A population in processes: the same as in one, and nobody waits for anybody."""

from __future__ import annotations

import os

import pytest
import torch

from driftproof.pbt import PBTRunner, ProcessBackend
from driftproof.state import compare
from tests.pbt.populations import config, make_agent, slow_zero, states


@pytest.fixture(autouse=True)
def one_thread():
    """As a worker has on the machine that runs the tests, so that sums are taken in the same order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_processes_do_what_one_process_does(tmp_path):
    runners = [
        PBTRunner(config(), make_agent, 6, tmp_path / str(i), seed=5, backend=backend, synchronous=True)
        for i, backend in enumerate(["inline", ProcessBackend(workers=2)])
    ]
    for runner in runners:
        runner.run()
    inline, processes = runners
    assert any(event.kind == "exploit" for event in inline.scheduler.events)
    assert [vars(event) for event in processes.scheduler.events] == [vars(event) for event in inline.scheduler.events]
    differences = compare(states(processes), states(inline))
    assert not differences, "\n".join(map(str, differences[:5]))


def test_a_slow_member_blocks_nobody(tmp_path):
    runner = PBTRunner(config(), slow_zero, 8, tmp_path, backend=ProcessBackend(3))
    receive, order = runner._receive, []

    def noting(report):
        order.append(report.member)
        return receive(report)

    runner._receive = noting
    runner.run()
    assert runner.updates == [8, 8, 8]
    others = [place for place, member in enumerate(order) if member != 0]
    assert max(others) < len(order) - 2, order


def test_threads_are_divided(tmp_path):
    cores = len(os.sched_getaffinity(0))
    runner = PBTRunner(
        config(), make_agent, 2, tmp_path, metric=lambda agent: torch.get_num_threads(), backend="process"
    )
    runner.run()
    workers = min(cores, 3)
    assert [member.performance for member in runner.scheduler.members] == [max(1, cores // workers)] * 3


def test_a_stopped_run_goes_on(tmp_path):
    runner = PBTRunner(config(), make_agent, 8, tmp_path, backend="process")
    receive = runner._receive

    def stopping(report):
        runner.stop()
        return receive(report)

    runner._receive = stopping
    runner.run()
    assert 0 < sum(runner.updates) < 24
    # Where it goes on is free.
    resumed = PBTRunner.resume(tmp_path, make_agent, backend="inline")
    assert resumed.updates == runner.updates
    resumed.run()
    assert resumed.updates == [8, 8, 8]


def test_wrong_options_are_refused(tmp_path):
    with pytest.raises(ValueError, match="backend"):
        PBTRunner(config(), make_agent, 2, tmp_path, backend="threads")
    with pytest.raises(ValueError, match="workers"):
        ProcessBackend(0)
    with pytest.raises(ValueError, match="max_restarts"):
        PBTRunner(config(), make_agent, 2, tmp_path, max_restarts=-1)
