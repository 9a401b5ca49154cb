"""A population on a real Ray: on this machine, and on a cluster of three nodes that loses one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

ray = pytest.importorskip("ray")

from ray.cluster_utils import Cluster  # noqa: E402

from driftproof.pbt import PBTRunner  # noqa: E402
from driftproof.pbt.ray_backend import RayBackend  # noqa: E402
from driftproof.pbt.work import Work  # noqa: E402
from driftproof.state import compare  # noqa: E402
from tests.pbt.populations import config, make_agent, states  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)

ROOT = str(Path(__file__).parents[2])
WORKERS = {"env_vars": {"PYTHONPATH": f"{ROOT}/src:{ROOT}", "OMP_NUM_THREADS": "1"}}
QUIET = {"log_to_driver": False, "include_dashboard": False, "runtime_env": WORKERS}


@pytest.fixture
def local():
    ray.init(num_cpus=3, **QUIET)
    yield
    ray.shutdown()


def test_ray_does_what_one_process_does(local, tmp_path):
    runners = [
        PBTRunner(config(), make_agent, 4, tmp_path / str(i), seed=5, backend=backend, synchronous=True)
        for i, backend in enumerate(["inline", "ray"])
    ]
    for runner in runners:
        runner.run()
    assert ray.is_initialized()  # it was not the runner's to end
    inline, on_ray = runners
    assert on_ray.scheduler.events == inline.scheduler.events
    differences = compare(states(on_ray), states(inline))
    assert not differences, "\n".join(map(str, differences[:5]))

    with pytest.raises(ValueError, match=r"3 members with .* need 6 CPU, of which there are 3"):
        PBTRunner(config(), make_agent, 4, tmp_path / "much", backend=RayBackend({"num_cpus": 2})).run()
    with pytest.raises(RuntimeError, match="connected to Ray already"):
        PBTRunner(config(), make_agent, 4, tmp_path / "two", backend=RayBackend(address="10.0.0.1:6379")).run()


@pytest.mark.slow
def test_a_group_of_members_in_each_actor(local, tmp_path):
    """The last group is smaller; a killed actor loses its whole group, which restarts."""
    settings = {"config": config(population_size=5), "make_agent": make_agent, "total_updates": 6, "synchronous": True}
    whole = PBTRunner(run_dir=tmp_path / "whole", seed=5, backend="vectorized", **settings)
    whole.run()
    backend = RayBackend(members_per_actor=2)
    runner = PBTRunner(run_dir=tmp_path / "run", seed=5, backend=backend, **settings)
    receive, left = runner._receive, [1]

    def killing(report):
        result = receive(report)
        if left[0] and report.updates == 4:
            left[0] -= 1
            ray.kill(backend._actors[2])
        return result

    runner._receive = killing
    runner.run()
    assert runner.updates == [6] * 5
    decided = [[event for event in each.scheduler.events if event.kind != "restart"] for each in (runner, whole)]
    assert [(e.kind, e.member, e.donor) for e in decided[0]] == [(e.kind, e.member, e.donor) for e in decided[1]]
    pairs = zip(states(runner), states(whole), strict=True)
    assert all(torch.allclose(a["policy"][n], b["policy"][n], atol=1e-4) for a, b in pairs for n in a["policy"])
    with pytest.raises(ValueError, match=r"3 actors of 2 members with .* need 6 CPU, of which there are 3"):
        RayBackend({"num_cpus": 2}, members_per_actor=2).start(Work(make_agent, None, 5, 6, "copy"))


@pytest.mark.slow
def test_an_actor_is_killed_and_the_run_goes_on(local, tmp_path):
    backend = RayBackend()
    runner = PBTRunner(config(), make_agent, 8, tmp_path, backend=backend)
    receive, left = runner._receive, [3]

    def killing(report):
        result = receive(report)
        if left[0] and backend._actors:
            left[0] -= 1
            ray.kill(next(iter(backend._actors.values())))
        return result

    runner._receive = killing
    runner.run()
    assert runner.updates == [8, 8, 8]
    assert [event.kind for event in runner.scheduler.events].count("restart") >= 1


def where(agent):
    """Which node a member is on, as its performance."""
    return float(int(ray.get_runtime_context().get_node_id()[:8], 16))


@pytest.mark.slow
def test_a_lost_node_loses_no_member(tmp_path):
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        nodes = [cluster.add_node(num_cpus=2) for _ in range(2)]
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, log_to_driver=False, runtime_env=WORKERS)
        backend = RayBackend({"num_cpus": 1, "scheduling_strategy": "SPREAD"})
        runner = PBTRunner(
            config(population_size=6), make_agent, 12, tmp_path, metric=where, backend=backend, synchronous=True
        )
        receive, homes, count = runner._receive, {}, [0]

        def losing(report):
            homes.setdefault(report.performance, set()).add(report.member)
            result = receive(report)
            count[0] += 1
            if count[0] == 8:
                cluster.remove_node(nodes[0], allow_graceful=False)
            return result

        runner._receive = losing
        with pytest.warns(UserWarning, match="shares a core, because the cluster has lost some: 6 CPU, now 4"):
            runner.run()
        assert len(homes) == 3
        assert runner.updates == [12] * 6
        assert {event.member for event in runner.scheduler.events if event.kind == "restart"}
        for member in range(6):
            assert runner.load_member(member).num_timesteps == 12 * 32
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.mark.slow
def test_a_ray_of_its_own_ends_with_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", ROOT)
    runner = PBTRunner(config(), make_agent, 2, tmp_path, backend=RayBackend({"num_cpus": 0.5}))
    runner.run()
    assert runner.updates == [2, 2, 2]
    assert not ray.is_initialized()
