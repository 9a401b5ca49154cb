"""Files of earlier formats are pickles; nothing in them reads memory that is not theirs, or asks for much more."""

from __future__ import annotations

import io
import struct
import zipfile

import numpy as np
import pytest
import torch

from driftproof.state import CheckpointError, legacy

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def number(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def name(module: str, of: str) -> bytes:
    return f"c{module}\n{of}\n".encode()


def content(value: bytes) -> bytes:
    return name("_codecs", "encode") + b"(" + text(value.decode("latin1")) + text("latin1") + b"tR"


def dtype(code: str) -> bytes:
    return name("numpy", "dtype") + b"(" + text(code) + b"\x89\x88tR"


def array() -> bytes:
    empty = name("numpy", "ndarray") + number(0) + b"\x85" + content(b"b")
    return name("numpy._core.multiarray", "_reconstruct") + b"(" + empty + b"tR"


def state(shape: bytes, code: bytes, values: bytes) -> bytes:
    return b"(" + number(1) + shape + code + b"\x89" + values + b"tb"


def write(path, policy: bytes):
    """A torch file with these opcodes as its policy."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", b"\x80\x02}(" + text("policy") + policy + b"u.")
        archive.writestr("x/version", "3\n")
    return path


def test_a_tensor_does_not_outlive_the_memory_of_its_array(tmp_path):
    """NumPy frees an array's memory when it is given another state, and a tensor that was made of it sees what is
    written there next."""
    ones = content(np.ones(256, np.float32).tobytes())
    first = array() + b"q\x00" + state(number(256) + b"\x85", dtype("f4"), ones)
    shared = name("torch._utils", "_rebuild_device_tensor_from_numpy") + b"("
    shared += b"h\x00" + name("torch", "float32") + text("cpu") + b"\x89tR"
    second = b"h\x00" + state(number(1) + b"\x85", dtype("f4"), content(bytes(4)))
    path = write(tmp_path / "x.pt", b"}(" + text("a") + first + text("t") + shared + text("b") + second + b"u")
    with pytest.raises(CheckpointError, match="not a file of tensors and plain values"):
        legacy.read(path)


@pytest.mark.parametrize(
    "wrong",
    [
        state(number(2**30) + b"\x85", dtype("f4"), content(bytes(4))),
        state(number(-1) + b"\x85", dtype("f4"), content(bytes(4))),
        state(text("x") + b"\x85", dtype("f4"), content(bytes(4))),
        state(number(1) + b"\x85", dtype("O"), b"]" + number(1) + b"a"),
        state(number(1) + b"\x85", dtype("V4"), content(bytes(4))),
        state(number(1) + b"\x85", text("f4"), content(bytes(4))),
        state(number(1) + b"\x85", dtype("f4"), text("abcd")),
        b"(" + number(1) + b"tb",
    ],
    ids=["larger", "negative", "text", "objects", "bytes", "no dtype", "no bytes", "short"],
)
def test_arrays_with_wrong_states(wrong, tmp_path):
    with pytest.raises(CheckpointError, match="not a file of tensors and plain values"):
        legacy.read(write(tmp_path / "x.pt", b"}(" + text("a") + array() + wrong + b"u"))


@pytest.mark.parametrize("code", ["?", "i8", "u2", "f2", "f4", ">f8", ">i4", "c8"])
def test_arrays_of_numbers_are_read(code, tmp_path):
    values = np.arange(6).reshape(2, 3).astype(code)
    tensors = {"w": torch.ones(2)}
    torch.save(
        {"policy": tensors, "a": {"c": values, "f": np.asfortranarray(values), "s": values[1, 2]}}, tmp_path / "x"
    )
    found = legacy.read(tmp_path / "x").components["a"]
    for key, want in (("c", values), ("f", values), ("s", values[1, 2])):
        np.testing.assert_array_equal(found[key], want)
        assert found[key].dtype == np.dtype(code).newbyteorder("=")


def test_compressed_members_within_members(tmp_path):
    """torch decompresses what is in a ``.pth``: 1,000 times its size."""
    file, packed = io.BytesIO(), io.BytesIO()
    torch.save({"w": torch.zeros(1_000_000)}, file)
    with zipfile.ZipFile(file) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for member in source.namelist():
            target.writestr(member, source.read(member))
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("policy.pth", packed.getvalue())
    assert (tmp_path / "x.zip").stat().st_size < 100_000
    with pytest.raises(CheckpointError, match="compressed members"):
        legacy.read(tmp_path / "x.zip")


def test_a_second_directory_that_only_torch_sees(tmp_path):
    """Of two directories in a zip file, Python and torch may believe different ones: ours are packed anew."""
    file, other = io.BytesIO(), io.BytesIO()
    torch.save({"w": torch.ones(4)}, file)
    torch.save({"w": torch.full((4,), 7.0)}, other)
    assert file.getvalue().count(b"PK\x06\x07") == 1
    body = other.getvalue() + file.getvalue()
    ends = [body.index(b"PK\x06\x06"), body.rindex(b"PK\x06\x07")]
    # The locator of the last directory leads to the first one, which Python does not look at.
    forged = body[: ends[1] + 8] + struct.pack("<Q", ends[0]) + body[ends[1] + 16 :]
    (tmp_path / "x.pt").write_bytes(forged)
    try:
        found = legacy.read(tmp_path / "x.pt").components["policy"]["w"]
    except CheckpointError:  # of versions of Python that compare both
        return
    assert found.tolist() == [1.0] * 4
