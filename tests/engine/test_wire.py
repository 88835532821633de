"""Frames: what goes in comes out, and nothing that a peer may send does more than raise Malformed."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llm_datadist._engine.wire import HEADER, MAX_FRAME, Frame, Kind, Malformed, decode, encode, payload_size

texts = st.text(st.characters(exclude_categories=[]), max_size=30)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | texts | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=10,
)
frames = st.builds(Frame, st.sampled_from(Kind), st.integers(0, 2**64 - 1), st.dictionaries(texts, values, max_size=6))


def parse(data: bytes) -> Frame:
    """Read one frame as a channel does."""
    header, payload = data[: HEADER.size], data[HEADER.size :]
    return decode(header, payload[: payload_size(header)])


@given(frames)
def test_round_trip(frame: Frame) -> None:
    data = encode(frame)
    assert payload_size(data[: HEADER.size]) == len(data) - HEADER.size
    assert parse(data) == frame


@given(frames, st.data())
def test_damaged_frames(frame: Frame, data: st.DataObject) -> None:
    """Any change and any cut gives a frame or Malformed, never another error."""
    raw = bytearray(encode(frame))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    del raw[data.draw(st.integers(HEADER.size, len(raw))) :]
    try:
        again = parse(bytes(raw))
    except Malformed:
        return
    assert isinstance(again.kind, Kind)
    assert isinstance(again.body, dict)


@given(st.binary(min_size=HEADER.size, max_size=HEADER.size), st.binary(max_size=200))
@example(HEADER.pack(b"LDD1", 1, 1, 0, 2, 0), b"[]")
@example(HEADER.pack(b"LDD1", 1, 1, 0, 4, 0), b"null")
@example(HEADER.pack(b"LDD1", 1, 1, 0, 3, 0), b"\xff\xfe\xfd")
@example(HEADER.pack(b"LDD1", 1, 1, 0, 5000, 0), b'{"a":' + b"9" * 5000 + b"}")
@example(HEADER.pack(b"LDD1", 1, 1, 0, 60000, 0), b'{"a":' + b"[" * 59000)
def test_garbage(header: bytes, payload: bytes) -> None:
    with contextlib.suppress(Malformed):
        size = payload_size(header)
        assert size <= MAX_FRAME
        assert isinstance(decode(header, payload[:size]).body, dict)


@pytest.mark.parametrize("nbytes", [MAX_FRAME + 1, 2**31, 2**32 - 1])
def test_huge_length_is_refused_before_it_is_read(nbytes: int) -> None:
    with pytest.raises(Malformed, match=str(nbytes)):
        payload_size(HEADER.pack(b"LDD1", 1, Kind.PING, 0, nbytes, 0))


@pytest.mark.parametrize(
    ("header", "word"),
    [
        (HEADER.pack(b"LDD2", 1, 1, 0, 0, 0), "LDD2"),
        (HEADER.pack(b"LDD1", 2, 1, 0, 0, 0), "version 2"),
        (HEADER.pack(b"LDD1", 1, 0, 0, 0, 0), "kind 0"),
        (HEADER.pack(b"LDD1", 1, 255, 0, 0, 0), "kind 255"),
    ],
)
def test_header_says_what_is_wrong(header: bytes, word: str) -> None:
    with pytest.raises(Malformed, match=word):
        payload_size(header)


def test_own_frames_are_bounded() -> None:
    room = MAX_FRAME - len(json.dumps({"a": ""}, separators=(",", ":")))
    assert len(encode(Frame(Kind.HELLO, body={"a": "x" * room}))) == HEADER.size + MAX_FRAME
    with pytest.raises(ValueError, match=str(MAX_FRAME)):
        encode(Frame(Kind.HELLO, body={"a": "x" * (room + 1)}))


@given(st.none() | values, st.integers(0, 2**64 - 1))
def test_fields_have_types(value: object, largest: int) -> None:
    """A field is what was asked for, or Malformed names it; bool and float are no integers."""
    frame = Frame(Kind.HELLO, body={} if value is None else {"field": value})
    right = type(value) is int and 0 <= value <= largest
    checks = [
        (lambda: frame.number("field", largest), right),
        (lambda: frame.text("field"), type(value) is str and value.isprintable()),
        (lambda: frame.texts("field"), type(value) is list and all(type(item) is str for item in value)),
    ]
    for read, fine in checks:
        if fine:
            assert read() == value
        else:
            with pytest.raises(Malformed, match=r"field.*HELLO"):
                read()
