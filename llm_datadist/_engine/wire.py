"""Frames of the control connection: bounded, versioned, JSON inside. A pure codec, no sockets."""

from __future__ import annotations

import enum
import json
import struct
from dataclasses import dataclass, field
from typing import Any

__all__ = ["HEADER", "MAX_FRAME", "Frame", "Kind", "Malformed", "decode", "encode", "payload_size"]

VERSION = 1
MAX_FRAME = 64 * 1024
HEADER = struct.Struct("!4sBBHIQ")  # magic, version, kind, reserved, payload bytes, request id
MAGIC = b"LDD1"


class Kind(enum.IntEnum):
    """What a frame says."""

    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    READY = 4
    UNLINK = 5
    UNLINKED = 6
    PING = 7
    PONG = 8
    STAGE = 9
    STAGED = 10
    PEEK = 11
    PEEKED = 12
    POKE = 13
    POKED = 14


class Malformed(Exception):
    """A peer sent something that is no frame of ours."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One message. ``request`` pairs an answer with its question."""

    kind: Kind
    request: int = 0
    body: dict[str, Any] = field(default_factory=dict)

    def number(self, name: str, largest: int = 2**64 - 1) -> int:
        """Give a field that must be an integer in [0, largest]."""
        value = self.body.get(name)
        if type(value) is not int or not 0 <= value <= largest:
            raise Malformed(
                f"field {name!r} of a {self.kind.name} frame is {value!r:.200}, expected an integer <= {largest}"
            )
        return value

    def text(self, name: str) -> str:
        """Give a field that must be text."""
        value = self.body.get(name)
        if type(value) is not str or not value.isprintable():
            raise Malformed(f"field {name!r} of a {self.kind.name} frame is {value!a:.200}, expected printable text")
        return value

    def texts(self, name: str) -> list[str]:
        """Give a field that must be a list of texts."""
        value = self.body.get(name)
        if type(value) is not list or not all(type(item) is str for item in value):
            raise Malformed(f"field {name!r} of a {self.kind.name} frame is {value!r:.200}, expected a list of texts")
        return value

    def numbers(self, name: str) -> list[int]:
        """Give a field that must be a list of integers in [0, 2**64)."""
        value = self.body.get(name)
        if type(value) is not list or not all(type(item) is int and 0 <= item < 2**64 for item in value):
            raise Malformed(
                f"field {name!r} of a {self.kind.name} frame is {value!r:.200}, expected a list of integers"
            )
        return value


def encode(frame: Frame) -> bytes:
    """Make the bytes of a frame."""
    payload = json.dumps(frame.body, separators=(",", ":")).encode() if frame.body else b""
    if len(payload) > MAX_FRAME:
        raise ValueError(f"a {frame.kind.name} frame of {len(payload)} bytes is above the limit of {MAX_FRAME}")
    return HEADER.pack(MAGIC, VERSION, frame.kind, 0, len(payload), frame.request) + payload


def payload_size(header: bytes) -> int:
    """Check a header and give the bytes that follow it, at most `MAX_FRAME`."""
    magic, version, kind, _, nbytes, _ = HEADER.unpack(header)
    if magic != MAGIC:
        raise Malformed(f"a frame starts with {magic!r}, which is not ours")
    if version != VERSION:
        raise Malformed(f"a frame has version {version}, this side speaks version {VERSION}")
    if kind not in Kind.__members__.values():
        raise Malformed(f"a frame has the unknown kind {kind}")
    if nbytes > MAX_FRAME:
        raise Malformed(f"a frame announces {nbytes} bytes, the limit is {MAX_FRAME}")
    return int(nbytes)


def decode(header: bytes, payload: bytes) -> Frame:
    """Make a frame of a header that `payload_size` has accepted, and its payload."""
    _, _, kind, _, _, request = HEADER.unpack(header)
    body: Any = {}
    if payload:
        try:
            body = json.loads(payload)
        except (ValueError, RecursionError) as e:
            raise Malformed(f"the payload of a frame is not JSON: {e}") from e
        if type(body) is not dict:
            raise Malformed("the payload of a frame is not an object")
    return Frame(Kind(kind), request, body)
