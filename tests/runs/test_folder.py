"""What a run leaves in its folder: metrics, TensorBoard runs, and a state that is read or refused."""

from __future__ import annotations

import json
import math
import os
import signal

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from driftproof.pbt import PBTRunner, read_metrics
from driftproof.runs.folder import RunFolder
from tests.pbt.populations import config, make_agent


def test_every_member_has_its_metrics(tmp_path):
    runner = PBTRunner(config(), make_agent, 6, tmp_path, synchronous=True)
    runner.run()
    metrics = read_metrics(tmp_path / "metrics.jsonl")
    assert set(metrics) == {None, 0, 1, 2}
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == sum(map(len, metrics.values())), "something is logged twice"
    for member in range(3):
        assert [row["step"] for row in metrics[member]] == [32 * update for update in range(1, 7)]
        assert {"vgs/scaling_factor", "train/learning_rate", "rollout/ep_rew_mean"} <= set(metrics[member][-1])
        # Mutated values are what is logged after the mutation.
        assert metrics[member][-1]["train/learning_rate"] == pytest.approx(
            runner.scheduler.members[member].hyperparams["learning_rate"]
        )
    last, statistics = metrics[None][-1], runner.scheduler.statistics()
    assert last["population/exploits"] == statistics["exploits"] > 0
    assert last["population/transfer_success_rate"] == 1
    assert last["population/format/v2_full_parameters"] == statistics["exploits"]
    assert last["population/diversity/learning_rate"] == statistics["diversity"]["hyperparams"]["learning_rate"]
    assert last["population/best_performance"] == statistics["best_performance"]

    for member in range(3):
        accumulator = EventAccumulator(str(tmp_path / "tensorboard" / f"member_{member:04d}")).Reload()
        drawn = accumulator.Scalars("train/learning_rate")
        # Of the update before, as Stable-Baselines3 logs it.
        assert [event.step for event in drawn] == [32 * update for update in range(2, 7)]
    population = EventAccumulator(str(tmp_path / "tensorboard" / "population")).Reload()
    assert population.Scalars("population/exploits")[-1].value == statistics["exploits"]


def test_metrics_survive_interruptions(tmp_path):
    folder = RunFolder(tmp_path)
    with folder.locked():
        folder.log(1, [{"step": 1, "a": 1.0}, {"step": 2, "a": math.nan}])
        folder.log(1, [{"step": 2, "a": 3.0}])
        folder.log(None, [{"step": 5, "b": math.inf}])
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"member": 1, "step": 3, "a"')
    metrics = read_metrics(tmp_path / "metrics.jsonl")
    assert metrics[1] == [{"step": 1, "a": 1.0}, {"step": 2, "a": 3.0}]
    assert math.isnan(metrics[None][0]["b"])
    with folder.locked():
        folder.log(1, [{"step": 3, "a": 4.0}])
    assert read_metrics(tmp_path / "metrics.jsonl")[1][-1] == {"step": 3, "a": 4.0}
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        assert "NaN" not in line
        assert line.endswith('"a"') or json.loads(line)


@pytest.mark.parametrize("line", ["[1]", "[" * 100_000, '{"step": 1}', '{"member": 0, "step": 1, "a": "b"}'])
def test_a_line_that_no_interruption_can_leave_is_named(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(f'{{"member": 0, "step": 1}}\n{line}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: not a row of metrics"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_a_state_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no population"):
        PBTRunner.resume(tmp_path, make_agent)
    (tmp_path / "population_state.json").write_text('{"version": 2, "seed"')
    with pytest.raises(ValueError, match=r"population_state\.json cannot be read"):
        PBTRunner.resume(tmp_path, make_agent)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_process_does_not_keep_a_run_locked(tmp_path):
    """As of environments that outlive the process that made them."""
    is_there, tell = os.pipe()
    with RunFolder(tmp_path).locked():
        pid = os.fork()
        if pid == 0:
            os.write(tell, b".")
            signal.pause()
        os.read(is_there, 1)
        with pytest.raises(RuntimeError, match="another process is using"), RunFolder(tmp_path).locked():
            pass
    try:
        with RunFolder(tmp_path).locked():
            pass
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_other_files_are_left_alone(tmp_path):
    mine = tmp_path / "members" / "member_of_mine.zip"
    mine.parent.mkdir()
    mine.touch()
    PBTRunner(config(), make_agent, 2, tmp_path).run()
    assert mine.exists()
