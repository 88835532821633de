from llm_datadist._kernels.hostcopy import Guard, Liveness
from llm_datadist._kernels.runs import Plan

def transfer(
    plan: Plan,
    pid: int,
    write: bool,
    guard: Guard | None,
    liveness: Liveness | None,
    deadline_ns: int,
    threads: int,
    begin: int = 0,
    end: int = -1,
) -> int:
    """Copy the bytes [begin, end) of a plan from the process `pid` (or, with `write`, to it) and say how it went.

    Outcomes, order of work, threads and GIL are those of `hostcopy.copy`. No address causes a signal: what the kernel
    can't copy is an `OSError` whose text names the first byte that was not copied, and whose it is.
    """

def probe(pid: int, address: int) -> int:
    """Give the errno of reading 8 bytes of a process; 0 when they can be read."""

def covered(plan: Plan, ranges: bytes) -> bool:
    """Say whether all that a plan touches lies inside ranges: native words begin, end, begin, end, ..., sorted."""
