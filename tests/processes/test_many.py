"""Many processes at once, and many links in one process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import memory
import traces
from pairs import Decoder, Prompt, bytes_desc, cluster_info, options
from peer import Peer

from llm_datadist import CacheKey, LLMRole, LLMStatusCode

DESC = bytes_desc(2, 1, 64)
ENGINES = 64


def test_32_processes_start_at_a_barrier(start_quick: Callable[[], Peer], decoder: Decoder, tmp_path: Path) -> None:
    """B19, S-131: 32 of 32 start on ports of their own, and one decoder links to all of them."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    peers = [start_quick() for _ in range(32)]
    addresses = [f"10.0.0.1:{27000 + i}" for i in range(32)]
    for i, peer in enumerate(peers):
        peer.start("make", "inside:start_at_signal", str(gate), LLMRole.PROMPT, 100 + i, options(addresses[i]))
    opened = os.open(gate, os.O_RDWR)
    for peer in peers:
        peer.answer()
    os.close(opened)
    infos = [cluster_info(100 + i, [addresses[i]]) for i in range(32)]
    cache = decoder.allocate(DESC)
    for half in (infos[:16], infos[16:]):
        assert decoder.dd.link_clusters(half, 10_000)[0] == LLMStatusCode.LLM_SUCCESS
    for i in range(32):
        decoder.manager.pull_cache(CacheKey(100 + i, 1), cache)
        assert memory.word(cache.per_device_tensor_addrs[0][1], 64) == 100 + i
    for peer in peers[:16]:
        peer.kill()
    for half in (infos[:16], infos[16:]):
        assert decoder.dd.unlink_clusters(half, 10_000)[0] == LLMStatusCode.LLM_SUCCESS


def test_128_links_of_one_decoder(start_quick: Callable[[], Peer], decoder: Decoder) -> None:
    """S-136: links cost no thread each; all give their own bytes; unlinking gives everything back."""
    before = traces.of(os.getpid())
    infos = []
    peers = [start_quick(), start_quick()]
    for number, peer in enumerate(peers):
        first = 1000 + number * ENGINES
        listen = peer.make("inside:many", LLMRole.PROMPT, first, ENGINES, DESC)
        infos += [cluster_info(first + i, listen[i]) for i in range(ENGINES)]
    before = traces.of(os.getpid())
    cache = decoder.allocate(DESC)
    calls = [infos[i : i + 16] for i in range(0, len(infos), 16)]
    for call in calls:
        assert decoder.dd.link_clusters(call, 10_000)[0] == LLMStatusCode.LLM_SUCCESS
    assert traces.of(os.getpid())["thread"] <= before["thread"] + 1
    for info in reversed(infos):
        cluster = info.remote_cluster_id
        decoder.manager.pull_cache(CacheKey(cluster, cluster), cache)
        assert {memory.word(address, 64) for address in cache.per_device_tensor_addrs[0]} == {cluster}
    peers[0].kill()
    for info in infos[ENGINES:]:
        decoder.dd.check_link_status(info.remote_cluster_id)
    for call in calls:
        assert decoder.dd.unlink_clusters(call, 10_000)[0] == LLMStatusCode.LLM_SUCCESS
    traces.wait_for(os.getpid(), before)
    peers[1].make("inside:many_end")
    assert traces.names(os.environ["LLM_DATADIST_NAMESPACE"]) == []


def test_100_decoders_on_one_prompt(start_quick: Callable[[], Peer], prompt: Prompt) -> None:
    """S-130, S-139: the prompt serves all of them without a thread for each, and forgets them when they end."""
    key = CacheKey(1, 1)
    prompt.peer.make("inside:offer", DESC, [key], 7)
    before = traces.of(prompt.peer.pid)
    peers = [start_quick(), start_quick()]
    for number, peer in enumerate(peers):
        peer.make("inside:many", LLMRole.DECODER, 2000 + number * 50, 50, DESC)
    for peer in peers:
        peer.start("make", "inside:many_pull", prompt.info(), key, DESC)
    for peer in peers:
        assert set(peer.answer()) == {7}
    traces.wait_until(lambda: traces.of(prompt.peer.pid)["thread"] <= before["thread"], "the end of the link workers")
    peers[0].kill()
    peers[1].make("inside:many_end")
    traces.wait_for(prompt.peer.pid, before)
    prompt.dd.finalize()
    assert traces.names(os.environ["LLM_DATADIST_NAMESPACE"]) == []
