"""A prompt that is stopped is silent, not dead: what it holds can still be pulled."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import inside
import pytest
import traces
from expect import failure
from pairs import Decoder, Prompt, bytes_desc
from peer import Peer

from llm_datadist import BlocksCacheKey, CacheKey, LLMStatusCode

DESC = bytes_desc(2, 4, 8192)


@pytest.mark.needs("mapped_words")
def test_pulls_from_a_stopped_prompt_go_on(start_quick: Callable[[], Peer]) -> None:
    """S-141, S-183, B06: pulls need nothing of the prompt; `check_link_status` tells of its silence and recovers."""
    stopped = start_quick()
    prompt = Prompt(stopped)
    prompt.allocate(DESC, [CacheKey(1, 10), CacheKey(1, 11)])
    prompt.allocate_blocks(DESC, BlocksCacheKey(1, 0))
    decoder = Decoder(sync_kv_timeout=300)
    try:
        decoder.link(prompt)
        cache = decoder.allocate(DESC)
        stopped.stop()
        decoder.manager.pull_cache(CacheKey(1, 10), cache, 0)
        decoder.manager.pull_blocks(BlocksCacheKey(1, 0), cache, [3], [1])
        decoder.check(
            cache,
            {t: [(0, prompt.expected(DESC, t)[:8192]), (8192, prompt.expected(DESC, t)[3 * 8192 :])] for t in range(2)},
        )
        with failure(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST):
            decoder.manager.pull_cache(CacheKey(1, 10), cache, 0)
        for _ in range(2):
            begin = time.monotonic()
            with failure(LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT):
                decoder.dd.check_link_status(1)
            assert 0.3 <= time.monotonic() - begin < 5
        decoder.manager.pull_cache(CacheKey(1, 11), cache, 0)
        stopped.signal(signal.SIGCONT)
        traces.wait_until(lambda: checks_well(decoder), "a sign of life")
        assert not stopped.make("inside:is_bound", CacheKey(1, 11), DESC)
    finally:
        decoder.dd.finalize()


def checks_well(decoder: Decoder) -> bool:
    """Say whether the prompt answers."""
    decoder.dd.check_link_status(1)
    return True


def test_unlink_from_a_stopped_prompt(start_quick: Callable[[], Peer]) -> None:
    """S-140, E-113: the prompt can't be told in time, which is said; by force it need not be told."""
    stopped = start_quick()
    prompt = Prompt(stopped)
    prompt.allocate(DESC, [CacheKey(1, 10)])
    decoder = Decoder()
    try:
        decoder.link(prompt)
        stopped.stop()
        begin = time.monotonic()
        assert decoder.dd.unlink_clusters([prompt.info()], 300) == (
            LLMStatusCode.LLM_UNLINK_FAILED,
            [LLMStatusCode.LLM_NOTIFY_PROMPT_UNLINK_FAILED],
        )
        assert 0.3 <= time.monotonic() - begin < 5
        with failure(LLMStatusCode.LLM_NOT_YET_LINK):
            decoder.manager.pull_cache(CacheKey(1, 10), decoder.allocate(DESC), 0)
        stopped.signal(signal.SIGCONT)
        decoder.link(prompt)
        stopped.stop()
        assert decoder.dd.unlink_clusters([prompt.info()], 300, True)[0] == LLMStatusCode.LLM_SUCCESS
        stopped.signal(signal.SIGCONT)
        decoder.link(prompt)
        decoder.manager.pull_cache(CacheKey(1, 10), decoder.allocate(DESC), 0)
    finally:
        decoder.dd.finalize()


def test_finalize_beside_a_stopped_prompt(start_quick: Callable[[], Peer]) -> None:
    """S-172, B06: `finalize` needs nobody."""
    stopped = start_quick()
    prompt = Prompt(stopped)
    decoder = Decoder()
    decoder.link(prompt)
    stopped.stop()
    begin = time.monotonic()
    decoder.dd.finalize()
    assert time.monotonic() - begin < 5


def test_a_pull_that_takes_too_long(start_quick: Callable[[], Peer]) -> None:
    """S-180, S-183, B04: after its limit no byte lands any more, the link says so, and linking again helps at once."""
    prompt = Prompt(start_quick())
    desc = bytes_desc(8, 64, 16 << 10)
    prompt.allocate(desc, [CacheKey(1, slot) for slot in range(64)])
    prompt.allocate_blocks(desc, BlocksCacheKey(1, 0))
    decoder = Decoder(sync_kv_timeout=200)
    try:
        decoder.link(prompt)
        cache = decoder.allocate(desc)
        faults = inside.inject(decoder.dd, stall_at_byte=desc.size * 4)
        begin = time.monotonic()
        with failure(LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT, "200 ms"):
            decoder.manager.pull_blocks(BlocksCacheKey(1, 0), cache, range(64), range(64))
        assert 0.2 <= time.monotonic() - begin < 5
        decoder.prefill(cache)
        faults.resume.set()
        with failure(LLMStatusCode.LLM_NOT_YET_LINK, "timed out"):
            decoder.manager.pull_cache(CacheKey(1, 0), cache)
        with failure(LLMStatusCode.LLM_NOT_YET_LINK, "timed out"):
            decoder.dd.check_link_status(1)
        decoder.untouched(cache)
        decoder.link(prompt)
        decoder.manager.pull_cache(CacheKey(1, 63), cache, 0)
        decoder.check(cache, {t: [(0, prompt.expected(desc, t)[63 * (16 << 10) :])] for t in range(8)})
    finally:
        decoder.dd.finalize()
