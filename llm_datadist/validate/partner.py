"""The two processes of a transfer: one acts, and asks the other, its partner, to do its part."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from llm_datadist._addresses import Address
from llm_datadist._version import __version__
from llm_datadist.validate.results import explained

__all__ = ["LIMIT_S", "Partner", "PartnerError", "control_of", "count", "serve"]

#: The longest that one side waits for the other.
LIMIT_S = 300.0
_MOST_BYTES = 64 << 10


class PartnerError(Exception):
    """The other process ended, kept silent, or could not do its part."""


class Partner:
    """The other process, as the acting one sees it."""

    def __init__(self, connection: Connection) -> None:
        _limit(connection)
        self._connection = connection
        version = self.ask("hello")
        if version != __version__:
            raise PartnerError(f"the other process has version {version}, this one {__version__}")

    def start(self, what: str, **arguments: object) -> None:
        """Have it do something; `answer` must follow."""
        try:
            self._connection.send_bytes(json.dumps([what, arguments]).encode())
        except BlockingIOError as e:
            raise PartnerError(f"the other process did not read within {LIMIT_S:.0f} s") from e
        except OSError as e:
            raise PartnerError(f"the other process has ended ({e.strerror})") from e

    def answer(self) -> Any:
        """Wait until it is done."""
        try:
            if not self._connection.poll(LIMIT_S):
                raise PartnerError(f"the other process did not answer within {LIMIT_S:.0f} s")
            error, result = json.loads(self._connection.recv_bytes(_MOST_BYTES))
        except BlockingIOError as e:
            raise PartnerError(f"the other process stopped within an answer for {LIMIT_S:.0f} s") from e
        except (EOFError, ConnectionError) as e:
            raise PartnerError("the other process has ended") from e
        if error:
            raise PartnerError(f"in the other process: {error}")
        return result

    def ask(self, what: str, **arguments: object) -> Any:
        """Have it do something, and wait."""
        self.start(what, **arguments)
        return self.answer()


def serve(connection: Connection, address: Address | None) -> None:
    """Be the partner until the other process has ended, or has nothing to ask for a long time.

    Parameters
    ----------
    connection : Connection
        Leads to the acting process.
    address : Address or None
        Where an engine is to listen; None for somewhere on this host.
    """
    from llm_datadist.validate import environment, transfers, words

    _limit(connection)
    with control_of(connection) as control, transfers.Target(address) as engine, words.Target(control) as memory:
        calls: Mapping[str, Callable[..., object]] = {
            "hello": lambda: __version__,
            "environment": environment.described,
            **engine.calls,
            **memory.calls,
        }
        try:
            while connection.poll(LIMIT_S):
                answer = _do(calls, connection.recv_bytes(_MOST_BYTES))
                connection.send_bytes(json.dumps(answer).encode())
        except (EOFError, ConnectionError):  # the acting process has ended, as it always does
            return
        except BlockingIOError:  # it hangs within a message
            return


def _limit(connection: Connection) -> None:
    """Have no part of a message waited for longer than that: `poll` tells of its first byte only."""
    seconds = int(LIMIT_S)
    limit = struct.pack("@ll", seconds, int((LIMIT_S - seconds) * 1e6))
    with control_of(connection) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _do(calls: Mapping[str, Callable[..., object]], request: bytes) -> tuple[str, object]:
    try:
        what, arguments = json.loads(request)
        return "", calls[what](**arguments)
    except Exception as error:  # the acting process reports it
        return explained(error), None


def count(name: str, value: object, most: int) -> int:
    """Check a number that the other process sent."""
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError(f"{name} is {value!r:.100}, allowed are 1 to {most}")
    return value


def control_of(connection: Connection) -> socket.socket:
    """Give a socket whose end tells the end of the other process. Nothing is read or written through it."""
    return socket.socket(fileno=os.dup(connection.fileno()))
