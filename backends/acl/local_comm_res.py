"""The user's table of local communication resources, and the checks of the fields that such tables have."""

from __future__ import annotations

import ipaddress
import json
from dataclasses import dataclass
from typing import Any, Final

from llm_datadist.backend import BackendError, Failure

__all__ = [
    "OPTION",
    "PLAIN",
    "VERSIONS",
    "WITH_PODS",
    "Given",
    "invalid",
    "ip_address",
    "number",
    "parse_local_comm_res",
    "text_of",
]

OPTION: Final = "llm.LocalCommRes"
#: Versions of tables, in ascending order.
PLAIN: Final = "1.0"
WITH_PODS: Final = "1.2"
VERSIONS: Final = (PLAIN, WITH_PODS)
#: Bytes of a table.
_LONGEST: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class Given:
    """What the user's table says about this side; None is not said."""

    version: str | None = None
    server_id: str | None = None
    device_id: int | None = None
    device_ip: str | None = None
    super_device_id: int | None = None
    super_pod_id: int | None = None


def parse_local_comm_res(text: str) -> Given:
    """Read the user's table: JSON of the form of a rank table, with this server and this device alone.

    Parameters
    ----------
    text : str
        May be empty: then nothing is given.

    Raises
    ------
    BackendError
        ``INVALID``, with the key, what was found and what is expected.
    """
    if not text:
        return Given()
    if len(text) > _LONGEST:
        raise invalid(f"{OPTION} has {len(text)} characters, allowed are {_LONGEST}")
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise invalid(f"{OPTION} is not JSON: {e}") from e
    if not isinstance(table, dict):
        raise _unlike("table", table, "a JSON object")
    version = table.get("version")
    if version not in VERSIONS:
        raise _unlike("version", version, " or ".join(f'"{each}"' for each in VERSIONS))
    server = _only("server_list", table)
    device = _only("device", server)
    pod = _only("super_pod_list", table) if "super_pod_list" in table else {}
    return Given(
        version,
        text_of(OPTION, "server_id", server["server_id"], 64) if "server_id" in server else None,
        number(OPTION, "device_id", device["device_id"]) if "device_id" in device else None,
        ip_address(OPTION, "device_ip", device["device_ip"]) if "device_ip" in device else None,
        number(OPTION, "super_device_id", device["super_device_id"]) if "super_device_id" in device else None,
        number(OPTION, "super_pod_id", pod["super_pod_id"]) if "super_pod_id" in pod else None,
    )


def _only(key: str, parent: dict[str, Any]) -> dict[str, Any]:
    entries = parent.get(key)
    if not isinstance(entries, list) or len(entries) != 1 or not isinstance(entries[0], dict):
        raise _unlike(key, entries, "a list of one object")
    return entries[0]


def text_of(where: str, key: str, value: object, longest: int) -> str:
    """Check a text of 1 to ``longest`` bytes."""
    # What can't be encoded can't be printed.
    if isinstance(value, str) and value.isprintable() and 1 <= len(value.encode()) <= longest:
        return value
    raise _unlike(key, value, f"text of 1 to {longest} bytes", where)


def number(where: str, key: str, value: object) -> int:
    """Check a number that is written as text, as in all these tables."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 19 and int(value) < 1 << 63:
        return int(value)
    raise _unlike(key, value, "a decimal number in quotes, below 2**63", where)


def ip_address(where: str, key: str, value: object) -> str:
    """Check an address, and write it as all sides do."""
    try:
        if isinstance(value, str):
            return str(ipaddress.ip_address(value))
    except ValueError:
        pass
    raise _unlike(key, value, "an IPv4 or IPv6 address", where)


def invalid(text: str) -> BackendError:
    """Make the error for a wrong description."""
    return BackendError(Failure.INVALID, text)


def _unlike(key: str, found: object, expected: str, where: str = OPTION) -> BackendError:
    return invalid(f"{key} in {where} is {found!r:.200}, expected is {expected}")
