"""Memory of Ascend devices, reached through the driver and not through the backend under test.

The driver remembers a device for each thread. The caller's stays: where there is none a step runs on another thread.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable
from typing import TypeVar

from llm_datadist import Placement
from llm_datadist.backends.acl.structures import AclrtPtrAttributes, LocationType

ALIGNMENT = 2 << 20
HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2
REPEATED = 100002  # aclInit, by whoever
T = TypeVar("T")
_taken: list[Callable[[], None]] = []


def _call(name: str, *arguments: object, allowed: int = 0) -> None:
    code = getattr(_library(), name)(*arguments)
    assert code in (0, allowed), f"{name} gave {code}"


@functools.cache
def _library() -> ctypes.CDLL:
    if given := os.environ.get("LLM_DATADIST_ACL_LIBRARY"):
        return ctypes.CDLL(given)
    try:
        return ctypes.CDLL("libacl_rt.so")
    except OSError:
        return ctypes.CDLL("libascendcl.so")


def _apart(step: Callable[[], T]) -> T:
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(step()))
    thread.start()
    thread.join()
    assert results, "the driver refused a test's own step, see the thread's traceback"
    return results[0]


def _copy(address: int, nbytes: int, kind: int, buffer: ctypes.Array[ctypes.c_char]) -> None:
    source, destination = address, ctypes.addressof(buffer)
    if kind == HOST_TO_DEVICE:
        source, destination = destination, source
    where = AclrtPtrAttributes()
    _call("aclrtPointerGetAttributes", ctypes.c_void_p(address), ctypes.byref(where))
    if where.location.type != LocationType.DEVICE:
        ctypes.memmove(destination, source, nbytes)
        return
    _call("aclrtSetDevice", ctypes.c_int32(where.location.id))
    size = ctypes.c_size_t(nbytes)
    _call("aclrtMemcpy", ctypes.c_void_p(destination), size, ctypes.c_void_p(source), size, kind)
    _call("aclrtResetDevice", ctypes.c_int32(where.location.id))


def _keeping_device(step: Callable[[], None]) -> None:
    before = ctypes.c_void_p()
    if _library().aclrtGetCurrentContext(ctypes.byref(before)):
        _apart(step)
        return
    try:
        step()
    finally:
        _call("aclrtSetCurrentContext", before)


def write(address: int, data: bytes) -> None:
    """Put bytes at an address of this process, of device or host."""
    buffer = ctypes.create_string_buffer(data, len(data))
    _keeping_device(lambda: _copy(address, len(data), HOST_TO_DEVICE, buffer))


def read(address: int, nbytes: int) -> bytes:
    """Give the bytes at an address of this process, of device or host."""
    buffer = ctypes.create_string_buffer(nbytes)
    _keeping_device(lambda: _copy(address, nbytes, DEVICE_TO_HOST, buffer))
    return buffer.raw


def take(nbytes: int, placement: Placement) -> int:
    """Give the address of fresh zeros, in device 0 or in pinned memory of the host, until `give_back`."""
    return _apart(lambda: _take(nbytes, placement))


def _take(nbytes: int, placement: Placement) -> int:
    _call("aclInit", None, allowed=REPEATED)
    _call("aclrtSetDevice", 0)
    pointer, size = ctypes.c_void_p(), ctypes.c_size_t(nbytes + ALIGNMENT)
    if placement is Placement.DEVICE:
        _call("aclrtMalloc", ctypes.byref(pointer), size, 0)
    else:
        _call("aclrtMallocHost", ctypes.byref(pointer), size)
    assert pointer.value is not None
    address = -(-pointer.value // ALIGNMENT) * ALIGNMENT
    if placement is Placement.DEVICE:
        _call("aclrtMemset", ctypes.c_void_p(address), ctypes.c_size_t(nbytes), 0, ctypes.c_size_t(nbytes))
    else:
        ctypes.memset(address, 0, nbytes)

    def free() -> None:
        _call("aclrtSetDevice", 0)
        _call("aclrtFree" if placement is Placement.DEVICE else "aclrtFreeHost", pointer)
        # Once for this step, and once for the memory, which held the device.
        _call("aclrtResetDevice", 0)
        _call("aclrtResetDevice", 0)
        _call("aclFinalizeReference", None)

    _taken.append(free)
    return address


def give_back() -> None:
    """Let all of it go."""
    while _taken:
        _apart(_taken.pop())
