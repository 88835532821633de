"""Shared memory segments: anonymous files, sealed, and mapped on a huge page boundary."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import stat
import weakref
from typing import Final

from llm_datadist.backend import BackendError, Failure

__all__ = [
    "HUGE_PAGE",
    "MAX_SEGMENT_BYTES",
    "PAGE",
    "READ_BY_PEERS",
    "SHARED",
    "Mapping",
    "Segment",
    "map_peer",
    "round_up",
]

PAGE: Final = mmap.PAGESIZE
HUGE_PAGE: Final = 2 << 20
#: No file of a sane peer is larger; it also keeps all address arithmetic inside 64 bits.
MAX_SEGMENT_BYTES: Final = 1 << 46

# Linux numbers that the standard library does not name on every platform and version we support.
MFD_CLOEXEC: Final = 0x1
MFD_ALLOW_SEALING: Final = 0x2
MFD_NOEXEC_SEAL: Final = 0x8
F_ADD_SEALS: Final = 1033
F_GET_SEALS: Final = 1034
F_SEAL_SEAL: Final = 0x1
F_SEAL_SHRINK: Final = 0x2
F_SEAL_GROW: Final = 0x4
F_SEAL_WRITE: Final = 0x8
F_SEAL_FUTURE_WRITE: Final = 0x10
MAP_FIXED: Final = 0x10
MAP_NORESERVE: Final = 0x4000
MADV_DONTFORK: Final = 10
MADV_POPULATE_WRITE: Final = 23
MADV_COLLAPSE: Final = 25
TMPFS_MAGIC: Final = 0x01021994
FALLOC_FL_KEEP_SIZE: Final = 0x1
FALLOC_FL_PUNCH_HOLE: Final = 0x2
MAP_FAILED: Final = ctypes.c_void_p(-1).value

#: The size is fixed for good: a mapping of it can never fault past its end.
SHARED: Final = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL
#: As `SHARED`, and only the mapping that the owner has already can write.
READ_BY_PEERS: Final = SHARED | F_SEAL_FUTURE_WRITE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
# Of a page each (of a huge one where all shared memory has them), so with the GIL kept: a busy thread would not give it
# back for 5 ms after each.
_pwrite = ctypes.PyDLL(None, use_errno=True).pwrite
_pwrite.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_long]
_pwrite.restype = ctypes.c_ssize_t


def round_up(nbytes: int, unit: int = PAGE) -> int:
    """Round up to a multiple of a unit."""
    return -(-nbytes // unit) * unit


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def _mmap(address: int | None, nbytes: int, protection: int, flags: int, fd: int) -> int:
    result = _libc.mmap(address, nbytes, protection, flags, fd, 0)
    if result == MAP_FAILED:
        raise _last_error()
    return int(result)


def _unmap(address: int, nbytes: int, pid: int) -> None:
    # In a forked child these addresses may belong to something else: peers' mappings are not inherited.
    if os.getpid() == pid:
        _libc.munmap(address, nbytes)


def _file_system(fd: int) -> int:
    """Give the magic number of a file's file system: one of huge pages raises a signal when none is free."""
    buffer = (ctypes.c_long * 32)()
    if _libc.fstatfs(fd, buffer):
        raise _last_error()
    return int(buffer[0])


class Mapping:
    """Mapped memory. It goes away with `unmap`, or with the last reference to the object."""

    def __init__(self, fd: int, nbytes: int, protection: int) -> None:
        # Reserve too much, put the file on the first boundary in it, and give the ends back.
        span = nbytes + HUGE_PAGE
        base = _mmap(None, span, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE, -1)
        self.address = round_up(base, HUGE_PAGE)
        self.nbytes = nbytes
        try:
            _mmap(self.address, nbytes, protection, mmap.MAP_SHARED | MAP_FIXED | MAP_NORESERVE, fd)
        except OSError:
            _libc.munmap(base, span)
            raise
        end = self.address + nbytes
        for address, excess in ((base, self.address - base), (end, base + span - end)):
            if excess:
                _libc.munmap(address, excess)
        self.unmap = weakref.finalize(self, _unmap, self.address, nbytes, os.getpid())
        self.unmap.atexit = False


class Segment:
    """A segment of our own: sparse, all zeros, and not in any file system."""

    def __init__(self, name: str, nbytes: int, seals: int) -> None:
        self.nbytes = round_up(nbytes)
        self.fd = _memory_file(f"llm_datadist:{name}")
        try:
            os.ftruncate(self.fd, self.nbytes)
            self.mapping: Mapping = Mapping(self.fd, self.nbytes, mmap.PROT_READ | mmap.PROT_WRITE)
            fcntl.fcntl(self.fd, F_ADD_SEALS, seals)
        except OSError:
            os.close(self.fd)
            raise

    def allocate(self, offset: int, nbytes: int) -> None:
        """Back a hole with memory, all of it or (raising OSError) nothing."""
        try:
            self._collapse(round_up(offset, HUGE_PAGE), (offset + nbytes) // HUGE_PAGE * HUGE_PAGE)
            os.posix_fallocate(self.fd, offset, nbytes)
            # This only spares the first user the page faults. Before Linux 5.14 they are not spared.
            _libc.madvise(self.mapping.address + offset, nbytes, MADV_POPULATE_WRITE)
        except BaseException:
            self.punch(offset, nbytes)
            raise

    def _collapse(self, begin: int, end: int) -> None:
        """Back huge pages, as far as the kernel has them.

        Only on demand would the kernel use them for shared memory, and it refuses a huge page in which there is no
        memory at all. So each gets its first byte. Backed and faulted in this way memory costs a fifth, and a peer that
        maps it has one page fault for 2 MiB, not 512.
        """
        for offset in range(begin, end, HUGE_PAGE):
            if _pwrite(self.fd, b"\0", 1, offset) != 1:
                raise _last_error()
        if begin < end:
            # Refused before Linux 6.1 or where memory is in pieces: then small pages do.
            _libc.madvise(self.mapping.address + begin, end - begin, MADV_COLLAPSE)

    def punch(self, offset: int, nbytes: int) -> None:
        """Give the memory of a range back; it reads as zeros from now on."""
        if _libc.fallocate(self.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, nbytes):
            error = _last_error()
            raise BackendError(
                Failure.FAILED, f"Memory of a pool could not be given back: {error.strerror}.", error.errno or 0
            )

    def let_go(self) -> bool:
        """Forget the mapping; say whether someone else still holds it."""
        mapping = weakref.ref(self.mapping)
        del self.mapping
        return mapping() is not None

    def close(self) -> None:
        """Close the file. The memory itself stays as long as someone maps it, here or in a peer."""
        os.close(self.fd)


def _memory_file(name: str) -> int:
    flags = MFD_CLOEXEC | MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.memfd_create(name, flags)  # before Linux 6.3


def map_peer(fd: int, nbytes: int, *, writable: bool, name: str) -> Mapping:
    """Map a peer's segment, after a check that using it cannot raise a signal here.

    Raises
    ------
    BackendError
        ``LINK_FAILED`` when it is not a segment of the announced size; ``OUT_OF_MEMORY`` when no addresses are left.
    """
    if not 0 < nbytes <= MAX_SEGMENT_BYTES:
        raise BackendError(
            Failure.LINK_FAILED, f"The peer's {name} has {nbytes} bytes; allowed: 1 to {MAX_SEGMENT_BYTES}."
        )
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or _file_system(fd) != TMPFS_MAGIC:
        raise BackendError(Failure.LINK_FAILED, f"The peer's {name} is not a memory file (mode {status.st_mode:#o}).")
    try:
        seals = fcntl.fcntl(fd, F_GET_SEALS)
    except OSError as error:
        raise BackendError(Failure.LINK_FAILED, f"The peer's {name} is not a memory file.", error.errno or 0) from error
    if not seals & F_SEAL_SHRINK:
        raise BackendError(
            Failure.LINK_FAILED, f"The peer's {name} is not sealed against shrinking (seals {seals:#x})."
        )
    if writable and seals & (F_SEAL_WRITE | F_SEAL_FUTURE_WRITE):
        raise BackendError(Failure.LINK_FAILED, f"The peer's {name} is sealed against writing (seals {seals:#x}).")
    if status.st_size != round_up(nbytes):
        raise BackendError(
            Failure.LINK_FAILED,
            f"The peer's {name} is announced with {nbytes} bytes, so its file should have {round_up(nbytes)}, "
            f"but it has {status.st_size}.",
        )
    try:
        mapping = Mapping(fd, status.st_size, mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
    except OSError as error:
        kind = Failure.OUT_OF_MEMORY if error.errno == errno.ENOMEM else Failure.FAILED
        raise BackendError(
            kind,
            f"The peer's {name} of {nbytes} bytes could not be mapped: {error.strerror}. If addresses are limited "
            "(ulimit -v), give the peer a smaller llm.Simulator.AddressSpace.",
            error.errno or 0,
        ) from error
    _libc.madvise(mapping.address, mapping.nbytes, MADV_DONTFORK)
    return mapping
