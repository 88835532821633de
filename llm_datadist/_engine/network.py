"""Control connections between hosts: TCP over IPv4 and IPv6, with a mutual challenge where a secret is configured."""

from __future__ import annotations

import errno
import hashlib
import ipaddress
import os
import select
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from llm_datadist._addresses import Address
from llm_datadist._checks import refused
from llm_datadist._engine import challenge, wire
from llm_datadist._engine.challenge import Role
from llm_datadist._engine.control import Carrier, Channel, NotThere, Service, TimedOut, remaining
from llm_datadist._engine.ranktable import devices_of
from llm_datadist._engine.wire import Malformed
from llm_datadist._log import Seldom
from llm_datadist.status import LLMException, LLMStatusCode, ParamInvalid

__all__ = ["Network"]

#: A client sends its part of the challenge and its first frame without a pause; that is all the time it gets for them.
CHALLENGE_NS = 5 * 10**9
#: A host that stays silent for so long is dead: idle seconds before the first probe, seconds between probes, and all.
KEEP_IDLE_S = 10
KEEP_INTERVAL_S = 5
DEAD_AFTER_S = 30
#: Where the members of rank-table links meet; below the ports that systems give to clients.
MEETING_PORTS = range(20000, 30000)


class Network(Carrier):
    """Connects hosts.

    Parameters
    ----------
    service : Service
        Watches clients until they have passed the challenge.
    secret : bytes or None
        What both sides must know.
    allow_insecure : bool
        Whether to listen to other hosts without a secret.
    """

    def __init__(self, service: Service, secret: bytes | None, allow_insecure: bool) -> None:
        self._service = service
        self._secret = secret
        self._allow_insecure = allow_insecure
        self._refusals = Seldom()
        if secret is None and allow_insecure:
            warnings.warn(
                "LLM_DATADIST_ALLOW_INSECURE is 1 and there is no secret: whoever reaches the port of this engine can "
                "read and write its caches",
                RuntimeWarning,
                stacklevel=5,
            )

    def listen(self, address: Address) -> socket.socket:
        if self._secret is None and not self._allow_insecure and not ipaddress.ip_address(address.host).is_loopback:
            raise refused(
                ParamInvalid(
                    f"cannot listen at {address}: other hosts reach it, and no secret is configured. Set "
                    "LLM_DATADIST_SECRET_FILE on all hosts, or LLM_DATADIST_ALLOW_INSECURE=1 in a network that nobody "
                    "else is in"
                )
            )
        try:
            sock = _socket(address)
        except OSError as e:
            raise OSError(e.errno, f"cannot listen at {address}: {e.strerror}") from e
        try:
            # Else the port of an engine that was restarted stays taken for a minute.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if sock.family == socket.AF_INET6:
                # The wildcard address of IPv6 stands for those of IPv4 too, whatever the system's default.
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            sock.bind((address.host, address.port))
            sock.listen(1024)
        except OSError as e:
            sock.close()
            why = "another engine or process holds the port" if e.errno == errno.EADDRINUSE else e.strerror
            raise OSError(e.errno, f"cannot listen at {address}: {why}") from e
        return sock

    def admit(self, sock: socket.socket, admitted: Callable[[socket.socket], None]) -> None:
        """Let a client pass the challenge and say its first frame, here in the service thread: no step of it waits.

        So a client that is silent, slow, or a stranger takes up no link worker, and can't keep others from one.
        """
        self._take(sock, chain(self._challenge(sock), _first_frame(sock)), admitted)

    def admit_any(self, sock: socket.socket, admitted: Callable[[socket.socket], None]) -> None:
        """Let a client pass the challenge, whatever it says after that; else like `admit`."""
        self._take(sock, self._challenge(sock), admitted)

    def _take(self, sock: socket.socket, steps: Iterator[int], admitted: Callable[[socket.socket], None]) -> None:
        """Take the steps that lead to `admitted`; each gives how many bytes must have arrived before the next."""
        sock.setblocking(False)
        deadline_ns = time.monotonic_ns() + CHALLENGE_NS

        def step() -> None:
            try:
                nbytes = next(steps, 0)
            except (Malformed, OSError) as e:
                self._refusals.warn("refused a client: %s", e)
                sock.close()
                return
            if nbytes:
                self._service.expect(sock, nbytes, deadline_ns, step)
            else:
                admitted(sock)

        step()

    def _challenge(self, sock: socket.socket) -> Iterator[int]:
        """Do the server's part."""
        # What is sent fits any buffer, so that sending does not wait either.
        yield challenge.PREAMBLE_SIZE
        client, server = sock.recv(challenge.PREAMBLE_SIZE), challenge.make_preamble(self._secret)
        if client[: len(challenge.MAGIC)] == challenge.MAGIC:
            # Also to a client that is about to be refused, which then knows why.
            sock.send(server, socket.MSG_NOSIGNAL)
        challenge.check_preamble(client, self._secret)
        if self._secret is not None:
            yield challenge.PROOF_SIZE
            try:
                proof = sock.recv(challenge.PROOF_SIZE)
                challenge.check_proof(proof, self._secret, Role.CLIENT, client, server)
            except PermissionError:
                sock.send(challenge.REFUSAL, socket.MSG_NOSIGNAL)
                raise
            sock.send(challenge.prove(self._secret, Role.SERVER, client, server), socket.MSG_NOSIGNAL)

    def accepted(self, sock: socket.socket) -> Channel:
        try:
            host, port = sock.getpeername()[:2]
            return _channel(sock, Address(host, port))
        except OSError:
            sock.close()
            raise

    def connect(self, address: Address, deadline_ns: int) -> Channel:
        sock = _socket(address)
        try:
            _reach(sock, address, deadline_ns)
            self._take_challenge(sock, address, deadline_ns)
            return _channel(sock, address)
        except BaseException:
            sock.close()
            raise

    def _take_challenge(self, sock: socket.socket, address: Address, deadline_ns: int) -> None:
        """Do the client's part."""
        try:
            client = challenge.make_preamble(self._secret)
            sock.send(client, socket.MSG_NOSIGNAL)
            server = _receive(sock, challenge.PREAMBLE_SIZE, address, deadline_ns)
            challenge.check_preamble(server, self._secret)
            if self._secret is not None:
                sock.send(challenge.prove(self._secret, Role.CLIENT, client, server), socket.MSG_NOSIGNAL)
                proof = _receive(sock, challenge.PROOF_SIZE, address, deadline_ns)
                challenge.check_proof(proof, self._secret, Role.SERVER, client, server)
        except ConnectionError as e:
            # A listener that is being closed, or has too many clients.
            raise NotThere(f"the listener at {address} hung up: {e.strerror}") from e
        except (Malformed, PermissionError) as e:
            raise type(e)(f"refused the listener at {address}: {e}") from None

    def meeting_place(self, meeting: str, rank: int, table: Any) -> Address:
        """Give the member's host, and a port that depends on the set and on the member."""
        digest = hashlib.sha256(f"{meeting}/{rank}".encode()).digest()
        port = MEETING_PORTS[int.from_bytes(digest[:8], "big") % len(MEETING_PORTS)]
        for server, device in devices_of(table):
            if str(device.get("rank_id")) == str(rank):
                host = _ip(server.get("server_id")) or _ip(device.get("device_ip"))
                if host:
                    return Address(host, port)
        raise LLMException(
            f"rank_table has no device of rank {rank} with an IP address for its server_id or device_ip",
            status_code=LLMStatusCode.LLM_LINK_FAILED,
        )


def _first_frame(sock: socket.socket) -> Iterator[int]:
    """Have all of it arrive, without taking it; how long it is, is bounded."""
    yield wire.HEADER.size
    header = sock.recv(wire.HEADER.size, socket.MSG_PEEK)
    if len(header) != wire.HEADER.size:
        raise Malformed("the connection ended before the first frame")
    yield wire.HEADER.size + wire.payload_size(header)


def _socket(address: Address) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setblocking(False)
    return sock


def _reach(sock: socket.socket, address: Address, deadline_ns: int) -> None:
    """Connect a socket."""
    code = sock.connect_ex((address.host, address.port))
    if code == errno.EINPROGRESS:
        _wait(sock, select.POLLOUT, address, deadline_ns)
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise NotThere(f"cannot reach {address}: {os.strerror(code)}")
    if sock.getsockname()[:2] == (address.host, address.port):
        # TCP lets a socket meet itself where nobody listens, if the system happens to give it the same port.
        raise NotThere(f"nobody listens at {address}")


def _wait(sock: socket.socket, what: int, address: Address, deadline_ns: int) -> None:
    poll = select.poll()
    poll.register(sock, what)
    if not poll.poll(remaining(deadline_ns) * 1000):
        raise TimedOut(f"{address} did not answer in time")


def _receive(sock: socket.socket, nbytes: int, address: Address, deadline_ns: int) -> bytes:
    """Wait for so many bytes."""
    received = b""
    while len(received) < nbytes:
        _wait(sock, select.POLLIN, address, deadline_ns)
        more = sock.recv(nbytes - len(received))
        if not more:
            raise ConnectionResetError(errno.ECONNRESET, "the connection ended")
        received += more
    return received


def _channel(sock: socket.socket, peer: Address) -> Channel:
    """Make the channel; have frames sent at once, and the death of the peer's host noticed."""
    for level, option, value in (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEP_IDLE_S),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEP_INTERVAL_S),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, (DEAD_AFTER_S - KEEP_IDLE_S) // KEEP_INTERVAL_S),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_AFTER_S * 1000),
    ):
        sock.setsockopt(level, option, value)
    return Channel(sock, str(peer))


def _ip(text: object) -> str | None:
    """Give an IP address in canonical text; None for anything else."""
    try:
        address = ipaddress.ip_address(text) if isinstance(text, str) and "%" not in text else None
    except ValueError:
        return None
    return str(getattr(address, "ipv4_mapped", None) or address) if address else None
