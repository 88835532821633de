"""A process dies or stops: whoever is left goes on, knows why, and can clean up (B06)."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import inside
import pytest
import traces
from expect import failure
from pairs import Decoder, Prompt, bytes_desc, options
from peer import Peer, Remote
from stall import clear_faults

from llm_datadist import CacheKey, LLMException, LLMRole, LLMStatusCode

DESC = bytes_desc(2, 2, 4096)
BIG = bytes_desc(2, 1, 1 << 20)
NOT_LINKED = LLMStatusCode.LLM_NOT_YET_LINK
LONG = {"sync_kv_timeout": 30_000}

Start = Callable[[], Peer]


def in_thread(call: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """Run a call in a thread; its result, or what it raises, comes into the list."""
    outcome: list[object] = []

    def run() -> None:
        try:
            outcome.append(call())
        except LLMException as e:
            outcome.append(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, outcome


def check_survivor(decoder: Decoder, dead: Prompt, other: Prompt) -> None:
    """The survivor's other link works, and unlinking the dead one succeeds without it."""
    cache = decoder.allocate(DESC)
    decoder.manager.pull_cache(CacheKey(other.cluster_id, 21), cache, 0, dst_cache_offset=0)
    assert decoder.tensor(cache, 1)[:4096] == other.expected(DESC, 1)[:4096]
    begin = time.monotonic()
    for force in (False, True):
        overall, each = decoder.dd.unlink_clusters([dead.info()], 5000, force)
        assert overall == LLMStatusCode.LLM_SUCCESS
        assert each[0] in (LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_NOT_YET_LINK)
    assert time.monotonic() - begin < 5
    decoder.manager.pull_cache(CacheKey(other.cluster_id, 21), cache, 0, dst_cache_offset=0)


@pytest.fixture
def other(peer: Peer) -> Prompt:
    """Give a second prompt, which nothing happens to."""
    prompt = Prompt(peer, 3)
    prompt.allocate(DESC, [CacheKey(3, 21)])
    return prompt


# A child that foreign code has forked holds the connection: only on one host another sign of the death is there.
CHILDREN = [None, "fork_waiting", pytest.param("fork_without_hooks", marks=pytest.mark.needs(network=False))]


@pytest.mark.parametrize("child", CHILDREN)
def test_prompt_is_killed_before_a_pull(start_quick: Start, other: Prompt, child: str | None) -> None:
    """S-183, B06 (a): the next call says at once that the peer is gone, even while a forked child of it lives."""
    doomed = start_quick()
    prompt = Prompt(doomed)
    prompt.allocate(DESC, [CacheKey(1, 10)])
    decoder = Decoder(**LONG)
    child_pid = 0
    try:
        decoder.link(prompt, other)
        child_pid = doomed.make(f"inside:{child}") if child else 0
        cache = decoder.allocate(DESC)
        decoder.manager.pull_cache(CacheKey(1, 10), cache, 0, dst_cache_offset=0)
        decoder.prefill(cache)
        doomed.kill()
        begin = time.monotonic()
        for _ in range(2):
            with failure(NOT_LINKED, "gone"):
                decoder.manager.pull_cache(CacheKey(1, 10), cache)
            with failure(NOT_LINKED, "gone"):
                decoder.dd.check_link_status(1)
        assert time.monotonic() - begin < 5
        decoder.untouched(cache)
        assert decoder.dd.link_clusters([prompt.info()], 5000)[1] == [LLMStatusCode.LLM_LINK_FAILED]
        check_survivor(decoder, prompt, other)
    finally:
        decoder.dd.finalize()
        if child_pid:
            os.kill(child_pid, signal.SIGKILL)


@pytest.mark.parametrize("child", CHILDREN)
def test_prompt_is_killed_during_a_pull(start_quick: Start, other: Prompt, child: str | None) -> None:
    """S-183, B06 (b): a pull that stands still ends when its peer dies, long before its own limit."""
    doomed = start_quick()
    prompt = Prompt(doomed)
    prompt.allocate(BIG, [CacheKey(1, 10)])
    decoder = Decoder(**LONG)
    child_pid = 0
    try:
        decoder.link(prompt, other)
        child_pid = doomed.make(f"inside:{child}") if child else 0
        cache = decoder.allocate(BIG)
        faults = inside.inject(decoder.dd, stall_at_byte=1 << 20)
        thread, outcome = in_thread(lambda: decoder.manager.pull_cache(CacheKey(1, 10), cache))
        assert faults.stall_entered.wait(10)
        begin = time.monotonic()
        doomed.kill()
        thread.join(10)
        assert time.monotonic() - begin < 5
        assert isinstance(outcome[0], LLMException)
        assert outcome[0].status_code == NOT_LINKED
        assert "gone" in str(outcome[0])
        decoder.prefill(cache)
        faults.resume.set()
        decoder.untouched(cache)
        clear_faults(decoder.dd)
        check_survivor(decoder, prompt, other)
    finally:
        decoder.dd.finalize()
        if child_pid:
            os.kill(child_pid, signal.SIGKILL)


@pytest.mark.parametrize("step", ["WELCOME", "READY"])
@pytest.mark.parametrize("after", [False, True])
def test_prompt_is_killed_during_the_handshake(start_quick: Start, other: Prompt, step: str, after: bool) -> None:
    """S-136, S-183, B06: a link that its server dies in fails at once, or is found dead by the next call."""
    doomed = start_quick()
    prompt = Prompt(doomed)
    doomed.make("inside:die_when", step, after)
    decoder = Decoder(**LONG)
    try:
        begin = time.monotonic()
        overall, each = decoder.dd.link_clusters([prompt.info(), other.info()], 20_000)
        assert time.monotonic() - begin < 15
        assert each[1] == LLMStatusCode.LLM_SUCCESS
        if (step, after) == ("READY", True) and each[0] == LLMStatusCode.LLM_SUCCESS:
            assert overall == LLMStatusCode.LLM_SUCCESS
        else:
            assert (overall, each[0]) == (LLMStatusCode.LLM_LINK_FAILED,) * 2
        doomed.process.join(5)
        with failure(NOT_LINKED):
            decoder.manager.pull_cache(CacheKey(1, 10), decoder.allocate(DESC))
        check_survivor(decoder, prompt, other)
    finally:
        decoder.dd.finalize()


def test_prompt_is_killed_while_it_does_not_answer(start_quick: Start) -> None:
    """S-136, B06: `link_clusters` ends when the server that it waits for is killed, long before its limit."""
    doomed = start_quick()
    prompt = Prompt(doomed)
    decoder = Decoder()
    try:
        doomed.stop()
        thread, outcome = in_thread(lambda: decoder.dd.link_clusters([prompt.info()], 30_000))
        namespace = os.environ["LLM_DATADIST_NAMESPACE"]
        traces.wait_until(lambda: len(traces.names(namespace)) > 1, "the connection")
        begin = time.monotonic()
        doomed.kill()
        thread.join(10)
        assert time.monotonic() - begin < 5
        assert outcome == [(LLMStatusCode.LLM_LINK_FAILED, [LLMStatusCode.LLM_LINK_FAILED])]
    finally:
        decoder.dd.finalize()


def test_link_to_a_stopped_prompt_ends_by_its_limit(start_quick: Start) -> None:
    """S-136, S-138: nothing is killed, so the limit tells; once the prompt goes on, linking works."""
    stopped = start_quick()
    prompt = Prompt(stopped)
    decoder = Decoder()
    before = traces.of(stopped.pid)
    try:
        stopped.stop()
        begin = time.monotonic()
        assert decoder.dd.link_clusters([prompt.info()], 300) == (
            LLMStatusCode.LLM_LINK_FAILED,
            [LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT],
        )
        assert 0.3 <= time.monotonic() - begin < 5
        stopped.signal(signal.SIGCONT)
        decoder.link(prompt)
        decoder.dd.unlink_clusters([prompt.info()])
        traces.wait_for(stopped.pid, before)
    finally:
        decoder.dd.finalize()


def start_decoder(peer: Peer) -> tuple[Remote, Remote]:
    """Start a decoder in a peer, with room for a pull of `BIG`."""
    dd = peer.make("llm_datadist:LLMDataDist", LLMRole.DECODER, 2)
    dd.init(options(**LONG))
    return dd, dd.get("kv_cache_manager").allocate_cache(BIG)


@pytest.mark.parametrize("moment", ["idle", "in a pull", "HELLO", "after HELLO", "READY", "after READY"])
def test_decoder_is_killed(start_quick: Start, moment: str) -> None:
    """B06: the prompt is back to what it held before, serves another decoder, and can be finalized."""
    prompt = Prompt(start_quick())
    prompt.allocate(BIG, [CacheKey(1, 10)])
    before = traces.of(prompt.peer.pid)

    doomed = start_quick()
    dd, cache = start_decoder(doomed)
    if moment in ("idle", "in a pull"):
        assert dd.link_clusters([prompt.info()], 5000)[0] == LLMStatusCode.LLM_SUCCESS
        if moment == "in a pull":
            doomed.make("inside:start_stalled_pull", CacheKey(1, 10), cache, 1 << 20)
        doomed.kill()
    else:
        doomed.make("inside:die_when", moment.removeprefix("after "), moment.startswith("after"))
        doomed.start("call", dd, "link_clusters", [prompt.info()], 5000)
        with pytest.raises(RuntimeError, match="has ended"):
            doomed.answer()
    traces.wait_for(prompt.peer.pid, before)

    decoder = Decoder()
    try:
        decoder.link(prompt)
        mine = decoder.allocate(BIG)
        decoder.manager.pull_cache(CacheKey(1, 10), mine)
        decoder.check(mine, {t: [(0, prompt.expected(BIG, t))] for t in range(2)})
        prompt.dd.finalize()
        assert traces.names(os.environ["LLM_DATADIST_NAMESPACE"]) == []
    finally:
        decoder.dd.finalize()
