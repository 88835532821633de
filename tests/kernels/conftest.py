"""Memory between unreadable pages, and a slow model of what a plan copies."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest

from llm_datadist._kernels import hostcopy

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

PAGE = mmap.PAGESIZE
PROT_NONE = 0


class Arena:
    """Memory with an unreadable page on each side; `nbytes` of it touch the upper one, or the lower one."""

    def __init__(self, nbytes: int, *, at_start: bool = False) -> None:
        self._room = -(-nbytes // PAGE) * PAGE
        whole = LIBC.mmap(None, self._room + 2 * PAGE, PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        assert whole != ctypes.c_void_p(-1).value
        self._whole = whole
        self.protect(mmap.PROT_READ | mmap.PROT_WRITE)
        self.address = whole + PAGE + (0 if at_start else self._room - nbytes)
        self.bytes: npt.NDArray[np.uint8] = np.ctypeslib.as_array(
            ctypes.cast(self.address, ctypes.POINTER(ctypes.c_uint8)), (nbytes,)
        )

    def protect(self, protection: int) -> None:
        assert LIBC.mprotect(self._whole + PAGE, self._room, protection) == 0

    def close(self) -> None:
        LIBC.munmap(self._whole, self._room + 2 * PAGE)


@pytest.fixture
def arena() -> Iterator[Callable[..., Arena]]:
    made: list[Arena] = []

    def make(nbytes: int, *, at_start: bool = False) -> Arena:
        made.append(Arena(nbytes, at_start=at_start))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(params=hostcopy.kernels())
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    former = hostcopy.select_kernel(request.param)
    yield request.param
    hostcopy.select_kernel(former)
