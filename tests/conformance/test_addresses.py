"""Addresses: IPv6, wildcards, IPv4 mapped into IPv6, integers, and garbage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from conftest_support import open_things
from pairs import Decoder, bytes_desc, options
from peer import Peer
from refusals import PARAM_INVALID, refuses

from llm_datadist import BlocksCacheKey, LLMClusterInfo, LLMDataDist, LLMRole
from llm_datadist import LLMStatusCode as Code

DESC = bytes_desc(2, 2, 64)
LINKED = (Code.LLM_SUCCESS, [Code.LLM_SUCCESS])
FAILED = (Code.LLM_LINK_FAILED, [Code.LLM_LINK_FAILED])
LOCALHOST = 0x0100007F


def info(ip: str | int, port: int, local: str | int = "192.168.0.9") -> LLMClusterInfo:
    made = LLMClusterInfo()
    made.remote_cluster_id = 1
    made.append_local_ip_info(local, 0)
    made.append_remote_ip_info(ip, port)
    return made


@pytest.fixture
def listen(peer: Peer) -> Callable[[str], Any]:
    """Give a function that starts a prompt which listens at an address."""

    def start(address: str) -> Any:
        dd = peer.make("llm_datadist:LLMDataDist", LLMRole.PROMPT, 1)
        dd.init(options(address))
        return dd.get("kv_cache_manager")

    return start


@pytest.fixture
def dd() -> Iterator[LLMDataDist]:
    """Give a decoder."""
    decoder = Decoder()
    yield decoder.dd
    decoder.dd.finalize()


@pytest.mark.needs(network=False)
@pytest.mark.parametrize(
    ("address", "reached_by"),
    [
        ("10.1.2.3:26100", ["10.1.2.3", 0x0302010A, "::ffff:10.1.2.3", "::ffff:0a01:0203"]),
        ("127.0.0.1:26100", ["127.0.0.1", LOCALHOST]),
        ("0.0.0.0:26100", ["127.0.0.1", "10.1.2.3", "0.0.0.0", "::ffff:127.0.0.1", 0]),
        ("[::]:26100", ["::1", "fd00::5", "127.0.0.1", "10.1.2.3", "::", "::ffff:10.1.2.3"]),
        ("[::1]:26100", ["::1", "0:0:0:0:0:0:0:1", "0000::0001"]),
        ("[FD00::00A5]:26100", ["fd00::a5", "FD00:0:0:0::a5"]),
        ("[::ffff:10.1.2.3]:26100", ["10.1.2.3", "::ffff:10.1.2.3"]),
    ],
)
def test_b20_same_address_written_differently(
    listen: Callable[[str], Any], dd: LLMDataDist, address: str, reached_by: list[str | int]
) -> None:
    """S-131, case B20: a listener is reached by every way to write its address, and by each address of a wildcard."""
    manager = listen(address)
    manager.allocate_blocks_cache(DESC, BlocksCacheKey(1))
    cache = dd.kv_cache_manager.allocate_blocks_cache(DESC)
    for ip in reached_by:
        assert dd.link_clusters([info(ip, 26100)], 5000) == LINKED, ip
        dd.kv_cache_manager.pull_blocks(BlocksCacheKey(1), cache, [0], [1])
        assert dd.unlink_clusters([info(ip, 26100)], 5000) == LINKED, ip


@pytest.mark.needs(network=False)
@pytest.mark.parametrize(
    ("address", "not_reached_by"),
    [
        ("10.1.2.3:26100", ["10.1.2.4", "127.0.0.1", "::1", "0.0.0.0", "::"]),
        ("0.0.0.0:26100", ["::1", "fd00::5"]),
        ("[::1]:26100", ["127.0.0.1", "::2", "::"]),
    ],
)
def test_b20_other_addresses_do_not_reach(
    listen: Callable[[str], Any], dd: LLMDataDist, address: str, not_reached_by: list[str]
) -> None:
    """S-131, E-104, case B20: an address that is not listened at fails, also with the right port."""
    listen(address)
    for ip in not_reached_by:
        assert dd.link_clusters([info(ip, 26100)], 5000) == FAILED, ip
    ip = address.rpartition(":")[0].strip("[]")
    assert dd.link_clusters([info(ip, 26101)], 5000) == FAILED


@pytest.mark.needs(network=False)
def test_unlink_by_another_way_to_write_the_address(listen: Callable[[str], Any], dd: LLMDataDist) -> None:
    """E-111, case B20: addresses are compared by value, not by text."""
    listen("10.1.2.3:26100")
    assert dd.link_clusters([info("10.1.2.3", 26100)], 5000) == LINKED
    assert dd.unlink_clusters([info("::ffff:10.1.2.3", 26100)], 5000) == LINKED


@pytest.mark.needs(network=False)
def test_local_address_may_be_v6_and_port_zero(listen: Callable[[str], Any], dd: LLMDataDist) -> None:
    """S-131: the local address is only a name of the client's interface."""
    listen("10.1.2.3:26100")
    assert dd.link_clusters([info("10.1.2.3", 26100, "fd00::1")], 5000) == LINKED


GARBAGE = [
    "1",
    "1.2.3",
    "1.2.3.4.5",
    "1.2.3.4:5",
    "1.2.3.256",
    "01.2.3.4",
    "0x7f.0.0.1",
    "",
    " 127.0.0.1",
    "127.0.0.1 ",
    "127.0.0.1\n",
    "127.0.0.1\0",
    "localhost",
    "h" * 5000,
    "::1%lo",
    "fe80::1%1",
    "[::1]",
    ":::1",
    "::ffff:1.2.3",
    "1:2:3:4:5:6:7:8:9",
    "\u0661.2.3.4",
    "127.0.0.1\ud800",
]


@pytest.mark.parametrize("ip", GARBAGE, ids=lambda ip: ascii(ip)[:30])
def test_b20_garbage_is_refused_by_name(ip: str) -> None:
    """E-24, E-76, case B20: at the call, before any socket is opened, and never completed to something else."""
    before = open_things()
    for append in ("append_remote_ip_info", "append_local_ip_info"):
        with refuses(PARAM_INVALID, "ip", ascii(ip)[1:-1][:100] if ip.isascii() else "ip"):
            getattr(LLMClusterInfo(), append)(ip, 26100)
    prompt = LLMDataDist(LLMRole.PROMPT, 1)
    for text in (f"{ip}:26100", f"[{ip}]:26100"):
        if (ip, text) == ("[::1]", "[::1]:26100"):
            continue
        with refuses(PARAM_INVALID, "llm.listenIpInfo"):
            prompt.init(options(text))
    assert open_things() == before


@pytest.mark.parametrize("port", ["0", "65536", "-1", "80x", "", " 80", "80 ", "8_0", "\u0661", "0x50", "9" * 5000])
def test_b19_wrong_ports_are_refused(port: str) -> None:
    """E-76, E-77, case B19: a port that no listener can have is refused by name, never cut to another."""
    before = open_things()
    prompt = LLMDataDist(LLMRole.PROMPT, 1)
    for host in ("10.1.2.3", "[::1]"):
        with refuses(PARAM_INVALID, "llm.listenIpInfo", 65535):
            prompt.init(options(f"{host}:{port}"))
    assert open_things() == before


def test_b20_listen_without_brackets() -> None:
    """E-76, case B20: an IPv6 address without brackets is ambiguous, so it is refused instead of split."""
    prompt = LLMDataDist(LLMRole.PROMPT, 1)
    for text in ("::1:26100", "::1", "fd00::1:2:3:26100", "[::1]", "10.1.2.3", "10.1.2.3:5:6", "[10.1.2.3]:26100"):
        with refuses(PARAM_INVALID, "llm.listenIpInfo"):
            prompt.init(options(text))


@pytest.mark.parametrize("number", [-1, 2**32])
def test_integers_have_32_bits(number: int) -> None:
    """E-23: an integer address is four little-endian bytes."""
    with refuses(ValueError, "ip", number):
        LLMClusterInfo().append_remote_ip_info(number, 26100)


@pytest.mark.needs(network=False)
def test_b19_same_port_at_other_addresses(peer: Peer) -> None:
    """Case B19: names are whole addresses, so one port may be taken at several; a wildcard takes only its own name."""
    first = peer.make("llm_datadist:LLMDataDist", LLMRole.PROMPT, 1)
    first.init(options("10.1.2.3:26100"))
    second = LLMDataDist(LLMRole.PROMPT, 3)
    for address in ("10.1.2.4:26100", "0.0.0.0:26100"):
        second.init(options(address))
        second.finalize()
    for same in ("10.1.2.3:26100", "[::ffff:10.1.2.3]:26100"):
        with refuses(Code.LLM_FAILED, "10.1.2.3:26100", "holds it"):
            second.init(options(same))
