"""Memory that users bring: anonymous mappings of this process, or what a driver allocates."""

from __future__ import annotations

import ctypes
import itertools
import mmap

import ascend_memory
import memory

from llm_datadist import Placement

_taken: list[mmap.mmap] = []
#: Far below where the kernel puts mappings (right below the stack), above fixed programs and sanitizer shadows.
_far = itertools.count(0x1800_0000_0000, 1 << 20)


def take(nbytes: int, placement: Placement = Placement.DEVICE) -> int:
    """Give the address of fresh memory, which lives until `give_back`."""
    if memory.in_driver():
        return ascend_memory.take(nbytes, placement)
    _taken.append(mmap.mmap(-1, nbytes))
    return ctypes.addressof(ctypes.c_char.from_buffer(_taken[-1]))


def give_back() -> None:
    """Let all of it go."""
    _taken.clear()
    ascend_memory.give_back()


def hole() -> int:
    """Give a page's address where nothing is mapped, and where the kernel maps nothing unless it is asked to.

    A range that was just unmapped would not do: the next mapping of the process, by whatever thread, may get it.
    """
    page = mmap.PAGESIZE
    address = next(_far)
    with open("/proc/self/maps") as maps:
        for line in maps:
            low, high = (int(number, 16) for number in line.split(maxsplit=1)[0].split("-"))
            assert high <= address or address + page <= low, f"{address:#x} is mapped: {line}"
    return address
