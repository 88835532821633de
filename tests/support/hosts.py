"""Addresses on the loopback network that no other process of a test run uses."""

from __future__ import annotations

import os
import socket

from llm_datadist._addresses import Address


def host() -> str:
    """Give the IPv4 address of this process's own."""
    pid = os.getpid()
    return f"127.{1 + (pid >> 16) % 254}.{(pid >> 8) % 256}.{1 + pid % 254}"


def free_address(at: str = "") -> Address:
    """Give an address that nobody listens at, of this process's own host or another."""
    with socket.socket() as sock:
        sock.bind((at or host(), 0))
        return Address(*sock.getsockname())
