"""What the fixtures run inside a shared peer, and what tests look at in their own process."""

import gc
import importlib
import os
import threading
from collections import Counter

import ascend_session
import users
from pairs import cluster_info

from llm_datadist import LLMDataDist


def reset() -> str:
    """Finalize whatever the last test left; tell what a driver was told that was wrong."""
    instance = LLMDataDist.llm_engine_instance
    if instance is not None:
        instance.finalize()
    users.give_back()
    gc.collect()
    return ascend_session.violations()


def open_things() -> Counter[str]:
    """Count this process's threads, descriptors by kind, listening names and mappings of the library."""
    names = [f"thread {thread.name}" for thread in threading.enumerate()]
    sockets = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if target.startswith("socket:"):
            sockets.add(target[len("socket:[") : -1])
        names.append(f"descriptor of {target.split('[')[0]}")
    with open("/proc/net/unix") as unix:
        # Only what this process holds: others come and go.
        names += [f"name {line.split()[7]}" for line in unix if line.split()[6] in sockets and "llm_datadist" in line]
    with open("/proc/self/maps") as maps:
        names += [f"mapping {line.split()[-1]}" for line in maps if "memfd:llm_datadist" in line]
    return Counter(names)


def set_attribute(module: str, name: str, value: object) -> None:
    """Change a module of this process."""
    setattr(importlib.import_module(module), name, value)


def link(dd: LLMDataDist, cluster_id: int, addresses: list[str]) -> object:
    """Link from this process, since an LLMClusterInfo does not travel."""
    return dd.link_clusters([cluster_info(cluster_id, addresses)], 5000)


def unlink(dd: LLMDataDist, cluster_id: int, addresses: list[str], force: bool) -> object:
    """Unlink from this process."""
    return dd.unlink_clusters([cluster_info(cluster_id, addresses)], 5000, force)
