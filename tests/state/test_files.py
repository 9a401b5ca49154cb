"""Checkpoint files: what goes in comes out, writing is all or nothing, and messages say what to do."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import resource
import signal
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings

from driftproof.state import (
    CheckpointError,
    CheckpointStore,
    _atomic,
    _container,
    _reader,
    compare,
    describe,
    files,
    inspect,
    read,
    write,
)
from driftproof.state._container import Member
from tests.state import hostile
from tests.state.trees import example, trees


def through_file(tree, **options):
    file = io.BytesIO()
    write(file, tree, **options)
    return read(io.BytesIO(file.getvalue()))


@given(trees)
@settings(max_examples=200)
def test_round_trip(tree):
    restored = through_file(tree).tree
    assert compare(tree, restored) == []
    assert describe(tree) == describe(restored)


def test_everything_of_an_agent_comes_back(tmp_path):
    tree, path = example(), tmp_path / "agent.zip"
    config = {"lr": 0.1, "shape": (2, 3), "limit": float("inf"), "nested": {1: [None, True]}}
    write(path, tree, config=config, exact=True)
    checkpoint = read(str(path))
    assert compare(checkpoint.tree, tree) == []
    assert checkpoint.config == config
    assert checkpoint.exact is True
    assert checkpoint.format_version == 1
    assert checkpoint.created.endswith("+00:00")
    assert {"driftproof", "torch", "numpy", "python", "safetensors"} <= checkpoint.versions.keys()
    # Builds such as +cpu may say so in one of the two only.
    assert checkpoint.versions["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    optimizer = torch.optim.Adam(torch.nn.LSTM(3, 4).parameters())
    optimizer.load_state_dict(checkpoint.tree["policy.optimizer"])
    assert len(optimizer.state) == 4  # integer keys: as strings they would be dropped in silence


def test_generators_continue(tmp_path):
    generator = np.random.default_rng(3)
    restored = np.random.default_rng()
    restored.bit_generator.state = through_file({"numpy": generator.bit_generator.state}).tree["numpy"]
    assert restored.random(5).tolist() == generator.random(5).tolist()


def test_other_tools_open_it(tmp_path):
    path = tmp_path / "agent.zip"
    write(path, example())
    with zipfile.ZipFile(path) as archive:
        assert archive.namelist() == ["manifest.json", "state.safetensors"]
        assert archive.testzip() is None
        assert {info.compress_type for info in archive.infolist()} == {zipfile.ZIP_STORED}
        manifest, state = json.loads(archive.read("manifest.json")), archive.read("state.safetensors")
    assert manifest["format"] == "driftproof"
    assert manifest["format_version"] == 1
    assert manifest["files"] == {
        "state.safetensors": {"bytes": len(state), "sha256": hashlib.sha256(state).hexdigest()}
    }
    tensors = safetensors.torch.load(state)
    assert torch.equal(tensors["policy/weight_ih_l0"], example_weight(path))


def example_weight(path):
    return read(path).tree["policy"]["weight_ih_l0"]


def test_tensors_that_share_memory_do_not_share_it_with_others(tmp_path):
    base = torch.arange(12.0)
    tree = through_file(
        {"all": base, "same": base, "part": base[2:5], "rows": base.view(3, 4), "t": base.view(3, 4).T}
    ).tree
    assert tree["all"] is tree["same"]
    tree["all"].zero_()
    assert tree["part"].tolist() == [2, 3, 4]
    assert tree["rows"].tolist() == base.view(3, 4).tolist()
    assert tree["t"].tolist() == base.view(3, 4).T.tolist()


def test_writing_changes_nothing_in_the_tree():
    tree = {"t": torch.randn(3, 4).T, "a": np.arange(4)[::-1], "p": torch.nn.Parameter(torch.ones(2))}
    strides, memory = tree["t"].stride(), tree["t"].data_ptr()
    through_file(tree)
    assert (tree["t"].stride(), tree["t"].data_ptr()) == (strides, memory)
    assert tree["p"].requires_grad


@pytest.mark.parametrize(
    "tree", [{}, [], None, 3, "x", {"only": {"plain": [1, 2.5]}}, torch.ones(2), np.float32(1)], ids=str
)
def test_small_trees(tree):
    assert compare(through_file(tree).tree, tree) == []


def test_results_can_be_written_to(tmp_path):
    write(tmp_path / "x.zip", {"t": torch.zeros(2), "a": np.zeros(2)})
    tree = read(tmp_path / "x.zip").tree
    tree["t"] += 1
    tree["a"] += 1
    assert tree["t"].tolist() == tree["a"].tolist() == [1, 1]


def test_file_objects_are_read_from_where_they_stand():
    file = io.BytesIO()
    file.write(b"before")
    write(file, {"a": 1})
    file.seek(len(b"before"))
    assert read(file).tree == {"a": 1}


@pytest.mark.gpu
def test_devices(tmp_path):
    tree = {"gpu": torch.randn(3, device="cuda"), "array": np.ones(2)}
    write(tmp_path / "x.zip", tree)
    assert read(tmp_path / "x.zip").tree["gpu"].device.type == "cpu"
    restored = read(tmp_path / "x.zip", device="cuda").tree
    assert restored["gpu"].is_cuda
    assert compare(restored, tree) == []


def test_device_moves_tensors_only(tmp_path):
    write(tmp_path / "x.zip", {"t": torch.zeros(2), "a": np.zeros(2)})
    tree = read(tmp_path / "x.zip", device="meta").tree
    assert tree["t"].is_meta
    assert isinstance(tree["a"], np.ndarray)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"tree": {"a": object()}}, TypeError, "'a' is of type object"),
        ({"tree": {}, "config": {"w": torch.zeros(1)}}, TypeError, "plain values only.* w"),
        ({"tree": {}, "config": {"f": print}}, TypeError, "'f'"),
        ({"tree": {}, "exact": 1}, ValueError, "exact"),
        ({"tree": [0] * 600_000}, ValueError, "600,.* plain values.*one array"),
        ({"tree": {"x": "a" * (64 * 2**20)}}, ValueError, "bytes of plain values"),
    ],
    ids=lambda value: "",
)
def test_what_cannot_be_written_leaves_no_file(options, error, words, tmp_path):
    with pytest.raises(error, match=words):
        write(tmp_path / "x.zip", **options)
    assert os.listdir(tmp_path) == []


def test_folders_are_made_and_links_followed(tmp_path):
    path = tmp_path / "runs" / "one" / "x.zip"
    write(path, {"a": 1})
    link = tmp_path / "link.zip"
    link.symlink_to(path)
    write(link, {"a": 2})
    assert link.is_symlink()
    assert read(path).tree == {"a": 2}
    assert os.listdir(path.parent) == ["x.zip"]


@pytest.fixture
def old(tmp_path):
    """A file, which must survive what comes."""
    path = tmp_path / "x.zip"
    write(path, {"old": True})
    yield path
    assert read(path).tree == {"old": True}
    assert os.listdir(tmp_path) == ["x.zip"]


@pytest.mark.parametrize("function", ["fsync", "replace"])
@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()], ids=["full", "^C"]
)
def test_errors_leave_the_old_file(old, monkeypatch, function, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(_atomic.os, function, fail)
    with pytest.raises(type(error)) as caught:
        write(old, {"new": True})
    monkeypatch.undo()
    if isinstance(error, OSError):
        assert caught.value.filename == str(old)
        assert caught.value.errno == errno.ENOSPC
    assert not _atomic._ours


def test_a_full_disk_leaves_the_old_file(old):
    """The kernel refuses the write at half a megabyte."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"x\.zip") as caught:
            write(old, {"new": torch.zeros(1_000_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert caught.value.errno == errno.EFBIG


def test_a_full_filesystem_leaves_the_old_file(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("may not mount a small filesystem here")
    try:
        write(folder / "x.zip", {"old": True})
        with pytest.raises(OSError, match=r"No space left.*x\.zip"):
            write(folder / "x.zip", {"new": torch.zeros(1_000_000)})
        assert read(folder / "x.zip").tree == {"old": True}
        assert os.listdir(folder) == ["x.zip"]
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_folder_that_may_not_be_written_to(old, tmp_path):
    """By permission, or, for root, who may always, by the kernel's own folder."""
    if os.geteuid() == 0:
        with pytest.raises(OSError, match="/proc/"):
            write("/proc/x.zip", {"new": True})
        return
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(PermissionError, match=r"x\.zip"):
            write(old, {"new": True})
    finally:
        tmp_path.chmod(0o700)


def test_folders_and_devices_are_not_replaced(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("folder", "pipe"):
        with pytest.raises(FileExistsError, match=f"not a regular file.*{name}"):
            write(tmp_path / name, {})
    assert sorted(os.listdir(tmp_path)) == ["folder", "pipe"]


def test_the_data_is_on_disk_before_the_name(tmp_path, monkeypatch):
    calls = []
    for name in ("fsync", "replace"):
        original = getattr(os, name)
        monkeypatch.setattr(
            _atomic.os, name, lambda *args, name=name, original=original: (calls.append(name), original(*args))[1]
        )
    write(tmp_path / "x.zip", {})
    assert calls == ["fsync", "replace", "fsync"]  # the file, its name, the folder


def refused(data, tmp_path):
    path = tmp_path / "file.zip"
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        read(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    return message


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="none"):
        read(tmp_path / "none.zip")


def test_messages_say_what_a_file_is(tmp_path):
    from stable_baselines3 import PPO

    PPO("MlpPolicy", "CartPole-v1", n_steps=8, batch_size=8).save(tmp_path / "sb3.zip")
    torch.save({"a": torch.zeros(1)}, tmp_path / "new.pt")
    torch.save({"a": torch.zeros(1)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for name, words in {"sb3.zip": "Stable-Baselines3", "new.pt": "torch file", "old.pt": "pickle"}.items():
        message = refused((tmp_path / name).read_bytes(), tmp_path)
        assert words in message
        assert "driftproof convert" in message
    assert "is empty" in refused(b"", tmp_path)
    assert "bare safetensors" in refused(safetensors.torch.save({"a": torch.zeros(1)}), tmp_path)
    assert "not a checkpoint" in refused(b"hello", tmp_path)
    with pytest.raises(CheckpointError, match="not a regular file"):
        read(tmp_path)


def test_the_name_of_a_checkpoint_is_not_the_checkpoint(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints")
    store.save({"a": torch.zeros(1)}, step=1)
    with pytest.raises(CheckpointError, match=r"only names the checkpoint to take; use CheckpointStore\(.*latest"):
        read(tmp_path / "checkpoints" / "latest")
    assert read(store.latest()).tree.keys() == {"a"}


def test_messages_say_what_is_wrong(tmp_path):
    data = hostile.BASES[0]
    manifest, state = hostile.members(data)
    assert "cut off" in refused(data[:-1], tmp_path)
    assert "cut off" in refused(data[: len(data) // 2], tmp_path)
    assert "1 bytes follow its end" in refused(data + b"x", tmp_path)
    flipped = bytearray(data)
    flipped[data.index(state) + len(state) - 1] ^= 1
    assert "checksum of state.safetensors does not match" in refused(bytes(flipped), tmp_path)
    flipped = bytearray(data)
    flipped[data.index(b"driftproof")] ^= 1
    assert "checksum of manifest.json does not match" in refused(bytes(flipped), tmp_path)
    future = hostile.packed(manifest.replace(b'"format_version": 1', b'"format_version": 7'), state)
    assert "written by a newer driftproof (format 7); this one reads up to format 1: upgrade" in refused(
        future, tmp_path
    )


def test_zip_checksums_hold_too(tmp_path):
    """A file that other programs would not unpack is damaged, though the manifest's checksum holds."""
    manifest, state = hostile.members(hostile.BASES[0])
    parts = [Member("manifest.json", len(manifest), zlib.crc32(manifest)), Member("state.safetensors", len(state), 123)]
    heads = [_container.header(part) for part in parts]
    data = heads[0] + manifest + heads[1] + state + _container.directory(parts)
    assert "zip checksum of state.safetensors" in refused(data, tmp_path)


def test_unreadable_paths_are_checkpoint_errors(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be opened"):
        read("a\x00b")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(CheckpointError, match="cannot be opened"):
        read(tmp_path / "loop")


def test_limits_hold_for_both_sides(monkeypatch):
    """What is written can be read: the writer refuses what the reader would."""
    monkeypatch.setattr(_reader, "MAX_JSON_VALUES", 100)
    for count in range(60, 100):
        file = io.BytesIO()
        try:
            write(file, [0] * count)
        except ValueError:
            break
        assert read(io.BytesIO(file.getvalue())).tree == [0] * count
    else:
        pytest.fail("no limit")


def test_inspect(tmp_path):
    path = tmp_path / "agent.zip"
    write(path, example(), config={"lr": 1}, exact=True)
    found = inspect(path)
    assert found.intact
    assert found.problem is None
    assert found.exact
    assert found.config == {"lr": 1}
    assert found.file_bytes == path.stat().st_size
    parts = {part.name: (part.tensors, part.values) for part in found.components}
    assert list(parts) == list(example())
    assert parts["policy"] == (4, 0)
    assert parts["hyperparams"] == (0, 6)
    assert found.leaves == describe(example())
    text = found.render(leaves=True)
    assert "intact" in str(found)
    assert "policy/weight_ih_l0" in text
    assert "policy/weight_ih_l0" not in str(found)
    assert "625 values" in text


def test_inspect_damaged(tmp_path):
    path = tmp_path / "agent.zip"
    write(path, example())
    data = bytearray(path.read_bytes())
    state = hostile.members(bytes(data))[1]
    data[data.index(state) + len(state) - 1] ^= 1
    path.write_bytes(data)
    found = inspect(path)
    assert not found.intact
    assert "checksum" in found.problem
    assert "DAMAGED" in str(found)
    assert [leaf.path for leaf in found.leaves] == [leaf.path for leaf in describe(example())]
    path.write_bytes(data[:-5000])
    assert not inspect(path).intact
    assert inspect(path).leaves == []
    path.write_bytes(data[:500])
    with pytest.raises(CheckpointError):
        inspect(path)


def test_inspect_hides_what_terminals_obey(tmp_path):
    write(tmp_path / "x.zip", {"\x1b[31mred\u202e": 1})
    assert "\x1b" not in str(inspect(tmp_path / "x.zip"))
    assert "\u202e" not in str(inspect(tmp_path / "x.zip"))


def test_reading_imports_nothing():
    """A new process that reads a file has neither Gymnasium nor Stable-Baselines3."""
    script = (
        "import io, sys\nfrom driftproof.state import read, write\n"
        "file = io.BytesIO(); write(file, {'a': 1}); assert read(io.BytesIO(file.getvalue())).tree == {'a': 1}\n"
        "assert not {'gymnasium', 'stable_baselines3'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_exports():
    assert files.read is read
    assert Path(files.__file__).parent.name == "state"
