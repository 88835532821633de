"""Links and engines that end while other threads are at work with them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import scripts
from ends import End, desc
from peer import Peer

from llm_datadist import BlocksCacheKey, CacheKeyByIdAndIndex, LLMException, LLMStatusCode
from llm_datadist._engine.uses import Turn

OF = desc(2, 2, 64)

ALLOCATING = """
import sys, threading, time
from llm_datadist import CacheDesc, CacheKey, DataType, LLMConfig, LLMDataDist, LLMException, LLMRole
config = LLMConfig()
config.device_id = 0
desc = CacheDesc(4, [4, 1024], DataType.DT_FLOAT16)
codes = set()
for round in range(30):
    dd = LLMDataDist(LLMRole.DECODER, 2)
    dd.init(config.generate_options())
    manager = dd.kv_cache_manager
    started = threading.Barrier(5)
    def work():
        started.wait()
        try:
            while True:
                manager.deallocate_cache(manager.allocate_cache(desc))
        except LLMException as error:
            codes.add(error.status_code.name)
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    started.wait()
    time.sleep(0.002)
    dd.finalize()
    for thread in threads:
        thread.join()
print(codes)
"""


@pytest.mark.needs("sparse")
def test_finalize_while_threads_allocate(tmp_path: Path) -> None:
    """S-172, S-173: they are told that the engine has ended, and touch nothing that is gone."""
    ended = scripts.run(ALLOCATING, cwd=tmp_path)
    assert ended.returncode == 0, ended
    assert ended.stdout.strip() == "{'LLM_ENGINE_FINALIZED'}", ended


@pytest.fixture
def remote(peer: Peer) -> Any:
    there, here = End(peer, 1, remote=True), End(None, 2, remote=True)
    yield there, here
    here.close()
    there.close()


def test_pushes_while_the_link_comes_and_goes(remote: tuple[End, End]) -> None:
    """S-191, E-96: a push that has lost its link says so, and touches nothing of it."""
    there, here = remote
    target = there.allocate(OF)
    source = here.allocate(OF, salt=1)
    key = CacheKeyByIdAndIndex(1, there.id(target), 0)
    stop, codes = threading.Event(), set()

    def push() -> None:
        while not stop.is_set():
            try:
                here.manager.push_cache(key, source, 0, src_layer_range=range(1), dst_layer_range=range(1))
            except LLMException as error:
                codes.add(error.status_code)

    threads = [threading.Thread(target=push) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(100):
        here.link(there)
        here.dd.unlink_clusters([there.info()], 5000)
    stop.set()
    for thread in threads:
        thread.join(60)
    assert codes <= {LLMStatusCode.LLM_NOT_YET_LINK, LLMStatusCode.LLM_KV_CACHE_NOT_EXIST}
    here.link(there)
    here.manager.push_cache(key, source, 0)
    there.check(target, OF, {t: [(0, here.expected(OF, t, 1)[:64])] for t in range(2)})


def test_a_push_leaves_the_pin_of_the_next_alone(remote: tuple[End, End], monkeypatch: Any) -> None:
    """B04: one link has one pin, which is that of whoever has the link."""
    there, here = remote
    there.allocate(OF, BlocksCacheKey(1, 7), blocks=True)
    source = here.allocate(OF, salt=1, blocks=True)
    here.link(there)
    links = here.dd._engine.links
    link, give_back = links.to(1), links.give_back
    given, second_writes = threading.Event(), threading.Event()
    write: Callable[..., None] = link.write
    pins: list[Any] = []

    def held(use: Any) -> None:
        give_back(use)
        if threading.current_thread() is first and not given.is_set():
            given.set()
            assert second_writes.wait(30)

    def slow(*args: Any) -> None:
        if threading.current_thread() is second:
            second_writes.set()
            first.join(30)
            pins.append(there.peer.make("inside:pins"))  # type: ignore[union-attr]
        write(*args)

    monkeypatch.setattr(links, "give_back", held)
    monkeypatch.setattr(link, "write", slow)

    def push() -> None:
        one = range(1)
        here.manager.push_blocks(BlocksCacheKey(1, 7), source, [0], [0], src_layer_range=one, dst_layer_range=one)

    first, second = threading.Thread(target=push), threading.Thread(target=push)
    first.start()
    assert given.wait(30)
    second.start()
    second.join(60)
    assert pins
    assert any(pins[0]), "the pin of the second push was cleared by the first"


def test_those_who_wait_get_their_turn() -> None:
    """S-191: a thread that takes the turn again and again does not keep it."""
    turn, together = Turn(), threading.Barrier(3)
    order: list[int] = []

    def work(i: int) -> None:
        together.wait(30)
        while len(order) < 300:
            taker = object()
            assert turn.claim(taker, 2**63 - 1)
            order.append(i)
            time.sleep(0.0001)  # lets the others come and wait
            turn.release(taker)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert min(order.count(i) for i in range(3)) > 50, order


def test_one_who_gives_up_waiting_holds_nobody_up() -> None:
    turn, first, second = Turn(), object(), object()
    assert turn.claim(first)
    assert not turn.claim(second)
    assert not turn.claim(second, 0)
    turn.release(second)
    assert not turn.claim(second)
    turn.release(first)
    assert turn.claim(second)
