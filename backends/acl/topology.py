"""Where the devices of a link are: how each side describes itself, and the rank table that both make of it."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from llm_datadist.backends.acl.local_comm_res import (
    OPTION,
    PLAIN,
    VERSIONS,
    WITH_PODS,
    Given,
    invalid,
    ip_address,
    number,
    text_of,
)
from llm_datadist.backends.acl.products import Product
from llm_datadist.backends.acl.structures import COMM_NAME_BYTES

__all__ = [
    "INTRA_ROCE_VARIABLE",
    "Address",
    "Side",
    "agree",
    "comm_name",
    "device_ip",
    "host_id",
    "own_side",
    "parse_side",
    "rank_table",
    "uses_rdma",
]

#: HCCL reads it: with 1 it takes RoCE between all devices. Must be the same on both sides.
INTRA_ROCE_VARIABLE: Final = "HCCL_INTRA_ROCE_ENABLE"
HCCN_CONF: Final = "/etc/hccn.conf"
HCCN_TOOL: Final = "/usr/local/Ascend/driver/tools/hccn_tool"
BOOT_ID: Final = "/proc/sys/kernel/random/boot_id"

_TOOL_S: Final = 10
_ORIGIN_CHARACTERS: Final = 500
_PEER: Final = "the peer's description"


@dataclass(frozen=True, slots=True)
class Address:
    """A device's address on its own network, and where that was found; or no address, and why."""

    ip: str
    origin: str


@dataclass(frozen=True, slots=True)
class Side:
    """One device of a link, as its process describes it."""

    product: Product
    #: Of the rank table that this side can use.
    version: str
    server_id: str
    #: The physical one.
    device_id: int
    address: Address
    #: Known with version 1.2.
    super_device_id: int | None = None
    super_pod_id: int | None = None
    #: RoCE is used inside a server too.
    intra_roce: bool = False

    def describe(self) -> dict[str, str]:
        """Write it down for the peer, who reads it with `parse_side`."""
        described = {
            "product": self.product.value,
            "version": self.version,
            "server_id": self.server_id,
            "device_id": str(self.device_id),
            "ip_origin": self.address.origin[:_ORIGIN_CHARACTERS],
            "intra_roce": str(int(self.intra_roce)),
        }
        if self.address.ip:
            described["device_ip"] = self.address.ip
        if self.version == WITH_PODS:
            described["super_device_id"] = str(self.super_device_id)
            described["super_pod_id"] = str(self.super_pod_id)
        return described

    def __str__(self) -> str:
        pod = f", super pod {self.super_pod_id}" if self.super_pod_id is not None else ""
        return (
            f"{self.product.value} device {self.device_id} of server {self.server_id}{pod}, "
            f"device_ip {self.address.ip or 'none'} ({self.address.origin})"
        )


def parse_side(described: object) -> Side:
    """Read a peer's description, which is not trusted.

    Raises
    ------
    BackendError
        ``INVALID``, with the key, what was found and what is expected.
    """
    if not isinstance(described, dict):
        raise invalid(f"{_PEER} is {described!r:.200}, expected is an object")
    product = next((each for each in Product if each.value == described.get("product")), None)
    version, intra_roce = described.get("version"), described.get("intra_roce")
    if product is None or version not in VERSIONS or intra_roce not in ("0", "1"):
        raise invalid(
            f"{_PEER} has product {described.get('product')!r:.200}, version {version!r:.200} and intra_roce "
            f"{intra_roce!r:.200}, expected are one of {', '.join(each.value for each in Product)}; one of "
            f"{', '.join(VERSIONS)}; 0 or 1"
        )
    pods = version == WITH_PODS
    return Side(
        product,
        version,
        text_of(_PEER, "server_id", described.get("server_id"), 64),
        number(_PEER, "device_id", described.get("device_id")),
        Address(
            ip_address(_PEER, "device_ip", described["device_ip"]) if "device_ip" in described else "",
            text_of(_PEER, "ip_origin", described.get("ip_origin"), 4 * _ORIGIN_CHARACTERS),
        ),
        number(_PEER, "super_device_id", described.get("super_device_id")) if pods else None,
        number(_PEER, "super_pod_id", described.get("super_pod_id")) if pods else None,
        intra_roce == "1",
    )


def agree(key: str, told: int | None, given: int | None) -> int:
    """Choose between what the driver tells and what the user's table gives; either may be None.

    Raises
    ------
    BackendError
        ``INVALID`` when they differ, or when there is neither.
    """
    if told is None:
        if given is None:
            raise invalid(f"this Ascend runtime does not tell {key}: give it in {OPTION}")
        return given
    if given not in (None, told):
        raise invalid(f"{key} in {OPTION} is {given}, expected is {told}, which the driver tells")
    return told


def own_side(
    product: Product,
    device_id: int,
    address: Address,
    given: Given,
    *,
    super_device_id: int | None = None,
    super_pod_id: int | None = None,
    intra_roce: bool = False,
) -> Side:
    """Put this side's description together.

    Parameters
    ----------
    product : Product
        Family of the device.
    device_id : int
        Its physical id: ``agree("device_id", told, given.device_id)``.
    address : Address
        From `device_ip`.
    given : Given
        The user's table.
    super_device_id, super_pod_id : int or None
        As the driver tells them, if it can.
    intra_roce : bool
        Whether `INTRA_ROCE_VARIABLE` is 1.

    Raises
    ------
    BackendError
        ``INVALID`` when the table and the driver differ, or when nobody tells what an A3 needs.
    """
    version = given.version or (WITH_PODS if product is Product.A3 else PLAIN)
    pods = version == WITH_PODS
    return Side(
        product,
        version,
        given.server_id or host_id(),
        device_id,
        address,
        agree("super_device_id", super_device_id, given.super_device_id) if pods else None,
        agree("super_pod_id", super_pod_id, given.super_pod_id) if pods else None,
        intra_roce,
    )


def uses_rdma(mine: Side, theirs: Side) -> bool:
    """Say whether a link goes over RoCE: each device then needs an address, and host memory can be reached."""
    if mine.intra_roce or mine.product is not theirs.product:
        return True
    if mine.product is Product.A3 and _version(mine, theirs) == WITH_PODS:
        return mine.super_pod_id != theirs.super_pod_id
    return mine.product not in (Product.A2, Product.A3) or mine.server_id != theirs.server_id


def rank_table(mine: Side, theirs: Side) -> tuple[str, int]:
    """Make the rank table of a link. Both sides get the same text.

    Returns
    -------
    tuple of str and int
        The table, and the rank of this side in it.

    Raises
    ------
    BackendError
        ``INVALID`` when the two devices can't be in one table, with what both sides have.
    """
    if problem := _problem(mine, theirs):
        raise invalid(f"{problem}. This side: {mine}; the peer: {theirs}")
    version = _version(mine, theirs)
    # An address that HCCS does not need is left out rather than given for one of two.
    with_ip = _same_family(mine.address.ip, theirs.address.ip)
    ranks = sorted((mine, theirs), key=_order)
    servers: dict[str, list[dict[str, str]]] = {}
    pods: dict[str, list[dict[str, str]]] = {}
    for rank, side in enumerate(ranks):
        device = {"device_id": str(side.device_id)}
        if with_ip:
            device["device_ip"] = side.address.ip
        if version == WITH_PODS:
            device["super_device_id"] = str(side.super_device_id)
            if side.server_id not in servers:
                pods.setdefault(str(side.super_pod_id), []).append({"server_id": side.server_id})
        servers.setdefault(side.server_id, []).append({**device, "rank_id": str(rank)})
    table: dict[str, object] = {
        "version": version,
        "server_count": str(len(servers)),
        "status": "completed",
        "server_list": [{"server_id": server, "device": devices} for server, devices in servers.items()],
    }
    if pods:
        table["super_pod_list"] = [{"super_pod_id": pod, "server_list": members} for pod, members in pods.items()]
    return json.dumps(table, separators=(",", ":")), ranks.index(mine)


def _version(mine: Side, theirs: Side) -> str:
    return min(mine.version, theirs.version)


def _order(side: Side) -> tuple[str, ...]:
    return side.server_id, str(side.device_id), str(side.super_device_id), side.address.ip


def _same_family(one: str, other: str) -> bool:
    return bool(one and other) and ipaddress.ip_address(one).version == ipaddress.ip_address(other).version


def _problem(mine: Side, theirs: Side) -> str:
    """Say why two sides can't be in one table; empty when they can."""
    if mine.intra_roce != theirs.intra_roce:
        return f"{INTRA_ROCE_VARIABLE} is 1 on one side only"
    if (mine.server_id, mine.device_id) == (theirs.server_id, theirs.device_id):
        return "a device can't be linked to itself, nor two processes that share it"
    if mine.address.ip and mine.address.ip == theirs.address.ip:
        return "two devices have one device_ip"
    if (
        mine.server_id == theirs.server_id
        and mine.super_pod_id != theirs.super_pod_id
        and _version(mine, theirs) == WITH_PODS
    ):
        return "one server is in two super pods"
    if uses_rdma(mine, theirs) and not _same_family(mine.address.ip, theirs.address.ip):
        return "this link goes over RoCE, so both devices need a device_ip, of one family"
    return ""


def comm_name(link: str) -> bytes:
    """Give the name of a link's communicator: the same on both sides, and 127 bytes at most."""
    name = f"llm_datadist:{link}".encode()
    if len(name) <= COMM_NAME_BYTES and 0 not in name:
        return name
    return b"llm_datadist:" + hashlib.sha256(name).hexdigest().encode()


def host_id(path: str = BOOT_ID) -> str:
    """Give a name of this host that all its processes share, also those in containers."""
    try:
        return Path(path).read_text().strip()
    except OSError as e:
        raise invalid(f"{path} can't be read ({e.strerror}): give server_id in {OPTION}") from e


def device_ip(device_id: int, given: Given, *, conf: str = HCCN_CONF, tool: str = HCCN_TOOL) -> Address:
    """Find the address of a device on its own network.

    Parameters
    ----------
    device_id : int
        The physical id.
    given : Given
        The user's table, which goes before all else.
    conf : str
        File that ``hccn_tool`` writes. If it exists nothing else is asked for an address.
    tool : str
        Program that asks the driver; if it is not there, the one on PATH.

    Returns
    -------
    Address
        Without an address when none is set: within one server or super pod a link needs none.

    Raises
    ------
    BackendError
        ``INVALID`` when the file can't be read, has something else than an address, or another one than the driver
        tells.
    """
    if given.device_ip:
        return Address(given.device_ip, f"device_ip in {OPTION}")
    keys = f"address_{device_id}", f"IPv6address_{device_id}"
    try:
        text = Path(conf).read_text(errors="replace")
    except FileNotFoundError:
        return _ask_tool(device_id, tool, f"there is no {conf}, which a container must mount")
    except OSError as e:
        raise invalid(
            f"{conf} can't be read ({e.strerror}), expected is a line {keys[0]}=<address>: make it readable, or give "
            f"device_ip in {OPTION}"
        ) from e
    for key in keys:
        if line := re.search(rf"^[ \t]*{key}[ \t]*=(.*)$", text, re.MULTILINE):
            found = ip_address(conf, key, line[1].strip())
            told = _ask_tool(device_id, tool, "")
            if _same_family(told.ip, found) and told.ip != found:
                raise invalid(
                    f"{key} in {conf} is {found}, expected is {told.ip} ({told.origin}): mount the present file"
                )
            return Address(found, f"{key} in {conf}")
    return Address("", f"{conf} has neither {keys[0]} nor {keys[1]}")


def _ask_tool(device_id: int, tool: str, why: str) -> Address:
    program = tool if Path(tool).exists() else shutil.which("hccn_tool")
    if program is None:
        return Address("", f"{why}; nor {tool}")
    for family in ((), ("-inet6",)):
        command = [program, "-i", str(device_id), "-ip", *family, "-g"]
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_TOOL_S
            )
        except (OSError, subprocess.TimeoutExpired) as e:
            return Address("", f"{why}; {' '.join(command)} failed: {e!r:.200}")
        if told := re.search(r"ipaddr:[ \t]*([0-9A-Fa-f.:]+)", done.stdout):
            return Address(ip_address(program, "ipaddr", told[1]), f"ipaddr of {' '.join(command)}")
    return Address("", f"{why}; {program} tells no address of device {device_id}")
