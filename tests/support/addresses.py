"""Addresses for engines of tests, which no other test run on the machine has.

Tests name addresses of hosts as users do. Where control runs over TCP these stand for loopback addresses of the run.
"""

from __future__ import annotations

import binascii
import ipaddress
import os
import socket

#: The second byte of all addresses of a run, for its peers too; not set where addresses are only names.
VARIABLE = "LLM_DATADIST_TEST_NET"


def claim_net() -> socket.socket:
    """Set the environment to a byte that no other run has, as long as the socket that is returned is open."""
    for offset in range(254):
        net = (os.getpid() + offset) % 254 + 1
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"\0tests-of-net-{net}")
        except OSError:
            claim.close()
            continue
        os.environ[VARIABLE] = str(net)
        return claim
    raise RuntimeError("254 test runs have addresses on this machine already")


def bindable(addresses: str) -> str:
    """Give where ``ip:port`` addresses, joined by ``;``, are in this run; what is none stays as it is."""
    net = os.environ.get(VARIABLE)
    return addresses if net is None else ";".join(_in_net(address, net) for address in addresses.split(";"))


def _in_net(address: str, net: str) -> str:
    host, _, port = address.rpartition(":")
    try:
        ip = ipaddress.IPv4Address(host)
    except ValueError:
        return address
    if ip.is_unspecified or host.startswith(f"127.{net}."):
        return address
    # Two hosts of one test differ in a byte or two, which such a sum always tells apart.
    high, low = divmod(binascii.crc_hqx(ip.packed, 0), 256)
    return f"127.{net}.{high}.{low}:{port}"
