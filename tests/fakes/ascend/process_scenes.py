"""Scenes with several processes, or with the end of one: they get a function that loads the driver."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import tempfile
import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from driver import MIB, Driver, pod_table, rank_table
from hccl_scenes import SIZE, Side, equal
from scenes import allowed

Load = Callable[[], Driver]
HCCS = rank_table(("a", 0), ("a", 1))
RDMA = rank_table(("a", 0), ("b", 1))


def end_process(status: int) -> None:
    """End with what the libraries do then, but not with what is on the stack: that belongs to our parent."""
    ctypes.CDLL(None).exit(status)


class Other:
    """
    A process with the second side.

    `steps` goes through what it does: it yields a number for us, stops there, and gets a number back when it goes on.
    """

    def __init__(self, steps: Callable[[], Generator[int, int, None]], **environment: str) -> None:
        self.line, line = socket.socketpair()
        self.line.settimeout(60)
        self.pid = os.fork()
        if self.pid:
            line.close()
            return
        self.line.close()
        os.environ.update(environment)
        try:
            running = steps()
            with suppress(StopIteration):
                number = next(running)
                while True:
                    line.sendall(number.to_bytes(8, "little"))
                    number = running.send(int.from_bytes(line.recv(8), "little"))
        except Exception:
            traceback.print_exc()
            os._exit(1)
        end_process(0)

    def reached(self) -> int:
        """Wait until it has come to its next stop, and give its number."""
        data = self.line.recv(8)
        equal(len(data), 8)
        return int.from_bytes(data, "little")

    def go_on(self, number: int = 0) -> None:
        """Let it go on."""
        self.line.sendall(number.to_bytes(8, "little"))

    def status(self) -> int:
        """Wait for its end and give the exit status, or the negative signal."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@contextmanager
def reports() -> Iterator[Callable[[], list[str]]]:
    """Give a function that lists the ids in what processes have reported at their end."""
    with tempfile.TemporaryDirectory() as directory:
        os.environ["FAKE_ASCEND_REPORT"] = directory
        yield lambda: [line.split()[0] for file in Path(directory).iterdir() for line in file.read_text().splitlines()]


def side(load: Load, rank: int, table: dict[str, Any] = HCCS) -> Side:
    """Make one side in this process; rank and device are the same."""
    d = load()
    d.do("aclInit", None)
    return Side(d, rank, table)


def end(side: Side) -> None:
    """Give everything back, so that nothing is recorded at the end of the process."""
    d = side.d
    equal(side.destroy(), 0)
    d.do("HcclDeregisterGlobalMem", side.handle)
    d.do("aclrtDestroyStream", side.stream)
    d.free_aligned(side.memory)
    d.do("aclrtResetDevice", side.rank)
    d.do("aclFinalize")
    equal(d.violations(), [])


def between_processes(load: Load, table: dict[str, Any]) -> None:
    """Get and put between two processes, with checked bytes and nothing recorded by either."""
    size = 3 * MIB + 5
    data = bytes(range(251)) * (size // 251) + b"x" * (size % 251)

    def steps() -> Generator[int, int, None]:
        right = side(load, 1, table)
        right.d.write(right.memory, data)
        equal(right.prepare(), 0)
        theirs = yield right.memory
        equal(right.d.read(right.memory + SIZE - 4, 4), b"left")
        equal((right.get((right.memory, theirs, 64)), right.sync()), (0, 0))
        equal(right.d.read(right.memory, 64), b"A" * 64)
        yield 0
        end(right)

    with reports() as found:
        other = Other(steps)
        left = side(load, 0, table)
        equal(left.prepare(), 0)
        theirs = other.reached()
        equal((left.get((left.memory + 64, theirs, size)), left.sync()), (0, 0))
        equal(left.d.read(left.memory + 64, size), data)
        left.d.write(left.memory + SIZE - 4, b"left")
        equal((left.put((left.memory + SIZE - 4, theirs + SIZE - 4, 4)), left.sync()), (0, 0))
        other.go_on(left.memory)
        other.reached()
        other.go_on()
        equal(other.status(), 0)
        equal(found(), [])
        end(left)


@allowed()
def two_processes_over_hccs_on_a2(load: Load) -> None:
    between_processes(load, HCCS)


@allowed()
def two_processes_over_rdma(load: Load) -> None:
    between_processes(load, RDMA)


@allowed(FAKE_ASCEND_SOC="Ascend910_9391")
def two_processes_over_hccs_on_a3(load: Load) -> None:
    between_processes(load, pod_table(("a", 0), ("b", 1)))


def with_a_killed_peer(load: Load, act: Callable[[Side, int], None], faults: str = "") -> None:
    """Prepare with a process that is killed, by its faults or at once, and let the rest of us act."""

    def steps() -> Generator[int, int, None]:
        right = side(load, 1)
        equal(right.prepare(), 0)
        yield right.memory
        if not faults:
            os.kill(os.getpid(), signal.SIGKILL)
        yield 0

    other = Other(steps, FAKE_ASCEND_FAULTS=faults)
    left = side(load, 0)
    equal(left.prepare(), 0)
    theirs = other.reached()
    other.go_on()
    if not faults:
        equal(other.status(), -signal.SIGKILL)
    act(left, theirs)
    equal(left.d.violations(), [])
    if faults:
        equal(other.status(), -signal.SIGKILL)


@allowed()
def peer_killed_before_a_transfer(load: Load) -> None:
    def act(left: Side, theirs: int) -> None:
        equal((left.get((left.memory, theirs, 8)), left.sync()), (0, 507057))
        equal(left.destroy(), 0)

    with_a_killed_peer(load, act)


@allowed()
def peer_killed_in_mid_transfer(load: Load) -> None:
    def act(left: Side, theirs: int) -> None:
        equal((left.get((left.memory, theirs, 64)), left.sync()), (0, 507057))
        equal(left.d.read(left.memory, 64), b"B" * 32 + b"A" * 32)

    with_a_killed_peer(load, act, "serve:1:die-half")


@allowed()
def killed_in_mid_transfer(load: Load) -> None:
    def steps() -> Generator[int, int, None]:
        right = side(load, 1)
        equal(right.prepare(), 0)
        theirs = yield 0
        right.put((right.memory, theirs, 64))
        right.sync()
        yield 0

    other = Other(steps, FAKE_ASCEND_FAULTS="HcclBatchPut:1:die-half")
    left = side(load, 0)
    equal(left.prepare(), 0)
    other.reached()
    other.go_on(left.memory)
    equal(other.status(), -signal.SIGKILL)
    # Destroyed: all that has been sent has been written.
    equal(left.destroy(), 0)
    equal(left.d.read(left.memory, 64), b"B" * 32 + b"A" * 32)


def peer_killed_in_prepare(load: Load, faults: str, code: int) -> None:
    """Prepare with a process that doesn't survive its own Prepare."""

    def steps() -> Generator[int, int, None]:
        side(load, 1).prepare()
        yield 0

    other = Other(steps, FAKE_ASCEND_FAULTS=faults)
    os.environ["FAKE_ASCEND_SECOND"] = "100"
    left = side(load, 0)
    if code == 9:
        equal(other.status(), -signal.SIGKILL)
    equal(left.prepare(2 if code == 9 else 200), code)
    equal(left.destroy(), 0)


@allowed()
def peer_killed_before_prepare(load: Load) -> None:
    peer_killed_in_prepare(load, "HcclCommPrepare:1:die", 9)


@allowed()
def peer_killed_in_the_middle_of_prepare(load: Load) -> None:
    peer_killed_in_prepare(load, "HcclCommPrepare:1:die-half", 4)


@allowed()
def stopped_peer(load: Load) -> None:
    def steps() -> Generator[int, int, None]:
        right = side(load, 1)
        equal(right.prepare(), 0)
        yield right.memory

    other = Other(steps)
    left = side(load, 0)
    equal(left.prepare(), 0)
    theirs = other.reached()
    os.kill(other.pid, signal.SIGSTOP)
    os.waitpid(other.pid, os.WUNTRACED)
    try:
        equal((left.get((left.memory, theirs, 8)), left.sync(50)), (0, 507046))
        left.d.do("aclrtStreamAbort", left.stream)
        equal(left.destroy(), 0)
    finally:
        os.kill(other.pid, signal.SIGKILL)
        other.status()


def in_child(load: Load, act: Callable[[Driver], object]) -> tuple[int, list[str]]:
    """Give the exit status of a process, and the ids that it reported."""

    def steps() -> Generator[int, int, None]:
        act(load())
        yield 0

    with reports() as found:
        other = Other(steps)
        try:
            other.line.recv(8)
            other.go_on()
        except OSError:
            pass
        return other.status(), found()


@allowed()
def host_reads_device_memory(load: Load) -> None:
    def act(d: Driver) -> None:
        d.start()
        ctypes.string_at(d.out("aclrtMalloc", 64, 0), 1)

    equal(in_child(load, act), (-signal.SIGSEGV, []))


@allowed()
def leaks_at_exit(load: Load) -> None:
    def act(d: Driver) -> None:
        left = side(lambda: d, 0)
        d.out("aclrtMallocHost", 64)
        assert left

    status, found = in_child(load, act)
    # Device memory, host memory, a stream, and a device that is set; a comm, and registered memory.
    equal((status, sorted(found)), (0, ["A32"] * 4 + ["H37"] * 2))


@allowed(FAKE_ASCEND_STRICT="1")
def strict_mode_ends_at_once(load: Load) -> None:
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)
    equal(in_child(load, lambda d: d.aclrtSetDevice(0)), (-signal.SIGABRT, []))


@allowed()
def child_of_a_fork(load: Load) -> None:
    left = side(load, 0)
    stream = left.stream
    left.d.do("aclrtMemsetAsync", left.memory, 8, 0, 8, stream)
    child = os.fork()
    if not child:
        end_process(left.d.aclrtSetDevice(0) != 100001)
    equal(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)
    equal(left.d.sync(stream), 0)


@allowed()
def child_of_a_fork_does_not_hide_a_death(load: Load) -> None:
    def steps() -> Generator[int, int, None]:
        right = side(load, 1)
        equal(right.prepare(), 0)
        child = os.fork()
        if not child:
            signal.pause()
        yield right.memory
        yield child

    other = Other(steps)
    left = side(load, 0)
    equal(left.prepare(), 0)
    theirs = other.reached()
    other.go_on()
    child = other.reached()
    os.kill(other.pid, signal.SIGKILL)
    try:
        other.status()
        equal((left.get((left.memory, theirs, 8)), left.sync()), (0, 507057))
    finally:
        os.kill(child, signal.SIGKILL)
