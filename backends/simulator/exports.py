"""What a peer is told about my memory, as bytes: written here, and read here with distrust."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

from llm_datadist.backend import BackendError, Failure, MemoryKind, Region
from llm_datadist.backends.simulator.pools import MAX_POOLS
from llm_datadist.backends.simulator.segments import MAX_SEGMENT_BYTES

__all__ = ["Description", "decode", "encode"]

VERSION: Final = 1
MAX_BYTES: Final = 32 << 10

_RANGES: Final = {
    "directory": (1, MAX_SEGMENT_BYTES),
    "board": (1, MAX_SEGMENT_BYTES),
    "nonce": (0, 2**64 - 1),
    "nonce_address": (0, 2**63 - 1),
}
_KEYS: Final = {"version", "pools", *_RANGES}
_POOL_RANGES: Final = {
    "id": (0, MAX_POOLS - 1),
    "device": (0, 2**31 - 1),
    "kind": (min(MemoryKind), max(MemoryKind)),
    "address": (0, 2**63 - 1),
    "nbytes": (1, MAX_SEGMENT_BYTES),
}


@dataclass(frozen=True, slots=True)
class Description:
    """What a peer is told.

    Parameters
    ----------
    directory, board : int
        Sizes of the windows.
    nonce : int
        A random number, to find out whether the process that wrote this can be read.
    nonce_address : int
        Where that process holds it, in 8 bytes.
    pools : tuple of Region
        In the order of the descriptors that come along.
    """

    directory: int
    board: int
    nonce: int
    nonce_address: int
    pools: tuple[Region, ...]


def encode(described: Description) -> bytes:
    """Write a description."""
    pools = [{key: int(getattr(pool, key)) for key in _POOL_RANGES} for pool in described.pools]
    sizes = {key: getattr(described, key) for key in _RANGES}
    return json.dumps({"version": VERSION, **sizes, "pools": pools}, separators=(",", ":")).encode()


def decode(data: bytes, descriptors: int) -> Description:
    """Read a peer's description.

    Raises
    ------
    BackendError
        ``LINK_FAILED``, naming what is wrong.
    """
    if len(data) > MAX_BYTES:
        raise _invalid(f"has {len(data)} bytes; at most {MAX_BYTES} are allowed")
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _invalid(f"is not JSON: {error}") from error
    version = raw.get("version") if isinstance(raw, dict) else None
    if type(version) is not int or version != VERSION:
        raise _invalid(f"has version {_short(version)}; this side knows version {VERSION}")
    _check_keys("description", raw, _KEYS)
    if not isinstance(raw["pools"], list) or len(raw["pools"]) > MAX_POOLS:
        raise _invalid(f"must have a list of at most {MAX_POOLS} pools")
    pools = tuple(_pool(position, fields) for position, fields in enumerate(raw["pools"]))
    if len({pool.id for pool in pools}) < len(pools):
        raise _invalid("has two pools with the same id")
    if descriptors != 2 + len(pools):
        raise _invalid(f"needs {2 + len(pools)} descriptors, but {descriptors} came along")
    return Description(pools=pools, **{key: _integer(key, raw[key], *span) for key, span in _RANGES.items()})


def _pool(position: int, fields: object) -> Region:
    where = f"pools[{position}]"
    if not isinstance(fields, dict):
        raise _invalid(f"has {where} of type {type(fields).__name__}; an object is expected")
    _check_keys(where, fields, set(_POOL_RANGES))
    checked = {key: _integer(f"{where}.{key}", fields[key], *span) for key, span in _POOL_RANGES.items()}
    return Region(checked["id"], checked["device"], MemoryKind(checked["kind"]), checked["address"], checked["nbytes"])


def _check_keys(where: str, fields: dict[str, object], expected: set[str]) -> None:
    if fields.keys() != expected:
        raise _invalid(f"has {where} with keys {_short(sorted(fields))}; expected: {sorted(expected)}")


def _integer(where: str, value: object, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise _invalid(f"has {where} = {_short(value)}; an integer from {low} to {high} is expected")
    return value


def _short(value: object) -> str:
    return repr(value)[:80]


def _invalid(what: str) -> BackendError:
    return BackendError(Failure.LINK_FAILED, f"The peer's export {what}.")
