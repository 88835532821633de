"""Local copies of the acl backend, on the fake driver."""

from __future__ import annotations

import ctypes
import itertools
import random
from collections.abc import Callable

import pytest
from ascend import DEVICE, HOST, MIB, Ascend, MakeBackend, fill, one
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llm_datadist._kernels.runs import Bases, Plan, block_runs, indices, span_runs
from llm_datadist.backend import BackendError, Failure, Region
from llm_datadist.backends.acl import copies
from llm_datadist.backends.acl.backend import AclBackend
from llm_datadist.backends.host.intervals import Intervals

#: A device, pinned host memory, and memory that the backend has never heard of.
KINDS = ("device", "pinned", "pageable")
COUNT, BLOCK = 1500, 16  # more blocks than are queued at a time


class Places:
    """Memory of each kind, ``COUNT`` blocks twice."""

    def __init__(self, backend: AclBackend) -> None:
        self.backend = backend
        nbytes = 2 * COUNT * BLOCK
        self.buffer = ctypes.create_string_buffer(nbytes)
        self.addresses = {
            "device": backend.reserve(0, nbytes, DEVICE).address,
            "pinned": backend.reserve(0, nbytes, HOST).address,
            "pageable": ctypes.addressof(self.buffer),
        }
        self.size = nbytes // 2

    def put(self, kind: str, at: int, data: bytes) -> None:
        self.backend.store(self.addresses[kind] + at, data)

    def get(self, kind: str, at: int = 0) -> bytes:
        return self.backend.load(self.addresses[kind] + at, self.size)


@pytest.fixture
def places(make_acl: MakeBackend) -> Places:
    return Places(make_acl())


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize(("source", "destination"), list(itertools.product(KINDS, KINDS)))
def test_blocks_are_copied_in_all_directions(places: Places, source: str, destination: str, ordered: bool) -> None:
    shuffled = random.Random(7).sample(range(COUNT), COUNT)
    data = random.Random(1).randbytes(places.size)
    places.put(source, 0, data)
    places.put(destination, places.size, bytes(places.size))
    runs = block_runs(indices(shuffled, "s"), indices(range(COUNT), "d"), COUNT, COUNT, BLOCK)
    bases = Bases([places.addresses[source]], [places.addresses[destination] + places.size])
    places.backend.copy(Plan(bases, runs), ordered=ordered)
    wanted = b"".join(data[block * BLOCK : block * BLOCK + BLOCK] for block in shuffled)
    assert places.get(destination, places.size) == wanted
    assert places.get(source) == data


def test_one_plan_may_go_in_several_directions(places: Places) -> None:
    for number, kind in enumerate(KINDS):
        places.put(kind, 0, bytes([number + 1]) * places.size)
    pairs = list(itertools.product(KINDS, KINDS))
    sources = [places.addresses[source] for source, _ in pairs]
    destinations = [
        places.addresses[destination] + places.size + BLOCK * at for at, (_, destination) in enumerate(pairs)
    ]
    places.backend.copy(Plan(Bases(sources, destinations), span_runs(0, 0, BLOCK)), ordered=False)
    for at, (source, destination) in enumerate(pairs):
        there = places.backend.load(places.addresses[destination] + places.size + BLOCK * at, BLOCK)
        assert there == bytes([KINDS.index(source) + 1]) * BLOCK


@pytest.mark.parametrize("fault", ["aclrtMemcpyBatch:*:207000", "aclrtMemcpyBatch:*:200001"])
def test_batches_that_the_driver_can_not_do_are_copied_one_by_one(driver: Ascend, places: Places, fault: str) -> None:
    driver.inject(fault)
    for source, destination in (("device", "pinned"), ("pinned", "device")):
        test_blocks_are_copied_in_all_directions(places, source, destination, False)


def test_a_failed_batch_is_told(driver: Ascend, places: Places) -> None:
    driver.inject("aclrtMemcpyBatch:1:500000")
    with pytest.raises(BackendError, match=r"aclrtMemcpyBatch failed, INTERNAL \(500000\): .*injected fault"):
        test_blocks_are_copied_in_all_directions(places, "pinned", "device", False)


@pytest.mark.parametrize("call", ["aclrtMemcpyAsync:700", "aclrtSynchronizeStreamWithTimeout:1"])
def test_a_failed_copy_is_told_and_the_next_works(driver: Ascend, places: Places, call: str) -> None:
    driver.inject(f"{call}:507899")
    plan = Plan(
        Bases([places.addresses["device"]], [places.addresses["device"] + places.size]),
        block_runs(indices(range(0, COUNT, 2), "s"), indices(range(0, COUNT, 2), "d"), COUNT, COUNT, BLOCK),
    )
    with pytest.raises(BackendError, match="507899") as caught:
        places.backend.copy(plan, ordered=False)
    assert caught.value.native_code == 507899
    test_blocks_are_copied_in_all_directions(places, "device", "device", False)


def test_a_copy_that_hangs_ends(driver: Ascend, places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "LIMIT_NS", 10**8)
    driver.inject("aclrtMemcpyAsync:1:hang")
    with pytest.raises(BackendError) as caught:
        places.backend.copy(one(places.addresses["device"], places.addresses["device"] + BLOCK, BLOCK), ordered=False)
    assert caught.value.kind is Failure.TIMED_OUT
    monkeypatch.undo()
    test_blocks_are_copied_in_all_directions(places, "device", "device", False)


OVERLAPS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@OVERLAPS
@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300), st.integers(1, 200)), min_size=1, max_size=4),
    st.integers(1, 64),
)
def test_ordered_copies_inside_a_device_are_as_if_through_a_buffer(
    places: Places, pieces: list[tuple[int, int, int]], scratch: int
) -> None:
    expected = bytearray(i % 251 for i in range(500))
    places.put("device", 0, bytes(expected))
    base = places.addresses["device"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copies, "SCRATCH_BYTES", scratch)
        for source, destination, nbytes in pieces:
            places.backend.copy(one(base + source, base + destination, nbytes), ordered=True)
            expected[destination : destination + nbytes] = expected[source : source + nbytes]
    assert places.backend.load(base, 500) == bytes(expected)


def test_runs_of_an_ordered_copy_see_what_earlier_ones_wrote(places: Places) -> None:
    places.put("device", 0, bytes(range(48)))
    base = places.addresses["device"]
    places.backend.copy(Plan(Bases([base, base + 16], [base + 16, base + 32]), span_runs(0, 0, 16)), ordered=True)
    assert places.backend.load(base, 48) == bytes(range(16)) * 3


WILD = (8, 0x200000000000 - 4096, 0x7FFFFFFFF000, 1 << 62)


@pytest.mark.parametrize("wild", WILD)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ordered", [False, True])
def test_an_address_without_memory_is_an_error_and_no_signal(
    places: Places, wild: int, kind: str, ordered: bool
) -> None:
    here = places.addresses[kind]
    for plan in (one(wild, here, 64), one(here, wild, 64)):
        with pytest.raises(BackendError) as caught:
            places.backend.copy(plan, ordered=ordered)
        assert caught.value.kind is Failure.INVALID


@pytest.mark.parametrize("act", [lambda b, a: b.load(a, 8), lambda b, a: b.store(a, b"12345678")])
def test_load_and_store_know_their_memory(places: Places, act: Callable[[AclBackend, int], object]) -> None:
    for wild in WILD:
        with pytest.raises(BackendError) as caught:
            act(places.backend, wild)
        assert caught.value.kind is Failure.INVALID


def test_a_range_that_leaves_its_region_is_an_error(places: Places, make_acl: MakeBackend) -> None:
    end = places.addresses["device"] + 2 * places.size
    with pytest.raises(BackendError) as caught:
        places.backend.copy(one(end - 8, ctypes.addressof(places.buffer), 16), ordered=False)
    assert caught.value.kind is Failure.INVALID


def test_devices_do_not_copy_to_each_other(make_acl: MakeBackend) -> None:
    backend = make_acl(0, 1)
    one_device, other = backend.reserve(0, MIB, DEVICE), backend.reserve(1, MIB, DEVICE)
    with pytest.raises(BackendError) as caught:
        backend.copy(one(one_device.address, other.address, 8), ordered=False)
    assert caught.value.kind is Failure.UNSUPPORTED


def test_each_device_has_its_own_copies(make_acl: MakeBackend) -> None:
    backend = make_acl(3, 1)

    def ends(device: int) -> tuple[Region, Region]:
        return backend.reserve(device, MIB, DEVICE), backend.reserve(device, MIB, HOST)

    for device in (1, 3):
        region, host = ends(device)
        data = fill(backend, region, device)
        backend.copy(one(region.address, host.address, MIB), ordered=False)
        assert ctypes.string_at(host.address, MIB) == data


def test_a_copy_whose_stream_can_not_be_stopped_is_told_until_it_can(driver: Ascend, places: Places) -> None:
    driver.inject("aclrtMemcpyAsync:2:507899;aclrtStreamAbort:1:507000;aclrtStreamAbort:2:507000")
    here = places.addresses["device"]
    plan = Plan(Bases([here, here], [here + places.size, here + places.size + BLOCK]), span_runs(0, 0, BLOCK))
    for why in ("507899", "an earlier copy failed"):
        with pytest.raises(BackendError, match="bytes may still move") as caught:
            places.backend.copy(plan, ordered=False)
        assert why in caught.value.text
        assert "aclrtStreamAbort failed" in caught.value.text
    test_blocks_are_copied_in_all_directions(places, "device", "device", False)


def test_a_stream_that_was_stopped_and_not_ended_is_in_nobodys_way(driver: Ascend, places: Places) -> None:
    here = places.addresses["device"]
    places.backend.copy(one(here, here + BLOCK, BLOCK), ordered=False)
    stream = places.backend._copies._queues[0]._stream
    assert stream is not None
    driver.inject("aclrtMemcpyAsync:1:507899;aclrtDestroyStream:1:507000")
    with pytest.raises(BackendError, match="507899.*aclrtDestroyStream failed") as caught:
        places.backend.copy(one(here, here + BLOCK, BLOCK), ordered=False)
    assert "may still move" not in caught.value.text
    test_blocks_are_copied_in_all_directions(places, "device", "device", False)
    driver.call("aclrtDestroyStream", ctypes.c_void_p(stream.handle))  # else the fake tells that it is left


def test_a_copy_does_not_wait_for_ever_for_others(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "LIMIT_NS", 10**7)
    here = places.addresses["device"]
    with places.backend._copies._queues[0]._turn(), pytest.raises(BackendError) as caught:
        places.backend.copy(one(here, here + BLOCK, BLOCK), ordered=False)
    assert caught.value.kind is Failure.TIMED_OUT


@pytest.mark.parametrize("kind", ["device", "pinned"])
def test_device_memory_of_others_is_not_taken_for_host_memory(
    driver: Ascend, places: Places, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def all_of_it() -> tuple[Intervals, Intervals]:
        usable = Intervals()
        usable.add(1, 1 << 47)
        return usable, usable

    pointer, address = driver.allocate(MIB)
    monkeypatch.setattr("llm_datadist.backends.host.memory.maps", all_of_it)
    for plan in (one(address, places.addresses[kind], 64), one(places.addresses[kind], address, 64)):
        with pytest.raises(BackendError, match="memory of a device that is not registered") as caught:
            places.backend.copy(plan, ordered=False)
        assert caught.value.kind is Failure.INVALID
    driver.free(pointer)
