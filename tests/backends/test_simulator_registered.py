"""Memory that users bring: between processes, late, without the kernel's leave, and where there is none."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import json
import mmap
import os
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import users

from llm_datadist._kernels import process
from llm_datadist._kernels.hostcopy import Guard
from llm_datadist._kernels.runs import Bases, Plan, block_runs, indices, span_runs
from llm_datadist.backend import BackendError, Failure, MemoryKind, Region
from llm_datadist.backends.host import memory
from llm_datadist.backends.host.intervals import Intervals
from llm_datadist.backends.simulator.backend import SimulatorBackend
from llm_datadist.backends.simulator.endpoint import BY_PROCESS, MAPPED, SimulatorEndpoint
from llm_datadist.backends.simulator.faults import Faults
from llm_datadist.backends.simulator.registered import REGISTERED

MIB = 1 << 20
PAGE = mmap.PAGESIZE
SECONDS = 30
PATTERN = np.tile(np.arange(251, dtype=np.uint8), 3 * MIB // 251 + 1)[: 3 * MIB]

MakeBackend = Callable[..., SimulatorBackend]


def in_ns(seconds: float) -> int:
    return time.monotonic_ns() + int(seconds * 1e9)


def one(source: int, destination: int, nbytes: int) -> Plan:
    return Plan(Bases([source], [destination]), span_runs(0, 0, nbytes))


def count_looks(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Give a list that grows with each look at /proc/self/maps."""
    looks: list[None] = []
    maps = memory.maps

    def look() -> tuple[Intervals, Intervals]:
        looks.append(None)
        return maps()

    monkeypatch.setattr(memory, "maps", look)
    return looks


def raises(kind: Failure, text: str, call: Callable[..., object], *args: Any, **kwargs: Any) -> None:
    with pytest.raises(BackendError, match=text) as caught:
        call(*args, **kwargs)
    assert caught.value.kind is kind


@pytest.fixture
def hole() -> Iterator[int]:
    """Give the address of a page that nobody maps, with usable pages on both sides."""
    libc = ctypes.CDLL(None)
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.mmap.restype = ctypes.c_void_p
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    address: int = users.hole()
    sides = (address - PAGE, address + PAGE)
    for side in sides:
        protection, at_this_address = mmap.PROT_READ | mmap.PROT_WRITE, 0x100000
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | at_this_address
        assert libc.mmap(side, PAGE, protection, flags, -1, 0) == side
    yield address
    for side in sides:
        libc.munmap(side, PAGE)


# ---- between processes


@pytest.mark.parametrize("nbytes", [1, 4096, 3 * MIB])
def test_s110_registered_after_the_link(endpoint: SimulatorEndpoint, owner: Any, nbytes: int) -> None:
    assert endpoint.by_process
    address = owner.ask(f"register {nbytes}")
    place = endpoint.locate(REGISTERED, address, nbytes)
    assert (place.base, place.route) == (address, BY_PROCESS)
    here = np.zeros(nbytes, np.uint8)
    endpoint.read(one(place.base, here.ctypes.data, nbytes), None, in_ns(SECONDS), place.route)
    assert np.array_equal(here, PATTERN[:nbytes])
    here[:] = 77
    endpoint.write(one(here.ctypes.data, place.base, nbytes), None, in_ns(SECONDS), place.route)
    assert {owner.ask(f"byte {address + at}") for at in (0, nbytes // 2, nbytes - 1)} == {77}


def test_addresses_are_the_owners(endpoint: SimulatorEndpoint, owner: Any) -> None:
    assert endpoint.address_of(REGISTERED, 4711) == 4711
    assert owner.ask(f"byte {endpoint.address_of(0, 300)}") == 300 % 251
    raises(Failure.INVALID, "not known", endpoint.address_of, 7, 0)


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 1), (0, -1), (1 << 48, 1), (0, (1 << 48) + 1), (1 << 70, 0)])
def test_locate_is_bounded(endpoint: SimulatorEndpoint, offset: int, nbytes: int) -> None:
    for method in (endpoint.locate,):
        raises(Failure.INVALID, "not inside region", method, REGISTERED, offset, nbytes)


def test_the_peers_wild_address_is_named(endpoint: SimulatorEndpoint, owner: Any) -> None:
    here = np.zeros(64, np.uint8)
    whose = f"of process {owner.process.pid}"
    place = endpoint.locate(REGISTERED, 1, 64)
    for call, plan, what in (
        (endpoint.read, one(1, here.ctypes.data, 64), "reading"),
        (endpoint.write, one(here.ctypes.data, 1, 64), "writing"),
    ):
        raises(Failure.INVALID, f"{what} 0x1 {whose}", call, plan, None, in_ns(SECONDS), place.route)
    address = owner.ask("register 64")
    plan = one(address, 1, 64)
    raises(Failure.INVALID, "writing 0x1 of this process", endpoint.read, plan, None, in_ns(SECONDS), BY_PROCESS)


def test_guard_deadline_and_death_count_by_process_too(endpoint: SimulatorEndpoint, owner: Any) -> None:
    address = owner.ask("register 4096")
    here = np.zeros(4096, np.uint8)
    plan = one(address, here.ctypes.data, 4096)

    def read(guard: Guard | None = None, deadline_ns: int = 0) -> None:
        endpoint.read(plan, guard, deadline_ns, BY_PROCESS)

    raises(Failure.STALE, "before", read, Guard([(endpoint.windows[0].address, 12345)]))
    raises(Failure.TIMED_OUT, "time limit", read, None, 1)
    assert not here.any()
    owner.process.kill()
    owner.process.wait(SECONDS)
    raises(Failure.PEER_GONE, "has ended", read)
    assert not here.any()


def test_process_that_reuses_the_pid_is_not_believed(endpoint: SimulatorEndpoint, owner: Any) -> None:
    """The read itself succeeds, from whoever has the number now; the liveness tells."""
    here = np.zeros(64, np.uint8)
    owner.process.kill()
    owner.process.wait(SECONDS)
    endpoint._pid = os.getpid()
    plan = one(PATTERN.ctypes.data, here.ctypes.data, 64)
    raises(Failure.PEER_GONE, "has ended", endpoint.read, plan, None, in_ns(SECONDS), BY_PROCESS)


def test_faults_change_transfers_by_process(endpoint: SimulatorEndpoint, owner: Any) -> None:
    address = owner.ask("register 4096")
    here = np.zeros(4096, np.uint8)
    faults = endpoint._backend.faults = Faults(stall_at_byte=1000)
    plan = one(address, here.ctypes.data, 4096)
    raises(Failure.TIMED_OUT, "time limit", endpoint.read, plan, None, in_ns(0.2), BY_PROCESS)
    assert (here[:1000] == PATTERN[:1000]).all()
    assert not here[1000:].any()
    faults.resume.set()
    endpoint.read(plan, None, in_ns(SECONDS), BY_PROCESS)
    assert (here == PATTERN[:4096]).all()


# ---- without the kernel's leave


def test_forbidden_reads_are_told_with_the_remedy(owner: Any, make_backend: MakeBackend) -> None:
    backend = make_backend()
    backend.forbid_process = True
    endpoint = backend.connect(owner.export, owner.pair, in_ns(SECONDS))
    assert not endpoint.by_process
    for word in ("Yama", "container", r"llm\.Simulator\.AllowPtracer"):
        raises(Failure.UNSUPPORTED, word, endpoint.locate, REGISTERED, 4096, 1)
    raises(Failure.INVALID, "not inside region", endpoint.locate, REGISTERED, -1, 1)
    assert endpoint.locate(0, 0, 1).route == MAPPED
    endpoint.close()


def test_another_process_than_the_exports_is_not_read(owner: Any, make_backend: MakeBackend) -> None:
    """As after a reused process id: something can be read at the nonce's address, but it is not the nonce."""
    strange = dataclasses.replace(owner.pair, pid=os.getpid())
    described = {**json.loads(owner.export.data), "nonce_address": PATTERN.ctypes.data}
    export = dataclasses.replace(owner.export, data=json.dumps(described).encode())
    endpoint = make_backend().connect(export, strange, in_ns(SECONDS))
    assert not endpoint.by_process
    endpoint.close()


def test_a_refusal_in_a_transfer_is_unsupported(endpoint: SimulatorEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(1, "reading 0x10 of process 7 failed: Operation not permitted")

    monkeypatch.setattr(process, "transfer", refuse)
    raises(Failure.UNSUPPORTED, "0x10 of process 7", endpoint.read, one(16, 16, 1), None, 0, BY_PROCESS)


def test_allow_ptracer(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    class Libc:
        def __init__(self, _: None) -> None:
            pass

        def prctl(self, *args: Any) -> int:
            calls.append((args[0], args[1].value))
            return 0

    for value, expected in (("0", []), ("1", [(0x59616D61, 2**64 - 1)])):
        with monkeypatch.context() as patch:
            patch.setattr(ctypes, "CDLL", Libc)
            backend = SimulatorBackend()
            backend.open([0], {"llm.Simulator.AllowPtracer": value})
            backend.close()
        assert calls == expected


# ---- where there is no memory


def test_s203_unmapped_memory_is_accepted_with_one_warning(make_backend: MakeBackend, hole: int) -> None:
    backend = make_backend()
    for address, nbytes in ((1, 100), (hole, 8), (hole - 8, 16), (hole + PAGE - 1, 2), (2**64 - 100, 100)):
        with pytest.warns(RuntimeWarning, match=f"{nbytes} bytes at {address:#x}") as caught:
            [region] = backend.register(0, [address], nbytes, MemoryKind.DEVICE)
        assert len(caught) == 1
        assert (region.id, region.address) == (REGISTERED, 0)
        backend.unregister([(region, address)], nbytes)
    backend.register(0, [hole - PAGE], PAGE, MemoryKind.DEVICE)
    backend.register(0, [hole + PAGE], PAGE, MemoryKind.DEVICE)
    assert backend.hold(region) is None


def test_neighbours_in_the_list_of_mappings_are_joined(make_backend: MakeBackend) -> None:
    with mmap.mmap(-1, 4 * PAGE) as whole:
        address = ctypes.addressof(ctypes.c_char.from_buffer(whole))
        libc = ctypes.CDLL(None)
        libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        assert libc.mprotect(address + PAGE, PAGE, mmap.PROT_READ) == 0  # three lines now
        make_backend().register(0, [address + 1], 4 * PAGE - 2, MemoryKind.HOST)
        gc.collect()


def test_registering_costs_one_look(make_backend: MakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = count_looks(monkeypatch)
    backend = make_backend()
    backend.register(0, [PATTERN.ctypes.data], PATTERN.nbytes, MemoryKind.HOST)
    assert len(looks) == 1


@pytest.mark.parametrize("write", [False, True])
def test_wild_local_memory_fails_and_never_crashes(
    endpoint: SimulatorEndpoint, owner: Any, hole: int, write: bool
) -> None:
    backend = endpoint._backend
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        [region] = backend.register(0, [hole], PAGE, MemoryKind.HOST)
    there = endpoint.locate(0, 0, 64).base
    for address in (hole, hole - 8, hole + PAGE - 8):
        bad = max(address, hole)
        call, plan, what = (
            (endpoint.write, one(address, there, 64), "reading")
            if write
            else (endpoint.read, one(there, address, 64), "writing")
        )
        raises(Failure.INVALID, f"{what} {bad:#x} of this process", call, plan, None, in_ns(SECONDS), MAPPED)
    good = np.zeros(64, np.uint8)
    endpoint.read(one(there + 251, good.ctypes.data, 64), None, in_ns(SECONDS), MAPPED)
    assert (good == PATTERN[:64]).all()
    backend.unregister([(region, hole)], PAGE)
    assert not backend.user_memory.wild(one(hole, hole, 1), written=write)


def test_each_registration_of_a_wild_range_counts(make_backend: MakeBackend) -> None:
    memory = make_backend().user_memory
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match="0x1 "):
            memory.register([1], 10)
    plan = one(0, 5, 1)
    memory.unregister([1], 10)
    assert memory.wild(plan, written=True)
    assert not memory.wild(plan, written=False)
    memory.unregister([1], 10)
    memory.unregister([1], 10)
    assert not memory.wild(plan, written=True)


def test_read_only_memory_is_registered_silently_and_read(endpoint: SimulatorEndpoint, owner: Any) -> None:
    backend, libc = endpoint._backend, ctypes.CDLL(None)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    with mmap.mmap(-1, PAGE) as page:
        page[:] = b"\x05" * PAGE
        address = ctypes.addressof(ctypes.c_char.from_buffer(page))
        assert libc.mprotect(address, PAGE, mmap.PROT_READ) == 0
        [region] = backend.register(0, [address], PAGE, MemoryKind.HOST)
        there = endpoint.locate(0, 12 * MIB, PAGE).base
        endpoint.write(one(address, there, PAGE), None, in_ns(SECONDS), MAPPED)
        assert owner.ask(f"peek {12 * MIB + PAGE - 1}") == 5
        plan = one(there, address, PAGE)
        raises(Failure.INVALID, f"writing {address:#x}", endpoint.read, plan, None, in_ns(SECONDS), MAPPED)
        backend.unregister([(region, address)], PAGE)
        gc.collect()


# ---- copies inside this process


@pytest.fixture
def pool(make_backend: MakeBackend) -> tuple[SimulatorBackend, Region]:
    backend = make_backend()
    region = backend.reserve(0, 4 * MIB, MemoryKind.DEVICE)
    backend.commit(region, 0, 4 * MIB)
    return backend, region


@pytest.mark.parametrize("ordered", [False, True])
def test_local_copies(pool: tuple[SimulatorBackend, Region], ordered: bool) -> None:
    backend, region = pool
    here = np.zeros(3 * MIB, np.uint8)
    backend.copy(one(PATTERN.ctypes.data, region.address, PATTERN.nbytes), ordered=ordered)
    backend.copy(one(region.address, region.address + MIB, MIB), ordered=ordered)
    backend.copy(one(region.address, here.ctypes.data, here.nbytes), ordered=ordered)
    assert np.array_equal(here, np.concatenate([PATTERN[:MIB], PATTERN[:MIB], PATTERN[2 * MIB :]]))


def test_ordered_copy_reads_what_it_wrote(pool: tuple[SimulatorBackend, Region]) -> None:
    backend, region = pool
    backend.copy(one(PATTERN.ctypes.data, region.address, 300), ordered=True)
    runs = block_runs(indices([0, 1], "source"), indices([1, 2], "destination"), 3, 3, 100)
    plan = Plan(Bases([region.address], [region.address]), runs)
    assert len(runs) == 1  # merged: as if through a buffer
    backend.copy(plan, ordered=True)
    expected = PATTERN[:100].tobytes() + PATTERN[:200].tobytes()
    assert ctypes.string_at(region.address, 300) == expected
    runs = block_runs(indices([1, 0], "source"), indices([0, 2], "destination"), 3, 3, 100)
    backend.copy(Plan(Bases([region.address], [region.address]), runs), ordered=True)
    assert ctypes.string_at(region.address, 300) == 3 * PATTERN[:100].tobytes()
    backend.copy(one(PATTERN.ctypes.data, region.address, PATTERN.nbytes), ordered=True)
    backend.copy(one(region.address, region.address + 100, PATTERN.nbytes), ordered=True)
    assert ctypes.string_at(region.address + 100, PATTERN.nbytes) == PATTERN.tobytes()


@pytest.fixture(params=["asked", "listed"])
def mappings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have mappings asked for one by one, as since Linux 6.11, or their list read, as before."""
    if request.param == "listed":
        monkeypatch.setattr(memory, "PROCMAP_QUERY", 0)
        with pytest.raises(OSError, match=r"\[Errno"):
            memory._usable([(PATTERN.ctypes.data, PATTERN.ctypes.data + 1)])
        return
    try:
        assert memory._usable([(PATTERN.ctypes.data, PATTERN.ctypes.data + 1)])
    except OSError as e:
        pytest.skip(f"this kernel does not answer: {e}")


@pytest.mark.usefixtures("mappings")
@pytest.mark.parametrize("ordered", [False, True])
def test_s211_local_copy_of_an_address_without_memory_fails(
    pool: tuple[SimulatorBackend, Region], hole: int, ordered: bool
) -> None:
    backend, region = pool
    for address in (1, hole, hole - 8):
        bad = max(address, hole) if address != 1 else 1
        for plan, what in (
            (one(address, region.address, 16), "reading"),
            (one(region.address, address, 16), "writing"),
        ):
            raises(Failure.INVALID, f"{what} {bad:#x} of this process", backend.copy, plan, ordered=ordered)


@pytest.mark.usefixtures("mappings")
def test_only_memory_that_is_registered_needs_no_look(
    pool: tuple[SimulatorBackend, Region], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody says when other memory goes, so it is looked for at each copy."""
    backend, region = pool
    here = np.zeros(1000, np.uint8)
    [registered] = backend.register(0, [here.ctypes.data], 1000, MemoryKind.HOST)
    looks: list[bool] = []
    is_memory = memory._is_memory
    monkeypatch.setattr(memory, "_is_memory", lambda plan: looks.append(is_memory(plan)) or looks[-1])
    monkeypatch.setattr(process, "transfer", None)
    backend.copy(one(region.address, region.address + 5000, 1000), ordered=False)
    backend.copy(one(region.address, here.ctypes.data + 100, 900), ordered=False)
    assert len(looks) == 0
    backend.unregister([(registered, here.ctypes.data)], 1000)
    for _ in range(2):
        backend.copy(one(region.address, here.ctypes.data, 1000), ordered=False)
    assert looks == [True, True]


@pytest.mark.usefixtures("mappings")
def test_copies_over_several_mappings_and_into_none(pool: tuple[SimulatorBackend, Region]) -> None:
    """Neighbouring mappings are one range; a part that can't be written is none, wherever it lies."""
    backend, region = pool
    with mmap.mmap(-1, 6 * PAGE) as mapped:
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        libc = ctypes.CDLL(None)
        # Other permissions make mappings of their own.
        assert libc.mprotect(ctypes.c_void_p(address + 2 * PAGE), PAGE, 7) == 0
        assert libc.mprotect(ctypes.c_void_p(address + 5 * PAGE), PAGE, mmap.PROT_READ) == 0
        backend.copy(one(address, region.address, 5 * PAGE), ordered=False)
        backend.copy(one(region.address, address + 7, 5 * PAGE - 7), ordered=False)
        for begin, nbytes in ((0, 6 * PAGE), (5 * PAGE, 1), (3 * PAGE, 2 * PAGE + 1)):
            plan = one(region.address, address + begin, nbytes)
            raises(Failure.INVALID, "writing", backend.copy, plan, ordered=False)
        gc.collect()


@pytest.mark.usefixtures("mappings")
def test_memory_that_went_after_a_copy_is_an_error(pool: tuple[SimulatorBackend, Region]) -> None:
    """What was memory once is not believed to be for ever."""
    backend, region = pool
    with mmap.mmap(-1, PAGE) as gone:
        address = ctypes.addressof(ctypes.c_char.from_buffer(gone))
        backend.copy(one(region.address, address, PAGE), ordered=False)
        gc.collect()
    with pytest.raises(BackendError) as caught:
        backend.copy(one(region.address, address, PAGE), ordered=False)
    assert caught.value.kind is Failure.INVALID


def test_a_copy_of_nothing_looks_at_no_address(pool: tuple[SimulatorBackend, Region]) -> None:
    backend, _ = pool
    backend.copy(Plan(Bases([], []), span_runs(0, 0, 10)), ordered=True)
    backend.copy(one(1, 1, 0), ordered=False)
