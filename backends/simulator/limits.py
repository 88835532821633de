"""How much memory may still be taken before the kernel would have to kill someone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

__all__ = ["MARGIN", "Room", "room"]

#: Bytes that are never handed out, for what the process needs beside its pools.
MARGIN: Final = 64 << 20

# Per cgroup version: file of the limit, of the usage, and the line of memory.stat with the page cache that the
# kernel drops first. It is part of the usage but no reason to refuse anything.
_CGROUP_FILES: Final = {
    "cgroup2": ("memory.max", "memory.current", "inactive_file"),
    "cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that are left under the tightest limit, and the name of that limit."""

    nbytes: int
    limit: str


def room(root: Path = Path("/")) -> Room:
    """Say how many bytes may be committed now.

    Parameters
    ----------
    root : Path
        Where ``proc`` and the cgroup mounts are looked up.
    """
    rooms = [_machine(root), *_cgroups(root)]
    return min(rooms, key=lambda each: each.nbytes)


def _machine(root: Path) -> Room:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return Room(int(line.split()[1]) * 1024 - MARGIN, "MemAvailable in /proc/meminfo")
    raise RuntimeError("/proc/meminfo has no MemAvailable")


def _cgroups(root: Path) -> Iterator[Room]:
    mounts = list(_memory_mounts(root))
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        version = "cgroup" if "memory" in controllers.split(",") else "cgroup2" if not controllers else None
        for mount_version, mount_root, mount_point in mounts:
            if mount_version == version:
                yield from _ancestors(root, version, mount_point, _below(path, mount_root))


def _memory_mounts(root: Path) -> Iterator[tuple[str, str, str]]:
    for line in (root / "proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        fields, (version, _, options) = left.split(), right.split(maxsplit=2)
        if version == "cgroup2" or (version == "cgroup" and "memory" in options.split(",")):
            yield version, fields[3], fields[4]


def _below(path: str, mount_root: str) -> PurePosixPath:
    """Give the part of a cgroup path below what is mounted: a container often sees its own cgroup as the root."""
    try:
        return PurePosixPath(path).relative_to(mount_root)
    except ValueError:
        return PurePosixPath()


def _ancestors(root: Path, version: str, mount_point: str, path: PurePosixPath) -> Iterator[Room]:
    limit_file, usage_file, cache_line = _CGROUP_FILES[version]
    for part in (path, *path.parents):
        folder = root / mount_point.lstrip("/") / part
        try:
            limit = (folder / limit_file).read_text().strip()
            if limit == "max":
                continue
            usage = int((folder / usage_file).read_text())
            cache = sum(
                int(line.split()[1])
                for line in (folder / "memory.stat").read_text().splitlines()
                if line.split()[0] == cache_line
            )
        except OSError:
            continue  # the root cgroup has no limit, and what a container does not show is not ours to know
        yield Room(int(limit) - usage + cache - MARGIN, f"{limit_file} of {folder}")
