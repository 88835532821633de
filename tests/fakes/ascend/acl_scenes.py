"""Scenes of ACL: life cycle, contexts, streams, memory, copies."""

from __future__ import annotations

import ctypes
import time
from ctypes import addressof, byref, c_int, c_int32, c_size_t, c_void_p, create_string_buffer

import driver
from driver import (
    DEVICE_TO_DEVICE,
    DEVICE_TO_HOST,
    HOST_TO_DEVICE,
    HOST_TO_HOST,
    MIB,
    Driver,
    MemcpyBatchAttr,
    MemLocation,
    PtrAttributes,
)
from scenes import allowed, equal, in_thread, mistake, together

LAZY = {"FAKE_ASCEND_LAZY": "1"}


def pinned(d: Driver, data: bytes) -> int:
    """Allocate pinned host memory with these bytes."""
    address = d.out("aclrtMallocHost", len(data))
    ctypes.memmove(address, data, len(data))
    return address


def on_device(d: Driver, data: bytes) -> int:
    """Allocate device memory with these bytes."""
    address = d.out("aclrtMalloc", len(data), 0)
    d.write(address, data)
    return address


def until_waiting(d: Driver, stream: int) -> None:
    """Return when a thread is inside a sync of the stream."""
    while not d.fake_waiting(stream):
        time.sleep(0.001)


# Life cycle.


@mistake("A1", fresh=True)
def call_before_init(d: Driver) -> None:
    equal(d.aclrtSetDevice(0), 100001)
    equal(d.aclrtGetSocName(), None)


@allowed(fresh=True)
def init_and_finalise_twice(d: Driver) -> None:
    equal([d.aclInit(None), d.aclInit(None)], [0, 100002])
    equal([d.aclFinalize(), d.aclFinalize(), d.aclFinalizeReference(None)], [0, 100037, 100037])
    equal([d.aclInit(None), d.aclInit(None)], [0, 100002])
    count = ctypes.c_uint64()
    equal([d.aclFinalizeReference(byref(count)), count.value], [0, 1])
    equal([d.aclFinalizeReference(byref(count)), count.value], [0, 0])


@mistake("A4", fresh=True)
def call_after_finalise(d: Driver) -> None:
    d.do("aclInit", None)
    d.do("aclFinalize")
    equal(d.aclrtSetDevice(0), 100001)


@mistake("A4", "A32")
def finalise_while_another_thread_is_inside(d: Driver) -> None:
    d.fake_inject(b"aclrtMemsetAsync:1:hang")
    memory, stream, context = d.out("aclrtMalloc", 64, 0), d.stream(), d.out("aclrtGetCurrentContext")
    d.do("aclrtMemsetAsync", memory, 64, 0, 64, stream)

    def wait() -> int:
        d.do("aclrtSetCurrentContext", context)
        return d.sync(stream, 1000)

    def finalise() -> int:
        until_waiting(d, stream)
        return d.aclFinalize()

    equal(together((wait, ()), (finalise, ())), [507046, 0])


@mistake("A5", fresh=True)
def finalise_what_somebody_else_initialised(d: Driver) -> None:
    d.fake_preinit()
    equal(d.aclInit(None), 100002)
    d.do("aclFinalize")


@allowed(fresh=True)
def take_back_only_our_own_init(d: Driver) -> None:
    d.fake_preinit()
    equal(d.aclInit(None), 100002)
    d.do("aclFinalizeReference", None)


@mistake("A32")
def finalise_with_things_alive(d: Driver) -> None:
    d.stream(), d.out("aclrtMalloc", 64, 0), d.out("aclrtCreateEvent"), d.out("aclrtCreateContext", 1)
    d.do("aclFinalize")
    equal(len(d.violations()), 5)


# Devices and contexts.


@mistake("A6")
def thread_without_context(d: Driver) -> None:
    out, number, stream = c_void_p(), c_int32(), d.stream()
    calls = [
        ("aclrtMalloc", byref(out), 64, 0),
        ("aclrtMallocHost", byref(out), 64),
        ("aclrtMemcpy", 1, 1, 2, 1, 0),
        ("aclrtMemcpyAsync", 1, 1, 2, 1, 0, stream),
        ("aclrtCreateStreamWithConfig", byref(out), 0, 3),
        ("aclrtSynchronizeStreamWithTimeout", stream, 100),
        ("aclrtCreateEvent", byref(out)),
        ("aclrtGetDevice", byref(number)),
    ]
    equal(in_thread(lambda: [getattr(d, name)(*arguments) for name, *arguments in calls]), [107002] * len(calls))
    equal(len(d.violations()), len(calls))


@allowed()
def ask_for_the_context_of_a_thread_that_has_none(d: Driver) -> None:
    equal(in_thread(lambda: d.aclrtGetCurrentContext(byref(c_void_p()))), 107002)


@mistake("A7")
def device_out_of_range(d: Driver) -> None:
    equal([d.aclrtSetDevice(16), d.aclrtSetDevice(-1), d.aclrtResetDevice(16)], [107001] * 3)


@mistake("A7", ASCEND_RT_VISIBLE_DEVICES="5,3", FAKE_ASCEND_DEVICES="8")
def visible_devices(d: Driver) -> None:
    count, physical = ctypes.c_uint32(), c_int32()
    d.do("aclrtGetDeviceCount", byref(count))
    d.do("aclrtGetPhyDevIdByLogicDevId", 1, byref(physical))
    equal((count.value, physical.value), (2, 3))
    equal(d.aclrtSetDevice(2), 107001)
    memory = on_device(d, b"x")
    d.do("aclrtSetDevice", 1)
    assert on_device(d, b"x") < memory, "devices of other physical ids have other addresses"


@mistake("A8")
def bad_context(d: Driver) -> None:
    context = d.out("aclrtCreateContext", 0)
    d.do("aclrtDestroyContext", context)
    equal([d.aclrtSetCurrentContext(each) for each in (None, context, 77)], [100000, 107000, 107000])
    equal(d.aclrtDestroyContext(context), 107000)


@allowed()
def current_device_and_context(d: Driver) -> None:
    device, context = c_int32(), c_void_p()
    equal((d.fake_current(byref(device), byref(context)), device.value), (0, 0))
    first = context.value
    made = d.out("aclrtCreateContext", 3)
    equal((d.fake_current(byref(device), byref(context)), device.value, context.value), (0, 3, made))
    d.do("aclrtSetCurrentContext", first)
    equal((d.fake_current(byref(device), byref(context)), device.value, context.value), (0, 0, first))
    equal(in_thread(lambda: d.fake_current(byref(device), byref(context))), -1)
    d.do("aclrtDestroyContext", made)


@mistake("A31")
def reset_with_things_alive(d: Driver) -> None:
    d.stream()
    d.out("aclrtMalloc", 64, 0)
    d.do("aclrtResetDevice", 0)
    equal(len(d.violations()), 2)


@mistake("A32")
def reset_more_often_than_set(d: Driver) -> None:
    d.do("aclrtResetDevice", 0)
    equal(d.aclrtResetDevice(0), 107000)


@allowed()
def set_twice_and_reset_twice(d: Driver) -> None:
    d.do("aclrtSetDevice", 0)
    d.do("aclrtResetDevice", 0)
    d.stream()
    d.do("aclrtDestroyStream", d.stream())


# Streams and events.


@mistake("A10")
def stream_of_another_context(d: Driver) -> None:
    stream, event = d.stream(), d.out("aclrtCreateEvent")
    device, host = on_device(d, bytes(8)), pinned(d, bytes(8))
    d.out("aclrtCreateContext", 0)
    found = [
        d.aclrtDestroyStream(stream),
        d.aclrtStreamAbort(stream),
        d.aclrtMemcpyAsync(device, 8, host, 8, HOST_TO_DEVICE, stream),
        d.aclrtMemsetAsync(device, 8, 0, 8, stream),
        d.aclrtRecordEvent(event, stream),
        d.aclrtStreamWaitEvent(stream, event),
        d.aclrtSetStreamFailureMode(stream, 1),
    ]
    equal(found, [107003] * 7)
    equal(d.sync(stream), 0)


@mistake("A11")
def destroyed_stream(d: Driver) -> None:
    stream = d.stream()
    d.do("aclrtDestroyStream", stream)
    equal([d.aclrtDestroyStream(stream), d.sync(stream), d.aclrtStreamAbort(stream)], [107017] * 3)
    equal(d.aclrtDestroyStream(None), 100000)
    equal(d.sync(4096), 107017)


@mistake("A12")
def sync_with_a_bad_timeout(d: Driver) -> None:
    stream = d.stream()
    equal([d.sync(stream, 0), d.sync(stream, -2), d.sync(stream, -1)], [107000, 107000, 0])


@allowed()
def sync_that_runs_out_of_time(d: Driver) -> None:
    d.fake_inject(b"aclrtMemsetAsync:1:hang")
    memory, stream = on_device(d, b"old"), d.stream()
    d.do("aclrtMemsetAsync", memory, 3, 0, 3, stream)
    equal([d.sync(stream, 10), d.sync(stream, 10)], [507046, 507046])
    d.do("aclrtStreamAbort", stream)
    equal(d.read(memory, 3), b"old")
    d.do("aclrtDestroyStream", stream)


@allowed()
def abort_while_another_thread_syncs(d: Driver) -> None:
    d.fake_inject(b"aclrtMemsetAsync:1:hang")
    memory, stream, context = on_device(d, b"old"), d.stream(), d.out("aclrtGetCurrentContext")
    for _ in range(3):
        d.do("aclrtMemsetAsync", memory, 3, 0, 3, stream)

    def wait() -> int:
        d.do("aclrtSetCurrentContext", context)
        return d.sync(stream)

    def abort() -> int:
        d.do("aclrtSetCurrentContext", context)
        until_waiting(d, stream)
        return d.aclrtStreamAbort(stream)

    equal(together((wait, ()), (abort, ())), [107023, 0])
    d.do("aclrtDestroyStream", stream)
    equal(d.read(memory, 3), b"old")


@mistake("A14")
def stream_used_after_an_abort(d: Driver) -> None:
    stream, memory = d.stream(), on_device(d, b"old")
    d.do("aclrtStreamAbort", stream)
    d.do("aclrtMemsetAsync", memory, 3, 0, 3, stream)
    equal(d.sync(stream), 0)
    equal(len(d.violations()), 2)


@mistake("A15")
def too_many_streams(d: Driver) -> None:
    for _ in range(1984):
        d.stream()
    equal(d.aclrtCreateStream(byref(c_void_p())), 207008)


@allowed()
def failed_task_shows_at_the_next_sync(d: Driver) -> None:
    d.fake_inject(b"aclrtMemsetAsync:1:task-507053;aclrtMemsetAsync:3:task-507054")
    memory, stream = on_device(d, b"old"), d.stream()
    d.do("aclrtMemsetAsync", memory, 3, 0, 3, stream)
    equal([d.sync(stream), d.sync(stream)], [507053, 0])
    equal(d.read(memory, 3), b"old")
    d.do("aclrtMemsetAsync", memory, 3, 1, 3, stream)
    equal([d.sync(stream), d.read(memory, 3)], [0, bytes([1] * 3)])


@allowed()
def stream_that_stops_at_a_failure(d: Driver) -> None:
    d.fake_inject(b"aclrtMemsetAsync:1:task-507053")
    memory, stream = on_device(d, b"old"), d.stream()
    d.do("aclrtSetStreamFailureMode", stream, 1)
    for _ in range(2):
        d.do("aclrtMemsetAsync", memory, 3, 0, 3, stream)
    equal((d.sync(stream), d.read(memory, 3)), (507053, b"old"))


@allowed(**LAZY)
def events_order_two_streams(d: Driver) -> None:
    first, second, event = d.stream(), d.stream(), d.out("aclrtCreateEvent")
    source, target, host = on_device(d, b"new"), on_device(d, b"old"), pinned(d, b"...")
    status = c_int()
    d.do("aclrtMemcpyAsync", target, 3, source, 3, DEVICE_TO_DEVICE, first)
    d.do("aclrtRecordEvent", event, first)
    d.do("aclrtStreamWaitEvent", second, event)
    d.do("aclrtMemcpyAsync", host, 3, target, 3, DEVICE_TO_HOST, second)
    equal(d.sync(second), 0)
    equal(ctypes.string_at(host, 3), b"new")
    d.do("aclrtRecordEvent", event, first)
    d.do("aclrtQueryEventStatus", event, byref(status))
    equal(status.value, 0)
    d.do("aclrtSynchronizeEventWithTimeout", event, 1000)
    d.do("aclrtQueryEventStatus", event, byref(status))
    equal(status.value, 1)
    d.do("aclrtDestroyEvent", event)


# Memory.


@mistake("A16")
def bad_allocation(d: Driver) -> None:
    out = c_void_p()
    equal([d.aclrtMalloc(byref(out), 0, 0), d.aclrtMalloc(None, 64, 0), d.aclrtMallocHost(byref(out), 0)], [100000] * 3)


@allowed(FAKE_ASCEND_MEMORY=str(64 * MIB))
def memory_runs_out(d: Driver) -> None:
    free, total = c_size_t(), c_size_t()
    first = d.out("aclrtMalloc", 40 * MIB + 1, 0)
    d.do("aclrtGetMemInfo", 1, byref(free), byref(total))
    equal((free.value, total.value), (22 * MIB, 64 * MIB))
    equal(d.aclrtMalloc(byref(c_void_p()), 30 * MIB, 0), 207001)
    d.out("aclrtMallocHost", 40 * MIB)
    equal(d.aclrtMallocHost(byref(c_void_p()), 30 * MIB), 207001)
    d.do("aclrtFree", first)
    d.out("aclrtMalloc", 60 * MIB, 0)


@allowed()
def memory_is_not_cleared_and_no_more_aligned_than_promised(d: Driver) -> None:
    big, small = d.out("aclrtMalloc", 8 * MIB, 0), d.out("aclrtMalloc", 100, 0)
    equal((big % 64, small % 64), (0, 0))
    assert big % (2 * MIB)
    equal(d.read(small, 100), b"\xa5" * 100)
    equal(d.read(big, 100) + d.read(big + 8 * MIB - 100, 100), b"\xa5" * 200)


@mistake("A18")
def bad_free(d: Driver) -> None:
    device, host = d.out("aclrtMalloc", 4096, 0), d.out("aclrtMallocHost", 4096)
    equal(d.aclrtFree(None), 100000)
    equal([d.aclrtFree(device + 64), d.aclrtFree(77), d.aclrtFreeHost(host + 1)], [107000] * 3)
    d.do("aclrtFree", device)
    equal(d.aclrtFree(device), 107000)


@mistake("A19")
def free_by_the_wrong_function(d: Driver) -> None:
    equal([d.aclrtFree(d.out("aclrtMallocHost", 64)), d.aclrtFreeHost(d.out("aclrtMalloc", 64, 0))], [107000] * 2)


@allowed()
def free_on_a_thread_without_context(d: Driver) -> None:
    equal(in_thread(d.aclrtFree, d.out("aclrtMalloc", 64, 0)), 0)


@mistake("A20", **LAZY)
def free_what_a_task_uses(d: Driver) -> None:
    stream, device, host = d.stream(), on_device(d, b"good"), pinned(d, b"....")
    d.do("aclrtMemcpyAsync", host, 4, device, 4, DEVICE_TO_HOST, stream)
    d.do("aclrtFree", device)
    equal(d.sync(stream), 0)
    equal(ctypes.string_at(host, 4), b"\xdd" * 4)


@mistake("A20")
def free_what_is_registered(d: Driver) -> None:
    memory = d.out("aclrtMalloc", 64, 0)
    d.register(memory, 64)
    d.do("aclrtFree", memory)


# Copies.


@mistake("A21")
def copy_that_is_too_long(d: Driver) -> None:
    device, host = d.out("aclrtMalloc", 64, 0), pinned(d, bytes(64))
    found = [
        d.aclrtMemcpy(device, 8, host, 9, HOST_TO_DEVICE),
        d.aclrtMemcpy(device, 0, host, 9, HOST_TO_DEVICE),
        d.aclrtMemcpyAsync(device, 8, host, 9, HOST_TO_DEVICE, None),
        d.aclrtMemset(device, 8, 0, 9),
        d.aclrtMemcpy(None, 8, host, 8, HOST_TO_DEVICE),
    ]
    equal(found, [107000] * 4 + [100000])


@allowed()
def copy_of_nothing(d: Driver) -> None:
    equal([d.aclrtMemcpy(None, 0, None, 0, 9), d.aclrtMemset(None, 0, 0, 0), d.aclrtMemcpy(64, 8, 64, 8, 0)], [0] * 3)


@mistake("A22")
def copy_that_leaves_its_allocation(d: Driver) -> None:
    device, host = d.out("aclrtMalloc", 64, 0), pinned(d, bytes(256))
    found = [
        d.aclrtMemcpy(device, 256, host, 65, HOST_TO_DEVICE),
        d.aclrtMemcpy(host, 256, device + 60, 5, DEVICE_TO_HOST),
        d.aclrtMemcpy(host, 256, device - 1, 5, DEVICE_TO_HOST),
        d.aclrtMemset(device, 256, 0, 65),
    ]
    equal(found, [107000] * 4)


@mistake("A23")
def copy_of_the_wrong_kind(d: Driver) -> None:
    device, host = on_device(d, b"....."), pinned(d, b"bytes")
    equal(d.aclrtMemcpy(device, 5, host, 5, DEVICE_TO_DEVICE), 0)
    equal(d.read(device, 5), b"bytes")
    equal([d.aclrtMemcpy(device, 5, host, 5, kind) for kind in (6, 7, -1)], [100000] * 3)


@mistake("A24")
def asynchronous_copy_from_host_to_host(d: Driver) -> None:
    equal(d.aclrtMemcpyAsync(pinned(d, b"1"), 1, pinned(d, b"2"), 1, HOST_TO_HOST, None), 207000)


@mistake("A25", **LAZY)
def asynchronous_copy_of_pageable_memory(d: Driver) -> None:
    device, buffer = on_device(d, b"bytes"), create_string_buffer(5)
    d.do("aclrtMemcpyAsync", addressof(buffer), 5, device, 5, DEVICE_TO_HOST, d.stream())
    equal(buffer.raw, b"bytes")


@mistake("A26", **LAZY)
def source_changed_before_sync(d: Driver) -> None:
    stream, device, host = d.stream(), on_device(d, b"....."), pinned(d, b"bytes")
    d.do("aclrtMemcpyAsync", device, 5, host, 5, HOST_TO_DEVICE, stream)
    ctypes.memmove(host, b"other", 5)
    equal(d.sync(stream), 0)


@mistake("A20", "A26", **LAZY)
def source_freed_before_sync(d: Driver) -> None:
    stream, device, host = d.stream(), on_device(d, b"....."), pinned(d, b"bytes")
    d.do("aclrtMemcpyAsync", device, 5, host, 5, HOST_TO_DEVICE, stream)
    d.do("aclrtFreeHost", host)
    equal(d.sync(stream), 0)


@allowed(**LAZY)
def copies_are_late_and_in_order(d: Driver) -> None:
    stream, device, host = d.stream(), on_device(d, b"....."), pinned(d, b"bytes")
    back = pinned(d, b"-----")
    d.do("aclrtMemcpyAsync", device, 5, host, 5, HOST_TO_DEVICE, stream)
    d.do("aclrtMemcpyAsync", back, 5, device, 5, DEVICE_TO_HOST, stream)
    d.do("aclrtMemcpyAsync", device, 5, back, 5, HOST_TO_DEVICE, stream)
    # Another stream gets to its work many times meanwhile.
    other = d.stream()
    for _ in range(50):
        d.do("aclrtMemsetAsync", d.out("aclrtMalloc", 64, 0), 64, 0, 64, other)
        equal(d.sync(other), 0)
    equal((d.read(device, 5), ctypes.string_at(back, 5)), (b".....", b"-----"))
    equal(d.sync(stream), 0)
    equal((d.read(device, 5), ctypes.string_at(back, 5)), (b"bytes", b"bytes"))


@allowed(**LAZY)
def held_tasks_can_be_let_go(d: Driver) -> None:
    stream, device = d.stream(), on_device(d, b".")
    d.do("aclrtMemsetAsync", device, 1, 1, 1, stream)
    equal(d.fake_release_stream(stream), 0)
    status = c_int(1)
    while status.value:
        d.do("aclrtStreamQuery", stream, byref(status))
    equal(d.read(device, 1), b"\x01")


def batch(
    d: Driver, entries: list[tuple[int, int, int]], stream: int | None = None, **changes: object
) -> tuple[int, int]:
    """Give code and failing index of a batch copy from host to device, asynchronous if there is a stream."""
    count = len(entries)
    attribute = MemcpyBatchAttr(MemLocation(0, 1), MemLocation(0, 0))
    fail = c_size_t(12345)
    arguments = {
        "dsts": (c_void_p * count)(*(each[0] for each in entries)),
        "maxs": (c_size_t * count)(*(each[2] for each in entries)),
        "srcs": (c_void_p * count)(*(each[1] for each in entries)),
        "sizes": (c_size_t * count)(*(each[2] for each in entries)),
        "count": count,
        "attributes": (MemcpyBatchAttr * 1)(attribute),
        "first": (c_size_t * 1)(0),
        "attribute_count": 1,
        "fail": byref(fail),
    } | changes
    if stream:
        return d.aclrtMemcpyBatchAsync(*arguments.values(), stream), fail.value
    return d.aclrtMemcpyBatch(*arguments.values()), fail.value


@allowed()
def batch_copy(d: Driver) -> None:
    device, host = on_device(d, bytes(400)), pinned(d, bytes(range(200)) * 2)
    equal(batch(d, [(device + 4 * i, host + 4 * i, 4) for i in range(100)]), (0, 2**64 - 1))
    equal(d.read(device, 400), bytes(range(200)) * 2)


@allowed()
def batch_copy_in_any_order(d: Driver) -> None:
    device, host = on_device(d, b"."), pinned(d, b"12")
    found = set()
    for _ in range(64):
        equal(batch(d, [(device, host, 1), (device, host + 1, 1)])[0], 0)
        found.add(d.read(device, 1))
    equal(found, {b"1", b"2"})


@mistake("A25", **LAZY)
def asynchronous_batch_copy(d: Driver) -> None:
    stream, device, host = d.stream(), on_device(d, b"...."), pinned(d, b"1234")
    equal(batch(d, [(device, host, 2), (device + 2, host + 2, 2)], stream), (0, 2**64 - 1))
    equal(d.read(device, 4), b"....")
    equal((d.sync(stream), d.read(device, 4)), (0, b"1234"))
    equal(batch(d, [(device, host, 1), (device, addressof(create_string_buffer(1)), 1)], stream), (107000, 1))


@mistake("A27")
def bad_batch_copy(d: Driver) -> None:
    device, host = on_device(d, bytes(64)), pinned(d, bytes(64))
    good = [(device, host, 8), (device + 8, host + 8, 8)]
    reserved = MemcpyBatchAttr(MemLocation(0, 1), MemLocation(0, 0), (ctypes.c_uint8 * 16)(1))
    none = 2**64 - 1
    equal(batch(d, good, sizes=None)[0], 100000)
    equal(batch(d, good, fail=None)[0], 100000)
    equal(batch(d, good, count=0)[0], 100000)
    equal(batch(d, good, maxs=(c_size_t * 2)(8, 7)), (100000, none))
    equal(batch(d, good, attributes=(MemcpyBatchAttr * 1)(reserved)), (100000, none))
    equal(batch(d, good, first=(c_size_t * 1)(1)), (107000, none))
    equal(batch(d, [good[0], (host, host + 8, 8)]), (107000, 1))
    equal(batch(d, [good[0], (host, device, 8)]), (107000, 1))
    equal(batch(d, [(device, host, 1)] * 4097)[0], 100000)
    equal(len(d.violations()), 9)


@allowed(FAKE_ASCEND_FAULTS="aclrtMemcpyBatch:*:207000")
def batch_copy_that_is_not_supported(d: Driver) -> None:
    equal(batch(d, [(on_device(d, b"1"), pinned(d, b"2"), 1)])[0], 207000)


# Messages, faults.


@mistake("A16", "A29")
def message_read_on_another_thread(d: Driver) -> None:
    d.aclrtMalloc(None, 64, 0)
    equal(in_thread(d.aclGetRecentErrMsg), None)
    assert b"aclrtMalloc" in d.aclGetRecentErrMsg()
    equal(d.aclGetRecentErrMsg(), None)


@mistake("A16")
def message_used_after_the_next_call(d: Driver) -> None:
    d.aclrtMalloc(None, 64, 0)
    d.aclGetRecentErrMsg.restype = c_void_p
    address = d.aclGetRecentErrMsg()
    assert b"aclrtMalloc" in ctypes.string_at(address)
    d.out("aclrtMalloc", 64, 0)
    assert b"aclrtMalloc" not in ctypes.string_at(address)


@allowed(FAKE_ASCEND_FAULTS="aclrtMalloc:2:207001;aclrtMalloc:4:7")
def faults_by_number(d: Driver) -> None:
    out = c_void_p()
    equal([d.aclrtMalloc(byref(out), 64, 0) for _ in range(5)], [0, 207001, 0, 7, 0])
    d.fake_inject(b"aclrtMalloc:*:1;aclrtFree:100%:2")
    equal([d.aclrtMalloc(byref(out), 64, 0), d.aclrtFree(out)], [1, 2])
    d.fake_reset()
    d.do("aclrtFree", out)


@allowed(FAKE_ASCEND_DELAYS="aclrtGetVersion:30")
def delays(d: Driver) -> None:
    start, numbers = time.monotonic(), [c_int32() for _ in range(3)]
    d.fake_delay(b"aclrtGetVersion:20")
    d.do("aclrtGetVersion", *map(byref, numbers))
    assert time.monotonic() - start >= 0.05
    equal([number.value for number in numbers], [1, 16, 0])


@allowed(FAKE_ASCEND_SOC="")
def no_soc_name(d: Driver) -> None:
    equal(d.aclrtGetSocName(), None)


@allowed(FAKE_ASCEND_SOC="Ascend910_9391")
def super_pod(d: Driver) -> None:
    value = ctypes.c_int64()
    found = []
    for attribute in (403, 405):
        d.do("aclrtGetDeviceInfo", 2, attribute, byref(value))
        found.append(value.value)
    equal(found, [102, 7])


@allowed()
def pointers_and_their_allocations(d: Driver) -> None:
    d.do("aclrtSetDevice", 2)
    device, host, base, size = d.out("aclrtMalloc", 100, 0), pinned(d, b"1"), c_void_p(), c_size_t()
    d.do("aclrtMemGetAddressRange", device + 5, byref(base), byref(size))
    equal((base.value, size.value), (device, 100))
    found = []
    for address in (device, host, addressof(create_string_buffer(1))):
        attributes = PtrAttributes()
        d.do("aclrtPointerGetAttributes", address, byref(attributes))
        found.append((attributes.location.type, attributes.location.id))
    equal(found, [(1, 2), (0, 0), (2, 0)])


@allowed(fresh=True)
def structures_have_the_layout_that_c_has(d: Driver) -> None:
    structures = {
        "CommMem": driver.CommMem,
        "HcclOneSideOpDesc": driver.OneSideOpDesc,
        "HcclPrepareConfig": driver.PrepareConfig,
        "HcclMemDescs": driver.MemDescs,
        "aclrtMemLocation": driver.MemLocation,
        "aclrtMemcpyBatchAttr": driver.MemcpyBatchAttr,
        "aclrtPtrAttributes": driver.PtrAttributes,
    }
    for name, structure in structures.items():
        equal((name, d.fake_layout(name.encode())), (name, ctypes.sizeof(structure)))
    for name, structure in {**structures, "HcclCommConfig": driver.CommConfig}.items():
        for field, _ in structure._fields_:
            offset = getattr(structure, field).offset
            equal((name, field, d.fake_layout(f"{name}.{field}".encode())), (name, field, offset))
