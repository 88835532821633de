"""Links of the acl backend between processes, on the fake driver."""

from __future__ import annotations

import json
from collections.abc import Callable

import ascend
import pytest
from acl_owner import POOL_BYTES, pattern
from ascend import DEVICE, MIB, SECONDS, Ascend, MakeBackend, Owner, in_process, read, server, write

from llm_datadist._kernels.runs import span_runs
from llm_datadist.backend import BackendError, Failure

StartOwner = Callable[..., Owner]
PATTERN = pattern(POOL_BYTES)
A2, A3 = "Ascend910B2", "Ascend910_9391"
#: Chip, whether the devices are on servers of their own, super pods, and what else the environment has.
WIRES: dict[str, tuple[str, bool, tuple[int, int], dict[str, str]]] = {
    "A2 HCCS": (A2, False, (7, 7), {}),
    "A2 RoCE": (A2, True, (7, 7), {}),
    "A2 RoCE inside a server": (A2, True, (7, 7), {"HCCL_INTRA_ROCE_ENABLE": "1"}),
    "A3 HCCS": (A3, False, (7, 7), {}),
    "A3 HCCS between servers": (A3, True, (7, 7), {}),
    "A3 RoCE": (A3, True, (7, 8), {}),
}


@pytest.mark.parametrize("wire", WIRES)
def test_bytes_go_both_ways_over_every_wire(
    wire: str, driver: Ascend, monkeypatch: pytest.MonkeyPatch, make_acl: MakeBackend, start_acl: StartOwner
) -> None:
    soc, apart, pods, environment = WIRES[wire]
    for name, value in {"FAKE_ASCEND_SOC": soc, **environment}.items():
        monkeypatch.setenv(name, value)
    options = []
    for device, pod in enumerate(pods):
        table = server(f"host-{device}", device) if apart else {}
        if apart and soc == A3:
            table = {key: text.replace('"1.0"', '"1.2"') for key, text in table.items()}
        options.append(table)
        monkeypatch.setenv("FAKE_ASCEND_SUPER_POD", str(pod))
        if device == 0:
            driver.reload()
            backend = make_acl(0, **options[0])
    owner = start_acl(1, options[1])
    device = backend.reserve(0, POOL_BYTES, DEVICE)
    endpoint = owner.link(backend)
    for pool in range(1 + wire.count("RoCE")):  # their device pool, and over RoCE the host pool too
        place = endpoint.locate(pool, 3, POOL_BYTES - 3)
        read(endpoint, place, [device.address], span_runs(0, 0, POOL_BYTES - 3))
        assert backend.load(device.address, POOL_BYTES - 3) == PATTERN[3:]
        backend.store(device.address, b"\x09" * 5000)
        write(endpoint, [device.address], endpoint.locate(pool, 100, 5000), span_runs(0, 0, 5000))
        assert bytes.fromhex(owner.ask("peek", pool, 99, 5002)) == PATTERN[99:100] + b"\x09" * 5000 + PATTERN[5100:5101]
    endpoint.close()


@pytest.fixture(scope="session")
def older(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Compile the fake with the functions of CANN 8.1; say where it is."""
    lacks = (
        "aclFinalizeReference",
        "aclrtMemcpyBatch",
        "aclrtMemcpyBatchAsync",
        "aclrtGetPhyDevIdByLogicDevId",
        "aclrtGetDeviceInfo",
        "aclrtMemGetAddressRange",
        "aclrtPointerGetAttributes",
    )
    acl, hccl = ascend.build(tmp_path_factory.mktemp("older"), lacks=lacks)
    return {"LLM_DATADIST_ACL_LIBRARY": str(acl), "LLM_DATADIST_HCCL_LIBRARY": str(hccl)}


def test_an_older_driver_does(
    older: dict[str, str], driver: Ascend, make_acl: MakeBackend, start_acl: StartOwner
) -> None:
    backend = make_acl(0, **server("host-0", 0))
    owner = start_acl(4, server("host-4", 4), **older)
    device = backend.reserve(0, MIB, DEVICE)
    endpoint = owner.link(backend)
    for pool in (0, 1):
        read(endpoint, endpoint.locate(pool, 0, MIB), [device.address], span_runs(0, 0, MIB))
        assert backend.load(device.address, MIB) == PATTERN[:MIB]
    endpoint.close()
    assert "device_id" in in_process(NO_TABLE, **older)


NO_TABLE = """
from ascend import *
from llm_datadist.backend import BackendError
try:
    AclBackend().open([0], {})
except BackendError as error:
    print(error)
"""


def test_a_killed_peer_ends_a_hanging_transfer(driver: Ascend, make_acl: MakeBackend, start_acl: StartOwner) -> None:
    backend = make_acl(0)
    owner = start_acl(1)
    here = backend.reserve(0, MIB, DEVICE)
    endpoint = owner.link(backend)
    driver.inject("HcclBatchGet:1:hang")
    place = endpoint.locate(0, 0, MIB)
    owner.kill()
    with pytest.raises(BackendError) as caught:
        read(endpoint, place, [here.address], span_runs(0, 0, MIB), SECONDS / 2)
    assert caught.value.kind is Failure.PEER_GONE
    assert caught.value.breaks_link
    assert not endpoint.alive()
    driver.reset()
    survive(backend, start_acl)
    endpoint.close()


def survive(backend: ascend.AclBackend, start_acl: StartOwner) -> None:
    """Check that a backend still links with others."""
    owner = start_acl(2)
    here = backend.reserve(0, MIB, DEVICE)
    endpoint = owner.link(backend)
    read(endpoint, endpoint.locate(0, 0, MIB), [here.address], span_runs(0, 0, MIB))
    assert backend.load(here.address, MIB) == PATTERN[:MIB]
    endpoint.close()


def test_a_killed_peer_fails_the_next_transfer(driver: Ascend, make_acl: MakeBackend, start_acl: StartOwner) -> None:
    backend = make_acl(0)
    owner = start_acl(1)
    here = backend.reserve(0, MIB, DEVICE)
    endpoint = owner.link(backend)
    owner.kill()
    with pytest.raises(BackendError) as caught:
        read(endpoint, endpoint.locate(0, 0, MIB), [here.address], span_runs(0, 0, MIB))
    assert caught.value.kind is Failure.PEER_GONE
    endpoint.close()
    survive(backend, start_acl)
    backend.close()
    assert endpoint.revoked()


@pytest.mark.parametrize(
    "step",
    [
        "HcclCommInitClusterInfoMemConfig:1:die",
        "HcclCommBindMem:1:die",
        "HcclCommPrepare:1:die",
        "HcclCommPrepare:1:die-half",
        "aclrtCreateStreamWithConfig:1:die",
    ],
)
def test_a_peer_that_dies_while_it_links_leaves_the_other_usable(
    step: str, driver: Ascend, make_acl: MakeBackend, start_acl: StartOwner
) -> None:
    backend = make_acl(0)
    owner = start_acl(1, FAKE_ASCEND_FAULTS=step)
    with pytest.raises((BackendError, json.JSONDecodeError)) as caught:
        owner.link(backend, 6.0)
    if isinstance(caught.value, BackendError):  # else this side was linked already, and the other never answered
        assert caught.value.kind in (Failure.PEER_GONE, Failure.TIMED_OUT, Failure.LINK_FAILED)
    owner.process.wait(SECONDS)
    survive(backend, start_acl)


def test_a_peer_that_dies_in_mid_transfer_leaves_the_other_usable(
    driver: Ascend, make_acl: MakeBackend, start_acl: StartOwner
) -> None:
    backend = make_acl(0)
    region = backend.reserve(0, MIB, DEVICE)
    owner = start_acl(1, FAKE_ASCEND_FAULTS="HcclBatchPut:1:die-half")
    endpoint = owner.link(backend)
    owner.tell("push", region.id)
    owner.process.wait(SECONDS)
    endpoint.close()
    survive(backend, start_acl)


@pytest.mark.parametrize("dead", ["507057", "507056", "hang"])
def test_a_peer_that_dies_while_it_is_read_ends_the_read(
    dead: str, driver: Ascend, make_acl: MakeBackend, start_acl: StartOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_ASCEND_DEAD_PEER", dead)
    driver.reload()
    backend = make_acl(0)
    here = backend.reserve(0, MIB, DEVICE)
    owner = start_acl(1, FAKE_ASCEND_FAULTS="serve:1:die-half")
    endpoint = owner.link(backend)
    with pytest.raises(BackendError) as caught:
        read(endpoint, endpoint.locate(0, 0, MIB), [here.address], span_runs(0, 0, MIB), SECONDS / 2)
    assert caught.value.kind in (Failure.PEER_GONE, Failure.SUSPECT_REMOTE, Failure.FAILED)
    assert caught.value.breaks_link
    owner.process.wait(SECONDS)
    endpoint.close()
    survive(backend, start_acl)


FORKED = """
from ascend import *

driver = Ascend.loaded()
left, right = AclBackend(), AclBackend()
left.open([0], {})
right.open([1], {})
region = left.reserve(0, MIB, DEVICE)
left.make_windows(4096, 4096)
link = Link(left, right)
read_end, write_end = os.pipe()
child = os.fork()
if child == 0:
    left.abandon()
    right.abandon()
    link.close()
    left.close()
    os.write(write_end, (driver.violations() or "clean").encode())
    os._exit(0)
os.waitpid(child, 0)
print(os.read(read_end, 4096).decode())
theirs = right.reserve(1, MIB, DEVICE)
link.close()
left.close()
right.close()
print(driver.violations() or "clean", flush=True)
"""


def test_the_child_of_a_fork_leaves_the_driver_alone(driver: Ascend) -> None:
    assert in_process(FORKED) == "clean\nclean\n"
