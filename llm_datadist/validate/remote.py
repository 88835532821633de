"""Partners on another host: the same control connections, and the same secret, as those of links."""

from __future__ import annotations

import os
import queue
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Final

from llm_datadist._addresses import Address
from llm_datadist._engine.control import Service
from llm_datadist._engine.network import Network
from llm_datadist._options import ALLOW_INSECURE
from llm_datadist._secret import read_secret
from llm_datadist.validate.processes import Child

__all__ = ["accepting", "connect_to", "serve_at"]

CONNECT_S: Final = 10.0
#: A partner ends by itself when it is asked for nothing; this is for one that hangs.
PARTNER_LIMIT_S: Final = 3600.0
#: Between two clients; the conformance suite of the acting host may lie between them.
SERVE_LIMIT_S: Final = 12 * 3600.0


@contextmanager
def _network() -> Iterator[tuple[Network, Service]]:
    service = Service("llm_datadist validate")
    try:
        yield Network(service, read_secret(), os.environ.get(ALLOW_INSECURE) == "1"), service
    finally:
        service.stop(time.monotonic_ns() + int(CONNECT_S * 1e9))


def connect_to(address: Address) -> Connection:
    """Give a connection to a fresh partner on a host where `serve_at` runs; raises like `Network.connect`."""
    with _network() as (network, _):
        return _connection(network.connect(address, time.monotonic_ns() + int(CONNECT_S * 1e9)).socket)


def serve_at(address: Address, environment: dict[str, str]) -> None:
    """Start a partner for each client, one after the other, until Ctrl-C, or until nobody has come for a long time.

    Parameters
    ----------
    address : Address
        Where to listen; the engines of partners listen at the port above.
    environment : dict
        For the partners.
    """
    with accepting(address) as clients:
        print(f"llm-datadist: serving at {address}; Ctrl-C ends it", flush=True)
        while True:
            try:
                connection = clients.get(timeout=SERVE_LIMIT_S)
            except queue.Empty:
                print(f"llm-datadist: nobody came within {SERVE_LIMIT_S:.0f} s", flush=True)
                return
            child = Child(
                "llm_datadist.validate.partner:serve", environment, connection, Address(address.host, address.port + 1)
            )
            connection.close()
            child.join(PARTNER_LIMIT_S)


@contextmanager
def accepting(address: Address) -> Iterator[queue.SimpleQueue[Connection]]:
    """Listen, and give the queue of connections to clients that know the secret."""
    clients: queue.SimpleQueue[Connection] = queue.SimpleQueue()
    with _network() as (network, service), network.listen(address) as listener:

        def admitted(sock: socket.socket) -> None:
            clients.put(_connection(network.accepted(sock).socket))

        service.listen(listener, lambda sock: network.admit_any(sock, admitted))
        try:
            yield clients
        finally:
            service.release(listener)


def _connection(sock: socket.socket) -> Connection:
    sock.setblocking(True)
    return Connection(sock.detach())
