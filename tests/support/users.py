"""Memory that users bring: anonymous mappings of this process."""

from __future__ import annotations

import ctypes
import mmap

_taken: list[mmap.mmap] = []


def take(nbytes: int) -> int:
    """Give the address of fresh memory, which lives until `give_back`."""
    _taken.append(mmap.mmap(-1, nbytes))
    return ctypes.addressof(ctypes.c_char.from_buffer(_taken[-1]))


def give_back() -> None:
    """Let all of it go."""
    _taken.clear()


def hole() -> int:
    """Give a page's address where nothing is mapped."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    address: int = libc.mmap(None, 1 << 20, mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    libc.munmap(address, 1 << 20)
    return address
