"""How two sides of a link describe themselves, the table they make of it, and where a device's address comes from."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_datadist.backend import BackendError, Failure
from llm_datadist.backends.acl import topology
from llm_datadist.backends.acl.local_comm_res import Given, parse_local_comm_res
from llm_datadist.backends.acl.products import Product
from llm_datadist.backends.acl.topology import (
    Address,
    Side,
    agree,
    comm_name,
    device_ip,
    host_id,
    own_side,
    parse_side,
    rank_table,
    uses_rdma,
)


def a2(server: str, device: int, ip: str = "", **more: Any) -> Side:
    return Side(Product.A2, "1.0", server, device, Address(ip, "by hand"), **more)


def a3(server: str, device: int, pod: int, ip: str = "", **more: Any) -> Side:
    return Side(Product.A3, "1.2", server, device, Address(ip, "by hand"), 100 + device, pod, **more)


def refusal(mine: Side, theirs: Side) -> str:
    """Give the text with which both sides refuse a pair."""
    texts = []
    for pair in ((mine, theirs), (theirs, mine)):
        with pytest.raises(BackendError) as caught:
            rank_table(*pair)
        assert caught.value.kind is Failure.INVALID
        texts.append(caught.value.text)
    assert texts[0].partition(". This side: ")[0] == texts[1].partition(". This side: ")[0]
    return texts[0]


# --- the table ----------------------------------------------------------------------------------------------------

TABLES = [
    (
        a2("192.0.2.10", 0, "198.51.100.10"),
        a2("192.0.2.11", 3, "198.51.100.23"),
        '{"version":"1.0","server_count":"2","status":"completed","server_list":['
        '{"server_id":"192.0.2.10","device":[{"device_id":"0","device_ip":"198.51.100.10","rank_id":"0"}]},'
        '{"server_id":"192.0.2.11","device":[{"device_id":"3","device_ip":"198.51.100.23","rank_id":"1"}]}]}',
    ),
    # One server: devices are sorted as text, and no address is needed.
    (
        a2("host", 10),
        a2("host", 9),
        '{"version":"1.0","server_count":"1","status":"completed","server_list":['
        '{"server_id":"host","device":[{"device_id":"10","rank_id":"0"},{"device_id":"9","rank_id":"1"}]}]}',
    ),
    # An address that one side lacks, or that is of another family, is left out where none is needed.
    (
        a2("host", 0, "198.51.100.10"),
        a2("host", 1, "2001:db8::1"),
        '{"version":"1.0","server_count":"1","status":"completed","server_list":['
        '{"server_id":"host","device":[{"device_id":"0","rank_id":"0"},{"device_id":"1","rank_id":"1"}]}]}',
    ),
    (
        a3("192.0.2.10", 0, 7),
        a3("192.0.2.11", 0, 7),
        '{"version":"1.2","server_count":"2","status":"completed","server_list":['
        '{"server_id":"192.0.2.10","device":[{"device_id":"0","super_device_id":"100","rank_id":"0"}]},'
        '{"server_id":"192.0.2.11","device":[{"device_id":"0","super_device_id":"100","rank_id":"1"}]}],'
        '"super_pod_list":[{"super_pod_id":"7","server_list":[{"server_id":"192.0.2.10"},{"server_id":"192.0.2.11"}]}]}',
    ),
    # Two super pods.
    (
        a3("a", 0, 9, "198.51.100.1"),
        a3("b", 2, 8, "198.51.100.2"),
        '{"version":"1.2","server_count":"2","status":"completed","server_list":['
        '{"server_id":"a","device":[{"device_id":"0","device_ip":"198.51.100.1","super_device_id":"100","rank_id":"0"}]},'
        '{"server_id":"b","device":[{"device_id":"2","device_ip":"198.51.100.2","super_device_id":"102","rank_id":"1"}]}],'
        '"super_pod_list":[{"super_pod_id":"9","server_list":[{"server_id":"a"}]},'
        '{"super_pod_id":"8","server_list":[{"server_id":"b"}]}]}',
    ),
    # One server of a super pod is in its list once.
    (
        a3("a", 1, 7),
        a3("a", 2, 7),
        '{"version":"1.2","server_count":"1","status":"completed","server_list":[{"server_id":"a","device":['
        '{"device_id":"1","super_device_id":"101","rank_id":"0"},{"device_id":"2","super_device_id":"102","rank_id":"1"}]}],'
        '"super_pod_list":[{"super_pod_id":"7","server_list":[{"server_id":"a"}]}]}',
    ),
    # The lower version wins.
    (
        replace(a3("a", 1, 7), version="1.0"),
        a3("a", 2, 7),
        '{"version":"1.0","server_count":"1","status":"completed","server_list":[{"server_id":"a","device":['
        '{"device_id":"1","rank_id":"0"},{"device_id":"2","rank_id":"1"}]}]}',
    ),
]


@pytest.mark.parametrize(("first", "second", "table"), TABLES)
def test_both_sides_make_the_same_table(first: Side, second: Side, table: str):
    assert rank_table(first, second) == (table, 0)
    assert rank_table(second, first) == (table, 1)


SIDES = st.builds(
    Side,
    st.sampled_from(Product),
    st.sampled_from(["1.0", "1.2"]),
    st.sampled_from(["a", "b", "10", "9", "\u00e9"]),
    st.integers(0, 20),
    st.sampled_from(["", "192.0.2.1", "192.0.2.2", "2001:db8::1", "2001:db8::2"]).map(lambda ip: Address(ip, "there")),
    st.integers(0, 2),
    st.integers(0, 2),
    st.booleans(),
)


@given(SIDES, SIDES)
def test_any_two_sides_agree(mine: Side, theirs: Side):
    try:
        table, rank = rank_table(mine, theirs)
    except BackendError:
        refusal(mine, theirs)
        return
    assert rank_table(theirs, mine) == (table, 1 - rank)
    described = json.loads(table)
    devices = [(s["server_id"], d) for s in described["server_list"] for d in s["device"]]
    assert [device["rank_id"] for _, device in devices] == ["0", "1"]
    assert len(described["server_list"]) == int(described["server_count"]) == len({server for server, _ in devices})
    server, own = devices[rank]
    assert (server, own["device_id"]) == (mine.server_id, str(mine.device_id))
    assert own.get("device_ip", mine.address.ip) == mine.address.ip
    assert uses_rdma(mine, theirs) <= ("device_ip" in own)
    assert (described["version"] == "1.2") == ("super_pod_list" in described) == ("super_device_id" in own)


# --- the wire -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mine", "theirs", "rdma"),
    [
        (a2("a", 0), a2("a", 1), False),
        (a2("a", 0), a2("b", 0), True),
        (a2("a", 0, intra_roce=True), a2("a", 1, intra_roce=True), True),
        (a3("a", 0, 7), a3("b", 0, 7), False),
        (a3("a", 0, 7), a3("b", 0, 8), True),
        (a3("a", 0, 7, intra_roce=True), a3("a", 1, 7, intra_roce=True), True),
        (replace(a3("a", 0, 7), version="1.0"), a3("b", 0, 7), True),
        (replace(a3("a", 0, 7), version="1.0"), a3("a", 1, 7), False),
        (a2("a", 0), a3("b", 0, 7), True),
        (replace(a2("a", 0), product=Product.OTHER), replace(a2("a", 1), product=Product.OTHER), True),
    ],
)
def test_which_links_go_over_roce(mine: Side, theirs: Side, rdma: bool):
    assert uses_rdma(mine, theirs) is uses_rdma(theirs, mine) is rdma


# --- pairs that can't be --------------------------------------------------------------------------------------------


def test_b21_a_missing_address_is_told_with_the_place_where_it_should_be():
    mine = a2("a", 0, "192.0.2.1")
    theirs = replace(a2("b", 3), address=Address("", "there is no line address_3 in the file"))
    text = refusal(mine, theirs)
    assert "both devices need a device_ip" in text
    assert "This side: A2 device 0 of server a, device_ip 192.0.2.1 (by hand)" in text
    assert "the peer: A2 device 3 of server b, device_ip none (there is no line address_3 in the file)" in text


@pytest.mark.parametrize(
    ("mine", "theirs", "why"),
    [
        (a2("a", 0, "192.0.2.1"), a2("b", 0, "2001:db8::1"), "of one family"),
        (a2("a", 0, "192.0.2.1"), a2("b", 0, "192.0.2.1"), "two devices have one device_ip"),
        (a2("a", 0), a2("a", 0), "two processes that share it"),
        (a2("a", 0, intra_roce=True), a2("a", 1), "HCCL_INTRA_ROCE_ENABLE is 1 on one side only"),
        (a3("a", 0, 7, "192.0.2.1"), a3("a", 1, 8, "192.0.2.2"), "one server is in two super pods"),
        (a3("a", 0, 7), a3("b", 1, 8), "both devices need a device_ip"),
        (a2("a", 0), a3("b", 1, 8), "both devices need a device_ip"),
    ],
)
def test_sides_that_do_not_fit_are_told_with_what_both_have(mine: Side, theirs: Side, why: str):
    text = refusal(mine, theirs)
    assert why in text
    assert str(mine) in text
    assert str(theirs) in text


# --- descriptions -------------------------------------------------------------------------------------------------


@given(SIDES)
def test_a_description_is_read_as_it_was_written(side: Side):
    if side.version == "1.0":
        side = replace(side, super_device_id=None, super_pod_id=None)
    assert parse_side(json.loads(json.dumps(side.describe()))) == side


def test_a_long_origin_is_cut_before_the_peer_would_refuse_it():
    side = replace(a2("a", 0), address=Address("", "\u20ac" * 5000))
    assert parse_side(side.describe()).address == Address("", "\u20ac" * 500)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("product", "A9"),
        ("version", "1.1"),
        ("version", ["1.2"]),
        ("intra_roce", True),
        ("server_id", ""),
        ("server_id", "x" * 65),
        ("server_id", "\u20ac" * 22),
        ("server_id", 'a"\n'),
        ("server_id", "\ud800"),
        ("device_id", 3),
        ("device_id", "-1"),
        ("device_id", "\u0663"),
        ("device_id", "9" * 5000),
        ("device_ip", "192.0.2.300"),
        ("device_ip", 17),
        ("ip_origin", "x" * 3000),
        ("super_device_id", None),
        ("super_pod_id", "9223372036854775808"),
    ],
)
def test_a_peers_description_is_not_trusted(key: str, value: object):
    with pytest.raises(BackendError, match=key) as caught:
        parse_side({**a3("a", 0, 7).describe(), key: value})
    assert caught.value.kind is Failure.INVALID
    assert "expected" in caught.value.text
    assert len(caught.value.text) < 600


@pytest.mark.parametrize("described", [None, [], "A2", {}])
def test_what_is_no_description_is_refused(described: object):
    with pytest.raises(BackendError, match="the peer's description") as caught:
        parse_side(described)
    assert caught.value.kind is Failure.INVALID


def test_own_side_takes_what_the_driver_and_the_table_tell(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(topology, "host_id", lambda: "this host")
    address = Address("192.0.2.1", "by hand")
    assert own_side(Product.A2, 3, address, Given()) == Side(Product.A2, "1.0", "this host", 3, address)
    side = own_side(Product.A3, 3, address, Given(), super_device_id=5, super_pod_id=6, intra_roce=True)
    assert side == Side(Product.A3, "1.2", "this host", 3, address, 5, 6, True)
    table = Given("1.2", "my server", 3, None, 5, 6)
    assert own_side(Product.A3, 3, address, table) == Side(Product.A3, "1.2", "my server", 3, address, 5, 6)
    assert own_side(Product.A3, 3, address, Given("1.0")).version == "1.0"


def test_a_super_pod_that_nobody_tells_is_asked_for():
    with pytest.raises(BackendError, match=r"does not tell super_device_id: give it in llm\.LocalCommRes"):
        own_side(Product.A3, 3, Address("", "nowhere"), Given())


def test_the_drivers_word_and_the_tables_must_agree():
    assert agree("device_id", 3, None) == agree("device_id", None, 3) == agree("device_id", 3, 3) == 3
    assert agree("device_id", 0, None) == agree("device_id", None, 0) == 0
    with pytest.raises(BackendError, match=r"device_id in llm\.LocalCommRes is 4, expected is 0") as caught:
        agree("device_id", 0, 4)
    assert caught.value.kind is Failure.INVALID


@pytest.mark.parametrize("link", ["1-2", "x" * 114, "x" * 115, "\u20ac" * 200, "a\0b", ""])
def test_the_name_of_a_communicator_fits(link: str):
    name = comm_name(link)
    assert 0 < len(name) <= 127
    assert 0 not in name
    assert name == comm_name(link) != comm_name(link + "x")


def test_the_host_has_one_id(tmp_path: Path):
    assert host_id() == host_id()
    assert 1 <= len(host_id().encode()) <= 64
    with pytest.raises(BackendError, match=r"give server_id in llm\.LocalCommRes"):
        host_id(str(tmp_path / "gone"))


# --- the user's table -----------------------------------------------------------------------------------------------

SERVER = {"server_id": "192.0.2.10", "device": [{"device_id": "0", "device_ip": "198.51.100.10"}]}


def test_an_empty_table_gives_nothing():
    assert parse_local_comm_res("") == Given()


@pytest.mark.parametrize(
    ("table", "found"),
    [
        ({"version": "1.0", "server_list": [SERVER]}, Given("1.0", "192.0.2.10", 0, "198.51.100.10")),
        (
            {"version": "1.0", "server_list": [{"device": [{"device_ip": "2001:DB8::0001"}]}]},
            Given("1.0", device_ip="2001:db8::1"),
        ),
        (
            {
                "version": "1.2",
                "status": "completed",
                "server_count": "1",
                "server_list": [{"server_id": "a", "device": [{"device_id": "3", "super_device_id": "5"}]}],
                "super_pod_list": [{"super_pod_id": "6", "server_list": [{"server_id": "a"}]}],
            },
            Given("1.2", "a", 3, None, 5, 6),
        ),
    ],
)
def test_the_users_table_is_read(table: dict[str, object], found: Given):
    assert parse_local_comm_res(json.dumps(table)) == found


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", r"llm\.LocalCommRes is not JSON"),
        ("[" * 60000, r"llm\.LocalCommRes is not JSON"),
        ("[]", r"table in llm\.LocalCommRes is \[\], expected is a JSON object"),
        (" " * 70000, "70000 characters, allowed are 65536"),
        ({"server_list": [SERVER]}, 'version .* is None, expected is "1.0" or "1.2"'),
        ({"version": 1.0, "server_list": [SERVER]}, "version .* is 1.0, expected"),
        ({"version": "1.3", "server_list": [SERVER]}, "version .* is '1.3', expected"),
        ({"version": "1.0"}, "server_list .* is None, expected is a list of one object"),
        ({"version": "1.0", "server_list": [SERVER, SERVER]}, "server_list .* expected is a list of one object"),
        ({"version": "1.0", "server_list": [{"device": [{}, {}]}]}, "device .* expected is a list of one object"),
        ({"version": "1.0", "server_list": [{"device": ["0"]}]}, "device .* expected is a list of one object"),
        ({"version": "1.0", "server_list": [{**SERVER, "server_id": 1}]}, "server_id .* is 1, expected is text"),
        (
            {"version": "1.0", "server_list": [{"device": [{"device_id": 0}]}]},
            "device_id .* is 0, expected .* in quotes",
        ),
        (
            {"version": "1.0", "server_list": [{"device": [{"device_ip": ""}]}]},
            "device_ip .* is '', expected is an IPv4",
        ),
        ({"version": "1.2", "server_list": [SERVER], "super_pod_list": []}, r"super_pod_list .* is \[\], expected"),
    ],
)
def test_a_wrong_table_is_told_by_its_key(text: str | dict[str, object], why: str):
    with pytest.raises(BackendError, match=why) as caught:
        parse_local_comm_res(text if isinstance(text, str) else json.dumps(text))
    assert caught.value.kind is Failure.INVALID


# --- a device's own address -----------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Give paths of a file and a tool that are not there, and none on PATH."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return {"conf": str(tmp_path / "hccn.conf"), "tool": str(tmp_path / "hccn_tool")}


def make_tool(path: str, script: str) -> None:
    Path(path).parent.mkdir(exist_ok=True)
    Path(path).write_text(f"#!/bin/sh\n{script}\n")
    os.chmod(path, 0o755)


def test_the_users_address_goes_before_all(files: dict[str, str]):
    Path(files["conf"]).write_text("address_3=nonsense")
    found = device_ip(3, Given(device_ip="192.0.2.1"), **files)
    assert found == Address("192.0.2.1", "device_ip in llm.LocalCommRes")


@pytest.mark.parametrize(
    ("lines", "ip", "key"),
    [
        ("address_0=192.0.2.1\naddress_3=192.0.2.4\nnetmask_3=255.255.255.0\n", "192.0.2.4", "address_3"),
        ("\n  address_3 = 192.0.2.4 \r\naddress_30=192.0.2.31\n", "192.0.2.4", "address_3"),
        ("IPv6address_3=2001:db8::4\naddress_30=192.0.2.31\n", "2001:db8::4", "IPv6address_3"),
        ("IPv6address_3=2001:db8::4\naddress_3=192.0.2.4\n", "192.0.2.4", "address_3"),
    ],
)
def test_the_file_is_read(files: dict[str, str], lines: str, ip: str, key: str):
    Path(files["conf"]).write_text(lines)
    assert device_ip(3, Given(), **files) == Address(ip, f"{key} in {files['conf']}")


def test_b21_a_file_without_the_devices_line_leaves_the_address_out_and_says_why(files: dict[str, str]):
    # What a link needs is only known with the peer; a link that needs the address is refused with this text.
    Path(files["conf"]).write_text("address_0=192.0.2.1\n")
    make_tool(files["tool"], "echo ipaddr:192.0.2.9")
    assert device_ip(3, Given(), **files) == Address("", f"{files['conf']} has neither address_3 nor IPv6address_3")


@pytest.mark.parametrize("value", ["", "192.0.2", "host.example", "192.0.2.1,192.0.2.2"])
def test_b21_a_line_with_something_else_is_told(files: dict[str, str], value: str):
    Path(files["conf"]).write_text(f"address_3={value}\n")
    with pytest.raises(BackendError) as caught:
        device_ip(3, Given(), **files)
    assert caught.value.kind is Failure.INVALID
    assert caught.value.text == f"address_3 in {files['conf']} is {value!r}, expected is an IPv4 or IPv6 address"


def test_b21_a_stale_file_is_told(files: dict[str, str]):
    Path(files["conf"]).write_text("address_3=192.0.2.4\n")
    make_tool(files["tool"], "echo ipaddr:192.0.2.9")
    with pytest.raises(BackendError) as caught:
        device_ip(3, Given(), **files)
    assert caught.value.kind is Failure.INVALID
    assert f"address_3 in {files['conf']} is 192.0.2.4, expected is 192.0.2.9" in caught.value.text


@pytest.mark.parametrize(
    "script", ["echo ipaddr:192.0.2.4", "echo ipaddr:none", "echo ipaddr:2001:db8::4", "exit 1", "echo no device"]
)
def test_a_file_that_the_driver_does_not_contradict_holds(files: dict[str, str], script: str):
    Path(files["conf"]).write_text("address_3=192.0.2.4\n")
    make_tool(files["tool"], script)
    assert device_ip(3, Given(), **files).ip == "192.0.2.4"


def test_b21_a_file_that_can_not_be_read_is_told(files: dict[str, str]):
    Path(files["conf"]).mkdir()
    with pytest.raises(BackendError) as caught:
        device_ip(3, Given(), **files)
    assert caught.value.kind is Failure.INVALID
    assert caught.value.text.startswith(
        f"{files['conf']} can't be read (Is a directory), expected is a line address_3="
    )


@pytest.mark.parametrize("where", ["in its place", "on PATH"])
def test_the_tool_is_asked_where_there_is_no_file(files: dict[str, str], tmp_path: Path, where: str):
    program = files["tool"] if where == "in its place" else str(tmp_path / "bin" / "hccn_tool")
    make_tool(program, 'test "$*" = "-i 3 -ip -g" && printf "ipaddr:192.0.2.4\\nnetmask:255.255.255.0\\n"')
    assert device_ip(3, Given(), **files) == Address("192.0.2.4", f"ipaddr of {program} -i 3 -ip -g")


def test_the_tool_is_asked_for_ipv6_where_there_is_no_ipv4(files: dict[str, str]):
    make_tool(
        files["tool"], 'if test "$*" = "-i 3 -ip -inet6 -g"; then echo "ipaddr: 2001:db8::4"; else echo "ipaddr:"; fi'
    )
    assert device_ip(3, Given(), **files).ip == "2001:db8::4"


def test_no_file_and_no_tool_leave_the_address_out_and_say_why(files: dict[str, str]):
    found = device_ip(3, Given(), **files)
    assert found.ip == ""
    assert f"there is no {files['conf']}" in found.origin
    assert files["tool"] in found.origin


def test_a_tool_that_knows_nothing_leaves_the_address_out_and_says_why(files: dict[str, str]):
    make_tool(files["tool"], "exit 1")
    found = device_ip(3, Given(), **files)
    assert found.ip == ""
    assert f"{files['tool']} tells no address of device 3" in found.origin


def test_a_tool_that_can_not_run_leaves_the_address_out_and_says_why(files: dict[str, str]):
    Path(files["tool"]).write_text("no program")
    found = device_ip(3, Given(), **files)
    assert found.ip == ""
    assert "failed: PermissionError" in found.origin


def test_a_tool_that_hangs_is_ended(files: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(topology, "_TOOL_S", 0.2)
    os.mkfifo(files["tool"] + ".never")
    make_tool(files["tool"], f"read line < {files['tool']}.never")
    found = device_ip(3, Given(), **files)
    assert found.ip == ""
    assert "failed: TimeoutExpired" in found.origin


def test_a_tool_that_tells_something_else_is_told(files: dict[str, str]):
    make_tool(files["tool"], "echo ipaddr:192.0.2")
    with pytest.raises(BackendError, match=r"ipaddr in .*hccn_tool is '192.0.2', expected is an IPv4 or IPv6 address"):
        device_ip(3, Given(), **files)
