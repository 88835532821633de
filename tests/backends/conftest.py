"""Fixtures of the backend tests: a simulator in this process, and one in another."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import ascend
import pytest

from llm_datadist.backend import Endpoint, Export, Pair
from llm_datadist.backends.acl.backend import AclBackend
from llm_datadist.backends.simulator.backend import SimulatorBackend

OWNER = Path(__file__).with_name("simulator_owner.py")
SECONDS = 30


def _descriptors() -> set[tuple[str, str]]:
    """List what this process has open, but for what comes and goes with the look itself."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add((fd, os.readlink(f"/proc/self/fd/{fd}")))
    return {each for each in found if not each[1].startswith("/proc/")}


def _mappings() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:llm_datadist" in line]


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Fail the test when it leaves descriptors or mappings."""
    gc.collect()
    before = _descriptors(), _mappings()
    yield
    gc.collect()
    assert (_descriptors(), _mappings()) == before


@pytest.fixture
def mappings() -> Callable[[], list[str]]:
    """List the lines of /proc/self/maps that show segments of the simulator."""
    return _mappings


@pytest.fixture
def make_backend(nothing_left: None) -> Iterator[Callable[..., SimulatorBackend]]:
    """Make opened backends that are closed at the end; keywords are options without their prefix."""
    backends = []

    def make(room: Callable[[], object] | None = None, **options: int) -> SimulatorBackend:
        backend = SimulatorBackend() if room is None else SimulatorBackend(room)
        names = {"CopyThreads": "llm.CopyThreads"}
        backend.open([0], {names.get(key, f"llm.Simulator.{key}"): str(value) for key, value in options.items()})
        backends.append(backend)
        return backend

    yield make
    for backend in backends:
        backend.close()


class Owner:
    """The other process, and our end of the link to it."""

    def __init__(self, pool_bytes: int, options: dict[str, str]) -> None:
        self.control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.control.settimeout(SECONDS)
        command = [sys.executable, str(OWNER), str(other.fileno()), json.dumps(options), str(pool_bytes)]
        self.process = subprocess.Popen(
            command, pass_fds=[other.fileno()], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        other.close()
        self.pidfd = os.pidfd_open(self.process.pid)
        data, fds, _, _ = socket.recv_fds(self.control, 1 << 16, 16)
        self.export = Export(data, tuple(fds))
        self.pair = Pair(self.control, self.process.pid, self.pidfd, "test link", True)

    def ask(self, command: str) -> int:
        """Send a command and wait for the number that answers it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        assert select.select([self.process.stdout], [], [], SECONDS)[0], f"no answer to {command}"
        return int(self.process.stdout.readline())

    def end(self) -> None:
        """Kill the process and close all that belongs to it."""
        self.process.kill()
        self.process.wait(SECONDS)
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        self.control.close()
        os.close(self.pidfd)


@pytest.fixture
def owner(nothing_left: None, request: pytest.FixtureRequest) -> Iterator[Owner]:
    """Start an owner; parametrize indirectly with (pool bytes, options)."""
    process = Owner(*getattr(request, "param", (16 << 20, {})))
    yield process
    process.end()


@pytest.fixture
def endpoint(owner: Owner, make_backend: Callable[..., SimulatorBackend]) -> Iterator[Endpoint]:
    """Connect a backend of this process to the owner."""
    link = make_backend().connect(owner.export, owner.pair, time.monotonic_ns() + SECONDS * 10**9)
    yield link
    link.close()


# ---- the acl backend on the fake driver


@pytest.fixture(scope="session")
def ascend_driver(tmp_path_factory: pytest.TempPathFactory) -> ascend.Ascend:
    """Compile and load the fake driver. It stays in the process, as the real one does."""
    return ascend.Ascend(*ascend.build(tmp_path_factory.mktemp("ascend")))


@pytest.fixture
def driver(
    ascend_driver: ascend.Ascend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nothing_left: None
) -> Iterator[ascend.Ascend]:
    """Give the fake driver, as fresh as it can be; a test fails when the backend used it wrongly, here or elsewhere."""
    reports = tmp_path / "reports"
    reports.mkdir()
    for name, value in ascend_driver.paths.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("FAKE_ASCEND_DOMAIN", f"{os.getpid()}-{tmp_path.name}"[-60:])
    monkeypatch.setenv("FAKE_ASCEND_REPORT", str(reports))
    monkeypatch.setenv("AUTO_USE_UC_MEMORY", "0")
    ascend_driver.reset()
    ascend_driver.reload()
    yield ascend_driver
    wrong = ascend_driver.violations() + "".join(file.read_text() for file in reports.iterdir())
    ascend_driver.reset()
    assert not wrong, wrong


@pytest.fixture
def make_acl(driver: ascend.Ascend) -> Iterator[Callable[..., AclBackend]]:
    """Make opened acl backends that are closed at the end."""
    backends = []

    def make(*devices: int, **options: str) -> AclBackend:
        backend = AclBackend()
        backend.open(devices or (0,), {key.replace("_", "."): value for key, value in options.items()})
        backends.append(backend)
        return backend

    yield make
    for backend in backends:
        backend.close()


@pytest.fixture
def link_acl() -> Iterator[Callable[..., ascend.Link]]:
    """Link acl backends of this process; the links end before the backends."""
    links: list[ascend.Link] = []

    def make(left: AclBackend, right: AclBackend, seconds: float = SECONDS) -> ascend.Link:
        links.append(ascend.Link(left, right, seconds))
        return links[-1]

    yield make
    for link in links:
        link.close()


@pytest.fixture
def start_acl(driver: ascend.Ascend) -> Iterator[Callable[..., ascend.Owner]]:
    """Start processes with an acl backend; give their device, options and environment."""
    owners: list[ascend.Owner] = []

    def start(device: int, options: dict[str, str] | None = None, **environment: str) -> ascend.Owner:
        owners.append(ascend.Owner(device, options or {}, **environment))
        return owners[-1]

    yield start
    for owner in owners:
        owner.end()
