"""Engines end and start again under the same name: the new one is reached at once, the old one never again (B07)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest
import traces
from expect import failure
from pairs import Decoder, Prompt, bytes_desc, options
from peer import Peer

from llm_datadist import (
    BlocksCacheKey,
    CacheKey,
    CacheKeyByIdAndIndex,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
)

DESC = bytes_desc(2, 4, 4096)
NOT_LINKED = LLMStatusCode.LLM_NOT_YET_LINK


def restart(peer: Peer, former: Prompt) -> Prompt:
    """Start a prompt under the id and at the address of another."""
    prompt = Prompt.__new__(Prompt)
    prompt.peer, prompt.cluster_id = peer, former.cluster_id
    prompt.addresses, prompt.options = former.addresses, former.options
    prompt.dd = peer.make("llm_datadist:LLMDataDist", LLMRole.PROMPT, former.cluster_id)
    prompt.dd.init(former.options)
    prompt.manager = prompt.dd.get("kv_cache_manager")
    return prompt


@pytest.mark.parametrize("unlink", [False, True])
def test_prompt_is_killed_and_started_again(start_quick: Callable[[], Peer], unlink: bool) -> None:
    """S-183, B07, B19: 20 times in all; without a new link an error, with it the new bytes, without a wait."""
    prompt = Prompt(start_quick())
    decoder = Decoder()
    try:
        cache = decoder.allocate(bytes_desc(2, 8, 4096))
        for salt in range(10):
            desc = bytes_desc(2, 8 - salt % 2 * 4, 4096)
            key = BlocksCacheKey(1, 0)
            source = prompt.allocate_blocks(desc, key, salt=salt)
            assert source.get("cache_id") == 1
            decoder.link(prompt)
            decoder.prefill(cache)
            decoder.manager.pull_blocks(key, cache, [3], [0])
            decoder.check(cache, {t: [(0, prompt.expected(desc, t, salt=salt)[3 * 4096 : 4 * 4096])] for t in range(2)})
            if desc.shape[0] == 4:
                with failure(LLMStatusCode.LLM_PARAM_INVALID, "4"):
                    decoder.manager.pull_blocks(key, cache, [7], [0])
            prompt.peer.kill()
            begin = time.monotonic()
            prompt = restart(start_quick(), prompt)
            decoder.prefill(cache)
            with failure(NOT_LINKED, "gone"):
                decoder.manager.pull_blocks(key, cache, [3], [0])
            decoder.untouched(cache)
            if unlink:
                assert decoder.dd.unlink_clusters([prompt.info()])[0] == LLMStatusCode.LLM_SUCCESS
            assert time.monotonic() - begin < 5
    finally:
        decoder.dd.finalize()


def test_decoder_is_restarted_while_the_prompt_stays(prompt: Prompt) -> None:
    """S-139, B07: a decoder that comes back under the same id links at once, also if the old one said no goodbye."""
    prompt.allocate(DESC, [CacheKey(1, 1)])
    for _ in range(20):
        decoder = Decoder()
        decoder.link(prompt)
        cache = decoder.allocate(DESC)
        decoder.manager.pull_cache(CacheKey(1, 1), cache, 0, dst_cache_offset=0)
        decoder.check(cache, {t: [(0, prompt.expected(DESC, t)[:4096])] for t in range(2)})
        decoder.dd.finalize()


def test_prompt_is_finalized_while_linked(linked: tuple[Prompt, Decoder]) -> None:
    """S-172, S-183: the next call of each kind fails at once and says why; nobody waits for a limit."""
    prompt, decoder = linked
    source = prompt.allocate(DESC, [CacheKey(1, 10)])
    prompt.allocate_blocks(DESC, BlocksCacheKey(1, 0))
    cache = decoder.allocate(DESC)
    decoder.manager.pull_blocks(BlocksCacheKey(1, 0), cache, [0], [0])
    decoder.prefill(cache)
    prompt.dd.finalize()
    begin = time.monotonic()
    for _ in range(3):
        with failure(NOT_LINKED, "gone|finalized"):
            decoder.manager.pull_blocks(BlocksCacheKey(1, 0), cache, [0], [0])
        with failure(NOT_LINKED, "gone|finalized"):
            decoder.manager.pull_cache(CacheKey(1, 10), cache)
        with failure(NOT_LINKED, "gone|finalized"):
            decoder.manager.pull_cache(CacheKeyByIdAndIndex(1, 1, 0), cache)
        with failure(NOT_LINKED, "gone|finalized"):
            decoder.dd.check_link_status(1)
    assert time.monotonic() - begin < 5
    decoder.untouched(cache)
    with failure(LLMStatusCode.LLM_ENGINE_FINALIZED):
        prompt.manager.deallocate_cache(source)
    again = restart(prompt.peer, prompt)
    again.allocate(DESC, [CacheKey(1, 10)], salt=7)
    decoder.link(again)
    decoder.manager.pull_cache(CacheKey(1, 10), cache)
    decoder.check(cache, {t: [(0, again.expected(DESC, t, salt=7)[:4096])] for t in range(2)})


def test_init_and_finalize_dozens_of_times() -> None:
    """S-10, S-171 to S-175, A-3: each engine is like the first, and nothing piles up."""
    first = None
    for _ in range(50):
        prompt = LLMDataDist(LLMRole.PROMPT, 1)
        prompt.init(options("10.0.0.1:26000"))
        prompt.init(options("10.0.0.1:26000"))
        cache = prompt.kv_cache_manager.allocate_cache(DESC, [CacheKey(1, 1)])
        assert cache.cache_id == 1
        manager = prompt.kv_cache_manager
        prompt.finalize()
        prompt.finalize()
        with failure(LLMStatusCode.LLM_ENGINE_FINALIZED):
            manager.allocate_cache(DESC)
        assert not manager.is_initialized()
        first = first or traces.of(os.getpid())
        traces.wait_for(os.getpid(), first)


def test_finalize_against_pulls(peer: Peer, decoder: Decoder) -> None:
    """S-172, S-192: the prompt is finalized and started again under a decoder that links and pulls all the time."""
    desc = bytes_desc(2, 1, 256 << 10)
    key = CacheKey(1, 1)
    prompt = Prompt(peer)
    prompt.dd.finalize()
    cache = decoder.allocate(desc)
    good = broken = 0
    peer.start("make", "inside:keep_finalizing", prompt.options, desc, key, 40)
    while not peer.has_answered():
        assert decoder.dd.link_clusters([prompt.info()], 5000)[1][0] in (
            LLMStatusCode.LLM_SUCCESS,
            LLMStatusCode.LLM_ALREADY_LINK,
            LLMStatusCode.LLM_LINK_FAILED,
        )
        try:
            while True:
                decoder.manager.pull_cache(key, cache, 0, dst_cache_offset=0)
                good += 1
        except LLMException as e:
            if e.status_code not in (NOT_LINKED, LLMStatusCode.LLM_KV_CACHE_NOT_EXIST):
                raise
            broken += e.status_code == NOT_LINKED
    peer.answer()
    assert good
    assert broken
    assert traces.names(os.environ["LLM_DATADIST_NAMESPACE"]) == []
