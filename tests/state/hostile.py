"""Broken and hostile checkpoint files, one for each seed.

``case(seed)`` is a file that must not load. Where a change may leave a valid file, as a hostile author can also write a
harmless one, the case says so. No byte of a file is without meaning, so every change of a written one must be seen.
"""

from __future__ import annotations

import copy
import gzip
import hashlib
import io
import json
import pickle
import random
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from driftproof.state import _container, files
from driftproof.state._container import Member

MARK = "the-payload-ran"


class Case(NamedTuple):
    name: str
    data: bytes
    may_load: bool = False


class Payload:
    """Leaves a mark where it is unpickled."""

    def __reduce__(self) -> Any:
        return (open, (MARK, "w"))


def valid(tree: Any = None, **options: Any) -> bytes:
    """A file as the library writes it."""
    file = io.BytesIO()
    files.write(file, small_tree() if tree is None else tree, **options)
    return file.getvalue()


def small_tree() -> dict[str, Any]:
    return {
        "policy": {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.zeros(2)},
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "groups": [{"betas": (0.9, 0.999), "params": [0]}]},
        "normalizer": {"mean": np.ones(2), "count": np.float64(4), "raw": b"\x00\x01"},
        "counters": {"steps": 10, "big": 2**100, "best": float("-inf"), "name": "text", "none": None},
    }


def members(data: bytes) -> tuple[bytes, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return archive.read("manifest.json"), archive.read("state.safetensors")


def packed(manifest: bytes, state: bytes) -> bytes:
    """A container that is right, whatever is in it."""
    parts = [Member("manifest.json", len(manifest), zlib.crc32(manifest))]
    parts.append(Member("state.safetensors", len(state), zlib.crc32(state)))
    return _container.header(parts[0]) + manifest + _container.header(parts[1]) + state + _container.directory(parts)


def dated(data: bytes) -> bytes:
    """The same file, written at another time: always the same."""
    manifest, state = members(data)
    return packed(json.dumps({**json.loads(manifest), "created": "2026-01-01T00:00:00+00:00"}).encode(), state)


BASES = [
    dated(valid(config={"lr": 0.1})),
    dated(valid({})),
    dated(valid({"counters": [1, 2.5, "x"]})),
    dated(valid({"w": torch.zeros(0, 3)})),
]


def signed(manifest: dict[str, Any], state: bytes) -> bytes:
    """With checksums that hold: what a hostile author would write."""
    entry = {"bytes": len(state), "sha256": hashlib.sha256(state).hexdigest()}
    return packed(json.dumps({**manifest, "files": {"state.safetensors": entry}}).encode(), state)


def case(seed: int) -> Case:
    """The file of this seed."""
    rng = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    return kind(rng)


def truncated(rng: random.Random) -> Case:
    data = rng.choice(BASES)
    return Case("truncated", data[: rng.randrange(len(data))])


def bit_flips(rng: random.Random) -> Case:
    data = bytearray(rng.choice(BASES))
    for position in rng.sample(range(len(data) * 8), rng.randint(1, 4)):
        data[position // 8] ^= 1 << position % 8
    return Case("bit flips", bytes(data))


def overwritten(rng: random.Random) -> Case:
    original = rng.choice(BASES)
    data, start = bytearray(original), rng.randrange(len(original))
    for position in range(start, min(len(data), start + rng.choice([1, 4, 8, 512]))):
        data[position] = rng.choice([0, 255, rng.randrange(256)])
    if bytes(data) == original:
        data[start] ^= 255
    return Case("overwritten", bytes(data))


def inserted_or_deleted(rng: random.Random) -> Case:
    data = rng.choice(BASES)
    start, count = rng.randrange(len(data)), rng.choice([1, 2, 16, 300])
    if rng.random() < 0.5:
        return Case("inserted", data[:start] + rng.randbytes(count) + data[start:])
    return Case("deleted", data[:start] + data[start + count :])


def header_fields(rng: random.Random) -> Case:
    """Numbers in zip headers set to what makes readers stumble."""
    original = rng.choice(BASES)
    data = bytearray(original)
    signatures = [b"PK\x03\x04", b"PK\x01\x02", b"PK\x06\x06", b"PK\x06\x07", b"PK\x05\x06"]
    starts = [i for mark in signatures for i in range(len(data)) if data.startswith(mark, i)]
    start, form = rng.choice(starts) + rng.randrange(4, 60), rng.choice(["<H", "<L", "<Q"])
    value = rng.choice([0, 1, 2**15, 2**16 - 1, 2**31, 2**32 - 1, 2**60, 2**63, 2**64 - 1]) % 2 ** (
        8 * struct.calcsize(form)
    )
    packed_value = struct.pack(form, value)
    data[start : start + len(packed_value)] = packed_value
    return Case("header fields", bytes(data[: len(original)]), may_load=bytes(data[: len(original)]) == original)


def appended(rng: random.Random) -> Case:
    data = rng.choice(BASES)
    other = rng.choice([b"\x00", rng.randbytes(100), rng.choice(BASES), data])
    return Case("appended", rng.choice([data + other, other + data]))


NAMES = [
    "../manifest.json",
    "/tmp/manifest.json",
    "..\\manifest.json",
    "manifest.json/",
    "MANIFEST.JSON",
    "C:\\x",
    "x" * 300,
]


def other_zips(rng: random.Random) -> Case:
    """Zip files that other programs could have written, with right, wrong, doubled, extra or no members."""
    manifest, state = members(rng.choice(BASES))
    entries = [("manifest.json", manifest), ("state.safetensors", state)]
    change = rng.choice(["none", "swapped", "doubled", "extra", "missing", "renamed", "bomb", "exchanged", "comment"])
    if change == "swapped":
        entries.reverse()
    elif change == "doubled":
        entries.insert(rng.randrange(3), rng.choice(entries))
    elif change == "extra":
        entries.insert(rng.randrange(3), (rng.choice(["data.pkl", "../evil.py", *NAMES]), b"x"))
    elif change == "missing":
        entries.pop(rng.randrange(2))
    elif change == "renamed":
        i = rng.randrange(2)
        entries[i] = (rng.choice(NAMES), entries[i][1])
    elif change == "bomb":
        i = rng.randrange(2)
        entries[i] = (entries[i][0], b"\x00" * 5_000_000)
    elif change == "exchanged":
        entries = [(entries[0][0], entries[1][1]), (entries[1][0], entries[0][1])]
    file = io.BytesIO()
    method = zipfile.ZIP_DEFLATED if change == "bomb" else rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
    with zipfile.ZipFile(file, "w", method) as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names that are there already
        for name, data in entries:
            info = zipfile.ZipInfo(name)
            info.compress_type = method
            with archive.open(info, "w", force_zip64=rng.random() < 0.5) as target:
                target.write(data)
        archive.comment = b"hello" if change == "comment" else b""
    return Case(f"zip, {change}", file.getvalue())


def overlapping(rng: random.Random) -> Case:
    """The directory sends both names to the same bytes, or elsewhere."""
    manifest, state = members(rng.choice(BASES))
    parts = [Member("manifest.json", len(manifest), zlib.crc32(manifest))]
    parts.append(Member("state.safetensors", len(state), zlib.crc32(state)))
    body = _container.header(parts[0]) + manifest + _container.header(parts[1]) + state
    changed = list(parts)
    i = rng.randrange(2)
    changed[i] = rng.choice(
        [
            changed[i]._replace(size=max(0, changed[i].size + rng.choice([-1, 1, 100]))),
            changed[i]._replace(crc=changed[i].crc ^ 1),
            changed[i]._replace(size=2**31),
            parts[1 - i],
        ]
    )
    return Case("overlapping", body + _container.directory(changed))


def claimed_sizes(rng: random.Random) -> Case:
    """Both headers agree on a size that is not there."""
    manifest, state = members(rng.choice(BASES))
    size = rng.choice([len(state) + 1, 2**31, 2**32, 2**40, 2**60, 2**63, 2**64 - 1])
    contents = json.loads(manifest)
    contents["files"]["state.safetensors"]["bytes"] = size
    text = json.dumps(contents).encode()
    parts = [Member("manifest.json", len(text), zlib.crc32(text)), Member("state.safetensors", size, zlib.crc32(state))]
    head = _container.header(parts[0]) + text + _container.header(parts[1])
    if rng.random() < 0.3:
        parts[0] = parts[0]._replace(size=size)
        return Case("claimed sizes", _container.header(parts[0]) + text)
    return Case("claimed sizes", head + state)


STRANGE: list[Any] = [
    *(None, True, False, 0, -1, 1, 7, 2**53, 2**63, 1.5, -0.0, 1e308, "", "x", "nan", [], {}, [[]], {"a": 1}),
    *({"$tensor": "nowhere"}, {"$tensor": []}, {"$array": "policy/weight"}, {"$scalar": "policy/weight"}),
    *({"$bytes": "policy/weight"}, {"$dict": [[[], 1]]}, {"$dict": 1}, {"$tuple": {}}, {"$int": "0xg"}, {"$int": 3}),
    *({"$float": "1"}, {"$class": "os.system"}, {"$tensor": "policy/weight", "dtype": "complex128"}, {"$": 1}),
]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where something stands in a JSON value."""
    inner: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inner for place in places(item, (*path, key)))]


def strange_values(rng: random.Random) -> Case:
    """Something in the manifest is removed, doubled or exchanged; the checksums hold."""
    manifest, state = members(rng.choice(BASES))
    contents = json.loads(manifest)
    for _ in range(rng.randint(1, 2)):
        *way, last = rng.choice(places(contents)[1:])
        inner = contents
        for key in way:
            inner = inner[key]
        change = rng.choice(["remove", "replace", "replace", "rename", "add"])
        if change == "remove":
            del inner[last]
        elif change == "replace":
            inner[last] = copy.deepcopy(rng.choice(STRANGE))
        elif change == "rename" and isinstance(inner, dict):
            inner[rng.choice(["$tensor", "$dict", "x", "format_version"])] = inner.pop(last)
        elif isinstance(inner, dict):
            inner[rng.choice(["$tensor", "extra", "state", "dtype"])] = copy.deepcopy(rng.choice(STRANGE))
        else:
            inner.append(copy.deepcopy(rng.choice(STRANGE)))
    return Case("strange values", packed(json.dumps(contents).encode(), state), may_load=True)


def strange_text(rng: random.Random) -> Case:
    """JSON that is no JSON, or too much of it."""
    manifest, state = members(rng.choice(BASES))
    depth = rng.choice([100, 2_000, 200_000])
    value = rng.choice(
        [
            *(
                b"NaN",
                b"Infinity",
                b"-Infinity",
                b"1e999",
                b"0x10",
                b"01",
                b"'x'",
                b"[1,]",
                b'"\\ud8"',
                b'"\xff"',
                b"1" * 5000,
            ),
            *(b"[" * depth, b'{"a":' * depth, b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth),
            *(b'{"a":1,"a":1}', b'{"$tuple":[],"$tuple":[]}', b"[" + b"[]," * 600_000 + b"0]"),
            *(
                b'{"$tuple":[' * depth + b"]}" * depth,
                b'{"$dict":[[1,' * depth + b"1" + b"]]}" * depth,
                b"-" + b"9" * 5000,
            ),
            *(b'{"$int":"0x' + b"f" * 100_000 + b'","b":1}', b'{"$int":"' + b"1" * 5000 + b'"}'),
        ]
    )
    contents = json.loads(manifest)
    key = rng.choice(["state", "config", "versions", "created", "exact", "format_version", "files"])
    contents[key] = "HERE"
    text = json.dumps(contents).encode().replace(b'"HERE"', value)
    if rng.random() < 0.2:
        text = rng.choice(
            [b"", b"\xef\xbb\xbf" + manifest, manifest.decode().encode("utf-16"), value, b"{}", b"[]", b"1"]
        )
    elif rng.random() < 0.1:
        text = manifest[:-1] + b', "format_version": 1}'
    return Case("strange text", packed(text, state), may_load=key == "versions")  # which hold any text


def strange_sizes(rng: random.Random) -> Case:
    """Sizes and checksums in the manifest that are none."""
    manifest, state = members(rng.choice(BASES))
    contents = json.loads(manifest)
    entry = contents["files"]["state.safetensors"]
    key = rng.choice(["bytes", "sha256"])
    entry[key] = rng.choice(
        [None, -1, 0, 1.0, float("nan"), float("inf"), "12", 2**70, True, [], {}, "0" * 64, "F" * 64]
    )
    return Case("strange sizes", packed(json.dumps(contents).encode(), state))


def future(rng: random.Random) -> Case:
    manifest, state = members(rng.choice(BASES))
    version = rng.choice([2, 7, 10**15, 0, -1, "1", 1.0, True, None])
    contents = {**json.loads(manifest), "format_version": version}
    if rng.random() < 0.5:
        contents["unheard"] = 1
    return Case("future", packed(json.dumps(contents).encode(), state))


def tensor_headers(rng: random.Random) -> Case:
    """Headers of safetensors that lie about a tensor; the checksums hold."""
    manifest, state = members(BASES[0])
    length = int.from_bytes(state[:8], "little")
    header, data = json.loads(state[8 : 8 + length]), state[8 + length :]
    name = rng.choice(list(header))
    entry = header[name]
    start, end = entry["data_offsets"]
    key, values = rng.choice(
        [
            ("dtype", ["F31", "", None, 3, "F4", "f32", "OBJECT", ["F32"]]),
            ("shape", [[2**63], [2**32, 2**32], [-1], [1.5], None, "x", [[1]], [2**70], [7], [0]]),
            ("data_offsets", [[0, 2**60], [2**60, 0], [-1, 4], [0], [0, 1, 2], None, [5, 1], [0.0, 4.0]]),
            ("data_offsets", [[start + 1, end + 1], [start - 1, end], [start, end + 1]]),
        ]
    )
    if rng.random() < 0.2:
        del entry[key]
    else:
        entry[key] = rng.choice(values)
    text = json.dumps(header).encode()
    return Case("tensor headers", signed(json.loads(manifest), len(text).to_bytes(8, "little") + text + data))


def tensor_files(rng: random.Random) -> Case:
    """Files of tensors that are none, or other than the manifest says; the checksums hold."""
    manifest, state = members(BASES[0])
    length = int.from_bytes(state[:8], "little")
    header, data = json.loads(state[8 : 8 + length]), state[8 + length :]
    name, depth = rng.choice(list(header)), rng.choice([100, 100_000])
    text, nothing = json.dumps(header).encode(), {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    texts = [
        json.dumps({key: value for key, value in header.items() if key != name}).encode(),
        *(json.dumps({**header, key: nothing}).encode() for key in ("extra", "../x", "policy/weight/x")),
        *(json.dumps({**header, "__metadata__": value}).encode() for value in ({"a": 1}, 3, ["x"], {"a": {"b": "c"}})),
        json.dumps({("x" * 100_000 if key == name else key): value for key, value in header.items()}).encode(),
        text[:-1] + f', "{name}": {json.dumps(header[name])}}}'.encode(),
        b'{"a":' * depth + b"1" + b"}" * depth,
        *(b"", b"{", b"[]", b"null", b"\xff\xfe", rng.randbytes(50), b"{" + b'"a":{},' * 300_000 + b"}"),
    ]
    changed = rng.choice(texts)
    whole = rng.choice(
        [
            *[len(changed).to_bytes(8, "little") + changed + data] * 3,
            rng.choice([2**60, 2**63, 2**64 - 1, 2**32, len(state), length + 1, length - 1, 0]).to_bytes(8, "little")
            + state[8:],
            state[: 8 + length] + rng.choice([data[:-1], data + b"\x00", b"", data * 2]),
            rng.choice([b"", b"\x00" * 7, b"\x00" * 8, b"\xff" * 8]),
        ]
    )
    return Case("tensor files", signed(json.loads(manifest), whole))


def foreign(rng: random.Random) -> Case:
    """Files of other kinds, with payloads where these can have them."""
    file = io.BytesIO()
    kind = rng.choice(
        ["pickle", "torch", "old torch", "sb3", "safetensors", "text", "gzip", "random", "empty", "in manifest"]
    )
    if kind == "pickle":
        return Case(kind, pickle.dumps({"policy": Payload()}, protocol=rng.randint(0, 5)))
    if kind in ("torch", "old torch"):
        torch.save({"policy": Payload()}, file, _use_new_zipfile_serialization=kind == "torch")
        return Case(kind, file.getvalue())
    if kind == "sb3":
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr(zipfile.ZipInfo("data"), json.dumps({"policy_class": {":serialized:": "gASV"}}))
            for name in ("pytorch_variables.pth", "policy.pth", "policy.optimizer.pth"):
                archive.writestr(zipfile.ZipInfo(name), pickle.dumps(Payload()))
            archive.writestr(zipfile.ZipInfo("_stable_baselines3_version"), "2.0")
        return Case(kind, file.getvalue())
    if kind == "in manifest":
        return Case(kind, packed(pickle.dumps(Payload()), pickle.dumps(Payload())))
    return Case(
        kind,
        {
            "safetensors": members(BASES[0])[1],
            "text": b"hello\n" * rng.randint(1, 100),
            "gzip": gzip.compress(b"\x00" * 1_000_000, mtime=0),
            "random": rng.randbytes(rng.choice([1, 3, 4, 30, 64, 5000])),
            "empty": b"",
        }[kind],
    )


KINDS: list[Callable[[random.Random], Case]] = [
    *(truncated, bit_flips, overwritten, inserted_or_deleted, header_fields, appended, other_zips, overlapping),
    *(claimed_sizes, strange_values, strange_values, strange_text, strange_sizes, future, tensor_headers, tensor_files),
    foreign,
]


def no_payload_ran(folder: Path) -> bool:
    return not (folder / MARK).exists() and not Path(MARK).exists()
