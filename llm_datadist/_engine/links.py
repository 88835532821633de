"""Links: peers, their incarnations, the handshake, and the state of each link.

A link joins this engine to one other. The handshake takes place on link workers of both sides; after it the
service thread watches the connection. A link that broke stays in the table with its reason until it is replaced
or unlinked, so that a transfer can say why it is refused.
"""

from __future__ import annotations

import base64
import binascii
import enum
import itertools
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from llm_datadist._addresses import Address
from llm_datadist._engine import codes, control
from llm_datadist._engine.board import PeerBoard
from llm_datadist._engine.control import Channel, Gone, NotThere, Service, TimedOut
from llm_datadist._engine.directory import MAX_LINKS, Directory, PeerDirectory, Unreadable
from llm_datadist._engine.wire import Frame, Kind, Malformed
from llm_datadist._log import get_logger
from llm_datadist.backend import Backend, BackendError, Endpoint, Export, Failure, Pair
from llm_datadist.status import LLMException, LLMStatusCode

__all__ = ["Link", "LinkRequest", "Links", "Terms"]

WORKERS = 16
LIMIT = 512
#: What a server grants a client that names no limit, and the most it grants at all.
HANDSHAKE_NS = 60 * 10**9
REMEMBERED = 1024


@dataclass(frozen=True, slots=True)
class Terms:
    """What both ends of a link must agree on, and what this end says of itself."""

    cluster_id: int
    incarnation: int
    cache_manager: bool
    remote_accessible: bool
    devices: int


@dataclass(frozen=True, slots=True)
class LinkRequest:
    """One peer that a user wants to link or unlink."""

    cluster_id: int
    local: tuple[Address, ...]
    remote: tuple[Address, ...]


class State(enum.Enum):
    """What may happen on a link."""

    READY = "ready"
    BROKEN = "broken"
    GONE = "gone"


class Refused(Exception):
    """The other side answered no."""

    def __init__(self, code: LLMStatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass(eq=False)
class Link:
    """One peer, and the data path to it."""

    client: bool
    cluster_id: int
    incarnation: int
    #: The addresses that the link was made with: those of the peer's listener on the client, of the client on the
    #: server.
    addresses: tuple[str, ...]
    channel: Channel
    endpoint: Endpoint
    directory: PeerDirectory
    board: PeerBoard
    #: Slot of this link in my directory, which the peer's transfers look at.
    my_slot: int
    #: Slot and epoch of this link in the peer's directory, which my transfers look at.
    peer_slot: int
    peer_epoch: int
    state: State = State.READY
    reason: str = ""
    #: Held during a transfer, a check, or an unlink.
    lock: threading.Lock = field(default_factory=threading.Lock)
    #: What transfers keep from one to the next (see transfers.py).
    kept: dict[Hashable, Any] = field(default_factory=dict)
    answers: dict[int, threading.Event] = field(default_factory=dict)
    requests: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def guard_word(self) -> tuple[int, int]:
        """Address and expected value of the word by which the peer can stop my transfers."""
        return self.directory.link_word(self.peer_slot), self.peer_epoch

    def why_not(self) -> str:
        """Say why the link can't be used."""
        return f"the link with cluster {self.cluster_id} is {self.state.value}: {self.reason}; link the cluster again"

    def usable(self) -> bool:
        """Look at state and liveness; a peer found dead breaks the link."""
        if self.state is State.READY and not self.endpoint.alive():
            self.break_("the peer's process or connection has ended (peer gone)")
        return self.state is State.READY

    def break_(self, reason: str) -> None:
        """Refuse transfers from now on, and remember why."""
        if self.state is State.READY:
            self.reason = reason
            self.state = State.BROKEN
            self.kept.clear()


class Links:
    """All links of one engine. Thread-safe."""

    def __init__(
        self,
        backend: Backend,
        directory: Directory,
        terms: Terms,
        namespace: str,
        service: Service,
    ) -> None:
        self._backend = backend
        self._directory = directory
        self.terms = terms
        self._namespace = namespace
        self._service = service
        self._lock = threading.Lock()
        self._links: dict[tuple[bool, int, tuple[str, ...]], Link] = {}
        self._clients: dict[int, Link] = {}
        self._slots = deque(range(MAX_LINKS))
        self._epochs = itertools.count(secrets.randbelow(1 << 61) + (1 << 61) << 1, 2)
        self._listeners: list[tuple[Address, socket.socket]] = []
        self._paused = False
        self._accepting = 0
        self._one_call = threading.Lock()
        self._closing = False
        #: Those that answer clients; some may have ended.
        self._workers: set[threading.Thread] = set()
        self._handshakes: set[Channel] = set()
        self._handshake_ended = threading.Condition(self._lock)

    # ------------------------------------------------------------------ looking up

    def client(self, cluster_id: int) -> Link:
        """Give the usable link that this engine made to a cluster, or raise NOT_YET_LINK."""
        link = self._clients.get(cluster_id)
        if link is not None and link.state is State.READY:
            return link
        raise self.not_linked(cluster_id, link)

    def not_linked(self, cluster_id: int, link: Link | None) -> LLMException:
        """Make the exception for a cluster without a usable link."""
        text = f"cluster {cluster_id} is not linked" if link is None else link.why_not()
        return LLMException(text, status_code=LLMStatusCode.LLM_NOT_YET_LINK)

    def any_live(self) -> bool:
        """Say whether any link is usable."""
        with self._lock:
            return any(link.usable() for link in self._links.values())

    # ------------------------------------------------------------------ listening

    def listen(self, addresses: Sequence[Address]) -> None:
        """Accept links at these addresses; on failure none of them stays bound."""
        sockets: list[tuple[Address, socket.socket]] = []
        try:
            for address in addresses:
                sockets.append((address, control.listen(self._namespace, address)))
        except OSError as e:
            for _, sock in sockets:
                sock.close()
            raise LLMException(e.strerror or str(e), status_code=LLMStatusCode.LLM_FAILED) from e
        self._listeners.extend(sockets)
        for _, sock in sockets:
            self._service.listen(sock, self._accepted)

    def _accepted(self, sock: socket.socket) -> None:
        # In the service thread: above the number of workers, further clients wait in the kernel's queue.
        self._accepting += 1
        if self._accepting >= WORKERS and not self._paused:
            self._paused = True
            for _, listener in self._listeners:
                self._service.pause(listener)
        worker = threading.Thread(target=self._serve, args=(sock,), name="llm_datadist link", daemon=True)
        self._workers = {*filter(threading.Thread.is_alive, self._workers), worker}
        worker.start()

    def _served(self) -> None:
        self._accepting -= 1
        if self._paused and self._accepting < WORKERS:
            self._paused = False
            for _, listener in self._listeners:
                self._service.listen(listener, self._accepted)

    def _serve(self, sock: socket.socket) -> None:
        try:
            channel = Channel(sock)
        except (NotThere, OSError) as e:
            get_logger().warning("refused a link: %s", e)
        else:
            try:
                with self._handshake(channel):
                    self._answer(channel)
            except (Gone, TimedOut, Malformed, Unreadable, BackendError, Refused, OSError, ValueError) as e:
                get_logger().warning("a link with process %d did not come about: %s", channel.pid, e)
        finally:
            self._service.call(self._served)

    @contextmanager
    def _handshake(self, channel: Channel) -> Iterator[None]:
        """Close a channel whose handshake fails, and let `close` end the handshake, which writes to the directory."""
        try:
            with self._lock:
                if self._closing:
                    raise Gone("this engine is being finalized")
                self._handshakes.add(channel)
            yield
        except BaseException:
            # A link that was made already has the service thread close the channel, so nobody else may.
            self._service.dispose(channel)
            raise
        finally:
            with self._lock:
                self._handshakes.discard(channel)
                self._handshake_ended.notify_all()

    def _answer(self, channel: Channel) -> None:
        frame, fds = channel.receive(time.monotonic_ns() + HANDSHAKE_NS)
        try:
            if frame.kind is not Kind.HELLO:
                raise Malformed(f"the first frame is {frame.kind.name}, expected HELLO")
            deadline_ns = time.monotonic_ns() + min(frame.number("limit_ms") * 10**6, HANDSHAKE_NS)
            try:
                self._check_hello(frame)
            except Refused as e:
                channel.send(Frame(Kind.REFUSED, body={"code": e.code.value, "text": str(e)}), deadline_ns)
                raise
        except BaseException:
            close_all(fds)
            raise
        slot, epoch = self._take_slot()
        link = None
        try:
            link = self._open(channel, frame, fds, slot, deadline_ns, client=False)
            export = self._backend.export()
            channel.send(Frame(Kind.WELCOME, body=self._greeting(export, slot, epoch)), deadline_ns, export.fds)
            ready, extra = channel.receive(deadline_ns)
            close_all(extra)
            if ready.kind is not Kind.READY:
                raise Malformed(f"the second frame is {ready.kind.name}, expected READY")
            self._enter(link)
            channel.send(Frame(Kind.READY), deadline_ns)
        except BaseException:
            if link is not None:
                self._remove(link, "the handshake failed")
            else:
                self._give_slot(slot)
            raise
        self._watch(link)

    def _check_hello(self, frame: Frame) -> None:
        mine = self.terms
        wanted = frame.number("want")
        if self._closing:
            raise Refused(LLMStatusCode.LLM_LINK_FAILED, "the peer is being finalized")
        if wanted != mine.cluster_id:
            raise Refused(
                LLMStatusCode.LLM_LINK_FAILED, f"the listener is cluster {mine.cluster_id}, not cluster {wanted}"
            )
        if bool(frame.number("cache_manager", 1)) != mine.cache_manager:
            raise Refused(
                LLMStatusCode.LLM_LINK_FAILED,
                "the client does not run in the listener's mode, which is "
                + ("CacheManager mode" if mine.cache_manager else "KvCacheManager mode"),
            )
        if bool(frame.number("remote_accessible", 1)) != mine.remote_accessible:
            raise Refused(
                LLMStatusCode.LLM_PARAM_INVALID, "llm.EnableRemoteCacheAccessible differs between the two sides"
            )
        if frame.number("devices") != mine.devices:
            raise Refused(
                LLMStatusCode.LLM_LINK_FAILED,
                f"the listener has {mine.devices} devices, the client {frame.number('devices')}",
            )
        ports = {address.port for address, _ in self._listeners}
        known = {str(address) for address, _ in self._listeners}
        wild = {address.port for address, _ in self._listeners if address.is_wildcard}
        for text in frame.texts("remote"):
            port = int(text.rpartition(":")[2]) if text.rpartition(":")[2].isdigit() else -1
            if text not in known and port not in wild:
                raise Refused(
                    LLMStatusCode.LLM_LINK_FAILED,
                    f"the listener of cluster {mine.cluster_id} is not at {text} (its ports are {sorted(ports)})",
                )
        with self._lock:
            if sum(link.state is State.READY for link in self._links.values()) >= LIMIT:
                raise Refused(LLMStatusCode.LLM_PARAM_INVALID, f"the peer has {LIMIT} links already")

    # ------------------------------------------------------------------ linking

    def link(self, requests: Sequence[LinkRequest], timeout_ms: int) -> list[LLMStatusCode]:
        """Link several clusters at the same time; give one code for each."""
        deadline_ns = time.monotonic_ns() + timeout_ms * 10**6
        results: list[LLMStatusCode] = [LLMStatusCode.LLM_FAILED] * len(requests)
        seen: set[int] = set()

        def one(i: int) -> None:
            results[i] = self._link_one(requests[i], deadline_ns)

        todo = []
        for i, request in enumerate(requests):
            if request.cluster_id in seen:
                results[i] = LLMStatusCode.LLM_REPEAT_REQUEST
            else:
                seen.add(request.cluster_id)
                todo.append(i)
        in_parallel(one, todo)
        return results

    def _link_one(self, request: LinkRequest, deadline_ns: int) -> LLMStatusCode:
        with self._lock:
            old = self._clients.get(request.cluster_id)
            if old is not None and old.usable():
                return LLMStatusCode.LLM_ALREADY_LINK
            count = sum(link.state is State.READY for link in self._links.values())
        if count >= LIMIT:
            get_logger().error("cluster %d is not linked: %d links stand already", request.cluster_id, LIMIT)
            return LLMStatusCode.LLM_PARAM_INVALID
        if old is not None:
            self._remove(old, "replaced by a new link")
        step = "connecting"
        try:
            channel = control.connect(self._namespace, request.remote[0], deadline_ns)
            step = "greeting"
            with self._handshake(channel):
                self._greet(channel, request, deadline_ns)
        except TimedOut as e:
            code, why = codes.timeout_code(self.terms.cache_manager), str(e)
        except Refused as e:
            code, why = e.code, str(e)
        except (NotThere, Gone, Malformed, Unreadable, OSError) as e:
            code, why = LLMStatusCode.LLM_LINK_FAILED, str(e)
        except BackendError as e:
            code, why = codes.exception_of(e, self.terms.cache_manager).status_code, e.text
            if e.kind in (Failure.INVALID, Failure.PEER_GONE):
                code = LLMStatusCode.LLM_LINK_FAILED
        else:
            return LLMStatusCode.LLM_SUCCESS
        get_logger().error(
            "cluster %d at %s is not linked: %s (while %s)", request.cluster_id, request.remote[0], why, step
        )
        return code

    def _greet(self, channel: Channel, request: LinkRequest, deadline_ns: int) -> None:
        slot, epoch = self._take_slot()
        link = None
        try:
            export = self._backend.export()
            hello = self._greeting(export, slot, epoch)
            hello["want"] = request.cluster_id
            hello["local"] = [str(address) for address in request.local]
            hello["remote"] = [str(address) for address in request.remote]
            hello["limit_ms"] = int(control.remaining(deadline_ns) * 1000)
            channel.send(Frame(Kind.HELLO, body=hello), deadline_ns, export.fds)
            answer, fds = channel.receive(deadline_ns)
            if answer.kind is not Kind.WELCOME:
                close_all(fds)
                if answer.kind is Kind.REFUSED:
                    code = LLMStatusCode.LLM_LINK_FAILED
                    if answer.number("code") == LLMStatusCode.LLM_PARAM_INVALID.value:
                        code = LLMStatusCode.LLM_PARAM_INVALID
                    raise Refused(code, answer.text("text"))
                raise Malformed(f"the answer is {answer.kind.name}, expected WELCOME")
            link = self._open(channel, answer, fds, slot, deadline_ns, client=True, request=request)
            channel.send(Frame(Kind.READY), deadline_ns)
            ready, extra = channel.receive(deadline_ns)
            close_all(extra)
            if ready.kind is not Kind.READY:
                raise Malformed(f"the answer is {ready.kind.name}, expected READY")
            self._enter(link)
        except BaseException:
            if link is not None:
                self._remove(link, "the handshake failed")
            else:
                self._give_slot(slot)
            raise
        self._watch(link)

    def _greeting(self, export: Export, slot: int, epoch: int) -> dict[str, object]:
        mine = self.terms
        return {
            "cluster_id": mine.cluster_id,
            "incarnation": mine.incarnation,
            "cache_manager": int(mine.cache_manager),
            "remote_accessible": int(mine.remote_accessible),
            "devices": mine.devices,
            "slot": slot,
            "epoch": epoch,
            "export": base64.b64encode(export.data).decode(),
        }

    def _open(
        self,
        channel: Channel,
        frame: Frame,
        fds: tuple[int, ...],
        slot: int,
        deadline_ns: int,
        *,
        client: bool,
        request: LinkRequest | None = None,
    ) -> Link:
        try:
            cluster_id = frame.number("cluster_id")
            if request is not None and cluster_id != request.cluster_id:
                raise Malformed(f"the listener says it is cluster {cluster_id}, not {request.cluster_id}")
            incarnation = frame.number("incarnation")
            peer_slot, peer_epoch = frame.number("slot", MAX_LINKS - 1), frame.number("epoch")
            addresses = tuple(map(str, request.remote)) if request else tuple(frame.texts("local"))
            try:
                data = base64.b64decode(frame.text("export"), validate=True)
            except binascii.Error as e:
                raise Malformed(f"field 'export' is not base64: {e}") from e
        except BaseException:
            close_all(fds)
            raise
        endpoint = self._backend.connect(
            Export(data, fds), Pair(channel.socket, channel.pid, channel.pidfd), deadline_ns
        )
        try:
            if endpoint.windows is None:
                raise BackendError(Failure.UNSUPPORTED, "this backend does not map the peer's directory")
            directory = PeerDirectory(endpoint.windows[0], incarnation)
            board = PeerBoard(endpoint.windows[1], directory.layout)
        except BaseException:
            endpoint.close()
            raise
        return Link(
            client,
            cluster_id,
            incarnation,
            addresses,
            channel,
            endpoint,
            directory,
            board,
            slot,
            peer_slot,
            peer_epoch,
        )

    def _enter(self, link: Link) -> None:
        key = (link.client, link.cluster_id, () if link.client else link.addresses)
        with self._lock:
            if self._closing:
                raise Gone("this engine is being finalized")
            old = self._links.get(key)
            self._links[key] = link
            if link.client:
                self._clients[link.cluster_id] = link
        if old is not None:
            self._remove(old, "replaced by a new link of the same peer")

    def _watch(self, link: Link) -> None:
        self._service.watch(
            link.channel, lambda frame: self._frame(link, frame), lambda why: self._peer_gone(link, why)
        )

    # ------------------------------------------------------------------ frames after the handshake

    def _frame(self, link: Link, frame: Frame) -> None:
        soon = time.monotonic_ns() + 10**8
        if frame.kind is Kind.PING:
            self._reply(link, Frame(Kind.PONG, frame.request), soon)
        elif frame.kind is Kind.UNLINK:
            self._forget(link)
            self._close_slot(link)
            self._reply(link, Frame(Kind.UNLINKED, frame.request), soon)
            self._remove(link, "the peer has unlinked")
        elif frame.kind in (Kind.PONG, Kind.UNLINKED):
            answered = link.answers.pop(frame.request, None)
            if answered is not None:
                answered.set()
        else:
            raise Malformed(f"a {frame.kind.name} frame has no place on a standing link")

    def _reply(self, link: Link, frame: Frame, deadline_ns: int) -> None:
        try:
            link.channel.send(frame, deadline_ns)
        except (Gone, TimedOut) as e:
            get_logger().warning("could not answer cluster %d: %s", link.cluster_id, e)
            # Half a frame may have gone out, and a peer that does not read must not hold up the service thread again.
            link.channel.hang_up()

    def _ask(self, link: Link, kind: Kind, deadline_ns: int) -> None:
        request = next(link.requests)
        answered = link.answers[request] = threading.Event()
        try:
            link.channel.send(Frame(kind, request), deadline_ns)
            if not answered.wait(control.remaining(deadline_ns)):
                raise TimedOut("the peer did not answer in time")
            if link.state is State.BROKEN and not link.endpoint.alive():
                raise Gone(link.reason)
        finally:
            link.answers.pop(request, None)

    def _peer_gone(self, link: Link, why: str) -> None:
        # In the service thread. The entry stays, with its reason; what it held goes.
        link.break_(f"{why} (peer gone)")
        for answered in list(link.answers.values()):
            answered.set()
        self._close_slot(link)
        self._let_go(link)
        self._prune()

    # ------------------------------------------------------------------ checking and unlinking

    def check(self, cluster_id: int, timeout_ms: int) -> None:
        """Ask the peer for a sign of life."""
        link = self.client(cluster_id)
        if not link.usable():
            raise self.not_linked(cluster_id, link)
        with self.exclusive(link):
            try:
                self._ask(link, Kind.PING, time.monotonic_ns() + timeout_ms * 10**6)
            except TimedOut as e:
                raise LLMException(
                    f"cluster {cluster_id} gave no sign of life within {timeout_ms} ms",
                    status_code=codes.timeout_code(self.terms.cache_manager),
                ) from e
            except Gone as e:
                link.break_(f"{e} (peer gone)")
                raise self.not_linked(cluster_id, link) from e

    def exclusive(self, link: Link) -> _Exclusive:
        """Hold a link for one operation, or raise LINK_BUSY."""
        return _Exclusive(self, link)

    def release(self, link: Link) -> None:
        """End the operation that held the link; if the link went meanwhile, let its memory go."""
        link.lock.release()
        if link.state is not State.READY:
            self._dispose_if_gone(link)

    def unlink(
        self, requests: Sequence[LinkRequest], timeout_ms: int, force: bool, *, as_client: bool
    ) -> list[LLMStatusCode]:
        """Unlink several clusters; give one code for each."""
        deadline_ns = time.monotonic_ns() + timeout_ms * 10**6
        results: list[LLMStatusCode] = [LLMStatusCode.LLM_FAILED] * len(requests)

        def one(i: int) -> None:
            results[i] = self._unlink_one(requests[i], deadline_ns, force, as_client)

        in_parallel(one, range(len(requests)))
        return results

    def _unlink_one(self, request: LinkRequest, deadline_ns: int, force: bool, as_client: bool) -> LLMStatusCode:
        with self._lock:
            found = [
                link
                for link in self._links.values()
                if link.client == as_client and link.cluster_id == request.cluster_id
            ]
        if not found:
            return LLMStatusCode.LLM_NOT_YET_LINK
        if as_client and request.remote and found[0].addresses != tuple(map(str, request.remote)):
            get_logger().error(
                "cluster %d is linked at %s, not at %s", request.cluster_id, found[0].addresses, request.remote
            )
            return LLMStatusCode.LLM_PARAM_INVALID
        result = LLMStatusCode.LLM_SUCCESS
        for link in found:
            if not link.lock.acquire(blocking=False):
                return LLMStatusCode.LLM_LINK_BUSY
            try:
                if not force and as_client and link.endpoint.alive():
                    self._ask(link, Kind.UNLINK, deadline_ns)
            except Gone:
                # The other end went by itself, so there is nobody left to tell.
                pass
            except TimedOut as e:
                get_logger().error("cluster %d was not told of the unlink: %s", request.cluster_id, e)
                result = LLMStatusCode.LLM_NOTIFY_PROMPT_UNLINK_FAILED
            finally:
                link.lock.release()
            self._remove(link, "unlinked")
        return result

    def one_call(self) -> threading.Lock:
        """Give the lock that stands for the one link or unlink call at a time of KvCacheManager mode."""
        return self._one_call

    # ------------------------------------------------------------------ the end of a link

    def _forget(self, link: Link) -> None:
        with self._lock:
            for key in [k for k, v in self._links.items() if v is link]:
                del self._links[key]
            if self._clients.get(link.cluster_id) is link:
                del self._clients[link.cluster_id]

    def _remove(self, link: Link, reason: str) -> None:
        self._forget(link)
        link.break_(reason)
        link.reason = link.reason or reason
        link.state = State.GONE
        self._close_slot(link)
        self._let_go(link)

    def _let_go(self, link: Link) -> None:
        """Hang up, and release memory and descriptors as soon as no transfer uses them."""
        link.channel.hang_up()
        self._dispose_if_gone(link)

    def _dispose_if_gone(self, link: Link) -> None:
        # Whoever holds the lock comes here again when it releases it, so one of the two always gets through.
        if (link.state is State.GONE or not link.endpoint.alive()) and link.lock.acquire(blocking=False):
            try:
                link.endpoint.close()
                self._service.dispose(link.channel)
            finally:
                link.lock.release()

    def _prune(self) -> None:
        with self._lock:
            broken = [link for link in self._links.values() if link.state is State.BROKEN]
        for link in broken[:-REMEMBERED] if len(broken) > REMEMBERED else []:
            self._remove(link, link.reason)

    def _take_slot(self) -> tuple[int, int]:
        with self._lock:
            if not self._slots:
                raise Refused(LLMStatusCode.LLM_PARAM_INVALID, f"{MAX_LINKS} links are being made or stand already")
            slot, epoch = self._slots.popleft(), next(self._epochs)
        self._directory.open_link(slot, epoch)
        return slot, epoch

    def _close_slot(self, link: Link) -> None:
        with self._lock:
            slot, link.my_slot = link.my_slot, -1
        if slot >= 0:
            self._give_slot(slot)

    def _give_slot(self, slot: int) -> None:
        self._directory.close_link(slot)
        with self._lock:
            self._slots.append(slot)

    # ------------------------------------------------------------------ the end of all

    def close(self, deadline_ns: int) -> None:
        """Unlink everything locally and stop to listen."""
        with self._lock:
            self._closing = True
            for channel in self._handshakes:
                channel.hang_up()
            self._handshake_ended.wait_for(lambda: not self._handshakes, control.remaining(deadline_ns))
            links = list(self._links.values())
        for worker in list(self._workers):
            worker.join(control.remaining(deadline_ns))
        for _, sock in self._listeners:
            self._service.release(sock)
        self._listeners.clear()
        for link in links:
            self._remove(link, "this engine was finalized")
            # A transfer of another thread may still run; it sees the closed connection and ends.
            if link.lock.acquire(timeout=control.remaining(deadline_ns)):
                self.release(link)

    def abandon(self) -> None:
        """Close the descriptors in a forked child, and break every link."""
        for _, sock in self._listeners:
            sock.close()
        for channel in list(self._handshakes):
            channel.abandon()
        for link in list(self._links.values()):
            link.state, link.reason = State.GONE, "inherited by a forked child"
            link.channel.abandon()


class _Exclusive:
    """Holds a link during one operation."""

    __slots__ = ("_link", "_links")

    def __init__(self, links: Links, link: Link) -> None:
        self._links, self._link = links, link

    def __enter__(self) -> Link:
        if not self._link.lock.acquire(blocking=False):
            raise LLMException(
                f"the link with cluster {self._link.cluster_id} is in use by another operation",
                status_code=LLMStatusCode.LLM_LINK_BUSY,
            )
        if self._link.state is not State.READY:
            self._links.release(self._link)
            raise self._links.not_linked(self._link.cluster_id, self._link)
        return self._link

    def __exit__(self, *_: object) -> None:
        self._links.release(self._link)


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors that came with a frame nobody has use for."""
    for fd in fds:
        os.close(fd)


def in_parallel(one: Callable[[int], None], items: Sequence[int]) -> None:
    """Run a function for each item, on up to 16 short-lived link workers; each bounds its own time."""
    if len(items) <= 1:
        for item in items:
            one(item)
        return
    queue = deque(items)

    def work() -> None:
        while queue:
            try:
                item = queue.popleft()
            except IndexError:
                return
            one(item)

    workers = [
        threading.Thread(target=work, name="llm_datadist link", daemon=True) for _ in range(min(WORKERS, len(items)))
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
