"""Network addresses as users give them, in one canonical form. Nothing here resolves names or opens a socket."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from llm_datadist._checks import UINT16_MAX, UINT32_MAX, integer, refused
from llm_datadist.status import ParamInvalid

_MAPPED_V4 = bytes(10) + b"\xff\xff"
_WILDCARDS = ("0.0.0.0", "::")


@dataclass(frozen=True, slots=True)
class Address:
    """An IP address in canonical text, and a port."""

    host: str
    port: int

    @property
    def is_wildcard(self) -> bool:
        """Whether it stands for all addresses of the host."""
        return self.host in _WILDCARDS

    def wildcards(self) -> list[Address]:
        """Give the wildcard addresses whose listener a client of this address may reach instead."""
        hosts = _WILDCARDS if "." in self.host else _WILDCARDS[1:]
        return [Address(host, self.port) for host in hosts if host != self.host]

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def canonical_host(name: str, host: str | int) -> str:
    """Bring an IP address to its canonical text.

    Parameters
    ----------
    name : str
        Name of the argument, for the text.
    host : str or int
        IPv4 or IPv6 text, or the four bytes of an IPv4 address as a little-endian integer.

    Returns
    -------
    str
        Canonical text; an IPv4 address mapped into IPv6 becomes IPv4.

    Raises
    ------
    ValueError
        When an integer does not fit 32 bits.
    LLMException
        LLM_PARAM_INVALID when a text is no IP address: host names, short forms, zones and blanks are refused.
    """
    if isinstance(host, int):
        return socket.inet_ntoa(integer(name, host, 0, UINT32_MAX).to_bytes(4, "little"))
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            packed = socket.inet_pton(family, host)
        except (OSError, ValueError):  # ValueError: a null character, or text that has no bytes
            continue
        if packed.startswith(_MAPPED_V4) and len(packed) == 16:
            return socket.inet_ntoa(packed[12:])
        return socket.inet_ntop(family, packed)
    raise refused(
        ParamInvalid(
            f"{name} is {host!r:.200}, allowed are IPv4 addresses with four numbers and IPv6 addresses without zone; "
            "host names are not looked up"
        )
    )


def split_address(name: str, text: str) -> tuple[str, int]:
    """Take apart ``ip:port`` or ``[v6]:port`` without a look at the ip.

    Parameters
    ----------
    name : str
        Name of the argument, for the text.
    text : str
        The address; the port is in [1, 65535].

    Returns
    -------
    tuple of str and int
        The ip, without brackets, and the port.

    Raises
    ------
    LLMException
        LLM_PARAM_INVALID when the text is anything else.
    """
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or (":" in host and not bracketed) or (bracketed and ":" not in host):
        raise refused(ParamInvalid(f"{name} is {text!r:.200}, allowed are ip:port and [ipv6]:port"))
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 1 <= int(port) <= UINT16_MAX):
        raise refused(ParamInvalid(f"the port of {name} {text!r:.200} is {port!r:.20}, allowed are 1 to {UINT16_MAX}"))
    return host[1:-1] if bracketed else host, int(port)


def parse_address(name: str, text: str) -> Address:
    """Give the address in ``ip:port`` or ``[v6]:port``, in canonical form; otherwise like `split_address`."""
    host, port = split_address(name, text)
    return Address(canonical_host(name, host), port)


def little_endian(host: str) -> int | str:
    """Give a canonical IPv4 address as a little-endian integer; an IPv6 address stays text."""
    return host if ":" in host else int.from_bytes(socket.inet_aton(host), "little")
