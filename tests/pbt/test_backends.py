"""A population in processes: the same as in one, and nobody waits for anybody."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from functools import partial

import numpy as np
import pytest
import torch
from stable_baselines3.common.callbacks import BaseCallback

from driftproof.pbt import InlineBackend, PBTRunner, ProcessBackend, backends
from driftproof.pbt.work import Failure, Host, Order, Report, Work
from driftproof.state import compare
from tests import processes
from tests.pbt.populations import NoteUpdates, config, make_agent, slow_zero, states
from tests.ppo.resuming import walk
from tests.processes import ENVIRONMENT, ROOT


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


@pytest.mark.slow
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


@pytest.mark.parametrize("backend", ["inline", pytest.param(ProcessBackend(1), marks=pytest.mark.slow)])
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


def work(make=make_agent, metric=lambda agent: 0.0, callback=None):
    return Work(make, metric, 2, 4, "copy", callback)


def hyperparams():
    return {"learning_rate": 1e-3, "optimizer.sigma": 1e-3}


def wait_until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_processes_end_when_not_all_can_be_started(tmp_path, monkeypatch):
    whole, started = backends._Worker, []

    def worker(*args):
        if started:
            raise OSError("there is no room for another process")
        started.append(whole(*args))
        return started[0]

    monkeypatch.setattr(backends, "_Worker", worker)
    runner = PBTRunner(config(), make_agent, 2, tmp_path, backend=ProcessBackend(2))
    with pytest.raises(OSError, match="no room for another"):
        runner.run()
    assert started[0].process.exitcode is not None
    assert not multiprocessing.active_children()


def test_processes_end_when_a_run_is_interrupted(tmp_path):
    def interrupting(runner):
        raise KeyboardInterrupt

    runner = PBTRunner(config(), make_agent, 2, tmp_path, backend=ProcessBackend(2), on_change=interrupting)
    with pytest.raises(KeyboardInterrupt):
        runner.run()
    assert not multiprocessing.active_children()


def begin(backend):
    """Have a member trained; the process that does."""
    backend.submit(Order(0, 1, hyperparams()))
    worker = backend._workers[0]
    assert worker.receive() is None  # It is there.
    return worker.process


def stubborn(file, agent):
    """Does not let its process be ended."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    file.touch()
    time.sleep(600)


def test_a_process_that_does_not_listen_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(backends, "_PATIENCE", 0.2)
    backend = ProcessBackend(1)
    backend.start(work(metric=partial(stubborn, tmp_path / "is_there")))
    try:
        process = begin(backend)
        wait_until((tmp_path / "is_there").exists)
    finally:
        backend.close()
    assert process.exitcode == -signal.SIGKILL


def forking(folder, agent):
    """Leaves a process behind that has all that this one has open, as forked environments do."""
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
        os._exit(0)
    (folder / "child").write_text(str(pid))
    (folder / "is_there").touch()
    time.sleep(600)


def test_a_process_that_dies_is_missed_though_its_children_live(tmp_path):
    backend = ProcessBackend(1)
    backend.start(work(metric=partial(forking, tmp_path)))
    try:
        process = begin(backend)
        wait_until((tmp_path / "is_there").exists)
        os.kill(process.pid, signal.SIGKILL)
        signal.alarm(120)  # Ends the test if nobody notices.
        failure = backend.wait()
        signal.alarm(0)
    finally:
        os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
        backend.close()
    assert isinstance(failure, Failure)
    assert (failure.member, failure.lost) == (0, (0, 1))
    assert "SIGKILL" in failure.reason


def test_nobody_waits_for_a_process_to_start_and_none_is_started_for_nothing():
    backend = ProcessBackend(1)
    backend.start(work())
    assert backend.pids == []
    try:
        backend.submit(Order(0, 1, hyperparams(), restore=bytes(10_000_000)))  # more than fits in between
        assert not backend._workers[0].connection.poll(), "it was waited for"
        assert backend.training() == {0}
        failure = backend.wait()
        assert (failure.member, failure.lost) == (0, (0,))
        assert "CheckpointError" in failure.reason
        os.kill(backend.pids[0], signal.SIGKILL)
        failure = backend.wait()
        assert (failure.member, failure.lost) == (None, (0, 1))
        assert backend.pids == []
    finally:
        backend.close()


SCRIPT = """
import sys
from functools import partial
from driftproof.pbt import PBTRunner, ProcessBackend
from tests.pbt import populations

def make(first, member):
    return populations.make_agent(first + member)

def run():
    local = 10
    make_agent = partial(lambda first, member: make(local + first, member), 0)
    metric = lambda agent: float(agent.seed)
    backend = ProcessBackend(1, threads=1)
    config = populations.config(population_size=2)
    runner = PBTRunner(config, make_agent, 1, sys.argv[1], metric=metric, backend=backend, max_restarts=0)
    runner.run()
    print([member.performance for member in runner.scheduler.members])

"""


def run_script(tmp_path, end):
    (tmp_path / "script.py").write_text(SCRIPT + end)
    paths = os.pathsep.join([str(ROOT), ENVIRONMENT["PYTHONPATH"]])
    command = [sys.executable, tmp_path / "script.py", tmp_path / "run"]
    return processes.run(command, cwd=tmp_path, env={**ENVIRONMENT, "PYTHONPATH": paths})


def test_a_script_may_make_agents_by_functions_of_its_own(tmp_path):
    code, output, errors = run_script(tmp_path, 'if __name__ == "__main__":\n    run()\n')
    assert code == 0, errors
    assert output == "[20.0, 21.0]\n"


def test_a_script_that_processes_would_run_again_is_told_so(tmp_path):
    code, _, errors = run_script(tmp_path, "run()\n")
    assert code == 1
    assert "ended with exit code 1 while starting" in errors
    assert 'if __name__ == "__main__":' in errors.splitlines()[-1]


def test_signals_without_a_name_are_told_too():
    assert backends._end(-signal.SIGKILL) == "was killed by SIGKILL"
    assert backends._end(-(signal.SIGRTMIN + 1)) == f"was killed by signal {signal.SIGRTMIN + 1}"
    assert backends._end(3) == "ended with exit code 3"


def test_nothing_to_close_is_fine():
    for backend in (InlineBackend(), ProcessBackend()):
        backend.close()


def test_environments_of_a_member_that_cannot_be_restored_are_closed():
    closed = []

    def noting():
        env = walk()
        env.unwrapped.close = lambda: closed.append(env)
        return env

    host = Host(work(partial(make_agent, env=noting)))
    failure = host.carry_out(Order(0, 1, hyperparams(), restore=b"no checkpoint"))
    assert isinstance(failure, Failure)
    assert len(closed) == 2
    # Nor do those stay open that belong to what a state replaces.
    report = host.carry_out(Order(0, 1, hyperparams()))
    again = host.carry_out(Order(0, 1, hyperparams(), restore=report.state))
    assert again.updates == 2
    assert len(closed) == 4


def test_a_clone_has_nothing_to_go_on_with_but_what_it_takes_over():
    host = Host(work())
    failure = host.carry_out(Order(0, 1, hyperparams(), start_at=1, donor=b"no checkpoint"))
    assert isinstance(failure, Failure)
    report = host.carry_out(Order(0, 1, hyperparams(), donor=b"no checkpoint"))
    assert "CheckpointError" in report.not_taken_over
    clone = host.carry_out(Order(1, 1, hyperparams(), start_at=2, donor=report.state))
    assert (clone.updates, clone.not_taken_over) == (3, None)


class LogMuch(BaseCallback):
    """Logs what is no number too."""

    def _on_step(self):
        self.logger.record("one", np.array(1.5))
        self.logger.record("two", torch.tensor(2.5))
        self.logger.record("many", np.zeros(3))
        self.logger.record("text", np.str_("text"))
        self.logger.record("flag", np.bool_(True))
        return True


def test_only_numbers_are_reported():
    report = Host(work(callback=LogMuch)).carry_out(Order(0, 1, hyperparams()))
    assert isinstance(report, Report), report.reason
    (row,) = report.rows
    assert (row["one"], row["two"], row["flag"]) == (1.5, 2.5, 1)
    assert not {"many", "text"} & set(row)


class GiveUp(BaseCallback):
    """Ends the training in its second rollout."""

    def _on_step(self):
        return self.num_timesteps < 40


def test_a_callback_that_ends_a_member_is_an_error(tmp_path):
    runner = PBTRunner(config(), make_agent, 4, tmp_path, callback=GiveUp, max_restarts=0)
    with pytest.raises(RuntimeError, match=r"(?s)member 0 cannot be replaced.*failed 1 times.*a callback stopped"):
        runner.run()
