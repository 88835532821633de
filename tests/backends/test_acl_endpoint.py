"""Links and transfers of the acl backend, on the fake driver."""

from __future__ import annotations

import ctypes
import random
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from ascend import (
    DEVICE,
    HOST,
    MIB,
    SECONDS,
    Ascend,
    Link,
    MakeBackend,
    deadline_in,
    fill,
    in_process,
    one,
    read,
    server,
    write,
)

from llm_datadist._kernels.runs import Bases, Plan, block_runs, indices, span_runs
from llm_datadist.backend import BackendError, Endpoint, Export, Failure, Pair, Place
from llm_datadist.backends.acl import communicator as communicator_module
from llm_datadist.backends.acl import endpoint as endpoint_module
from llm_datadist.backends.acl import ranges
from llm_datadist.backends.acl.backend import AclBackend
from llm_datadist.backends.acl.communicator import Traffic
from llm_datadist.backends.acl.endpoint import AclEndpoint
from llm_datadist.backends.acl.structures import NOT_SET, HcclPrepareConfig, comm_config

LinkAcl = Callable[..., Link]
#: Chip, and whether the two devices are on servers of their own.
WIRES = {"A2 HCCS": ("Ascend910B2", False), "A3 HCCS": ("Ascend910_9391", False), "A2 RoCE": ("Ascend910B2", True)}


class Two:
    """Two linked backends: a device pool and a host pool each, the right one's filled."""

    def __init__(self, left: AclBackend, right: AclBackend, link: LinkAcl) -> None:
        self.left, self.right = left, right
        self.mine = {kind: left.reserve(0, 4 * MIB, kind) for kind in (DEVICE, HOST)}
        self.theirs = {kind: right.reserve(1, 4 * MIB, kind) for kind in (DEVICE, HOST)}
        self.data = {kind: fill(right, region, kind) for kind, region in self.theirs.items()}
        self.link = link(left, right)
        self.endpoint = self.link.left

    def end(self) -> None:
        """End the link, and give back what else a test has told the fake."""
        self.link.close()


@pytest.fixture(params=WIRES)
def wire(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, driver: Ascend) -> str:
    monkeypatch.setenv("FAKE_ASCEND_SOC", WIRES[request.param][0])
    driver.reload()
    return str(request.param)


@pytest.fixture
def two(wire: str, make_acl: MakeBackend, link_acl: LinkAcl) -> Two:
    apart = WIRES[wire][1]
    options = [server(f"host-{device}", device) if apart else {} for device in (0, 1)]
    return Two(make_acl(0, **options[0]), make_acl(1, **options[1]), link_acl)


@pytest.fixture
def hccs(make_acl: MakeBackend, link_acl: LinkAcl) -> Two:
    return Two(make_acl(0), make_acl(1), link_acl)


def refused(kind: Failure, call: Callable[..., object], *args: object) -> BackendError:
    with pytest.raises(BackendError) as caught:
        call(*args)
    assert caught.value.kind is kind, caught.value
    return caught.value


# ---- bytes


def pageable(nbytes: int) -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(nbytes)


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 1), (513, 4096), (MIB - 7, 3 * MIB)])
def test_reads_and_writes_bring_every_byte(two: Two, offset: int, nbytes: int) -> None:
    source = two.endpoint.locate(two.theirs[DEVICE].id, offset, nbytes)
    here = two.mine[DEVICE].address
    read(two.endpoint, source, [here], span_runs(0, 0, nbytes))
    assert two.left.load(here, nbytes) == two.data[DEVICE][offset : offset + nbytes]
    fresh = random.Random(nbytes).randbytes(nbytes)
    two.left.store(here, fresh)
    write(two.endpoint, [here], source, span_runs(0, 0, nbytes))
    wanted = two.data[DEVICE][:offset] + fresh + two.data[DEVICE][offset + nbytes :]
    assert two.right.load(two.theirs[DEVICE].address, 4 * MIB) == wanted


def test_both_ends_may_start(two: Two) -> None:
    place = two.link.right.locate(two.mine[DEVICE].id, 0, MIB)
    write(two.link.right, [two.theirs[DEVICE].address], place, span_runs(0, 0, MIB))
    assert two.left.load(two.mine[DEVICE].address, MIB) == two.data[DEVICE][:MIB]


@pytest.mark.parametrize("kind", ["pool", "pageable", "late"])
def test_memory_that_is_not_bound_here_works_too(two: Two, driver: Ascend, kind: str) -> None:
    nbytes = 3 * MIB + 5  # more than the bounce buffer has
    place = two.endpoint.locate(two.theirs[DEVICE].id, 0, nbytes)
    buffer = pageable(nbytes)
    address = {"pool": two.mine[HOST].address, "pageable": ctypes.addressof(buffer)}.get(kind)
    if address is None:
        address = two.left.reserve(0, nbytes, DEVICE).address
    read(two.endpoint, place, [address], span_runs(0, 0, nbytes))
    assert two.left.load(address, nbytes) == two.data[DEVICE][:nbytes]
    fresh = random.Random(3).randbytes(nbytes)
    two.left.store(address, fresh)
    write(two.endpoint, [address], place, span_runs(0, 0, nbytes))
    assert two.right.load(two.theirs[DEVICE].address, 4 * MIB) == fresh + two.data[DEVICE][nbytes:]


def test_one_plan_may_have_bound_and_other_memory(two: Two) -> None:
    block = 64 << 10
    buffer = pageable(block)
    here = [two.mine[DEVICE].address, ctypes.addressof(buffer), two.mine[HOST].address]
    place = two.endpoint.locate(two.theirs[DEVICE].id, 0, 3 * block)
    plan = Plan(Bases([place.base + at * block for at in range(3)], here), span_runs(0, 0, block))
    two.endpoint.read(plan, None, deadline_in(SECONDS), place.route)
    assert b"".join(two.left.load(address, block) for address in here) == two.data[DEVICE][: 3 * block]


def test_memory_that_was_bound_and_then_let_go_is_not_used_directly(
    driver: Ascend, make_acl: MakeBackend, link_acl: LinkAcl
) -> None:
    left, right = make_acl(0), make_acl(1)
    pointer, address = driver_memory(driver, left)
    [region] = left.register(0, [address], MIB, DEVICE)
    theirs = right.reserve(1, MIB, DEVICE)
    data = fill(right, theirs, 2)
    endpoint = link_acl(left, right).left
    left.unregister([(region, address)], MIB)
    [late] = left.register(0, [address], MIB, DEVICE)
    read(endpoint, endpoint.locate(theirs.id, 0, MIB), [address], span_runs(0, 0, MIB))
    assert left.load(address, MIB) == data
    left.unregister([(late, address)], MIB)
    driver.call("aclrtSetDevice", 0)
    driver.free(pointer)
    driver.call("aclrtResetDevice", 0)


def test_host_memory_of_the_peer_is_reached_over_roce_only(two: Two, wire: str) -> None:
    region = two.theirs[HOST]
    if wire.endswith("HCCS"):
        error = refused(Failure.UNSUPPORTED, two.endpoint.locate, region.id, 0, MIB)
        assert "HCCS" in error.text
        plan = one(region.address, two.mine[DEVICE].address, MIB)
        refused(Failure.INVALID, two.endpoint.read, plan, None, deadline_in(SECONDS), 0)
        return
    place = two.endpoint.locate(region.id, 5, MIB)
    for kind in (DEVICE, HOST):
        read(two.endpoint, place, [two.mine[kind].address], span_runs(0, 0, MIB))
        assert two.left.load(two.mine[kind].address, MIB) == two.data[HOST][5 : MIB + 5]


def test_scattered_blocks_of_several_tensors(two: Two) -> None:
    blocks, nbytes, tensors = 1024, 512, 4
    shuffled = random.Random(1).sample(range(blocks), blocks)
    runs = block_runs(indices(shuffled, "s"), indices(range(blocks), "d"), blocks, blocks, nbytes)
    assert len(runs) > 900
    place = two.endpoint.locate(two.theirs[DEVICE].id, 0, blocks * nbytes * tensors)
    starts = [blocks * nbytes * tensor for tensor in range(tensors)]
    bases = Bases([place.base + at for at in starts], [two.mine[DEVICE].address + at for at in starts])
    two.endpoint.read(Plan(bases, runs), None, deadline_in(SECONDS), place.route)
    data = two.data[DEVICE]
    wanted = b"".join(data[at + block * nbytes :][:nbytes] for at in starts for block in shuffled)
    assert two.left.load(two.mine[DEVICE].address, len(wanted)) == wanted


def test_long_transfers_are_waited_for_in_between_and_cut(hccs: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "QUEUED", 2)
    monkeypatch.setattr(ranges, "MAX_BYTES", 1000)
    monkeypatch.setattr(ranges.expand, "__defaults__", (1000,))
    place = hccs.endpoint.locate(hccs.theirs[DEVICE].id, 0, MIB)
    read(hccs.endpoint, place, [hccs.mine[DEVICE].address], span_runs(0, 0, MIB))
    assert hccs.left.load(hccs.mine[DEVICE].address, MIB) == hccs.data[DEVICE][:MIB]


def test_bytes_are_there_though_the_card_waits_for_the_sync(
    driver: Ascend, monkeypatch: pytest.MonkeyPatch, make_acl: MakeBackend, link_acl: LinkAcl
) -> None:
    monkeypatch.setenv("FAKE_ASCEND_LAZY", "1")
    driver.reload()
    two = Two(make_acl(0), make_acl(1), link_acl)
    test_reads_and_writes_bring_every_byte(two, 10, 2 * MIB)


def test_devices_are_paired_by_their_position(make_acl: MakeBackend, link_acl: LinkAcl) -> None:
    left, right = make_acl(0, 3), make_acl(2, 1)
    here = [left.reserve(device, MIB, DEVICE) for device in (0, 3)]
    there = [right.reserve(device, MIB, DEVICE) for device in (2, 1)]
    data = [fill(right, region, seed) for seed, region in enumerate(there)]
    endpoint = link_acl(left, right).left
    places = [endpoint.locate(region.id, 0, MIB) for region in there]
    assert places[0].route == places[1].route
    plan = Plan(Bases([p.base for p in places], [r.address for r in here]), span_runs(0, 0, MIB))
    endpoint.read(plan, None, deadline_in(SECONDS), places[0].route)
    assert [left.load(region.address, MIB) for region in here] == data


# ---- ranges that are not there


def test_locate_knows_the_peers_regions(hccs: Two) -> None:
    region, endpoint = hccs.theirs[DEVICE], hccs.endpoint
    assert endpoint.windows is None
    assert endpoint.address_of(region.id, 7) == region.address + 7
    for offset, nbytes in ((-1, 1), (0, -1), (4 * MIB, 1), (1, 4 * MIB), (1 << 70, 1)):
        refused(Failure.INVALID, endpoint.locate, region.id, offset, nbytes)
    refused(Failure.UNSUPPORTED, endpoint.locate, 99, 0, 1)
    late = hccs.right.reserve(1, MIB, DEVICE)
    assert "after this link" in refused(Failure.UNSUPPORTED, endpoint.locate, late.id, 0, 1).text


def test_ranges_outside_a_region_never_reach_the_driver(hccs: Two) -> None:
    there, here = hccs.theirs[DEVICE], hccs.mine[DEVICE]
    for remote in (there.address - 1, there.address + 4 * MIB - 1, 0, (1 << 63) - 1):
        refused(Failure.INVALID, hccs.endpoint.read, one(remote, here.address, 2), None, deadline_in(SECONDS), 0)
    place = hccs.endpoint.locate(there.id, 0, MIB)
    for local in (8, 1 << 62, here.address + 4 * MIB - 1):
        calls = (hccs.endpoint.read, one(place.base, local, 64)), (hccs.endpoint.write, one(local, place.base, 64))
        for act, plan in calls:
            error = refused(Failure.INVALID, act, plan, None, deadline_in(SECONDS), 0)
            assert not error.breaks_link
    read(hccs.endpoint, place, [here.address], span_runs(0, 0, MIB))


# ---- failures of a transfer


def broken(two: Two, error: BackendError) -> None:
    """Check that a link is broken, and that another can be made."""
    assert error.breaks_link
    place = two.link.right.locate(two.mine[DEVICE].id, 0, 8)
    place = Place(two.theirs[DEVICE].address, place.route)
    for act in (
        lambda: read(two.endpoint, place, [two.mine[DEVICE].address], span_runs(0, 0, 8)),
        lambda: two.endpoint.locate(two.theirs[DEVICE].id, 0, 8),
    ):
        second = refused(Failure.FAILED, act)
        assert second.breaks_link
        assert "is broken: reading" in second.text or "is broken: writing" in second.text
    assert not two.endpoint.alive()
    eventually(two.endpoint.revoked)
    two.link.close()
    two.link = Link(two.left, two.right)
    two.endpoint = two.link.left
    read(two.endpoint, place, [two.mine[DEVICE].address], span_runs(0, 0, MIB))
    assert two.left.load(two.mine[DEVICE].address, MIB) == two.data[DEVICE][:MIB]
    two.link.close()


@pytest.mark.parametrize(
    ("fault", "kind", "text"),
    [
        ("HcclBatchGet:1:4", Failure.FAILED, r"HcclBatchGet failed, INTERNAL \(4\)"),
        ("HcclBatchGet:2:1", Failure.INVALID, r"PARA \(1\)"),
        ("HcclBatchGet:2:9", Failure.TIMED_OUT, r"TIMEOUT \(9\)"),
        ("HcclBatchGet:1:task-507053", Failure.DEVICE_MEMORY, "DEVICE_MEM_ERROR"),
        ("HcclBatchGet:1:task-507057", Failure.SUSPECT_REMOTE, "SUSPECT_REMOTE_ERROR"),
        ("HcclBatchGet:2:task-507056", Failure.FAILED, "LINK_ERROR"),
        ("aclrtSynchronizeStreamWithTimeout:1:507012", Failure.FAILED, "REPORT_TIMEOUT"),
    ],
)
def test_a_failed_transfer_breaks_the_link(hccs: Two, driver: Ascend, fault: str, kind: Failure, text: str) -> None:
    driver.inject(fault)
    runs = block_runs(indices(range(0, 200, 2), "s"), indices(range(0, 200, 2), "d"), 200, 200, 64)
    place = hccs.endpoint.locate(hccs.theirs[DEVICE].id, 0, 200 * 64)
    error = refused(kind, read, hccs.endpoint, place, [hccs.mine[DEVICE].address], runs)
    assert error.native_code == int(fault.rpartition(":")[2].removeprefix("task-"))
    assert "device 1 of server" in error.text
    with pytest.raises(BackendError, match=text):
        raise error
    driver.reset()
    broken(hccs, error)


def test_a_transfer_that_hangs_ends_at_its_deadline(hccs: Two, driver: Ascend) -> None:
    driver.inject("HcclBatchPut:1:hang")
    place = hccs.endpoint.locate(hccs.theirs[DEVICE].id, 0, MIB)
    deadline_ns = deadline_in(0.25)
    plan = one(hccs.mine[DEVICE].address, place.base, MIB)
    error = refused(Failure.TIMED_OUT, hccs.endpoint.write, plan, None, deadline_ns, place.route)
    assert time.monotonic_ns() >= deadline_ns
    driver.reset()
    broken(hccs, error)


def test_no_transfer_begins_after_its_deadline(hccs: Two) -> None:
    place = hccs.endpoint.locate(hccs.theirs[DEVICE].id, 0, MIB)
    error = refused(
        Failure.TIMED_OUT, read, hccs.endpoint, place, [hccs.mine[DEVICE].address], span_runs(0, 0, MIB), 0.0
    )
    assert not error.breaks_link


def acl_endpoint(two: Two) -> AclEndpoint:
    assert isinstance(two.endpoint, AclEndpoint)
    return two.endpoint


def eventually(condition: Callable[[], bool]) -> None:
    """Wait for what happens on another thread."""
    until = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def in_thread(work: Callable[[], None]) -> None:
    """Do it on a thread that has no device; fail when it fails."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result(SECONDS)


class Interrupting:
    """Stands for the peer's liveness, and interrupts whoever asks."""

    def alive(self) -> bool:
        raise KeyboardInterrupt


def test_an_interrupt_stops_the_card_first(hccs: Two, driver: Ascend, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.inject("HcclBatchGet:1:hang")
    monkeypatch.setattr(hccs.endpoint, "_liveness", Interrupting())
    place = hccs.endpoint.locate(hccs.theirs[DEVICE].id, 0, MIB)
    with pytest.raises(KeyboardInterrupt):
        read(hccs.endpoint, place, [hccs.mine[DEVICE].address], span_runs(0, 0, MIB))
    monkeypatch.undo()
    refused(Failure.FAILED, read, hccs.endpoint, place, [hccs.mine[DEVICE].address], span_runs(0, 0, 8))


def test_an_abort_that_fails_is_told(hccs: Two, driver: Ascend) -> None:
    driver.inject("HcclBatchGet:1:4;aclrtStreamAbort:1:507899")
    place = hccs.endpoint.locate(hccs.theirs[DEVICE].id, 0, MIB)
    error = refused(Failure.FAILED, read, hccs.endpoint, place, [hccs.mine[DEVICE].address], span_runs(0, 0, MIB))
    assert "bytes may still move" in error.text
    assert "507899" in error.text


def test_a_link_that_could_not_be_stopped_keeps_its_memory_until_it_can(driver: Ascend) -> None:
    script = """
import warnings
from ascend import *
from llm_datadist.backend import BackendError

driver = Ascend.loaded()
left, right = AclBackend(), AclBackend()
left.open([0], {})
right.open([1], {})
here, there = left.reserve(0, MIB, DEVICE), right.reserve(1, MIB, DEVICE)
link = Link(left, right)
place = link.left.locate(there.id, 0, MIB)
driver.inject("HcclBatchGet:1:4;aclrtStreamAbort:*:507899")
try:
    read(link.left, place, [here.address], span_runs(0, 0, MIB))
except BackendError as error:
    assert "bytes may still move" in error.text, error
    assert error.breaks_link
assert not link.left.alive()
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    left.close()
assert "aclrtStreamAbort" in str(told[0].message), told
assert not link.left.revoked()
driver.reset()
link.right.close()
right.close()
assert link.right.revoked()
driver.call("aclrtSetDevice", 0)
nbytes = ctypes.c_size_t(MIB)
driver.call("aclrtMemset", ctypes.c_void_p(here.address), nbytes, 0, nbytes)  # the memory is there
print("done", flush=True)
os._exit(0)
"""
    assert in_process(script) == "done\n"


def test_an_abort_that_fails_once_is_tried_again_when_the_link_ends(driver: Ascend) -> None:
    script = """
import warnings
from ascend import *

left, right = AclBackend(), AclBackend()
left.open([0], {})
right.open([1], {})
link = Link(left, right)
Ascend.loaded().inject("aclrtStreamAbort:1:507899")
link.left.close()
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    left.close()
assert "aclrtStreamAbort" in str(told[0].message), told
assert link.left.revoked()
link.right.close()
right.close()
print("done", flush=True)
os._exit(0)
"""
    assert in_process(script) == "done\n"


def test_a_device_that_is_gone_breaks_the_link_and_stops_the_others(
    driver: Ascend, make_acl: MakeBackend, link_acl: LinkAcl, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, right = make_acl(0, 3), make_acl(1, 2)
    here = [left.reserve(device, MIB, DEVICE) for device in (0, 3)]
    there = [right.reserve(device, MIB, DEVICE) for device in (1, 2)]
    endpoint = link_acl(left, right).left
    assert isinstance(endpoint, AclEndpoint)
    places = [endpoint.locate(region.id, 0, MIB) for region in there]
    plan = Plan(Bases([p.base for p in places], [r.address for r in here]), span_runs(0, 0, MIB))
    streams = [communicator._stream for communicator in endpoint.communicators]

    def transfer() -> None:
        # This thread has no device: the first becomes current for its submission, then the second's does not.
        driver.inject("aclrtSetCurrentContext:2:107000;aclrtSetCurrentContext:3:107000")
        error = refused(Failure.FAILED, endpoint.read, plan, None, deadline_in(SECONDS), 0)
        assert error.breaks_link
        assert "can't be used any more" in error.text

    in_thread(transfer)
    eventually(endpoint.revoked)
    assert all(stream is not None and stream.aborted for stream in streams)


def test_all_devices_of_a_broken_link_are_stopped(driver: Ascend, make_acl: MakeBackend, link_acl: LinkAcl) -> None:
    left, right = make_acl(0, 3), make_acl(1, 2)
    here = [left.reserve(device, MIB, DEVICE) for device in (0, 3)]
    there = [right.reserve(device, MIB, DEVICE) for device in (1, 2)]
    endpoint = link_acl(left, right).left
    places = [endpoint.locate(region.id, 0, MIB) for region in there]
    plan = Plan(Bases([p.base for p in places], [r.address for r in here]), span_runs(0, 0, MIB))
    driver.inject("HcclBatchGet:1:hang;HcclBatchGet:2:hang;aclrtStreamAbort:1:507899")
    error = refused(Failure.FAILED, endpoint.read, plan, None, deadline_in(0.2), 0)
    assert error.text.count("aclrtStreamAbort failed") == 1
    driver.reset()


def test_threads_take_turns_on_a_link(hccs: Two) -> None:
    place = hccs.endpoint.locate(hccs.theirs[DEVICE].id, 0, MIB)
    errors: list[BaseException] = []

    def work(at: int) -> None:
        try:
            for _ in range(5):
                read(hccs.endpoint, place, [hccs.mine[DEVICE].address + at * MIB], span_runs(0, 0, MIB))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for at in range(4):
        assert hccs.left.load(hccs.mine[DEVICE].address + at * MIB, MIB) == hccs.data[DEVICE][:MIB]


# ---- making and ending links


def lonely(backend: AclBackend, export: Export, control: socket.socket, seconds: float) -> Endpoint:
    """Connect to a peer that doesn't."""
    pair = Pair(control, -1, -1, "lonely", True)
    return backend.connect(export, pair, deadline_in(seconds))


def test_a_peer_that_does_not_come_is_waited_for_until_the_deadline(
    make_acl: MakeBackend, monkeypatch: pytest.MonkeyPatch, driver: Ascend
) -> None:
    monkeypatch.setenv("FAKE_ASCEND_SECOND", "50")
    driver.reload()
    left, right = make_acl(0), make_acl(1)
    link_control, other = socket.socketpair()
    with link_control, other:
        error = refused(Failure.TIMED_OUT, lonely, left, right.export(), link_control, 1.5)
    assert "HcclCommPrepare failed, TIMEOUT (9)" in error.text


def test_a_peer_that_gives_up_is_not_waited_for(make_acl: MakeBackend, driver: Ascend) -> None:
    left, right = make_acl(0), make_acl(1)
    link_control, other = socket.socketpair()
    with link_control:
        other.close()
        error = refused(Failure.PEER_GONE, lonely, left, right.export(), link_control, 5.0)
    assert "given up" in error.text


LINK_FAULTS = (
    ("HcclRegisterGlobalMem:1:4", Failure.FAILED),
    ("aclrtMalloc:1:207001", Failure.OUT_OF_MEMORY),
    ("HcclCommInitClusterInfoMemConfig:1:15", Failure.LINK_FAILED),
    ("HcclCommBindMem:1:4", Failure.LINK_FAILED),
    ("HcclCommBindMem:3:4", Failure.LINK_FAILED),
    ("HcclCommPrepare:1:19", Failure.LINK_FAILED),
    ("HcclCommPrepare:1:5", Failure.UNSUPPORTED),
    ("aclrtCreateStreamWithConfig:1:207008", Failure.LINK_FAILED),
)


@pytest.mark.parametrize(("fault", "kind"), LINK_FAULTS)
def test_a_link_that_fails_leaves_nothing_and_can_be_made_again(
    driver: Ascend, make_acl: MakeBackend, link_acl: LinkAcl, fault: str, kind: Failure
) -> None:
    left, right = make_acl(0), make_acl(1)
    left.reserve(0, MIB, DEVICE)
    theirs = right.reserve(1, MIB, DEVICE)
    data = fill(right, theirs, 1)
    driver.inject(fault)
    failed = Link(left, right, 4.0)
    errors = [end for end in failed.ends if isinstance(end, BackendError)]
    assert kind in [error.kind for error in errors], errors
    failed.close()
    driver.reset()
    endpoint = link_acl(left, right).left
    here = left.reserve(0, MIB, DEVICE)
    read(endpoint, endpoint.locate(theirs.id, 0, MIB), [here.address], span_runs(0, 0, MIB))
    assert left.load(here.address, MIB) == data


@pytest.mark.parametrize(
    "fault", ["HcclCommInitClusterInfoMemConfig:1:7;HcclCommInitClusterInfoMemConfig:2:7", "HcclCommPrepare:1:9"]
)
def test_what_passes_is_tried_again(driver: Ascend, make_acl: MakeBackend, link_acl: LinkAcl, fault: str) -> None:
    left, right = make_acl(0), make_acl(1)
    driver.inject(fault)
    link = link_acl(left, right)
    assert link.left.alive()
    assert link.right.alive()


def test_a_busy_communicator_is_destroyed_later(hccs: Two, driver: Ascend) -> None:
    driver.inject("HcclCommDestroy:1:20;HcclCommDestroy:2:20")
    hccs.link.close()
    hccs.left.close()
    assert hccs.endpoint.revoked()


def test_a_link_that_can_not_be_ended_is_told_and_its_memory_kept(driver: Ascend) -> None:
    script = """
import warnings
from ascend import *

driver = Ascend.loaded()
left, right = AclBackend(), AclBackend()
left.open([0], {})
right.open([1], {})
region = left.reserve(0, MIB, DEVICE)
link = Link(left, right)
driver.inject("HcclCommDestroy:1:4")
link.left.close()
with warnings.catch_warnings(record=True) as told:
    left.close()
assert "HcclCommDestroy failed, INTERNAL (4)" in str(told[0].message), told
assert not link.left.revoked()
link.right.close()
right.close()
assert link.right.revoked()
driver.call("aclrtSetDevice", 0)
nbytes = ctypes.c_size_t(MIB)
driver.call("aclrtMemset", ctypes.c_void_p(region.address), nbytes, 0, nbytes)  # the memory is there
print("done", flush=True)
os._exit(0)
"""
    assert in_process(script) == "done\n"


def test_a_closed_link_is_gone(hccs: Two) -> None:
    place = hccs.endpoint.locate(hccs.theirs[DEVICE].id, 0, 8)
    assert hccs.endpoint.alive()
    hccs.endpoint.close()
    hccs.endpoint.close()
    assert not hccs.endpoint.alive()
    refused(Failure.PEER_GONE, hccs.endpoint.locate, hccs.theirs[DEVICE].id, 0, 8)
    refused(Failure.PEER_GONE, read, hccs.endpoint, place, [hccs.mine[DEVICE].address], span_runs(0, 0, 8))
    hccs.left.close()
    assert hccs.endpoint.revoked()


def test_a_control_connection_that_hangs_up_ends_the_link(hccs: Two) -> None:
    hccs.link.sockets[1].shutdown(2)
    assert not hccs.endpoint.alive()


def test_no_link_is_made_over_a_closed_connection(make_acl: MakeBackend) -> None:
    control, other = socket.socketpair()
    control.close()
    other.close()
    refused(Failure.PEER_GONE, lonely, make_acl(0), make_acl(1).export(), control, 5.0)


def test_more_devices_on_one_side_are_refused(make_acl: MakeBackend) -> None:
    link = Link(make_acl(0, 1), make_acl(2))
    link.close()
    for end in link.ends:
        assert isinstance(end, BackendError)
        assert end.kind is Failure.INVALID
        assert "devices" in end.text


def test_one_device_is_not_linked_with_itself(make_acl: MakeBackend) -> None:
    link = Link(make_acl(0), make_acl(0))
    link.close()
    for end in link.ends:
        assert isinstance(end, BackendError)
        assert end.kind is Failure.INVALID


# ---- memory and links


def test_memory_is_unbound_before_it_goes(driver: Ascend, make_acl: MakeBackend, link_acl: LinkAcl) -> None:
    left, right = make_acl(0), make_acl(1)
    pointer, address = driver_memory(driver, left)
    [region] = left.register(0, [address], MIB, DEVICE)
    theirs = right.reserve(1, MIB, DEVICE)
    data = fill(right, theirs, 2)
    first, second = link_acl(left, right).left, link_acl(left, right).left
    for endpoint in (first, second):
        read(endpoint, endpoint.locate(theirs.id, 0, MIB), [address], span_runs(0, 0, MIB))
        assert left.load(address, MIB) == data
    left.unregister([(region, address)], MIB)
    driver.call("aclrtSetDevice", 0)
    driver.free(pointer)
    driver.call("aclrtResetDevice", 0)


def driver_memory(driver: Ascend, backend: AclBackend) -> tuple[int, int]:
    """Allocate as a user of the backend's device does."""
    backend.reserve(0, 1, DEVICE)  # leaves the device current on this thread
    return driver.allocate(4 * MIB)


def test_pageable_memory_is_taken_and_not_offered(make_acl: MakeBackend, link_acl: LinkAcl) -> None:
    options = [server(f"host-{device}", device) for device in (0, 1)]
    left, right = make_acl(0, **options[0]), make_acl(1, **options[1])
    buffer = pageable(MIB)
    address = ctypes.addressof(buffer)
    [region] = right.register(1, [address], MIB, HOST)
    endpoint = link_acl(left, right).left
    assert "pageable" in refused(Failure.UNSUPPORTED, endpoint.locate, region.id, 0, 8).text
    right.unregister([(region, address)], MIB)


def test_pinned_memory_of_the_user_is_offered(driver: Ascend, make_acl: MakeBackend, link_acl: LinkAcl) -> None:
    options = [server(f"host-{device}", device) for device in (0, 1)]
    left, right = make_acl(0, **options[0]), make_acl(1, **options[1])
    right.reserve(1, 1, DEVICE)
    pointer = ctypes.c_void_p()
    driver.call("aclrtMallocHost", ctypes.byref(pointer), ctypes.c_size_t(MIB))
    assert pointer.value is not None
    [region] = right.register(1, [pointer.value], MIB, HOST)
    ctypes.memset(pointer, 7, MIB)
    endpoint = link_acl(left, right).left
    here = left.reserve(0, MIB, DEVICE)
    read(endpoint, endpoint.locate(region.id, 0, MIB), [here.address], span_runs(0, 0, MIB))
    assert left.load(here.address, MIB) == b"\x07" * MIB
    right.unregister([(region, pointer.value)], MIB)
    driver.call("aclrtFreeHost", pointer)


def test_remap_goes_to_the_links_that_stand(driver: Ascend, two: Two) -> None:
    region = two.mine[DEVICE]
    two.left.remap([(region.address, MIB), (region.address + MIB, MIB)])
    refused(Failure.INVALID, two.left.remap, [])
    refused(Failure.INVALID, two.left.remap, [(region.address + 4 * MIB - 1, 2)])
    refused(Failure.INVALID, two.left.remap, [(two.mine[HOST].address, 2)])
    driver.inject("HcclRemapRegistedMemory:1:4")
    assert "INTERNAL (4)" in refused(Failure.FAILED, two.left.remap, [(region.address, MIB)]).text


def test_remap_needs_a_link(make_acl: MakeBackend) -> None:
    backend = make_acl()
    region = backend.reserve(0, MIB, DEVICE)
    refused(Failure.PEER_GONE, backend.remap, [(region.address, MIB)])


def test_offsets_above_four_gib_are_whole(
    driver: Ascend, monkeypatch: pytest.MonkeyPatch, make_acl: MakeBackend, link_acl: LinkAcl
) -> None:
    monkeypatch.setenv("FAKE_ASCEND_MEMORY", str(16 << 30))
    driver.reload()
    left, right = make_acl(0), make_acl(1)
    here, there = left.reserve(0, 6 << 30, DEVICE), right.reserve(1, 6 << 30, DEVICE)
    endpoint = link_acl(left, right).left
    block = 64 << 10
    blocks = [0, 32767, 32768, 65535, 65536, 98303]
    for block_index in blocks:
        right.store(there.address + block_index * block, bytes([block_index % 251]) * block)
    place = endpoint.locate(there.id, 0, there.nbytes)
    runs = block_runs(indices(blocks, "s"), indices(blocks[::-1], "d"), 98304, 98304, block)
    read(endpoint, place, [here.address], runs)
    for source, destination in zip(blocks, blocks[::-1], strict=True):
        assert left.load(here.address + destination * block, block) == bytes([source % 251]) * block


def test_a_region_that_the_driver_finds_too_large_is_refused_with_its_size(
    driver: Ascend, make_acl: MakeBackend
) -> None:
    driver.inject("HcclRegisterGlobalMem:1:3")
    error = refused(Failure.FAILED, make_acl().reserve, 0, 1 << 30, DEVICE)
    assert str(1 << 30) in error.text
    assert "MEMORY (3)" in error.text


def test_packets_are_marked_as_the_user_says(
    monkeypatch: pytest.MonkeyPatch, make_acl: MakeBackend, link_acl: LinkAcl
) -> None:
    marks = []

    def config(name: bytes, traffic_class: int, service_level: int) -> object:
        marks.append((traffic_class, service_level))
        return comm_config(name, traffic_class, service_level)

    monkeypatch.setattr(communicator_module, "comm_config", config)
    marked = make_acl(0, **{"llm.RdmaTrafficClass": "132", "llm.RdmaServiceLevel": "4"})
    link_acl(marked, make_acl(1))
    assert sorted(marks) == [(132, 4), (NOT_SET, NOT_SET)]


@pytest.mark.parametrize("devices", [(0,), (0, 2)])
def test_a_backend_can_be_closed_while_a_link_is_made(
    driver: Ascend, monkeypatch: pytest.MonkeyPatch, make_acl: MakeBackend, devices: tuple[int, ...]
) -> None:
    monkeypatch.setenv("FAKE_ASCEND_SECOND", "100")
    driver.reload()
    left, right = make_acl(*devices), make_acl(*(device + 1 for device in devices))
    preparing = threading.Event()
    monkeypatch.setattr(communicator_module, "HcclPrepareConfig", lambda: (preparing.set(), HcclPrepareConfig())[1])
    errors: list[BackendError] = []
    control, other = socket.socketpair()

    def connect() -> None:
        # A third of this is more than the backend waits for the end of a link.
        errors.append(refused(Failure.PEER_GONE, lonely, left, right.export(), control, 3600.0))

    with control, other:
        thread = threading.Thread(target=connect)
        thread.start()
        assert preparing.wait(SECONDS)
        left.close()  # warns when something is left
        thread.join(SECONDS)
    assert "closed the link" in errors[0].text


def test_a_communicator_that_was_ended_is_not_made(hccs: Two) -> None:
    [communicator] = acl_endpoint(hccs).communicators
    hccs.link.left.close()
    hccs.left._closer.close()
    error = refused(Failure.CLOSING, communicator.open, Traffic(), deadline_in(SECONDS), lambda: True)
    assert "closed" in error.text


def test_windows_stay_where_a_link_may_still_be_used(driver: Ascend) -> None:
    script = """
import warnings
from ascend import *

left, right = AclBackend(), AclBackend()
left.open([0], {})
right.open([1], {})
window = left.make_windows(4096, 4096)[0]
link = Link(left, right)
Ascend.loaded().inject("HcclCommDestroy:1:4")
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    left.close()
assert len(told) == 1
assert ctypes.string_at(window.address, 8) == bytes(8)
link.close()
right.close()
print("done", flush=True)
os._exit(0)
"""
    assert in_process(script) == "done\n"
