"""Fixtures for all tests: the backend, a namespace of its own for each test, peers, and a guard against leftovers."""

from __future__ import annotations

import gc
import itertools
import os
import threading
from collections.abc import Callable, Iterator

import addresses
import ascend_session
import devices
import pairs
import pytest
import users
from ends import End
from peer import Peer

from llm_datadist import LLMDataDist
from llm_datadist.backend import Capabilities, make_backend

_tests = itertools.count()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--backend``."""
    parser.addoption("--backend", default="simulator", help="backend that the tests run on (default: simulator)")


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark; expect that bytes are staged where late memory can't be reached."""
    config.addinivalue_line(
        "markers",
        "needs(*names, **values): skip on a backend whose Capabilities lack one of the names, or have another value",
    )
    declared = capabilities(config)
    if not declared.late_regions:
        config.addinivalue_line("filterwarnings", "ignore:registered memory of cluster:RuntimeWarning")
    if declared.network:
        config.add_cleanup(addresses.claim_net().close)
    if config.getoption("--backend") == "acl":
        folders = ascend_session.start(os.environ.get("PYTEST_XDIST_WORKER", "alone"))
        config.add_cleanup(lambda: ascend_session.end(folders))
        devices.take_own()


def capabilities(config: pytest.Config) -> Capabilities:
    """Give what the backend under test declares."""
    return make_backend(config.getoption("--backend")).capabilities


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what the backend declares that it can't do, and nothing else."""
    declared = capabilities(config)
    for item in items:
        for mark in item.iter_markers("needs"):
            wanted = {**dict.fromkeys(mark.args, True), **mark.kwargs}
            lacking = [f"{name}={value}" for name, value in wanted.items() if getattr(declared, name) != value]
            if lacking:
                item.add_marker(pytest.mark.skip(reason=f"needs a backend with {', '.join(lacking)}"))


@pytest.fixture(autouse=True)
def surroundings(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let no two tests meet, and name the backend so that nobody is told of the choice."""
    # Not the fixture: what a test patches must be undone before the other fixtures end, and this one ends last.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLM_DATADIST_NAMESPACE", f"test-{os.getpid()}-{next(_tests)}")
        patch.setenv("LLM_DATADIST_BACKEND", request.config.getoption("--backend"))
        yield


@pytest.fixture(autouse=True)
def nothing_left(surroundings: None) -> Iterator[None]:
    """Fail a test that leaves an engine, a thread, a descriptor or a mapping of ours behind."""
    before = leftovers()
    yield
    left_running = LLMDataDist.llm_engine_instance
    if left_running is not None:
        left_running.finalize()
    users.give_back()
    gc.collect()
    assert left_running is None, "the test left an initialised LLMDataDist behind"
    after = leftovers()
    assert not after - before, f"the test left behind: {after - before}"
    wrong = ascend_session.violations() + ascend_session.reported()
    assert not wrong, f"what the driver was told by this process, and by others that have ended: {wrong}"


def leftovers() -> set[str]:
    """Name threads, mappings and descriptors of the library in this process."""
    found = {f"thread {t.name}" for t in threading.enumerate() if t.name.startswith("llm_datadist")}
    with open("/proc/self/maps") as maps:
        found |= {line.strip() for line in maps if "llm_datadist" in line and ".so" not in line}
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if "memfd:llm_datadist" in target or "pidfd" in target:
            found.add(f"descriptor {fd} -> {target}")
    return found


@pytest.fixture
def start_peer() -> Iterator[Callable[[], Peer]]:
    """Give a function that spawns peer processes, which end with the test."""
    peers: list[Peer] = []

    def start() -> Peer:
        peers.append(Peer())
        return peers[-1]

    yield start
    for peer in peers:
        peer.close()


_shared: list[Peer] = []


@pytest.fixture
def peer() -> Iterator[Peer]:
    """Give a peer process that tests share one after the other, since spawning one takes a while."""
    if not _shared or not _shared[0].process.is_alive():
        _shared[:] = [Peer()]
    shared = _shared[0]
    for name in ("LLM_DATADIST_NAMESPACE", "LLM_DATADIST_BACKEND"):
        shared.set_environment(name, os.environ[name])
    yield shared
    if shared.process.is_alive():
        wrong = shared.make("conftest_support:reset")
        if devices.scarce():
            _shared.pop().close()
        assert not wrong, f"what the driver was told by the shared peer: {wrong}"


def pytest_sessionfinish() -> None:
    """End the shared peer."""
    while _shared:
        _shared.pop().close()


@pytest.fixture
def prompt(peer: Peer) -> pairs.Prompt:
    """Give a prompt engine in the shared peer."""
    return pairs.Prompt(peer)


@pytest.fixture
def decoder() -> Iterator[pairs.Decoder]:
    """Give a decoder engine in this process."""
    made = pairs.Decoder()
    yield made
    made.dd.finalize()


@pytest.fixture
def linked(prompt: pairs.Prompt, decoder: pairs.Decoder) -> tuple[pairs.Prompt, pairs.Decoder]:
    """Give a linked pair."""
    decoder.link(prompt)
    return prompt, decoder


@pytest.fixture
def cm(peer: Peer) -> Iterator[tuple[End, End]]:
    """Give linked engines of CacheManager mode: cluster 1 in the shared peer, cluster 2 in this process."""
    there, here = End(peer, 1), End(None, 2)
    here.link(there)
    yield there, here
    here.close()


@pytest.fixture
def remote_cm(peer: Peer) -> Iterator[tuple[End, End]]:
    """Give the same in remote-accessible mode, not linked, since memory is registered before."""
    there, here = End(peer, 1, remote=True), End(None, 2, remote=True)
    yield there, here
    here.close()
