"""Which memory limit is the tightest, read from made-up /proc and cgroup files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from llm_datadist.backends.simulator.limits import MARGIN, room

MIB = 1 << 20
V1_NO_LIMIT = 9223372036854771712

V2_MOUNT = "30 23 0:27 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNT = "35 23 0:30 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
V1_CPU_MOUNT = "36 23 0:31 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct"

Files = dict[str, object]
Make = Callable[[Files], Path]


@pytest.fixture
def make_root(tmp_path: Path) -> Make:
    """Write files below a root of its own."""

    def make(files: Files) -> Path:
        defaults: Files = {
            "proc/meminfo": f"MemTotal: 9999999 kB\nMemAvailable: {8192 * 1024} kB\nSwapFree: 0 kB\n",
            "proc/self/cgroup": "0::/\n",
            "proc/self/mountinfo": V2_MOUNT + "\n",
        }
        for name, text in {**defaults, **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}")
        return tmp_path

    return make


def v2(folder: str, limit: object, usage: int, cache: int = 0) -> Files:
    base = f"sys/fs/cgroup{folder}"
    stat = f"anon 5\ninactive_file {cache}\nactive_file 77\n"
    return {f"{base}/memory.max": limit, f"{base}/memory.current": usage, f"{base}/memory.stat": stat}


def v1(folder: str, limit: int, usage: int, cache: int = 0) -> Files:
    base = f"sys/fs/cgroup/memory{folder}"
    stat = f"inactive_file 1\ntotal_inactive_file {cache}\n"
    return {
        f"{base}/memory.limit_in_bytes": limit,
        f"{base}/memory.usage_in_bytes": usage,
        f"{base}/memory.stat": stat,
    }


def check(root: Path, nbytes: int, limit: str) -> None:
    found = room(root)
    assert found.nbytes == nbytes - MARGIN
    assert limit in found.limit


def test_machine_without_cgroup_limits(make_root: Make) -> None:
    check(make_root({}), 8192 * MIB, "MemAvailable")


def test_v2_limit_of_the_own_group(make_root: Make) -> None:
    files = {"proc/self/cgroup": "0::/a/b\n", **v2("/a", "max", 900 * MIB), **v2("/a/b", 1000 * MIB, 700 * MIB)}
    check(make_root(files), 300 * MIB, "memory.max of")


def test_v2_limit_of_an_ancestor(make_root: Make) -> None:
    files = {"proc/self/cgroup": "0::/a/b\n", **v2("/a", 800 * MIB, 750 * MIB), **v2("/a/b", 1000 * MIB, 700 * MIB)}
    check(make_root(files), 50 * MIB, "cgroup/a")


def test_page_cache_is_no_reason_to_refuse(make_root: Make) -> None:
    files = {"proc/self/cgroup": "0::/a\n", **v2("/a", 1000 * MIB, 990 * MIB, cache=600 * MIB)}
    check(make_root(files), 610 * MIB, "memory.max of")


def test_v1_limit_and_unlimited_ancestor(make_root: Make) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/jobs/x\n3:cpu,cpuacct:/other\n0::/\n",
        "proc/self/mountinfo": "\n".join([V2_MOUNT, V1_CPU_MOUNT, V1_MOUNT.format(root="/")]),
        **v1("", V1_NO_LIMIT, 0),
        **v1("/jobs", V1_NO_LIMIT, 5000 * MIB),
        **v1("/jobs/x", 500 * MIB, 450 * MIB, cache=10 * MIB),
    }
    check(make_root(files), 60 * MIB, "memory.limit_in_bytes of")


def test_v1_container_sees_its_group_as_the_root_of_the_mount(make_root: Make) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/docker/123\n",
        "proc/self/mountinfo": V1_MOUNT.format(root="/docker/123"),
        **v1("", 500 * MIB, 450 * MIB),
    }
    check(make_root(files), 50 * MIB, "memory.limit_in_bytes of")


def test_group_outside_of_what_is_mounted_falls_back_to_the_mount(make_root: Make) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/elsewhere\n",
        "proc/self/mountinfo": V1_MOUNT.format(root="/docker/123"),
        **v1("", 500 * MIB, 450 * MIB),
    }
    check(make_root(files), 50 * MIB, "memory.limit_in_bytes of")


def test_overfull_group_has_no_room(make_root: Make) -> None:
    check(make_root({"proc/self/cgroup": "0::/a\n", **v2("/a", MIB, 2 * MIB)}), -MIB, "memory.max of")


def test_this_machine_has_a_limit() -> None:
    assert room().nbytes < 1 << 50
