"""What both sides of a TCP connection say before the first frame. A pure codec, no sockets.

The client sends a preamble, the server answers with its own. Where a secret is configured, the client then proves that
it knows it, and after that the server: each by a MAC over both preambles, which hold a nonce each, and over its role.
So no proof can be sent back or used again. Nothing is encrypted.
"""

from __future__ import annotations

import enum
import hmac
import secrets
import struct

from llm_datadist._engine.wire import Malformed

__all__ = ["PREAMBLE_SIZE", "PROOF_SIZE", "REFUSAL", "Role", "check_preamble", "check_proof", "make_preamble", "prove"]

MAGIC = b"LDDC"
VERSION = 1
NONCE_SIZE = 32
PREAMBLE = struct.Struct(f"!4sBBxx{NONCE_SIZE}s")  # magic, version, whether proofs follow, nonce
PREAMBLE_SIZE = PREAMBLE.size
PROOF_SIZE = 32
#: Stands for the server's proof after a wrong one of the client's.
REFUSAL = bytes(PROOF_SIZE)


class Role(bytes, enum.Enum):
    """Who proves. Both are of one length, so that no message can be read in two ways."""

    CLIENT = b"client"
    SERVER = b"server"


def make_preamble(secret: bytes | None) -> bytes:
    """Make a preamble with a fresh nonce."""
    return PREAMBLE.pack(MAGIC, VERSION, secret is not None, secrets.token_bytes(NONCE_SIZE))


def check_preamble(preamble: bytes, secret: bytes | None) -> None:
    """Check what the other side has sent for a preamble.

    Raises
    ------
    Malformed
        It is none of this version.
    PermissionError
        One side has a secret, and the other has none.
    """
    if len(preamble) != PREAMBLE_SIZE:
        raise Malformed(f"the connection ended after {len(preamble)} of the {PREAMBLE_SIZE} bytes it starts with")
    magic, version, proofs, _ = PREAMBLE.unpack(preamble)
    if magic != MAGIC:
        raise Malformed(f"the connection starts with {magic!r}, so no engine is at the other end")
    if version != VERSION:
        raise Malformed(f"the connection starts in version {version}, this side speaks version {VERSION}")
    if proofs != (secret is not None):
        without, with_ = ("the peer", "this side") if secret is not None else ("this side", "the peer")
        raise PermissionError(
            f"{with_} has a secret and {without} has none: set LLM_DATADIST_SECRET_FILE or LLM_DATADIST_SECRET alike "
            "on both"
        )


def prove(secret: bytes, role: Role, client: bytes, server: bytes) -> bytes:
    """Make the proof of a role for the connection that started with these two preambles."""
    return hmac.digest(secret, role.value + client + server, "sha256")


def check_proof(proof: bytes, secret: bytes, role: Role, client: bytes, server: bytes) -> None:
    """Check a proof of the other side, whose role is given.

    Raises
    ------
    Malformed
        It is not complete.
    PermissionError
        It is wrong.
    """
    if len(proof) != PROOF_SIZE:
        raise Malformed(f"the connection ended after {len(proof)} of the {PROOF_SIZE} bytes of a proof")
    if not hmac.compare_digest(proof, prove(secret, role, client, server)):
        raise PermissionError("the peer does not know the secret of this side (LLM_DATADIST_SECRET_FILE)")
