"""Members, processes and drivers that die, disks that are full: no member is lost."""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
import time

import pytest

from driftproof.pbt import PBTRunner, ProcessBackend, read_events, read_metrics
from driftproof.state import compare
from tests import processes
from tests.pbt.populations import Broken, config, make_agent, states


def kinds(runner, kind):
    return [event for event in runner.scheduler.events if event.kind == kind]


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_workers_are_killed_and_the_run_goes_on(tmp_path, kills):
    backend = ProcessBackend(2)
    runner = PBTRunner(config(population_size=4), make_agent, 12, tmp_path, backend=backend)
    receive, rng, left = runner._receive, random.Random(0), [kills]

    def killing(report):
        result = receive(report)
        if left[0]:
            left[0] -= 1
            os.kill(rng.choice(backend.pids), signal.SIGKILL)
        return result

    runner._receive = killing
    best = runner.run()
    assert left == [0]
    assert runner.updates == [12] * 4
    assert best.num_timesteps == 12 * 32
    restarts = kinds(runner, "restart")
    assert all("SIGKILL" in event.detail for event in restarts)
    assert restarts
    assert read_events(tmp_path / "population.json") == runner.scheduler.events


@pytest.mark.parametrize("backend", ["inline", "process"])
def test_a_member_that_raises_once_begins_again(tmp_path, backend):
    (tmp_path / "1.once").touch()
    runner = PBTRunner(config(), Broken(tmp_path), 4, tmp_path / "run", backend=backend)
    runner.run()
    assert runner.updates == [4, 4, 4]
    (event,) = kinds(runner, "restart")
    assert event.member == 1
    assert "the world of 1 broke once" in event.detail
    assert not kinds(runner, "replace")


def test_beginning_again_is_exact(tmp_path):
    """A failure between two slices leaves no trace in what is learned."""
    whole = PBTRunner(config(), Broken(tmp_path), 6, tmp_path / "whole", synchronous=True)
    whole.run()
    failing = PBTRunner(config(), Broken(tmp_path), 6, tmp_path / "failing", synchronous=True)
    failing.run(updates=2)
    (tmp_path / "1.once").touch()
    order, orders = failing._order, []

    def noting(member):
        orders.append(order(member))
        return orders[-1]

    failing._order = noting
    failing.run()
    assert kinds(failing, "restart")
    # From the folder, from the folder after the failure, and where it is.
    assert [given.restore is None for given in orders if given.member == 1] == [False, False, True]
    assert not compare(states(failing), states(whole))


@pytest.mark.parametrize("synchronous", [False, True])
def test_a_member_that_always_raises_becomes_a_clone(tmp_path, synchronous):
    """Also while the one that it is to be, the first, has reported more than has been decided about."""
    options = {"max_restarts": 2, "synchronous": synchronous, "metric": lambda agent: -float(agent.seed)}
    runner = PBTRunner(config(), Broken(tmp_path), 6, tmp_path / "run", **options)
    runner.run(updates=2)
    (tmp_path / "1").touch()
    recover, order, starts = runner._recover, runner._order, []

    def mending(failure):
        result = recover(failure)
        if kinds(runner, "replace"):
            (tmp_path / "1").unlink()
        return result

    def noting(member):
        given = order(member)
        starts.append(given.start_at)
        return given

    runner._recover, runner._order = mending, noting
    runner.run()
    assert [start for start in starts if start is not None] == [2], "a clone begins anew once"
    assert runner.updates == [6, 6, 6]
    assert len(kinds(runner, "restart")) == 3
    (event,) = kinds(runner, "replace")
    assert event.member == 1
    assert event.donor == 0
    assert runner.scheduler.members[1].lineage[-1][1] is not None
    assert runner.load_member(1).num_timesteps == 6 * 32


def test_only_failures_in_a_row_count(tmp_path):
    runner = PBTRunner(config(population_size=2), Broken(tmp_path), 6, tmp_path / "run", max_restarts=1)
    for updates in (2, 4, 6):
        (tmp_path / "1.once").touch()
        runner.run(updates)
    assert len(kinds(runner, "restart")) == 3
    assert not kinds(runner, "replace")


def test_a_member_that_fails_as_a_clone_too_ends_the_run(tmp_path):
    runner = PBTRunner(config(), Broken(tmp_path), 6, tmp_path / "run", max_restarts=1)
    runner.run(updates=2)
    (tmp_path / "1").touch()
    with pytest.raises(RuntimeError, match=r"(?s)member 1 failed 2 times in a row, also as a copy.*of 1 is broken"):
        runner.run()
    # When the cause is mended, nothing is lost.
    (tmp_path / "1").unlink()
    resumed = PBTRunner.resume(tmp_path / "run", Broken(tmp_path))
    resumed.run()
    assert resumed.updates == [6, 6, 6]


def test_nobody_to_clone(tmp_path):
    for member in range(3):
        (tmp_path / str(member)).touch()
    runner = PBTRunner(config(), Broken(tmp_path), 4, tmp_path / "run")
    with pytest.raises(
        RuntimeError, match=r"(?s)^member 0 cannot be replaced.* it failed 4 times.*world of 0 is broken"
    ):
        runner.run()


def test_what_cannot_be_taken_over_is_undone(tmp_path):
    runner = PBTRunner(config(), make_agent, 8, tmp_path, synchronous=True)
    order, spoiled = runner._order, []

    def spoiling(member):
        given = order(member)
        if given.donor is None or spoiled:
            return given
        spoiled.append(member)
        return type(given)(**{**vars(given), "donor": given.donor[:-100]})

    runner._order = spoiling
    runner.run()
    (event,) = kinds(runner, "undo")
    assert event.member == spoiled[0]
    assert runner.scheduler.statistics()["transfer_success_rate"] < 1
    assert runner.updates == [8, 8, 8]
    hyperparams = runner.scheduler.members[spoiled[0]].hyperparams
    agent = runner.load_member(spoiled[0])
    assert {name: agent.hyperparams[name] for name in hyperparams} == hyperparams


def drive(folder, backend, updates=12):
    return [sys.executable, "-m", "tests.pbt.populations", str(folder), str(updates), backend]


@pytest.mark.parametrize(
    ("backend", "kills"),
    [
        ("process", 1),
        pytest.param("inline", 3, marks=pytest.mark.slow),
        pytest.param("process", 6, marks=pytest.mark.slow),
        pytest.param("vectorized", 4, marks=pytest.mark.slow),
    ],
)
def test_a_killed_driver_resumes(tmp_path, backend, kills):
    state = tmp_path / "cut" / "population_state.json"
    for kill in range(kills):
        process = processes.Started(drive(tmp_path / "cut", backend))
        before = state.stat().st_mtime_ns if state.exists() else 0
        while process.poll() is None and (not state.exists() or state.stat().st_mtime_ns == before):
            time.sleep(0.02)
        time.sleep(0.05 * kill)
        process.kill()
        process.wait()
        process.wait_until_alone()
    # All at once, members train as they do one by one only up to rounding.
    for name, where in (("cut", backend), ("whole", "vectorized" if backend == "vectorized" else "inline")):
        code, _, errors = processes.run(drive(tmp_path / name, where))
        assert code == 0, errors
    cut, whole = (PBTRunner.resume(tmp_path / name, make_agent) for name in ("cut", "whole"))
    assert cut.updates == [12] * 3
    assert cut.scheduler.events == whole.scheduler.events
    differences = compare(states(cut), states(whole))
    assert not differences, "\n".join(map(str, differences[:5]))
    # Every slice is logged, if it was trained twice only once.
    metrics = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("cut", "whole")]
    steps = [{member: [row["step"] for row in rows] for member, rows in each.items()} for each in metrics]
    assert steps[0] == steps[1]


def test_one_process_runs_a_population(tmp_path):
    process = processes.Started(drive(tmp_path, "inline", 10_000))
    process.wait_for((tmp_path / "population_state.json").exists)
    with pytest.raises(RuntimeError, match="another process is using this run"):
        PBTRunner.resume(tmp_path, make_agent).run()


def test_a_full_disk_leaves_the_run_intact(tmp_path):
    PBTRunner(config(), make_agent, 8, tmp_path).run(updates=4)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.json")}
    members = {path: path.read_bytes() for path in (tmp_path / "members").iterdir()}
    runner = PBTRunner.resume(tmp_path, make_agent)
    # Files cannot grow beyond this size: the system's own error, as from a full disk.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OSError, match="the saved run is intact"):
            runner.run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    for path, content in {**before, **members}.items():
        assert path.read_bytes() == content, path
    resumed = PBTRunner.resume(tmp_path, make_agent)
    resumed.run()
    assert resumed.updates == [8, 8, 8]


def test_members_that_are_not_a_number_never_win(tmp_path):
    def metric(agent):
        return float("nan") if agent.seed == 10 else -agent.num_timesteps * 1.0

    for mode in ("max", "min"):
        runner = PBTRunner(config(metric_mode=mode), make_agent, 4, tmp_path / mode, metric=metric)
        assert runner.run().seed != 10
        assert runner.scheduler.members[0].performance is None
