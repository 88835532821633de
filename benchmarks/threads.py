"""Pulls and Python threads: four threads that pull at once beside four plain copies, and the pauses of a thread beside
long calls.

    python benchmarks/threads.py                  # all sections
    python benchmarks/threads.py four --short     # one, with few rounds
"""

import array
import contextlib
import os
import statistics
import threading
import time

import cbuild
import numpy as np
from pauses import pauses
from processes import (
    Process,
    address,
    bytes_desc,
    decoder,
    engine,
    fill,
    first_word,
    main,
    run_sections,
    say,
    tensors_of,
    words_at,
)

from llm_datadist import BlocksCacheKey, LLMRole

THREADS, TENSORS, BLOCKS, PULLED, BLOCK_BYTES = 4, 64, 20, 16, 64 << 10
PULL_BYTES = TENSORS * PULLED * BLOCK_BYTES
DESC = bytes_desc(TENSORS, BLOCKS, BLOCK_BYTES)
#: Plain copies between memfds, whether of huge pages, and the first once more, which says how far to trust the run.
PLAIN = {"plain": False, "plain, huge pages": True, "plain again": False}


def memfd(lib, huge, path=None):
    """Map a memfd for the tensors of a pull, of this process or of another one; gives it and the tensors."""
    fd = None if path is None else os.open(path, os.O_RDWR)
    memory = cbuild.Mem(lib, "shm", TENSORS * DESC.size, fd=fd, fill=False)
    if fd is not None:
        os.close(fd)
    lib.touch(memory.addr, memory.size, 0)
    if huge:
        # As far as the kernel finds huge pages; `prepare` counts them.
        lib.advise(memory.addr, memory.len, cbuild.MADV_COLLAPSE)
    return memory, [words_at(memory.addr + i * DESC.size, DESC.size) for i in range(TENSORS)]


def source(state, cluster_id):
    """Be a prompt with a cache, and with memfds with the same content."""
    engine(state, LLMRole.PROMPT, cluster_id, address(cluster_id))
    state.cache = state.manager.allocate_blocks_cache(DESC, BlocksCacheKey(cluster_id, 0))
    fill(tensors_of(state.cache), cluster_id)
    lib, state.memory, paths = cbuild.load(), [], {}
    for huge in (False, True):
        memory, tensors = memfd(lib, huge)
        fill(tensors, cluster_id)
        state.memory.append(memory)
        paths[huge] = f"/proc/{os.getpid()}/fd/{memory.fd}"
    return paths


def prepare(state, paths):
    """Make for each thread and way a function that copies, and the tensors that it fills; gives the share of huge pages."""
    decoder(state, range(1, THREADS + 1))
    lib = cbuild.load()
    kernels = cbuild.kernels(lib)
    kernel = kernels[next(name for name in ("avx512_nt_list", "avx2_nt_list", "memcpy") if name in kernels)]
    state.ways, state.memory = {"llm_datadist": [pulling(state, i + 1) for i in range(THREADS)]}, []
    for huge in (False, True):
        mapped, ends = [], []
        for their in paths:
            (far, theirs), (near, ours) = memfd(lib, huge, their[huge]), memfd(lib, huge)
            mapped += [far, near]
            ends.append(copying(lib, kernel, ours, theirs))
        state.memory += mapped
        state.ways.update({name: ends for name, of in PLAIN.items() if of == huge})
    return sum(memory.huge_kib() << 10 for memory in mapped) / sum(memory.len for memory in mapped)


def pulling(state, cluster_id):
    room, key = state.manager.allocate_blocks_cache(DESC), BlocksCacheKey(cluster_id, 0)
    return lambda src, dst: state.manager.pull_blocks(key, room, src, dst), tensors_of(room)


def copying(lib, kernel, ours, theirs):
    near, far = (np.array([words.ctypes.data for words in each], np.uint64) for each in (ours, theirs))

    def copy(src, dst):
        d, s = array.array("q", dst), array.array("q", src)
        places = (near.ctypes.data, far.ctypes.data, TENSORS, d.buffer_info()[0], s.buffer_info()[0], len(d))
        if lib.pull(kernel, 0, *places, BLOCK_BYTES, 1):
            raise RuntimeError("the plain copy failed")

    return copy, ours


def work(state, way, number, pulls):
    """Copy in four threads, so many pulls each; gives seconds, after a check of all that the last ones brought."""
    rng = np.random.default_rng(number)
    lists = [[rng.permutation(BLOCKS)[:PULLED].tolist() for _ in range(2)] for _ in range(pulls)]
    barrier, done = threading.Barrier(THREADS + 1, timeout=60), []

    def run(copy):
        barrier.wait()
        for src, dst in lists:
            copy(src, dst)
        done.append(copy)

    for _, tensors in state.ways[way]:
        for words in tensors:
            words[:] = 0
    threads = [threading.Thread(target=run, args=(copy,), daemon=True) for copy, _ in state.ways[way]]
    for thread in threads:
        thread.start()
    barrier.wait()
    begin = time.perf_counter()
    for thread in threads:
        thread.join(120)
    seconds = time.perf_counter() - begin
    if len(done) != THREADS:
        raise RuntimeError(f"{len(done)} of {THREADS} threads came to their end")
    for i, (_, tensors) in enumerate(state.ways[way]):
        check_blocks(tensors, i + 1, *lists[-1])
    return seconds


def check_blocks(tensors, salt, src, dst):
    block = BLOCK_BYTES // 8
    begin = np.array(src, np.uint64)[:, None] * np.uint64(block) + np.arange(block, dtype=np.uint64)
    for number, words in enumerate(tensors):
        if not np.array_equal(words.reshape(BLOCKS, block)[dst], begin + first_word(salt, number)):
            raise RuntimeError(f"tensor {number} has wrong data")


def four(short):
    """four threads, each pulling 64 x 16 blocks of 64 KiB from a peer of its own, again and again"""
    rounds, pulls = (5, 10) if short else (25, 20)
    ways = ["llm_datadist", *PLAIN]
    found = {way: [] for way in ways}
    with contextlib.ExitStack() as stack:
        prompts = [stack.enter_context(Process()) for _ in range(THREADS)]
        for i, prompt in enumerate(prompts):
            prompt.start(source, i + 1)
        paths = [prompt.result() for prompt in prompts]
        one = stack.enter_context(Process())
        say(f"  {one.call(prepare, paths):.0%} of the plain copies' huge pages are huge")
        for way in ways:
            one.call(work, way, 0, 2)
        for number in range(rounds):
            for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
                found[way].append(THREADS * pulls * PULL_BYTES / one.call(work, way, number + 1, pulls) / 1e9)
    rows = []
    for way in ways:
        ratios = [ours / each for ours, each in zip(found["llm_datadist"], found[way], strict=True)]
        row = {
            "way": way,
            "rounds": rounds,
            "GBps": statistics.median(found[way]),
            "ours_to_it": statistics.median(ratios),
        }
        rows.append({**row, "least": min(ratios), "most": max(ratios)})
    return rows


SECTIONS = {"four": four, "pauses": pauses}


def run(short: bool) -> dict:
    """Run all sections; gives their rows by name."""
    return run_sections(SECTIONS, short)


if __name__ == "__main__":
    main(SECTIONS, __doc__)
