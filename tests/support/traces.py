"""What a process holds, looked at from outside: threads, descriptors, mappings; and the names that it listens at.

Looking from outside works for processes that are stopped or busy, and proves nothing by the library itself.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable

import addresses

#: State of a listening socket in /proc/net/tcp.
LISTEN = "0A"


def of(pid: int) -> Counter[str]:
    """Count threads, descriptors by kind, and mappings of ours."""
    found: Counter[str] = Counter(thread=len(os.listdir(f"/proc/{pid}/task")))
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

    Where control runs over TCP, list the listeners of this test run.
    """
    if addresses.VARIABLE in os.environ:
        return _listeners()
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


def _listeners() -> list[str]:
    found = []
    with open("/proc/net/tcp") as table:
        for line in table:
            _, local, _, state, *_ = line.split()
            if state == LISTEN:
                host, port = (bytes.fromhex(part)[::-1] for part in local.split(":"))
                ip = ".".join(str(byte) for byte in host)
                if ip.startswith(f"127.{os.environ[addresses.VARIABLE]}."):
                    found.append(f"{ip}:{int.from_bytes(port, 'little')}")
    return found
