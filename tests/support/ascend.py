"""The fake Ascend driver in this process, and links between acl backends on it."""

from __future__ import annotations

import base64
import ctypes
import importlib.util
import itertools
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from llm_datadist._kernels.runs import Bases, Plan, Runs, span_runs
from llm_datadist.backend import Endpoint, Export, MemoryKind, Pair, Place, Region
from llm_datadist.backends.acl.backend import AclBackend

OWNER = Path(__file__).with_name("acl_owner.py")
FAKE = Path(__file__).parents[1] / "fakes" / "ascend"
SECONDS = 30
MIB = 1 << 20
DEVICE, HOST = MemoryKind.DEVICE, MemoryKind.HOST
MakeBackend = Callable[..., AclBackend]
_names = (f"{os.getpid()}-{number}" for number in itertools.count())


def builder() -> ModuleType:
    """Load what compiles the fake."""
    spec = importlib.util.spec_from_file_location("fake_ascend_build", FAKE / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(directory: Path, *, lacks: Collection[str] = (), sanitize: bool = False) -> tuple[Path, Path]:
    """Compile the fake into a directory; give the paths of ACL and HCCL."""
    made: tuple[Path, Path] = builder().build(directory, lacks=lacks, sanitize=sanitize)
    return made


class Ascend:
    """What tests tell the fake, and ask it."""

    def __init__(self, acl: Path, hccl: Path) -> None:
        self.paths = {"LLM_DATADIST_ACL_LIBRARY": str(acl), "LLM_DATADIST_HCCL_LIBRARY": str(hccl)}
        self._acl = ctypes.CDLL(str(acl), os.RTLD_NOW | os.RTLD_GLOBAL)
        self._acl.fake_violations.restype = ctypes.c_size_t

    @classmethod
    def loaded(cls) -> Ascend:
        """Give the one that the environment names."""
        return cls(*(Path(os.environ[f"LLM_DATADIST_{name}_LIBRARY"]) for name in ("ACL", "HCCL")))

    def reload(self) -> None:
        """Read the environment again."""
        self._acl.fake_reload()

    def violations(self) -> str:
        """Give what was done wrong, a line each."""
        buffer = ctypes.create_string_buffer(1 << 16)
        self._acl.fake_violations(buffer, ctypes.c_size_t(len(buffer)))
        return buffer.value.decode()

    def reset(self) -> None:
        """Forget faults and what was done wrong."""
        self._acl.fake_reset()

    def inject(self, faults: str) -> None:
        """Have calls fail: ``function:n-th call:code;...``."""
        self._acl.fake_inject(faults.encode())

    def delay(self, delays: str) -> None:
        """Have calls take time: ``function:milliseconds;...``."""
        self._acl.fake_delay(delays.encode())

    def current(self) -> tuple[int, int | None]:
        """Give device and context of this thread."""
        device, context = ctypes.c_int32(-1), ctypes.c_void_p()
        self._acl.fake_current(ctypes.byref(device), ctypes.byref(context))
        return device.value, context.value

    def call(self, name: str, *arguments: Any) -> None:
        """Call the driver as somebody else in the process."""
        code = getattr(self._acl, name)(*arguments)
        assert code in (0, 100002), f"{name} gave {code}"

    def allocate(self, nbytes: int, alignment: int = 2 * MIB) -> tuple[int, int]:
        """Allocate device memory as a user; give what is to be freed, and the aligned address."""
        pointer = ctypes.c_void_p()
        self.call("aclrtMalloc", ctypes.byref(pointer), ctypes.c_size_t(nbytes + alignment), 0)
        assert pointer.value is not None
        return pointer.value, -(-pointer.value // alignment) * alignment

    def free(self, pointer: int) -> None:
        """Free it."""
        self.call("aclrtFree", ctypes.c_void_p(pointer))


def deadline_in(seconds: float) -> int:
    """Give a deadline."""
    return time.monotonic_ns() + int(seconds * 1e9)


def server(name: str, device: int, **more: str) -> dict[str, str]:
    """Give the option that puts a device on a server of its own, with an address."""
    entry = {"device_id": str(device), "device_ip": f"198.51.100.{10 + device}", **more}
    table = {"version": "1.0", "server_list": [{"server_id": name, "device": [entry]}]}
    return {"llm.LocalCommRes": json.dumps(table)}


def one(source: int, destination: int, nbytes: int) -> Plan:
    """Plan one run."""
    return Plan(Bases([source], [destination]), span_runs(0, 0, nbytes))


class Link:
    """Two backends of this process, linked."""

    def __init__(self, left: AclBackend, right: AclBackend, seconds: float = SECONDS) -> None:
        self.sockets = socket.socketpair()
        self.ends: list[Endpoint | BaseException | None] = [None, None]
        exports = right.export(), left.export()
        name = next(_names)

        def connect(end: int, backend: AclBackend) -> None:
            pair = Pair(self.sockets[end], -1, -1, name, end == 0)
            try:
                self.ends[end] = backend.connect(exports[end], pair, deadline_in(seconds))
            except BaseException as error:
                self.ends[end] = error
                self.sockets[end].shutdown(socket.SHUT_RDWR)  # as an engine hangs up

        threads = [threading.Thread(target=connect, args=each) for each in enumerate((left, right))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    @property
    def left(self) -> Endpoint:
        """The end of the first backend."""
        return self._end(0)

    @property
    def right(self) -> Endpoint:
        """The end of the second."""
        return self._end(1)

    def _end(self, end: int) -> Endpoint:
        found = self.ends[end]
        if isinstance(found, BaseException):
            raise found
        assert found is not None
        return found

    def close(self) -> None:
        """Close both ends."""
        for end in self.ends:
            if isinstance(end, Endpoint):
                end.close()
        for control in self.sockets:
            control.close()


def fill(backend: AclBackend, region: Region, seed: int, at: int = 0, nbytes: int | None = None) -> bytes:
    """Fill memory with bytes that depend on the seed; give them."""
    nbytes = region.nbytes - at if nbytes is None else nbytes
    data = (bytes((seed * 7 + i * 13 + i // 256) % 256 for i in range(4096)) * (nbytes // 4096 + 1))[:nbytes]
    backend.store(region.address + at, data)
    return data


def read(endpoint: Endpoint, place: Place, destinations: Sequence[int], runs: Runs, seconds: float = SECONDS) -> None:
    """Read runs of one place into each of the destinations."""
    plan = Plan(Bases([place.base] * len(destinations), list(destinations)), runs)
    endpoint.read(plan, None, deadline_in(seconds), place.route)


def write(endpoint: Endpoint, sources: Sequence[int], place: Place, runs: Runs, seconds: float = SECONDS) -> None:
    """Write runs to one place."""
    plan = Plan(Bases(list(sources), [place.base] * len(sources)), runs)
    endpoint.write(plan, None, deadline_in(seconds), place.route)


def in_process(script: str, **environment: str) -> str:
    """Run a script in a process of its own; give what it prints."""
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


class Owner:
    """The other process, and our end of the control connection to it."""

    def __init__(self, device: int, options: dict[str, str], **environment: str) -> None:
        self.control, other = socket.socketpair()
        command = [sys.executable, str(OWNER), str(other.fileno()), json.dumps(options), str(device)]
        self.process = subprocess.Popen(
            command,
            pass_fds=[other.fileno()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        other.close()
        self.pidfd = os.pidfd_open(self.process.pid)
        self.name = next(_names)

    def tell(self, *call: object) -> None:
        """Have it call a method."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(call) + "\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        """Wait for what the method gives."""
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], SECONDS)[0], "no answer"
        answer: str = json.loads(self.process.stdout.readline())
        return answer

    def ask(self, *call: object) -> str:
        """Do both."""
        self.tell(*call)
        return self.answer()

    def link(self, backend: AclBackend, seconds: float = SECONDS) -> Endpoint:
        """Link a backend of this process with it."""
        theirs = Export(base64.b64decode(self.ask("export")))
        self.tell("connect", base64.b64encode(backend.export().data).decode(), self.name, seconds)
        pair = Pair(self.control, self.process.pid, self.pidfd, self.name, True)
        endpoint = backend.connect(theirs, pair, deadline_in(seconds))
        assert self.answer() == ""
        return endpoint

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait(SECONDS)

    def end(self) -> None:
        """End it as it likes to, if it still lives."""
        if self.process.poll() is None:
            assert self.ask("close") == ""
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()
        self.control.close()
        os.close(self.pidfd)
        self.process.wait(SECONDS)
