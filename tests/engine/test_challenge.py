"""What both sides of a TCP connection say before the first frame: what fits is accepted, and nothing else."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_datadist._engine.challenge import (
    PREAMBLE_SIZE,
    REFUSAL,
    Role,
    check_preamble,
    check_proof,
    make_preamble,
    prove,
)
from llm_datadist._engine.wire import Malformed

secrets = st.binary(min_size=16, max_size=40)


@given(secrets | st.none())
def test_preambles_of_alike_sides(secret: bytes | None) -> None:
    """They are accepted, and never the same twice."""
    one, other = make_preamble(secret), make_preamble(secret)
    assert len(one) == len(other) == PREAMBLE_SIZE
    assert one != other
    check_preamble(one, secret)


def test_a_secret_on_one_side() -> None:
    """Each side says which of the two has it."""
    with pytest.raises(
        PermissionError, match=r"the peer has a secret and this side has none.*LLM_DATADIST_SECRET_FILE"
    ):
        check_preamble(make_preamble(bytes(16)), None)
    with pytest.raises(
        PermissionError, match=r"this side has a secret and the peer has none.*LLM_DATADIST_SECRET_FILE"
    ):
        check_preamble(make_preamble(None), bytes(16))


@pytest.mark.parametrize(
    ("preamble", "text"),
    [
        (b"", "after 0 of the 40 bytes"),
        (b"LDDC\x01" + bytes(34), "after 39 of the 40 bytes"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\nabcde", "starts with b'GET '"),
        (b"LDDC\x02" + bytes(35), "in version 2, this side speaks version 1"),
    ],
    ids=["nothing", "too short", "http", "version"],
)
def test_other_preambles(preamble: bytes, text: str) -> None:
    with pytest.raises(Malformed, match=text):
        check_preamble(preamble[:PREAMBLE_SIZE], None)


@given(st.binary(max_size=60), secrets | st.none())
def test_any_bytes_for_a_preamble(data: bytes, secret: bytes | None) -> None:
    """They are refused in one of the two ways."""
    if not data.startswith(b"LDDC"):
        with pytest.raises(Malformed):
            check_preamble(data, secret)
    else:
        with contextlib.suppress(Malformed, PermissionError):
            check_preamble(data, secret)


@given(secrets, secrets, st.sampled_from(Role), st.integers(0, 2 * PREAMBLE_SIZE * 8 - 1))
def test_proofs(secret: bytes, other: bytes, role: Role, bit: int) -> None:
    """One fits the secret, the role, and every bit of both preambles, and nothing else."""
    client, server = make_preamble(secret), make_preamble(secret)
    proof = prove(secret, role, client, server)
    check_proof(proof, secret, role, client, server)
    changed = bytearray(client + server)
    changed[bit // 8] ^= 1 << bit % 8
    wrong = [
        (secret, role, bytes(changed[:PREAMBLE_SIZE]), bytes(changed[PREAMBLE_SIZE:])),
        (secret, role, server, client),
        (secret, Role.SERVER if role is Role.CLIENT else Role.CLIENT, client, server),
    ]
    # A key that is longer by null bytes is the same key to HMAC.
    if other.rstrip(b"\0") != secret.rstrip(b"\0"):
        wrong.append((other, role, client, server))
    for case in wrong:
        with pytest.raises(PermissionError, match="does not know the secret"):
            check_proof(proof, *case)


@given(secrets, st.binary(max_size=64))
def test_any_bytes_for_a_proof(secret: bytes, data: bytes) -> None:
    client, server = make_preamble(secret), make_preamble(secret)
    for proof in (data, data[:32].ljust(32), REFUSAL):
        with pytest.raises(PermissionError if len(proof) == 32 else Malformed):
            check_proof(proof, secret, Role.SERVER, client, server)
