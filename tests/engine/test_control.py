"""The control connection of an engine, against clients that break every rule.

After each of them the engine must take a real link, and have neither thread nor descriptor of the bad one.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from conftest_support import open_things
from pairs import options

from llm_datadist import LLMRole
from llm_datadist import LLMStatusCode as Code
from llm_datadist._addresses import Address
from llm_datadist._engine import local, wire
from llm_datadist._engine.engine import Engine
from llm_datadist._engine.links import LinkRequest
from llm_datadist._engine.wire import HEADER, Frame, Kind
from llm_datadist._options import parse_options
from llm_datadist.backend import make_backend

ADDRESS = Address("10.0.1.1", 26000)
REQUEST = LinkRequest(1, (Address("192.168.0.9", 0),), (ADDRESS,))
LIMIT_S = 20


@pytest.fixture
def make_engine() -> Iterator[Callable[[LLMRole, int], Engine]]:
    """Give a function that makes engines, which end with the test."""
    made: list[Engine] = []

    def make(role: LLMRole, cluster_id: int) -> Engine:
        config = parse_options(role, cluster_id, options(str(ADDRESS) if role is LLMRole.PROMPT else None))
        made.append(Engine(config, make_backend(config.backend)))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def server(make_engine: Callable[[LLMRole, int], Engine]) -> Engine:
    return make_engine(LLMRole.PROMPT, 1)


@pytest.fixture
def client(make_engine: Callable[[LLMRole, int], Engine]) -> Engine:
    """Give an engine that can link for real."""
    return make_engine(LLMRole.DECODER, 2)


class Raw:
    """A connection to the server's listener that sends what it likes."""

    def __init__(self, server: Engine) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(LIMIT_S)
        self.socket.connect(local.socket_name(server.config.namespace, ADDRESS))

    def send(self, data: bytes, fds: tuple[int, ...] = ()) -> None:
        socket.send_fds(self.socket, [data], fds)

    def receive(self) -> Frame:
        """Wait for one frame, and close what comes along."""
        data = b""
        while len(data) < HEADER.size or len(data) < HEADER.size + wire.payload_size(data[: HEADER.size]):
            more, fds, _, _ = socket.recv_fds(self.socket, HEADER.size if not data else 65536, 64)
            for fd in fds:
                os.close(fd)
            assert more, "the server hung up"
            data += more
        return wire.decode(data[: HEADER.size], data[HEADER.size :])

    def hung_up(self) -> bool:
        """Wait for the server's end of the connection to go."""
        try:
            while True:
                data, fds, _, _ = socket.recv_fds(self.socket, 65536, 64)
                for fd in fds:
                    os.close(fd)
                if not data:
                    return True
        except ConnectionResetError:
            return True
        except TimeoutError:
            return False

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def hello(client: Engine, **changes: Any) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Give the body and the descriptors of a greeting that works, but for the changes; None leaves a field out."""
    export = client.backend.export()
    body: dict[str, Any] = client.links._greeting(export, 1000, 2**62)
    body |= {"want": 1, "local": ["192.168.0.9:0"], "remote": [str(ADDRESS)], "comm": "", "limit_ms": LIMIT_S * 1000}
    body["link"] = "test link"
    return {name: value for name, value in (body | changes).items() if value is not None}, export.fds


def check_usable(server: Engine, client: Engine) -> None:
    """Link for real, check, and unlink."""
    assert client.link_clusters([REQUEST], LIMIT_S * 1000) == (Code.LLM_SUCCESS, [Code.LLM_SUCCESS])
    client.check_link(1)
    result = client.unlink_clusters([REQUEST], LIMIT_S * 1000, False, as_client=True)
    assert result == (Code.LLM_SUCCESS, [Code.LLM_SUCCESS])


def wait_for(before: Counter[str]) -> None:
    """Wait until threads, descriptors and mappings are what they were."""
    end = time.monotonic() + LIMIT_S
    while (now := open_things()) != before:
        assert time.monotonic() < end, f"left: {now - before}, lost: {before - now}"
        time.sleep(0.01)


PING = wire.encode(Frame(Kind.PING, 1))
FIRST = {
    "nothing": b"",
    "garbage": random.Random(1).randbytes(3000),
    "http": b"GET / HTTP/1.1\r\n\r\n" * 10,
    "half a header": PING[: HEADER.size // 2],
    "half a payload": HEADER.pack(b"LDD1", 1, Kind.HELLO, 0, 100, 0) + b"{",
    "4 GiB": HEADER.pack(b"LDD1", 1, Kind.HELLO, 0, 2**32 - 1, 0) + bytes(1000),
    "another version": HEADER.pack(b"LDD1", 9, Kind.HELLO, 0, 0, 0),
    "unknown kind": HEADER.pack(b"LDD1", 1, 99, 0, 0, 0),
    "a ping first": PING,
    "ready first": wire.encode(Frame(Kind.READY)),
    "hello without fields": wire.encode(Frame(Kind.HELLO)),
    "hello with a list": HEADER.pack(b"LDD1", 1, Kind.HELLO, 0, 2, 0) + b"[]",
    "hello with deep JSON": HEADER.pack(b"LDD1", 1, Kind.HELLO, 0, 60000, 0) + b"[" * 60000,
    "hello with a huge number": HEADER.pack(b"LDD1", 1, Kind.HELLO, 0, 9012, 0) + b'{"limit_ms":' + b"9" * 8999 + b"}",
}


@pytest.mark.parametrize("data", FIRST.values(), ids=FIRST.keys())
@pytest.mark.parametrize("fds", [0, 3])
def test_bad_first_frame(server: Engine, client: Engine, data: bytes, fds: int) -> None:
    """It is refused or waited for, and forgotten with the connection, descriptors that came along included."""
    before = open_things()
    with open(os.devnull) as null, Raw(server) as raw:
        if data:
            raw.send(data, (null.fileno(),) * fds)
        raw.socket.shutdown(socket.SHUT_WR)
        assert raw.hung_up()
    wait_for(before)
    check_usable(server, client)


@pytest.mark.parametrize("count", [64, 65, 200])
def test_many_descriptors(server: Engine, client: Engine, count: int) -> None:
    """Descriptors that nobody asked for are closed, also when they are too many for one frame."""
    before = open_things()
    with open(os.devnull) as null, Raw(server) as raw:
        for _ in range(3):
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                raw.send(PING[:5], (null.fileno(),) * count)
        raw.socket.shutdown(socket.SHUT_WR)
        assert raw.hung_up()
    wait_for(before)
    check_usable(server, client)


BAD_FIELDS = [
    {"want": 9},
    {"want": "1"},
    {"want": True},
    {"want": -1},
    {"want": 2**64},
    {"want": None},
    {"cluster_id": None},
    {"cluster_id": 1.5},
    {"cache_manager": 1},
    {"cache_manager": 2},
    {"devices": 2},
    {"remote": ["10.0.1.1:1"]},
    {"remote": ["no port"]},
    {"remote": ["x:\u00b2"]},
    {"remote": "10.0.1.1:26000"},
    {"remote": [1]},
    {"local": {"a": 1}},
    {"local": ["192.168.0.9:0"] * 17},
    {"local": ["1" * 65]},
    {"remote": [str(ADDRESS)] * 17},
    {"comm": "x" * 65},
    {"slot": 1024},
    {"slot": -1},
    {"epoch": None},
    {"incarnation": 5},
    {"limit_ms": -1},
    {"limit_ms": None},
    {"export": ""},
    {"export": "!!!"},
    {"export": "e30="},
    {"export": "W10="},
    {"export": 7},
]


@pytest.mark.parametrize("changes", BAD_FIELDS, ids=str)
def test_bad_hello(server: Engine, client: Engine, changes: dict[str, Any]) -> None:
    """Each wrong field ends the connection; nothing is linked."""
    before = open_things()
    body, fds = hello(client, **changes)
    with Raw(server) as raw:
        raw.send(wire.encode(Frame(Kind.HELLO, body=body)), fds)
        assert raw.hung_up()
    wait_for(before)
    assert not server.links.any_live()
    check_usable(server, client)


def test_wrong_descriptors_in_hello(server: Engine, client: Engine) -> None:
    """Files that are not the announced sealed memory are refused, whatever they are."""
    before = open_things()
    body, fds = hello(client)
    with open(os.devnull) as null, contextlib.ExitStack() as closing:
        plain = os.memfd_create("plain")
        closing.callback(os.close, plain)
        os.ftruncate(plain, 256 << 20)
        out, into = os.pipe()
        closing.callback(os.close, out)
        closing.callback(os.close, into)
        wrong = [(), fds[:2], (*fds, fds[0]), fds[::-1], (plain, *fds[1:]), (fds[0], null.fileno(), fds[2])]
        for descriptors in [*wrong, (fds[0], fds[1], out), (fds[1], fds[1], fds[2], fds[2])]:
            with Raw(server) as raw:
                raw.send(wire.encode(Frame(Kind.HELLO, body=body)), descriptors)
                assert raw.hung_up()
    wait_for(before)
    assert not server.links.any_live()
    check_usable(server, client)


def link(raw: Raw, client: Engine) -> None:
    """Make a real link over a raw connection."""
    body, fds = hello(client)
    raw.send(wire.encode(Frame(Kind.HELLO, body=body)), fds)
    assert raw.receive().kind is Kind.WELCOME
    raw.send(wire.encode(Frame(Kind.READY)))
    assert raw.receive().kind is Kind.READY


def test_a_byte_at_a_time(server: Engine, client: Engine) -> None:
    """A greeting in single bytes links, and so do requests on the standing link."""
    body, fds = hello(client)
    with Raw(server) as raw:
        data = wire.encode(Frame(Kind.HELLO, body=body))
        raw.send(data[:1], fds)
        for i in range(1, len(data)):
            raw.send(data[i : i + 1])
        assert raw.receive().kind is Kind.WELCOME
        for byte in wire.encode(Frame(Kind.READY)):
            raw.send(bytes([byte]))
        assert raw.receive().kind is Kind.READY
        for request in range(3):
            for byte in wire.encode(Frame(Kind.PING, request)):
                raw.send(bytes([byte]))
            assert raw.receive() == Frame(Kind.PONG, request)
        raw.send(wire.encode(Frame(Kind.PING, 8)) + wire.encode(Frame(Kind.PING, 9)) + PING[:3])
        assert [raw.receive().request, raw.receive().request] == [8, 9]


STANDING = {
    "garbage": random.Random(2).randbytes(500),
    "4 GiB": HEADER.pack(b"LDD1", 1, Kind.PING, 0, 2**32 - 1, 0),
    "hello again": wire.encode(Frame(Kind.HELLO, body={"want": 1})),
    "welcome": wire.encode(Frame(Kind.WELCOME)),
    "unlink": wire.encode(Frame(Kind.UNLINK, 5)),
}


@pytest.mark.parametrize("data", STANDING.values(), ids=STANDING.keys())
def test_bad_frame_on_a_standing_link(server: Engine, client: Engine, data: bytes) -> None:
    """It ends this link, and nothing else."""
    before = open_things()
    with Raw(server) as raw:
        link(raw, client)
        assert server.links.any_live()
        raw.send(data)
        assert raw.hung_up()
    wait_for(before)
    assert not server.links.any_live()
    check_usable(server, client)


def test_harmless_frames_on_a_standing_link(server: Engine, client: Engine) -> None:
    """Answers that nobody waits for are ignored, and descriptors that come along are closed."""
    before = open_things()
    with open(os.devnull) as null, Raw(server) as raw:
        link(raw, client)
        with_link = open_things() - Counter(["thread llm_datadist link"])
        for kind in (Kind.PONG, Kind.UNLINKED):
            raw.send(wire.encode(Frame(kind, 2**64 - 1)), (null.fileno(),) * 10)
        for request in range(20):
            raw.send(wire.encode(Frame(Kind.PING, request)), (null.fileno(),) * 5)
            assert raw.receive() == Frame(Kind.PONG, request)
        wait_for(with_link)
    wait_for(before)


def test_too_many_descriptors_on_a_standing_link(server: Engine, client: Engine) -> None:
    before = open_things()
    with open(os.devnull) as null, Raw(server) as raw:
        link(raw, client)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            raw.send(PING, (null.fileno(),) * 200)
        assert raw.hung_up()
    wait_for(before)
    check_usable(server, client)


def test_client_that_asks_and_never_reads(server: Engine, client: Engine) -> None:
    """A flood of requests whose answers pile up ends that link, and holds up nobody else."""
    before = open_things()
    with Raw(server) as raw:
        link(raw, client)
        raw.socket.settimeout(LIMIT_S)
        flood = b"".join(wire.encode(Frame(Kind.PING, i)) for i in range(3000))
        start = time.monotonic()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError, TimeoutError):
            while time.monotonic() - start < LIMIT_S:
                raw.socket.sendall(flood)
        assert time.monotonic() - start < LIMIT_S / 2, "the service thread stood still for one client"
    check_usable(server, client)
    wait_for(before)


@pytest.mark.parametrize("sent", [b"", PING[:3]], ids=["silent", "half a header"])
def test_clients_that_never_greet(server: Engine, client: Engine, sent: bytes) -> None:
    """Fewer of them than there are workers hold up nobody; closing the engine ends them, and leaves no thread."""
    with contextlib.ExitStack() as closing:
        for _ in range(10):
            raw = closing.enter_context(Raw(server))
            if sent:
                raw.send(sent)
        check_usable(server, client)
        start = time.monotonic()
        server.close()
        assert time.monotonic() - start < 4
        left = [t.name for t in threading.enumerate() if t.name.startswith("llm_datadist link")]
        assert not left, "a worker outlives its engine"


def test_two_at_the_same_time(server: Engine, make_engine: Callable[[LLMRole, int], Engine]) -> None:
    """Greetings that come together are answered each for itself."""
    clients = [make_engine(LLMRole.DECODER, 10 + i) for i in range(4)]
    results: list[object] = [None] * 4

    def run(i: int) -> None:
        results[i] = clients[i].link_clusters([REQUEST], LIMIT_S * 1000)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S * 2)
    assert results == [(Code.LLM_SUCCESS, [Code.LLM_SUCCESS])] * 4
    for engine in clients:
        engine.check_link(1)
