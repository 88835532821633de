"""What a process holds, looked at from outside: threads, descriptors, mappings; and the names that it listens at.

Looking from outside works for processes that are stopped or busy, and proves nothing by the library itself.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable

import addresses
import memory

#: States of a socket in /proc/net/tcp.
LISTENING, ESTABLISHED = "0A", "01"


def of(pid: int) -> Counter[str]:
    """Count threads, descriptors by kind, and mappings of ours."""
    found: Counter[str] = Counter()
    if not memory.in_driver():
        # A driver has threads that come and go as it likes.
        found["thread"] = len(os.listdir(f"/proc/{pid}/task"))
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            found[f"descriptor {os.readlink(f'/proc/{pid}/fd/{fd}').partition(':[')[0]}"] += 1
        except OSError:
            continue
    with open(f"/proc/{pid}/maps") as maps:
        found["mapping"] = sum("memfd:llm_datadist" in line for line in maps)
    return found


def names(namespace: str) -> list[str]:
    """List the abstract sockets of a namespace, one line for a listener and one for each of its connections.

    Where control runs over TCP, the same of this test run.
    """
    if addresses.VARIABLE in os.environ:
        return _sockets()
    with open("/proc/net/unix") as table:
        return [line.split()[-1] for line in table if f"/{namespace}/" in line]


def wait_until(condition: Callable[[], bool], what: str, limit_s: float = 10.0) -> None:
    """Look again until a condition holds that nobody announces."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"{what} did not come within {limit_s} s"
        time.sleep(0.002)


def wait_for(pid: int, expected: Counter[str]) -> None:
    """Wait until a process holds exactly this: threads take a moment to end."""
    end = time.monotonic() + 5
    while (found := of(pid)) != expected:
        assert time.monotonic() < end, (
            f"process {pid} holds too much: {found - expected}, too little: {expected - found}"
        )
        time.sleep(0.002)


def _sockets() -> list[str]:
    with open("/proc/net/tcp") as table:
        ends = [line.split()[1:4:2] for line in table]
    listening = {local for local, state in ends if state == LISTENING}
    named = [_written(local) for local, state in ends if local in listening and state in (LISTENING, ESTABLISHED)]
    return [name for name in named if name.startswith(f"127.{os.environ[addresses.VARIABLE]}.")]


def _written(end: str) -> str:
    host, port = (bytes.fromhex(part) for part in end.split(":"))
    return f"{'.'.join(str(byte) for byte in host[::-1])}:{int.from_bytes(port, 'big')}"
