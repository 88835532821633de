"""Transfers of the simulator between two processes."""

from __future__ import annotations

import ctypes
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from llm_datadist._kernels.hostcopy import Guard
from llm_datadist._kernels.runs import Bases, Plan, span_runs
from llm_datadist.backend import BackendError, Failure
from llm_datadist.backends.simulator.endpoint import MAPPED, SimulatorEndpoint
from llm_datadist.backends.simulator.faults import Faults

MIB = 1 << 20
SECONDS = 30


def deadline_in(seconds: float) -> int:
    return time.monotonic_ns() + int(seconds * 1e9)


def pattern(offset: int, nbytes: int) -> bytes:
    return (bytes(range(251)) * (nbytes // 251 + 2))[offset % 251 :][:nbytes]


def read_plan(endpoint: SimulatorEndpoint, buffer: ctypes.Array[ctypes.c_char], offset: int = 0) -> Plan:
    source = endpoint.locate(0, offset, len(buffer)).base
    return Plan(Bases([source], [ctypes.addressof(buffer)]), span_runs(0, 0, len(buffer)))


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 1), (513, 4096), (5 * MIB - 7, 3 * MIB)])
def test_read_brings_the_owners_bytes(endpoint: SimulatorEndpoint, offset: int, nbytes: int) -> None:
    buffer = ctypes.create_string_buffer(nbytes)
    endpoint.read(read_plan(endpoint, buffer, offset), None, deadline_in(SECONDS), MAPPED)
    assert buffer.raw == pattern(offset, nbytes)


def test_write_reaches_the_owner(endpoint: SimulatorEndpoint, owner: Any) -> None:
    data = ctypes.create_string_buffer(b"\x07" * 1000, 1000)
    target = endpoint.locate(0, 12 * MIB, 1000)
    plan = Plan(Bases([ctypes.addressof(data)], [target.base]), span_runs(0, 0, 1000))
    endpoint.write(plan, None, deadline_in(SECONDS), target.route)
    assert [owner.ask(f"peek {12 * MIB + at}") for at in (0, 999, 1000)] == [7, 7, 0]


def test_windows_are_shared_words(endpoint: SimulatorEndpoint, owner: Any) -> None:
    directory, board = endpoint.windows
    owner.ask("directory 4711")
    assert ctypes.c_uint64.from_address(directory.address).value == 4711
    ctypes.c_uint64.from_address(board.address).value = 42
    assert owner.ask("board") == 42


def test_directory_is_read_only_here(endpoint: SimulatorEndpoint, mappings: Callable[[], list[str]]) -> None:
    address = f"{endpoint.windows[0].address:x}"
    assert [line.split()[1] for line in mappings() if line.startswith(address)] == ["r--s"]


def test_connect_touches_no_pool_page(owner: Any, endpoint: SimulatorEndpoint) -> None:
    pool = f"{endpoint.locate(0, 0, 1).base:x}-"
    with open("/proc/self/smaps") as lines:
        for line in lines:
            if line.startswith(pool):
                break
        assert next(line.split()[1] for line in lines if line.startswith("Rss:")) == "0"


@pytest.mark.parametrize(
    ("region", "offset", "nbytes"),
    [(1, 0, 1), (-1, 0, 0), (0, -1, 1), (0, 0, -1), (0, 16 * MIB, 1), (0, 0, 16 * MIB + 1), (0, 1 << 70, 1 << 70)],
)
def test_locate_refuses_what_is_not_in_the_region(
    endpoint: SimulatorEndpoint, region: int, offset: int, nbytes: int
) -> None:
    with pytest.raises(BackendError) as caught:
        endpoint.locate(region, offset, nbytes)
    assert caught.value.kind is Failure.INVALID


def expect(kind: Failure, endpoint: SimulatorEndpoint, plan: Plan, guard: Guard | None, deadline_ns: int) -> None:
    with pytest.raises(BackendError) as caught:
        endpoint.read(plan, guard, deadline_ns, MAPPED)
    assert caught.value.kind is kind


def test_guard_that_differs_before_is_stale(endpoint: SimulatorEndpoint, owner: Any) -> None:
    owner.ask("directory 5")
    guard = Guard([(endpoint.windows[0].address, 6)])
    buffer = ctypes.create_string_buffer(64)
    expect(Failure.STALE, endpoint, read_plan(endpoint, buffer, 1), guard, deadline_in(SECONDS))
    assert buffer.raw == bytes(64)


def test_past_deadline_times_out(endpoint: SimulatorEndpoint) -> None:
    plan = read_plan(endpoint, ctypes.create_string_buffer(MIB))
    expect(Failure.TIMED_OUT, endpoint, plan, None, time.monotonic_ns() - 1)


def test_closed_endpoint_says_that_the_peer_is_gone(
    endpoint: SimulatorEndpoint, mappings: Callable[[], list[str]]
) -> None:
    plan = read_plan(endpoint, ctypes.create_string_buffer(64))
    assert endpoint.alive()
    before = len(mappings())
    endpoint.close()
    endpoint.close()
    assert len(mappings()) == before - 3
    assert not endpoint.alive()
    expect(Failure.PEER_GONE, endpoint, plan, None, deadline_in(SECONDS))
    with pytest.raises(BackendError) as caught:
        endpoint.locate(0, 0, 1)
    assert caught.value.kind is Failure.PEER_GONE


def test_dead_owner_is_gone_but_its_memory_does_not_fault(endpoint: SimulatorEndpoint, owner: Any) -> None:
    buffer = ctypes.create_string_buffer(64)
    plan = read_plan(endpoint, buffer)
    owner.process.kill()
    owner.process.wait(SECONDS)
    assert not endpoint.alive()
    expect(Failure.PEER_GONE, endpoint, plan, None, deadline_in(SECONDS))


def test_memory_that_the_owner_closed_reads_as_zeros(endpoint: SimulatorEndpoint, owner: Any) -> None:
    owner.ask("close")
    buffer = ctypes.create_string_buffer(b"x" * 4096, 4096)
    endpoint.read(read_plan(endpoint, buffer), None, deadline_in(SECONDS), MAPPED)
    assert buffer.raw == bytes(4096)


class StalledRead:
    """A read in another thread that stalls in its middle."""

    def __init__(self, endpoint: SimulatorEndpoint, guard: Guard | None = None, seconds: float = SECONDS) -> None:
        self.faults = endpoint._backend.faults = Faults(stall_at_byte=MIB)
        self.buffer = ctypes.create_string_buffer(2 * MIB)
        self.kind: Failure | None = None
        plan = read_plan(endpoint, self.buffer)

        def run() -> None:
            try:
                endpoint.read(plan, guard, deadline_in(seconds), MAPPED)
            except BackendError as error:
                self.kind = error.kind

        self.thread = threading.Thread(target=run)
        self.thread.start()
        assert self.faults.stall_entered.wait(SECONDS)

    def join(self) -> Failure | None:
        self.thread.join(SECONDS)
        assert not self.thread.is_alive()
        return self.kind


def test_stalled_read_goes_on(endpoint: SimulatorEndpoint) -> None:
    read = StalledRead(endpoint)
    assert read.buffer.raw == pattern(0, MIB) + bytes(MIB)
    read.faults.resume.set()
    assert read.join() is None
    assert read.buffer.raw == pattern(0, 2 * MIB)


def test_stalled_read_notices_kill_9(endpoint: SimulatorEndpoint, owner: Any) -> None:
    read = StalledRead(endpoint)
    begin = time.monotonic()
    owner.process.send_signal(signal.SIGKILL)
    assert read.join() is Failure.PEER_GONE
    assert time.monotonic() - begin < 5


def test_stalled_read_keeps_its_deadline(endpoint: SimulatorEndpoint) -> None:
    assert StalledRead(endpoint, seconds=0.3).join() is Failure.TIMED_OUT


def test_change_during_a_stall_is_torn_and_never_stale(endpoint: SimulatorEndpoint, owner: Any) -> None:
    owner.ask("directory 8")
    read = StalledRead(endpoint, Guard([(endpoint.windows[0].address, 8)]))
    owner.ask("directory 9")
    read.faults.resume.set()
    assert read.join() is Failure.TORN


def test_stall_lets_signals_through(endpoint: SimulatorEndpoint) -> None:
    class Alarm(Exception):
        pass

    def raise_alarm(number: int, frame: object) -> None:
        raise Alarm

    endpoint._backend.faults = Faults(stall_at_byte=0)
    plan = read_plan(endpoint, ctypes.create_string_buffer(64))
    former = signal.signal(signal.SIGALRM, raise_alarm)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(Alarm):
            endpoint.read(plan, None, deadline_in(SECONDS), MAPPED)
    finally:
        signal.signal(signal.SIGALRM, former)


def test_nth_transfer_fails(endpoint: SimulatorEndpoint) -> None:
    endpoint._backend.faults = Faults(fail_nth=2)
    buffer = ctypes.create_string_buffer(64)
    plan = read_plan(endpoint, buffer, 3)
    endpoint.read(plan, None, deadline_in(SECONDS), MAPPED)
    expect(Failure.FAILED, endpoint, plan, None, deadline_in(SECONDS))
    endpoint.read(plan, None, deadline_in(SECONDS), MAPPED)
    assert buffer.raw == pattern(3, 64)


def test_delay_is_bounded_by_the_deadline(endpoint: SimulatorEndpoint) -> None:
    endpoint._backend.faults = Faults(delay_s=0.1)
    buffer = ctypes.create_string_buffer(64)
    plan = read_plan(endpoint, buffer)
    begin = time.monotonic()
    endpoint.read(plan, None, deadline_in(SECONDS), MAPPED)
    assert time.monotonic() - begin >= 0.1
    assert buffer.raw == pattern(0, 64)
    endpoint._backend.faults.delay_s = SECONDS
    expect(Failure.TIMED_OUT, endpoint, plan, None, deadline_in(0.1))


def test_dropped_link(endpoint: SimulatorEndpoint) -> None:
    endpoint._backend.faults = Faults(drop=True)
    assert not endpoint.alive()
    expect(Failure.PEER_GONE, endpoint, read_plan(endpoint, ctypes.create_string_buffer(1)), None, deadline_in(1))
