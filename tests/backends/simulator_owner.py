"""A process that owns memory, for the tests: it obeys lines on its standard input.

Usage: ``simulator_owner.py SOCKET_FD OPTIONS_JSON POOL_BYTES``
"""

from __future__ import annotations

import ctypes
import json
import socket
import sys

from llm_datadist.backend import MemoryKind
from llm_datadist.backends.simulator.backend import SimulatorBackend


def pattern(nbytes: int) -> bytes:
    """Give the bytes 0, 1, 2, ... modulo 251."""
    return (bytes(range(251)) * (nbytes // 251 + 1))[:nbytes]


def main() -> None:
    """Export one pool of eight committed MiB (bytes 0, 1, 2, ... modulo 251), then answer commands."""
    control = socket.socket(fileno=int(sys.argv[1]))
    backend = SimulatorBackend()
    backend.open([0], json.loads(sys.argv[2]))
    directory, board = backend.make_windows(1 << 20, 1 << 20)
    region = backend.reserve(0, int(sys.argv[3]) or None, MemoryKind.DEVICE)
    size = min(8 << 20, region.nbytes)
    backend.commit(region, 0, size)
    ctypes.memmove(region.address, pattern(size), size)
    export = backend.export()
    socket.send_fds(control, [export.data], list(export.fds))
    held = []
    for line in sys.stdin:
        command, *numbers = line.split()
        if command == "peek":  # offset in the pool
            answer = ctypes.c_uint8.from_address(region.address + int(numbers[0])).value
        elif command == "directory":  # new value of the first word
            ctypes.c_uint64.from_address(directory.address).value = int(numbers[0])
            answer = 0
        elif command == "board":
            answer = ctypes.c_uint64.from_address(board.address).value
        elif command == "register":  # bytes, filled like the pool; gives the address
            held.append(
                ctypes.create_string_buffer((bytes(range(251)) * (int(numbers[0]) // 251 + 1))[: int(numbers[0])])
            )
            answer = ctypes.addressof(held[-1])
            backend.register(0, [answer], int(numbers[0]), MemoryKind.HOST)
        elif command == "byte":  # address
            answer = ctypes.c_uint8.from_address(int(numbers[0])).value
        elif command == "close":
            backend.close()
            answer = 0
        print(answer, flush=True)


if __name__ == "__main__":
    main()
