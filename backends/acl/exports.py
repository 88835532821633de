"""What a peer is told about my devices and memory, as bytes: written here, and read here with distrust."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Final

from llm_datadist.backend import BackendError, Failure, MemoryKind, Region
from llm_datadist.backends.acl.memory import MAX_REGIONS
from llm_datadist.backends.acl.regions import RegionTable
from llm_datadist.backends.acl.topology import Side, parse_side

__all__ = ["Description", "decode", "encode"]

MAX_BYTES: Final = 40 << 10
MAX_DEVICES: Final = 16

#: Magic, version, bytes of the devices' JSON, number of regions.
_HEADER: Final = struct.Struct("<4sHIH")
_MAGIC: Final = b"LDAX"
VERSION: Final = 1
#: Id, position of the device, kind, address, size.
_REGION: Final = struct.Struct("<IBBQQ")


@dataclass(frozen=True, slots=True)
class Description:
    """What a peer is told.

    Parameters
    ----------
    sides : tuple of Side
        One for each device.
    regions : tuple of Region
        With the position of their device instead of its id.
    """

    sides: tuple[Side, ...]
    regions: tuple[Region, ...]


def encode(described: Description) -> bytes:
    """Write a description.

    Raises
    ------
    BackendError
        ``INVALID`` when there is more to tell than a peer would take.
    """
    sides = json.dumps([side.describe() for side in described.sides], separators=(",", ":")).encode()
    regions = [_REGION.pack(r.id, r.device, r.kind, r.address, r.nbytes) for r in described.regions]
    data = b"".join((_HEADER.pack(_MAGIC, VERSION, len(sides), len(regions)), sides, *regions))
    if len(data) > MAX_BYTES or len(described.sides) > MAX_DEVICES:
        raise BackendError(
            Failure.INVALID,
            f"{len(described.sides)} devices and {len(regions)} regions need {len(data)} bytes to be described; "
            f"allowed are {MAX_DEVICES} devices and {MAX_BYTES} bytes",
        )
    return data


def decode(data: bytes) -> Description:
    """Read a peer's description.

    Raises
    ------
    BackendError
        ``INVALID``, naming what is wrong.
    """
    if not _HEADER.size <= len(data) <= MAX_BYTES:
        raise _invalid(f"has {len(data)} bytes; {_HEADER.size} to {MAX_BYTES} are allowed")
    magic, version, nbytes, count = _HEADER.unpack_from(data)
    if (magic, version) != (_MAGIC, VERSION):
        raise _invalid(f"begins with {magic!r} and version {version}; this side knows {_MAGIC!r} and version {VERSION}")
    expected = _HEADER.size + nbytes + count * _REGION.size
    if len(data) != expected or count > MAX_REGIONS:
        raise _invalid(f"has {len(data)} bytes and {count} regions; {expected} bytes and {MAX_REGIONS} are expected")
    sides = _sides(data[_HEADER.size : _HEADER.size + nbytes])
    packed = _REGION.iter_unpack(data[_HEADER.size + nbytes :])
    regions = tuple(_region(len(sides), *fields) for fields in packed)
    if len({region.id for region in regions}) < len(regions) or RegionTable(regions).overlaps():
        raise _invalid("has two regions with one id, or that overlap")
    return Description(sides, regions)


def _sides(data: bytes) -> tuple[Side, ...]:
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _invalid(f"has devices that are not JSON: {error}") from error
    if not isinstance(raw, list) or not 1 <= len(raw) <= MAX_DEVICES:
        raise _invalid(f"must have a list of 1 to {MAX_DEVICES} devices")
    try:
        return tuple(map(parse_side, raw))
    except BackendError as error:
        raise _invalid(f"has a wrong device: {error.text}") from error


def _region(devices: int, id: int, device: int, kind: int, address: int, nbytes: int) -> Region:
    if (
        device >= devices
        or kind not in (MemoryKind.HOST, MemoryKind.DEVICE)
        or not nbytes
        or address + nbytes > 1 << 63
    ):
        raise _invalid(f"has region {id} of {nbytes} bytes at {address:#x}, of kind {kind} on device {device}")
    return Region(id, device, MemoryKind(kind), address, nbytes)


def _invalid(what: str) -> BackendError:
    return BackendError(Failure.LINK_FAILED, f"The peer's export {what}.")
