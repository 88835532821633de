"""Memory for a directory or a board, of this process or shared with another one."""

from __future__ import annotations

import ctypes
import mmap
import os

from llm_datadist.backend import Window


class SharedWindow:
    """A window over a memory file, which a child process can open by its descriptor."""

    def __init__(self, nbytes: int, fd: int | None = None) -> None:
        self.fd = os.memfd_create("window") if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, nbytes)
        self._map = mmap.mmap(self.fd, nbytes)
        self._pin = ctypes.c_char.from_buffer(self._map)
        self.window = Window(ctypes.addressof(self._pin), nbytes)

    def word(self, offset: int) -> ctypes.c_uint64:
        """Give a word, to be read or changed through ``value``."""
        return ctypes.c_uint64.from_buffer(self._map, offset)

    def close(self) -> None:
        """Give memory and descriptor back."""
        del self._pin
        self._map.close()
        os.close(self.fd)
