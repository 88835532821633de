"""Links of CacheManager mode: made and ended by either side, by id alone, with and without force."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import members
import pairs
import pytest
from members import LINKED, OK, Member
from peer import Peer
from refusals import PARAM_INVALID, refuses
from stall import Stalled, clear_faults

from llm_datadist import BlocksCacheKey, CacheDesc, CacheKeyByIdAndIndex, LLMClusterInfo, Placement
from llm_datadist import LLMStatusCode as Code

NOT_LINKED = Code.LLM_NOT_YET_LINK
HOST = CacheDesc(2, [4, 64], members.DESC.data_type, Placement.HOST)


@pytest.fixture
def server(peer: Peer) -> Member:
    """Give a member in the shared peer."""
    return Member(1, peer)


@pytest.fixture
def client() -> Iterator[Member]:
    """Give a member of this process that does not listen."""
    made = Member(2, listen=False)
    yield made
    made.finalize()


@pytest.fixture
def both() -> Iterator[Member]:
    """Give a member of this process that listens."""
    made = Member(2)
    yield made
    made.finalize()


def info(cluster_id: int | None, local: int, remote: list[str]) -> LLMClusterInfo:
    """Describe a peer with any number of addresses."""
    made = LLMClusterInfo()
    if cluster_id is not None:
        made.remote_cluster_id = cluster_id
    for _ in range(local):
        made.append_local_ip_info("192.168.0.9", 0)
    for address in remote:
        ip, _, port = address.rpartition(":")
        made.append_remote_ip_info(ip, int(port))
    return made


@contextmanager
def stopped(peer: Peer) -> Iterator[None]:
    """Keep a peer stopped during the block."""
    peer.stop()
    try:
        yield
    finally:
        peer.signal(signal.SIGCONT)


# ---------------------------------------------------------------------- arguments


@pytest.mark.parametrize("call", ["link_clusters", "unlink_clusters"])
@pytest.mark.parametrize(
    ("rule", "timeout", "expected"),
    [
        ("E-90", None, TypeError),
        ("E-90", "1", TypeError),
        ("E-91", 2**31, ValueError),
        ("E-92", 0, PARAM_INVALID),
        ("E-92", -1, PARAM_INVALID),
    ],
)
def test_timeout(client: Member, call: str, rule: str, timeout: Any, expected: Any) -> None:
    """E-90, E-91, E-92: the time limit is checked as in the other mode."""
    with refuses(expected, "timeout"):
        getattr(client.dd, call)([None], timeout)


@pytest.mark.parametrize("call", ["link_clusters", "unlink_clusters"])
def test_clusters(client: Member, call: str) -> None:
    """E-93, E-96, E-97: what is no list of clusters, a cluster without id, and no clusters."""
    for wrong in (None, [1], {1: 2}):
        with refuses(TypeError, "clusters"):
            getattr(client.dd, call)(wrong, 100)
    with refuses(TypeError, "remote_cluster_id"):
        getattr(client.dd, call)([info(None, 1, ["10.0.0.1:26000"])], 100)
    assert getattr(client.dd, call)([], 100) == (PARAM_INVALID, [])


def test_e94_force(client: Member) -> None:
    """E-94: force is a bool."""
    with refuses(TypeError, "force"):
        client.dd.unlink_clusters([info(1, 0, [])], 100, 1)


def test_e95_no_local_address(client: Member) -> None:
    """E-95: this is raised, before a missing cluster id is seen, and not returned."""
    for cluster in (info(1, 0, ["10.0.0.1:26000"]), info(None, 0, ["10.0.0.1:26000"])):
        with refuses(PARAM_INVALID, "local_ip_info_list is empty"):
            client.dd.link_clusters([cluster], 100)


# Over a network the text is looked into, since it says where devices are.
@pytest.mark.parametrize("text", ["", pytest.param("{}", marks=pytest.mark.needs(network=False))])
def test_e95_with_communication_resources(peer: Peer, text: str) -> None:
    """E-95, S-142: with communication resources no local address is needed; an empty text describes none."""
    server = Member(1, peer, local_comm_res=text)
    client = Member(2, listen=False, local_comm_res=text)
    try:
        if text:
            assert client.dd.link_clusters([info(1, 0, [server.address])], 5000) == LINKED
            client.pull(server)
        else:
            with refuses(PARAM_INVALID, "local_ip_info_list is empty"):
                client.dd.link_clusters([info(1, 0, [server.address])], 5000)
    finally:
        client.finalize()


def test_e99_number_of_addresses(server: Member, client: Member) -> None:
    """E-99, S-142: an entry with a wrong number is told so; the others are linked; the last failure is the result."""
    wrong = [
        info(7, 1, []),
        info(8, 1, [server.address] * 2),
        info(9, 2, [server.address]),
    ]
    results = [PARAM_INVALID, PARAM_INVALID, PARAM_INVALID, OK]
    assert client.dd.link_clusters([*wrong, server.info()], 5000) == (PARAM_INVALID, results)
    client.pull(server)


def test_e114_more_than_one_address_to_unlink(server: Member, client: Member) -> None:
    """E-114, S-146: two addresses are wrong unless forced; none, or one that nobody listens at, is fine."""
    client.link(server)
    assert client.dd.unlink_clusters([info(1, 1, [server.address] * 2)], 500) == (PARAM_INVALID, [PARAM_INVALID])
    client.pull(server)
    assert client.dd.unlink_clusters([info(1, 0, [])], 5000) == LINKED
    client.link(server)
    assert client.dd.unlink_clusters([info(1, 1, ["10.9.9.9:1"])], 5000) == LINKED
    client.link(server)
    assert client.dd.unlink_clusters([info(1, 1, [server.address] * 2)], 5000, True) == LINKED


# ---------------------------------------------------------------------- linking


def test_one_link_carries_both_ways(server: Member, client: Member) -> None:
    """S-130, S-146: the side that listens pulls from one that does not; for it to link too is a success, once."""
    client.link(server)
    client.pull(server)
    server.pull(client)
    nowhere = pairs.cluster_info(client.cluster_id, ["10.9.9.9:1"])
    assert server.dd.link_clusters([nowhere], 5000) == LINKED
    assert server.dd.link_clusters([nowhere], 5000) == (Code.LLM_ALREADY_LINK, [Code.LLM_ALREADY_LINK])
    client.pull(server)
    server.pull(client)
    server.unlink(client)
    for one, other in ((server, client), (client, server)):
        with refuses(NOT_LINKED, f"cluster {other.cluster_id}"):
            one.pull(other)


def test_e103_linked_already(server: Member, client: Member) -> None:
    """E-103, S-142: this is the result of the call too, in this mode; of several failures the last is."""
    client.link(server)
    already = Code.LLM_ALREADY_LINK
    assert client.dd.link_clusters([server.info()], 5000) == (already, [already])
    nobody = pairs.cluster_info(7, ["10.0.7.1:26000"])
    failed = Code.LLM_LINK_FAILED
    assert client.dd.link_clusters([server.info(), nobody], 5000) == (failed, [already, failed])
    assert client.dd.link_clusters([nobody, server.info()], 5000) == (already, [failed, already])
    client.pull(server)


def test_e102_twice_in_one_call(server: Member, client: Member) -> None:
    """E-102: the second entry is linked already."""
    already = Code.LLM_ALREADY_LINK
    assert client.dd.link_clusters([server.info(), server.info()], 5000) == (already, [OK, already])
    client.pull(server)


def test_stale_link_of_the_peer_is_replaced(server: Member, client: Member) -> None:
    """E-103, S-142, S-183: a client that forgot its end links again, from another address too."""
    for local in ("192.168.0.9", "192.168.0.9", "192.168.0.8"):
        assert client.dd.link_clusters([server.info(local)], 5000) == LINKED
        client.pull(server)
        server.pull(client)
        client.unlink(server, force=True)
        with refuses(NOT_LINKED, "cluster 2"):
            server.pull(client)


@pytest.mark.needs("self_link")
def test_own_listener(both: Member) -> None:
    """S-130: an instance links to itself; it does not pull from itself; pushes and unlinking work."""
    for force in (False, True):
        both.link(both)
        assert both.dd.link_clusters([both.info()], 5000) == (Code.LLM_ALREADY_LINK, [Code.LLM_ALREADY_LINK])
        with refuses(PARAM_INVALID, "cluster_id"):
            both.pull(both)
        both.unlink(both, force=force)
    with refuses(PARAM_INVALID, "cluster_id"):
        both.pull(both)
    both.link(both)


@pytest.mark.needs("self_link")
def test_push_over_the_own_listener() -> None:
    """S-130: bytes of a self-link really move."""
    member = Member(2, enable_remote_cache_accessible=True)
    try:
        member.link(member)
        target = member.manager.allocate_blocks_cache(members.DESC, BlocksCacheKey(2, 5))
        member.manager.push_blocks(BlocksCacheKey(2, 5), member.source, [3], [0])
        for tensor, address in enumerate(target.tensor_addrs):
            assert member.run("memory:read", address, 64) == member.expected(tensor)[192:]
        member.unlink(member)
        with refuses(NOT_LINKED):
            member.manager.push_blocks(BlocksCacheKey(2, 5), member.source, [3], [0])
    finally:
        member.finalize()


def test_listening_side_pushes(peer: Peer) -> None:
    """S-130: the side that was linked to pushes by cache id, counting on the first id being 1."""
    server = Member(1, peer, enable_remote_cache_accessible=True)
    client = Member(2, listen=False, enable_remote_cache_accessible=True)
    try:
        client.link(server)
        server.manager.push_blocks(BlocksCacheKey(2), server.source, [0, 1], [2, 3])
        for tensor, address in enumerate(client.source.tensor_addrs):
            assert client.run("memory:read", address + 128, 128) == server.expected(tensor)[:128]
        with refuses(PARAM_INVALID, "blocks cache"):
            server.manager.push_cache(CacheKeyByIdAndIndex(2, 1, 0), server.manager.allocate_cache(members.DESC))
    finally:
        client.finalize()


@pytest.mark.parametrize("at_once", [False, True])
def test_mutual_links(server: Member, both: Member, at_once: bool) -> None:
    """S-130, S-146: both sides link to each other, one after the other or at the same time; one unlink ends all."""
    for _ in range(10 if at_once else 2):
        if at_once:
            assert server.peer is not None
            server.peer.start("call", server.dd, "link_clusters", [both.info("192.168.0.1")], 5000)
            both.link(server)
            assert server.peer.answer() == LINKED
        else:
            both.link(server)
            server.link(both)
        both.pull(server)
        server.pull(both)
        server.unlink(both)
        for one, other in ((server, both), (both, server)):
            with refuses(NOT_LINKED):
                one.pull(other)
        both.unlink(server)


def test_e104_nobody_there(server: Member, client: Member) -> None:
    """E-104: a closed port fails at once; others of the call are linked."""
    begin = time.monotonic()
    nobody = pairs.cluster_info(7, ["10.0.7.1:26000"])
    assert client.dd.link_clusters([nobody, server.info()], 20000) == (
        Code.LLM_LINK_FAILED,
        [Code.LLM_LINK_FAILED, OK],
    )
    assert time.monotonic() - begin < 10
    client.pull(server)


def test_e105_out_of_time(server: Member, client: Member) -> None:
    """E-105, S-142, S-182: a server that does not answer is a TIMEOUT; afterwards it can be linked."""
    assert server.peer is not None
    with stopped(server.peer):
        begin = time.monotonic()
        result = client.dd.link_clusters([server.info()], 300)
        assert 0.29 <= time.monotonic() - begin < 5
        assert result == (Code.LLM_TIMEOUT, [Code.LLM_TIMEOUT])
        with refuses(NOT_LINKED):
            client.pull(server)
    client.link(server)
    client.pull(server)


@pytest.mark.parametrize("server_has_it", [False, True])
def test_e107_remote_access_differs(peer: Peer, server_has_it: bool) -> None:
    """E-107: both sides need the same setting."""
    server = Member(1, peer, enable_remote_cache_accessible=server_has_it)
    client = Member(2, listen=False, enable_remote_cache_accessible=not server_has_it)
    try:
        assert client.dd.link_clusters([server.info()], 5000) == (PARAM_INVALID, [PARAM_INVALID])
        with refuses(NOT_LINKED):
            client.pull(server)
    finally:
        client.finalize()


def test_e108_another_cluster_listens(server: Member, client: Member) -> None:
    """E-108: a server of another id is not linked under either id."""
    wrong = pairs.cluster_info(8, [server.address])
    assert client.dd.link_clusters([wrong], 5000) == (Code.LLM_LINK_FAILED, [Code.LLM_LINK_FAILED])
    with refuses(NOT_LINKED):
        client.pull(server)


def test_modes_do_not_mix(peer: Peer, client: Member) -> None:
    """S-130: a prompt of the other mode refuses."""
    prompt = pairs.Prompt(peer)
    result = client.dd.link_clusters([prompt.info()], 5000)
    assert result == (Code.LLM_LINK_FAILED, [Code.LLM_LINK_FAILED])


def test_e100_no_limit_of_a_call(server: Member, client: Member) -> None:
    """E-100, E-101, S-142: 40 entries, more than are worked on at once, beside another call that runs meanwhile."""
    nobody = [pairs.cluster_info(100 + i, [f"10.0.7.1:{26000 + i}"]) for i in range(39)]
    results: list[Any] = []
    assert server.peer is not None
    with stopped(server.peer):
        first = threading.Thread(target=lambda: results.append(client.dd.link_clusters([server.info()], 20000)))
        first.start()
        failed = Code.LLM_LINK_FAILED
        assert client.dd.link_clusters(nobody, 5000) == (failed, [failed] * 39)
        assert not results
    first.join(30)
    assert results == [LINKED]
    client.pull(server)


# ---------------------------------------------------------------------- unlinking


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("by_server", [False, True])
def test_either_side_unlinks(server: Member, client: Member, by_server: bool, force: bool) -> None:
    """S-143, S-144, S-146: by id alone, from either side; the other end is gone or finds out; again is harmless."""
    one, other = (server, client) if by_server else (client, server)
    for _ in range(3):
        client.link(server)
        client.pull(server)
        one.unlink(other, force=force)
        one.unlink(other, force=force)
        for side, far in ((one, other), (other, one)):
            with refuses(NOT_LINKED, f"cluster {far.cluster_id}"):
                side.pull(far)
        other.unlink(one, force=force)
    client.link(server)
    server.pull(client)


@pytest.mark.parametrize("force", [False, True])
def test_e110_nothing_linked(client: Member, force: bool) -> None:
    """E-110, S-143: unlinking what is not linked is a success."""
    assert client.dd.unlink_clusters([info(7, 0, []), info(8, 1, ["10.0.0.1:26000"])], 500, force) == (OK, [OK, OK])


@pytest.mark.parametrize("force", [False, True])
def test_e112_unlink_waits_for_a_pull(server: Member, client: Member, force: bool) -> None:
    """E-112, S-143, S-191: the pull ends well, and then the link goes; a pull that takes too long keeps its link."""
    client.link(server)
    client.dd._engine.transfers._timeout_ms = 60000
    results: list[Any] = []

    def unlink() -> None:
        results.append(client.dd.unlink_clusters([server.bare()], 20000, force))

    with Stalled(client.dd, lambda: client.pull(server), at=64) as pull:
        failed = Code.LLM_UNLINK_FAILED
        assert client.dd.unlink_clusters([server.bare()], 100, force) == (failed, [failed])
        ender = threading.Thread(target=unlink)
        ender.start()
        assert not results
        assert pull.finish() is None
    ender.join(30)
    assert results == [LINKED]
    with refuses(NOT_LINKED):
        client.pull(server)


def test_peer_unlinks_during_a_pull(server: Member, client: Member) -> None:
    """S-143, S-144: the peer's unlink does not wait for pulls from it; these fail as not linked, and never hang."""
    client.link(server)
    client.dd._engine.transfers._timeout_ms = 60000
    with Stalled(
        client.dd, lambda: client.manager.pull_blocks(BlocksCacheKey(1), client.room, [0], [0]), at=64
    ) as pull:
        server.unlink(client)
        error = pull.wait()
    assert getattr(error, "status_code", None) is NOT_LINKED, error
    client.link(server)
    clear_faults(client.dd)
    client.pull(server)


def test_e113_peer_could_not_be_told(server: Member, client: Member) -> None:
    """E-113: UNLINK_FAILED within the time limit, though this end is gone; force needs no peer."""
    client.link(server)
    assert server.peer is not None
    failed = Code.LLM_UNLINK_FAILED
    with stopped(server.peer):
        begin = time.monotonic()
        assert client.dd.unlink_clusters([server.bare()], 300) == (failed, [failed])
        assert time.monotonic() - begin < 5
        client.unlink(server)
    client.link(server)
    with stopped(server.peer):
        client.unlink(server, force=True)
    client.link(server)
    client.pull(server)


# ---------------------------------------------------------------------- modes and managers


def test_members_of_the_other_mode(client: Member) -> None:
    """E-84, E-86: what CacheManager mode does not have."""
    with refuses(PARAM_INVALID, "kv_cache_manager"):
        _ = client.dd.kv_cache_manager
    with refuses(PARAM_INVALID, "check_link_status"):
        client.dd.check_link_status(1)


def test_e87_manager_after_finalize(client: Member) -> None:
    """E-87, S-173: every method says so, also after a new init."""
    manager, cache = client.manager, client.room
    calls = [
        lambda: manager.allocate_cache(members.DESC),
        lambda: manager.allocate_blocks_cache(members.DESC),
        lambda: manager.deallocate_blocks_cache(cache),
        lambda: manager.register_cache(members.DESC, [1, 2]),
        lambda: manager.register_blocks_cache(members.DESC, [1, 2]),
        lambda: manager.unregister_cache(1),
        lambda: manager.pull_blocks(BlocksCacheKey(1), cache, [0], [0]),
        lambda: manager.copy_blocks(cache, {0: [1]}),
        lambda: manager.remap_registered_memory([]),
    ]
    client.finalize()
    for _ in range(2):
        for call in calls:
            with refuses(Code.LLM_ENGINE_FINALIZED):
                call()
        client.dd.init(client.options)


def test_ids_start_again(server: Member, client: Member) -> None:
    """S-10, S-171: after finalize and init the first cache is 1 again, and the peer's old link is no hindrance."""
    for _ in range(3):
        assert client.source.cache_id == 1
        client.link(server)
        server.pull(client)
        client.finalize()
        with refuses(NOT_LINKED, "cluster 2"):
            server.pull(client)
        client.start()


@pytest.mark.needs("any_memory")
def test_s111_default_of_registrations(server: Member) -> None:
    """S-111: DEVICE memory registered before a link is remote accessible by default; afterwards, and on HOST, not."""
    import numpy as np

    member = Member(2, listen=False)
    try:
        arrays = [np.zeros((4, 64), dtype=np.uint8) for _ in range(2)]

        def accessible(**how: Any) -> bool:
            cache = member.manager.register_blocks_cache(how.pop("desc", members.DESC), list(arrays), **how)
            return bool(member.dd._engine.caches._caches[cache.cache_id].accessible)

        assert accessible()
        assert not accessible(desc=HOST)
        assert accessible(desc=HOST, remote_accessible=True)
        assert not accessible(remote_accessible=False)
        member.link(server)
        assert not accessible()
        assert accessible(remote_accessible=True)
        member.manager.set_is_call_linked()
        with refuses(PARAM_INVALID, "remote_accessible"):
            accessible(remote_accessible=True)
        assert not accessible()
    finally:
        member.finalize()
