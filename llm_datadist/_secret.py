"""The secret that both sides of a control connection between hosts must know."""

from __future__ import annotations

import os
import stat

from llm_datadist._checks import refused
from llm_datadist.status import ParamInvalid

__all__ = ["read_secret"]

FILE = "LLM_DATADIST_SECRET_FILE"
VALUE = "LLM_DATADIST_SECRET"
SIZES = (16, 4096)


def read_secret() -> bytes | None:
    """Give the secret that the environment names, from a file or as it is; None when it names none.

    Raises
    ------
    LLMException
        LLM_PARAM_INVALID (a `ValueError` too) when both variables are set, the file can't be read or others than its
        owner may read it, or the secret has a wrong length. The text never shows the secret.
    """
    path, value = os.environ.get(FILE), os.environ.get(VALUE)
    if path and value:
        raise refused(ParamInvalid(f"{FILE} and {VALUE} are both set, allowed is one of them"))
    if path:
        name, secret = f"the secret in {FILE} {path!r:.200}", _read(path)
    elif value:
        name, secret = VALUE, os.fsencode(value)
    else:
        return None
    low, high = SIZES
    if not low <= len(secret) <= high:
        raise refused(ParamInvalid(f"{name} has {len(secret)} bytes, allowed are {low} to {high}"))
    return secret


def _read(path: str) -> bytes:
    """Read a file, less one newline at its end, and no more of it than shows that it is too long."""
    try:
        # A pipe would wait for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            mode = os.fstat(fd).st_mode
            secret = os.read(fd, SIZES[1] + 2) if stat.S_ISREG(mode) else b""
        finally:
            os.close(fd)
    except (OSError, ValueError) as e:  # ValueError: a null character
        raise refused(ParamInvalid(f"{FILE} is {path!r:.200}, which cannot be read: {e}")) from e
    if not stat.S_ISREG(mode):
        raise refused(ParamInvalid(f"{FILE} is {path!r:.200}, allowed is a regular file"))
    if mode & 0o077:
        raise refused(
            ParamInvalid(
                f"{FILE} is {path!r:.200}, which others than its owner may use (mode {mode & 0o777:03o}): chmod 600 it"
            )
        )
    return secret.removesuffix(b"\n")
