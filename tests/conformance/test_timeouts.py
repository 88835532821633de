"""Time limits and failed transfers: what a pull reports, what it leaves, and how the link comes back."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pairs import PREFILL, Decoder, Prompt, bytes_desc
from refusals import refuses
from stall import Stalled, clear_faults, set_faults

from llm_datadist import BlocksCacheKey, CacheKey, KvCache
from llm_datadist import LLMStatusCode as Code

DESC = bytes_desc(4, 4, 64)
LIMIT_MS = 500

PULLS: dict[str, Callable[[Decoder, KvCache], None]] = {
    "pull_cache": lambda decoder, cache: decoder.manager.pull_cache(CacheKey(1, 10), cache),
    "pull_blocks": lambda decoder, cache: decoder.manager.pull_blocks(BlocksCacheKey(1), cache, [0], [0]),
}
each_pull = pytest.mark.parametrize("pull", PULLS.values(), ids=PULLS.keys())


@pytest.fixture
def scene(prompt: Prompt) -> Iterator[tuple[Prompt, Decoder, KvCache]]:
    """Give a linked pair with a short time limit, a request key and a blocks key, and a destination."""
    decoder = Decoder(sync_kv_timeout=LIMIT_MS)
    decoder.link(prompt)
    prompt.allocate(DESC, [CacheKey(1, 10)])
    prompt.allocate_blocks(DESC, BlocksCacheKey(1))
    yield prompt, decoder, decoder.allocate(DESC)
    decoder.dd.finalize()


def slots(prompt: Prompt) -> dict[int, list[tuple[int, bytes]]]:
    """Give what a pull of slot (or block) 0 into slot 0 brings."""
    return {t: [(0, prompt.expected(DESC, t)[:64])] for t in range(4)}


@each_pull
@pytest.mark.parametrize("at", [0, 100])
def test_e240_time_limit(scene: tuple[Prompt, Decoder, KvCache], pull: Any, at: int) -> None:
    """E-240, S-180, S-213: the call ends by its limit, and no byte of it lands afterwards (case B04)."""
    prompt, decoder, cache = scene
    start = time.monotonic()
    stalled = Stalled(decoder.dd, lambda: pull(decoder, cache), at)
    error = stalled.wait()
    assert LIMIT_MS / 1000 - 0.01 <= time.monotonic() - start < 10
    with refuses(Code.LLM_WAIT_PROCESS_TIMEOUT, "cluster 1", "sync_kv_timeout", LIMIT_MS, "partly", "link"):
        raise error or AssertionError("the pull did not fail")
    written = b"".join(decoder.tensor(cache, t)[:64] for t in range(4))
    source = b"".join(prompt.expected(DESC, t)[:64] for t in range(4))
    # A backend may begin with any part of the bytes.
    assert all(byte in (wanted, PREFILL) for byte, wanted in zip(written[:at], source, strict=False))
    assert written[at:] == bytes([PREFILL]) * (256 - at)
    decoder.prefill(cache)
    stalled.finish()
    decoder.untouched(cache)


@each_pull
def test_s183_link_is_broken_by_a_timeout(scene: tuple[Prompt, Decoder, KvCache], pull: Any) -> None:
    """S-183, S-180, S-60: until it is linked again; that needs no unlink, and the key is still bound."""
    prompt, decoder, cache = scene
    Stalled(decoder.dd, lambda: pull(decoder, cache)).wait()
    for _ in range(2):
        with refuses(Code.LLM_NOT_YET_LINK, "cluster 1", "timed out", "link the cluster again"):
            pull(decoder, cache)
        with refuses(Code.LLM_NOT_YET_LINK, "cluster 1", "timed out"):
            decoder.dd.check_link_status(1)
    decoder.untouched(cache)
    decoder.link(prompt)
    decoder.dd.check_link_status(1)
    pull(decoder, cache)
    decoder.check(cache, slots(prompt))


def test_s183_broken_link_can_be_unlinked(scene: tuple[Prompt, Decoder, KvCache]) -> None:
    """S-183, S-140: a broken link is unlinked like any other, and can then be linked again."""
    prompt, decoder, cache = scene
    Stalled(decoder.dd, lambda: PULLS["pull_cache"](decoder, cache)).wait()
    assert decoder.dd.unlink_clusters([prompt.info()], 5000) == (Code.LLM_SUCCESS, [Code.LLM_SUCCESS])
    decoder.link(prompt)
    PULLS["pull_cache"](decoder, cache)


@each_pull
def test_slow_but_in_time(scene: tuple[Prompt, Decoder, KvCache], pull: Any) -> None:
    """S-180: a transfer that is slow, but within its limit, succeeds."""
    prompt, decoder, cache = scene
    set_faults(decoder.dd, delay_s=0.05)
    pull(decoder, cache)
    decoder.check(cache, slots(prompt))


def test_each_pull_has_its_own_limit(scene: tuple[Prompt, Decoder, KvCache]) -> None:
    """S-180: the limit is one pull's, not the sum's."""
    _, decoder, cache = scene
    set_faults(decoder.dd, delay_s=0.1)
    for _ in range(7):
        PULLS["pull_blocks"](decoder, cache)


@each_pull
def test_s213_failed_transfer(scene: tuple[Prompt, Decoder, KvCache], pull: Any) -> None:
    """S-213, S-60: a transfer that the backend refuses is FAILED, writes nothing, releases nothing; the link stays."""
    prompt, decoder, cache = scene
    set_faults(decoder.dd, fail_nth=1)
    with refuses(Code.LLM_FAILED):
        pull(decoder, cache)
    decoder.untouched(cache)
    pull(decoder, cache)
    decoder.check(cache, slots(prompt))


@each_pull
def test_s213_dropped_link(scene: tuple[Prompt, Decoder, KvCache], pull: Any) -> None:
    """S-213, S-183: a link that drops is told from a slow one, and comes back by linking again."""
    prompt, decoder, cache = scene
    set_faults(decoder.dd, drop=True)
    for _ in range(2):
        with refuses(Code.LLM_NOT_YET_LINK, "cluster 1", "gone"):
            pull(decoder, cache)
    decoder.untouched(cache)
    clear_faults(decoder.dd)
    decoder.link(prompt)
    pull(decoder, cache)
    decoder.check(cache, slots(prompt))


def test_s182_link_limit_is_separate(prompt: Prompt) -> None:
    """S-182: how long a link may take has nothing to do with sync_kv_timeout, either way."""
    decoder = Decoder(sync_kv_timeout=60000)
    try:
        prompt.peer.stop()
        try:
            start = time.monotonic()
            result = decoder.dd.link_clusters([prompt.info()], 200)
            assert time.monotonic() - start < 5
        finally:
            prompt.peer.signal(signal.SIGCONT)
        assert result == (Code.LLM_LINK_FAILED, [Code.LLM_WAIT_PROCESS_TIMEOUT])
    finally:
        decoder.dd.finalize()
    decoder = Decoder(sync_kv_timeout=1)
    try:
        decoder.link(prompt)
        # S-181: what is done on this side alone has no time limit.
        for _ in range(50):
            cache = decoder.allocate(bytes_desc(64, 1, 4096))
            decoder.manager.get_cache_tensors(cache, 63)
            decoder.manager.deallocate_cache(cache)
    finally:
        decoder.dd.finalize()
