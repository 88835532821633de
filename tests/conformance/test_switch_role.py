"""switch_role in both modes."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from typing import Any

import memory
import pytest
import traces
from addresses import bindable
from members import LINKED, Member
from pairs import Decoder, Prompt, bytes_desc, options
from peer import Peer
from refusals import PARAM_INVALID, refuses

from llm_datadist import CacheKey, LLMConfig, LLMDataDist, LLMRole
from llm_datadist import LLMStatusCode as Code

DESC = bytes_desc(2, 2, 64)
LISTEN = "llm.listenIpInfo"
PROMPT, DECODER, MIX = LLMRole.PROMPT, LLMRole.DECODER, LLMRole.MIX
FEATURE = Code.LLM_FEATURE_NOT_ENABLED
_ports = itertools.count(30000)


def at(address: str) -> dict[str, str]:
    """Make the switch options as programs do."""
    config = LLMConfig()
    config.listen_ip_info = address
    return config.generate_options()


def address() -> str:
    """Give an address that nobody has used."""
    return bindable(f"10.3.0.1:{next(_ports)}")


def listens() -> list[str]:
    """Name what listens in this test's namespace."""
    return sorted(name.rpartition("/")[2] for name in traces.names(os.environ["LLM_DATADIST_NAMESPACE"]))


def wait_for(expected: list[str]) -> None:
    """Wait until the sockets of unlinked connections have gone too, which takes a moment."""
    traces.wait_until(lambda: listens() == expected, f"the state in which only {expected} listen")


@pytest.fixture
def decoder() -> Iterator[Decoder]:
    """Give a decoder that may switch."""
    made = Decoder(enable_switch_role=True)
    yield made
    made.dd.finalize()


# ---------------------------------------------------------------------- KvCacheManager mode


@pytest.mark.parametrize(
    ("rule", "role", "switch_options", "expected"),
    [
        ("E-150", 1, None, TypeError),
        ("E-150", None, None, TypeError),
        ("E-150", PROMPT, [LISTEN], TypeError),
        ("E-150", PROMPT, {LISTEN: 26000}, TypeError),
        ("E-151", DECODER, None, PARAM_INVALID),
        ("E-151", DECODER, {LISTEN: "10.0.0.1:26000"}, PARAM_INVALID),
        ("E-152", PROMPT, None, PARAM_INVALID),
        ("E-152", PROMPT, {}, PARAM_INVALID),
        ("E-156", PROMPT, {LISTEN: "10.0.0.1"}, PARAM_INVALID),
        ("E-156", PROMPT, {LISTEN: "10.0.0.1:26000:1"}, PARAM_INVALID),
        ("E-156", PROMPT, {LISTEN: "::1:26000"}, PARAM_INVALID),
        ("E-156", PROMPT, {LISTEN: "localhost:26000"}, PARAM_INVALID),
        ("E-156", PROMPT, {LISTEN: "10.0.0.1:80x"}, ValueError),
        ("E-156", PROMPT, {LISTEN: "10.0.0.1:"}, ValueError),
        ("E-156", PROMPT, {LISTEN: "10.0.0.1:0"}, PARAM_INVALID),
        ("E-156", PROMPT, {LISTEN: "10.0.0.1:65536"}, PARAM_INVALID),
    ],
)
def test_refused(decoder: Decoder, rule: str, role: Any, switch_options: Any, expected: Any) -> None:
    """E-150, E-151, E-152, E-156, S-160, S-163: a failing call changes nothing."""
    with pytest.raises(expected) if expected is ValueError else refuses(expected):
        decoder.dd.switch_role(role, switch_options)
    assert decoder.dd._role is DECODER
    assert listens() == []
    decoder.dd.switch_role(PROMPT, at(address()))


@pytest.mark.needs(network=False)
def test_s163_ipv6(peer: Peer, decoder: Decoder) -> None:
    """S-163: an IPv6 address in brackets is one."""
    decoder.dd.switch_role(PROMPT, {LISTEN: "[fd00::5]:30000"})
    other = peer.make("llm_datadist:LLMDataDist", DECODER, 3)
    other.init(options())
    assert peer.make("conftest_support:link", other, 2, ["[fd00::5]:30000"]) == LINKED


def test_e153_e154_not_enabled() -> None:
    """E-153, E-154: it needs the option, and one device; arguments are checked before."""
    for extra in ({}, {"devices": [0, 1], "enable_switch_role": True}):
        decoder = Decoder(**extra)
        try:
            with refuses(PARAM_INVALID):
                decoder.dd.switch_role(DECODER)
            with refuses(PARAM_INVALID, LISTEN):
                decoder.dd.switch_role(PROMPT)
            with refuses(FEATURE, "EnableSwitchRole"):
                decoder.dd.switch_role(PROMPT, at(address()))
            with refuses(FEATURE):
                decoder.dd.switch_role(MIX)
            assert listens() == []
        finally:
            decoder.dd.finalize()


@pytest.mark.parametrize("side", ["decoder", "prompt"])
def test_e155_links_stand(peer: Peer, decoder: Decoder, side: str) -> None:
    """E-155, S-160: not while the engine is linked, on either side; a link that broke is none."""
    prompt = Prompt(peer, enable_switch_role=True)
    decoder.link(prompt)
    prompt.allocate(DESC, [CacheKey(1, 10)])
    if side == "decoder":
        with refuses(Code.LLM_EXIST_LINK):
            decoder.dd.switch_role(PROMPT, at(address()))
        assert decoder.dd._role is decoder.manager._role is DECODER
    else:
        with refuses(Code.LLM_EXIST_LINK):
            prompt.dd.switch_role(DECODER)
    decoder.manager.pull_cache(CacheKey(1, 10), decoder.allocate(DESC))
    if side == "decoder":
        prompt.dd.finalize()
        decoder.dd.switch_role(PROMPT, at(address()))
    else:
        decoder.dd.unlink_clusters([prompt.info()])
        prompt.dd.switch_role(DECODER)


def test_s161_roles_change_places(peer: Peer, decoder: Decoder) -> None:
    """S-161, S-164: the listener goes, the new one listens, the managers follow, and caches and keys survive."""
    prompt = Prompt(peer, enable_switch_role=True)
    kept = prompt.allocate(DESC, [CacheKey(1, 10)])
    mine = decoder.allocate(DESC)
    decoder.link(prompt)
    assert decoder.dd.unlink_clusters([prompt.info()])[0] is Code.LLM_SUCCESS
    prompt.dd.switch_role(DECODER)
    new = address()
    decoder.dd.switch_role(PROMPT, at(new))
    assert (decoder.dd._role, decoder.manager._role) == (PROMPT, PROMPT)
    wait_for([new])
    result = decoder.dd.link_clusters([prompt.info()])
    assert result == (PARAM_INVALID, [])
    with refuses(PARAM_INVALID, "DECODER"):
        decoder.manager.pull_cache(CacheKey(1, 10), mine)
    with refuses(PARAM_INVALID, "PROMPT"):
        prompt.manager.remove_cache_key(CacheKey(1, 10))
    source = decoder.manager.allocate_cache(DESC, [CacheKey(2, 20)])
    for each in source.per_device_tensor_addrs[0]:
        memory.write(each, bytes(range(128)))
    assert peer.make("conftest_support:link", prompt.dd, 2, [new]) == LINKED
    prompt.manager.pull_cache(CacheKey(2, 20), kept, 1)
    for each in kept.get("per_device_tensor_addrs")[0]:
        assert peer.make("memory:read", each, 128)[64:] == bytes(range(64))
    peer.make("conftest_support:unlink", prompt.dd, 2, [new], False)
    decoder.dd.switch_role(DECODER)
    wait_for([])
    prompt.dd.switch_role(PROMPT, at(prompt.addresses[0]))
    decoder.link(prompt)
    decoder.manager.pull_cache(CacheKey(1, 10), mine)


def test_address_is_taken(peer: Peer, decoder: Decoder) -> None:
    """S-160: an address that another engine holds fails the call, and nothing changes."""
    prompt = Prompt(peer)
    with refuses(Code.LLM_FAILED, prompt.addresses[0]):
        decoder.dd.switch_role(PROMPT, at(prompt.addresses[0]))
    assert decoder.dd._role is DECODER
    decoder.link(prompt)


def test_mix(decoder: Decoder) -> None:
    """S-160, S-164: MIX needs no address and does not listen."""
    decoder.dd.switch_role(MIX)
    assert decoder.manager._role is MIX
    assert listens() == []
    with refuses(PARAM_INVALID):
        decoder.dd.switch_role(MIX)
    decoder.dd.switch_role(DECODER, at(address()))
    assert listens() == []


# ---------------------------------------------------------------------- CacheManager mode


def test_s162_cache_manager_mode(peer: Peer) -> None:
    """S-162, E-151, E-152: a label that needs no option; the address says whether and where it listens."""
    member = Member(2, role=PROMPT)
    other = Member(1, peer, listen=False)
    try:
        assert listens() == [member.address]
        other.link(member)
        other.unlink(member)
        member.dd.switch_role(DECODER)
        assert member.dd._role is DECODER
        assert other.dd.link_clusters([member.info()])[0] is Code.LLM_LINK_FAILED
        wait_for([])
        for role in (PROMPT, PROMPT, MIX):
            member.address = address()
            member.dd.switch_role(role, at(member.address))
            wait_for([member.address])
            other.link(member)
            other.pull(member)
            member.pull(other)
            other.unlink(member)
            member.dd.switch_role(role, at(member.address))
            wait_for([member.address])
            assert member.dd._role is role
        member.dd.switch_role(MIX, {})
        wait_for([])
    finally:
        member.finalize()


def test_old_address_is_free_at_once(peer: Peer) -> None:
    """S-162: another engine may listen there as soon as the call returns, however busy this one is."""
    member = Member(2)
    try:
        gate = threading.Event()
        member.dd._engine._service.call(lambda: gate.wait(10) and None)
        threading.Timer(0.2, gate.set).start()
        member.dd.switch_role(MIX)
        assert gate.is_set()
        Member(1, peer, listen=member.address)
    finally:
        member.finalize()


def test_e155_links_stand_in_cache_manager_mode(peer: Peer) -> None:
    """E-155, S-162: on both sides, and for the same role and address too."""
    member, other = Member(2), Member(1, peer, listen=False)
    try:
        other.link(member)
        for _ in range(2):
            with refuses(Code.LLM_EXIST_LINK):
                member.dd.switch_role(MIX, at(member.address))
            with refuses(Code.LLM_EXIST_LINK):
                other.dd.switch_role(PROMPT)
        assert member.dd._role is MIX
        other.pull(member)
        other.unlink(member)
        member.dd.switch_role(PROMPT)
        other.dd.switch_role(PROMPT)
    finally:
        member.finalize()


@pytest.mark.parametrize(("role", "given", "expected"), [(1, None, TypeError), (MIX, 1, TypeError)])
def test_e150_in_cache_manager_mode(role: Any, given: Any, expected: Any) -> None:
    """E-150, E-156: types, and addresses that are none."""
    member = Member(2)
    try:
        with refuses(expected):
            member.dd.switch_role(role, given)
        for wrong in ("10.0.0.1", "a:1", "10.0.0.1:x", "10.0.0.1:0"):
            with refuses(PARAM_INVALID, LISTEN):
                member.dd.switch_role(PROMPT, {LISTEN: wrong})
        assert listens() == [member.address]
    finally:
        member.finalize()


def test_e157_hixl() -> None:
    """E-157: with transfer backend hixl the address stays."""
    member = Member(2, transfer_backend="hixl")
    try:
        for switch_options in (None, at(address())):
            with refuses(FEATURE, "hixl"):
                member.dd.switch_role(PROMPT, switch_options)
        assert listens() == [member.address]
        member.dd.switch_role(PROMPT, at(member.address))
        assert member.dd._role is PROMPT
    finally:
        member.finalize()


def test_role_checks_need_init() -> None:
    """E-62: before init it is a RuntimeError."""
    with refuses(RuntimeError, "init"):
        LLMDataDist(DECODER, 2).switch_role(PROMPT, at(address()))
