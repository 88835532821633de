"""Addresses (api 4.2, B20)."""

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_datadist import LLMClusterInfo, LLMException, LLMStatusCode
from llm_datadist._addresses import Address, canonical_host, parse_address
from llm_datadist.configs import trans_str_ip

GARBAGE = [
    "",
    "1",
    "1.2.3",
    "1.2.3.4.5",
    "1.2.3.256",
    "01.2.3.4",
    " 127.0.0.1",
    "127.0.0.1 ",
    "127.0.0.1\n",
    "127.0.0.1\0",
    "localhost",
    "example.com",
    "h" * 5000,
    "fe80::1%eth0",
    ":::1",
    "\u0661.2.3.4",
    "\ud800",
]


def refused(call, *args):
    with pytest.raises(LLMException) as e:
        call(*args)
    assert e.value.status_code is LLMStatusCode.LLM_PARAM_INVALID
    assert isinstance(e.value, ValueError)
    assert len(str(e.value)) < 1000
    return str(e.value)


@pytest.mark.parametrize(
    ("text", "host", "port", "canonical"),
    [
        ("1.2.3.4:80", "1.2.3.4", 80, "1.2.3.4:80"),
        ("0.0.0.0:1", "0.0.0.0", 1, "0.0.0.0:1"),
        ("[::1]:65535", "::1", 65535, "[::1]:65535"),
        ("[2001:DB8:0:0:0:0:0:1]:80", "2001:db8::1", 80, "[2001:db8::1]:80"),
        ("[::ffff:1.2.3.4]:80", "1.2.3.4", 80, "1.2.3.4:80"),
        ("[::ffff:102:304]:80", "1.2.3.4", 80, "1.2.3.4:80"),
        ("[::]:80", "::", 80, "[::]:80"),
        ("1.2.3.4:080", "1.2.3.4", 80, "1.2.3.4:80"),
    ],
)
def test_parse(text, host, port, canonical):
    address = parse_address("listen", text)
    assert address == Address(host, port)
    assert str(address) == canonical


@pytest.mark.parametrize("host", GARBAGE)
def test_garbage_is_refused_by_name(host):
    """B20."""
    text = refused(canonical_host, "some ip", host)
    assert "some ip" in text
    assert repr(host)[:100] in text
    refused(parse_address, "listen", f"{host}:80")
    refused(trans_str_ip, host)
    info = LLMClusterInfo()
    refused(info.append_local_ip_info, host, 1)
    refused(info.append_remote_ip_info, host, 1)
    assert info.local_ip_info_list == info.remote_ip_info_list == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        "1.2.3.4",
        "1.2.3.4:",
        "1.2.3.4:0",
        "1.2.3.4:65536",
        "1.2.3.4:-1",
        "1.2.3.4:80x",
        "1.2.3.4: 80",
        "1.2.3.4:+80",
        "1.2.3.4:\u0668\u0660",
        "1.2.3.4:" + "9" * 5000,
        "1.2.3.4:5:6",
        "::1:80",
        "::1",
        "[::1]",
        "[::1]80",
        "[::1:80",
        "[1.2.3.4]:80",
        "[[::1]]:80",
        "localhost:80",
        " 1.2.3.4:80",
        "80",
    ],
)
def test_bad_addresses(text):
    """B19, B20, E-76, E-77: bad addresses and ports are refused by name."""
    assert "listen" in refused(parse_address, "listen", text)


def test_wildcards():
    assert Address("0.0.0.0", 1).is_wildcard
    assert Address("::", 1).is_wildcard
    assert not Address("127.0.0.1", 1).is_wildcard


def test_address_is_frozen_and_hashable():
    address = Address("1.2.3.4", 5)
    with pytest.raises(AttributeError):
        address.port = 6
    assert len({address, Address("1.2.3.4", 5)}) == 1


@given(st.integers(0, 2**32 - 1))
def test_integers_are_little_endian(number):
    host = canonical_host("ip", number)
    assert host == socket.inet_ntoa(number.to_bytes(4, "little"))
    assert trans_str_ip(host) == number


@given(st.binary(min_size=16, max_size=16))
def test_v6_text_is_canonical(packed):
    text = socket.inet_ntop(socket.AF_INET6, packed)
    full = ":".join(packed[i : i + 2].hex() for i in range(0, 16, 2))
    assert canonical_host("ip", full) == canonical_host("ip", text) == canonical_host("ip", text.upper())


def test_trans_str_ip():
    """E-24."""
    assert trans_str_ip("1.1.1.1") == 16843009
    assert trans_str_ip("127.0.0.1") == 16777343
    assert trans_str_ip("::ffff:127.0.0.1") == 16777343
    assert trans_str_ip(5) == 5
    for text in ("::1", "1.1.1", "1", "0x7f.0.0.1", "256.0.0.1", "host", ""):
        with pytest.raises(RuntimeError):
            trans_str_ip(text)
    with pytest.raises(TypeError):
        trans_str_ip(None)


def test_cluster_info():
    info = LLMClusterInfo()
    assert info.remote_cluster_id is None
    info.remote_cluster_id = 2**64 - 1
    info.append_local_ip_info("127.0.0.1", 0)
    info.append_local_ip_info(16777343, 65535)
    info.append_remote_ip_info("::1", 26000)
    info.append_remote_ip_info("::ffff:1.1.1.1", 26000)
    assert info.remote_cluster_id == 2**64 - 1
    assert info.local_ip_info_list == [(16777343, 0), (16777343, 65535)]
    assert info.remote_ip_info_list == [("::1", 26000), (16843009, 26000)]


@pytest.mark.parametrize("append", ["append_local_ip_info", "append_remote_ip_info"])
def test_cluster_info_types(append):
    """E-22, E-23, E-24."""
    info = LLMClusterInfo()
    add = getattr(info, append)
    for wrong in ((None, 1), (1.0, 1), (True, 1), (b"127.0.0.1", 1), ("1.1.1.1", "1"), ("1.1.1.1", None)):
        with pytest.raises(TypeError):
            add(*wrong)
    for bad in (("1.1.1.1", 65536), ("1.1.1.1", -1), (2**32, 1), (-1, 1)):
        with pytest.raises(ValueError, match="out of range"):
            add(*bad)
    with pytest.raises(RuntimeError):
        add("1.1.1", 1)
    assert info.local_ip_info_list == info.remote_ip_info_list == []


def test_cluster_info_ids():
    """E-22, E-23."""
    info = LLMClusterInfo()
    for wrong in ("1", None, 1.0, True):
        with pytest.raises(TypeError):
            info.remote_cluster_id = wrong
    for bad in (-1, 2**64):
        with pytest.raises(ValueError, match="out of range"):
            info.remote_cluster_id = bad
    info.remote_role_type = 2
    assert info.remote_role_type == 2
    with pytest.raises(TypeError):
        info.remote_role_type = "PROMPT"
