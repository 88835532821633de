"""Rank tables as members pass them: JSON that may hold anything."""

from __future__ import annotations

from typing import Any

__all__ = ["devices_of"]


def devices_of(table: Any) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """List the devices of a decoded rank table, each after its server."""
    found = []
    servers = table.get("server_list") if isinstance(table, dict) else None
    for server in servers if isinstance(servers, list) else ():
        devices = server.get("device") if isinstance(server, dict) else None
        found += [(server, d) for d in devices if isinstance(d, dict)] if isinstance(devices, list) else []
    return found
