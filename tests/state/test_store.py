"""The store keeps what it should, finds the newest that can be loaded, and survives anything."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

from driftproof.state import CheckpointStore, _atomic, compare, read
from tests.processes import Started
from tests.state import saver


def names(folder):
    return sorted(os.listdir(folder))


def step_of(path):
    return None if path is None else read(path).tree["step"]


def test_save_and_load(tmp_path):
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    assert store.list() == []
    assert store.latest() is store.best() is store.load_latest() is store.best_score() is None
    path = store.save({"step": 7, "w": torch.ones(2)}, 7, config={"lr": 1})
    assert path.name == "checkpoint_000000000007.zip"
    assert store.list() == [path]
    assert store.latest() == path
    checkpoint = store.load_latest("cpu")
    assert checkpoint.exact
    assert checkpoint.config == {"lr": 1}
    assert compare(checkpoint.tree, {"step": 7, "w": torch.ones(2)}) == []
    assert store.best() is None
    assert names(store.folder) == ["checkpoint_000000000007.zip", "latest"]
    assert json.loads((store.folder / "latest").read_text()) == {"file": path.name, "step": 7, "score": None}


def test_rotation_keeps_the_last_and_the_best(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2)
    scores = [1.0, 5.0, 2.0, float("nan"), None, 3.0]
    for step, score in enumerate(scores):
        store.save({"step": step}, step, score=score)
    assert [step_of(path) for path in store.list()] == [1, 4, 5]
    assert step_of(store.best()) == 1
    assert store.best_score() == 5.0
    assert step_of(store.latest()) == 5


def test_all_are_kept_on_request(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=None)
    for step in range(8):
        store.save({"step": step}, step)
    assert [step_of(path) for path in store.list()] == list(range(8))


def test_the_smallest_score_can_be_the_best(tmp_path):
    store = CheckpointStore(tmp_path, mode="min")
    for step, score in enumerate([3.0, 1.0, float("-inf"), 0.0, float("nan")]):
        store.save({"step": step}, step, score=score)
    assert step_of(store.best()) == 2


def test_the_same_step_replaces(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save({"step": "old"}, 3, score=5.0)
    store.save({"step": "other"}, 4, score=1.0)
    store.save({"step": "new"}, 3, score=2.0)
    assert len(store.list()) == 2
    assert step_of(store.latest()) == "new"
    assert (step_of(store.best()), store.best_score()) == ("new", 2.0)  # the file that scored 5 is gone
    store.save({"step": "newer"}, 3)
    assert store.best() is None


def test_latest_follows_saves_and_not_steps(tmp_path):
    """A run that goes back to an earlier step continues from there."""
    store = CheckpointStore(tmp_path, keep_last=2)
    for step in (10, 20, 30, 15):
        store.save({"step": step}, step)
    assert step_of(store.latest()) == 15
    assert [step_of(path) for path in store.list()] == [15, 30]
    store.save({"step": 16}, 16)
    store.latest().write_bytes(b"damaged")
    with pytest.warns(UserWarning, match="skipped a checkpoint"):
        assert step_of(store.latest()) == 15


@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped", "folder"])
def test_a_torn_checkpoint_is_passed_over(tmp_path, damage):
    store = CheckpointStore(tmp_path)
    store.save({"step": 1}, 1)
    path = store.save({"step": 2}, 2)
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    if damage == "folder":
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes({"truncated": data[:50], "empty": b"", "flipped": data}[damage])
    with pytest.warns(UserWarning, match="skipped a checkpoint: .*checkpoint_000000000002.zip"):
        assert step_of(store.latest()) == 1
    with pytest.warns(UserWarning, match="skipped a checkpoint"):
        assert store.load_latest().tree == {"step": 1}


def test_a_torn_best_is_none(tmp_path):
    store = CheckpointStore(tmp_path)
    path = store.save({"step": 1}, 1, score=1.0)
    path.write_bytes(b"torn")
    with pytest.warns(UserWarning, match="skipped a checkpoint"):
        assert store.best() is None


OUTSIDE = "checkpoint_000000000009.zip"


@pytest.mark.parametrize(
    "content",
    [
        None,
        b"",
        b"\xff\xfe",
        b"[1]",
        b"[" * 4000,
        b'{"file": "latest", "step": 1, "score": null}',
        b'{"file": "../' + OUTSIDE.encode() + b'", "step": 1, "score": null}',
        b'{"file": "/etc/passwd", "step": 1, "score": null}',
        b'{"file": 3, "step": 1, "score": null}',
        b'{"file": "checkpoint_000000000001.zip\\u0000", "step": 1, "score": null}',
        b'{"file": "checkpoint_000000000007.zip", "step": 1, "score": null}',
        b'{"file": "checkpoint_000000000001.zip", "step": "1", "score": null}',
        b'{"file": "checkpoint_000000000001.zip", "step": 1, "score": "x"}',
        b'{"file": "checkpoint_000000000001.zip"}',
    ],
)
def test_pointers_that_are_none(tmp_path, content):
    """Missing, garbage or leading out of the folder: the newest by step is found."""
    CheckpointStore(tmp_path).save({"step": "outside"}, 9)
    store = CheckpointStore(tmp_path / "store")
    store.save({"step": 1}, 1, score=1.0)
    store.save({"step": 2}, 2)
    for name in ("latest", "best"):
        (store.folder / name).unlink()
        if content is not None:
            (store.folder / name).write_bytes(content)
    assert step_of(store.latest()) == 2
    assert store.best() is None
    store.save({"step": 3}, 3, score=0.0)
    assert step_of(store.latest()) == step_of(store.best()) == 3


def test_foreign_files_are_left_alone(tmp_path):
    for name in ("notes.txt", "checkpoint_x.zip", "checkpoint_1.zip", ".hidden", "model.tmp", ".x.1.tmp"):
        (tmp_path / name).write_text("mine")
    store = CheckpointStore(tmp_path, keep_last=1)
    for step in range(3):
        store.save({"step": step}, step)
    assert {"notes.txt", "checkpoint_x.zip", "checkpoint_1.zip", ".hidden", "model.tmp", ".x.1.tmp"} < set(
        names(tmp_path)
    )
    assert len(store.list()) == 1


def test_temporary_files_of_the_dead_are_removed(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    host, ours = _atomic._HOST, os.getpid()
    gone = [f".checkpoint_000000000001.zip.{host}.{dead.pid}.0123abcd.tmp", f".latest.{host}.{ours}.0123abcd.tmp"]
    kept = [
        f".best.{host}.{os.getppid()}.0123abcd.tmp",
        ".best.elsewhere.1.0123abcd.tmp",
        f".x.{host}.{ours}.0123abce.tmp",
    ]
    old = ".best.elsewhere.1.01234567.tmp"
    for name in (*gone, *kept, old):
        (tmp_path / name).touch()
    os.utime(tmp_path / old, (0, 0))
    _atomic._ours.add(kept[-1])  # as if another thread were writing it
    try:
        CheckpointStore(tmp_path).save({}, 1)
    finally:
        _atomic._ours.discard(kept[-1])
    assert set(names(tmp_path)) == {*kept, "checkpoint_000000000001.zip", "latest"}


@pytest.mark.parametrize("arguments", [{"keep_last": 0}, {"keep_last": 1.5}, {"mode": "best"}], ids=str)
def test_arguments_are_checked(tmp_path, arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        CheckpointStore(tmp_path, **arguments)
    for step in (-1, 1.5, "1"):
        with pytest.raises(ValueError, match="step"):
            CheckpointStore(tmp_path).save({}, step)
    assert names(tmp_path) == []


def test_numpy_steps_and_scores(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save({"step": 5}, np.int64(5), score=np.float32(1.5))
    assert store.best_score() == 1.5


def test_many_threads_and_stores_in_one_folder(tmp_path):
    """Each saves its own steps; nothing is lost but what rotation removes, and nothing is torn."""
    errors = []

    def save(offset):
        store = CheckpointStore(tmp_path, keep_last=3)
        try:
            for step in range(offset, 60, 4):
                store.save({"step": step, "w": torch.full((1000,), float(step))}, step, score=float(step % 7))
                store.latest()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=save, args=(offset,)) for offset in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    store = CheckpointStore(tmp_path, keep_last=3)
    assert 3 <= len(store.list()) <= 5
    assert not [name for name in names(tmp_path) if name.endswith(".tmp")]
    for path in store.list():
        tree = read(path).tree
        assert tree["w"].unique().tolist() == [tree["step"]]


def kill_while_saving(folder, kills, seed):
    """Kill a process that saves, over and over, at random moments; the last completed save must be there each time."""
    rng, store, step, torn = random.Random(seed), CheckpointStore(folder, keep_last=3), 1, 0
    command = [sys.executable, "-m", "tests.state.saver", str(folder)]
    with Started(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as nursery:
        for _ in range(kills):
            print(step, file=nursery.stdin, flush=True)
            lines = [nursery.stdout.readline(), nursery.stdout.readline()]  # its id and its first save, in some order
            deadline = time.perf_counter() + rng.random() * 0.02
            while time.perf_counter() < deadline:
                pass
            (child,) = [int(line.split()[1]) for line in lines if line.startswith("process")]
            os.kill(child, signal.SIGKILL)
            lines += iter(nursery.stdout.readline, "dead\n")
            completed = max(int(line) for line in lines if not line.startswith("process"))
            checkpoint = store.load_latest()
            found = int(checkpoint.tree["step"])
            assert found in (completed, completed + 1)
            assert compare(checkpoint.tree, saver.tree(found)) == []
            assert step_of(store.best()) == 1
            left = [name for name in names(folder) if name.endswith(".tmp")]
            torn += bool(left)
            assert len(left) <= 1  # of the last one killed: the next save removes it
            assert len(store.list()) <= 5
            step = completed + 1
        nursery.stdin.close()
    return torn


def test_killed_while_saving(tmp_path):
    kill_while_saving(tmp_path, 8, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_two_hundred_times_while_saving(tmp_path):
    assert kill_while_saving(tmp_path, 200, seed=1) > 10  # that many were in the middle of writing
