"""Which devices of the machine each process of a test run has.

A run names them in the environment: ``0,1`` gives one to each of two processes, ``0-3,4-7`` four to each. The session
takes the first entry, its peers the others; in each process they count from 0. Without the variable, as on the
simulator, every process has all that it asks for.
"""

from __future__ import annotations

import os

import pytest

VARIABLE = "LLM_DATADIST_TEST_DEVICES"
VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
_free: list[str] = []


def take_own() -> None:
    """Make the first entry this process's, before its driver is loaded, and keep the others for peers."""
    if VARIABLE in os.environ:
        _free[:] = [_ids(entry) for entry in os.environ[VARIABLE].split(",")]
        os.environ[VISIBLE] = _free.pop(0)


def _ids(entry: str) -> str:
    first, _, last = entry.partition("-")
    return ",".join(str(id) for id in range(int(first), int(last or first) + 1))


def take() -> dict[str, str]:
    """Give the environment that names a peer's devices."""
    if VARIABLE not in os.environ:
        return {}
    if not _free:
        pytest.skip(f"needs more processes than {VARIABLE} has entries")
    return {VISIBLE: _free.pop(0)}


def give_back(environment: dict[str, str]) -> None:
    """Let another peer have them."""
    _free.extend(environment.values())


def scarce() -> bool:
    """Say whether no further peer could start."""
    return VARIABLE in os.environ and not _free


def require(highest: int) -> None:
    """Skip a test whose processes need more devices than each of them has."""
    if VARIABLE in os.environ and highest >= len(os.environ[VISIBLE].split(",")):
        pytest.skip(f"needs {highest + 1} devices a process, which {VARIABLE} does not give")
