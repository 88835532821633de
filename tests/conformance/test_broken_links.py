"""After a transfer that the driver failed: no memory that bytes may still come to is used again too soon."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from ends import End, desc
from peer import Peer
from refusals import refuses

from llm_datadist import BlocksCacheKey, CacheKey, LayerSynchronizer, LLMRole, LLMStatusCode, TransferConfig
from llm_datadist._engine import engine as engine_module
from llm_datadist._engine.directory import Directory
from llm_datadist._engine.links import Link
from llm_datadist._engine.wire import Frame, Kind
from llm_datadist.backend import BackendError, Failure

OF = desc(2, 2, 64)
FAILED = LLMStatusCode.LLM_FAILED
NOT_YET_LINK = LLMStatusCode.LLM_NOT_YET_LINK


@pytest.fixture
def ends(peer: Peer, request: pytest.FixtureRequest) -> Iterator[tuple[End, End]]:
    remote = bool(getattr(request, "param", False))
    there, here = End(peer, 1, remote=remote), End(None, 2, remote=remote)
    here.link(there)
    yield there, here
    here.close()
    there.close()


def link_of(here: End) -> Link:
    return here.dd._engine.links.to(1)  # type: ignore[no-any-return]


def failing(*_: Any) -> None:
    raise BackendError(Failure.FAILED, "the card is gone (LINK_ERROR 507056)", 507056, breaks_link=True)


def test_a_reader_keeps_its_memory_until_the_link_is_down(ends: tuple[End, End], monkeypatch: Any) -> None:
    there, here = ends
    there.allocate(OF, BlocksCacheKey(1, 7), salt=0, blocks=True)
    cache = here.allocate(OF, blocks=True)
    addresses = here.addresses(cache)
    link, down = link_of(here), threading.Event()
    monkeypatch.setattr(link, "read", failing)
    monkeypatch.setattr(link.endpoint, "revoked", down.is_set)
    with refuses(FAILED, "LINK_ERROR", "507056"):
        here.manager.pull_blocks(BlocksCacheKey(1, 7), cache, [0], [0])
    with refuses(NOT_YET_LINK, "a transfer failed"):
        here.manager.pull_blocks(BlocksCacheKey(1, 7), cache, [0], [0])
    here.manager.deallocate_blocks_cache(cache)
    other = here.allocate(OF, blocks=True)
    assert not set(here.addresses(other)) & set(addresses)
    down.set()
    here.manager.deallocate_blocks_cache(other)
    assert here.addresses(here.allocate(OF, blocks=True)) == addresses


@pytest.mark.parametrize("ends", [True], indirect=True)
def test_a_writer_leaves_its_pin(ends: tuple[End, End], monkeypatch: Any) -> None:
    """The owner gives the memory out again only when it knows that nobody writes to it any more."""
    there, here = ends
    target = there.allocate(OF, BlocksCacheKey(1, 7), blocks=True)
    addresses = there.addresses(target)
    source = here.allocate(OF, salt=1, blocks=True)
    monkeypatch.setattr(link_of(here), "write", failing)
    monkeypatch.setattr(link_of(here).endpoint, "revoked", lambda: True)
    with refuses(FAILED, "LINK_ERROR"):
        here.manager.push_blocks(BlocksCacheKey(1, 7), source, [0], [0])
    there.manager.deallocate_blocks_cache(target)
    other = there.allocate(OF, BlocksCacheKey(1, 8), blocks=True)
    if here.dd._engine.backend.capabilities.mapped_words:
        # Only the end of this process would prove it.
        assert not set(there.addresses(other)) & set(addresses)
    here.link(there)
    here.manager.push_blocks(BlocksCacheKey(1, 8), source, [0], [0])
    there.check(other, OF, {t: [(0, here.expected(OF, t, 1)[:64])] for t in range(2)})


@pytest.mark.needs(mapped_words=False)
def test_a_read_of_registered_memory_is_pinned(peer: Peer, monkeypatch: Any) -> None:
    """S-192: it is the driver's no longer once it is unregistered, so that waits for the read."""
    there, here = End(peer, 1), End(None, 2)
    there.register(OF, BlocksCacheKey(1, 7), salt=0, blocks=True)
    here.link(there)
    link, pins = link_of(here), []
    read = link.endpoint.read

    def looked_at(*args: Any) -> None:
        pins.append(peer.make("inside:pins"))
        read(*args)

    monkeypatch.setattr(link.endpoint, "read", looked_at)
    monkeypatch.setattr(link, "read", type(link.read.__self__)(link.endpoint, link.directory).read)  # type: ignore[attr-defined]
    cache = here.allocate(OF, blocks=True)
    here.manager.pull_blocks(BlocksCacheKey(1, 7), cache, [1], [0])
    here.check(cache, OF, {t: [(0, there.expected(OF, t)[64:])] for t in range(2)})
    assert pins
    assert pins[0] or link.staged
    assert peer.make("inside:pins") == []
    here.close()
    there.close()


def test_a_cache_that_no_address_leads_to_harms_no_other(ends: tuple[End, End], monkeypatch: Any) -> None:
    there, here = ends
    late, target = there.allocate(OF), there.allocate(OF)
    source = here.allocate(OF, salt=1)
    link = link_of(here)
    address_of, hidden = link.endpoint.address_of, there.addresses(late)

    def guarded(region: int, offset: int) -> int:
        address = address_of(region, offset)
        if address in hidden:
            raise BackendError(Failure.UNSUPPORTED, "the region was registered after this link")
        return address

    monkeypatch.setattr(link.endpoint, "address_of", guarded)

    class Ready(LayerSynchronizer):
        def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
            return True

    def send(addresses: list[int]) -> LLMStatusCode:
        config = TransferConfig(1, addresses, range(1), 0)
        task = here.manager.transfer_cache_async(source, Ready(), [config])
        return task.synchronize(20000)  # type: ignore[no-any-return]

    assert send(there.addresses(target)) is LLMStatusCode.LLM_SUCCESS
    there.check(target, OF, {t: [(0, here.expected(OF, t, 1)[:64])] for t in range(2)})
    assert send(hidden) is LLMStatusCode.LLM_PARAM_INVALID
    there.untouched(late, OF)


def test_what_the_driver_does_not_take_back(ends: tuple[End, End], monkeypatch: Any) -> None:
    _, here = ends
    backend = here.dd._engine.backend
    unregister = backend.unregister

    def refuse(*args: Any) -> None:
        unregister(*args)
        raise BackendError(Failure.FAILED, "the card still has it (MEMORY 3)", 3)

    monkeypatch.setattr(backend, "unregister", refuse)
    first, second = here.register(OF, [CacheKey(2, 10)]), here.register(OF)
    with refuses(FAILED, "unregistered", "the card still has it"):
        here.manager.unregister_cache(first.cache_id)
    here.manager.unregister_cache(first.cache_id)
    assert second.cache_id > first.cache_id  # and finalize, which meets the same, goes on


def test_finalize_while_a_link_does_not_get_done(peer: Peer, monkeypatch: Any) -> None:
    """The memory stays, rather than being unmapped under the thread that makes the link."""
    there, here = End(peer, 1, LLMRole.PROMPT), End(None, 2)
    backend, entered, go_on = here.dd._engine.backend, threading.Event(), threading.Event()
    connect = backend.connect

    def stuck(*args: Any) -> Any:
        entered.set()
        go_on.wait(60)
        return connect(*args)

    monkeypatch.setattr(backend, "connect", stuck)
    monkeypatch.setattr(engine_module, "CLOSE_NS", 3 * 10**8)
    closed: list[bool] = []
    close: Callable[[], None] = backend.close
    monkeypatch.setattr(backend, "close", lambda: closed.append(True))
    thread = threading.Thread(target=lambda: here.dd.link_clusters([there.info()], 60000))
    thread.start()
    assert entered.wait(30)
    here.close()
    assert not closed
    go_on.set()
    thread.join(60)
    assert not thread.is_alive()
    close()
    there.close()


@pytest.mark.parametrize("kind", [Kind.STAGE, Kind.PING])
def test_a_peer_that_floods_is_hung_up_on(ends: tuple[End, End], kind: Kind) -> None:
    """Others must not wait until thousands of requests are answered, nor may they be kept without end."""
    there, here = ends
    link = link_of(here)
    assert there.peer
    there.peer.stop()
    try:
        for number in range(100):
            link.channel.send(Frame(kind, 1000 + number, {"cache": 1}), time.monotonic_ns() + 10**10)
    finally:
        there.peer.signal(signal.SIGCONT)
    end = time.monotonic() + 30
    while link.usable():
        assert time.monotonic() < end, "the peer took all of it"
        time.sleep(0.01)


@pytest.mark.parametrize("call", [1, 2])
def test_an_interrupted_registration_is_taken_back(ends: tuple[End, End], monkeypatch: Any, call: int) -> None:
    """Neither the cache nor its key is left, for this engine or for others, and the memory can be registered again."""
    there, here = ends
    addresses = [here.take(OF.size) for _ in range(OF.num_tensors)]
    publish, calls = Directory.publish, []

    def interrupted(*args: Any) -> None:
        calls.append(args)
        if len(calls) == call:
            raise KeyboardInterrupt
        publish(*args)

    with monkeypatch.context() as patch:
        patch.setattr(Directory, "publish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            here.manager.register_cache(OF, addresses, [CacheKey(2, 10)])
    cache = here.manager.register_cache(OF, addresses, [CacheKey(2, 10)])
    here.manager.unregister_cache(cache.cache_id)
    with refuses(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, "10"):
        there.manager.pull_cache(CacheKey(2, 10), there.allocate(OF))
