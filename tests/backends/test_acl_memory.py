"""Opening devices, and memory of the acl backend, on the fake driver."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator

import pytest
from ascend import DEVICE, HOST, MIB, Ascend, MakeBackend, fill, server

from llm_datadist.backend import BackendError, Failure
from llm_datadist.backends.acl import memory
from llm_datadist.backends.acl.backend import AclBackend

KIB = 1 << 10


def refused(kind: Failure, call: Callable[..., object], *args: object) -> str:
    """Call what must fail; give the text."""
    with pytest.raises(BackendError) as caught:
        call(*args)
    assert caught.value.kind is kind, caught.value
    return caught.value.text


# ---- opening


@pytest.mark.parametrize(
    ("fault", "kind", "text"),
    [
        ("aclInit:1:500000", Failure.FAILED, "INTERNAL"),
        ("aclrtSetDevice:1:107001", Failure.INVALID, "device 0 could not"),
        ("aclrtSetDevice:2:507899", Failure.FAILED, "device 1"),
        ("aclrtGetPhyDevIdByLogicDevId:2:507000", Failure.FAILED, "device 1"),
    ],
)
def test_a_failure_to_open_leaves_nothing_and_can_be_tried_again(
    driver: Ascend, fault: str, kind: Failure, text: str
) -> None:
    backend = AclBackend()
    driver.inject(fault)
    assert text in refused(kind, backend.open, [0, 1], {})
    backend.open([0, 1], {})
    backend.close()
    backend.close()


@pytest.mark.parametrize(("soc", "text"), [("Ascend950", "'Ascend950'"), ("Ascend310P", "'Ascend310P'"), ("", "''")])
def test_other_products_are_not_supported(driver: Ascend, monkeypatch: pytest.MonkeyPatch, soc: str, text: str) -> None:
    monkeypatch.setenv("FAKE_ASCEND_SOC", soc)
    driver.reload()
    assert text in refused(Failure.UNSUPPORTED, AclBackend().open, [0], {})


def test_an_unknown_device_is_named(driver: Ascend) -> None:
    assert "device 16 is not there: this process sees 16" in refused(Failure.INVALID, AclBackend().open, [16], {})


@pytest.mark.parametrize(
    ("key", "values"),
    [("llm.RdmaTrafficClass", ("256", "255", "-4", "x", "133")), ("llm.RdmaServiceLevel", ("8", "100", "", "1.0"))],
)
def test_packet_marks_out_of_range_are_refused(driver: Ascend, key: str, values: tuple[str, ...]) -> None:
    for value in values:
        assert key in refused(Failure.INVALID, AclBackend().open, [0], {key: value})


def test_a_table_for_another_device_is_refused(driver: Ascend) -> None:
    text = refused(Failure.INVALID, AclBackend().open, [0], server("here", 3))
    assert "device_id" in text
    assert "expected is 0" in text


def test_the_variable_of_the_runtime_is_set_unless_the_user_has(
    driver: Ascend, monkeypatch: pytest.MonkeyPatch, make_acl: MakeBackend
) -> None:
    monkeypatch.delenv("AUTO_USE_UC_MEMORY")
    make_acl()
    assert os.environ["AUTO_USE_UC_MEMORY"] == "0"
    monkeypatch.setenv("AUTO_USE_UC_MEMORY", "1")
    make_acl()
    assert os.environ["AUTO_USE_UC_MEMORY"] == "1"


def test_another_user_of_the_driver_in_the_process_keeps_it(driver: Ascend) -> None:
    driver.call("aclInit", None)
    driver.call("aclrtSetDevice", 0)
    before = driver.current()
    backend = AclBackend()
    backend.open([0, 1], {})
    backend.reserve(1, MIB, DEVICE)
    backend.close()
    assert driver.current() == before
    driver.free(driver.allocate(100)[0])
    driver.call("aclrtResetDevice", 0)
    driver.call("aclFinalizeReference", None)


def test_a_thread_keeps_its_device_over_every_call(driver: Ascend) -> None:
    driver.call("aclInit", None)
    driver.call("aclrtSetDevice", 5)
    before = driver.current()
    pointer, address = driver.allocate(MIB)
    backend = AclBackend()
    backend.open([0, 5], {})
    assert driver.current() == before
    region = backend.reserve(0, MIB, DEVICE)
    assert driver.current() == before
    [registered] = backend.register(5, [address], MIB, DEVICE)
    backend.store(region.address, b"abc")
    assert backend.load(region.address, 3) == b"abc"
    assert driver.current() == before
    backend.unregister([(registered, address)], MIB)
    backend.close()
    assert driver.current() == before
    driver.free(pointer)
    driver.call("aclrtResetDevice", 5)
    driver.call("aclFinalizeReference", None)


def test_closed_means_closed(driver: Ascend, make_acl: MakeBackend) -> None:
    backend = make_acl()
    region = backend.reserve(0, MIB, DEVICE)
    backend.close()
    for call in (
        lambda: backend.reserve(0, MIB, DEVICE),
        lambda: backend.register(0, [region.address], 1, DEVICE),
        lambda: backend.load(region.address, 1),
        backend.export,
    ):
        assert "closed" in refused(Failure.UNAVAILABLE, call)
    backend.unregister([(region, region.address)], 1)


# ---- pools


def test_pools_start_where_cards_want_them_to(make_acl: MakeBackend) -> None:
    backend = make_acl(0, 1)
    device, other, host = (
        backend.reserve(0, 3 * MIB + 1, DEVICE),
        backend.reserve(1, MIB, DEVICE),
        backend.reserve(1, MIB, HOST),
    )
    assert [r.address % (2 * MIB) for r in (device, other)] == [0, 0]
    assert host.address % (64 * KIB) == 0
    assert [(r.id, r.device, r.kind, r.nbytes) for r in (device, other, host)] == [
        (0, 0, DEVICE, 3 * MIB + 1),
        (1, 1, DEVICE, MIB),
        (2, 1, HOST, MIB),
    ]
    for region in (device, other, host):
        data = fill(backend, region, region.id)
        assert backend.load(region.address, region.nbytes) == data


def test_a_pool_without_a_size_takes_a_share_of_what_is_free(make_acl: MakeBackend) -> None:
    backend = make_acl()
    region = backend.reserve(0, None, DEVICE)
    assert 0.65 * 2 * 1024 * MIB < region.nbytes < 0.7 * 2 * 1024 * MIB
    assert "needs a size" in refused(Failure.INVALID, backend.reserve, 0, None, HOST)


def test_out_of_memory_tells_the_numbers(make_acl: MakeBackend) -> None:
    backend = make_acl()
    text = refused(Failure.OUT_OF_MEMORY, backend.reserve, 0, 1 << 40, DEVICE)
    assert str((1 << 40) + 2 * MIB) in text
    assert "2147483648 are free" in text
    assert "207001" in text
    refused(Failure.HOST_OUT_OF_MEMORY, backend.reserve, 0, 1 << 40, HOST)
    backend.reserve(0, MIB, DEVICE)


@pytest.mark.parametrize("kind", [DEVICE, HOST])
def test_a_pool_that_is_not_registered_is_not_kept(driver: Ascend, make_acl: MakeBackend, kind: object) -> None:
    backend = make_acl()
    driver.inject("HcclRegisterGlobalMem:1:4")
    assert "INTERNAL (4)" in refused(Failure.FAILED, backend.reserve, 0, 1024 * MIB, kind)
    backend.reserve(0, 1536 * MIB, DEVICE)  # only fits when the first is free again


def test_a_device_that_is_not_claimed_is_refused(make_acl: MakeBackend) -> None:
    backend = make_acl(2)
    assert "claimed are [2]" in refused(Failure.INVALID, backend.reserve, 0, MIB, DEVICE)


def test_windows_are_zeroed_words_of_this_process(make_acl: MakeBackend) -> None:
    directory, board = make_acl().make_windows(MIB, 4096)
    for window, nbytes in ((directory, MIB), (board, 4096)):
        assert window.nbytes == nbytes
        assert window.address % 8 == 0
        assert ctypes.string_at(window.address, nbytes) == bytes(nbytes)
        ctypes.memset(window.address, 1, nbytes)


# ---- memory of users


@pytest.fixture
def tensors(driver: Ascend, make_acl: MakeBackend) -> Iterator[list[int]]:
    """Allocate four tensors of a MiB as a user of the device does; they must be unregistered before the test ends."""
    make_acl()
    made = [driver.allocate(4 * MIB) for _ in range(4)]
    yield [address for _, address in made]
    for pointer, _ in made:
        driver.free(pointer)


def test_a_refused_tensor_is_named_and_the_others_are_undone(
    driver: Ascend, make_acl: MakeBackend, tensors: list[int]
) -> None:
    backend = make_acl()
    driver.inject("HcclRegisterGlobalMem:3:1")
    text = refused(Failure.INVALID, backend.register, 0, tensors, MIB, DEVICE)
    for part in ("tensor 2 of 4", hex(tensors[2]), str(2 * MIB), "PARA (1)", "injected fault"):
        assert part in text
    assert backend.export().data == make_acl().export().data  # peers are told of none
    regions = backend.register(0, tensors, MIB, DEVICE)
    assert [r.address for r in regions] == tensors
    backend.unregister(list(zip(regions, tensors, strict=True)), MIB)


def test_unaligned_device_memory_is_refused_at_the_call(make_acl: MakeBackend, tensors: list[int]) -> None:
    backend = make_acl()
    tensors[3] += 4096
    text = refused(Failure.INVALID, backend.register, 0, tensors, MIB, DEVICE)
    for part in ("tensor 3 of 4", hex(tensors[3]), f"multiple of {2 * MIB}", "HCCL_INTRA_ROCE_ENABLE"):
        assert part in text


def test_unaligned_device_memory_is_taken_where_hccs_is_not(
    driver: Ascend, make_acl: MakeBackend, tensors: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HCCL_INTRA_ROCE_ENABLE", "1")
    driver.reload()
    backend = make_acl()
    [region] = backend.register(0, [tensors[0] + 4096], MIB, DEVICE)
    backend.unregister([(region, tensors[0] + 4096)], MIB)


def test_memory_of_the_other_kind_is_refused(make_acl: MakeBackend, tensors: list[int]) -> None:
    backend = make_acl()
    buffer = ctypes.create_string_buffer(4 * MIB)
    address = -(-ctypes.addressof(buffer) // (2 * MIB)) * 2 * MIB
    assert "is not DEVICE" in refused(Failure.INVALID, backend.register, 0, [address], MIB, DEVICE)
    assert "not memory" in refused(Failure.INVALID, backend.register, 0, tensors[:1], MIB, HOST)
    assert "not memory" in refused(Failure.INVALID, backend.register, 0, [8192], MIB, HOST)


def test_each_registration_of_a_range_counts(driver: Ascend, make_acl: MakeBackend, tensors: list[int]) -> None:
    backend = make_acl()
    address = tensors[0]
    [region] = backend.register(0, [address], 2 * MIB, DEVICE)
    assert backend.register(0, [address, address + MIB], MIB, DEVICE) == [region, region]
    backend.unregister([(region, address)], 2 * MIB)
    backend.unregister([(region, address)], MIB)
    driver.inject("HcclRegisterGlobalMem:1:4")  # not called, as the range is still known
    assert backend.register(0, [address + 2 * MIB - 1], 1, DEVICE) == [region]
    backend.unregister([(region, address)] * 2, MIB)
    refused(Failure.FAILED, backend.register, 0, [address], MIB, DEVICE)


def test_a_range_that_reaches_over_a_known_one_is_refused_by_the_driver(
    driver: Ascend, make_acl: MakeBackend, tensors: list[int]
) -> None:
    backend = make_acl()
    [region] = backend.register(0, tensors[:1], MIB, DEVICE)
    text = refused(Failure.INVALID, backend.register, 0, tensors[:1], MIB + 1, DEVICE)
    assert "tensor 0 of 1" in text
    assert "overlaps" in text
    assert "H8" in driver.violations()  # a user's mistake, which the driver finds
    driver.reset()
    backend.unregister([(region, tensors[0])], MIB)


def test_many_threads_register_and_let_go(make_acl: MakeBackend, tensors: list[int]) -> None:
    backend = make_acl()
    errors: list[BaseException] = []

    def work(address: int) -> None:
        try:
            for _ in range(20):
                [region] = backend.register(0, [address], MIB, DEVICE)
                backend.unregister([(region, address)], MIB)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(address,)) for address in tensors * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_what_the_driver_does_not_take_back_is_told_at_close(driver: Ascend) -> None:
    backend = AclBackend()
    backend.open([0], {})
    region = backend.reserve(0, MIB, DEVICE)
    driver.inject("HcclDeregisterGlobalMem:1:1")
    with pytest.warns(RuntimeWarning, match=f"{region.address:#x}.*PARA"):
        backend.close()


def test_a_region_that_the_driver_keeps_stays_registered_and_can_be_let_go_later(
    driver: Ascend, make_acl: MakeBackend, tensors: list[int]
) -> None:
    backend = make_acl()
    [shared] = backend.register(0, tensors[:1], MIB, DEVICE)
    regions = list(zip(backend.register(0, tensors, MIB, DEVICE), tensors, strict=True))
    driver.inject("HcclDeregisterGlobalMem:2:1")
    assert "could not be deregistered" in refused(Failure.INVALID, backend.unregister, regions, MIB)
    kept = [address for address in tensors[1:] if backend._memory.find(address, MIB)]
    assert len(kept) == 1
    backend.unregister(regions, MIB)
    assert [address for address in tensors if backend._memory.find(address, MIB)] == tensors[:1]
    backend.unregister([(shared, tensors[0])], MIB)
    assert backend.export().data == make_acl().export().data


def test_a_range_that_leaves_its_allocation_is_refused(
    driver: Ascend, make_acl: MakeBackend, tensors: list[int]
) -> None:
    text = refused(Failure.INVALID, make_acl().register, 0, tensors[:1], 16 * MIB, DEVICE)
    for part in ("tensor 0 of 1", hex(tensors[0]), str(16 * MIB), "ends after"):
        assert part in text


def test_host_memory_that_the_driver_can_not_tell_is_pageable(driver: Ascend, make_acl: MakeBackend) -> None:
    backend = make_acl()
    buffer = ctypes.create_string_buffer(MIB)
    driver.inject("aclrtPointerGetAttributes:1:507899;HcclRegisterGlobalMem:1:4")
    [region] = backend.register(0, [ctypes.addressof(buffer)], MIB, HOST)  # the card is not given it
    assert not backend._memory.pinned(region)
    backend.unregister([(region, region.address)], MIB)


@pytest.mark.parametrize("kind", [DEVICE, HOST])
def test_a_pool_above_what_the_driver_registers_is_refused_with_its_size(
    driver: Ascend, make_acl: MakeBackend, monkeypatch: pytest.MonkeyPatch, kind: object
) -> None:
    monkeypatch.setenv("FAKE_ASCEND_REGION_LIMIT", str(64 * MIB))
    driver.reload()
    backend = make_acl()
    text = refused(Failure.INVALID, backend.reserve, 0, 64 * MIB + 1, kind)
    for part in (str(64 * MIB + 1), "PARA (1)", f"{64 * MIB} are the most"):
        assert part in text
    backend.reserve(0, 64 * MIB, kind)


def test_device_memory_above_the_documented_limit_is_refused(
    make_acl: MakeBackend, tensors: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "MAX_DEVICE_BYTES", 50 * MIB)
    backend = make_acl(0, 1)
    backend.reserve(0, 46 * MIB, DEVICE)
    backend.reserve(0, 50 * MIB, HOST)
    text = refused(Failure.INVALID, backend.reserve, 0, 5 * MIB, DEVICE)
    for part in (str(5 * MIB), str(46 * MIB), str(50 * MIB), "device 0"):
        assert part in text
    [region] = backend.register(0, tensors[:1], 4 * MIB, DEVICE)
    assert "in all" in refused(Failure.INVALID, backend.register, 0, tensors[1:], MIB, DEVICE)
    backend.unregister([(region, tensors[0])], 4 * MIB)
    assert backend.reserve(1, None, DEVICE).nbytes == 50 * MIB  # each device has its own, and no pool takes more


def test_what_fails_while_a_failed_open_is_undone_is_told_beside_its_reason(driver: Ascend) -> None:
    driver.inject("aclrtSetDevice:2:507899;aclrtResetDevice:1:507000")
    text = refused(Failure.FAILED, AclBackend().open, [0, 1], {})
    assert text.startswith("device 1 could not be claimed")
    assert "did not take back everything: aclrtResetDevice failed" in text
    driver.call("aclInit", None)
    driver.call("aclrtResetDevice", 0)
    driver.call("aclFinalizeReference", None)


def test_a_failure_that_is_expected_leaves_no_message_behind(make_acl: MakeBackend) -> None:
    backend = make_acl()
    messages = []

    def work() -> None:  # on a thread that has no device yet
        backend.reserve(0, MIB, DEVICE)
        messages.append(backend._devices[0].library.recent())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert messages == [""]
