"""KV that was released, and KV that nobody pulls (B01, B02)."""

from __future__ import annotations

import logging

from expect import failure
from logged import logged
from pairs import Decoder, Prompt, bytes_desc, options
from peer import Peer

from llm_datadist import CacheKey, CacheKeyByIdAndIndex, LLMDataDist, LLMRole, LLMStatusCode

NOT_EXIST = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
MIB = 1 << 20


def test_b01_released_slot_is_not_read(linked: tuple[Prompt, Decoder]) -> None:
    """B01, S-20, S-24, S-64: a removed key is gone; the slot can be read by id while another key holds the cache."""
    prompt, decoder = linked
    desc = bytes_desc(4, 4, MIB)
    source = prompt.allocate(desc, [CacheKey(1, request) for request in range(10, 14)])
    cache_id = source.get("cache_id")
    cache = decoder.allocate(bytes_desc(4, 1, MIB))
    prompt.manager.remove_cache_key(CacheKey(1, 11))
    prompt.manager.deallocate_cache(source)
    with failure(NOT_EXIST, "11"):
        decoder.manager.pull_cache(CacheKey(1, 11), cache)
    decoder.untouched(cache)
    decoder.manager.pull_cache(CacheKeyByIdAndIndex(1, cache_id, 1), cache)
    decoder.check(cache, {t: [(0, prompt.expected(desc, t)[MIB : 2 * MIB])] for t in range(4)})


def test_b01_released_memory_is_used_again(linked: tuple[Prompt, Decoder]) -> None:
    """B01, S-10, S-38: at the same addresses lies another cache under another id; nothing leads there from the old."""
    prompt, decoder = linked
    desc = bytes_desc(4, 4, MIB)
    keys = [CacheKey(1, request) for request in range(10, 14)]
    source = prompt.allocate(desc, keys)
    old_id, addresses = source.get("cache_id"), source.get("per_device_tensor_addrs")
    cache = decoder.allocate(bytes_desc(4, 1, MIB))
    for key in keys:
        prompt.manager.remove_cache_key(key)
    prompt.manager.deallocate_cache(source)
    other = prompt.allocate(desc, [CacheKey(1, 20)], salt=1)
    assert other.get("per_device_tensor_addrs") == addresses
    assert other.get("cache_id") > old_id
    for slot, key in enumerate(keys):
        with failure(NOT_EXIST):
            decoder.manager.pull_cache(key, cache)
        with failure(NOT_EXIST):
            decoder.manager.pull_cache(CacheKeyByIdAndIndex(1, old_id, slot), cache)
    decoder.untouched(cache)


def test_b02_memory_returns_with_the_last_reference(peer: Peer, decoder: Decoder) -> None:
    """B02, S-11, S-24, S-60, S-64: a thousand requests pass through a pool of sixteen; ten that nobody ends stay."""
    prompt = Prompt(peer, ge__flowGraphMemMaxSize=str(64 * MIB), mem_utilization=1.0)
    decoder.link(prompt)
    desc = bytes_desc(4, 1, MIB)
    cache = decoder.allocate(desc)
    left = 0
    for request in range(1, 1001):
        key = CacheKey(1, request)
        prompt.manager.deallocate_cache(prompt.manager.allocate_cache(desc, [key]))
        if request % 100 == 0:
            left += 1
            assert peer.make("inside:used") == [left * 4 * MIB]
        elif request % 2:
            decoder.manager.pull_cache(key, cache)
            if request % 3 == 0:
                prompt.manager.remove_cache_key(key)
        else:
            prompt.manager.remove_cache_key(key)
            prompt.manager.remove_cache_key(key)
    for request in range(2001, 2007):
        prompt.manager.deallocate_cache(prompt.manager.allocate_cache(desc, [CacheKey(1, request)]))
    with failure(LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY, "16 keys.*req_id=100,.*req_id=200,"):
        prompt.manager.allocate_cache(desc)
    for request in (*range(100, 1001, 100), *range(2001, 2007)):
        decoder.manager.pull_cache(CacheKey(1, request), cache)
    assert peer.make("inside:used") == [0]


def test_b02_finalize_names_what_nobody_pulled() -> None:
    """B02: count, age, and the first 20 keys are in the log."""
    prompt = LLMDataDist(LLMRole.PROMPT, 1)
    prompt.init(options("10.0.0.1:26000"))
    desc = bytes_desc(1, 30, 64)
    keys = [CacheKey(1, request) for request in range(30)]
    prompt.kv_cache_manager.deallocate_cache(prompt.kv_cache_manager.allocate_cache(desc, keys))
    with logged(logging.INFO) as texts:
        prompt.finalize()
    text = next(text for text in texts if "30 keys" in text)
    assert "req_id=0," in text
    assert "req_id=19," in text
    assert "req_id=20," not in text
