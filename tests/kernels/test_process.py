"""Copies by the kernel: bytes of another process, and errors in place of signals."""

from __future__ import annotations

import errno
import mmap
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_datadist._kernels.hostcopy import DONE, PEER_GONE, STALE, TIMED_OUT, TORN, Guard, Liveness
from llm_datadist._kernels.process import covered, probe, transfer
from llm_datadist._kernels.runs import Bases, Plan, block_runs, indices, span_runs

MIB = 1 << 20
PAGE = mmap.PAGESIZE
ME = os.getpid()
SECONDS = 30

#: Holds MiB of a pattern, and prints where; ends with its input.
OTHER = """
import ctypes, sys
memory = ctypes.create_string_buffer(bytes(range(251)) * (int(sys.argv[1]) // 251 + 1))
print(ctypes.addressof(memory), flush=True)
for line in sys.stdin:
    print(memory[int(line)][0], flush=True)
"""
NBYTES = 9 * MIB
PATTERN = np.tile(np.arange(251, dtype=np.uint8), NBYTES // 251 + 1)[:NBYTES]


class Other:
    """Another process with memory."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", OTHER, str(NBYTES)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self.process.pid
        self.address = int(self._line())

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def peek(self, offset: int) -> int:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{offset}\n")
        self.process.stdin.flush()
        return int(self._line())

    def end(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=SECONDS)


@pytest.fixture(scope="module")
def other() -> Iterator[Other]:
    made = Other()
    yield made
    made.end()


def one(source: int, destination: int, nbytes: int) -> Plan:
    return Plan(Bases([source], [destination]), span_runs(0, 0, nbytes))


def failed(plan: Plan, pid: int, write: bool, number: int, text: str, threads: int = 1) -> None:
    with pytest.raises(OSError, match=text) as caught:
        transfer(plan, pid, write, None, None, 0, threads)
    assert caught.value.errno == number


# ---- bytes


@pytest.mark.parametrize("threads", [1, 3])
def test_read_and_write_a_process(other: Other, threads: int) -> None:
    here = np.zeros(NBYTES, np.uint8)
    assert transfer(one(other.address, here.ctypes.data, NBYTES), other.pid, False, None, None, 0, threads) == DONE
    assert np.array_equal(here, PATTERN)
    here[:] += 1
    assert transfer(one(here.ctypes.data, other.address, NBYTES), other.pid, True, None, None, 0, threads) == DONE
    assert [other.peek(at) for at in (0, 250, NBYTES - 1)] == [1, 251, here[-1]]
    here[:] = PATTERN
    transfer(one(here.ctypes.data, other.address, NBYTES), other.pid, True, None, None, 0, 1)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    block_bytes=st.sampled_from([1, 17, 512, 4096, 70_000]),
    write=st.booleans(),
    threads=st.integers(1, 3),
    cuts=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_any_part_of_any_plan(
    seed: int, block_bytes: int, write: bool, threads: int, cuts: tuple[float, float]
) -> None:
    """More runs than one call of the kernel takes; two tensors."""
    rng = random.Random(seed)
    blocks = min(3000, 5 * MIB // block_bytes)
    sources = [rng.randrange(blocks) for _ in range(blocks)]
    destinations = rng.sample(range(blocks), blocks)
    per = blocks * block_bytes
    source = np.frombuffer(np.random.default_rng(seed).bytes(2 * per), np.uint8)
    destination = np.full(2 * per, 0x55, np.uint8)
    plan = Plan(
        Bases([source.ctypes.data + per, source.ctypes.data], [destination.ctypes.data, destination.ctypes.data + per]),
        block_runs(indices(sources, "source"), indices(destinations, "destination"), blocks, blocks, block_bytes),
    )
    expected = destination.copy().reshape(2, blocks, block_bytes)
    expected[:, destinations] = source.reshape(expected.shape)[::-1, sources]
    begin, end = sorted(int(cut * plan.nbytes) for cut in cuts)
    for part in ((begin, end), (0, begin), (end, -1)):
        assert transfer(plan, ME, write, None, None, 0, threads, *part) == DONE
    assert np.array_equal(destination, expected.reshape(-1))


def test_nothing_to_copy() -> None:
    assert transfer(one(1, 1, 0), ME, False, None, None, 0, 1) == DONE
    assert transfer(Plan(Bases([], []), span_runs(0, 0, 8)), ME, True, None, None, 0, 1) == DONE


# ---- errors in place of signals


@pytest.mark.parametrize("address", [1, 8, 2**47 - 1, 2**47, 2**63, 2**64 - 101])
@pytest.mark.parametrize("write", [False, True])
def test_s211_no_address_causes_a_signal(other: Other, address: int, write: bool) -> None:
    here = np.zeros(100, np.uint8)
    mine, theirs, number = here.ctypes.data, other.address, errno.EFAULT
    for pid, whose in ((other.pid, f"process {other.pid}"), (ME, "this process")):
        back = theirs if pid != ME else mine
        source_owner = "this process" if write else whose
        destination_owner = whose if write else "this process"
        source, destination = (mine, back) if write else (back, mine)
        failed(
            one(address, destination, 100), pid, write, number, f"^.*reading {address:#x} of {source_owner} failed: "
        )
        failed(
            one(source, address, 100), pid, write, number, f"^.*writing {address:#x} of {destination_owner} failed: "
        )


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize("nbytes", [3000, 9 * MIB + 5])
def test_first_byte_that_was_not_copied_is_named(
    arena: Callable[..., Any], nbytes: int, write: bool, threads: int
) -> None:
    """The memory ends a few bytes before the end of the run; all before it was copied by a single thread."""
    room = arena(nbytes)
    good = np.full(nbytes + 8, 7, np.uint8)
    end = f"{room.address + nbytes:#x}"
    failed(one(room.address, good.ctypes.data, nbytes + 8), ME, write, errno.EFAULT, f"reading {end} of", threads)
    if threads == 1:
        assert not good[:nbytes].any()
        assert (good[nbytes:] == 7).all()
    room.protect(mmap.PROT_READ | mmap.PROT_WRITE)
    good[:] = 9
    failed(one(good.ctypes.data, room.address, nbytes + 8), ME, write, errno.EFAULT, f"writing {end} of", threads)
    if threads == 1:
        assert (room.bytes == 9).all()


def test_read_only_memory_is_not_written(arena: Callable[..., Any]) -> None:
    room, good = arena(PAGE), np.ones(PAGE, np.uint8)
    room.protect(mmap.PROT_READ)
    failed(one(good.ctypes.data, room.address, PAGE), ME, False, errno.EFAULT, f"writing {room.address:#x} of this")
    assert transfer(one(room.address, good.ctypes.data, PAGE), ME, False, None, None, 0, 1) == DONE


def test_no_such_process() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(SECONDS)
    here = np.zeros(8, np.uint8)
    number = errno.ESRCH
    failed(one(4096, here.ctypes.data, 8), process.pid, False, number, f"reading 0x1000 of process {process.pid}")
    failed(one(here.ctypes.data, 4096, 8), process.pid, True, number, f"writing 0x1000 of process {process.pid}")
    assert probe(process.pid, here.ctypes.data) == number


def test_probe(other: Other, arena: Callable[..., Any]) -> None:
    room = arena(PAGE)
    assert probe(ME, room.address) == 0
    assert probe(ME, room.address + PAGE - 7) == errno.EFAULT
    assert probe(other.pid, other.address) == 0
    assert probe(other.pid, 0) == errno.EFAULT
    for bad in (-1, 2**64):
        with pytest.raises(ValueError, match=r"^address is "):
            probe(ME, bad)


# ---- outcomes


class Scene:
    """A guard word, a peer's socket, and plans of a wanted length."""

    def __init__(self) -> None:
        self.source = np.ones(8 * MIB, np.uint8)
        self.destination = np.zeros(8 * MIB, np.uint8)
        self.word = np.array([4], np.uint64)
        self.guard = Guard([(self.word.ctypes.data, 4)])
        self.socket, self.peer = socket.socketpair()
        self.liveness = Liveness(self.socket.fileno(), -1)
        self.long = self.plan(100_000)

    def plan(self, pairs: int, beyond: int = 0) -> Plan:
        bases = Bases([self.source.ctypes.data] * pairs, [self.destination.ctypes.data] * (pairs - 1) + [beyond])
        return Plan(bases, span_runs(0, 0, 8 * MIB))

    def run(self, plan: Plan, deadline_ns: int = 0, threads: int = 1) -> int:
        return transfer(plan, ME, False, self.guard, self.liveness, deadline_ns, threads)


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.socket.close()
    made.peer.close()


def in_ns(seconds: float) -> int:
    return time.monotonic_ns() + int(seconds * 1e9)


def test_stale_and_gone_before_a_byte_is_written(scene: Scene) -> None:
    scene.word[0] = 5
    assert scene.run(scene.long) == STALE
    scene.word[0] = 4
    scene.peer.close()
    assert scene.run(scene.long) == PEER_GONE
    assert not scene.destination.any()


@pytest.mark.parametrize("threads", [1, 2])
def test_deadline(scene: Scene, threads: int) -> None:
    begin = time.monotonic()
    assert scene.run(scene.long, in_ns(0.15), threads) == TIMED_OUT
    assert 0.1 < time.monotonic() - begin < 5
    scene.destination[:] = 0
    assert scene.run(scene.long, 1, threads) == TIMED_OUT
    assert not scene.destination.any()


def test_torn_and_gone_win_over_an_address_that_failed(scene: Scene) -> None:
    """Memory that is unregistered during a pull may be unmapped: that is no mistake of the one who pulls."""
    plan = scene.plan(60, beyond=8)
    with pytest.raises(OSError, match="writing 0x8 "):
        scene.run(plan)
    for change, outcome in ((lambda: scene.word.fill(6), TORN), (scene.peer.close, PEER_GONE)):
        timer = threading.Timer(0.02, change)
        timer.start()
        assert scene.run(plan) == outcome
        timer.join()
        scene.word[0] = 4


@pytest.mark.parametrize("threads", [1, 2])
def test_a_failure_ends_the_work(scene: Scene, threads: int) -> None:
    pairs = 100_000
    bases = Bases([8] + [scene.source.ctypes.data] * pairs, [scene.destination.ctypes.data] * (pairs + 1))
    begin = time.monotonic()
    with pytest.raises(OSError, match="reading 0x8 "):
        scene.run(Plan(bases, span_runs(0, 0, 8 * MIB)), in_ns(20), threads)
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize("threads", [1, 2])
def test_signals_are_seen(scene: Scene, threads: int) -> None:
    class Alarm(Exception):
        pass

    def raise_alarm(*_: object) -> None:
        raise Alarm

    former = signal.signal(signal.SIGALRM, raise_alarm)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    begin = time.monotonic()
    try:
        with pytest.raises(Alarm):
            scene.run(scene.long, threads=threads)
        assert time.monotonic() - begin < 5
    finally:
        signal.signal(signal.SIGALRM, former)


# ---- covered


def words(*ranges: tuple[int, int]) -> bytes:
    return array("Q", [word for each in ranges for word in each]).tobytes()


def test_covered() -> None:
    plan = Plan(Bases([100, 200], [1000, 300]), span_runs(10, 0, 40))  # reads up to base + 50
    assert covered(plan, words((100, 350), (1000, 1040)))
    assert covered(plan, words((100, 150), (200, 250), (300, 340), (1000, 1040), (2000, 3000)))
    assert not covered(plan, words())
    for bad in ((101, 150), (100, 149)):
        assert not covered(plan, words(bad, (200, 250), (300, 340), (1000, 1040)))
    assert not covered(plan, words((100, 250), (300, 340), (1000, 1039)))
    assert not covered(plan, words((100, 250), (300, 340)))
    assert covered(Plan(Bases([], []), span_runs(0, 0, 9)), words())
