"""A process with an acl backend, for the tests: it obeys JSON lines on its standard input.

Usage: ``acl_owner.py SOCKET_FD OPTIONS_JSON DEVICE``
"""

from __future__ import annotations

import base64
import json
import socket
import sys
import time
from typing import Any

from llm_datadist._kernels.runs import Bases, Plan, span_runs
from llm_datadist.backend import Endpoint, Export, MemoryKind, Pair
from llm_datadist.backends.acl.backend import AclBackend

POOL_BYTES = 4 << 20


def pattern(nbytes: int) -> bytes:
    """Give the bytes 0, 1, 2, ... modulo 251."""
    return (bytes(range(251)) * (nbytes // 251 + 1))[:nbytes]


class Owner:
    """One device and one host pool, both filled with the pattern, and one link."""

    def __init__(self, control: socket.socket, options: dict[str, str], device: int) -> None:
        self.control = control
        self.backend = AclBackend()
        self.backend.open([device], options)
        self.pools = [self.backend.reserve(device, POOL_BYTES, kind) for kind in (MemoryKind.DEVICE, MemoryKind.HOST)]
        for pool in self.pools:
            self.backend.store(pool.address, pattern(POOL_BYTES))
        self.endpoint: Endpoint | None = None

    def export(self) -> str:
        """Describe it."""
        return base64.b64encode(self.backend.export().data).decode()

    def connect(self, export: str, name: str, seconds: float) -> str:
        """Take part in a link; say what went wrong."""
        pair = Pair(self.control, -1, -1, name, False)
        try:
            self.endpoint = self.backend.connect(
                Export(base64.b64decode(export)), pair, time.monotonic_ns() + int(seconds * 1e9)
            )
        except Exception as error:
            self.control.shutdown(socket.SHUT_RDWR)  # as an engine hangs up
            return str(error)
        return ""

    def peek(self, pool: int, offset: int, nbytes: int) -> str:
        """Give bytes of a pool."""
        return self.backend.load(self.pools[pool].address + offset, nbytes).hex()

    def push(self, region: int) -> str:
        """Write the device pool's first MiB to a region of the peer."""
        assert self.endpoint is not None
        place = self.endpoint.locate(region, 0, 1 << 20)
        plan = Plan(Bases([self.pools[0].address], [place.base]), span_runs(0, 0, 1 << 20))
        self.endpoint.write(plan, None, time.monotonic_ns() + 10**10, place.route)
        return ""

    def close(self) -> str:
        """End the link and give everything back."""
        if self.endpoint is not None:
            self.endpoint.close()
        self.backend.close()
        return ""


def main() -> None:
    """Answer each line, which is the name of a method and its arguments."""
    owner = Owner(socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2]), int(sys.argv[3]))
    for line in sys.stdin:
        call: list[Any] = json.loads(line)
        print(json.dumps(getattr(owner, call[0])(*call[1:])), flush=True)


if __name__ == "__main__":
    main()
