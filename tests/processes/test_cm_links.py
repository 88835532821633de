"""CacheManager mode among processes: many links, meshes, threads, deaths, restarts, time limits, forks."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import inside
import pytest
import traces
from expect import failure
from members import LINKED, OK, Far, Member
from peer import Peer
from stall import clear_faults

from llm_datadist import BlocksCacheKey, LLMException, LLMStatusCode

Start = Callable[[], Peer]
NOT_LINKED = LLMStatusCode.LLM_NOT_YET_LINK
LONG = {"sync_kv_timeout": 30_000}


@pytest.fixture
def client() -> Iterator[Member]:
    """Give a member of this process that does not listen."""
    made = Member(2, listen=False, **LONG)
    yield made
    made.finalize()


def in_thread(call: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """Run a call in a thread; its result, or what it raises, comes into the list."""
    outcome: list[object] = []

    def run() -> None:
        try:
            outcome.append(call())
        except Exception as e:
            outcome.append(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, outcome


# ---------------------------------------------------------------------- many


def test_512_links(start_quick: Start, client: Member) -> None:
    """S-142, E-100, E-106: 512 links of one process, in one call; all carry bytes; all are gone after finalize."""
    peers = [start_quick() for _ in range(4)]
    for i, peer in enumerate(peers):
        peer.start("make", "members:crowd", 1000 + 128 * i, 128)
    others = [Far(*each) for peer in peers for each in peer.answer()]
    before = traces.of(os.getpid())
    client.link(*others, timeout=60_000)
    traces.wait_until(lambda: traces.of(os.getpid())["thread"] <= before["thread"], "the end of the link workers", 60)
    for other in (*others[::37], others[-1]):
        client.pull(other)
    client.unlink(*others[100:140])
    with failure(NOT_LINKED):
        client.pull(others[120])
    client.link(*others[100:140])
    client.pull(others[120])
    peers[0].kill()
    client.pull(others[200])
    client.finalize()
    for peer in peers[1:]:
        peer.start("make", "members:end_crowd")
    for peer in peers[1:]:
        peer.answer()
    assert traces.names(os.environ["LLM_DATADIST_NAMESPACE"]) == []
    client.start()


def test_16_clients_at_once(start_quick: Start) -> None:
    """S-142: many link to one listener at the same time, more than it serves at once."""
    server = Member(1, start_quick())
    peers = [start_quick() for _ in range(20)]
    for i, peer in enumerate(peers):
        peer.make("members:make_mine", 100 + i)
    for peer in peers:
        peer.start("make", "members:work_mine", [(1, server.address)], 3)
    for peer in peers:
        peer.answer()
    for i in range(20):
        server.pull(Far(100 + i))


def test_all_to_all(start_quick: Start) -> None:
    """S-130, S-191: four processes, each linked to each by both sides at the same time, pull all the time."""
    peers = [start_quick() for _ in range(4)]
    addresses = [peer.make("members:make_mine", 10 + i) for i, peer in enumerate(peers)]
    all_ = [(10 + i, address) for i, address in enumerate(addresses)]
    for i, peer in enumerate(peers):
        peer.start("make", "members:work_mine", [other for other in all_ if other[0] != 10 + i], 30)
    for peer in peers:
        peer.answer()
    # One way is enough for both.
    peers[0].make("members:unlink_mine", 11)
    for one, other in ((0, 11), (1, 10)):
        with failure(NOT_LINKED):
            peers[one].make("members:pull_mine", other)
    peers[0].make("members:pull_mine", 12)
    peers[1].make("members:pull_mine", 12)


def test_threads_pull_while_a_link_goes(start_quick: Start, client: Member) -> None:
    """S-191: four threads pull through two links; a third link, then one of the two, is unlinked meanwhile."""
    servers = [Member(10 + i, start_quick()) for i in range(3)]
    client.link(*servers)
    stop = threading.Event()
    counts = [0] * 4
    failures: list[LLMException] = []
    rooms = [client.manager.allocate_blocks_cache(client.desc) for _ in range(4)]

    def work(number: int) -> None:
        server = servers[number % 2]
        try:
            while not stop.is_set():
                client.manager.pull_blocks(BlocksCacheKey(server.cluster_id), rooms[number], range(4), range(4))
                for tensor, address in enumerate(rooms[number].tensor_addrs):
                    assert client.run("memory:read", address, client.desc.size) == server.expected(tensor)
                counts[number] += 1
        except LLMException as e:
            failures.append(e)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    traces.wait_until(lambda: min(counts) > 20, "pulls of all threads")
    for _ in range(10):
        client.unlink(servers[2])
        with failure(NOT_LINKED):
            client.manager.pull_blocks(BlocksCacheKey(12), client.room, [0], [0])
        client.link(servers[2])
    client.pull(servers[2])
    assert not failures
    client.unlink(servers[1])
    traces.wait_until(lambda: len(failures) == 2, "the end of the pulls over the removed link")
    now = counts[0]
    traces.wait_until(lambda: counts[0] > now + 20, "pulls over the other link")
    stop.set()
    for thread in threads:
        thread.join(10)
    assert [e.status_code for e in failures] == [NOT_LINKED] * 2


# ---------------------------------------------------------------------- deaths, restarts, time limits


@pytest.mark.parametrize("moment", ["idle", "in a pull"])
@pytest.mark.parametrize("remote", [False, True])
def test_peer_is_killed(start_quick: Start, moment: str, remote: bool) -> None:
    """S-183, B06: the survivor hears it at once, its other link works, unlinking succeeds without the dead one."""
    how = {"enable_remote_cache_accessible": remote, **LONG}
    client = Member(2, listen=False, **how)
    doomed, other = Member(1, start_quick(), **how), Member(3, start_quick(), **how)
    assert doomed.peer is not None
    try:
        client.link(doomed, other)
        client.pull(doomed)
        if moment == "in a pull":
            faults = inside.inject(client.dd, stall_at_byte=64)
            thread, outcome = in_thread(
                lambda: client.manager.pull_blocks(BlocksCacheKey(1), client.room, range(4), range(4))
            )
            assert faults.stall_entered.wait(10)
        begin = time.monotonic()
        doomed.peer.kill()
        if moment == "in a pull":
            thread.join(10)
            clear_faults(client.dd)
            assert isinstance(outcome[0], LLMException)
            assert outcome[0].status_code is NOT_LINKED
        with failure(NOT_LINKED, "gone"):
            client.pull(doomed)
        assert time.monotonic() - begin < 5
        assert client.dd.link_clusters([doomed.info()], 5000)[0] is LLMStatusCode.LLM_LINK_FAILED
        client.pull(other)
        for force in (False, True):
            client.unlink(doomed, force=force)
        client.pull(other)
        other.pull(client)
    finally:
        client.finalize()


@pytest.mark.parametrize("step", ["WELCOME", "READY"])
def test_peer_is_killed_in_the_handshake(start_quick: Start, client: Member, step: str) -> None:
    """S-183, B06: linking fails at once; others of the call are linked."""
    doomed, other = Member(1, start_quick()), Member(3, start_quick())
    doomed.run("inside:die_when", step, False)
    begin = time.monotonic()
    failed = LLMStatusCode.LLM_LINK_FAILED
    assert client.dd.link_clusters([doomed.info(), other.info()], 20_000) == (failed, [failed, OK])
    assert time.monotonic() - begin < 5
    client.pull(other)


@pytest.mark.parametrize("unlink", ["no", "yes", "by force"])
def test_restart(start_quick: Start, client: Member, unlink: str) -> None:
    """S-183, B07: a peer comes back under its id and address, killed or finalized; a new link gives its new bytes."""
    server = Member(1, start_quick(), **LONG)
    for salt in range(1, 8):
        client.link(server)
        client.pull(server)
        server.pull(client)
        if salt % 2:
            assert server.peer is not None
            server.peer.kill()
        else:
            server.finalize()
        with failure(NOT_LINKED, "gone|finalized"):
            client.pull(server)
        server = Member(1, start_quick(), listen=server.address, salt=salt, **LONG)
        with failure(NOT_LINKED):
            client.pull(server)
        if unlink != "no":
            client.unlink(server, force=unlink == "by force")


def test_client_restarts(start_quick: Start) -> None:
    """S-142, B07: a client under the same id links at once, killed or finalized; both ways work."""
    server = Member(1, start_quick())
    for salt in range(6):
        client = Member(2, start_quick(), listen=False, salt=salt)
        client.link(server)
        server.pull(client)
        client.pull(server)
        if salt % 2:
            assert client.peer is not None
            client.peer.kill()
        else:
            client.finalize()
        with failure(NOT_LINKED):
            server.pull(client)


@pytest.mark.parametrize("remote", [False, True])
def test_pull_that_takes_too_long(start_quick: Start, remote: bool) -> None:
    """S-180, S-183, E-240, B04: TIMEOUT; no byte lands later; the link says why; linking again needs no unlink."""
    server = Member(1, start_quick(), enable_remote_cache_accessible=remote)
    client = Member(2, listen=False, sync_kv_timeout=200, enable_remote_cache_accessible=remote)
    try:
        client.link(server)
        faults = inside.inject(client.dd, stall_at_byte=64)
        begin = time.monotonic()
        with failure(LLMStatusCode.LLM_TIMEOUT, "200 ms"):
            client.manager.pull_blocks(BlocksCacheKey(1), client.room, range(4), range(4))
        assert 0.2 <= time.monotonic() - begin < 5
        addresses = client.room.tensor_addrs
        for address in addresses:
            client.run("memory:write", address, b"\x5a" * client.desc.size)
        faults.resume.set()
        with failure(NOT_LINKED, "timed out"):
            client.manager.pull_blocks(BlocksCacheKey(1), client.room, range(4), range(4))
        for address in addresses:
            assert client.run("memory:read", address, client.desc.size) == b"\x5a" * client.desc.size
        clear_faults(client.dd)
        assert client.dd.link_clusters([server.info()], 5000) == LINKED
        client.pull(server)
    finally:
        client.finalize()


def test_second_pull_waits_within_its_limit(start_quick: Start) -> None:
    """S-191, E-239: pulls of one link wait for each other, TIMEOUT if it takes too long, and the link stays."""
    server, other = Member(1, start_quick()), Member(3, start_quick())
    client = Member(2, listen=False, sync_kv_timeout=300)
    try:
        client.link(server, other)
        rooms = [client.manager.allocate_blocks_cache(client.desc) for _ in range(2)]
        client.dd._engine.transfers._timeout_ms = 30_000
        faults = inside.inject(client.dd, stall_at_byte=64)
        first, outcome = in_thread(lambda: client.manager.pull_blocks(BlocksCacheKey(1), rooms[0], range(4), range(4)))
        assert faults.stall_entered.wait(10)
        clear_faults(client.dd)
        client.pull(other)
        client.dd._engine.transfers._timeout_ms = 300
        with failure(LLMStatusCode.LLM_TIMEOUT, "in use"):
            client.pull(server)
        client.dd._engine.transfers._timeout_ms = 30_000
        second, later = in_thread(lambda: client.manager.pull_blocks(BlocksCacheKey(1), rooms[1], [3], [3]))
        faults.resume.set()
        first.join(10)
        second.join(10)
        assert (outcome, later) == ([None], [None])
        client.pull(server)
    finally:
        client.finalize()


@pytest.mark.needs("mapped_words")
def test_peer_that_stands_still(start_quick: Start, client: Member) -> None:
    """S-183, B06: a stopped peer is not dead: pulls from it go on, and finalize needs nobody."""
    server = Member(1, start_quick())
    assert server.peer is not None
    client.link(server)
    server.peer.stop()
    try:
        client.pull(server)
        begin = time.monotonic()
        client.finalize()
        assert time.monotonic() - begin < 5
    finally:
        server.peer.signal(signal.SIGCONT)
    client.start()


# ---------------------------------------------------------------------- forks


@pytest.mark.needs("forks")
@pytest.mark.parametrize("end", ["leave_at_once", "leave_with_hooks"])
def test_fork(start_quick: Start, end: str) -> None:
    """S-176, B28: what a child does with the inherited is refused at once; its own instance works; parents go on."""
    server = Member(1, start_quick())
    peer = start_quick()
    peer.make("members:make_mine", 2)
    peer.make("members:work_mine", [(1, server.address)], 1)

    def in_child(do: str, *args: Any) -> dict[str, Any]:
        outcome = peer.make("members:in_child", do, end, *args)
        peer.make("members:pull_mine", 1)
        server.pull(Far(2))
        return outcome

    assert in_child("finalize_mine") == {"value": None, "exit": 0}
    for do, *args in (("pull_mine", 1), ("unlink_mine", 1)):
        outcome = in_child(do, *args)
        assert outcome["exit"] == 0
        assert outcome["code"] == "LLM_ENGINE_FINALIZED", outcome
    assert in_child("start_own", [(1, server.address)]) == {"value": None, "exit": 0}


def test_child_lives_on(start_quick: Start) -> None:
    """B28: a waiting child holds nothing of its parent: the parent's address is free when it has ended."""
    server = Member(1, start_quick())
    client = Member(2, start_quick())
    client.link(server)
    child = server.run("inside:fork_waiting")
    try:
        client.pull(server)
        server.finalize()
        with failure(NOT_LINKED):
            client.pull(server)
        server.start()
        client.link(server)
        client.pull(server)
    finally:
        os.kill(child, 9)
