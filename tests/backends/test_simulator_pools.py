"""Reserving, backing, keeping and giving back pool memory."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llm_datadist.backend import BackendError, Failure, MemoryKind, Region
from llm_datadist.backends.simulator import segments
from llm_datadist.backends.simulator.backend import SimulatorBackend
from llm_datadist.backends.simulator.limits import Room

MIB = 1 << 20
PAGE = segments.PAGE
PLENTY = Room(1 << 40, "plenty")

MakeBackend = Callable[..., SimulatorBackend]


def reserve(backend: SimulatorBackend, nbytes: int | None = 64 * MIB) -> Region:
    return backend.reserve(0, nbytes, MemoryKind.DEVICE)


def backed(backend: SimulatorBackend) -> int:
    """Ask the kernel how many bytes of all segments are backed with memory."""
    return sum(os.fstat(fd).st_blocks for fd in backend.descriptors()) * 512


def test_pool_is_aligned_sparse_and_as_large_as_asked(make_backend: MakeBackend) -> None:
    backend = make_backend()
    region = reserve(backend, 10_000)
    assert (region.nbytes, region.address % (2 * MIB), backed(backend)) == (10_000, 0, 0)
    backend.commit(region, 0, 10_000)
    assert backed(backend) == -(-10_000 // PAGE) * PAGE


def test_pool_without_a_size_takes_the_address_space(make_backend: MakeBackend) -> None:
    assert reserve(make_backend(), None).nbytes == 64 << 30
    assert reserve(make_backend(AddressSpace=6 * MIB), None).nbytes == 6 * MIB


def test_commit_backs_only_what_is_missing(make_backend: MakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = make_backend()
    region = reserve(backend)
    backend.commit(region, PAGE, 512)
    backend.commit(region, 3 * PAGE, PAGE)
    calls = []
    allocate = os.posix_fallocate
    monkeypatch.setattr(os, "posix_fallocate", lambda fd, at, size: (calls.append((at, size)), allocate(fd, at, size)))
    backend.commit(region, 0, 5 * PAGE)
    assert calls == [(0, PAGE), (2 * PAGE, PAGE), (4 * PAGE, PAGE)]


@pytest.mark.parametrize(
    ("begin", "end"), [(0, 4 * MIB), (3 * MIB, 9 * MIB), (2 * MIB + 512, 4 * MIB), (PAGE, 8 * MIB + 1)]
)
def test_memory_is_there_and_zero_on_pages_of_any_size(make_backend: MakeBackend, begin: int, end: int) -> None:
    """What is backed is what was asked for, to the page, whether the kernel has huge pages for it or not."""
    backend = make_backend()
    region = reserve(backend)
    backend.commit(region, begin, end - begin)
    pages = -(-end // PAGE) - begin // PAGE
    assert backed(backend) == pages * PAGE
    assert not any(ctypes.string_at(region.address + begin, end - begin))
    ctypes.memset(region.address + begin, 0x5A, end - begin)
    backend.commit(region, end, 4 * MIB)
    assert ctypes.string_at(region.address + begin, end - begin) == b"\x5a" * (end - begin)
    assert not any(ctypes.string_at(region.address + end, 4 * MIB))


@pytest.mark.parametrize("step", ["_pwrite", "posix_fallocate"])
def test_backing_that_fails_half_way_leaves_a_hole(
    make_backend: MakeBackend, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    backend = make_backend()
    region = reserve(backend)
    backend.commit(region, 0, PAGE)
    calls = []

    def fail(*arguments: Any) -> int:
        calls.append(arguments)
        if step == "posix_fallocate":
            raise OSError(28, "no space")
        ctypes.set_errno(28)
        return segments_pwrite(*arguments) if len(calls) < 3 else -1

    segments_pwrite = segments._pwrite
    with monkeypatch.context() as patch:
        patch.setattr(segments if step == "_pwrite" else os, step, fail)
        with pytest.raises(BackendError) as caught:
            backend.commit(region, PAGE, 16 * MIB)
    assert caught.value.kind is Failure.OUT_OF_MEMORY
    assert calls
    assert backed(backend) == PAGE
    backend.commit(region, PAGE, 16 * MIB)
    assert not any(ctypes.string_at(region.address + PAGE, 16 * MIB))


def huge_bytes(address: int, nbytes: int) -> int:
    """Give the bytes of a mapping that huge pages map."""
    inside, found = False, 0
    with open("/proc/self/smaps") as lines:
        for line in lines:
            word = line.split()[0]
            if "-" in word and not word.endswith(":"):
                begin, end = (int(part, 16) for part in word.split("-"))
                inside = begin < address + nbytes and address < end
            elif inside and word == "ShmemPmdMapped:":
                found += int(line.split()[1]) << 10
    return found


def test_large_memory_is_mapped_by_huge_pages_at_once(make_backend: MakeBackend) -> None:
    """Pages of 4 KiB would cost whoever touches them first, here and in each peer, a fault for each."""
    backend = make_backend()
    region = reserve(backend)
    backend.commit(region, PAGE, 20 * MIB)
    kernel = tuple(map(int, os.uname().release.split("-")[0].split(".")[:2]))
    huge = huge_bytes(region.address, region.nbytes)
    if not huge and kernel < (6, 1):
        pytest.skip("this kernel gives shared memory huge pages only where it is told to")
    # Memory in pieces may leave some out.
    assert huge >= 10 * MIB


def test_an_interrupt_while_memory_is_backed_leaves_a_hole(
    make_backend: MakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make_backend()
    region = reserve(backend)
    madvise = segments._libc.madvise

    def interrupted(*arguments: Any) -> int:
        madvise(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(segments._libc, "madvise", interrupted)
        for nbytes in (PAGE, 16 * MIB):
            with pytest.raises(KeyboardInterrupt):
                backend.commit(region, 0, nbytes)
            assert backed(backend) == 0
    backend.commit(region, 0, 16 * MIB)
    assert backed(backend) == 16 * MIB


def test_steady_request_loop_asks_the_kernel_for_nothing(
    make_backend: MakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []
    backend = make_backend(room=lambda: looks.append(1) or PLENTY)
    region = reserve(backend)
    backend.commit(region, 512, 32 * MIB)
    first_looks = len(looks)
    for name in ("allocate", "punch"):
        monkeypatch.setattr(segments.Segment, name, lambda *_: pytest.fail("a system call"))
    for _ in range(3):
        backend.discard(region, 512, 32 * MIB)
        backend.commit(region, 512, 32 * MIB)
    assert len(looks) == first_looks


def test_kept_memory_is_bounded_and_counts_right_when_used_again(make_backend: MakeBackend) -> None:
    backend = make_backend(KeepFree=4 * MIB)
    region = reserve(backend)
    for _ in range(3):
        backend.commit(region, 0, 3 * MIB)
        backend.discard(region, 0, 3 * MIB)
        assert backed(backend) == 3 * MIB
    backend.commit(region, 3 * MIB, 3 * MIB)
    backend.discard(region, 3 * MIB, 3 * MIB)
    assert backed(backend) == 4 * MIB
    backend.commit(region, 0, 6 * MIB)
    assert backed(backend) == 6 * MIB
    backend.discard(region, 0, 6 * MIB)
    assert backed(backend) == 4 * MIB


def test_kept_memory_of_all_pools_is_counted_together(make_backend: MakeBackend) -> None:
    backend = make_backend(KeepFree=4 * MIB)
    first, second = reserve(backend), reserve(backend)
    for region in (first, second):
        backend.commit(region, 0, 4 * MIB)
        backend.discard(region, 0, 4 * MIB)
    assert [os.fstat(fd).st_blocks * 512 for fd in backend.descriptors()] == [4 * MIB, 0]


def test_shortage_is_an_error_with_the_numbers_and_leaves_the_range_as_it_was(make_backend: MakeBackend) -> None:
    backend = make_backend(room=lambda: Room(3 * MIB, "the limit of this test"), KeepFree=0)
    region = reserve(backend)
    backend.commit(region, 0, MIB)
    with pytest.raises(BackendError, match=rf"{4 * MIB} bytes .* {3 * MIB} bytes .* the limit of this test") as caught:
        backend.commit(region, MIB // 2, 4 * MIB + MIB // 2)
    assert caught.value.kind is Failure.OUT_OF_MEMORY
    assert backed(backend) == MIB
    backend.discard(region, 0, MIB)
    assert backed(backend) == 0


def test_kept_memory_is_given_back_before_anything_is_refused(make_backend: MakeBackend) -> None:
    fds: tuple[int, ...] = ()
    backend = make_backend(room=lambda: Room(8 * MIB - sum(os.fstat(fd).st_blocks for fd in fds) * 512, "a budget"))
    region = reserve(backend)
    fds = backend.descriptors()
    backend.commit(region, 0, 6 * MIB)
    backend.discard(region, 0, 6 * MIB)
    # The first two MiB are kept and used again, the other four must go.
    backend.commit(region, 4 * MIB, 8 * MIB)
    assert backed(backend) == 8 * MIB
    with pytest.raises(BackendError, match="a budget"):
        backend.commit(region, 0, PAGE)


@pytest.mark.parametrize("failures", [1, 2])
def test_kernel_out_of_memory_gets_a_second_try(
    make_backend: MakeBackend, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    backend = make_backend()
    region = reserve(backend)
    backend.commit(region, 0, MIB)
    backend.discard(region, 0, MIB)
    allocate, left = segments.Segment.allocate, [28] * failures

    def fail(self: segments.Segment, offset: int, nbytes: int) -> None:
        if left:
            raise OSError(left.pop(), "No space left on device")
        allocate(self, offset, nbytes)

    monkeypatch.setattr(segments.Segment, "allocate", fail)
    if failures == 1:
        backend.commit(region, 8 * MIB, MIB)
        assert backed(backend) == MIB
    else:
        with pytest.raises(BackendError, match="No space left") as caught:
            backend.commit(region, 8 * MIB, MIB)
        assert (caught.value.kind, caught.value.native_code) == (Failure.OUT_OF_MEMORY, 28)
        assert backed(backend) == 0


def test_interrupted_commit_keeps_the_books_right(make_backend: MakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = make_backend(KeepFree=0)
    region = reserve(backend, 256 * MIB)
    allocate = segments.Segment.allocate

    def interrupt(self: segments.Segment, offset: int, nbytes: int) -> None:
        if offset:
            raise KeyboardInterrupt
        allocate(self, offset, nbytes)

    with monkeypatch.context() as patch:
        patch.setattr(segments.Segment, "allocate", interrupt)
        with pytest.raises(KeyboardInterrupt):
            backend.commit(region, 0, 96 * MIB)
    assert backed(backend) == 0
    backend.commit(region, 0, 96 * MIB)
    backend.discard(region, 0, 96 * MIB)
    assert backed(backend) == 0


def test_holder_keeps_memory_past_close(make_backend: MakeBackend, mappings: Callable[[], list[str]]) -> None:
    backend = make_backend()
    region = reserve(backend)
    backend.commit(region, 0, 100)
    ctypes.memset(region.address, 7, 100)
    before = len(mappings())
    holders = [backend.hold(region), backend.hold(region)]
    backend.close()
    assert len(mappings()) == before
    del holders[0]
    assert ctypes.string_at(region.address, 100) == b"\x07" * 100
    thread = threading.Thread(target=holders.clear)
    thread.start()
    thread.join(10)
    gc.collect()
    assert len(mappings()) == before - 1


def test_close_is_final_and_idempotent(make_backend: MakeBackend) -> None:
    backend = make_backend()
    backend.make_windows(PAGE, PAGE)
    region = reserve(backend)
    backend.close()
    backend.close()
    assert backend.descriptors() == ()
    calls: list[Callable[[], Any]] = [
        lambda: reserve(backend),
        lambda: backend.commit(region, 0, 1),
        lambda: backend.discard(region, 0, 1),
        lambda: backend.hold(region),
        lambda: backend.make_windows(1, 1),
        backend.export,
    ]
    for call in calls:
        with pytest.raises(BackendError, match="closed") as caught:
            call()
        assert caught.value.kind is Failure.UNAVAILABLE


def test_never_opened_backend_closes() -> None:
    backend = SimulatorBackend()
    backend.close()
    assert backend.descriptors() == ()


def test_other_systems_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(BackendError, match=r"Linux only.*darwin") as caught:
        SimulatorBackend().open([0], {})
    assert caught.value.kind is Failure.UNAVAILABLE


LIMITED = """
import resource
from pathlib import Path
from llm_datadist.backend import BackendError, Failure, MemoryKind
from llm_datadist.backends.simulator.backend import SimulatorBackend

used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (3 << 30),) * 2)
backend = SimulatorBackend()
backend.open([0], {})
region = backend.reserve(0, None, MemoryKind.DEVICE)
backend.commit(region, region.nbytes - 1, 1)
assert region.nbytes == 1 << 30, region
left = bytearray(1 << 30)
try:
    backend.reserve(0, 4 << 30, MemoryKind.HOST)
except BackendError as error:
    assert error.kind is Failure.OUT_OF_MEMORY and "ulimit -v" in error.text, error.text
else:
    raise SystemExit("a reservation above the limit went through")
backend.close()
"""


def test_reservation_is_halved_under_an_address_limit() -> None:
    # 64 GiB down to 2 GiB, which fits, and once more, so that 3 GiB leave room for other things.
    subprocess.run([sys.executable, "-c", LIMITED], check=True, timeout=60)


FORKED = """
import ctypes, os, socket
from llm_datadist.backend import Export, MemoryKind, Pair
from llm_datadist.backends.simulator.backend import SimulatorBackend

backend = SimulatorBackend()
backend.open([0], {})
backend.make_windows(4096, 4096)
region = backend.reserve(0, 1 << 21, MemoryKind.DEVICE)
backend.commit(region, 0, 4096)
holder = backend.hold(region)
control, other = socket.socketpair()
export = backend.export()
pair = Pair(control, os.getpid(), -1, "test link", True)
endpoint = backend.connect(Export(export.data, tuple(map(os.dup, export.fds))), pair, 0)
address = endpoint.locate(0, 0, 1).base
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
child = os.fork()
if child == 0:
    for fd in backend.descriptors():
        os.close(fd)
    # Peers' memory is not inherited; what the child puts in its place is not the endpoint's to unmap.
    fixed_anonymous = 0x100022
    assert libc.mmap(ctypes.c_void_p(address), 4096, 3, fixed_anonymous, -1, 0) == address
    endpoint.close()
    ctypes.memset(address, 1, 4096)
    names = [os.readlink(f"/proc/self/fd/{fd}") for fd in range(3, 64) if os.path.exists(f"/proc/self/fd/{fd}")]
    del backend, holder
    os._exit(any("memfd:llm_datadist" in name for name in names))
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert ctypes.string_at(address, 4096) == bytes(4096)
ctypes.memset(region.address, 1, 4096)
endpoint.close()
control.close()
other.close()
backend.close()
"""


def test_forked_child_can_let_go_of_everything() -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", FORKED], check=True, timeout=60)


class Punching(RuleBasedStateMachine):
    """Live ranges keep their bytes, and what the kernel has backed is just what the books say."""

    PAGES = 24

    def __init__(self) -> None:
        super().__init__()
        self.backend = SimulatorBackend(lambda: PLENTY)
        self.backend.open([0], {"llm.Simulator.KeepFree": str(5 * PAGE)})
        self.region = reserve(self.backend, self.PAGES * PAGE)
        self.live: dict[tuple[int, int], int] = {}
        self.stamp = 0

    @rule(unit=st.integers(0, PAGES * PAGE // 512 - 1), units=st.integers(1, 40))
    def commit(self, unit: int, units: int) -> None:
        begin, end = unit * 512, min((unit + units) * 512, self.region.nbytes)
        if any(begin < other_end and other < end for other, other_end in self.live):
            return
        self.backend.commit(self.region, begin, end - begin)
        self.stamp = self.stamp % 255 + 1
        ctypes.memset(self.region.address + begin, self.stamp, end - begin)
        self.live[begin, end] = self.stamp

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        begin, end = data.draw(st.sampled_from(sorted(self.live)))
        del self.live[begin, end]
        self.backend.discard(self.region, begin, end - begin)

    @invariant()
    def live_bytes_are_untouched(self) -> None:
        for (begin, end), stamp in self.live.items():
            assert ctypes.string_at(self.region.address + begin, end - begin) == bytes([stamp]) * (end - begin)

    @invariant()
    def backed_pages_are_live_or_kept(self) -> None:
        live = {page for begin, end in self.live for page in range(begin // PAGE, -(-end // PAGE))}
        kept = backed(self.backend) // PAGE - len(live)
        assert 0 <= kept <= 5

    def teardown(self) -> None:
        self.backend.close()


TestPunching = Punching.TestCase
TestPunching.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
