"""The zip container of a checkpoint's two members: any zip tool opens it, but only one byte layout is valid.

Zip states lengths and names several times, and a general reader has to decide which ones to trust. Here, the members'
sizes and checksums determine every other byte: the reader generates them again and compares.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

_LOCAL = struct.Struct("<4s5H3L2H")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_ZIP64_SIZES = struct.Struct("<2H2Q")
_ZIP64_END = struct.Struct("<4sQ2H2L4Q")
_ZIP64_LOCATOR = struct.Struct("<4sLQL")
_END = struct.Struct("<4s4H2LH")

_VERSION = 45
_NO_TIME, _FIRST_DAY = 0, 0x21  # midnight of 1980-01-01, the earliest date of zip
_IN_ZIP64 = 0xFFFFFFFF
LOCAL_SIGNATURE = b"PK\x03\x04"


class Member(NamedTuple):
    name: str
    size: int
    crc: int


def header_size(name: str) -> int:
    return _LOCAL.size + len(name) + _ZIP64_SIZES.size


def header(member: Member) -> bytes:
    """The local file header of a member."""
    sizes = _ZIP64_SIZES.pack(1, 16, member.size, member.size)
    fields = (LOCAL_SIGNATURE, _VERSION, 0, 0, _NO_TIME, _FIRST_DAY, member.crc, _IN_ZIP64, _IN_ZIP64)
    return _LOCAL.pack(*fields, len(member.name), len(sizes)) + member.name.encode("ascii") + sizes


def parse_header(data: bytes, name: str) -> Member:
    """The size and checksum that a header states.

    Raises:
        ValueError: It is not the header of a member with this name.
    """
    if data[:4] != LOCAL_SIGNATURE:
        raise ValueError(f"there is no zip member where {name} should begin")
    fields = _LOCAL.unpack_from(data)
    found = data[_LOCAL.size : _LOCAL.size + fields[9]]
    if found != name.encode("ascii"):
        raise ValueError(f"it has the member {found.decode('ascii', 'replace')!r} in place of {name}")
    if fields[3] != 0:
        raise ValueError(f"its member {name} is compressed")
    _, _, size, _ = _ZIP64_SIZES.unpack_from(data, _LOCAL.size + len(name))
    member = Member(name, size, fields[6])
    if data != header(member):
        raise ValueError(f"the zip header of {name} is damaged, or was written by another program")
    return member


def directory(members: Sequence[Member]) -> bytes:
    """The central directory, after the last member."""
    entries, offset = b"", 0
    for member in members:
        sizes = _ZIP64_SIZES.pack(1, 16, member.size, member.size)
        fields = (_VERSION, _VERSION, 0, 0, _NO_TIME, _FIRST_DAY, member.crc, _IN_ZIP64, _IN_ZIP64)
        entries += _CENTRAL.pack(b"PK\x01\x02", *fields, len(member.name), len(sizes), 0, 0, 0, 0, offset)
        entries += member.name.encode("ascii") + sizes
        offset += header_size(member.name) + member.size
    count = len(members)
    zip64_end = _ZIP64_END.pack(
        b"PK\x06\x06", _ZIP64_END.size - 12, _VERSION, _VERSION, 0, 0, count, count, len(entries), offset
    )
    locator = _ZIP64_LOCATOR.pack(b"PK\x06\x07", 0, offset + len(entries), 1)
    end = _END.pack(b"PK\x05\x06", 0, 0, count, count, len(entries), _IN_ZIP64, 0)
    return entries + zip64_end + locator + end
