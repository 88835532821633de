"""A second process that runs the library, driven call by call from a test.

``peer.dd.init(options)`` runs in the process; what it returns comes back, or a stand-in for what can't travel
(managers, caches). Exceptions come back too, with the traceback of the process as a note. Every wait has a limit, and
the process is killed at the end whatever happened.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import pickle
import select
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import devices

LIMIT_S = 60.0


class Held:
    """Names an object that stays in the peer."""

    def __init__(self, number: int) -> None:
        self.number = number


class Remote:
    """Stands for an object of the peer: attributes and calls go there."""

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Attribute(self._peer, self._number, name)

    def get(self, name: str) -> Any:
        """Give the value of an attribute."""
        return self._peer.request("get", Held(self._number), name)

    def set(self, name: str, value: Any) -> None:
        """Set an attribute."""
        self._peer.request("set", Held(self._number), name, value)


class Attribute:
    """A method of an object of the peer."""

    def __init__(self, peer: Peer, number: int, name: str) -> None:
        self._peer, self._number, self._name = peer, number, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._peer.request("call", Held(self._number), self._name, *args, **kwargs)


class Peer:
    """One process, spawned, or forked from a clean server process, which is quicker where many are needed."""

    def __init__(self, method: str = "spawn") -> None:
        context = multiprocessing.get_context(method)
        self._pipe, theirs = context.Pipe()
        self._devices = devices.take()
        self.process = context.Process(target=_serve, args=(theirs, {**os.environ, **self._devices}), daemon=True)
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Process id."""
        assert self.process.pid is not None
        return self.process.pid

    def start(self, what: str, *args: Any, **kwargs: Any) -> None:
        """Send a request without waiting for its answer; `answer` must follow."""
        self._pipe.send_bytes(pickle.dumps((what, _pack(args), _pack(kwargs))))

    def answer(self, limit_s: float = LIMIT_S) -> Any:
        """Wait for the answer to `start`."""
        if not self._pipe.poll(limit_s):
            raise TimeoutError(f"process {self.pid} did not answer within {limit_s} s")
        try:
            kind, value, trace = pickle.loads(self._pipe.recv_bytes())
        except EOFError:
            self.process.join(5)
            raise RuntimeError(f"process {self.pid} has ended with code {self.process.exitcode}") from None
        if kind == "raised":
            if trace and hasattr(value, "add_note"):
                value.add_note(f"in process {self.pid}:\n{trace}")
            raise value
        return self._unpack(value)

    def has_answered(self) -> bool:
        """Say whether `answer` would return at once."""
        return self._pipe.poll(0)

    def request(self, what: str, *args: Any, **kwargs: Any) -> Any:
        """Do something in the process and give its result."""
        self.start(what, *args, **kwargs)
        return self.answer()

    def make(self, target: str, *args: Any, **kwargs: Any) -> Any:
        """Call ``module:name`` in the process."""
        return self.request("make", target, *args, **kwargs)

    def set_environment(self, name: str, value: str) -> None:
        """Set an environment variable of the process."""
        self.request("environment", name, value)

    def signal(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def stop(self) -> None:
        """Send SIGSTOP and wait until every thread stands still, which takes the kernel a moment."""
        self.signal(signal.SIGSTOP)
        end = time.monotonic() + 10
        while any(
            _state(f"/proc/{self.pid}/task/{thread}/stat") != "T" for thread in os.listdir(f"/proc/{self.pid}/task")
        ):
            assert time.monotonic() < end, f"process {self.pid} does not stop"
            time.sleep(0.001)

    def kill(self) -> None:
        """End the process with SIGKILL and wait until it has gone, even if a forked child of it lives on."""
        pidfd = os.pidfd_open(self.pid)
        try:
            self.process.kill()
            # Not select: a test with many links has descriptors that it does not take.
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            assert poll.poll(10_000), f"process {self.pid} outlives SIGKILL"
        finally:
            os.close(pidfd)
        self.process.join(0)

    def close(self) -> None:
        """End the process in any case."""
        if self.process.is_alive():
            # It may have been killed a moment ago, and nobody has told us yet.
            with contextlib.suppress(OSError):
                self.signal(signal.SIGCONT)
                self.start("exit")
            self.process.join(10)
        if self.process.is_alive():
            self.kill()
        self._pipe.close()
        self.process.close()
        devices.give_back(self._devices)

    def _unpack(self, value: Any) -> Any:
        if isinstance(value, Held):
            return Remote(self, value.number)
        if isinstance(value, (list, tuple)):
            return type(value)(self._unpack(item) for item in value)
        return value


def _state(path: str) -> str:
    with open(path) as status:
        return status.read().rpartition(")")[2].split()[0]


def _pack(value: Any) -> Any:
    if isinstance(value, Remote):
        return Held(value._number)
    if isinstance(value, dict):
        return {key: _pack(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_pack(item) for item in value)
    return value


def _serve(pipe: Connection, environment: dict[str, str]) -> None:
    # A forkserver has the environment of an earlier test.
    os.environ.update(environment)
    held: dict[int, Any] = {}

    def keep(value: Any) -> Any:
        if type(value) in (list, tuple):
            return type(value)(keep(item) for item in value)
        try:
            pickle.loads(pickle.dumps(value))
        except Exception:
            number = len(held) + 1
            held[number] = value
            return Held(number)
        else:
            # Objects with a life of their own must not travel as copies.
            if type(value).__module__.startswith("llm_datadist") and not isinstance(value, (int, Exception)):
                number = len(held) + 1
                held[number] = value
                return Held(number)
            return value

    def fetch(value: Any) -> Any:
        if isinstance(value, Held):
            return held[value.number]
        if isinstance(value, dict):
            return {key: fetch(item) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(fetch(item) for item in value)
        return value

    def resolve(target: str) -> Callable[..., Any]:
        module, _, name = target.partition(":")
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        return found  # type: ignore[no-any-return]

    while True:
        try:
            what, args, kwargs = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        args, kwargs = fetch(args), fetch(kwargs)
        try:
            if what == "call":
                result = getattr(args[0], args[1])(*args[2:], **kwargs)
            elif what == "get":
                result = getattr(args[0], args[1])
            elif what == "set":
                result = setattr(args[0], args[1], args[2])
            elif what == "make":
                result = resolve(args[0])(*args[1:], **kwargs)
            elif what == "environment":
                os.environ[args[0]] = args[1]
                result = None
            elif what == "exit":
                resolve("conftest_support:reset")()
                return
            else:
                raise ValueError(what)
            answer: tuple[Any, ...] = ("value", keep(result), "")
        except BaseException as e:
            answer = ("raised", e, traceback.format_exc())
        try:
            data = pickle.dumps(answer)
        except Exception as e:
            data = pickle.dumps(("raised", RuntimeError(f"{answer!r} can't travel: {e}"), ""))
        pipe.send_bytes(data)
