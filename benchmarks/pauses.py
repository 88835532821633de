"""Section `pauses` of threads.py: does a long call stop the other Python threads of its process?"""

import mmap
import statistics
import threading
import time

import cbuild
import numpy as np
from processes import Process, address, bytes_desc, check, engine, fill, link, must_link, tensors_of

from llm_datadist import BlocksCacheKey, LLMRole, LLMStatusCode

HUGE = bytes_desc(64, 32, 1 << 20)  # 2 GiB
SILENT = 3


class Watcher(threading.Thread):
    """A thread of plain Python, which notes the longest time between two of its steps."""

    def __init__(self):
        super().__init__(daemon=True)
        self.longest, self._running, self._end = 0.0, threading.Event(), False

    def run(self):
        last = time.perf_counter()
        self._running.set()
        while not self._end:
            now = time.perf_counter()
            if now - last > self.longest:
                self.longest = now - last
            last = now

    def __enter__(self):
        self.start()
        if not self._running.wait(60):
            raise TimeoutError("a thread did not start in 60 s")
        return self

    def __exit__(self, *_):
        self._end = True
        self.join(60)


class Copier:
    """Keeps two threads busy in C as a large pull does, without the library: what the scheduler alone makes of it."""

    BYTES = 256 << 20

    def __init__(self):
        self._lib = cbuild.load()
        self._kernel = next(iter(cbuild.kernels(self._lib).values()))
        self._memory = cbuild.Mem(self._lib, "shm", 2 * self.BYTES)

    def __call__(self, seconds):
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            self._lib.copy(self._kernel, self._memory.addr, self._memory.addr + self.BYTES, self.BYTES, 2)


def watched(call, copier):
    """Make a call, sleep as long, and copy as long; gives seconds, and the longest pauses of a thread beside each."""
    with Watcher() as beside:
        begin = time.perf_counter()
        call()
        seconds = time.perf_counter() - begin
    with Watcher() as asleep:
        time.sleep(seconds)
    with Watcher() as copying:
        copier(seconds)
    return seconds, beside.longest, asleep.longest, copying.longest


def user_memory(state):
    """Give the addresses of tensors of memory that is no engine's, all pages of it present."""
    state.mapped = mmap.mmap(-1, HUGE.num_tensors * HUGE.size)
    whole = np.frombuffer(state.mapped, np.uint8)
    whole[:] = 1
    return [whole.ctypes.data + i * HUGE.size for i in range(HUGE.num_tensors)]


def owner(state, settings):
    """Be a prompt that has 2 GiB, of its engine's or, in CacheManager mode, of its own memory."""
    engine(state, LLMRole.PROMPT, 1, address(1), **settings)
    key = BlocksCacheKey(1, 0)
    if settings:
        state.cache = state.manager.register_blocks_cache(HUGE, user_memory(state), key)
    else:
        state.cache = state.manager.allocate_blocks_cache(HUGE, key)
    fill(tensors_of(state.cache), 1)


def bystand(state, settings, rounds):
    """Make the long calls beside a watching thread; gives what each took, by name."""
    engine(state, LLMRole.DECODER, 2, **settings)
    addresses = user_memory(state) if settings else None
    found, blocks, copier = {}, list(range(HUGE.shape[0])), Copier()

    def note(name, call):
        found.setdefault(name, []).append(watched(call, copier))

    def allocate():
        state.room = state.manager.allocate_blocks_cache(HUGE)

    def register():
        state.room = state.manager.register_blocks_cache(HUGE, addresses)

    def link_silent():
        if LLMStatusCode.LLM_SUCCESS in link(state.dd, [SILENT], 1000)[1]:
            raise RuntimeError("a stopped process was linked")

    for number in range(rounds):
        if number and settings:
            state.manager.unregister_cache(state.room.cache_id)
        elif number:
            state.manager.deallocate_cache(state.room)
        note("register 2 GiB" if settings else "allocate 2 GiB", register if settings else allocate)
        if not number:
            note("link", lambda: must_link(state.dd, [1]))
        note("link to a silent peer", link_silent)
        for words in tensors_of(state.room):
            words[:] = 1
        note("pull 2 GiB", lambda: state.manager.pull_blocks(BlocksCacheKey(1, 0), state.room, blocks, blocks))
        check(tensors_of(state.room), 1)
    return found


def pauses(short):
    """the longest pause of a Python thread beside calls of the main thread; controls: it sleeps as long, copies as long"""
    rows = []
    modes = {"kv": {}, "cache manager": {"enable_cache_manager": True}}
    for mode, settings in modes.items():
        with Process() as one, Process() as silent, Process() as other:
            one.call(owner, settings)
            silent.call(engine, LLMRole.PROMPT, SILENT, address(SILENT))
            silent.halt()
            for name, runs in other.call(bystand, settings, 2 if short else 5).items():
                seconds, beside, asleep, copying = (list(each) for each in zip(*runs, strict=True))
                row = {"mode": mode, "call": name, "rounds": len(runs), "call_ms": statistics.median(seconds) * 1e3}
                row.update(call_worst_ms=max(seconds) * 1e3, pause_ms=statistics.median(beside) * 1e3)
                row.update(pause_worst_ms=max(beside) * 1e3, asleep_worst_ms=max(asleep) * 1e3)
                rows.append({**row, "copying_worst_ms": max(copying) * 1e3})
    return rows
