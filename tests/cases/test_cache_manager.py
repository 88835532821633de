"""Users' problems on registered memory: shared buffers, unequal tensors, many blocks, transfers that were given up."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from ends import End, desc
from refusals import PARAM_INVALID, refuses
from stall import Stalled

from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    LayerSynchronizer,
    LLMStatusCode,
    TransferConfig,
    TransferWithCacheKeyConfig,
)

TIMEOUT = LLMStatusCode.LLM_TIMEOUT
NOT_YET_LINK = LLMStatusCode.LLM_NOT_YET_LINK


class Always(LayerSynchronizer):
    """Every layer is ready."""

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return True


# ---------------------------------------------------------------------- B04: given up, and the memory goes to others


@pytest.mark.parametrize("kind", ["pull", "push", "async by key", "async by address"])
def test_b04_what_timed_out_lands_no_more(peer: Any, kind: str) -> None:
    """B04: when a call has failed by its limit, the destination belongs to others at once and stays as they fill it."""
    remote = kind in ("push", "async by key")
    there, here = End(peer, 1, remote=remote), End(None, 2, remote=remote, sync_kv_timeout=150)
    try:
        of = desc(8, 1, 1 << 16)
        sender, receiver = (there, here) if kind == "pull" else (here, there)
        source, target = sender.register(of, [CacheKey(1, 10)], salt=0), receiver.register(of)
        here.link(there)
        key = CacheKeyByIdAndIndex(receiver.cluster_id, receiver.id(target), 0)

        def transfer() -> Any:
            if kind == "pull":
                return here.manager.pull_cache(CacheKey(1, 10), target)
            if kind == "push":
                return here.manager.push_cache(key, source)
            config: Any = TransferConfig(1, there.addresses(target))
            if kind == "async by key":
                config = TransferWithCacheKeyConfig(key, range(4), range(4))
            tasks.append(here.manager.transfer_cache_async(source, Always(), [config]))
            return None

        tasks: list[Any] = []
        with Stalled(here.dd, transfer, (1 << 16) // 2) as stalled:
            error = stalled.wait()
            if kind.startswith("async"):
                assert tasks.pop().get_results(30000) == [TIMEOUT]
            else:
                assert getattr(error, "status_code", None) is TIMEOUT, error
            for address in receiver.addresses(target):
                receiver.write(address, b"\x5a" * of.size)
            stalled.finish()
        for address in receiver.addresses(target):
            assert receiver.read(address, of.size) == b"\x5a" * of.size
        # The link says that it must be made again, and then works.
        if kind.startswith("async"):
            transfer()
            assert tasks.pop().get_results(30000) == [NOT_YET_LINK]
        else:
            with refuses(NOT_YET_LINK, "link the cluster again"):
                transfer()
        here.link(there)
        transfer()
        if tasks:
            assert tasks.pop().get_results(30000) == [LLMStatusCode.LLM_SUCCESS]
        receiver.check(target, of, {t: [(0, sender.expected(of, t))] for t in range(8)})
    finally:
        here.close()


# ---------------------------------------------------------------------- B12: heads of a rank

HEAD, BLOCK, BLOCKS = 256, 16, 3


def test_b12_unlike_numbers_of_heads(cm: tuple[End, End]) -> None:
    """B12: head by head blocks, registered over one buffer of several heads, give each rank exactly its heads.

    The prompt has 2 heads in memory [head][block][16 x 256]; it registers each head's part under a model id of its own.
    """
    there, here = cm
    head_bytes = BLOCKS * BLOCK * HEAD
    one = desc(2, BLOCKS, BLOCK * HEAD)
    both = there.register(desc(2, 1, 2 * head_bytes), salt=0)
    for head in range(2):
        parts = [address + head * head_bytes for address in there.addresses(both)]
        there.manager.register_blocks_cache(one, parts, BlocksCacheKey(1, head))
    data = [there.expected(desc(2, 1, 2 * head_bytes), t) for t in range(2)]
    for head in range(2):
        cache = here.register(one, blocks=True)
        here.manager.pull_blocks(BlocksCacheKey(1, head), cache, [2, 0], [0, 1])
        own = [data[t][head * head_bytes : (head + 1) * head_bytes] for t in range(2)]
        size = BLOCK * HEAD
        here.check(cache, one, {t: [(0, own[t][2 * size :]), (size, own[t][:size])] for t in range(2)})
    # And back: a rank with both heads pulls each into its part of one buffer.
    joined = here.register(desc(2, 1, 2 * head_bytes))
    for head in range(2):
        parts = [address + head * head_bytes for address in here.addresses(joined)]
        part = here.manager.register_blocks_cache(one, parts)
        here.manager.pull_blocks(BlocksCacheKey(1, head), part, range(BLOCKS), range(BLOCKS))
    here.check(joined, desc(2, 1, 2 * head_bytes), {t: [(0, data[t])] for t in range(2)})


def test_b12_a_block_of_all_heads_is_no_block_of_one(cm: tuple[End, End]) -> None:
    """B12, B11: ranks that registered whole blocks of unlike heads are refused, with both sizes."""
    there, here = cm
    there.register(desc(2, BLOCKS, 2 * BLOCK * HEAD), BlocksCacheKey(1), salt=0, blocks=True)
    one = desc(2, BLOCKS, BLOCK * HEAD)
    cache = here.register(one, blocks=True)
    with refuses(PARAM_INVALID, 2 * BLOCK * HEAD, BLOCK * HEAD):
        here.manager.pull_blocks(BlocksCacheKey(1), cache, [0], [0])
    here.untouched(cache, one)


# ---------------------------------------------------------------------- B13: tensors that are not pairs


def test_b13_one_tensor_a_layer(cm: tuple[End, End]) -> None:
    """B13: 61 tensors with one a layer; the default of two works without ranges, and says both numbers with one."""
    there, here = cm
    of = desc(61, 2, 48)
    there.register(of, BlocksCacheKey(1), salt=0, blocks=True)
    cache = here.register(of, blocks=True)
    one = {"src_layer_range": range(59, 61), "dst_layer_range": range(2), "tensor_num_per_layer": 1}
    here.manager.pull_blocks(BlocksCacheKey(1), cache, [1], [0], **one)
    here.check(cache, of, {t: [(0, there.expected(of, t + 59)[48:])] for t in range(2)})
    with refuses(PARAM_INVALID, "62", "61"):
        here.manager.pull_blocks(
            BlocksCacheKey(1), cache, [0], [0], src_layer_range=range(31), dst_layer_range=range(31)
        )
    here.manager.pull_blocks(BlocksCacheKey(1), cache, [0, 1], [0, 1])
    here.check(cache, of, {t: [(0, there.expected(of, t))] for t in range(61)})


def test_b13_two_widths_under_two_keys(cm: tuple[End, End]) -> None:
    """B13: 512 and 64 elements of bf16 a token, each its own registration and key; none is mixed up."""
    there, here = cm
    shapes = {0: CacheDesc(5, [4, 16, 512], DataType.DT_BF16), 1: CacheDesc(5, [4, 16, 64], DataType.DT_BF16)}
    caches = {}
    for model, of in shapes.items():
        there.register(of, BlocksCacheKey(1, model), salt=model, blocks=True)
        caches[model] = here.register(of, blocks=True)
    for model, of in shapes.items():
        block = of.size // 4
        here.manager.pull_blocks(BlocksCacheKey(1, model), caches[model], [3, 1], [0, 2])
        data = [there.expected(of, t, model) for t in range(5)]
        pieces = {t: [(0, data[t][3 * block :]), (2 * block, data[t][block : 2 * block])] for t in range(5)}
        here.check(caches[model], of, pieces)
    with refuses(PARAM_INVALID, 16 * 1024, 16 * 128):
        here.manager.pull_blocks(BlocksCacheKey(1, 0), caches[1], [0], [0])


# ---------------------------------------------------------------------- B25: very many small blocks


@pytest.mark.parametrize("as_array", [False, True])
def test_b25_many_blocks_of_registered_memory(cm: tuple[End, End], as_array: bool) -> None:
    """B25: 20 000 random blocks of 576 bytes, and all in reverse, between memory of the users'."""
    there, here = cm
    here.dd._engine.transfers._timeout_ms = 60000
    count, size = 20000, 576
    of = desc(2, count, size)
    there.register(of, BlocksCacheKey(1), salt=0, blocks=True)
    cache = here.register(of, blocks=True)
    source = [np.frombuffer(there.expected(of, t), np.uint8).reshape(count, size) for t in range(2)]
    rng = random.Random(1)
    for of_blocks, to_blocks in (
        (rng.sample(range(count), 15000), rng.sample(range(count), 15000)),
        (list(range(count)), list(range(count - 1, -1, -1))),
    ):
        given = [np.array(blocks) if as_array else blocks for blocks in (of_blocks, to_blocks)]
        here.fill(cache, of, None)
        here.manager.pull_blocks(BlocksCacheKey(1), cache, *given)
        for t, address in enumerate(here.addresses(cache)):
            wanted = np.full((count, size), 0xA5, np.uint8)
            wanted[to_blocks] = source[t][of_blocks]
            assert here.read(address, of.size) == wanted.tobytes()
