"""A population on a real Ray: on this machine, and on a cluster of three nodes that loses one."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

ray = pytest.importorskip("ray")

from ray.cluster_utils import Cluster  # noqa: E402

from driftproof.pbt import CannotStartError, PBTRunner  # noqa: E402
from driftproof.pbt.cluster import check_resources, most_actors, too_large  # noqa: E402
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
    ray.init(num_cpus=2, **QUIET)
    yield
    ray.shutdown()


def test_ray_does_what_one_process_does(local, tmp_path):
    """With three members on two cores, which take turns."""
    runners = [
        PBTRunner(config(), make_agent, 4, tmp_path / str(i), seed=5, backend=backend, synchronous=True)
        for i, backend in enumerate(["inline", RayBackend()])
    ]
    for runner in runners:
        runner.run()
    assert ray.is_initialized()  # it was not the runner's to end
    inline, on_ray = runners
    assert on_ray.scheduler.events == inline.scheduler.events
    differences = compare(states(on_ray), states(inline))
    assert not differences, "\n".join(map(str, differences[:5]))

    for refused, message in [
        ({"num_cpus": 3}, r"a member needs 3 CPU, and no node .* has that: the largest of 1 has 2 CPU; use smaller"),
        ({"resources": {"tpu": 1}}, r"a member needs 1 CPU, 1 tpu, and no node .* has 2 CPU, 0 tpu"),
    ]:
        runner = PBTRunner(config(), make_agent, 4, tmp_path / "refused", backend=RayBackend(refused))
        with pytest.raises(CannotStartError, match=message):
            runner.run()
    for options, message in [
        ({"address": "10.0.0.1:6379"}, "connected to Ray already: .* leave out address"),
        ({"runtime_env": {"py_modules": []}}, "connected to Ray already: .* leave out runtime_env"),
    ]:
        runner = PBTRunner(config(), make_agent, 4, tmp_path / "refused", backend=RayBackend(**options))
        with pytest.raises(CannotStartError, match=message):
            runner.run()
    assert not (tmp_path / "refused").exists()


@pytest.mark.slow
def test_a_group_of_members_in_each_actor(local, tmp_path):
    """Three groups take turns on two actors, the last group is smaller; a killed actor's groups restart."""
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
            ray.kill(backend._actors[-1].handle)
        return result

    runner._receive = killing
    runner.run()
    assert runner.updates == [6] * 5
    decided = [[event for event in each.scheduler.events if event.kind != "restart"] for each in (runner, whole)]
    assert [(e.kind, e.member, e.donor) for e in decided[0]] == [(e.kind, e.member, e.donor) for e in decided[1]]
    pairs = zip(states(runner), states(whole), strict=True)
    assert all(torch.allclose(a["policy"][n], b["policy"][n], atol=1e-4) for a, b in pairs for n in a["policy"])
    with pytest.raises(CannotStartError, match=r"an actor of 2 members needs 3 CPU, and no node .* has 2 CPU"):
        RayBackend({"num_cpus": 3}, members_per_actor=2).start(Work(make_agent, None, 5, 6, "copy"))


@pytest.mark.slow
def test_an_actor_is_killed_and_the_run_goes_on(local, tmp_path):
    backend = RayBackend()
    runner = PBTRunner(config(), make_agent, 8, tmp_path, backend=backend)
    receive, left = runner._receive, [3]

    def killing(report):
        result = receive(report)
        if left[0] and backend._actors:
            left[0] -= 1
            ray.kill(next(iter(backend._actors)).handle)
        return result

    runner._receive = killing
    runner.run()
    assert runner.updates == [8, 8, 8]
    assert [event.kind for event in runner.scheduler.events].count("restart") >= 1


def where(agent):
    """The node that a member is on, as its performance."""
    return float(int(ray.get_runtime_context().get_node_id()[:8], 16))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the cluster has lost nodes")
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
def test_a_waiting_member_moves_to_a_node_that_joins(tmp_path):
    """Two members on one core, until there is a second one; the run ends as soon as both are used."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        ray.init(address=cluster.address, log_to_driver=False, runtime_env=WORKERS)
        runner = PBTRunner(config(population_size=2), make_agent, 100_000, tmp_path, metric=where, backend="ray")

        def join_then_stop(runner):
            homes = {member.performance for member in runner.scheduler.members} - {None}
            if len(cluster.worker_nodes) == 0 and min(runner.updates) >= 2:
                assert len(homes) == 1
                cluster.add_node(num_cpus=1)
            elif len(homes) == 2:
                runner.stop()

        runner.on_change = join_then_stop
        runner.run()
        assert min(runner.updates) >= 4
        assert not [event for event in runner.scheduler.events if event.kind == "restart"]
        before = runner.updates
        assert before == [runner.load_member(member).num_timesteps // 32 for member in range(2)]
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_places_of_a_cluster():
    nodes = [
        {"Alive": True, "Resources": {"CPU": 3.0, "GPU": 2.0, "memory": 8e9, "tpu": 1.0, "accelerator_type:A100": 1.0}},
        {"Alive": True, "Resources": {"CPU": 8.0}},
        {"Alive": False, "Resources": {"CPU": 64.0}},
    ]
    for resources, count in [
        ({"num_cpus": 1}, 11),
        ({"num_cpus": 2}, 5),  # Not 11 / 2: an actor is on one node.
        ({"num_cpus": 0.1}, 110),
        ({"num_cpus": 1, "num_gpus": 1}, 2),
        ({"num_cpus": 0, "num_gpus": 0.4}, 4),  # Two on each: a fraction is of one GPU.
        ({"num_cpus": 1, "resources": {"tpu": 0.5}}, 2),
        ({"num_cpus": 1, "memory": 4e9}, 2),
        ({"num_cpus": 1, "accelerator_type": "A100"}, 3),
        ({"num_cpus": 0}, math.inf),
    ]:
        assert most_actors(check_resources(resources), nodes) == count, resources
        assert too_large(resources, nodes) is None
    told = "4 CPU, 1 GPU, and no node of the cluster has that: the largest of 2 has 8 CPU, 0 GPU"
    assert too_large({"num_cpus": 4, "num_gpus": 1}, nodes) == told
    for wrong in ({"num_cpus": -1}, {"num_gpus": "two"}, {"memory": math.nan}, {"resources": {"tpu": True}}):
        with pytest.raises(ValueError, match=r"Invalid .* must be a number >= 0"):
            RayBackend(wrong)
    with pytest.raises(ValueError, match="runtime_env"):
        RayBackend({"runtime_env": {"pip": ["evil"]}})


@pytest.mark.slow
def test_a_ray_of_its_own_ends_with_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", ROOT)
    runner = PBTRunner(config(), make_agent, 2, tmp_path, backend=RayBackend({"num_cpus": 0.5}))
    runner.run()
    assert runner.updates == [2, 2, 2]
    assert not ray.is_initialized()
