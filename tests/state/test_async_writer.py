"""Writing in the background: nothing accepted is lost, nothing overtakes, errors come back."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time

import pytest
import torch

from driftproof.state import AsyncWriter, CheckpointStore, read
from tests.processes import Started


class SlowStore(CheckpointStore):
    """Writes when it is let, and remembers the order."""

    def __init__(self, folder, **options):
        super().__init__(folder, keep_last=None, **options)
        self.started, self.go, self.steps, self.fail = threading.Semaphore(0), threading.Semaphore(0), [], {}

    def save_serialized(self, serialized, step, **options):
        self.started.release()
        self.go.acquire()
        self.steps.append(step)
        if step in self.fail:
            raise self.fail[step]
        return super().save_serialized(serialized, step, **options)

    def let(self, count):
        self.go.release(count)


def test_the_tree_is_written_as_it_was(tmp_path):
    store = SlowStore(tmp_path)
    weights, config = torch.zeros(3), {"lr": [1]}
    with AsyncWriter(store) as writer:
        writer.save({"w": weights, "list": [1]}, 1, config=config, exact=False, score=2.0)
        weights += 1
        config["lr"][0] = 2
        store.let(1)
    checkpoint = read(store.best())
    assert checkpoint.tree["w"].tolist() == [0, 0, 0]
    assert checkpoint.config == {"lr": [1]}
    assert not checkpoint.exact


def test_newer_trees_take_the_place_of_waiting_ones(tmp_path):
    store = SlowStore(tmp_path)
    with AsyncWriter(store) as writer:
        writer.save({}, 1)
        store.started.acquire()
        for step in (2, 3, 4):
            writer.save({}, step)
        store.let(10)
        writer.wait()
        assert store.steps == [1, 4]
        assert store.latest().name == "checkpoint_000000000004.zip"


def test_all_are_written_on_request(tmp_path):
    store = SlowStore(tmp_path)
    with AsyncWriter(store, keep_all=True) as writer:
        for step in range(5):
            writer.save({}, step)
        store.let(5)
    assert store.steps == list(range(5))


def test_never_an_older_one_after_a_newer_one(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2)
    seen = []
    original = store.save_serialized
    store.save_serialized = lambda tree, step, **options: (seen.append(step), original(tree, step, **options))[1]
    with AsyncWriter(store) as writer:
        for step in range(200):
            writer.save({"w": torch.full((100,), float(step))}, step)
    assert seen == sorted(seen)
    assert seen[-1] == 199
    assert read(store.latest()).tree["w"][0] == 199


@pytest.mark.parametrize("method", ["save", "wait", "close"])
def test_errors_are_raised_by_the_next_call(tmp_path, method):
    store = SlowStore(tmp_path)
    store.fail[1] = OSError(errno.ENOSPC, "No space left on device")
    writer = AsyncWriter(store)
    writer.save({}, 1)
    thread = writer._thread
    store.let(10)
    thread.join()
    arguments = ({}, 2) if method == "save" else ()
    with pytest.raises(RuntimeError, match=r"step 1 in the background failed: .*No space left") as caught:
        getattr(writer, method)(*arguments)
    assert caught.value.__cause__ is store.fail[1]
    writer.wait()  # said once
    if method != "close":
        writer.save({}, 3)
        writer.close()
        assert store.steps == [1, 3]


def test_errors_in_the_tree_are_raised_at_once(tmp_path):
    with AsyncWriter(CheckpointStore(tmp_path)) as writer:
        with pytest.raises(TypeError, match="'a'"):
            writer.save({"a": object()}, 1)
        with pytest.raises(ValueError, match="step"):
            writer.save({}, -1)


def test_a_failed_write_does_not_stop_the_next(tmp_path):
    store = SlowStore(tmp_path)
    store.fail[1] = OSError("once")
    writer = AsyncWriter(store)
    writer.save({}, 1)
    store.started.acquire()
    writer.save({}, 2)
    store.let(2)
    with pytest.raises(RuntimeError, match="once"):
        writer.close()
    assert store.latest().name == "checkpoint_000000000002.zip"


def test_closed(tmp_path):
    writer = AsyncWriter(CheckpointStore(tmp_path))
    writer.close()
    writer.close()
    with pytest.raises(RuntimeError, match="closed"):
        writer.save({}, 1)


def test_no_thread_is_left(tmp_path):
    with AsyncWriter(CheckpointStore(tmp_path)) as writer:
        writer.save({}, 1)
    assert "checkpoint writer" not in [thread.name for thread in threading.enumerate() if thread.is_alive()] or (
        writer._thread is None
    )


def run(script, folder, **options):
    return Started([sys.executable, "-c", script, folder], **options)


SLOW = """
import sys, time
from driftproof.state import AsyncWriter, CheckpointStore

class Store(CheckpointStore):
    def save_serialized(self, serialized, step, **options):
        time.sleep(0.3)
        return super().save_serialized(serialized, step, **options)

writer = AsyncWriter(Store(sys.argv[1]))
writer.save({"step": 1}, 1)
time.sleep(0.1)
writer.save({"step": 2}, 2)
"""


def test_exit_waits_for_what_was_accepted(tmp_path):
    process = run(SLOW + "raise SystemExit(3)", tmp_path)
    assert process.end_of()[0] == 3
    assert CheckpointStore(tmp_path).load_latest().tree == {"step": 2}


def test_an_interrupt_does_not_lose_what_was_accepted(tmp_path):
    process = run(SLOW + "print('ready', flush=True)\nwriter.wait()", tmp_path)
    process.wait_for(lambda: process.stdout_text == "ready\n")
    process.send_signal(signal.SIGINT)
    _, _, errors = process.end_of()
    assert "KeyboardInterrupt" in errors
    assert CheckpointStore(tmp_path).load_latest().tree == {"step": 2}
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]


def test_saving_takes_little_of_the_callers_time(tmp_path):
    """A disk that hangs does not hold up the caller."""
    store = SlowStore(tmp_path)
    with AsyncWriter(store) as writer:
        start = time.perf_counter()
        for step in range(20):
            writer.save({"w": torch.zeros(1000)}, step)
        assert time.perf_counter() - start < 2
        store.let(20)


@pytest.mark.gpu
def test_copies_on_cuda_are_whole_before_they_are_written(tmp_path):
    """On a stream of its own, with work queued before the copy."""
    with torch.cuda.stream(torch.cuda.Stream()), AsyncWriter(CheckpointStore(tmp_path), keep_all=True) as writer:
        # On this stream too: another one could still be filling it with zeros.
        weights = torch.zeros(4_000_000, device="cuda")
        for step in range(20):
            weights += 1
            writer.save({"w": weights}, step)
            weights *= 1
        writer.wait()
        for path in writer.store.list():
            assert len(read(path).tree["w"].unique()) == 1
    assert read(writer.store.latest()).tree["w"][0] == 20
