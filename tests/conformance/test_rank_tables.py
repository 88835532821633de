"""link, unlink and query_register_mem_status: their arguments, and what one process shows of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import members
import pairs
import pytest
from members import Far, Member
from refusals import PARAM_INVALID, refuses

from llm_datadist import LLMDataDist, LLMRole, RegisterMemStatus
from llm_datadist import LLMStatusCode as Code

TABLE = pairs.rank_table(4)
RANKS = {1: 0, 2: 1}


@pytest.fixture
def alone() -> Iterator[Member]:
    """Give a member whose peers never come, and that knows it after a second."""
    made = Member(2, listen=False, link_total_time=1)
    yield made
    made.finalize()


@pytest.fixture
def looped() -> Iterator[Member]:
    """Give a member that stands for all absent ones."""
    made = Member(2, listen=False, llm__Simulator__Loopback="1")
    yield made
    made.finalize()


def settled(member: Member, comm: int) -> RegisterMemStatus:
    """Wait until a communicator is not being prepared any more."""
    end = time.monotonic() + 20
    while (status := member.dd.query_register_mem_status(comm)) is RegisterMemStatus.PREPARING:
        assert time.monotonic() < end
        time.sleep(0.005)
    return status


@pytest.mark.parametrize(
    ("rule", "name", "ranks", "table", "expected"),
    [
        ("E-130", None, RANKS, TABLE, TypeError),
        ("E-130", 1, RANKS, TABLE, TypeError),
        ("E-131", "", RANKS, TABLE, PARAM_INVALID),
        ("E-131", "x" * 128, RANKS, TABLE, PARAM_INVALID),
        ("E-132", "name", None, TABLE, TypeError),
        ("E-132", "name", [1, 2], TABLE, TypeError),
        ("E-132", "name", {"1": 0, 2: 1}, TABLE, TypeError),
        ("E-132", "name", {1: 0, 2: "1"}, TABLE, TypeError),
        ("E-132", "name", {1: 0, 2: 1.0}, TABLE, TypeError),
        ("E-133", "name", {}, TABLE, PARAM_INVALID),
        ("E-133", "name", {2: 0}, TABLE, PARAM_INVALID),
        ("E-133", "name", {1: 0, 2: 1, 3: 2, 4: 3, 5: 4}, TABLE, PARAM_INVALID),
        ("E-133", "name", {1: 1, 2: 0}, TABLE, PARAM_INVALID),
        ("E-134", "name", {1: 0, 2**64: 1}, TABLE, ValueError),
        ("E-134", "name", {-1: 0, 2: 1}, TABLE, ValueError),
        ("E-134", "name", {1: 0, 2: 2**32}, TABLE, ValueError),
        ("E-134", "name", {1: -1, 2: 0}, TABLE, ValueError),
        ("E-135", "name", {1: 0, 2: 0}, TABLE, PARAM_INVALID),
        ("E-136", "name", {1: 0, 3: 1}, TABLE, PARAM_INVALID),
        ("E-137", "name", RANKS, None, TypeError),
        ("E-137", "name", RANKS, {"server_list": []}, TypeError),
        ("E-138", "name", RANKS, "", Code.LLM_LINK_FAILED),
        ("E-138", "name", RANKS, "{", Code.LLM_LINK_FAILED),
        ("E-138", "name", RANKS, "[" * 100_000, Code.LLM_LINK_FAILED),
    ],
    # Its addresses differ from worker to worker.
    ids=lambda value: "table" if value is TABLE else None,
)
def test_arguments(alone: Member, rule: str, name: Any, ranks: Any, table: Any, expected: Any) -> None:
    """E-130 to E-138: nothing is started, and no id is used up."""
    with refuses(expected):
        alone.dd.link(name, ranks, table)
    assert alone.dd.link("name", RANKS, TABLE) == 1


@pytest.mark.parametrize("call", ["unlink", "query_register_mem_status"])
def test_comm_id(alone: Member, call: str) -> None:
    """E-140, E-141, E-142: type, width, and ids that nobody has given."""
    for wrong in (None, "1", 1.0):
        with refuses(TypeError, "comm_id"):
            getattr(alone.dd, call)(wrong)
    for wide in (-1, 2**64):
        with refuses(ValueError, "comm_id"):
            getattr(alone.dd, call)(wide)
    for unknown in (0, 1, 2**64 - 1):
        with refuses(Code.LLM_NOT_YET_LINK, unknown):
            getattr(alone.dd, call)(unknown)


def test_e85_other_mode() -> None:
    """E-85: KvCacheManager mode has none of them, whatever the arguments."""
    dd = LLMDataDist(LLMRole.DECODER, 2)
    dd.init(pairs.options())
    try:
        for call in (
            lambda: dd.link(None, None, None),  # type: ignore[arg-type]
            lambda: dd.unlink(None),  # type: ignore[arg-type]
            lambda: dd.query_register_mem_status(None),  # type: ignore[arg-type]
        ):
            with refuses(PARAM_INVALID, "EnableCacheManager"):
                call()
    finally:
        dd.finalize()


@pytest.mark.needs("self_link")
@pytest.mark.parametrize("call", ["link", "unlink", "query_register_mem_status"])
def test_e143_hixl(call: str) -> None:
    """E-143, S-156, S-157: with transfer backend hixl there are none; link_clusters remains."""
    member = Member(2, transfer_backend="hixl", global_resource_config='{"any": "text"}')
    try:
        arguments = ("name", RANKS, TABLE) if call == "link" else (1,)
        with refuses(Code.LLM_FEATURE_NOT_ENABLED, "hixl"):
            getattr(member.dd, call)(*arguments)
        member.link(member)
        member.unlink(member)
    finally:
        member.finalize()


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"enable_remote_cache_accessible": False}, "EnableRemoteCacheAccessible"),
        ({"listen": False}, "listenIpInfo"),
        ({"enable_cache_manager": False}, "EnableCacheManager"),
        ({"transfer_backend": "tape"}, "tape"),
    ],
)
def test_s157_what_hixl_needs(changes: dict[str, Any], word: str) -> None:
    """S-157: remote-accessible mode, CacheManager mode, and an address; no other backend is known."""
    with refuses(PARAM_INVALID, word):
        Member(2, **{"transfer_backend": "hixl", **changes})


@pytest.mark.parametrize(
    ("option", "values"), [("llm.LinkTotalTime", ["-1", "x", "4294967296"]), ("llm.LinkRetryCount", ["0", "101", "x"])]
)
def test_time_and_number_of_attempts(option: str, values: list[str]) -> None:
    """S-152: both options are checked at init."""
    dd = LLMDataDist(LLMRole.MIX, 2)
    for value in values:
        with refuses(PARAM_INVALID, option, value):
            dd.init({**members.options(), option: value})
    dd.init(members.options(link_total_time=0, link_retry_count=100))
    dd.finalize()


def test_absent_members(alone: Member) -> None:
    """S-151, S-152, E-138: PREPARING, then FAILED when the time is over, never OK; it can be unlinked."""
    begin = time.monotonic()
    comm = alone.dd.link("name", RANKS, TABLE)
    assert time.monotonic() - begin < 5
    assert alone.dd.query_register_mem_status(comm) is RegisterMemStatus.PREPARING
    assert settled(alone, comm) is RegisterMemStatus.FAILED
    assert 0.9 <= time.monotonic() - begin < 5
    alone.dd.unlink(comm)
    with refuses(Code.LLM_NOT_YET_LINK):
        alone.dd.query_register_mem_status(comm)


def test_unlink_ends_the_preparation() -> None:
    """S-154: nobody waits for the members that do not come; finalize likewise. Some wait for their turn."""
    member = Member(2, listen=False)
    try:
        comms = [member.dd.link(f"name{i}", RANKS, TABLE) for i in range(20)]
        assert comms == list(range(1, 21))
        begin = time.monotonic()
        for comm in (comms[19], comms[3]):
            member.dd.unlink(comm)
            with refuses(Code.LLM_NOT_YET_LINK):
                member.dd.query_register_mem_status(comm)
        assert member.dd.query_register_mem_status(comms[4]) is RegisterMemStatus.PREPARING
    finally:
        member.finalize()
    assert time.monotonic() - begin < 5


def test_most_communicators(alone: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    """E-139, S-155: 512 is the limit, lowered here; failed ones count until they are unlinked."""
    from llm_datadist._engine import communicators

    assert (communicators.LIMIT, communicators.PREPARING) == (512, 16)
    monkeypatch.setattr(communicators, "LIMIT", 3)
    for i in range(3):
        assert alone.dd.link(f"name{i}", RANKS, TABLE) == i + 1
    with refuses(PARAM_INVALID, 3):
        alone.dd.link("more", RANKS, TABLE)
    alone.dd.unlink(2)
    assert alone.dd.link("more", RANKS, TABLE) == 4


def test_s153_link_was_called(alone: Member) -> None:
    """S-153, S-111, E-182: registrations after link are not remote accessible, and must not ask for it."""
    alone.dd.link("name", RANKS, TABLE)
    with refuses(PARAM_INVALID, "remote_accessible"):
        alone.manager.register_blocks_cache(members.DESC, alone.source.tensor_addrs, None, True)


@pytest.mark.needs("self_link")
@pytest.mark.parametrize("ranks", [{1: 0, 2: 1}, {2: 0, 5: 1, 9: 7}, {1: 0, 2: 1, 3: 2, 4: 3}])
def test_s145_loop_back(looped: Member, ranks: dict[int, int]) -> None:
    """S-145, S-151: traffic for absent members is one's own; clusters that were never linked stay so."""
    comm = looped.dd.link("name", ranks, TABLE)
    assert settled(looped, comm) is RegisterMemStatus.OK
    aliases = [Far(cluster) for cluster in ranks if cluster != 2]
    for alias in aliases:
        check_own(looped, alias)
    with refuses(Code.LLM_NOT_YET_LINK):
        looped.pull(Far(77))
    looped.dd.unlink(comm)
    for alias in aliases:
        with refuses(Code.LLM_NOT_YET_LINK):
            looped.pull(alias)
    assert settled(looped, looped.dd.link("name", ranks, TABLE)) is RegisterMemStatus.OK


def check_own(member: Member, alias: Far) -> None:
    """Pull under another id, and find one's own bytes."""
    alias.expected = member.expected  # type: ignore[method-assign]
    member.pull(alias)
