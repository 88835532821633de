from collections.abc import Sequence
from typing import Final, final

from llm_datadist._kernels.runs import Plan

DONE: Final = 0
TIMED_OUT: Final = 1
STALE: Final = 2
TORN: Final = 3
PEER_GONE: Final = 4

@final
class Guard:
    """At most eight (offset, value) pairs of 8-byte words that must hold their value before and after a copy.

    Offsets count from ``base``. With ``tells_death`` one of them changes when the peer dies, so that the peer need not
    be looked at besides.
    """

    def __new__(cls, words: Sequence[tuple[int, int]], base: int = 0, tells_death: bool = False) -> Guard: ...

@final
class Liveness:
    """Descriptors that tell a peer's death: its control socket (hang-up) and its pidfd (readable). -1 = none."""

    def __new__(cls, socket_fd: int, pidfd: int) -> Liveness: ...
    def alive(self) -> bool: ...

def copy(
    plan: Plan,
    guard: Guard | None,
    liveness: Liveness | None,
    deadline_ns: int,
    threads: int,
    begin: int = 0,
    end: int = -1,
) -> int:
    """Copy the bytes [begin, end) of a plan (counted tensor by tensor, run by run) and say how it went.

    The GIL is kept up to 64 KiB in all. Above it is released; deadline and signals are checked at least each 100 ms.
    Returns only when no thread of it writes any more. `deadline_ns` is on CLOCK_MONOTONIC; 0 means none.
    """

def move(plan: Plan) -> None:
    """Copy a plan in order: tensor after tensor, run after run, each run as if through a buffer.

    The GIL is kept up to 64 KiB in all. Above it is released, and signals are checked at least each 100 ms.
    """

def kernels() -> list[str]:
    """Names of the copy kernels that this processor can run, best first. "plain" is always there."""

def select_kernel(name: str) -> str:
    """Use this kernel from now on (tests, diagnosis); returns the former one."""
