"""A population in processes: the same as in one, and nobody waits for anybody."""

from __future__ import annotations

import os

import pytest
import torch

from driftproof.pbt import PBTRunner, ProcessBackend
from driftproof.state import compare
from tests.pbt.populations import NoteUpdates, config, make_agent, slow_zero, states


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


@pytest.mark.parametrize("backend", ["inline", ProcessBackend(1)])
def test_a_stopped_run_begins_no_more_slices(tmp_path, backend):
    """Of four members that wait for one place, one has trained when it is told to stop, and one may be training."""
    runner = PBTRunner(config(population_size=4), make_agent, 2, tmp_path, backend=backend)
    runner.on_change = lambda runner: runner.stop() if any(runner.updates) else None
    runner.run()
    assert sum(runner.updates) <= 4
    # Whoever did not begin is not lost.
    resumed = PBTRunner.resume(tmp_path, make_agent)
    resumed.run()
    assert resumed.updates == [2] * 4


def test_a_run_that_was_stopped_before_it_began_ends_at_once(tmp_path):
    runner = PBTRunner(config(), make_agent, 8, tmp_path, backend=ProcessBackend(1))
    runner.stop()
    runner.run()
    assert runner.updates == [0, 0, 0]


def test_changes_are_told_and_callbacks_are_called_where_members_train(tmp_path):
    told = []
    runner = PBTRunner(
        config(),
        make_agent,
        4,
        tmp_path,
        backend=ProcessBackend(1),
        callback=NoteUpdates,
        on_change=lambda runner: told.append((list(runner.updates), sorted(runner.latest))),
    )
    runner.run()
    assert told[0] == ([0, 0, 0], [])
    assert told[-1] == ([4, 4, 4], [0, 1, 2])
    assert len(told) == 1 + 3 * 2
    assert all(row["noted/rollouts"] >= 1 for row in runner.latest.values())


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
