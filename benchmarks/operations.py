"""Pushes, contiguous pulls and local copies beside a C loop with two threads that makes the same copies.

Each round makes every operation three ways, in turn: by this library, by the loop, and by the loop once more, which is
the control. The destination is wiped before each and checked after it. Loops of operations that stay in one process use
the very memory that the library uses; those of pushes and pulls use shared memory of small pages.

    python benchmarks/operations.py [--short] [--only push_blocks,swap_blocks]
"""

import argparse
import json
import statistics
import sys

import cbuild
import numpy as np
from loops import Blocks, Loop, quantile, ratio, timed
from processes import Process, address, ask, become, bytes_desc, engine, must_link, setup, table

from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKeyByIdAndIndex,
    DataType,
    LayerSynchronizer,
    LLMRole,
    LLMStatusCode,
    Placement,
    TransferWithCacheKeyConfig,
)

TENSORS, COUNT, BLOCK = 64, 128, 64 << 10
PULLED, SLOTS, SLOT = 64, 2, 4 << 20
PAYLOAD = TENSORS * PULLED * BLOCK
MODE = {
    "enable_cache_manager": True,
    "enable_remote_cache_accessible": True,
    "mem_pool_cfg": json.dumps({"memory_size": 4 << 30}),
}


class Caches:
    """An engine with a paged and a contiguous cache, which peers may write to."""

    def __init__(self, role, cluster):
        engine(self, role, cluster, address(cluster), **MODE)
        self.paged = self.manager.allocate_blocks_cache(bytes_desc(TENSORS, COUNT, BLOCK), BlocksCacheKey(cluster, 0))
        self.slots = self.allocate_slots()
        self.blocks = Blocks(self.paged.tensor_addrs, COUNT, BLOCK, cluster)
        self.rows = Blocks(self.slots.tensor_addrs, SLOTS, SLOT, cluster)
        self.blocks.fill()
        self.rows.fill()

    def allocate_slots(self):
        return self.manager.allocate_cache(bytes_desc(TENSORS, SLOTS, SLOT))


class Target(Caches):
    """The peer that is pushed to and pulled from."""

    def __init__(self):
        super().__init__(LLMRole.PROMPT, 1)

    def cache_id(self):
        return self.slots.cache_id

    def wipe(self, which, blocks):
        getattr(self, which).wipe(blocks)

    def has(self, which, blocks, of, salt, every_word):
        mine = getattr(self, which)
        return mine.has(blocks, of, Blocks([], mine.count, mine.bytes, salt), every_word)


class Theirs:
    """The target's memory, wiped and checked over there."""

    def __init__(self, peer, which):
        self.peer, self.which = peer, which

    def wipe(self, blocks):
        self.peer.call(ask, "wipe", self.which, blocks)

    def has(self, blocks, of, source, every_word):
        return self.peer.call(ask, "has", self.which, blocks, of, source.salt, every_word)


class Operation:
    """One operation: what calls it, (source, destination) of it and of its loop, and tensors that the loop has at a time."""

    def __init__(self, call, memory, loop_memory, lists, at_a_time=TENSORS):
        self.call, self.memory, self.loop_memory, self.lists, self.step = call, memory, loop_memory, lists, at_a_time

    def loop(self, loop, lists):
        source, destination = self.loop_memory
        for at in range(0, TENSORS, self.step):
            loop.copy(source, destination, *lists, slice(at, at + self.step))


def random_lists(rng):
    return [rng.permutation(COUNT)[:PULLED].tolist() for _ in range(2)]


def halves(rng):
    """Sources and destinations in one cache: they must differ."""
    both = rng.permutation(COUNT).tolist()
    return both[:PULLED], both[PULLED:]


def one_slot(rng):
    return [0], [1]


def operations(mine, peer, loop):
    manager, key = mine.manager, BlocksCacheKey(1, 0)
    far = peer.call(ask, "cache_id")
    there_blocks, there_rows = Theirs(peer, "blocks"), Theirs(peer, "rows")
    shared_blocks, shared_rows = loop.memory(TENSORS, COUNT, BLOCK, 9), loop.memory(TENSORS, SLOTS, SLOT, 9)
    source_rows = loop.memory(TENSORS, SLOTS, SLOT, 1)
    source_rows.fill()
    far_rows = Blocks([], SLOTS, SLOT, 1)

    class Ready(LayerSynchronizer):
        def synchronize_layer(self, layer_index, timeout_in_millis):
            return True

    layers = range(TENSORS // 2)

    def by_layer(to, lists):
        config = TransferWithCacheKeyConfig(to, layers, layers)
        cache = mine.paged if lists else mine.slots
        result = manager.transfer_cache_async(cache, Ready(), [config], *lists).synchronize()
        if result != LLMStatusCode.LLM_SUCCESS:
            raise RuntimeError(f"transfer_cache_async: {result}")

    other = mine.allocate_slots()
    other_rows = Blocks(other.tensor_addrs, SLOTS, SLOT, 8)
    host = cbuild.Mem(loop.lib, "anon", TENSORS * COUNT * BLOCK)
    loop.held.append(host)
    host_addresses = [host.addr + t * COUNT * BLOCK for t in range(TENSORS)]
    host_blocks = Blocks(host_addresses, COUNT, BLOCK, 7)
    host_cache = Cache.create_cpu_cache(
        CacheDesc(TENSORS, [COUNT, BLOCK], DataType.DT_UINT8, Placement.HOST), host_addresses
    )
    into_host, to_there = (mine.blocks, host_blocks), (mine.blocks, shared_blocks)
    return {
        "pull_cache": Operation(
            lambda s, d: manager.pull_cache(CacheKeyByIdAndIndex(1, far, 0), other, 1),
            (far_rows, other_rows),
            (source_rows, shared_rows),
            one_slot,
        ),
        "push_blocks": Operation(
            lambda s, d: manager.push_blocks(key, mine.paged, s, d), (mine.blocks, there_blocks), to_there, random_lists
        ),
        "push_cache": Operation(
            lambda s, d: manager.push_cache(CacheKeyByIdAndIndex(1, far, 1), mine.slots, 0),
            (mine.rows, there_rows),
            (mine.rows, shared_rows),
            one_slot,
        ),
        "layer-wise blocks": Operation(
            lambda s, d: by_layer(key, (s, d)), (mine.blocks, there_blocks), to_there, random_lists, 2
        ),
        "layer-wise cache": Operation(
            lambda s, d: by_layer(CacheKeyByIdAndIndex(1, far, 1), ()),
            (mine.rows, there_rows),
            (mine.rows, shared_rows),
            one_slot,
            2,
        ),
        "copy_cache": Operation(
            lambda s, d: manager.copy_cache(other, mine.slots, 1, 0),
            (mine.rows, other_rows),
            (mine.rows, other_rows),
            one_slot,
        ),
        "copy_blocks": Operation(
            lambda s, d: manager.copy_blocks(mine.paged, {a: [b] for a, b in zip(s, d)}),
            (mine.blocks, mine.blocks),
            (mine.blocks, mine.blocks),
            halves,
        ),
        "swap_blocks out": Operation(
            lambda s, d: manager.swap_blocks(mine.paged, host_cache, dict(zip(s, d))),
            into_host,
            into_host,
            random_lists,
        ),
        "swap_blocks in": Operation(
            lambda s, d: manager.swap_blocks(host_cache, mine.paged, dict(zip(s, d))),
            into_host[::-1],
            into_host[::-1],
            random_lists,
        ),
    }


def measured(name, operation, loop, rounds):
    def by_loop(*lists):
        operation.loop(loop, lists)

    ways = {
        "loop": (by_loop, operation.loop_memory),
        "ours": (operation.call, operation.memory),
        "control": (by_loop, operation.loop_memory),
    }
    seconds = {way: [] for way in ways}
    rng = np.random.default_rng(1)
    for number in range(rounds + 1):
        lists = operation.lists(rng)
        order = list(ways)
        for way in order[number % 3 :] + order[: number % 3]:
            call, (source, destination) = ways[way]
            if isinstance(source, Blocks) and source.addresses:
                # What an earlier round wrote over is made new.
                source.fill() if number == 0 else refresh(source, lists[0])
            destination.wipe(lists[1])
            taken = timed(call, *lists)
            if not destination.has(lists[1], lists[0], source, number == 0):
                raise SystemExit(f"{name} by {way}: wrong bytes")
            if number:  # the first round faults pages in
                seconds[way].append(taken)
    ours = seconds["ours"]
    return {
        "operation": name,
        "GBps": PAYLOAD / statistics.median(ours) / 1e9,
        "of_loop": ratio(seconds["loop"], ours),
        "control": ratio(seconds["loop"], seconds["control"]),
        "median_ms": statistics.median(ours) * 1e3,
        "p90_ms": quantile(ours, 0.9) * 1e3,
        "rounds": rounds,
    }


def refresh(source, blocks):
    for t in range(len(source.addresses)):
        for b in blocks:
            first = source.first(t, b)
            row = source.words[t, b]
            if row[0] != first or row[-1] != first + source.inner[-1]:
                np.add(source.inner, first, out=row)


def run(short=False, only=None):
    setup()
    rows = []
    with Process() as peer:
        peer.call(become, Target)
        mine = Caches(LLMRole.DECODER, 2)
        must_link(mine.dd, [1])
        loop = Loop()
        known = operations(mine, peer, loop)
        if unknown := set(only or ()) - set(known):
            raise SystemExit(f"--only names {', '.join(sorted(unknown))}; there are {', '.join(known)}")
        for name, operation in known.items():
            if not only or name in only:
                print(f"operations: {name}", file=sys.stderr)
                rows.append(measured(name, operation, loop, 7 if short else 41))
        mine.dd.finalize()
    table(f"operations, {PAYLOAD >> 20} MiB each; of_loop: speed beside {loop.name} with 2 threads, 1 is as fast", rows)
    return {"operations": rows}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="few rounds")
    parser.add_argument("--only", help="names, with commas between")
    given = parser.parse_args()
    run(given.short, given.only and given.only.split(","))
