"""What an Ascend machine has, and what it lacks: one check for each thing that can be wrong."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from llm_datadist._version import __version__
from llm_datadist.backend import BackendError
from llm_datadist.backends.acl.devices import Device, claim
from llm_datadist.backends.acl.library import open_library
from llm_datadist.backends.acl.local_comm_res import parse_local_comm_res
from llm_datadist.backends.acl.probe import Installed, Probe, probe
from llm_datadist.backends.acl.products import Product
from llm_datadist.backends.acl.sides import find_sides
from llm_datadist.backends.acl.structures import MemInfo
from llm_datadist.backends.acl.topology import HCCN_CONF, HCCN_TOOL, INTRA_ROCE_VARIABLE, Side
from llm_datadist.validate.partner import Partner
from llm_datadist.validate.results import Check, Outcome, explained

__all__ = ["described", "look", "look_there", "of_process", "table"]

#: Which devices a process has; in it they count from 0.
VISIBLE: Final = "ASCEND_RT_VISIBLE_DEVICES"
#: What ``llm.LocalCommRes`` says of each of them: a list in JSON.
TABLES: Final = "LLM_DATADIST_VALIDATE_LOCAL_COMM_RES"
#: What the driver reads beside it: they change how links are made, so both sides of one need the same.
_VARIABLES: Final = (
    INTRA_ROCE_VARIABLE,
    "HCCL_OP_EXPANSION_MODE",
    "HCCL_CONNECT_TIMEOUT",
    "HCCL_RDMA_TIMEOUT",
    "HCCL_RDMA_RETRY_CNT",
    "HCCL_RDMA_TC",
    "HCCL_RDMA_SL",
    "HCCL_NPU_SOCKET_PORT_RANGE",
)
#: What links or copies do without some functions.
_WITHOUT: Final = {
    "aclFinalizeReference": "ACL stays initialised when an engine ends; harmless",
    "aclrtMemcpyBatch": "copies between host and device are slower; harmless",
    "aclrtGetPhyDevIdByLogicDevId": "give each device's device_id in llm.LocalCommRes",
    "aclrtGetDeviceInfo": "on A3, give super_device_id and super_pod_id in llm.LocalCommRes",
}
_GIB: Final = 1 << 30


def of_process(devices: Sequence[str], tables: Sequence[str]) -> dict[str, str]:
    """Give the environment of a process that is to have these devices, and tables about them or none."""
    return {VISIBLE: ",".join(devices), TABLES: json.dumps(list(tables))}


def table(device: int) -> str:
    """Give what ``llm.LocalCommRes`` says of a device of this process; empty for nothing."""
    tables = json.loads(os.environ.get(TABLES, "[]"))
    return str(tables[device]) if tables else ""


def described() -> list[dict[str, Any]]:
    """Look at this machine for the process of another one."""
    return [{**asdict(check), "outcome": check.outcome.value} for check in look()]


def look_there(connection: Any) -> Iterator[Check]:
    """Have the partner look at its machine.

    Parameters
    ----------
    connection : Connection
        Leads to the partner.
    """
    for told in Partner(connection).ask("environment"):
        yield Check(f"peer: {told['name']}", Outcome(told["outcome"]), str(told["text"]), str(told["remedy"]))


def look() -> Iterator[Check]:
    """Look at this machine, and at the devices that this process sees. Never raises because of what it finds."""
    if os.environ["LLM_DATADIST_BACKEND"] != "acl":
        yield Check("environment", Outcome.SKIPPED, "only the acl backend needs anything of the machine")
        return
    yield Check(
        "host", Outcome.OK, f"llm_datadist {__version__}, Python {platform.python_version()}, {platform.platform()}"
    )
    yield from _variables()
    yield from _addresses()
    found = probe(os.environ)
    yield from _libraries(found)
    if found.installed is not Installed.YES:
        return
    yield from _products(found)
    yield from _devices()


def _variables() -> Iterator[Check]:
    given = [f"{name}={os.environ[name]}" for name in (VISIBLE, *_VARIABLES) if name in os.environ]
    remedy = "give the same HCCL variables to both sides of every link" if any("HCCL" in each for each in given) else ""
    yield Check("variables", Outcome.OK, ", ".join(given) or "none that HCCL reads is set", remedy)


def _addresses() -> Iterator[Check]:
    tool = HCCN_TOOL if os.access(HCCN_TOOL, os.X_OK) else shutil.which("hccn_tool")
    have = [f"{HCCN_CONF}"] * Path(HCCN_CONF).exists() + [tool] * (tool is not None)
    if have:
        yield Check("addresses", Outcome.OK, f"of devices are told by {' and '.join(map(str, have))}")
    else:
        text = f"of devices are not told: there is neither {HCCN_CONF} nor hccn_tool"
        remedy = f"mount {HCCN_CONF} into the container, or give llm.LocalCommRes; links over HCCS need no address"
        yield Check("addresses", Outcome.WARNING, text, remedy)


def _libraries(found: Probe) -> Iterator[Check]:
    reasons = "; ".join(found.reasons)
    if found.paths is None:
        remedy = "put CANN's libraries on LD_LIBRARY_PATH, or name them in LLM_DATADIST_ACL_LIBRARY and _HCCL_LIBRARY"
        yield Check("libraries", Outcome.FAILED, reasons, remedy)
        return
    where = f"{found.paths.acl} and {found.paths.hccl}"
    if found.installed is Installed.BROKEN:
        yield Check("libraries", Outcome.FAILED, f"{where}: {reasons}", "see that driver and firmware are installed")
        return
    yield Check("libraries", Outcome.OK, where + (f" (before them: {reasons})" if reasons else ""))
    for name, meaning in _WITHOUT.items():
        if name in found.missing:
            yield Check("functions", Outcome.WARNING, f"{name} is missing", meaning)
    rest = [name for name in found.missing if name not in _WITHOUT]
    yield Check("functions", Outcome.OK, f"all that are needed; others missing: {', '.join(rest) or 'none'}")


def _products(found: Probe) -> Iterator[Check]:
    if found.version is not None:
        yield Check("runtime", Outcome.OK, f"interface version {'.'.join(map(str, found.version))}")
    # Before 8.5 it is asked only when devices are claimed.
    if found.product is not None and found.product not in (Product.A2, Product.A3):
        text = f"{found.soc_name} is {found.product.value}"
        yield Check("product", Outcome.FAILED, text, "the acl backend runs on Atlas A2 and A3")
    elif found.product is not None:
        yield Check("product", Outcome.OK, f"{found.soc_name} ({found.product.value})")


def _devices() -> Iterator[Check]:
    names = os.environ.get(VISIBLE, "0").split(",")
    try:
        with ExitStack() as undo:
            library = open_library(os.environ)
            for device in claim(library, range(len(names)), undo):
                side = find_sides(library, [device], parse_local_comm_res(table(device.id)), os.environ)[0]
                yield _device(f"device {names[device.id]}", device, side)
    except BackendError as error:
        remedy = "look whether the driver sees it, in a container whether it is passed on, and who else uses it"
        yield Check(f"devices {','.join(names)}", Outcome.FAILED, error.text, remedy)
    except Exception as error:  # when the device is given back
        yield Check(f"devices {','.join(names)}", Outcome.FAILED, explained(error))


def _device(name: str, device: Device, side: Side) -> Check:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    with device.current():
        device.library.call("aclrtGetMemInfo", MemInfo.HBM, ctypes.byref(free), ctypes.byref(total))
    text = f"{side}; {free.value / _GIB:.1f} of {total.value / _GIB:.1f} GiB free"
    if side.address.ip:
        return Check(name, Outcome.OK, text)
    remedy = "set the address with the driver's tool, or give it in llm.LocalCommRes; HCCS links work without"
    return Check(name, Outcome.WARNING, text, remedy)
