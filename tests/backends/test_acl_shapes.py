"""The library on fake machines of every shape: products, versions of the driver, names of its files, wires.

Each process of a test is a peer, so a machine is chosen by its environment alone.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from pathlib import Path

import addresses
import ascend
import ascend_session
import devices
import pytest
from ends import End, desc
from peer import Peer

from llm_datadist import BlocksCacheKey, CacheKeyByIdAndIndex

A2, A3 = "Ascend910B2", "Ascend910_9391"
OF = desc(4, 4, 1 << 16)
Build = Callable[..., Path]
Peers = Sequence[Peer]
Start = Callable[..., Peers]


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Give a function that compiles the fake without some functions, each only once; it gives the folder."""
    made: dict[tuple[str, ...], Path] = {}
    # It comes with the first peer and stays, which no single test is to blame for.
    resource_tracker.ensure_running()

    def compiled(*lacks: str) -> Path:
        if lacks not in made:
            made[lacks] = tmp_path_factory.mktemp("ascend")
            ascend.build(made[lacks], lacks=lacks)
        return made[lacks]

    return compiled


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """Set the environment to a fake machine, whose libraries are still to be named."""
    reports = tmp_path / "reports"
    reports.mkdir()
    for name, value in ascend_session.fake_machine("shapes", reports).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LLM_DATADIST_BACKEND", "acl")
    for name in ascend_session.LIBRARIES:
        monkeypatch.delenv(name, raising=False)
    # The next two set the environment, which is put back as it is now.
    for name in (devices.VISIBLE, addresses.VARIABLE):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(devices, "_free", [])
    devices.take_own()
    with contextlib.closing(addresses.claim_net()):
        yield monkeypatch
    wrong = ascend_session.reported()
    assert not wrong, wrong


def named(machine: pytest.MonkeyPatch, folder: Path) -> None:
    """Name the libraries by their paths."""
    for variable, name in zip(ascend_session.LIBRARIES, ("libfake_acl.so", "libfake_hccl.so"), strict=True):
        machine.setenv(variable, str(folder / name))


def resources(device: int, server: str, pod: int | None = None) -> str:
    """Describe one device, as users do where the driver does not know enough."""
    own: dict[str, object] = {"device_id": str(device), "device_ip": f"198.51.100.{device + 1}"}
    table: dict[str, object] = {"version": "1.0"}
    if pod is not None:
        own["super_device_id"] = str(100 + device)
        table |= {
            "version": "1.2",
            "super_pod_list": [{"super_pod_id": str(pod), "server_list": [{"server_id": server}]}],
        }
    return json.dumps({**table, "server_list": [{"server_id": server, "device": [own]}]})


def exchange(peers: Peers, *tables: str) -> None:
    """Link two processes; pull slots and blocks, push blocks, release and end."""
    there, here = (End(peers[i], i + 1, remote=True, llm__LocalCommRes=table) for i, table in enumerate(tables))
    source = there.allocate(OF, BlocksCacheKey(1), salt=3, blocks=True)
    target = here.allocate(OF, blocks=True)
    here.link(there)
    here.manager.pull_blocks(BlocksCacheKey(1), target, [0, 2], [3, 1])
    size = OF.size // 4
    expected = [there.expected(OF, tensor, 3) for tensor in range(4)]
    pieces = {t: [(3 * size, data[:size]), (size, data[2 * size : 3 * size])] for t, data in enumerate(expected)}
    here.check(target, OF, pieces)
    here.fill(target, OF, 5)
    here.manager.push_blocks(BlocksCacheKey(1), target, [1], [0])
    own = [here.expected(OF, tensor, 5) for tensor in range(4)]
    there.check(source, OF, {t: [(0, own[t][size : 2 * size]), (size, expected[t][size:])] for t in range(4)})
    slots = there.allocate(OF, salt=4)
    room = here.allocate(OF)
    here.manager.pull_cache(CacheKeyByIdAndIndex(1, there.id(slots), 1), room, 0)
    here.check(room, OF, {t: [(0, there.expected(OF, t, 4)[size : 2 * size])] for t in range(4)})
    there.manager.deallocate_cache(slots)
    here.close()
    there.close()


@pytest.fixture
def peers(machine: pytest.MonkeyPatch) -> Iterator[Start]:
    """Give a function that starts two processes on the machine as it is by then."""
    started: list[Peer] = []

    def start(count: int = 2) -> Peers:
        started.extend(Peer() for _ in range(count))
        return started

    yield start
    for peer in started:
        peer.close()


@pytest.mark.parametrize("soc", [A2, A3])
def test_products(machine: pytest.MonkeyPatch, peers: Start, build: Build, soc: str) -> None:
    named(machine, build())
    machine.setenv("FAKE_ASCEND_SOC", soc)
    exchange(peers(), "", "")


@pytest.mark.parametrize("soc", [A2, A3])
@pytest.mark.parametrize("servers", [("one", "one"), ("one", "two")])
def test_an_older_driver_is_told_what_it_does_not_know(
    machine: pytest.MonkeyPatch,
    peers: Start,
    build: Build,
    soc: str,
    servers: tuple[str, str],
) -> None:
    """8.1 knows neither physical ids nor super pods; nor has it copies in batches."""
    named(machine, build(*ascend.builder().NEWER_THAN_8_1))
    machine.setenv("FAKE_ASCEND_SOC", soc)
    pod = 7 if soc == A3 else None
    # Peers have the blocks of four devices after the session's.
    exchange(peers(), *(resources(4 * i, server, pod) for i, server in enumerate(servers, 1)))


@pytest.mark.parametrize("hccl", ["libhccl.so", "libhcomm.so"])
@pytest.mark.parametrize("acl", ["libascendcl.so", "libacl_rt.so"])
def test_libraries_are_found_by_name(
    machine: pytest.MonkeyPatch,
    peers: Start,
    build: Build,
    tmp_path: Path,
    acl: str,
    hccl: str,
) -> None:
    for link, name in ((acl, "libfake_acl.so"), (hccl, "libfake_hccl.so")):
        (tmp_path / link).symlink_to(build() / name)
    machine.setenv("LD_LIBRARY_PATH", f"{tmp_path}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":"))
    exchange(peers(), "", "")


@pytest.mark.parametrize(("soc", "inside"), [(A2, False), (A2, True), (A3, False)])
def test_devices_of_other_servers(
    machine: pytest.MonkeyPatch, peers: Start, build: Build, soc: str, inside: bool
) -> None:
    """RoCE between servers, between super pods, and inside a server where that is asked for."""
    named(machine, build())
    machine.setenv("FAKE_ASCEND_SOC", soc)
    if inside:
        machine.setenv("HCCL_INTRA_ROCE_ENABLE", "1")
    started = peers()
    for peer, pod in zip(started, "78", strict=True):
        peer.set_environment("FAKE_ASCEND_SUPER_POD", pod)
    tables = [resources(4 * i, "one" if inside else f"server {i}", 6 + i if soc == A3 else None) for i in (1, 2)]
    exchange(started, *tables)


@pytest.mark.parametrize("soc", [A2, A3])
def test_four_processes(machine: pytest.MonkeyPatch, peers: Start, build: Build, soc: str) -> None:
    """Each links to those before it and pulls from them, while they do the same."""
    named(machine, build())
    machine.setenv("FAKE_ASCEND_SOC", soc)
    started = peers(4)
    there = [(cluster, peer.make("members:make_mine", cluster)) for cluster, peer in enumerate(started, 1)]
    for number, peer in enumerate(started[1:], 1):
        peer.start("make", "members:work_mine", there[:number], 5)
    for peer in started[1:]:
        peer.answer()
    for peer in started:
        peer.make("members:finalize_mine")
