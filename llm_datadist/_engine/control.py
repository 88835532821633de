"""Control connections: how they are made, frames on them, and the one service thread of an engine."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import selectors
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from llm_datadist._addresses import Address
from llm_datadist._engine import wire
from llm_datadist._engine.wire import Frame, Malformed
from llm_datadist._log import get_logger

__all__ = ["Carrier", "Channel", "Gone", "NotThere", "Service", "TimedOut"]

MAX_FDS = 192
#: So many clients may say nothing at the same time; the oldest go first.
MAX_SILENT = 256
#: How soon to try again when the process had no descriptor left for a new connection.
RETRY_S = 1.0
#: The service thread never waits long, so neither does who waits for it.
RUN_S = 5.0
#: A peer waits for each answer, so few of its frames are ever under way; after interruptions some more.
MOST_FRAMES = 64
#: Longer waits overflow poll(); who waits longer is woken and waits again, or gives up after eleven days.
LONGEST_S = 1e6


class Gone(Exception):
    """The peer closed the connection, or its process ended."""


class NotThere(Exception):
    """Nobody listens at the address, or a stranger does."""


class TimedOut(Exception):
    """The time limit passed first."""


def remaining(deadline_ns: int) -> float:
    """Seconds until a deadline, at least 0, and no more than any wait of the system takes."""
    return min(max(deadline_ns - time.monotonic_ns(), 0) / 1e9, LONGEST_S)


class Carrier(ABC):
    """How control connections are made. Methods may be called from any thread, but where they say otherwise."""

    @abstractmethod
    def listen(self, address: Address) -> socket.socket:
        """Listen at an address, without blocking.

        Raises
        ------
        OSError
            With the address and what is wrong.
        """

    @abstractmethod
    def admit(self, sock: socket.socket, admitted: Callable[[socket.socket], None]) -> None:
        """Call `admitted` once a client is worth a link worker, soon or never; both in the service thread."""

    @abstractmethod
    def accepted(self, sock: socket.socket) -> Channel:
        """Make the channel to a client that was admitted; on failure close the socket, and raise like `connect`."""

    @abstractmethod
    def connect(self, address: Address, deadline_ns: int) -> Channel:
        """Connect to whoever listens at an address.

        Raises
        ------
        NotThere
            Nobody listens there, or a stranger does; perhaps later.
        TimedOut
            The deadline passed first.
        Malformed, OSError
            Trying again would not help.
        """

    @abstractmethod
    def meeting_place(self, meeting: str, rank: int, table: Any) -> Address:
        """Say where a member of a rank-table link listens for the others.

        Parameters
        ----------
        meeting : str
            Digest of what all members agree on.
        rank : int
            Rank of the member.
        table : object
            The rank table, decoded, and otherwise unchecked.

        Raises
        ------
        LLMException
            LLM_LINK_FAILED when the table does not tell.
        """


class Channel:
    """One control connection. Frames may be sent from any thread; one thread at a time receives.

    Parameters
    ----------
    sock : socket
        Connected; the channel's from now on.
    peer : str
        Who is at the other end, for texts.
    pid, pidfd : int
        The peer's process and a descriptor of it, now the channel's; -1 where there is none.
    """

    def __init__(self, sock: socket.socket, peer: str, pid: int = -1, pidfd: int = -1) -> None:
        sock.setblocking(False)
        self.socket = sock
        self.peer = peer
        self.pid = pid
        self.pidfd = pidfd
        self._send_lock = threading.Lock()
        self._received = bytearray()
        self._fds: list[int] = []

    def send(self, frame: Frame, deadline_ns: int, fds: Sequence[int] = ()) -> None:
        """Send a frame and descriptors with it; raise `Gone` or `TimedOut`."""
        data = memoryview(wire.encode(frame))
        if fds and self.socket.family != socket.AF_UNIX:
            raise OSError("descriptors reach processes of this host only, and this connection leads to any host")
        if not self._send_lock.acquire(timeout=remaining(deadline_ns)):
            raise TimedOut("another frame is still being sent")
        try:
            while data:
                try:
                    sent = socket.send_fds(self.socket, [data], fds, socket.MSG_NOSIGNAL)
                except BlockingIOError:
                    self._wait(select.POLLOUT, deadline_ns)
                except OSError as e:
                    raise Gone(f"the connection ended: {e.strerror}") from e
                else:
                    data, fds = data[sent:], ()
        finally:
            self._send_lock.release()

    def receive(self, deadline_ns: int) -> tuple[Frame, tuple[int, ...]]:
        """Wait for one frame; give it with the descriptors that came along, now the caller's."""
        while True:
            frame = self._next()
            if frame is not None:
                fds, self._fds = tuple(self._fds), []
                return frame, fds
            self._wait(select.POLLIN, deadline_ns)
            self._fill()

    def read(self) -> list[Frame]:
        """Give the frames that have arrived, without waiting; raise `Gone` at the end of the stream."""
        self._fill()
        self._drop_fds()
        frames = []
        while (frame := self._next()) is not None:
            frames.append(frame)
        return frames

    def _fill(self) -> None:
        try:
            data, fds, flags, _ = socket.recv_fds(self.socket, 65536, MAX_FDS, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError as e:
            raise Gone(f"the connection ended: {e.strerror}") from e
        self._fds.extend(fds)
        if flags & socket.MSG_CTRUNC or len(self._fds) > MAX_FDS:
            self._drop_fds()
            raise Malformed("descriptors were lost: too many in one frame, or none free in this process")
        if not data:
            raise Gone("the peer closed the connection")
        self._received += data

    def _next(self) -> Frame | None:
        if len(self._received) < wire.HEADER.size:
            return None
        header = bytes(self._received[: wire.HEADER.size])
        end = wire.HEADER.size + wire.payload_size(header)
        if len(self._received) < end:
            return None
        frame = wire.decode(header, bytes(self._received[wire.HEADER.size : end]))
        del self._received[:end]
        return frame

    def _wait(self, what: int, deadline_ns: int) -> None:
        poll = select.poll()
        poll.register(self.socket, what)
        if self.pidfd >= 0:
            poll.register(self.pidfd, select.POLLIN)
        ready = dict(poll.poll(remaining(deadline_ns) * 1000))
        if not ready:
            raise TimedOut("the peer did not answer in time")
        if self.pidfd in ready and self.socket.fileno() not in ready:
            # A forked child can hold a dead peer's end open, so the socket alone would keep us waiting.
            raise Gone("the peer's process has ended")

    def _drop_fds(self) -> None:
        while self._fds:
            os.close(self._fds.pop())

    def hang_up(self) -> None:
        """End the connection for both sides; descriptors stay valid until `close`."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close socket and descriptors. Idempotent."""
        self._drop_fds()
        self.socket.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


class Service:
    """The service thread: it accepts, reads frames, and answers; it takes no transfer lock and never waits long."""

    def __init__(self, name: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._selector.register(self._wake_out, selectors.EVENT_READ, self._woken)
        self._jobs: deque[Callable[[], None]] = deque()
        #: Listeners that wait until a descriptor is free.
        self._starved: list[Callable[[], None]] = []
        #: Clients that have not said enough yet, and until when they may.
        self._silent: dict[socket.socket, int] = {}
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, job: Callable[[], None]) -> None:
        """Run a short job in the service thread, soon; at once if the thread has ended."""
        if not self._thread.is_alive():
            job()
            return
        self._jobs.append(job)
        self._wake()
        if not self._thread.is_alive():
            self._run_jobs()

    def run(self, job: Callable[[], None]) -> bool:
        """Run a short job in the service thread, and wait for its end; say whether that came."""
        ended = threading.Event()

        def then() -> None:
            try:
                job()
            finally:
                ended.set()

        self.call(then)
        return ended.wait(RUN_S)

    def listen(self, sock: socket.socket, accepted: Callable[[socket.socket], None]) -> None:
        """Accept connections from now on."""
        self.call(lambda: self._register(sock, lambda: self._accept(sock, accepted)))

    def pause(self, sock: socket.socket) -> None:
        """Stop to accept; what comes waits in the kernel's queue. Only from the service thread."""
        self._forget(sock)

    def expect(self, sock: socket.socket, nbytes: int, deadline_ns: int, ready: Callable[[], None]) -> None:
        """Call `ready` once so many bytes of a client have arrived, or its end. Only from the service thread.

        A client costs nothing but a descriptor until then, and is hung up on if that takes too long, or if too many
        others wait.
        """
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
        if len(self._silent) >= MAX_SILENT:
            self._hang_up(min(self._silent, key=self._silent.__getitem__), "too many others wait")
        self._silent[sock] = deadline_ns

        def heard() -> None:
            self._forget(sock)
            del self._silent[sock]
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
            ready()

        self._register(sock, heard)

    def watch(self, channel: Channel, frame: Callable[[Frame], None], gone: Callable[[str], None]) -> None:
        """Hand each frame of a channel over, and its end."""
        self.call(lambda: self._register(channel.socket, lambda: self._read(channel, frame, gone)))
        if channel.pidfd >= 0:
            self.call(lambda: self._register(channel.pidfd, lambda: self._died(channel, gone)))

    def dispose(self, channel: Channel) -> None:
        """Forget a channel and close it, in this order and in the service thread.

        A descriptor number may be used again as soon as it is closed, so nobody may close it under the selector.
        """

        def job() -> None:
            self._forget(channel.socket)
            self._forget(channel.pidfd)
            channel.close()

        self.call(job)

    def release(self, sock: socket.socket) -> None:
        """Forget a listener and close it: when this returns, nobody reaches it, and others can listen there."""

        def job() -> None:
            self._forget(sock)
            sock.close()

        self.run(job)

    def stop(self, deadline_ns: int) -> bool:
        """End the thread; say whether it ended in time."""
        self._stopping = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(remaining(deadline_ns))
        if self._thread.is_alive():
            return False
        self._run_jobs()
        self._close()
        return True

    def abandon(self) -> None:
        """Close the descriptors in a forked child, where the thread does not exist."""
        self._close()

    def _close(self) -> None:
        # DefaultSelector.close() closes its own descriptor only, so a parent's registrations survive a child's call.
        self._selector.close()
        self._wake_in.close()
        self._wake_out.close()
        while self._silent:
            self._silent.popitem()[0].close()

    def _wake(self) -> None:
        # A full pipe means that a wake-up is already under way; a closed one, that the thread has ended.
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake_in.send(b"\0")

    def _woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_out.recv(4096)

    def _run(self) -> None:
        while not self._stopping:
            starved, self._starved = self._starved, []
            for key, _ in self._selector.select(RETRY_S if starved else self._patience()):
                # What came before it may have closed the descriptor, and even registered another of the same number.
                if self._selector.get_map().get(key.fd) is key:
                    self._guarded(key.data)
            self._jobs.extend(starved)
            self._run_jobs()
            self._hang_up_on_silent()

    def _run_jobs(self) -> None:
        while self._jobs:
            self._guarded(self._jobs.popleft())

    @staticmethod
    def _guarded(job: Callable[[], None]) -> None:
        """Keep one failing job from ending the thread that all links depend on."""
        try:
            job()
        except Exception:
            get_logger().error("the service thread met an unexpected error and goes on", exc_info=True)

    def _register(self, what: socket.socket | int, ready: Callable[[], None]) -> None:
        fd = what if isinstance(what, int) else what.fileno()
        if fd >= 0 and not self._stopping:
            self._selector.register(what, selectors.EVENT_READ, ready)

    def _forget(self, what: socket.socket | int) -> None:
        fd = what if isinstance(what, int) else what.fileno()
        if fd >= 0 and not self._stopping and fd in self._selector.get_map():
            self._selector.unregister(fd)

    def _accept(self, listener: socket.socket, accepted: Callable[[socket.socket], None]) -> None:
        try:
            sock, _ = listener.accept()
        except OSError as e:
            # Else the client has taken it back.
            if e.errno in (errno.EMFILE, errno.ENFILE):
                get_logger().error("cannot accept a link: %s", e.strerror)
                self._forget(listener)
                self._starved.append(lambda: self._register(listener, lambda: self._accept(listener, accepted)))
            return
        accepted(sock)

    def _patience(self) -> float | None:
        """Seconds until the first of the silent has had its time; None for ever."""
        return remaining(min(self._silent.values())) if self._silent else None

    def _hang_up_on_silent(self) -> None:
        now = time.monotonic_ns()
        for sock in [sock for sock, deadline_ns in self._silent.items() if deadline_ns <= now]:
            self._hang_up(sock, "it did not say in time who it is")

    def _hang_up(self, sock: socket.socket, why: str) -> None:
        get_logger().info("hung up on a client: %s", why)
        self._forget(sock)
        del self._silent[sock]
        sock.close()

    def _read(self, channel: Channel, frame: Callable[[Frame], None], gone: Callable[[str], None]) -> None:
        try:
            frames = channel.read()
            if len(frames) > MOST_FRAMES:
                raise Malformed(f"{len(frames)} frames came at once, which keeps the other peers waiting")
            for received in frames:
                frame(received)
        except Gone as e:
            self._lost(channel, gone, str(e))
        except Malformed as e:
            self._lost(channel, gone, f"the peer broke the protocol: {e}")

    def _died(self, channel: Channel, gone: Callable[[str], None]) -> None:
        self._lost(channel, gone, "the peer's process has ended")

    def _lost(self, channel: Channel, gone: Callable[[str], None], why: str) -> None:
        self._forget(channel.socket)
        self._forget(channel.pidfd)
        gone(why)
