"""What peers say about their memory is not trusted."""

from __future__ import annotations

import copy
import ctypes
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llm_datadist.backend import BackendError, Endpoint, Export, Failure, MemoryKind, Pair
from llm_datadist.backends.simulator import exports
from llm_datadist.backends.simulator.backend import SimulatorBackend

PAGE = os.sysconf("SC_PAGESIZE")


class Link:
    """Two backends of this process; `connect` closes the descriptors that it is given, so it gets duplicates."""

    def __init__(self, make_backend: Callable[..., SimulatorBackend], control: socket.socket) -> None:
        self.backend = make_backend()
        owner = make_backend()
        owner.make_windows(PAGE, 3 * PAGE)
        self.regions = [owner.reserve(3, 5000, MemoryKind.DEVICE), owner.reserve(0, 1 << 21, MemoryKind.HOST)]
        self.export = owner.export()
        self.good = json.loads(self.export.data)
        self.pair = Pair(control, os.getpid(), -1, "test link", True)

    def connect(self, data: bytes, fds: list[int]) -> Endpoint:
        duplicates = tuple(os.dup(fd) for fd in fds)
        try:
            return self.backend.connect(Export(data, duplicates), self.pair, time.monotonic_ns() + 10**10)
        finally:
            for fd in duplicates:
                with pytest.raises(OSError, match="Bad file"):
                    os.fstat(fd)

    def refused(self, data: bytes, fds: list[int]) -> str:
        with pytest.raises(BackendError) as caught:
            self.connect(data, fds)
        assert caught.value.kind is Failure.LINK_FAILED
        assert len(caught.value.text) < 400
        return caught.value.text


@pytest.fixture
def link(make_backend: Callable[..., SimulatorBackend]) -> Iterator[Link]:
    ours, theirs = socket.socketpair()
    yield Link(make_backend, ours)
    ours.close()
    theirs.close()


def test_good_export_connects_and_stays_the_owners(link: Link) -> None:
    endpoint = link.connect(link.export.data, list(link.export.fds))
    assert [window.nbytes for window in endpoint.windows or ()] == [PAGE, 3 * PAGE]
    base = endpoint.locate(0, 0, 5000).base
    ctypes.c_uint8.from_address(link.regions[0].address + 4999).value = 9
    assert ctypes.c_uint8.from_address(base + 4999).value == 9
    endpoint.close()


def test_control_that_is_closed_already_is_a_peer_that_is_gone(link: Link) -> None:
    link.pair.control.close()
    with pytest.raises(BackendError) as caught:
        link.connect(link.export.data, list(link.export.fds))
    assert caught.value.kind is Failure.PEER_GONE


def test_export_is_small_even_with_all_pools(make_backend: Callable[..., SimulatorBackend]) -> None:
    backend = make_backend()
    backend.make_windows(PAGE, PAGE)
    for _ in range(exports.MAX_POOLS):
        backend.reserve(2**31 - 1, PAGE, MemoryKind.DEVICE)
    export = backend.export()
    assert len(export.data) < 32 << 10
    assert len(exports.decode(export.data, len(export.fds)).pools) == exports.MAX_POOLS
    with pytest.raises(BackendError, match=f"{exports.MAX_POOLS} pools"):
        backend.reserve(0, PAGE, MemoryKind.DEVICE)


def changed(good: dict[str, Any], path: tuple[Any, ...], value: object) -> bytes:
    data = copy.deepcopy(good)
    place: Any = data
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return json.dumps(data).encode()


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("version",), 2, "version 2"),
        (("version",), True, "version True"),
        (("version",), "9" * 20_000, "9; this side"),
        (("directory",), 0, "directory = 0"),
        (("directory",), PAGE + 1, "directory is announced"),
        (("board",), "4096", "board = '4096'"),
        (("board",), 1 << 60, "board ="),
        (("nonce",), 1 << 64, "nonce = 1844"),
        (("nonce_address",), -1, "nonce_address = -1"),
        (("pools",), {}, "list of at most"),
        (("pools",), [7, 7], "pools[0] of type int"),
        (("pools",), [], "needs 2 descriptors, but 4"),
        (("extra",), 1, "extra"),
        (("pools", 1, "id"), 0, "same id"),
        (("pools", 1, "id"), True, "pools[1].id = True"),
        (("pools", 0, "kind"), 2, "pools[0].kind = 2"),
        (("pools", 0, "nbytes"), 2 * PAGE + 1, "pool 0 is announced"),
        (("pools", 0, "nbytes"), -1, "pools[0].nbytes = -1"),
        (("pools", 0, "nbytes"), 5e3, "pools[0].nbytes = 5000.0"),
        (("pools", 0, "device"), None, "pools[0].device = None"),
        (("pools", 0, "more"), 1, "pools[0] with keys"),
    ],
)
def test_wrong_field_is_named(link: Link, path: tuple[Any, ...], value: object, named: str) -> None:
    assert named in link.refused(changed(link.good, path, value), list(link.export.fds))


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff\xfe", b"null", b"[]", b"{}", b"[" * 20_000, b'{"version":' + b"9" * 5000 + b"}", b" " * 40_000],
    ids=lambda data: repr(data[:12]),
)
def test_garbage_is_refused(link: Link, data: bytes) -> None:
    assert "The peer's export" in link.refused(data, list(link.export.fds))


@given(st.binary(max_size=200))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(BackendError) as caught:
        exports.decode(data, 2)
    assert caught.value.kind is Failure.LINK_FAILED


@pytest.mark.parametrize("count", [0, 1, 3, 5])
def test_number_of_descriptors_must_fit(link: Link, count: int) -> None:
    fds = [*link.export.fds, link.export.fds[0]][:count]
    assert f"needs 4 descriptors, but {count} came" in link.refused(link.export.data, fds)


def sealed(nbytes: int, seals: int) -> int:
    fd = os.memfd_create("hostile", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def pipe() -> int:
    reader, writer = os.pipe()
    os.close(writer)
    return reader


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (pipe, "not a memory file"),
        (lambda: os.open(__file__, os.O_RDONLY), "not a memory file"),
        (lambda: sealed(2 * PAGE, 0), "not sealed against shrinking"),
        (lambda: sealed(2 * PAGE, fcntl.F_SEAL_GROW), "not sealed against shrinking"),
        (lambda: sealed(PAGE, fcntl.F_SEAL_SHRINK), f"but it has {PAGE}"),
        (lambda: sealed(3 * PAGE, fcntl.F_SEAL_SHRINK), f"but it has {3 * PAGE}"),
        (lambda: sealed(2 * PAGE, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE), "sealed against writing"),
    ],
)
def test_hostile_descriptor_is_refused_before_it_is_used(link: Link, make: Callable[[], int], named: str) -> None:
    fds = list(link.export.fds)
    fds[2] = make()
    try:
        text = link.refused(link.export.data, fds)
    finally:
        os.close(fds[2])
    assert "pool 0" in text
    assert named in text


def test_own_segments_cannot_shrink_grow_or_be_written_through_the_directory(link: Link) -> None:
    for fd in link.export.fds:
        for nbytes in (0, 1 << 30):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, nbytes)
    with pytest.raises(PermissionError):
        os.pwrite(link.export.fds[0], b"x", 0)
