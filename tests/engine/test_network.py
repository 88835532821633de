"""Control connections over TCP, on sockets: who gets in, who does not, and what that costs the others."""

from __future__ import annotations

import contextlib
import os
import queue
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from conftest_support import open_things
from hosts import host
from hypothesis import given, settings
from hypothesis import strategies as st
from logged import logged

from llm_datadist import LLMException
from llm_datadist import LLMStatusCode as Code
from llm_datadist._addresses import Address
from llm_datadist._engine import control, network
from llm_datadist._engine.challenge import PREAMBLE_SIZE, PROOF_SIZE, REFUSAL, Role, make_preamble, prove
from llm_datadist._engine.control import Channel, Gone, NotThere, Service, TimedOut
from llm_datadist._engine.network import Network
from llm_datadist._engine.wire import Frame, Kind, Malformed

LIMIT_S = 20
SECRET = b"of this test, and of no other"
OTHER = b"of another test, and not of this one"


def limit() -> int:
    return time.monotonic_ns() + LIMIT_S * 10**9


class Server:
    """A carrier that listens, and the channels that it has accepted."""

    def __init__(self, secret: bytes | None, listen: str = "") -> None:
        self.service = Service("llm_datadist server")
        self.carrier = Network(self.service, secret, False)
        self.listener = self.carrier.listen(Address(listen or host(), 0))
        self.address = Address(*self.listener.getsockname()[:2])
        self.channels: queue.SimpleQueue[Channel] = queue.SimpleQueue()
        self.service.listen(self.listener, lambda sock: self.carrier.admit_any(sock, self._admitted))

    def _admitted(self, sock: socket.socket) -> None:
        self.channels.put(self.carrier.accepted(sock))

    def accepted(self) -> Channel:
        """Wait for the next channel."""
        return self.channels.get(timeout=LIMIT_S)

    def close(self) -> None:
        self.service.release(self.listener)
        assert self.service.stop(limit())
        while not self.channels.empty():
            self.channels.get().close()


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    """Give a function that makes servers, which end with the test and leave nothing."""
    before = open_things()
    made: list[Server] = []

    def make(secret: bytes | None = SECRET, listen: str = "") -> Server:
        made.append(Server(secret, listen))
        return made[-1]

    yield make
    for server in made:
        server.close()
    assert open_things() == before


def client(server: Server, secret: bytes | None = SECRET, address: Address | None = None) -> Channel:
    """Connect as an engine does."""
    return Network(server.service, secret, False).connect(address or server.address, limit())


def check(server: Server, secret: bytes | None = SECRET, address: Address | None = None) -> None:
    """Connect, and send a frame each way."""
    there = client(server, secret, address)
    here = server.accepted()
    for one, other in ((here, there), (there, here)):
        one.send(Frame(Kind.PING, 7, {"text": "x" * 60000}), limit())
        assert other.receive(limit())[0] == Frame(Kind.PING, 7, {"text": "x" * 60000})
    there.close()
    with pytest.raises(Gone):
        here.receive(limit())
    here.close()


def raw(server: Server) -> socket.socket:
    """Connect without saying anything."""
    return socket.create_connection((server.address.host, server.address.port), LIMIT_S)


def hung_up(sock: socket.socket) -> bytes:
    """Wait for the end of a connection, and give what came before."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while more := sock.recv(65536):
            received += more
    return received


# ---------------------------------------------------------------------- those who get in


@pytest.mark.parametrize("secret", [SECRET, None, b"\0" * 16, bytes(range(256)) * 16])
@pytest.mark.parametrize("listen", ["", "::1"])
def test_connections(serve: Callable[..., Server], secret: bytes | None, listen: str) -> None:
    server = serve(secret, listen)
    check(server, secret)
    check(server, secret)


@pytest.mark.parametrize(
    ("wildcard", "hosts"), [("0.0.0.0", ["127.0.0.1", "127.9.9.9"]), ("::", ["127.0.0.1", "127.9.9.9", "::1"])]
)
def test_wildcards(serve: Callable[..., Server], wildcard: str, hosts: list[str]) -> None:
    """B20: they are reached by all addresses, that of IPv6 by those of IPv4 too."""
    server = serve(SECRET, wildcard)
    for each in hosts:
        check(server, SECRET, Address(each, server.address.port))


def test_settings_of_sockets(serve: Callable[..., Server]) -> None:
    """Frames go at once, a dead host is noticed within about 30 s, and no process is claimed to be known."""
    server = serve()
    there = client(server)
    here = server.accepted()
    for channel in (here, there):
        assert (channel.pid, channel.pidfd) == (-1, -1)
        assert channel.socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert channel.socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1
        tcp = [
            channel.socket.getsockopt(socket.IPPROTO_TCP, option)
            for option in (
                socket.TCP_NODELAY,
                socket.TCP_KEEPIDLE,
                socket.TCP_KEEPINTVL,
                socket.TCP_KEEPCNT,
                socket.TCP_USER_TIMEOUT,
            )
        ]
        assert tcp == [1, 10, 5, 4, 30_000]
    assert there.peer == str(server.address)
    assert here.peer == str(Address(*there.socket.getsockname()))
    there.close()
    here.close()


def test_descriptors_stay_here(serve: Callable[..., Server]) -> None:
    """They are refused before anything is sent, and the connection goes on."""
    server = serve()
    there = client(server)
    here = server.accepted()
    with open(os.devnull) as null, pytest.raises(OSError, match="descriptors"):
        there.send(Frame(Kind.PING), limit(), (null.fileno(),))
    there.send(Frame(Kind.PONG), limit())
    assert here.receive(limit()) == (Frame(Kind.PONG), ())
    there.close()
    here.close()


# ---------------------------------------------------------------------- listening


def test_a_taken_port(serve: Callable[..., Server]) -> None:
    """B19: refused with the address, and nothing stays open; it can be had as soon as it is free."""
    server = serve()
    before = open_things()
    with pytest.raises(OSError, match=f"{server.address}.*holds the port"):
        server.carrier.listen(server.address)
    assert open_things() == before
    check(server)
    # The server's ends were closed last, so only the client's wait.
    there = client(server)
    server.accepted().close()
    with pytest.raises(Gone):
        there.receive(limit())
    there.close()
    server.service.release(server.listener)
    server.carrier.listen(server.address).close()


def test_an_address_of_another_host(serve: Callable[..., Server]) -> None:
    with pytest.raises(OSError, match=r"192\.0\.2\.1:26000: Cannot assign requested address"):
        serve().carrier.listen(Address("192.0.2.1", 26000))


@pytest.mark.parametrize(
    ("listen", "here"), [("0.0.0.0", True), ("::", True), ("192.0.2.1", False), ("2001:db8::1", False)]
)
def test_other_hosts_without_a_secret(serve: Callable[..., Server], listen: str, here: bool) -> None:
    """Refused with both ways out; with one of them it is tried, and works where the address is this host's."""
    service = serve().service
    address = Address(listen, 26000)
    with pytest.raises(LLMException, match="LLM_DATADIST_SECRET_FILE.*LLM_DATADIST_ALLOW_INSECURE=1") as refusal:
        Network(service, None, False).listen(address)
    assert refusal.value.status_code is Code.LLM_PARAM_INVALID
    assert str(address) in str(refusal.value)
    with pytest.warns(RuntimeWarning, match="LLM_DATADIST_ALLOW_INSECURE"):
        insecure = Network(service, None, True)
    for carrier in (insecure, Network(service, SECRET, False), Network(service, SECRET, True)):
        with contextlib.nullcontext() if here else pytest.raises(OSError, match="Cannot assign"):
            carrier.listen(Address(listen, 0)).close()


# ---------------------------------------------------------------------- clients and what they meet


def test_nobody_listens(serve: Callable[..., Server]) -> None:
    server = serve()
    server.service.release(server.listener)
    with pytest.raises(NotThere, match=f"{server.address}: Connection refused"):
        client(server)


def test_a_listener_that_says_nothing() -> None:
    """The time limit ends the wait."""
    with socket.create_server((host(), 0)) as listener:
        service = Service("llm_datadist client")
        address = Address(*listener.getsockname())
        with pytest.raises(TimedOut, match=str(address)):
            Network(service, SECRET, False).connect(address, time.monotonic_ns() + 50_000_000)
        service.stop(limit())


def test_a_socket_does_not_meet_itself() -> None:
    """The system may give a client the port that it wants to reach, and TCP connects it to itself then."""
    with socket.socket() as sock:
        sock.bind((host(), 0))
        with pytest.raises(NotThere, match="nobody listens"):
            network._reach(sock, Address(*sock.getsockname()), limit())


@contextlib.contextmanager
def listener(talk: Callable[[socket.socket], object]) -> Iterator[Address]:
    """Listen, and do something with the one client that comes."""

    def run() -> None:
        sock, _ = server.accept()
        with sock, contextlib.suppress(OSError):
            sock.settimeout(LIMIT_S)
            talk(sock)
            sock.shutdown(socket.SHUT_WR)
            hung_up(sock)

    with socket.create_server((host(), 0)) as server:
        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield Address(*server.getsockname())
        finally:
            thread.join()


def exactly(sock: socket.socket, nbytes: int) -> bytes:
    """Receive so many bytes."""
    return sock.recv(nbytes, socket.MSG_WAITALL)


def echo(sock: socket.socket) -> None:
    """Send back whatever comes."""
    while data := sock.recv(4096):
        sock.sendall(data)


def greet(sock: socket.socket, secret: bytes | None, proof: bytes) -> None:
    """Say the right thing first, and then something for a proof."""
    exactly(sock, PREAMBLE_SIZE)
    sock.sendall(make_preamble(secret))
    if exactly(sock, PROOF_SIZE):
        sock.sendall(proof)


LISTENERS: list[tuple[str, Callable[[socket.socket], object], type[Exception], str]] = [
    ("closes", lambda sock: None, NotThere, "hung up"),
    ("sends half", lambda sock: sock.sendall(make_preamble(SECRET)[:20]), NotThere, "hung up"),
    ("http", lambda sock: sock.sendall(b"HTTP/1.1 400 Bad Request\r\n" * 9), Malformed, "starts with b'HTTP'"),
    ("garbage", lambda sock: sock.sendall(random.Random(3).randbytes(5000)), Malformed, "starts with"),
    ("echoes", echo, PermissionError, "does not know the secret"),
    ("refuses", lambda sock: greet(sock, SECRET, REFUSAL), PermissionError, "does not know the secret"),
    ("lies", lambda sock: greet(sock, SECRET, bytes(range(32))), PermissionError, "does not know the secret"),
    ("has no proof", lambda sock: greet(sock, SECRET, b"half"), NotThere, "hung up"),
    ("has no secret", lambda sock: greet(sock, None, b""), PermissionError, "the peer has none"),
]


@pytest.mark.parametrize(("name", "talk", "error", "text"), LISTENERS, ids=[each[0] for each in LISTENERS])
def test_listeners_that_are_none_of_ours(
    serve: Callable[..., Server], name: str, talk: Callable[[socket.socket], object], error: type[Exception], text: str
) -> None:
    """A client that has a secret tells them, by name, and leaves no descriptor."""
    server = serve()
    with listener(talk) as address, pytest.raises(error, match=text) as caught:
        client(server, SECRET, address)
    assert str(address) in str(caught.value)


# ---------------------------------------------------------------------- strangers


@pytest.mark.parametrize(
    ("mine", "theirs", "here", "there"),
    [
        (SECRET, OTHER, "the peer does not know", "the peer does not know"),
        (SECRET, SECRET + b"\n", "the peer does not know", "the peer does not know"),
        (SECRET, None, "this side has a secret and the peer has none", "the peer has a secret and this side has none"),
        (None, SECRET, "the peer has a secret and this side has none", "this side has a secret and the peer has none"),
    ],
)
def test_secrets_that_differ(
    serve: Callable[..., Server],
    mine: bytes | None,
    theirs: bytes | None,
    here: str,
    there: str,
) -> None:
    """Both sides say what is wrong; nobody is accepted."""
    server = serve(mine)
    with logged() as texts:
        with pytest.raises(PermissionError, match=there):
            client(server, theirs)
        check(server, mine)
    assert here in str(texts)
    assert server.channels.empty()


def test_proofs_are_not_taken_twice(serve: Callable[..., Server]) -> None:
    """What a good client has said opens nothing later, nor does what the server says."""
    server = serve()
    with raw(server) as good:
        first = make_preamble(SECRET)
        good.sendall(first)
        theirs = exactly(good, PREAMBLE_SIZE)
        proof = prove(SECRET, Role.CLIENT, first, theirs)
        good.sendall(proof)
        answer = exactly(good, PROOF_SIZE)
        assert answer == prove(SECRET, Role.SERVER, first, theirs)
        server.accepted().close()
    for said in (proof, answer, REFUSAL, theirs[-PROOF_SIZE:]):
        with raw(server) as sock:
            sock.sendall(first)
            assert exactly(sock, PREAMBLE_SIZE) != theirs
            sock.sendall(said)
            assert hung_up(sock) == REFUSAL
    assert server.channels.empty()


def test_any_bytes(serve: Callable[..., Server]) -> None:
    """Whatever a client says instead of its preamble, or after it, lets nobody in, and the next one is served."""
    server = serve()

    @given(data=st.binary(min_size=1, max_size=200), preamble=st.sampled_from([b"", SECRET, None]))
    @settings(max_examples=60)
    def one(data: bytes, preamble: bytes | None) -> None:
        with raw(server) as sock:
            with contextlib.suppress(OSError):
                sock.sendall(data if preamble == b"" else make_preamble(preamble) + data)
                sock.shutdown(socket.SHUT_WR)
            assert len(hung_up(sock)) in (0, PREAMBLE_SIZE, PREAMBLE_SIZE + len(REFUSAL))
        there = client(server)
        server.accepted().close()
        there.close()
        assert server.channels.empty()

    one()


def test_silent_clients(serve: Callable[..., Server]) -> None:
    """Thousands that say nothing, or not enough, hold up nobody; only so many of them are kept."""
    server = serve()
    with contextlib.ExitStack() as closing:
        for i in range(5 * control.MAX_SILENT):
            sock = closing.enter_context(raw(server))
            with contextlib.suppress(ConnectionError):
                sock.sendall((b"", b"L", make_preamble(SECRET), make_preamble(SECRET) + b"x")[i % 4])
            if i % 300 == 0:
                check(server)
        check(server)
        assert len(server.service._silent) <= control.MAX_SILENT
        assert threading.active_count() < 5


@pytest.mark.parametrize("start", [b"", make_preamble(SECRET)], ids=["preamble", "proof"])
def test_a_byte_now_and_then(serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, start: bytes) -> None:
    """Who goes on sending single bytes is hung up on all the same, as the limit is for the whole challenge."""
    monkeypatch.setattr(network, "CHALLENGE_NS", 3 * 10**8)
    server = serve()
    with raw(server) as sock:
        sock.sendall(start)
        sock.settimeout(0.05)
        received = b""
        for byte in make_preamble(SECRET)[:-10] * 100:
            try:
                sock.send(bytes([byte]))
                more = sock.recv(1000)
            except TimeoutError:
                continue
            except ConnectionError:
                break
            if not more:
                break
            received += more
        else:
            pytest.fail("the server never hung up")
        assert len(received) in (0, PREAMBLE_SIZE)
    assert server.channels.empty()
    monkeypatch.undo()
    check(server)


def test_single_bytes_of_a_good_client(serve: Callable[..., Server]) -> None:
    """It need not send a message at once."""
    server = serve()
    with raw(server) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        mine = make_preamble(SECRET)
        for byte in mine:
            sock.send(bytes([byte]))
        theirs = exactly(sock, PREAMBLE_SIZE)
        for byte in prove(SECRET, Role.CLIENT, mine, theirs):
            sock.send(bytes([byte]))
        assert exactly(sock, PROOF_SIZE) == prove(SECRET, Role.SERVER, mine, theirs)
        server.accepted().close()


def test_the_end_with_silent_clients(serve: Callable[..., Server]) -> None:
    """Stopping hangs up on them."""
    server = serve()
    with raw(server) as one, raw(server) as other:
        other.sendall(make_preamble(SECRET))
        exactly(other, PREAMBLE_SIZE)
        check(server)
        server.close()
        assert hung_up(one) == hung_up(other) == b""


def test_a_descriptor_number_that_is_used_again() -> None:
    """What was ready under a number before is not done to who has the number now."""
    service = Service("llm_datadist of a test")
    ends = [socket.socketpair() for _ in range(3)]
    one, other, late = (pair[0] for pair in ends)
    for _, there in ends[:2]:
        there.send(b"x")
    done: list[str] = []
    settled = threading.Event()

    def ready(name: str, rival: socket.socket) -> None:
        # Whichever of the two comes first takes the other's number away, and gives it to a third.
        done.append(name)
        number = rival.fileno()
        service._hang_up(rival, "as the test wants it")
        os.dup2(late.fileno(), number)
        again = socket.socket(fileno=number)
        service.expect(again, 1, limit(), lambda: done.append("late"))
        service.call(settled.set)

    def start() -> None:
        service.expect(one, 1, limit(), lambda: ready("one", other))
        service.expect(other, 1, limit(), lambda: ready("other", one))

    with logged() as texts:
        service.call(start)
        assert settled.wait(LIMIT_S)
    assert service.stop(limit())
    assert done in (["one"], ["other"])
    assert not texts
    for pair in ends:
        for each in pair:
            each.close()


# ---------------------------------------------------------------------- where members of rank-table links meet


def table(*devices: dict[str, object], **server: object) -> object:
    return {"server_list": [{"device": list(devices), **server}]}


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        (table({"rank_id": "1", "device_ip": "192.0.2.9"}, server_id="192.0.2.1"), "192.0.2.1"),
        (table({"rank_id": 1, "device_ip": "192.0.2.9"}, server_id="1"), "192.0.2.9"),
        (table({"rank_id": "1", "device_ip": "2001:DB8:0::1"}), "2001:db8::1"),
        (table({"rank_id": "0"}, {"rank_id": "1"}, server_id="::ffff:192.0.2.1"), "192.0.2.1"),
        ({"server_list": [{"device": [{"rank_id": "0"}]}, {"server_id": "::1", "device": [{"rank_id": "1"}]}]}, "::1"),
    ],
)
def test_meeting_places(serve: Callable[..., Server], given_: object, expected: str) -> None:
    """The host is that of the server, else of the device; the port depends on the set and the member."""
    place = serve().carrier.meeting_place
    found = place("a" * 32, 1, given_)
    assert found.host == expected
    assert found == place("a" * 32, 1, given_)
    ports = {place(f"{i:032x}", 1, given_).port for i in range(300)}
    assert ports <= set(range(20000, 30000))
    assert len(ports) > 250


@pytest.mark.parametrize(
    "given_",
    [
        None,
        [],
        {},
        {"server_list": {"device": []}},
        {"server_list": [None, {"device": None}, {"device": [None, {}]}]},
        table({"rank_id": "2", "device_ip": "192.0.2.9"}),
        table({"rank_id": "1", "device_ip": "host.example"}, server_id="1"),
        table({"rank_id": "1", "device_ip": 3221226000}, server_id="fe80::1%eth0"),
    ],
)
def test_tables_that_name_no_place(serve: Callable[..., Server], given_: object) -> None:
    with pytest.raises(LLMException, match="rank 1") as refusal:
        serve().carrier.meeting_place("a" * 32, 1, given_)
    assert refusal.value.status_code is Code.LLM_LINK_FAILED


def test_the_ports_of_two_members_differ(serve: Callable[..., Server]) -> None:
    """Members on one host do not take each other's."""
    place, both = serve().carrier.meeting_place, table({"rank_id": "0"}, {"rank_id": "1"}, server_id="192.0.2.1")
    assert place("a" * 32, 0, both) != place("a" * 32, 1, both)
