"""Ports in use, and values that are no ports (B19)."""

from __future__ import annotations

import os
import socket

import pytest
import traces
from addresses import bindable
from expect import failure
from pairs import Decoder, Prompt, bytes_desc, options
from peer import Peer

from llm_datadist import CacheKey, LLMDataDist, LLMException, LLMRole, LLMStatusCode

ADDRESS = bindable("127.0.0.1:26123")


def names() -> list[str]:
    """List what listens in the namespace of this test."""
    return traces.names(os.environ["LLM_DATADIST_NAMESPACE"])


def test_b19_port_of_another_prompt(peer: Peer) -> None:
    """B19, S-175, E-78: `init` fails at once, names the address, leaves nothing, and works at another port."""
    holder = LLMDataDist(LLMRole.PROMPT, 5)
    holder.init(options(ADDRESS))
    prompt = peer.make("llm_datadist:LLMDataDist", LLMRole.PROMPT, 1)
    before = None
    for _ in range(3):
        with failure(LLMStatusCode.LLM_FAILED, f"{ADDRESS}.*holds"):
            prompt.init(options(ADDRESS))
        traces.wait_for(peer.pid, before := before or traces.of(peer.pid))
        assert len(names()) == 1
    prompt.init(options("127.0.0.1:26124"))
    assert len(names()) == 2
    prompt.finalize()
    holder.finalize()
    prompt.init(options(ADDRESS))
    assert len(names()) == 1


def test_b19_second_of_two_addresses_is_taken() -> None:
    """B19, S-175: a device's address is taken: none of the others stays bound."""
    holder = LLMDataDist(LLMRole.PROMPT, 5)
    holder.init(options(ADDRESS))
    LLMDataDist.llm_engine_instance = None
    try:
        prompt = LLMDataDist(LLMRole.PROMPT, 1)
        with failure(LLMStatusCode.LLM_FAILED, "26123"):
            prompt.init(options(f"127.0.0.1:26125;{ADDRESS}", [0, 1]))
        assert len(names()) == 1
        assert LLMDataDist.llm_engine_instance is None
    finally:
        holder.finalize()


@pytest.mark.needs(network=False)
def test_b19_a_plain_socket_does_not_matter(peer: Peer, decoder: Decoder) -> None:
    """B19: names of the simulator are in a space of their own, so a server at the same port is no obstacle."""
    with socket.socket() as plain:
        plain.bind(("127.0.0.1", 0))
        plain.listen()
        prompt = Prompt(peer)
        prompt.dd.finalize()
        prompt.addresses = [f"127.0.0.1:{plain.getsockname()[1]}"]
        prompt.dd.init(options(prompt.addresses[0]))
        decoder.link(prompt)


def test_b19_finalize_and_init_at_the_same_port(peer: Peer, decoder: Decoder) -> None:
    """B19: while a client of the former is still linked, and at once."""
    prompt = Prompt(peer)
    cache = decoder.allocate(bytes_desc(1, 1, 64))
    for word in range(1, 21):
        decoder.link(prompt)
        peer.make("inside:offer", cache.cache_desc, [CacheKey(1, 1)], word)
        decoder.prefill(cache)
        decoder.manager.pull_cache(CacheKey(1, 1), cache)
        decoder.check(cache, {0: [(0, word.to_bytes(8, "little") * 8)]})
        prompt.dd.finalize()
        prompt.dd.init(prompt.options)


@pytest.mark.parametrize("port", ["0", "65536", "-1", "80x", "", " 80", "+80", "0x50", "8 0", "1" * 30])
def test_b19_no_port(port: str) -> None:
    """B19, E-76, E-77: refused by `init` before anything is opened."""
    prompt = LLMDataDist(LLMRole.PROMPT, 1)
    with pytest.raises(ValueError, match=r"\S") as caught:
        prompt.init(options(f"127.0.0.1:{port}"))
    if isinstance(caught.value, LLMException):
        assert caught.value.status_code == LLMStatusCode.LLM_PARAM_INVALID
    assert names() == []
    assert LLMDataDist.llm_engine_instance is None
    prompt.init(options(ADDRESS))
    prompt.finalize()


@pytest.mark.needs(network=False)
def test_b19_privileged_port_of_an_address_elsewhere() -> None:
    """B19: no network port is opened, so the kernel's rules for them don't count."""
    prompt = LLMDataDist(LLMRole.PROMPT, 1)
    prompt.init(options("192.168.77.1:80"))
    assert len(names()) == 1
    prompt.finalize()
    assert names() == []
