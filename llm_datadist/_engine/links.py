"""Links: peers, their incarnations, the handshake, and the state of each link.

A link joins this engine to one other. The handshake takes place on link workers of both sides; after it the
service thread watches the connection. A link that broke stays in the table with its reason until it is replaced
or unlinked, so that a transfer can say why it is refused.
"""

from __future__ import annotations

import base64
import enum
import functools
import itertools
import os
import secrets
import select
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from llm_datadist._addresses import Address
from llm_datadist._engine import codes, control
from llm_datadist._engine.asked import Answerer, AskedBoard, AskedDirectory, GuardedMoves
from llm_datadist._engine.board import Board, MappedBoard, PeerBoard
from llm_datadist._engine.control import Carrier, Channel, Gone, NotThere, Service, TimedOut
from llm_datadist._engine.directory import MAX_LINKS, Directory, MappedDirectory, PeerDirectory, Unreadable
from llm_datadist._engine.uses import Turn, Use
from llm_datadist._engine.wire import Frame, Kind, Malformed
from llm_datadist._kernels.runs import Plan
from llm_datadist._log import Seldom, get_logger
from llm_datadist.backend import Backend, BackendError, Endpoint, Export, Failure, Pair
from llm_datadist.status import LLMException, LLMStatusCode

__all__ = ["Link", "LinkRequest", "Links", "Terms"]

WORKERS = 16
#: So many of them the clients of one other host may have at the same time: there is always room for those of others.
HOST_WORKERS = WORKERS // 2
#: So many admitted clients may wait for a worker; further ones are hung up on.
MAX_ADMISSIONS = 256
LIMIT = 512
#: The most that a server grants a client for a handshake, whatever limit that names.
HANDSHAKE_NS = 60 * 10**9
#: A client that has connected greets at once; silent ones must not keep the workers for long.
HELLO_NS = 5 * 10**9
REMEMBERED = 1024
#: What a client may say of its addresses, which is kept for as long as the link is remembered: texts, and their length.
MAX_TEXTS = 16
MAX_CHARACTERS = 64
REPLY_NS = 10**8


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
    local: tuple[Address, ...] = ()
    remote: tuple[Address, ...] = ()
    #: The communicator that the link belongs to, if any.
    comm: str = ""
    #: The cluster id that traffic is addressed to, where it is not that of the peer (loop-back).
    alias: int | None = None


class State(enum.Enum):
    """What may happen on a link."""

    READY = "ready"
    BROKEN = "broken"
    GONE = "gone"


READY = State.READY  # looked at by each transfer; a member of an Enum takes longer to find


class Refused(Exception):
    """The other side answered no."""

    def __init__(self, code: LLMStatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code


class Answer:
    """What a request waits for."""

    def __init__(self) -> None:
        self.frame: Frame | None = None
        #: Set when it has come, and when it never will.
        self.settled = threading.Event()


class Greeting(NamedTuple):
    """What the other side says of itself in a HELLO or WELCOME frame, checked."""

    cluster_id: int
    incarnation: int
    slot: int
    epoch: int
    export: bytes
    addresses: tuple[str, ...]
    comm: str
    #: Of the link, the same on both sides.
    name: str
    #: How far this side's clock is ahead, as far as one frame tells.
    clock_ahead_ns: int

    @classmethod
    def of(cls, frame: Frame, addresses: tuple[str, ...], comm: str, name: str) -> Greeting:
        """Read a frame; what a client alone says, or knows, is given."""
        if not 8 <= len(name) <= 64:
            raise Malformed(f"the name of a link has {len(name)} characters, expected 8 to 64")
        try:
            export = base64.b64decode(frame.text("export"), validate=True)
        except ValueError as e:
            raise Malformed(f"field 'export' is not base64: {e}") from e
        slot, epoch = frame.number("slot", MAX_LINKS - 1), frame.number("epoch")
        cluster_id, incarnation = frame.number("cluster_id"), frame.number("incarnation")
        ahead_ns = time.monotonic_ns() - frame.number("clock_ns")
        return cls(cluster_id, incarnation, slot, epoch, export, addresses, comm, name, ahead_ns)


#: Copies a plan under a guard: (plan, guard, deadline in ns, route).
Move: TypeAlias = Callable[[Plan, Any, int, int], None]


@dataclass(eq=False)
class Link:
    """One peer, and the data path to it."""

    client: bool
    cluster_id: int
    incarnation: int
    #: The addresses that the link was made with: those of the peer's listener on the client, of the client on the
    #: server.
    addresses: tuple[str, ...]
    comm: str
    channel: Channel
    endpoint: Endpoint
    #: Slot of this link in my directory, which the peer's transfers look at.
    my_slot: int
    #: Slot and epoch of this link in the peer's directory, which my transfers look at.
    peer_slot: int
    peer_epoch: int
    directory: PeerDirectory = field(init=False)
    board: PeerBoard = field(init=False)
    #: One-sided copies under a guard of ``directory``.
    read: Move = field(init=False)
    write: Move = field(init=False)
    state: State = State.READY
    reason: str = ""
    #: A user of this side has asked for the link, not only the peer's.
    wanted: bool = False
    #: A transfer has gone by staging, which is said once, and why.
    staged: bool = False
    why_staged: str = ""
    #: By when the operation that has the link must end.
    deadline_ns: int = 0
    #: What to add to a time of the peer's clock. On one host there is one clock; between hosts this is too much by the
    #: time that the greeting was on its way.
    clock_ahead_ns: int = 0
    #: Of the one transfer, check, or unlink at a time.
    turn: Turn = field(default_factory=Turn)
    #: What transfers keep from one to the next (see transfers.py).
    kept: dict[Hashable, Any] = field(default_factory=dict)
    answers: dict[int, Answer] = field(default_factory=dict)
    requests: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    @functools.cached_property
    def epoch_word(self) -> tuple[int, int]:
        """Offset and expected value of the word of its directory by which the peer can stop my transfers."""
        return self.directory.link_word(self.peer_slot), self.peer_epoch

    def why_not(self) -> str:
        """Say why the link can't be used."""
        return f"the link with cluster {self.cluster_id} is {self.state.value}: {self.reason}; link the cluster again"

    def usable(self) -> bool:
        """Look at state and liveness; a peer found dead breaks the link."""
        if self.state is State.READY and not (self.directory.alive() and self.endpoint.alive()):
            self.break_("the peer's process or connection has ended (peer gone)")
        return self.state is State.READY

    def give_up(self, reason: str) -> None:
        """Break the link, and tell the peer by the end of the connection."""
        self.break_(reason)
        self.channel.hang_up()

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
        board: Board,
        terms: Terms,
        carrier: Carrier,
        service: Service,
        answerer: Answerer,
    ) -> None:
        self._backend = backend
        self._answerer = answerer
        self._directory = directory
        self._board = board
        self.terms = terms
        self._carrier = carrier
        self.service = service
        self._lock = threading.Lock()
        self._links: dict[tuple[bool, int, tuple[str, ...], str], Link] = {}
        #: The links that lead to a cluster; in KvCacheManager mode those of each side apart.
        self._routes: dict[tuple[int, bool], list[Link]] = {}
        self._slots = deque(range(MAX_LINKS))
        #: Slots whose peer was writing when its link went, with a pidfd of it (or -1) and the way that it had.
        self._lingering: dict[int, tuple[int, Link]] = {}
        #: Called with each new link of a communicator, which takes it over or raises `Gone`.
        self.entered: Callable[[Link], None] = lambda link: None
        #: Called in the service thread with each STAGE frame.
        self.stage: Callable[[Link, Frame], None] = lambda link, frame: None
        #: Called with each link that has ended, after its last frame, and once its peer writes no more.
        self.ended: Callable[[Link], None] = lambda link: None
        self._epochs = itertools.count(secrets.randbelow(1 << 61) + (1 << 61) << 1, 2)
        self._listeners: list[tuple[Address, socket.socket]] = []
        #: Admitted clients that wait for a worker, with the host of each; only the service thread looks at them, and
        #: at the numbers of workers that clients have, in all and by host.
        self._admissions: deque[tuple[str, socket.socket]] = deque()
        self._paused = False
        self._accepting = 0
        self._failures = Seldom()
        self._accepting_of: Counter[str] = Counter()
        #: Of the one link or unlink call at a time of KvCacheManager mode.
        self.one_call = Turn()
        #: Clusters that a call is linking to.
        self._linking: dict[int, LinkRequest] = {}
        self._closing = False
        #: Those that answer clients; some may have ended.
        self._workers: set[threading.Thread] = set()
        self._handshakes: set[Channel] = set()
        self._handshake_ended = threading.Condition(self._lock)

    # ------------------------------------------------------------------ looking up

    def to(self, cluster_id: int, *, accepted: bool = False) -> Link:
        """Give a usable link to a cluster, or raise NOT_YET_LINK.

        In KvCacheManager mode, where two ends may bear one cluster id, it is the one that this engine made, or has
        accepted.
        """
        links = self._routes.get((cluster_id, accepted and not self.terms.cache_manager), ())
        for link in links[::-1]:
            if link.state is READY:
                return link
        raise self.not_linked(cluster_id, links[-1] if links else None)

    def _route(self, link: Link) -> tuple[int, bool]:
        return link.cluster_id, not link.client and not self.terms.cache_manager

    def not_linked(self, cluster_id: int, link: Link | None) -> LLMException:
        """Make the exception for a cluster without a usable link."""
        text = f"cluster {cluster_id} is not linked" if link is None else link.why_not()
        return LLMException(text, status_code=LLMStatusCode.LLM_NOT_YET_LINK)

    def listening(self) -> list[Address]:
        """Give the addresses that this engine listens at."""
        return [address for address, _ in self._listeners]

    def listen_instead(self, addresses: Sequence[Address]) -> None:
        """Listen at these addresses and at no others; on failure everything stays as it was."""
        closed = [sock for address, sock in self._listeners if address not in addresses]
        self.listen([address for address in addresses if address not in self.listening()])
        self._listeners = [item for item in self._listeners if item[1] not in closed]
        for sock in closed:
            self.service.release(sock)

    def any_made(self) -> bool:
        """Say whether a user of this side has made a link that is still known."""
        with self._lock:
            return any(link.wanted for link in self._links.values())

    def any_live(self) -> bool:
        """Say whether any link is usable."""
        with self._lock:
            return any(link.usable() for link in self._links.values())

    # ------------------------------------------------------------------ listening

    def listen(self, addresses: Sequence[Address]) -> None:
        """Accept links at these addresses; on failure none of them stays bound."""
        sockets: list[tuple[Address, socket.socket]] = []
        with ExitStack() as undo:
            for address in addresses:
                try:
                    sockets.append((address, undo.enter_context(self._carrier.listen(address))))
                except OSError as e:
                    raise LLMException(e.strerror or str(e), status_code=LLMStatusCode.LLM_FAILED) from e
            undo.pop_all()
        self._listeners.extend(sockets)
        for _, sock in sockets:
            self.service.listen(sock, self.accept)

    def accept(self, sock: socket.socket) -> None:
        """Serve a new connection; called in the service thread."""
        self._carrier.admit(sock, self._admitted)

    def _admitted(self, sock: socket.socket) -> None:
        self._admissions.append((_host(sock), sock))
        self._start_workers()
        if len(self._admissions) > MAX_ADMISSIONS:
            self._failures.warn("refused a link: %d clients wait", MAX_ADMISSIONS)
            self._admissions.pop()[1].close()
        # Above the number of workers, further clients wait in the kernel's queue.
        if self._accepting >= WORKERS and not self._paused:
            self._paused = True
            for _, listener in self._listeners:
                self.service.pause(listener)

    def _start_workers(self) -> None:
        while self._accepting < WORKERS and (admission := self._next_admission()) is not None:
            self._admissions.remove(admission)
            host, sock = admission
            if self._closing:
                sock.close()
                continue
            worker = threading.Thread(target=self._serve, args=(sock, host), name="llm_datadist link", daemon=True)
            try:
                worker.start()
            except RuntimeError as e:
                get_logger().error("a link can't be served: %s", e)
                sock.close()
                continue
            self._accepting += 1
            self._accepting_of[host] += bool(host)
            self._workers = {*filter(threading.Thread.is_alive, self._workers), worker}

    def _next_admission(self) -> tuple[str, socket.socket] | None:
        """Give the client that has waited longest of those whose host has not its full share of the workers."""
        return next((each for each in self._admissions if self._accepting_of[each[0]] < HOST_WORKERS), None)

    def _served(self, host: str) -> None:
        self._accepting -= 1
        self._accepting_of[host] -= bool(host)
        # Else it would remember each host that ever came.
        self._accepting_of += Counter()
        self._start_workers()
        if self._paused and self._accepting < WORKERS:
            self._paused = False
            for _, listener in self._listeners:
                self.service.listen(listener, self.accept)

    def _serve(self, sock: socket.socket, host: str) -> None:
        try:
            channel = self._carrier.accepted(sock)
        except (NotThere, OSError) as e:
            self._failures.warn("refused a link: %s", e)
        else:
            try:
                with self._handshake(channel):
                    self._answer(channel)
            except (Gone, TimedOut, Malformed, Unreadable, BackendError, Refused, OSError, ValueError) as e:
                self._failures.warn("a link with %s did not come about: %s", channel.peer, e)
        finally:
            self.service.call(lambda: self._served(host))

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
            self.service.dispose(channel)
            raise
        finally:
            with self._lock:
                self._handshakes.discard(channel)
                self._handshake_ended.notify_all()

    def _answer(self, channel: Channel) -> None:
        frame, fds = channel.receive(time.monotonic_ns() + HELLO_NS)
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
            try:
                greeting = Greeting.of(frame, tuple(frame.texts("local")), frame.text("comm"), frame.text("link"))
                export = self._backend.export()
                # First the welcome, since some backends need both sides in `connect` at the same time.
                channel.send(Frame(Kind.WELCOME, body=self._greeting(export, slot, epoch)), deadline_ns, export.fds)
            except BaseException:
                close_all(fds)
                raise
            try:
                link = self._open(channel, greeting, fds, slot, deadline_ns, client=False)
            except (BackendError, Unreadable) as e:
                # The client may be waiting for this side: it is told why that is in vain.
                # What does not fit is for the user to mend; all else is this side's trouble.
                misfit = isinstance(e, BackendError) and e.kind is Failure.INVALID
                code = LLMStatusCode.LLM_PARAM_INVALID if misfit else LLMStatusCode.LLM_LINK_FAILED
                body = {"code": code.value, "text": _printable(str(e))}
                channel.send(Frame(Kind.REFUSED, body=body), deadline_ns)
                raise
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
        for name, texts in (
            ("local", frame.texts("local")),
            ("remote", frame.texts("remote")),
            ("comm", [frame.text("comm")]),
        ):
            longest = max(map(len, texts), default=0)
            if len(texts) > MAX_TEXTS or longest > MAX_CHARACTERS:
                raise Refused(
                    LLMStatusCode.LLM_LINK_FAILED,
                    f"{name} has {len(texts)} texts, the longest of {longest} characters; allowed are {MAX_TEXTS} of "
                    f"{MAX_CHARACTERS}",
                )
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
                results[i] = (
                    LLMStatusCode.LLM_ALREADY_LINK if self.terms.cache_manager else LLMStatusCode.LLM_REPEAT_REQUEST
                )
            else:
                seen.add(request.cluster_id)
                todo.append(i)
        in_parallel(one, todo)
        return results

    def _link_one(self, request: LinkRequest, deadline_ns: int) -> LLMStatusCode:
        try:
            # One step that no signal can divide, and harmless to take back for one who came second.
            if self._linking.setdefault(request.cluster_id, request) is not request:
                return LLMStatusCode.LLM_ALREADY_LINK
            return self._link_alone(request, deadline_ns)
        finally:
            if self._linking.get(request.cluster_id) is request:
                del self._linking[request.cluster_id]

    def _link_alone(self, request: LinkRequest, deadline_ns: int) -> LLMStatusCode:
        with self._lock:
            links = list(self._routes.get((request.cluster_id, False), ()))
            standing = [link for link in links if not link.comm and link.usable()]
            if any(link.wanted for link in standing):
                return LLMStatusCode.LLM_ALREADY_LINK
            if standing and not self._is_self(request):
                # The peer has linked to this engine: one connection serves both.
                standing[-1].wanted = True
                return LLMStatusCode.LLM_SUCCESS
            count = sum(link.state is State.READY for link in self._links.values())
        if count >= LIMIT and not self.terms.cache_manager:
            get_logger().error("cluster %d is not linked: %d links stand already", request.cluster_id, LIMIT)
            return LLMStatusCode.LLM_PARAM_INVALID
        for old in links:
            if not old.comm and old not in standing:
                self._remove(old, "replaced by a new link")
        step = "connecting"
        try:
            channel = self._carrier.connect(request.remote[0], deadline_ns)
            step = "greeting"
            self.greet(channel, request, deadline_ns)
        except TimedOut as e:
            code, why = codes.timeout_code(self.terms.cache_manager), str(e)
        except Refused as e:
            code, why = e.code, str(e)
        except (NotThere, Gone, Malformed, Unreadable, OSError) as e:
            code, why = LLMStatusCode.LLM_LINK_FAILED, str(e)
        except BackendError as e:
            code, why = codes.exception_of(e, self.terms.cache_manager).status_code, e.text
            if e.kind is Failure.PEER_GONE:
                code = LLMStatusCode.LLM_LINK_FAILED
        else:
            return LLMStatusCode.LLM_SUCCESS
        get_logger().error(
            "cluster %d at %s is not linked: %s (while %s)", request.cluster_id, request.remote[0], why, step
        )
        return code

    def _is_self(self, request: LinkRequest) -> bool:
        return request.cluster_id == self.terms.cluster_id

    def greet(self, channel: Channel, request: LinkRequest, deadline_ns: int) -> None:
        """Make a link over a fresh connection, as its client; on failure the channel is closed."""
        with self._handshake(channel):
            self._greet(channel, request, deadline_ns)

    def _greet(self, channel: Channel, request: LinkRequest, deadline_ns: int) -> None:
        slot, epoch = self._take_slot()
        link = None
        try:
            export = self._backend.export()
            hello = self._greeting(export, slot, epoch)
            hello["want"] = request.cluster_id
            hello["local"] = [str(address) for address in request.local]
            hello["remote"] = [str(address) for address in request.remote]
            hello["comm"] = request.comm
            hello["link"] = name = secrets.token_hex(12)
            hello["limit_ms"] = int(control.remaining(deadline_ns) * 1000)
            channel.send(Frame(Kind.HELLO, body=hello), deadline_ns, export.fds)
            answer, fds = channel.receive(deadline_ns)
            try:
                if answer.kind is not Kind.WELCOME:
                    raise _refusal(answer)
                greeting = Greeting.of(answer, tuple(map(str, request.remote)), request.comm, name)
                if greeting.cluster_id != request.cluster_id:
                    raise Malformed(f"the listener says it is cluster {greeting.cluster_id}, not {request.cluster_id}")
            except BaseException:
                close_all(fds)
                raise
            try:
                link = self._open(channel, greeting, fds, slot, deadline_ns, client=True)
            except BackendError as e:
                # If the other side has failed too, it has said so, and its reason is the better one.
                with suppress(Gone, Malformed):
                    for said in channel.read():
                        raise _refusal(said) from e
                raise
            channel.send(Frame(Kind.READY), deadline_ns)
            ready, extra = channel.receive(deadline_ns)
            close_all(extra)
            if ready.kind is not Kind.READY:
                raise _refusal(ready)
            link.wanted = True
            if request.alias is not None:
                link.cluster_id = request.alias
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
            "clock_ns": time.monotonic_ns(),
            "export": base64.b64encode(export.data).decode(),
        }

    def _open(
        self, channel: Channel, greeting: Greeting, fds: tuple[int, ...], slot: int, deadline_ns: int, *, client: bool
    ) -> Link:
        """Open the data path. Takes the descriptors over."""
        pair = Pair(channel.socket, channel.pid, channel.pidfd, greeting.name, client)
        endpoint = self._backend.connect(Export(greeting.export, fds), pair, deadline_ns)
        link = Link(
            client,
            greeting.cluster_id,
            greeting.incarnation,
            greeting.addresses,
            greeting.comm,
            channel,
            endpoint,
            slot,
            greeting.slot,
            greeting.epoch,
        )
        if self._backend.capabilities.network:
            link.clock_ahead_ns = greeting.clock_ahead_ns
        try:
            self._reach_words(link)
        except BaseException:
            endpoint.close()
            raise
        return link

    def _reach_words(self, link: Link) -> None:
        """Find the way to the peer's directory and board, and to memory that they guard."""
        endpoint = link.endpoint
        if endpoint.windows is not None:
            directory = MappedDirectory(endpoint.windows[0], link.incarnation)
            link.directory, link.board = directory, MappedBoard(endpoint.windows[1], directory.layout)
            link.read, link.write = endpoint.read, endpoint.write
            return

        def ask(kind: Kind, body: dict[str, object], deadline_ns: int | None) -> Frame:
            return self.ask_in_transfer(link, kind, link.deadline_ns if deadline_ns is None else deadline_ns, body)

        # Engines of one backend have directories of one size; a peer that lies loses only its own answers.
        asked = AskedDirectory(self._directory.layout.nbytes, ask)
        moves = GuardedMoves(endpoint, asked)
        link.directory, link.board = asked, AskedBoard(ask, link.give_up)
        link.read, link.write = moves.read, moves.write

    def _enter(self, link: Link) -> None:
        key = (link.client, link.cluster_id, () if link.client else link.addresses, link.comm)
        with self._lock:
            if self._closing:
                raise Gone("this engine is being finalized")
            old = self._links.get(key)
            self._links[key] = link
            if not link.comm:
                self._routes.setdefault(self._route(link), []).append(link)
        if old is not None:
            self._remove(old, "replaced by a new link of the same peer")
        if link.comm:
            self.entered(link)

    def open(self, links: Sequence[Link]) -> None:
        """Let transfers use the links of a communicator."""
        with self._lock:
            for link in links:
                self._routes.setdefault(self._route(link), []).append(link)

    def _watch(self, link: Link) -> None:
        self.service.watch(link.channel, lambda frame: self._frame(link, frame), lambda why: self._peer_gone(link, why))

    # ------------------------------------------------------------------ frames after the handshake

    def _frame(self, link: Link, frame: Frame) -> None:
        if frame.kind is Kind.PING:
            self.reply(link, Frame(Kind.PONG, frame.request))
        elif frame.kind is Kind.UNLINK:
            self._forget(link)
            self._close_slot(link)
            self.reply(link, Frame(Kind.UNLINKED, frame.request))
            self._remove(link, "the peer has unlinked")
        elif frame.kind is Kind.STAGE:
            self.stage(link, frame)
        elif frame.kind is Kind.PEEK:
            self.reply(link, Frame(Kind.PEEKED, frame.request, self._answerer.peek(frame)))
        elif frame.kind is Kind.POKE:
            self.reply(link, Frame(Kind.POKED, frame.request, self._answerer.poke(frame, link.my_slot)))
        elif frame.kind in (Kind.PONG, Kind.UNLINKED, Kind.STAGED, Kind.PEEKED, Kind.POKED):
            answer = link.answers.pop(frame.request, None)
            if answer is not None:
                answer.frame = frame
                answer.settled.set()
        else:
            raise Malformed(f"a {frame.kind.name} frame has no place on a standing link")

    def reply(self, link: Link, frame: Frame) -> None:
        """Send an answer; a peer that does not take it at once is hung up on."""
        try:
            link.channel.send(frame, time.monotonic_ns() + REPLY_NS)
        except (Gone, TimedOut) as e:
            get_logger().warning("could not answer cluster %d: %s", link.cluster_id, e)
            # Half a frame may have gone out, and a peer that does not read must not hold up the service thread again.
            link.channel.hang_up()

    def ask(self, link: Link, kind: Kind, deadline_ns: int, body: dict[str, object] | None = None) -> Frame:
        """Send a request and wait for its answer; raise `Gone` or `TimedOut`."""
        request = next(link.requests)
        answer = link.answers[request] = Answer()
        try:
            link.channel.send(Frame(kind, request, body or {}), deadline_ns)
            if not answer.settled.wait(control.remaining(deadline_ns)):
                raise TimedOut("the peer did not answer in time")
            if answer.frame is None:
                raise Gone(link.reason)
            return answer.frame
        finally:
            link.answers.pop(request, None)

    def ask_in_transfer(self, link: Link, kind: Kind, deadline_ns: int, body: dict[str, object]) -> Frame:
        """Ask like `ask`, and fail like an endpoint."""
        try:
            return self.ask(link, kind, deadline_ns, body)
        except TimedOut as e:
            raise BackendError(Failure.TIMED_OUT, str(e)) from e
        except Gone as e:
            raise BackendError(Failure.PEER_GONE, str(e)) from e

    def _peer_gone(self, link: Link, why: str) -> None:
        # In the service thread. The entry stays, with its reason; what it held goes.
        link.break_(f"{why} (peer gone)")
        self._close_slot(link)
        self._let_go(link)
        # Who asks from now on finds that the connection has ended.
        for answer in list(link.answers.values()):
            answer.settled.set()
        self._prune()

    # ------------------------------------------------------------------ checking and unlinking

    def check(self, cluster_id: int, timeout_ms: int) -> None:
        """Ask the peer for a sign of life."""
        link = self.to(cluster_id)
        if not link.usable():
            raise self.not_linked(cluster_id, link)
        use = Use()
        try:
            deadline_ns = self.take(link, use, timeout_ms)
            self.ask(link, Kind.PING, deadline_ns)
        except TimedOut as e:
            raise LLMException(
                f"cluster {cluster_id} gave no sign of life within {timeout_ms} ms",
                status_code=codes.timeout_code(self.terms.cache_manager),
            ) from e
        except Gone as e:
            link.break_(f"{e} (peer gone)")
            raise self.not_linked(cluster_id, link) from e
        finally:
            self.give_back(use)

    def take(self, link: Link, use: Use, timeout_ms: int, parts: int = 1) -> int:
        """Take a link for one operation, and give the operation's deadline; `give_back` must follow.

        In KvCacheManager mode another operation on it is LINK_BUSY; in CacheManager mode it is waited for, as long as
        an operation may take, and the operation's own time begins after that: the timeout for each of its ``parts``.
        """
        use.link = link
        limit_ns = timeout_ms * 1_000_000
        if not link.turn.claim(use) and not self._wait_for(link, use, limit_ns):
            if link.state is not READY:
                raise self.not_linked(link.cluster_id, link)
            raise LLMException(
                f"the link with cluster {link.cluster_id} is in use by another operation",
                status_code=LLMStatusCode.LLM_TIMEOUT if self.terms.cache_manager else LLMStatusCode.LLM_LINK_BUSY,
            )
        if link.state is not READY:
            raise self.not_linked(link.cluster_id, link)
        link.deadline_ns = deadline_ns = time.monotonic_ns() + limit_ns * parts
        return deadline_ns

    def _wait_for(self, link: Link, use: Use, limit_ns: int) -> bool:
        return self.terms.cache_manager and link.turn.claim(use, time.monotonic_ns() + limit_ns)

    def give_back(self, use: Use) -> None:
        """End the operation that had the link; if the link went meanwhile, let its memory go."""
        link = use.link
        if link is not None:
            link.turn.release(use)
            use.link = None
            if link.state is not READY:
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
        found = [link for link in self._routes.get((request.cluster_id, not as_client), ()) if not link.comm]
        if self.terms.cache_manager:
            found = [link for link in self._routes.get((request.cluster_id, False), ()) if not link.comm]
        elif found and as_client and request.remote and found[0].addresses != tuple(map(str, request.remote)):
            get_logger().error(
                "cluster %d is linked at %s, not at %s", request.cluster_id, found[0].addresses, request.remote
            )
            return LLMStatusCode.LLM_PARAM_INVALID
        elif not found:
            return LLMStatusCode.LLM_NOT_YET_LINK
        tell = not force and (as_client or self.terms.cache_manager)
        result = LLMStatusCode.LLM_SUCCESS
        for link in found:
            one = self._end(link, deadline_ns, tell=tell)
            if one is LLMStatusCode.LLM_LINK_BUSY:
                return one
            result = one if result is LLMStatusCode.LLM_SUCCESS else result
        return result

    def _end(self, link: Link, deadline_ns: int, *, tell: bool) -> LLMStatusCode:
        """Remove a link between two transfers, and tell the peer."""
        use = Use()
        # A link that broke may be having its memory released just now, which is no transfer, and short.
        wait = self.terms.cache_manager or link.state is not State.READY
        result = LLMStatusCode.LLM_SUCCESS
        try:
            if not link.turn.claim(use, deadline_ns if wait else None):
                get_logger().error("cluster %d is not unlinked: a transfer is under way", link.cluster_id)
                return LLMStatusCode.LLM_UNLINK_FAILED if self.terms.cache_manager else LLMStatusCode.LLM_LINK_BUSY
            if tell and link.endpoint.alive():
                self.ask(link, Kind.UNLINK, deadline_ns)
        except Gone:
            # The other end went by itself, so there is nobody left to tell.
            pass
        except TimedOut as e:
            get_logger().error("cluster %d was not told of the unlink: %s", link.cluster_id, e)
            result = (
                LLMStatusCode.LLM_UNLINK_FAILED
                if self.terms.cache_manager
                else LLMStatusCode.LLM_NOTIFY_PROMPT_UNLINK_FAILED
            )
        finally:
            link.turn.release(use)
        self._remove(link, "unlinked")
        return result

    def end_all(self, links: Sequence[Link], deadline_ns: int) -> bool:
        """Remove this end of some links; say whether none was in use until the deadline."""
        results = [self._end(link, deadline_ns, tell=False) for link in links]
        return all(result is LLMStatusCode.LLM_SUCCESS for result in results)

    # ------------------------------------------------------------------ the end of a link

    def _forget(self, link: Link) -> None:
        with self._lock:
            for key in [k for k, v in self._links.items() if v is link]:
                del self._links[key]
            route = self._routes.get(self._route(link), [])
            if link in route:
                # Readers look without the lock, so the list is replaced, not changed.
                self._routes[self._route(link)] = [other for other in route if other is not link]
            if not self._routes.get(self._route(link), True):
                del self._routes[self._route(link)]

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
        # Whoever has the turn comes here again after it, so one of the two always gets through.
        use = Use()
        if (link.state is State.GONE or not link.endpoint.alive()) and link.turn.claim(use):
            try:
                # The slot remembers whom to watch, before the channel forgets.
                self._close_slot(link)
                link.endpoint.close()
                self.service.dispose(link.channel)
            finally:
                link.turn.release(use)

    def _prune(self) -> None:
        with self._lock:
            broken = [link for link in self._links.values() if link.state is State.BROKEN]
        for link in broken[:-REMEMBERED] if len(broken) > REMEMBERED else []:
            self._remove(link, link.reason)

    def proved_gone(self, slot: int) -> bool:
        """Say whether the peer of a link slot has ended, so that it writes no more. Silence is no proof."""
        with self._lock:
            if slot in self._lingering:
                return _is_harmless(*self._lingering[slot])
            for link in self._links.values():
                if link.my_slot == slot:
                    return _has_ended(link.channel.pidfd)
        # Nobody has it: it was given back, which needs a peer that had unpinned or ended.
        return True

    def _sweep(self) -> None:
        """Give slots back whose last peer has unpinned or ended since. Under the lock."""
        for slot, (pidfd, link) in list(self._lingering.items()):
            if not self._board.pin(slot) or _is_harmless(pidfd, link):
                del self._lingering[slot]
                if pidfd >= 0:
                    os.close(pidfd)
                self._slots.append(slot)
                self.ended(link)

    def _take_slot(self) -> tuple[int, int]:
        with self._lock:
            self._sweep()
            if not self._slots:
                raise Refused(LLMStatusCode.LLM_PARAM_INVALID, f"{MAX_LINKS} links are being made or stand already")
            slot, epoch = self._slots.popleft(), next(self._epochs)
            self._board.unpin(slot)
        self._directory.open_link(slot, epoch)
        return slot, epoch

    def _close_slot(self, link: Link) -> None:
        with self._lock:
            slot, link.my_slot = link.my_slot, -1
            if slot < 0:
                return
            self._directory.close_link(slot)
            if self._board.pin(slot) and not _has_ended(link.channel.pidfd):
                pidfd = os.dup(link.channel.pidfd) if link.channel.pidfd >= 0 else -1
                # What else the link had, the peer may be writing to as well.
                self._lingering[slot] = pidfd, link
            else:
                self._slots.append(slot)
                self.ended(link)

    def _give_slot(self, slot: int) -> None:
        self._directory.close_link(slot)
        with self._lock:
            self._slots.append(slot)

    # ------------------------------------------------------------------ the end of all

    def close(self, deadline_ns: int) -> bool:
        """Unlink everything locally and stop to listen; say whether no link is being made any more."""
        with self._lock:
            self._closing = True
            for channel in self._handshakes:
                channel.hang_up()
            self._handshake_ended.wait_for(lambda: not self._handshakes, control.remaining(deadline_ns))
            links = list(self._links.values())
        for worker in list(self._workers):
            worker.join(control.remaining(deadline_ns))
        for _, sock in self._listeners:
            self.service.release(sock)
        self._listeners.clear()
        for link in links:
            self._remove(link, "this engine was finalized")
            # A transfer of another thread may still run; it sees the closed connection and ends.
            use = Use()
            use.link = link
            if link.turn.claim(use, deadline_ns):
                self.give_back(use)
        self._forget_lingering()
        return not self._handshakes

    def abandon(self) -> None:
        """Close the descriptors in a forked child, and break every link."""
        for _, sock in (*self._listeners, *self._admissions):
            sock.close()
        for channel in list(self._handshakes):
            channel.close()
        for link in list(self._links.values()):
            link.state, link.reason = State.GONE, "inherited by a forked child"
            link.channel.close()
        self._forget_lingering()

    def _forget_lingering(self) -> None:
        while self._lingering:
            _, (pidfd, _) = self._lingering.popitem()
            if pidfd >= 0:
                os.close(pidfd)


def _refusal(frame: Frame) -> Exception:
    """Give the exception for an answer that is not the one hoped for."""
    if frame.kind is not Kind.REFUSED:
        return Malformed(f"the answer is {frame.kind.name}, expected WELCOME, READY or REFUSED in their order")
    code = LLMStatusCode.LLM_LINK_FAILED
    if frame.number("code") == LLMStatusCode.LLM_PARAM_INVALID.value:
        code = LLMStatusCode.LLM_PARAM_INVALID
    return Refused(code, frame.text("text"))


def _host(sock: socket.socket) -> str:
    """Give the other host that a client is on; "" if it is on this one, by a Unix socket, or gone."""
    try:
        name = sock.getpeername()
    except OSError:
        return ""
    return name[0] if isinstance(name, tuple) else ""


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text[:1000])


def _is_harmless(pidfd: int, link: Link) -> bool:
    """Say whether a peer whose link is gone can't write any more: its process has ended, or its way in is closed."""
    return link.endpoint.revoked() or _has_ended(pidfd)


def _has_ended(pidfd: int) -> bool:
    if pidfd < 0:
        return False
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


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
