"""check_link_status: a sign of life of a linked prompt."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest
from pairs import Decoder, Prompt, bytes_desc, options
from refusals import PARAM_INVALID, refuses
from stall import Stalled, set_faults

from llm_datadist import BlocksCacheKey, CacheKey, LLMDataDist, LLMRole
from llm_datadist import LLMStatusCode as Code

DESC = bytes_desc(2, 2, 64)


@pytest.mark.parametrize("number", [None, "1", 1.0, True])
def test_e120_type(decoder: Decoder, number: Any) -> None:
    """E-120: the id is an integer."""
    with refuses(TypeError, "remote_cluster_id", "int"):
        decoder.dd.check_link_status(number)


@pytest.mark.parametrize("number", [-1, 2**64])
def test_e120_range(decoder: Decoder, number: int) -> None:
    """E-120: the id has 64 bits."""
    with refuses(ValueError, "remote_cluster_id", number, 2**64 - 1):
        decoder.dd.check_link_status(number)


@pytest.mark.parametrize("role", [LLMRole.PROMPT, LLMRole.MIX])
def test_e121_role(role: LLMRole) -> None:
    """E-121: only a client asks; the id is looked at first."""
    dd = LLMDataDist(role, 1)
    dd.init(options("10.0.1.1:26000"))
    try:
        with refuses(PARAM_INVALID, "check_link_status", "DECODER", role):
            dd.check_link_status(2)
        with refuses(TypeError, "remote_cluster_id"):
            dd.check_link_status(None)  # type: ignore[arg-type]
    finally:
        dd.finalize()


def test_e122_not_linked(prompt: Prompt, decoder: Decoder) -> None:
    """E-122: never linked, the own id, and unlinked are all not linked."""
    for number in (1, 2, 2**64 - 1):
        with refuses(Code.LLM_NOT_YET_LINK, f"cluster {number}"):
            decoder.dd.check_link_status(number)
    decoder.link(prompt)
    assert decoder.dd.check_link_status(1) is None
    decoder.dd.unlink_clusters([prompt.info()], 5000)
    with refuses(Code.LLM_NOT_YET_LINK, "cluster 1"):
        decoder.dd.check_link_status(1)


def test_s141_data_is_not_touched(linked: tuple[Prompt, Decoder]) -> None:
    """S-141: a check moves no data and spends no key."""
    prompt, decoder = linked
    prompt.allocate(DESC, [CacheKey(1, 10)])
    cache = decoder.allocate(DESC)
    for _ in range(100):
        decoder.dd.check_link_status(1)
    decoder.untouched(cache)
    decoder.manager.pull_cache(CacheKey(1, 10), cache)


def test_e123_during_a_pull(linked: tuple[Prompt, Decoder]) -> None:
    """E-123: a link that carries a transfer is busy."""
    prompt, decoder = linked
    decoder.dd._engine.transfers._timeout_ms = 60000
    prompt.allocate(DESC, [CacheKey(1, 10)])
    cache = decoder.allocate(DESC)
    with Stalled(decoder.dd, lambda: decoder.manager.pull_cache(CacheKey(1, 10), cache)) as pull:
        with refuses(Code.LLM_LINK_BUSY, "cluster 1"):
            decoder.dd.check_link_status(1)
        assert pull.finish() is None
    decoder.dd.check_link_status(1)


def test_e124_silent_peer(prompt: Prompt) -> None:
    """E-124, S-141, S-183: a stopped prompt is silent, not dead: later checks succeed, and so do pulls."""
    decoder = Decoder(sync_kv_timeout=300)
    try:
        decoder.link(prompt)
        prompt.allocate_blocks(DESC, BlocksCacheKey(1))
        cache = decoder.allocate(DESC, blocks=True)
        prompt.peer.stop()
        try:
            for _ in range(2):
                start = time.monotonic()
                with refuses(Code.LLM_WAIT_PROCESS_TIMEOUT, "cluster 1", "300"):
                    decoder.dd.check_link_status(1)
                assert 0.29 <= time.monotonic() - start < 5
        finally:
            prompt.peer.signal(signal.SIGCONT)
        deadline = time.monotonic() + 30
        while True:
            try:
                decoder.dd.check_link_status(1)
                break
            except RuntimeError:
                assert time.monotonic() < deadline
        decoder.manager.pull_blocks(BlocksCacheKey(1), cache, [0, 1], [1, 0])
    finally:
        decoder.dd.finalize()


@pytest.mark.needs("mapped_words")
def test_s183_pulls_from_a_silent_peer(linked: tuple[Prompt, Decoder]) -> None:
    """S-183: where a pull asks nothing of the prompt's process, it goes on while that is stopped."""
    prompt, decoder = linked
    prompt.allocate_blocks(DESC, BlocksCacheKey(1))
    cache = decoder.allocate(DESC, blocks=True)
    prompt.peer.stop()
    try:
        decoder.manager.pull_blocks(BlocksCacheKey(1), cache, [0, 1], [1, 0])
    finally:
        prompt.peer.signal(signal.SIGCONT)


def test_s183_broken_link(linked: tuple[Prompt, Decoder]) -> None:
    """S-183: a link whose peer has gone is not a silent one."""
    _, decoder = linked
    set_faults(decoder.dd, drop=True)
    with refuses(Code.LLM_NOT_YET_LINK, "cluster 1", "gone"):
        decoder.dd.check_link_status(1)
