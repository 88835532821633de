"""What a peer is told of devices and memory, and what is believed of it."""

from __future__ import annotations

import contextlib
import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_datadist.backend import BackendError, Failure, MemoryKind, Region
from llm_datadist.backends.acl.exports import MAX_BYTES, MAX_DEVICES, Description, decode, encode
from llm_datadist.backends.acl.memory import MAX_REGIONS
from llm_datadist.backends.acl.products import Product
from llm_datadist.backends.acl.topology import Address, Side

SIDES = (
    Side(Product.A3, "1.2", "host-a", 3, Address("198.51.100.3", "a file"), 103, 7),
    Side(Product.A3, "1.2", "host-a", 5, Address("", "nowhere"), 105, 7, intra_roce=True),
)
REGIONS = (
    Region(0, 0, MemoryKind.DEVICE, 0x200000000000, 1 << 36),
    Region(7, 1, MemoryKind.HOST, 0x7F0000000000, 5),
    Region(2**32 - 1, 1, MemoryKind.DEVICE, 2**62, 1 << 20),
)
GOOD = encode(Description(SIDES, REGIONS))


def test_what_is_written_is_read() -> None:
    assert decode(GOOD) == Description(SIDES, REGIONS)


def test_the_longest_description_is_allowed() -> None:
    sides = [
        Side(Product.A3, "1.2", "s" * 64, i, Address("::" + "1", "o" * 500), 2**63 - 1, 2**63 - 1) for i in range(16)
    ]
    regions = [Region(i, i % 16, MemoryKind.DEVICE, i << 21, 1) for i in range(MAX_REGIONS)]
    data = encode(Description(tuple(sides), tuple(regions)))
    assert len(data) <= MAX_BYTES
    assert len(decode(data).regions) == MAX_REGIONS


def test_a_longer_one_is_not_written() -> None:
    address = Address("", "\u6c34" * 500)  # six bytes each as JSON
    sides = tuple(Side(Product.A2, "1.0", "s", i, address) for i in range(MAX_DEVICES))
    with pytest.raises(BackendError, match=str(MAX_BYTES)):
        encode(Description(sides, REGIONS))


def packed(sides: object, regions: list[tuple[int, int, int, int, int]], *, version: int = 1) -> bytes:
    text = json.dumps(sides).encode()
    header = struct.pack("<4sHIH", b"LDAX", version, len(text), len(regions))
    return header + text + b"".join(struct.pack("<IBBQQ", *region) for region in regions)


SIDE = SIDES[0].describe()


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "0 bytes"),
        (GOOD[:-1], "are expected"),
        (GOOD + b"\0", "are expected"),
        (b"JUNK" + GOOD[4:], "JUNK"),
        (packed([SIDE], [], version=2), "version 2"),
        (b"x" * (MAX_BYTES + 1), str(MAX_BYTES)),
        (packed([], []), f"1 to {MAX_DEVICES} devices"),
        (packed([SIDE] * 17, []), f"1 to {MAX_DEVICES} devices"),
        (packed({}, []), f"1 to {MAX_DEVICES} devices"),
        (packed([SIDE | {"device_id": "x"}], []), "device_id"),
        (packed([SIDE], [(0, 1, 1, 0, 1)]), "region 0"),
        (packed([SIDE], [(0, 0, 2, 0, 1)]), "of kind 2"),
        (packed([SIDE], [(0, 0, 1, 0, 0)]), "of 0 bytes"),
        (packed([SIDE], [(0, 0, 1, 2**64 - 1, 2)]), "region 0"),
        (packed([SIDE], [(0, 0, 1, 2**63 - 1, 2)]), "region 0"),
        (packed([SIDE], [(4, 0, 1, 0, 8), (4, 0, 1, 8, 8)]), "one id"),
        (packed([SIDE], [(4, 0, 1, 0, 9), (5, 0, 1, 8, 8)]), "overlap"),
        (packed([SIDE], [(i, 0, 1, i, 1) for i in range(MAX_REGIONS + 1)]), f"{MAX_REGIONS} are expected"),
    ],
)
def test_a_wrong_description_is_refused(data: bytes, text: str) -> None:
    with pytest.raises(BackendError, match=text) as caught:
        decode(data)
    assert caught.value.kind is Failure.LINK_FAILED


@given(st.binary(max_size=200), st.integers(0, len(GOOD) - 1), st.integers(0, 255))
def test_no_bytes_bring_anything_but_a_refusal(junk: bytes, at: int, byte: int) -> None:
    for data in (junk, GOOD[:12] + junk, GOOD[:at] + bytes([byte]) + GOOD[at + 1 :]):
        with contextlib.suppress(BackendError):
            described = decode(data)
            assert all(region.address + region.nbytes <= 2**63 for region in described.regions)
