"""Control connections on one host: Unix sockets in the abstract namespace, named by user, namespace, address and port.

So programs may use addresses that the machine does not own, no network port is opened, the kernel says who the peer is,
and descriptors of memory can be passed along.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from llm_datadist._addresses import Address
from llm_datadist._engine.control import Carrier, Channel, NotThere, TimedOut

__all__ = ["Local"]

MAX_NAME = 107
SO_PEERPIDFD = 77  # Linux 6.5; not yet in the socket module
PEER_CREDENTIALS = struct.Struct("3i")


class Local(Carrier):
    """Connects processes of one user in one network namespace."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    def listen(self, address: Address) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(socket_name(self._namespace, address))
            sock.listen(1024)
            sock.setblocking(False)
        except OSError as e:
            sock.close()
            holder = e.strerror
            if e.errno == errno.EADDRINUSE:
                holder = (
                    "another engine or process of this user holds it; to run beside it, set LLM_DATADIST_NAMESPACE "
                    f"(now {self._namespace!r}) to another name for both sides"
                )
            raise OSError(e.errno, f"cannot listen at {address}: {holder}") from e
        return sock

    def admit(self, sock: socket.socket, admitted: Callable[[socket.socket], None]) -> None:
        # Only processes of this host can be here, and the kernel's queue bounds how many.
        admitted(sock)

    def accepted(self, sock: socket.socket) -> Channel:
        return _channel(sock)

    def connect(self, address: Address, deadline_ns: int) -> Channel:
        """Connect to whoever listens at the address, or at its port with the wildcard address."""
        for name in (address, *address.wildcards()):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.setblocking(False)
            try:
                while True:
                    try:
                        sock.connect(socket_name(self._namespace, name))
                        return _channel(sock)
                    except BlockingIOError:
                        # The listener's queue is full; nothing tells when there is room again.
                        if time.monotonic_ns() > deadline_ns:
                            raise TimedOut(f"{address} did not take the connection in time") from None
                        time.sleep(0.002)
            except ConnectionRefusedError:
                sock.close()
            except BaseException:
                sock.close()
                raise
        raise NotThere(
            f"nobody listens at {address} in namespace {self._namespace!r} on this host "
            "(simulator addresses reach one user in one network namespace)"
        )

    def meeting_place(self, meeting: str, rank: int, table: Any) -> Address:
        # No real address has such a host, so nothing else listens there.
        return Address(f"comm-{meeting}-{rank}", 0)


def socket_name(namespace: str, address: Address) -> bytes:
    """Name the abstract socket of an address."""
    name = f"llm_datadist/{os.getuid()}/{namespace}/{address}".encode(errors="surrogateescape")
    if len(name) > MAX_NAME:
        name = b"llm_datadist/" + hashlib.sha256(name).hexdigest().encode()
    return b"\0" + name


def _channel(sock: socket.socket) -> Channel:
    """Make the channel to a peer of the same user."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER_CREDENTIALS.size)
    pid, uid, _ = PEER_CREDENTIALS.unpack(credentials)
    if uid != os.getuid():
        sock.close()
        raise NotThere(f"the peer runs as user {uid}, this process as user {os.getuid()}")
    return Channel(sock, f"process {pid}", pid, _open_pidfd(sock, pid))


def _open_pidfd(sock: socket.socket, pid: int) -> int:
    with contextlib.suppress(OSError):
        raw = sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD, 4)
        fd: int = struct.unpack("i", raw)[0]
        os.set_inheritable(fd, False)
        return fd
    if pid > 0:
        with contextlib.suppress(OSError):
            return os.pidfd_open(pid)
    # A peer of another process-id namespace: its socket alone tells its death.
    return -1
