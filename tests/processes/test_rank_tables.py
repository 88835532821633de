"""Two to four processes meet by a rank table."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import members
import pytest
import traces
from addresses import bindable
from expect import failure
from members import Member
from peer import Peer

from llm_datadist import LLMStatusCode, RegisterMemStatus

NOT_LINKED = LLMStatusCode.LLM_NOT_YET_LINK
Start = Callable[[], Peer]
LONG = {"sync_kv_timeout": 30_000, "link_total_time": 30}


@pytest.fixture
def crowd(start_quick: Start) -> Iterator[Callable[..., list[Member]]]:
    """Give a function that starts members, the first of them in this process."""
    made: list[Member] = []

    def start(count: int, **extra: Any) -> list[Member]:
        for i in range(count):
            made.append(Member(10 + i, start_quick() if i else None, listen=False, **{**LONG, **extra}))
        return made

    yield start
    if made:
        made[0].finalize()


def table(
    ips: Sequence[str], version: str = "1.0", order: Sequence[int] | None = None, server: str = "1", **more: Any
) -> str:
    """Write a rank table: one device for each rank."""
    devices = [{"device_id": "0", "device_ip": ip, "rank_id": str(rank), **more} for rank, ip in enumerate(ips)]
    devices = [devices[i] for i in order or range(len(ips))]
    servers = [{"device": devices, "server_id": host(server)}]
    if version == "1.2":
        servers = [{"device": [device], "server_id": host(f"10.0.0.{i}")} for i, device in enumerate(devices)]
    written = {"server_count": str(len(servers)), "server_list": servers, "status": "completed", "version": version}
    if version == "1.2":
        written["super_pod_list"] = [
            {"super_pod_id": "0", "server_list": [{"server_id": s["server_id"]} for s in servers]}
        ]
    return json.dumps(written)


def ips(count: int) -> list[str]:
    """Give device addresses."""
    return [host(f"192.168.10.{i}") for i in range(count)]


def host(ip: str) -> str:
    """Give the address of a host in this run."""
    return bindable(f"{ip}:1").rpartition(":")[0]


def link(all_: Sequence[Member], name: str, text: str | Sequence[str]) -> list[int]:
    """Let all members call link; give the comm ids."""
    ranks = {member.cluster_id: rank for rank, member in enumerate(all_)}
    texts = [text] * len(all_) if isinstance(text, str) else text
    return [member.dd.link(name, ranks, text) for member, text in zip(all_, texts, strict=True)]


def status(member: Member, comm: int) -> str:
    """Ask one member."""
    found = member.dd.query_register_mem_status(comm)
    return found.name if isinstance(found, RegisterMemStatus) else found.get("name")


def settle(all_: Sequence[Member], comms: Sequence[int], expected: str = "OK") -> None:
    """Wait until all members have come to a state."""
    for member, comm in zip(all_, comms, strict=True):
        traces.wait_until(lambda m=member, c=comm: status(m, c) != "PREPARING", "the end of the preparation", 40)
        assert status(member, comm) == expected


def check_all(all_: Sequence[Member], linked: bool = True) -> None:
    """Every member pulls from every other, or can't."""
    for one, other in itertools.permutations(all_, 2):
        if linked:
            one.pull(other)
        else:
            with failure(NOT_LINKED):
                one.pull(other)


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("version", ["1.0", "1.2"])
def test_all_meet(crowd: Callable[..., list[Member]], count: int, version: str) -> None:
    """S-150, S-151, S-154: every pair is linked, by one call of each; unlinking ends it on one side at a time."""
    all_ = crowd(count)
    more = {"super_device_id": "5"} if version == "1.2" else {}
    comms = link(all_, "a:b.c_d", table(ips(count), version, list(reversed(range(count))), **more))
    assert comms == [1] * count
    settle(all_, comms)
    check_all(all_)
    all_[-1].dd.unlink(1)
    for other in all_[:-1]:
        for one, far in ((other, all_[-1]), (all_[-1], other)):
            with failure(NOT_LINKED, f"cluster {far.cluster_id}"):
                one.pull(far)
    check_all(all_[:-1])
    for member in all_[:-1]:
        member.dd.unlink(1)
    check_all(all_, linked=False)


@pytest.mark.parametrize("server", ["1", "10.0.0.1"])
@pytest.mark.parametrize("name", ["x", "n" * 127, "192.168.1.1:26000_192.168.1.2:26001.0"])
def test_only_device_ip_tells_members_apart(crowd: Callable[..., list[Member]], server: str, name: str) -> None:
    """S-150: both ranks have one device id; names of any allowed form; members may write the table differently."""
    all_ = crowd(2)
    texts = [
        table(ips(2), server=server),
        json.dumps(json.loads(table(ips(2), server=server, order=[1, 0], host_ip="1.1.1.1")), indent=3),
    ]
    settle(all_, link(all_, name, texts))
    check_all(all_)


@pytest.mark.parametrize("what", ["name", "address", "ranks"])
def test_others_do_not_meet(crowd: Callable[..., list[Member]], what: str) -> None:
    """S-150, S-152: who says another name, table or rank is not a member."""
    one, other = crowd(2, link_total_time=1)
    ranks = {10: 0, 11: 1}
    comms = [
        one.dd.link("name", ranks, table(ips(3))),
        other.dd.link(
            "other" if what == "name" else "name",
            {10: 0, 11: 2} if what == "ranks" else ranks,
            table([host("192.168.10.9"), *ips(3)[1:]] if what == "address" else ips(3)),
        ),
    ]
    settle([one, other], comms, "FAILED")
    check_all([one, other], linked=False)
    assert traces.names(os.environ["LLM_DATADIST_NAMESPACE"]) == []


def test_nothing_before_all_are_there(crowd: Callable[..., list[Member]]) -> None:
    """S-151, E-231: with one member missing the others are not linked yet, and then they all are."""
    all_ = crowd(3)
    ranks = {10: 0, 11: 1, 12: 2}
    comms = [member.dd.link("name", ranks, table(ips(3))) for member in all_[:2]]
    mine = all_[0].dd._engine.communicators._comms[1]
    traces.wait_until(lambda: mine.missing(10) == [12], "the link with the first")
    for member, comm in zip(all_, comms, strict=False):
        assert status(member, comm) == "PREPARING"
    check_all(all_[:2], linked=False)
    comms.append(all_[2].dd.link("name", ranks, table(ips(3))))
    settle(all_, comms)
    check_all(all_)


def test_one_member_missing(crowd: Callable[..., list[Member]]) -> None:
    """S-152, E-138: FAILED in time for those that came, with no link left; a new attempt works."""
    all_ = crowd(3, link_total_time=1)
    ranks = {10: 0, 11: 1, 12: 2}
    before = traces.of(os.getpid())
    begin = time.monotonic()
    comms = [member.dd.link("name", ranks, table(ips(3))) for member in all_[:2]]
    settle(all_[:2], comms, "FAILED")
    assert time.monotonic() - begin < 5
    check_all(all_[:2], linked=False)
    traces.wait_for(os.getpid(), before)
    for member, comm in zip(all_, comms, strict=False):
        member.dd.unlink(comm)
    comms = link(all_, "name", table(ips(3)))
    assert comms == [2, 2, 1]
    settle(all_, comms)
    check_all(all_)


def test_a_member_dies_while_it_prepares(crowd: Callable[..., list[Member]]) -> None:
    """S-152, B06: the others end FAILED in time, and the dead one leaves nothing."""
    all_ = crowd(2, link_total_time=1)
    doomed = all_[1]
    assert doomed.peer is not None
    doomed.peer.make("inside:die_when", "HELLO", True)
    comm = all_[0].dd.link("name", {10: 0, 11: 1}, table(ips(2)))
    with contextlib.suppress(RuntimeError):  # it may be dead before it has answered
        doomed.dd.link("name", {10: 0, 11: 1}, table(ips(2)))
    settle(all_[:1], [comm], "FAILED")
    with failure(NOT_LINKED):
        all_[0].manager.pull_blocks(members.BlocksCacheKey(11), all_[0].room, [0], [0])


def test_two_names_for_one_pair(crowd: Callable[..., list[Member]]) -> None:
    """S-151, S-154: the same members again under another name; one of the two can go; ids count up."""
    all_ = crowd(2)
    first = link(all_, "first:1", table(ips(2)))
    second = link(all_, "second.2", table(ips(2)))
    assert (first, second) == ([1, 1], [2, 2])
    settle(all_, first)
    settle(all_, second)
    check_all(all_)
    for member in all_:
        member.dd.unlink(1)
    check_all(all_)
    third = link(all_, "first:1", table(ips(2)))
    assert third == [3, 3]
    settle(all_, third)
    for member in all_:
        member.dd.unlink(2)
    check_all(all_)
    for member in all_:
        member.dd.unlink(3)
    check_all(all_, linked=False)


def test_beside_a_link_by_address(start_quick: Start) -> None:
    """S-130, S-154: a rank-table link and one by address between the same two; each goes alone."""
    one, other = Member(10, listen=False, **LONG), Member(11, start_quick(), **LONG)
    try:
        one.link(other)
        comms = link([one, other], "name", table(ips(2)))
        settle([one, other], comms)
        for member in (one, other):
            member.dd.unlink(1)
        check_all([one, other])
        settle([one, other], link([one, other], "name", table(ips(2))))
        one.unlink(other)
        check_all([one, other])
    finally:
        one.finalize()


def test_from_any_thread(crowd: Callable[..., list[Member]]) -> None:
    """S-151: link in one thread, the status polled in another."""
    all_ = crowd(2)
    comms: list[int] = []
    thread = threading.Thread(target=lambda: comms.append(all_[0].dd.link("name", {10: 0, 11: 1}, table(ips(2)))))
    thread.start()
    thread.join(10)
    comms.append(all_[1].dd.link("name", {10: 0, 11: 1}, table(ips(2))))
    settle(all_, comms)
    check_all(all_)


def test_restart_under_the_same_name(crowd: Callable[..., list[Member]], start_quick: Start) -> None:
    """S-183, B07: a member that came back links again under the same name, with and without an unlink of the old."""
    all_ = crowd(2)
    for salt in range(1, 4):
        settle(all_, comms := link(all_, "name", table(ips(2))))
        check_all(all_)
        dead = all_[1]
        assert dead.peer is not None
        dead.peer.kill()
        with failure(NOT_LINKED, "gone"):
            all_[0].pull(dead)
        if salt % 2:
            all_[0].dd.unlink(comms[0])
        all_[1] = Member(11, start_quick(), listen=False, salt=salt, **LONG)


def test_most_at_once(crowd: Callable[..., list[Member]]) -> None:
    """S-155: 40 communicators of one pair, 16 being prepared at a time in any order, all come about."""
    all_ = crowd(2)
    ranks = {10: 0, 11: 1}
    before = traces.of(os.getpid())
    mine = [all_[0].dd.link(f"name{i}", ranks, table(ips(2))) for i in range(40)]
    theirs = [all_[1].dd.link(f"name{i}", ranks, table(ips(2))) for i in range(15, -25, -1) for i in [i % 40]]
    for comm in mine:
        settle(all_[:1], [comm])
    for comm in theirs:
        settle(all_[1:], [comm])
    check_all(all_)
    for comm in mine:
        all_[0].dd.unlink(comm)
    traces.wait_for(os.getpid(), before)


def test_forked_child_is_refused(crowd: Callable[..., list[Member]]) -> None:
    """S-155, S-176, B28: not usable in a child, which does not hold the meeting point open either."""
    all_ = crowd(2)
    ranks = {10: 0, 11: 1}
    comm = all_[1].dd.link("name", ranks, table(ips(2)))
    peer = all_[1].peer
    assert peer is not None
    namespace = os.environ["LLM_DATADIST_NAMESPACE"]
    traces.wait_until(lambda: traces.names(namespace) != [], "the listener")
    outcome = peer.make("inside:in_child", "link_inherited", "leave_at_once", ranks, table(ips(2)))
    assert outcome == {"value": ["LLM_ENGINE_FINALIZED"] * 3, "exit": 0}
    child = peer.make("inside:fork_waiting")
    try:
        all_[1].dd.unlink(comm)
        traces.wait_until(lambda: traces.names(namespace) == [], "the end of the listener")
        settle(all_, link(all_, "name", table(ips(2))))
        check_all(all_)
    finally:
        os.kill(child, 9)
