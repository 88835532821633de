"""The machine's limit, a plain copy loop in C, and memory whose every word tells where it belongs."""

import os
import statistics
import time

import cbuild
import numpy as np
from peers import Rows


class Blocks:
    """Tensors at some addresses as blocks, each word of which tells where it belongs."""

    def __init__(self, addresses, count, nbytes, salt=0):
        self.addresses, self.count, self.bytes, self.salt = list(addresses), count, nbytes, salt
        self.words = Rows(self.addresses, count, nbytes)
        self.inner = np.arange(nbytes // 8, dtype=np.uint64)

    def first(self, tensor, block):
        return np.uint64(((self.salt << 16) + tensor * self.count + block + 1) << 32)

    def fill(self):
        for t in range(len(self.addresses)):
            for b in range(self.count):
                np.add(self.inner, self.first(t, b), out=self.words[t, b])

    def wipe(self, blocks):
        """Forget both edges of some blocks."""
        for t in range(len(self.addresses)):
            self.words[t][blocks, 0] = 0
            self.words[t][blocks, -1] = 0

    def has(self, blocks, of, source, every_word=False):
        """Say whether these blocks hold those blocks of another: both edges, or every word."""
        for t in range(len(self.addresses)):
            first = np.array([source.first(t, b) for b in of])
            rows = self.words[t]
            if (rows[blocks, 0] != first).any() or (rows[blocks, -1] != first + self.inner[-1]).any():
                return False
            if every_word and any((rows[b] != self.inner + f).any() for b, f in zip(blocks, first)):
                return False
        return True


class Loop:
    """The machine's limit: the best plain copy loop in C, over the same lists."""

    def __init__(self, threads=2):
        self.lib = cbuild.load()
        found = cbuild.kernels(self.lib)
        self.name = next(name for name in ("avx512_nt_list", "avx2_nt_list", "memcpy") if name in found)
        self.kernel, self.threads = found[self.name], threads
        self.held = []

    def copy(self, source, destination, source_list, destination_list, tensors=slice(None)):
        """Copy blocks of every tensor, or of some."""
        here, there = (np.array(x.addresses[tensors], np.uint64) for x in (destination, source))
        d, s = (np.array(x, np.int64) for x in (destination_list, source_list))
        sizes = len(here), d.ctypes.data, s.ctypes.data, len(d), source.bytes, self.threads
        result = self.lib.pull(self.kernel, 0, here.ctypes.data, there.ctypes.data, *sizes)
        if result:
            raise OSError(-result, os.strerror(-result))

    def memory(self, tensors, count, nbytes, salt=0):
        """Give shared memory of small pages, as any other process would map it."""
        memory = cbuild.Mem(self.lib, "shm", tensors * count * nbytes, populate=True)
        self.held.append(memory)
        return Blocks([memory.addr + t * count * nbytes for t in range(tensors)], count, nbytes, salt)


def timed(call, *arguments):
    """Seconds of a call."""
    began = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - began


def quantile(values, q):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def ratio(base, other):
    """The median over rounds of how much faster one is than the other."""
    return statistics.median(b / o for b, o in zip(base, other))
