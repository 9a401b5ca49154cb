"""Whatever a file is, reading it ends soon, with the tree or with a CheckpointError, and has touched nothing."""

from __future__ import annotations

import collections
import contextlib
import io
import json
import os
import resource
import subprocess
import sys
import time
import tracemalloc

import pytest
import torch

from driftproof.state import CheckpointError, compare, inspect, read
from tests.state import fuzz, hostile


def problem_with(path):
    try:
        read(path)
    except CheckpointError as error:
        return str(error)
    return ""


def read_all(seeds, folder):
    """Read the files of all seeds; how many of each kind did not load."""
    path = folder / "file.zip"
    refused: collections.Counter[str] = collections.Counter()
    tracemalloc.start()
    try:
        for seed in seeds:
            case = hostile.case(seed)
            path.write_bytes(case.data)
            tracemalloc.reset_peak()
            before, start = tracemalloc.get_traced_memory()[0], time.process_time()
            problem = problem_with(path)
            assert problem or case.may_load, (seed, case.name)
            assert not problem or (problem.startswith(str(path)) and len(problem) < 2000), (seed, case.name)
            refused[case.name] += bool(problem)
            assert tracemalloc.get_traced_memory()[1] - before < 2**20 + 40 * len(case.data), (seed, case.name)
            with contextlib.suppress(CheckpointError):
                str(inspect(path))
            assert time.process_time() - start < 5, (seed, case.name)
    finally:
        tracemalloc.stop()
    assert os.listdir(folder) == ["file.zip"]
    assert hostile.no_payload_ran(folder)
    return refused


def test_hostile_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused = read_all(range(480), tmp_path)
    assert refused.total() > 400


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ten_thousand_hostile_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = read_all(range(1000, 13_000), tmp_path)
    assert refused.total() > 10_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 * 1024  # KiB, torch's and all else's


def test_a_seed_is_one_file():
    first = [hostile.case(seed) for seed in range(500)]
    torch_files = {"torch", "old torch"}  # which have new keys inside at each saving
    assert [
        case.name for seed, case in enumerate(first) if case != hostile.case(seed) and case.name not in torch_files
    ] == []


def test_every_byte_matters():
    """Each byte changed in turn: the file is refused, no byte is without meaning."""
    data = hostile.valid({"w": hostile.torch.arange(3.0), "n": 1})
    for position in range(len(data)):
        for flip in (1, 0x80):
            changed = bytearray(data)
            changed[position] ^= flip
            with pytest.raises(CheckpointError):
                read(io.BytesIO(changed))


def test_every_truncation_is_seen():
    data = hostile.valid({"w": hostile.torch.arange(3.0), "n": 1})
    for length in range(len(data)):
        with pytest.raises(CheckpointError):
            read(io.BytesIO(data[:length]))
    assert compare(read(io.BytesIO(data)).tree, {"w": hostile.torch.arange(3.0), "n": 1}) == []


@pytest.mark.parametrize(
    "shape", [[1] * 100_000, [1] * 65, {"a": 1}, None, [[1] * 100_000]], ids=["100,000", "65", "dict", "none", "nested"]
)
def test_dimensions_are_bounded(shape):
    manifest, _ = hostile.members(hostile.valid({"a": torch.zeros(1)}))
    header = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}}).encode()
    refuses_soon(manifest, len(header).to_bytes(8, "little") + header + bytes(4), "dimensions|cannot be read")


def test_references_are_bounded():
    manifest, state = hostile.members(hostile.valid({"a": torch.zeros(1)}))
    many = {**json.loads(manifest), "state": {"a": [{"$tensor": "a"}] * 240_000}}
    refuses_soon(json.dumps(many).encode(), state, "50,000 references")
    with pytest.raises(ValueError, match="50,000 tensors"):
        hostile.valid([torch.zeros(1)] * 50_001)


def refuses_soon(manifest, state, problem):
    file = fuzz.sealed(manifest, state)
    start = time.process_time()
    with pytest.raises(CheckpointError, match=problem):
        read(io.BytesIO(file))
    found = inspect(io.BytesIO(file))
    assert not found.intact
    assert len(str(found)) < 5000
    assert time.process_time() - start < 3


def test_long_and_strange_names_are_shown_short_and_escaped():
    tree = {"\x1b[31m" + "x" * 10_000: 1, "\u202e\ud800": torch.zeros(1)}
    shown = inspect(io.BytesIO(hostile.valid(tree))).render(leaves=True)
    assert all(line.isprintable() and len(line) < 500 for line in shown.split("\n"))
    assert "\\u202e" in shown


def test_pipes_do_not_block(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="not a regular file"):
        read(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="not a regular file"):
        read("/dev/zero")


def test_claims_of_size_cost_no_memory(tmp_path):
    """In a process that may have little more memory than torch needs, for what tracemalloc does not see."""
    script = (
        "import resource, sys, torch\n"
        "from driftproof.state import CheckpointError, read\n"
        "read(sys.argv[1])\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 200 * 2**20,) * 2)\n"
        "for path in sys.argv[2:]:\n"
        "    try:\n"
        "        read(path)\n"
        "    except CheckpointError:\n"
        "        continue\n"
        "    sys.exit(path)\n"
    )
    paths = []
    kinds = (hostile.claimed_sizes, hostile.tensor_headers, hostile.tensor_files)
    for seed in [seed for seed in range(600) if hostile.KINDS[seed % len(hostile.KINDS)] in kinds]:
        paths.append(tmp_path / f"{seed}.zip")
        paths[-1].write_bytes(hostile.case(seed).data)
    (tmp_path / "good.zip").write_bytes(hostile.BASES[0])
    command = [sys.executable, "-c", script, tmp_path / "good.zip", *paths]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
