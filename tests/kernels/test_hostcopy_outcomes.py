"""Outcomes: stale, torn, gone, late, interrupted; and what other threads can do meanwhile."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from llm_datadist._kernels.hostcopy import DONE, PEER_GONE, STALE, TIMED_OUT, TORN, Guard, Liveness, copy
from llm_datadist._kernels.runs import Bases, Plan, span_runs

UNTOUCHED = 0x55
MIB = 1 << 20


class Scene:
    """A short plan, a long plan (the same megabytes again and again), guard words, and a peer's socket."""

    def __init__(self) -> None:
        self.source = np.arange(MIB // 4, dtype=np.uint64)
        self.destination = np.full(2 * MIB, UNTOUCHED, np.uint8)
        self.words = np.array([2, 2**64 - 2, 6], np.uint64)
        self.guard = Guard([(self.words.ctypes.data + 8 * i, int(word)) for i, word in enumerate(self.words)])
        self.socket, self.peer = socket.socketpair()
        self.liveness = Liveness(self.socket.fileno(), -1)

    def plan(self, seconds: float) -> Plan:
        """A plan that takes this long and more on any machine: 200 GB a second are out of reach."""
        pairs = max(1, int(seconds * 200e9) // (2 * MIB))
        return Plan(
            Bases([self.source.ctypes.data] * pairs, [self.destination.ctypes.data] * pairs), span_runs(0, 0, 2 * MIB)
        )

    @property
    def untouched(self) -> bool:
        return bool((self.destination == UNTOUCHED).all())

    def close(self) -> None:
        self.socket.close()
        self.peer.close()


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.close()


class Later:
    """Does something in another thread after a moment."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._timer = threading.Timer(0.03, action)

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        assert not self._timer.is_alive(), "the copy ended before anything could happen"
        self._timer.join()


def in_ns(seconds: float) -> int:
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC) + int(seconds * 1e9)


# ---- guard


@pytest.mark.parametrize("word", [0, 1, 2])
@pytest.mark.parametrize("seconds", [0, 0.1])
def test_stale_before_a_byte_is_written(scene: Scene, word: int, seconds: float) -> None:
    scene.words[word] += np.uint64(1)
    assert copy(scene.plan(seconds), scene.guard, scene.liveness, 0, 2) == STALE
    assert scene.untouched
    scene.words[word] -= np.uint64(1)
    assert copy(scene.plan(0), scene.guard, scene.liveness, 0, 2) == DONE
    assert not scene.untouched


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("word", [0, 2])
def test_torn_when_a_word_changes_meanwhile(scene: Scene, word: int, threads: int) -> None:
    def change() -> None:
        scene.words[word] = 99

    with Later(change):
        assert copy(scene.plan(0.05), scene.guard, scene.liveness, 0, threads) == TORN


def test_refuses_bad_guards(scene: Scene) -> None:
    address = scene.words.ctypes.data
    assert copy(scene.plan(0), Guard([]), None, 0, 1) == DONE
    assert copy(scene.plan(0), Guard([(address, 2)] * 8), None, 0, 1) == DONE
    with pytest.raises(ValueError, match="more than 8"):
        Guard([(address, 2)] * 9)
    for bad in (0, 4, address + 1, -8, 2**64):
        with pytest.raises(ValueError, match=r"^address is "):
            Guard([(bad, 2)])
    for bad in (-1, 2**64):
        with pytest.raises(ValueError, match=r"^value is "):
            Guard([(address, bad)])


# ---- liveness


def test_gone_before_a_byte_is_written(scene: Scene) -> None:
    scene.peer.close()
    assert copy(scene.plan(0), scene.guard, scene.liveness, 0, 1) == PEER_GONE
    assert scene.untouched


def test_gone_meanwhile_wins_over_torn_and_late(scene: Scene) -> None:
    def die() -> None:
        scene.words[0] = 1
        scene.peer.close()

    with Later(die):
        assert copy(scene.plan(1), scene.guard, scene.liveness, in_ns(0.1), 1) == PEER_GONE


def test_what_a_socket_tells(scene: Scene) -> None:
    assert scene.liveness.alive()
    scene.peer.send(b"unread")
    assert scene.liveness.alive()
    scene.peer.shutdown(socket.SHUT_WR)
    assert not scene.liveness.alive()


def test_a_closed_descriptor_is_gone(scene: Scene) -> None:
    number = os.dup(scene.socket.fileno())
    os.close(number)
    assert not Liveness(number, -1).alive()
    assert not Liveness(-1, number).alive()


def test_without_descriptors_a_peer_is_alive() -> None:
    assert Liveness(-1, -1).alive()


def test_a_process_that_ended_is_gone_though_its_socket_is_held(scene: Scene) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    pidfd = os.pidfd_open(process.pid)
    try:
        liveness = Liveness(scene.socket.fileno(), pidfd)
        assert liveness.alive()
        assert copy(scene.plan(0), None, liveness, 0, 1) == DONE
        process.kill()
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
        assert not liveness.alive()
        assert copy(scene.plan(0), None, liveness, 0, 1) == PEER_GONE
    finally:
        process.communicate()
        os.close(pidfd)


# ---- time


@pytest.mark.parametrize("deadline_ns", [1, -1, -(2**80)])
@pytest.mark.parametrize("seconds", [0, 0.1])
def test_a_deadline_in_the_past(scene: Scene, seconds: float, deadline_ns: int) -> None:
    assert copy(scene.plan(seconds), scene.guard, scene.liveness, deadline_ns, 2) == TIMED_OUT
    assert scene.untouched


@pytest.mark.parametrize("threads", [1, 2])
def test_a_deadline_on_the_way(scene: Scene, threads: int) -> None:
    begin = time.monotonic()
    assert copy(scene.plan(5), scene.guard, scene.liveness, in_ns(0.12), threads) == TIMED_OUT
    assert 0.1 < time.monotonic() - begin < 5
    assert not scene.untouched


def test_nobody_writes_after_the_return(scene: Scene) -> None:
    assert copy(scene.plan(5), None, None, in_ns(0.06), 4) == TIMED_OUT
    scene.destination[:] = UNTOUCHED
    time.sleep(0.05)
    assert scene.untouched


# ---- other threads, signals


def test_other_threads_run_during_a_long_copy(scene: Scene) -> None:
    steps = 0
    stop = threading.Event()

    def count() -> None:
        nonlocal steps
        while not stop.is_set():
            steps += 1
            time.sleep(0.001)

    counter = threading.Thread(target=count)
    counter.start()
    before = steps
    assert copy(scene.plan(5), None, None, in_ns(0.1), 1) == TIMED_OUT
    after = steps
    stop.set()
    counter.join()
    assert after - before >= 10


@pytest.mark.parametrize(("nbytes", "kept"), [(64 << 10, True), (1 << 20, False)])
def test_a_small_copy_keeps_the_gil(scene: Scene, nbytes: int, kept: bool) -> None:
    """With a busy thread beside it, whoever gives the GIL away waits a whole switch interval for it."""
    plan = Plan(Bases([scene.source.ctypes.data], [scene.destination.ctypes.data]), span_runs(0, 0, nbytes))
    former = sys.getswitchinterval()
    stop = False

    def spin() -> None:
        while not stop:
            pass

    busy = threading.Thread(target=spin)
    sys.setswitchinterval(0.3)
    try:
        busy.start()
        time.sleep(0.001)  # comes back with a fresh interval
        begin = time.monotonic()
        copies = 0
        while copies < 2000 and time.monotonic() - begin < 0.2:
            assert copy(plan, None, None, 0, 1) == DONE
            copies += 1
        assert (copies == 2000) is kept
    finally:
        stop = True
        busy.join()
        sys.setswitchinterval(former)


INTERRUPTED = """
import signal, sys, threading, time
sys.path.insert(0, {folder!r})
# A shell that starts a test run in the background has children ignore the key.
signal.signal(signal.SIGINT, signal.default_int_handler)
from test_hostcopy_outcomes import Scene, UNTOUCHED, copy
scene = Scene()
plan = scene.plan(20)
before = threading.active_count()
print("ready", flush=True)
try:
    copy(plan, scene.guard, scene.liveness, 0, {threads})
except KeyboardInterrupt:
    assert len(__import__("os").listdir("/proc/self/task")) == before
    scene.destination[:] = UNTOUCHED
    time.sleep(0.05)
    assert scene.untouched
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize("threads", [1, 2])
def test_a_key_press_stops_a_long_copy(threads: int) -> None:
    code = INTERRUPTED.format(folder=os.path.dirname(__file__), threads=threads)
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            time.sleep(0.2)
            begin = time.monotonic()
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=30)
            assert time.monotonic() - begin < 5
            assert (out, process.returncode) == ("interrupted\n", 0), err
        finally:
            process.kill()
