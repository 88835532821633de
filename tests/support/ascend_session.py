"""A test run on the acl backend: on the devices that the environment names, else on the fake driver.

Every process of the run, and every worker of xdist with its peers, uses the build that the first one has made.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import ascend
import devices

LIBRARIES = ("LLM_DATADIST_ACL_LIBRARY", "LLM_DATADIST_HCCL_LIBRARY")
REPORTS = "FAKE_ASCEND_REPORT"


def start(worker: str) -> list[Path]:
    """Set the environment; give the folders to be removed at the end."""
    if devices.VARIABLE in os.environ and REPORTS not in os.environ:
        return []
    made = []
    if LIBRARIES[0] not in os.environ:
        made.append(Path(tempfile.mkdtemp(prefix="fake-ascend-")))
        built = ascend.build(made[0], sanitize=os.environ.get("FAKE_ASCEND_SANITIZE") == "1")
        os.environ |= {variable: str(path) for variable, path in zip(LIBRARIES, built, strict=True)}
    # Inside the build's folder: what a worker that crashes leaves goes with it.
    made.insert(0, Path(tempfile.mkdtemp(prefix="reports-", dir=Path(os.environ[LIBRARIES[0]]).parent)))
    os.environ |= fake_machine(worker, made[0])
    return made


def fake_machine(name: str, reports: Path) -> dict[str, str]:
    """Give the environment of a fake machine that no other process sees."""
    return {
        # Four a process, which is the most that a test uses.
        devices.VARIABLE: ",".join(f"{first}-{first + 3}" for first in range(0, 64, 4)),
        "FAKE_ASCEND_DEVICES": "64",
        "FAKE_ASCEND_MEMORY": str(64 << 30),
        "FAKE_ASCEND_DOMAIN": f"{os.getpid()}-{name}",
        REPORTS: str(reports),
    }


def end(folders: list[Path]) -> None:
    """Remove what the run has made."""
    for folder in folders:
        shutil.rmtree(folder)


def violations() -> str:
    """Tell what this process has done wrong since the last look."""
    if REPORTS not in os.environ or LIBRARIES[0] not in os.environ or not _is_loaded():
        return ""
    driver = ascend.Ascend.loaded()
    told = driver.violations()
    driver.reset()
    return told


def reported() -> str:
    """Tell what processes that have ended did wrong."""
    told = ""
    for report in Path(os.environ[REPORTS]).iterdir() if REPORTS in os.environ else ():
        told += f"{report.name}:\n{report.read_text()}"
        report.unlink()
    return told


def _is_loaded() -> bool:
    with open("/proc/self/maps") as maps:
        return os.environ[LIBRARIES[0]] in maps.read()
