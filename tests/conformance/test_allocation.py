"""Ids, keys and references of caches, and what a failed allocation leaves behind."""

from __future__ import annotations

from typing import Any

import pytest
from bindings import is_bound
from pairs import Decoder, Prompt, bytes_desc, options
from peer import Peer
from refusals import refuses

from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    KvCache,
    LLMStatusCode,
    Placement,
)

ABSENT = 2**64 - 1
PADDING = CacheKey(1, ABSENT)
DESC = bytes_desc(2, 4, 16)
FAILED = LLMStatusCode.LLM_FAILED
INVALID = LLMStatusCode.LLM_PARAM_INVALID
NOT_EXIST = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
NO_MEMORY = LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY


def pulled_slot(prompt: Prompt, decoder: Decoder, key: Any, desc: CacheDesc = DESC, salt: int = 0) -> int:
    """Pull by a key without releasing it, and tell which slot of the filled source came."""
    cache = decoder.allocate(desc)
    decoder.manager.pull_cache(key, cache, 0, src_cache_offset=0)
    stride = desc.size // desc.shape[0]
    got = decoder.tensor(cache, 0)[:stride]
    decoder.manager.deallocate_cache(cache)
    whole = prompt.expected(desc, 0, salt=salt)
    return [whole[at : at + stride] for at in range(0, desc.size, stride)].index(got)


# ---------------------------------------------------------------------- ids


def test_ids_count_up_from_1(prompt: Prompt) -> None:
    """S-10: ids start at 1 and grow by one, for both kinds; failures use none up, and none comes back."""
    manager = prompt.manager
    caches = [manager.allocate_cache(DESC), manager.allocate_blocks_cache(DESC), manager.allocate_cache(DESC)]
    assert [cache.get("cache_id") for cache in caches] == [1, 2, 3]
    with refuses(INVALID):
        manager.allocate_cache(DESC, [CacheKey(1, i) for i in range(5)])
    manager.deallocate_cache(caches[2])
    assert manager.allocate_cache(DESC).get("cache_id") == 4


def test_running_out_of_memory_uses_no_id_up(peer: Peer) -> None:
    """S-10, S-18, E-171: neither does the lack of memory."""
    prompt = Prompt(peer, ge__flowGraphMemMaxSize="1024", mem_utilization=1.0)
    with refuses(NO_MEMORY):
        prompt.manager.allocate_cache(bytes_desc(3, 1, 512), [CacheKey(1, 1)])
    cache = prompt.manager.allocate_cache(bytes_desc(2, 1, 512), [CacheKey(1, 1)])
    assert cache.get("cache_id") == 1


def test_ids_start_again_with_a_new_engine(peer: Peer) -> None:
    """compat.md: ids start from 1 again after finalize and init."""
    prompt = Prompt(peer)
    prompt.manager.allocate_cache(DESC)
    prompt.dd.finalize()
    prompt.dd.init(prompt.options)
    assert prompt.dd.get("kv_cache_manager").allocate_cache(DESC).get("cache_id") == 1


# ---------------------------------------------------------------------- keys


def test_keys_bind_slots_by_position(linked: tuple[Prompt, Decoder]) -> None:
    """S-12: the i-th key binds slot i; trailing slots may be without."""
    prompt, decoder = linked
    prompt.allocate(DESC, [CacheKey(1, 30), CacheKey(1, 10), CacheKey(1, 20)])
    assert [pulled_slot(prompt, decoder, CacheKey(1, req)) for req in (30, 10, 20)] == [0, 1, 2]


def test_padding_only_takes_its_slot(linked: tuple[Prompt, Decoder]) -> None:
    """S-12: padding keys bind nothing, however many there are, and a blocks cache of the same model is no clash."""
    prompt, decoder = linked
    prompt.allocate_blocks(DESC, BlocksCacheKey(1, 0), salt=1)
    source = prompt.allocate(DESC, [PADDING, CacheKey(1, 5), PADDING])
    assert pulled_slot(prompt, decoder, CacheKey(1, 5)) == 1
    for slot in range(4):
        assert pulled_slot(prompt, decoder, CacheKeyByIdAndIndex(1, source.get("cache_id"), slot)) == slot
    prompt.allocate(DESC, [PADDING, PADDING])


def test_request_and_prefix_keys_are_two_spaces(linked: tuple[Prompt, Decoder]) -> None:
    """S-13, S-14: one number as request and as prefix are two keys, each of a list judged on its own."""
    prompt, decoder = linked
    request, prefix = CacheKey(1, 5, 3), CacheKey(1, ABSENT, 3, 5)
    other_model = CacheKey(1, ABSENT, 4, 5)
    prompt.allocate(DESC, [prefix, request, other_model])
    assert pulled_slot(prompt, decoder, request) == 1
    assert pulled_slot(prompt, decoder, prefix) == 0
    assert pulled_slot(prompt, decoder, other_model) == 2
    for unbound in (CacheKey(1, 5, 4), CacheKey(1, 5), CacheKey(1, ABSENT, 0, 5)):
        with refuses(NOT_EXIST):
            decoder.manager.pull_cache(unbound, decoder.allocate(DESC))


def test_one_blocks_cache_per_model(prompt: Prompt) -> None:
    """S-13, S-15, E-167: a blocks key is its model id alone."""
    prompt.manager.allocate_blocks_cache(DESC, BlocksCacheKey(1, 7))
    with refuses(FAILED):
        prompt.manager.allocate_blocks_cache(DESC, BlocksCacheKey(2, 7))
    prompt.manager.allocate_blocks_cache(DESC, BlocksCacheKey(1, 8))
    prompt.manager.allocate_blocks_cache(DESC)
    prompt.manager.allocate_blocks_cache(DESC)


def test_the_owner_ignores_the_cluster_id(linked: tuple[Prompt, Decoder]) -> None:
    """S-13 and compat.md: a key with a foreign cluster id binds, clashes and is removed like any other."""
    prompt, decoder = linked
    prompt.allocate(DESC, [CacheKey(2**64 - 1, 5)])
    assert pulled_slot(prompt, decoder, CacheKey(1, 5)) == 0
    with refuses(FAILED):
        prompt.manager.allocate_cache(DESC, [CacheKey(3, 5)])
    prompt.manager.remove_cache_key(CacheKey(4, 5))
    assert not is_bound(prompt, CacheKey(1, 5))


def test_a_key_is_a_request_or_a_prefix(prompt: Prompt) -> None:
    """S-14, E-170: both at once are refused, wherever in the list, and nothing is bound."""
    for position in range(3):
        keys = [CacheKey(1, 1), CacheKey(1, ABSENT, 0, 2)]
        keys.insert(position, CacheKey(1, 3, 0, 4))
        with refuses(INVALID):
            prompt.manager.allocate_cache(DESC, keys)
    assert not is_bound(prompt, CacheKey(1, 1))
    assert not is_bound(prompt, CacheKey(1, ABSENT, 0, 2))
    assert prompt.manager.allocate_cache(DESC, [CacheKey(1, 1)])


@pytest.mark.parametrize("key", [CacheKey(1, 5), CacheKey(1, ABSENT, 0, 5)], ids=["request", "prefix"])
def test_a_bound_key_is_refused(peer: Peer, key: CacheKey) -> None:
    """S-15, E-167: FAILED; the other keys of the list stay free and no memory is taken."""
    prompt = Prompt(peer, ge__flowGraphMemMaxSize=str(4 * 512), mem_utilization=1.0)
    prompt.manager.allocate_cache(DESC, [key])
    with refuses(FAILED):
        prompt.manager.allocate_cache(DESC, [CacheKey(1, 6), key, CacheKey(1, 7)])
    prompt.manager.allocate_cache(DESC, [CacheKey(1, 6), CacheKey(1, 7)])


def test_the_last_of_equal_keys_counts(linked: tuple[Prompt, Decoder]) -> None:
    """S-16, E-168: the earlier slot ends up unbound, so a pull of it by id releases nothing."""
    prompt, decoder = linked
    key = CacheKey(1, 5)
    source = prompt.allocate(DESC, [key, CacheKey(2, 6), CacheKey(9, 5)])
    assert pulled_slot(prompt, decoder, key) == 2
    decoder.manager.pull_cache(CacheKeyByIdAndIndex(1, source.get("cache_id"), 0), decoder.allocate(DESC))
    assert is_bound(prompt, key)
    decoder.manager.pull_cache(CacheKeyByIdAndIndex(1, source.get("cache_id"), 2), decoder.allocate(DESC))
    assert not is_bound(prompt, key)


@pytest.mark.parametrize("extra", [CacheKey(1, 99), PADDING, CacheKey(1, 0)], ids=["request", "padding", "repeated"])
def test_more_keys_than_slots(prompt: Prompt, extra: CacheKey) -> None:
    """S-17, E-169: refused, whatever the surplus key is."""
    with refuses(INVALID):
        prompt.manager.allocate_cache(DESC, [*(CacheKey(1, i) for i in range(4)), extra])
    assert not is_bound(prompt, CacheKey(1, 0))


# ---------------------------------------------------------------------- shapes


@pytest.mark.parametrize("shape", [[1] * 31, [2] + [1] * 30, (4, 3), [1]])
def test_shapes_that_are_fine(decoder: Decoder, shape: Any) -> None:
    """S-19: 1 to 31 dimensions; a tuple is as good as a list (compat.md), and is kept as it was given."""
    desc = CacheDesc(1, shape, DataType.DT_INT8)
    cache = decoder.manager.allocate_cache(desc)
    assert cache.cache_desc.shape == shape


@pytest.mark.parametrize(
    "shape",
    [[1] * 32, [0, 4], [4, 0], [-1, 4], [4, -1, -1], [2**62, 2], [2**31, 2**31, 2], [2**63 - 1, 2**63 - 1]],
    ids=["32 dimensions", "first 0", "last 0", "first -1", "two -1", "64 bits", "64 bits in three", "126 bits"],
)
@pytest.mark.parametrize("blocks", [False, True])
def test_shapes_that_are_refused(decoder: Decoder, shape: list[int], blocks: bool) -> None:
    """S-19, E-164: PARAM_INVALID for both kinds."""
    make = decoder.manager.allocate_blocks_cache if blocks else decoder.manager.allocate_cache
    with refuses(INVALID):
        make(CacheDesc(1, shape, DataType.DT_INT16))


def test_no_tensors_or_host_memory(decoder: Decoder) -> None:
    """E-161, E-162: both kinds."""
    for make in (decoder.manager.allocate_cache, decoder.manager.allocate_blocks_cache):
        with refuses(INVALID):
            make(bytes_desc(0, 1, 1))
        with refuses(INVALID):
            make(CacheDesc(1, [1], DataType.DT_INT8, Placement.HOST))


# ---------------------------------------------------------------------- references


def test_memory_stays_for_the_keys(peer: Peer) -> None:
    """S-11, S-20, S-64: a deallocated cache lives until its last key is pulled or removed, and then makes room."""
    prompt = Prompt(peer, ge__flowGraphMemMaxSize="1024", mem_utilization=1.0)
    decoder = Decoder()
    decoder.link(prompt)
    desc = bytes_desc(2, 2, 16)
    first, second = CacheKey(1, 1), CacheKey(1, 2)
    source = prompt.allocate(desc, [first, second])
    cache_id = source.get("cache_id")
    prompt.manager.deallocate_cache(source)
    assert source.get("per_device_tensor_addrs") == []
    with refuses(NO_MEMORY):
        prompt.manager.allocate_cache(desc)
    cache = decoder.allocate(desc)
    # by key and by id as before
    decoder.manager.pull_cache(first, cache, 0)
    decoder.manager.pull_cache(CacheKeyByIdAndIndex(1, cache_id, 0), cache, 1)
    assert all(decoder.tensor(cache, t) == prompt.expected(desc, t)[:16] * 2 for t in range(2))
    with refuses(NO_MEMORY):
        prompt.manager.allocate_cache(desc)
    decoder.manager.pull_cache(second, cache, 1)
    assert all(decoder.tensor(cache, t) == prompt.expected(desc, t) for t in range(2))
    for slot in range(2):
        with refuses(NOT_EXIST):
            decoder.manager.pull_cache(CacheKeyByIdAndIndex(1, cache_id, slot), cache)
    assert prompt.manager.allocate_cache(desc, [first, second]).get("cache_id") == cache_id + 1
    decoder.dd.finalize()


def test_prefix_keys_hold_memory_too(peer: Peer) -> None:
    """S-11, S-24: only `remove_cache_key` ends a prefix key, and with it the memory."""
    prompt = Prompt(peer, ge__flowGraphMemMaxSize="1024", mem_utilization=1.0)
    key = CacheKey(1, ABSENT, 0, 8)
    desc = bytes_desc(2, 1, 16)
    prompt.manager.deallocate_cache(prompt.manager.allocate_cache(desc, [key]))
    with refuses(NO_MEMORY):
        prompt.manager.allocate_cache(desc)
    prompt.manager.remove_cache_key(key)
    prompt.manager.allocate_cache(desc, [key])


def test_pulled_keys_leave_a_held_cache_alone(linked: tuple[Prompt, Decoder]) -> None:
    """S-11, S-64: while the handle is there, the slot stays readable by id after its key is gone."""
    prompt, decoder = linked
    key = CacheKey(1, 1)
    source = prompt.allocate(DESC, [key])
    decoder.manager.pull_cache(key, decoder.allocate(DESC))
    assert pulled_slot(prompt, decoder, CacheKeyByIdAndIndex(1, source.get("cache_id"), 0)) == 0
    prompt.manager.deallocate_cache(source)
    with refuses(NOT_EXIST):
        decoder.manager.pull_cache(CacheKeyByIdAndIndex(1, source.get("cache_id"), 0), decoder.allocate(DESC))


def test_a_deallocated_cache_is_gone_for_its_owner(linked: tuple[Prompt, Decoder]) -> None:
    """S-20, S-21, E-228, E-302: as destination and for its tensors."""
    prompt, decoder = linked
    prompt.allocate(DESC, [CacheKey(1, 1)])
    prompt.allocate_blocks(DESC, BlocksCacheKey(1, 0))
    cache = decoder.allocate(DESC)
    decoder.manager.deallocate_cache(cache)
    assert cache.per_device_tensor_addrs == []
    with refuses(NOT_EXIST):
        decoder.manager.pull_cache(CacheKey(1, 1), cache)
    with refuses(NOT_EXIST):
        decoder.manager.pull_blocks(BlocksCacheKey(1, 0), cache, [0], [0])
    with refuses(NOT_EXIST):
        decoder.manager.get_cache_tensors(cache)
    assert is_bound(prompt, CacheKey(1, 1))


def test_a_key_does_not_keep_the_handle(prompt: Prompt) -> None:
    """S-21: that keys keep the memory makes no difference to local operations."""
    source = prompt.allocate(DESC, [CacheKey(1, 1)])
    prompt.manager.deallocate_cache(source)
    with refuses(NOT_EXIST):
        prompt.manager.get_cache_tensors(source)


def test_deallocating_twice(prompt: Prompt) -> None:
    """S-22, E-174: a second call is a no-op, and takes no reference from the keys."""
    source = prompt.allocate(DESC, [CacheKey(1, 1)])
    for _ in range(3):
        prompt.manager.deallocate_cache(source)
    assert is_bound(prompt, CacheKey(1, 1))


def test_host_caches_are_not_deallocated(decoder: Decoder) -> None:
    """E-173: a cache on the user's memory is refused."""
    with refuses(INVALID):
        decoder.manager.deallocate_cache(
            KvCache.create_cpu_cache(CacheDesc(1, [1], DataType.DT_INT8, Placement.HOST), [1])
        )


def test_a_blocks_cache_goes_with_its_handle(peer: Peer) -> None:
    """S-23: key and memory at once."""
    prompt = Prompt(peer, ge__flowGraphMemMaxSize="1024", mem_utilization=1.0)
    decoder = Decoder()
    decoder.link(prompt)
    desc = bytes_desc(2, 4, 16)
    cache = decoder.allocate(desc)
    for _ in range(3):
        source = prompt.allocate_blocks(desc, BlocksCacheKey(1, 0))
        decoder.manager.pull_blocks(BlocksCacheKey(1, 0), cache, [0], [0])
        prompt.manager.deallocate_cache(source)
        with refuses(NOT_EXIST):
            decoder.manager.pull_blocks(BlocksCacheKey(1, 0), cache, [0], [0])
        with refuses(NOT_EXIST):
            decoder.manager.pull_cache(CacheKeyByIdAndIndex(1, source.get("cache_id"), 0), cache)
    decoder.dd.finalize()


def test_removing_a_key(linked: tuple[Prompt, Decoder]) -> None:
    """S-24, E-178, E-232: gone at once whatever was pulled of it, others stay; unknown keys are no error."""
    prompt, decoder = linked
    desc = bytes_desc(4, 2, 16)
    first, second = CacheKey(1, 1), CacheKey(1, 2)
    prompt.allocate(desc, [first, second])
    cache = decoder.allocate(desc)
    decoder.manager.pull_cache(first, cache, src_layer_range=range(1), dst_layer_range=range(1))
    for _ in range(2):
        prompt.manager.remove_cache_key(first)
    prompt.manager.remove_cache_key(CacheKey(1, 77))
    prompt.manager.remove_cache_key(PADDING)
    with refuses(NOT_EXIST):
        decoder.manager.pull_cache(first, cache)
    decoder.manager.pull_cache(second, cache)


def test_a_new_key_owes_nothing_to_the_old(linked: tuple[Prompt, Decoder]) -> None:
    """S-24, S-61, S-63: a removed key that is bound anew starts with all its tensors to be pulled."""
    prompt, decoder = linked
    desc = bytes_desc(4, 1, 16)
    key = CacheKey(1, 1)
    cache = decoder.allocate(desc)
    for salt in range(4):
        prompt.allocate(desc, [key], salt=salt)
        decoder.manager.pull_cache(key, cache, src_layer_range=range(1), dst_layer_range=range(1))
        assert decoder.tensor(cache, 0) == prompt.expected(desc, 0, salt=salt)
        assert is_bound(prompt, key)
        prompt.manager.remove_cache_key(key)


def test_removing_the_last_key_frees(peer: Peer) -> None:
    """S-24: of a deallocated cache."""
    prompt = Prompt(peer, ge__flowGraphMemMaxSize="1024", mem_utilization=1.0)
    desc = bytes_desc(2, 2, 16)
    keys = [CacheKey(1, 1), CacheKey(1, 2)]
    prompt.manager.deallocate_cache(prompt.manager.allocate_cache(desc, keys))
    prompt.manager.remove_cache_key(keys[1])
    with refuses(NO_MEMORY):
        prompt.manager.allocate_cache(desc)
    prompt.manager.remove_cache_key(keys[0])
    prompt.manager.allocate_cache(desc, keys)


def test_collected_caches_are_deallocated(peer: Peer) -> None:
    """S-25: like `deallocate_cache`, so that live keys keep the memory."""
    prompt = Prompt(peer, ge__flowGraphMemMaxSize="1024", mem_utilization=1.0)
    decoder = Decoder()
    decoder.link(prompt)
    desc = bytes_desc(2, 1, 16)
    for _ in range(3):
        prompt.peer.make("owner:allocate_and_lose", prompt.manager, desc, [])
    cache_id = prompt.peer.make("owner:allocate_and_lose", prompt.manager, desc, [CacheKey(1, 1)])
    with refuses(NO_MEMORY):
        prompt.manager.allocate_cache(desc)
    decoder.manager.pull_cache(CacheKeyByIdAndIndex(1, cache_id, 0), decoder.allocate(desc), src_cache_offset=0)
    decoder.manager.pull_cache(CacheKey(1, 1), decoder.allocate(desc))
    prompt.manager.allocate_cache(desc)
    decoder.dd.finalize()


def test_caches_collected_after_finalize(decoder: Decoder) -> None:
    """S-25, S-173: collecting them then does nothing, also with a new engine running that has the same ids."""
    old = decoder.manager.allocate_cache(DESC)
    decoder.dd.finalize()
    decoder.dd.init(options())
    new = decoder.dd.kv_cache_manager.allocate_cache(DESC)
    assert new.cache_id == old.cache_id
    del old
    assert decoder.dd.kv_cache_manager.get_cache_tensors(new)
