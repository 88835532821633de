"""Engines that are linked over TCP: by address, by rank table, and with bad clients around."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from conftest_support import open_things
from hosts import free_address, host
from logged import logged
from members import options as cm_options
from networked import Networked
from pairs import options
from refusals import refuses

from llm_datadist import LLMRole, _log
from llm_datadist import LLMStatusCode as Code
from llm_datadist._addresses import Address
from llm_datadist._engine import links, network
from llm_datadist._engine.challenge import PREAMBLE_SIZE, make_preamble
from llm_datadist._engine.communicators import CommState, digest
from llm_datadist._engine.engine import Engine
from llm_datadist._engine.links import LinkRequest
from llm_datadist._engine.wire import HEADER, Frame, Kind, encode
from llm_datadist._options import parse_options

LIMIT_S = 20
SECRET = "of these tests, and of no others"
LINKED = (Code.LLM_SUCCESS, [Code.LLM_SUCCESS])


@pytest.fixture(params=[SECRET, ""], ids=["secret", "no secret"])
def secret(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Configure a secret, or none."""
    monkeypatch.setenv("LLM_DATADIST_SECRET", request.param)
    return str(request.param)


@pytest.fixture
def make() -> Iterator[Callable[..., Engine]]:
    """Give a function that makes engines, which end with the test and leave nothing."""
    before = open_things()
    made: list[Engine] = []

    def engine(cluster_id: int, listen: Address | None = None, *, cm: bool = False) -> Engine:
        role = LLMRole.MIX if cm else LLMRole.DECODER if listen is None else LLMRole.PROMPT
        given = (cm_options if cm else options)(None if listen is None else str(listen))
        made.append(Engine(parse_options(role, cluster_id, given), Networked()))
        return made[-1]

    yield engine
    for each in made:
        each.close()
    end = time.monotonic() + LIMIT_S
    while (now := open_things()) != before:
        assert time.monotonic() < end, f"left: {now - before}"
        time.sleep(0.01)


def request_of(address: Address, cluster_id: int = 1) -> LinkRequest:
    return LinkRequest(cluster_id, (Address("192.168.0.9", 0),), (address,))


def link(client: Engine, address: Address) -> None:
    """Link for real, check, and unlink."""
    assert client.link_clusters([request_of(address)], LIMIT_S * 1000) == LINKED
    client.check_link(1)
    assert client.unlink_clusters([request_of(address)], LIMIT_S * 1000, False, as_client=True) == LINKED


# ---------------------------------------------------------------------- links by address


def test_links(secret: str, make: Callable[..., Engine]) -> None:
    """B19: they come about, are checked and end; a server that starts anew has the port at once."""
    address = free_address()
    server, client = make(1, address), make(2)
    link(client, address)
    assert client.link_clusters([request_of(address)], LIMIT_S * 1000) == LINKED
    server.close()
    with refuses(Code.LLM_NOT_YET_LINK):
        client.check_link(1)
    make(1, address)
    link(client, address)


def test_secrets_that_differ(make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """No link, and both ways to mend it are said; the right client links afterwards."""
    address = free_address()
    good = None
    clients = []
    for text in (SECRET, "another one, which is not that", ""):
        monkeypatch.setenv("LLM_DATADIST_SECRET", text)
        if good is None:
            make(1, address)
            good = make(2)
        else:
            clients.append(make(3 + len(clients)))
    for client, why in zip(clients, ("does not know the secret", "this side has none"), strict=True):
        with logged() as texts:
            result = client.link_clusters([request_of(address)], LIMIT_S * 1000)
        assert result == (Code.LLM_LINK_FAILED, [Code.LLM_LINK_FAILED])
        assert f"refused the listener at {address}" in str(texts)
        assert why in str(texts)
    assert good is not None
    link(good, address)


def test_init_that_would_be_open_to_all(make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused, with nothing left; allowed with a warning that is given once."""
    before = open_things()
    wild = free_address("0.0.0.0")
    with refuses(Code.LLM_PARAM_INVALID, wild, "LLM_DATADIST_SECRET_FILE", "LLM_DATADIST_ALLOW_INSECURE=1"):
        make(1, wild)
    assert open_things() == before
    monkeypatch.setenv("LLM_DATADIST_ALLOW_INSECURE", "1")
    with pytest.warns(RuntimeWarning, match="LLM_DATADIST_ALLOW_INSECURE") as warned:
        server = make(1, wild)
    assert len(warned) == 1
    with pytest.warns(RuntimeWarning, match="LLM_DATADIST_ALLOW_INSECURE"):
        client = make(2)
    link(client, Address(host(), wild.port))
    assert server.links.listening() == [wild]


def test_a_taken_port(make: Callable[..., Engine]) -> None:
    """B19: init fails with the address, and works with another."""
    with socket.create_server((host(), 0)) as other:
        with refuses(Code.LLM_FAILED, Address(*other.getsockname()), "holds the port"):
            make(1, Address(*other.getsockname()))
        make(1, free_address())


# ---------------------------------------------------------------------- bad clients


def raw(address: Address, at: str = "") -> socket.socket:
    """Connect, from another host if one is given."""
    return socket.create_connection((address.host, address.port), LIMIT_S, (at, 0))


def hung_up(sock: socket.socket) -> bool:
    """Wait for the end of a connection."""
    with contextlib.suppress(ConnectionError):
        while sock.recv(65536):
            pass
    return True


def admitted(address: Address) -> socket.socket:
    """Connect to a server without a secret, up to the first frame."""
    sock = raw(address)
    sock.sendall(make_preamble(None))
    assert len(sock.recv(PREAMBLE_SIZE, socket.MSG_WAITALL)) == PREAMBLE_SIZE
    return sock


FIRST = {
    "nothing": b"",
    "garbage": random.Random(1).randbytes(3000),
    "half a header": encode(Frame(Kind.PING))[:10],
    "half a payload": HEADER.pack(b"LDD1", 1, Kind.HELLO, 0, 100, 0) + b"{",
    "4 GiB": HEADER.pack(b"LDD1", 1, Kind.HELLO, 0, 2**32 - 1, 0) + bytes(1000),
    "a ping first": encode(Frame(Kind.PING)),
    "hello without fields": encode(Frame(Kind.HELLO)),
}


@pytest.mark.parametrize("data", FIRST.values(), ids=FIRST.keys())
def test_bad_first_frames(make: Callable[..., Engine], data: bytes) -> None:
    address = free_address()
    make(1, address)
    with admitted(address) as sock:
        sock.sendall(data)
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_WR)
        assert hung_up(sock)
    link(make(2), address)


def test_clients_without_the_secret(make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """However many, and whatever they say: they take up no link worker, and the end of the engine ends them."""
    monkeypatch.setenv("LLM_DATADIST_SECRET", SECRET)
    address = free_address()
    server, client = make(1, address), make(2)
    with contextlib.ExitStack() as closing:
        socks = [closing.enter_context(raw(address)) for _ in range(60)]
        for i, sock in enumerate(socks):
            sock.sendall((b"", b"GET / HTTP/1.1\r\n\r\n", make_preamble(SECRET.encode()), bytes(39))[i % 4])
        link(client, address)
        assert not server.links._admissions
        assert server.links._accepting <= 1
        server.close()
        assert all(map(hung_up, socks))


def test_warnings_of_bad_clients(make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """However many come, the log does not grow with them, at either step."""
    monkeypatch.setattr(_log, "SELDOM_S", 1000)
    address = free_address()
    server = make(1, address)
    with logged() as texts:
        for data in (b"GET / HTTP/1.1\r\n\r\n" * 3, make_preamble(None) + encode(Frame(Kind.PING))):
            for _ in range(20):
                with raw(address) as sock:
                    sock.sendall(data)
                    assert hung_up(sock)
        wait_until(lambda: len(texts) >= 2 and not server.links._accepting)
    assert len(texts) == 2
    assert "starts with b'GET '" in texts[0]
    assert "PING" in texts[1]


def half_way(client: Engine, address: Address, limit_ms: int, at: str = "") -> socket.socket:
    """Connect to a server without a secret as this client's engine, from another host; say HELLO, and no more."""
    sock = raw(address, at)
    end = client.links
    hello = end._greeting(end._backend.export(), 0, 1)
    hello |= {"want": 1, "local": [], "remote": [], "comm": "", "link": "of this test", "limit_ms": limit_ms}
    sock.sendall(make_preamble(None) + encode(Frame(Kind.HELLO, 0, hello)))
    return sock


def wait_until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_clients_that_do_not_say_hello(make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """They take up no link worker until all of it has come, and are hung up on in time."""
    monkeypatch.setattr(network, "CHALLENGE_NS", LIMIT_S * 10**9)
    address = free_address()
    server, client = make(1, address), make(2)
    hello = encode(Frame(Kind.HELLO, 0, {"export": "x" * 60000}))
    with contextlib.ExitStack() as closing:
        socks = [closing.enter_context(raw(address)) for _ in range(200)]
        for i, sock in enumerate(socks):
            sock.sendall(make_preamble(None) + (b"", hello[:3], hello[: HEADER.size], hello[:-1])[i % 4])
        wait_until(lambda: len(server.links.service._silent) == len(socks))
        link(client, address)
        assert not server.links._admissions
        assert len(server.links.service._silent) == len(socks)
        monkeypatch.setattr(network, "CHALLENGE_NS", 10**8)
        with raw(address) as late:
            with contextlib.suppress(ConnectionError):
                late.sendall(make_preamble(None) + hello[:-1])
            assert hung_up(late)
        socks[3].sendall(hello[-1:])
        assert hung_up(socks[3])


def test_half_way_clients_of_one_host(make: Callable[..., Engine]) -> None:
    """Those that say HELLO and then nothing leave workers to the clients of other hosts; only so many may wait."""
    address = free_address()
    server, client = make(1, address), make(2)
    with contextlib.ExitStack() as closing:
        socks = [closing.enter_context(half_way(client, address, 60_000, "127.0.0.9")) for _ in range(200)]
        wait_until(lambda: len(server.links._admissions) == len(socks) - links.HOST_WORKERS)
        assert server.links._accepting == links.HOST_WORKERS
        link(client, address)
        for _ in range(links.HOST_WORKERS + links.MAX_ADMISSIONS - len(socks)):
            socks.append(closing.enter_context(half_way(client, address, 60_000, "127.0.0.9")))
        wait_until(lambda: len(server.links._admissions) == links.MAX_ADMISSIONS)
        socks.append(closing.enter_context(half_way(client, address, 60_000, "127.0.0.9")))
        assert hung_up(socks[-1])
        assert len(server.links._admissions) == links.MAX_ADMISSIONS
        link(client, address)
        server.close()
        assert all(map(hung_up, socks))


def test_more_clients_than_workers(make: Callable[..., Engine]) -> None:
    """Those that say HELLO and nothing more take turns on the workers, and are hung up on in time."""
    address = free_address()
    server, client = make(1, address), make(2)
    with contextlib.ExitStack() as closing:
        hosts = ["127.0.0.8", "127.0.0.9", "127.0.0.10"] * links.WORKERS
        socks = [closing.enter_context(half_way(client, address, 100, at)) for at in hosts]
        most = 0
        done = threading.Event()

        def run() -> None:
            link(client, address)
            assert all(map(hung_up, socks))
            done.set()

        thread = threading.Thread(target=run)
        thread.start()
        while thread.is_alive():
            most = max(most, server.links._accepting)
            thread.join(0.001)
        assert done.is_set()
        assert 1 <= most <= links.WORKERS
        wait_until(lambda: not server.links._accepting)
        assert not server.links._accepting_of


def test_the_end_with_more_clients_than_workers(make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not wait for them, starts no worker for those that had none, and leaves no descriptor."""
    served: list[socket.socket] = []
    serve = links.Links._serve

    def counted(self: links.Links, sock: socket.socket, host: str) -> None:
        served.append(sock)
        serve(self, sock, host)

    monkeypatch.setattr(links.Links, "_serve", counted)
    address = free_address()
    server, client = make(1, address), make(2)
    with contextlib.ExitStack() as closing:
        hosts = ["127.0.0.8", "127.0.0.9"] * links.WORKERS
        socks = [closing.enter_context(half_way(client, address, 60_000, at)) for at in hosts]
        wait_until(lambda: server.links._accepting == links.WORKERS)
        server.close()
        assert len(served) == links.WORKERS
        assert not [t.name for t in threading.enumerate() if t.name.startswith("llm_datadist link")]
        assert all(map(hung_up, socks))


# ---------------------------------------------------------------------- links by rank table


def table_of(count: int) -> str:
    """Make a table whose members are all on this test's host."""
    devices = [{"device_id": str(i), "device_ip": f"192.0.2.{i}", "rank_id": str(i)} for i in range(count)]
    return json.dumps({"server_list": [{"server_id": host(), "device": devices}]})


def settled(engine: Engine, comm: int) -> CommState:
    """Wait for the end of the preparation."""
    end = time.monotonic() + LIMIT_S
    while (state := engine.communicators.state(comm)) is CommState.PREPARING:
        assert time.monotonic() < end
        time.sleep(0.005)
    return state


def test_rank_tables(secret: str, make: Callable[..., Engine]) -> None:
    """S-150, S-151: three members meet, at places that nobody has told them; they leave again."""
    members = [make(10 + rank, cm=True) for rank in range(3)]
    ranks = {10 + rank: rank for rank in range(3)}
    comms = [member.communicators.link("name", ranks, table_of(3)) for member in members]
    for member, comm in zip(members, comms, strict=True):
        assert settled(member, comm) is CommState.READY
        assert {link.cluster_id for link in member.communicators._get(comm).links} == ranks.keys() - {
            member.config.cluster_id
        }
    for member, comm in zip(members, comms, strict=True):
        member.communicators.unlink(comm, time.monotonic_ns() + LIMIT_S * 10**9)


def test_a_taken_meeting_place(make: Callable[..., Engine]) -> None:
    """S-152: FAILED at once, and the place is named."""
    member = make(10, cm=True)
    comm = member.communicators
    place = comm._carrier.meeting_place("", 0, json.loads(table_of(2)))
    with pytest.MonkeyPatch.context() as patch, socket.create_server((place.host, place.port)):
        patch.setattr(comm._carrier, "meeting_place", lambda *_: place)
        with logged() as texts:
            assert settled(member, comm.link("name", {10: 0, 11: 1}, table_of(2))) is CommState.FAILED
    assert f"cannot listen at {place}: another engine or process holds the port" in str(texts)


def test_a_meeting_place_open_to_all(make: Callable[..., Engine]) -> None:
    """Without a secret there is none: FAILED, with both ways out."""
    member = make(10, cm=True)
    table = table_of(2).replace(host(), "192.0.2.1")
    with logged() as texts:
        assert settled(member, member.communicators.link("name", {10: 0, 11: 1}, table)) is CommState.FAILED
    assert "LLM_DATADIST_SECRET_FILE" in str(texts)
    assert "LLM_DATADIST_ALLOW_INSECURE" in str(texts)


def test_a_member_that_does_not_answer(make: Callable[..., Engine]) -> None:
    """S-154: unlink does not wait until the time of the link is over."""
    member = make(11, cm=True)
    ranks, table = {10: 0, 11: 1}, table_of(2)
    place = member.communicators._carrier.meeting_place(digest("name", ranks, json.loads(table)), 0, json.loads(table))
    with socket.create_server((place.host, place.port)) as silent:
        comm = member.communicators.link("name", ranks, table)
        with silent.accept()[0]:
            member.communicators.unlink(comm, time.monotonic_ns() + LIMIT_S * 10**9)


def test_a_table_without_places(make: Callable[..., Engine]) -> None:
    """S-152: LINK_FAILED, and no id is used up."""
    member = make(10, cm=True)
    with refuses(Code.LLM_LINK_FAILED, "rank 0"):
        member.communicators.link("name", {10: 0, 11: 1}, '{"server_list":[{"device":[{}]}]}')
    comm = member.communicators.link("name", {10: 0, 11: 1}, table_of(2))
    assert comm == 1
    member.communicators.unlink(comm, time.monotonic_ns() + LIMIT_S * 10**9)


def test_no_loopback(make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """S-145: the option means nothing between hosts, so absent members are waited for."""
    monkeypatch.setenv("LLM_DATADIST_LOOPBACK", "1")
    first = make(10, cm=True)
    mine = first.communicators.link("name", {10: 0, 11: 1}, table_of(2))
    second = make(11, cm=True)
    theirs = second.communicators.link("name", {10: 0, 11: 1}, table_of(2))
    for member, comm in ((first, mine), (second, theirs)):
        assert settled(member, comm) is CommState.READY
        (made,) = member.communicators._get(comm).links
        assert made.client is (member is second)
