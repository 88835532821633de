"""Compile the fake Ascend driver."""

from __future__ import annotations

import subprocess
from collections.abc import Collection
from pathlib import Path

HERE = Path(__file__).parent
PARTS = {
    "libfake_acl.so": ("state.c", "handles.c", "devices.c", "memory.c", "streams.c", "acl_memory.c", "acl_streams.c"),
    "libfake_hccl.so": ("json.c", "rank_table.c", "rendezvous.c", "service.c", "comms.c", "transfers.c"),
}
# Declared by no header of CANN 8.1, or by a later one only.
NEWER_THAN_8_1 = (
    "aclFinalizeReference",
    "aclrtMemcpyBatch",
    "aclrtMemcpyBatchAsync",
    "aclrtGetPhyDevIdByLogicDevId",
    "aclrtGetDeviceInfo",
    "aclrtMemGetAddressRange",
)


def build(directory: Path, *, lacks: Collection[str] = (), sanitize: bool = False) -> tuple[Path, Path]:
    """
    Compile both libraries into a directory.

    Parameters
    ----------
    directory : Path
        Where the two files go; it must exist.
    lacks : collection of str
        Functions that the libraries shall not export, as those of another version don't.
    sanitize : bool
        Compile with the address sanitizer. The process that loads it needs ``libasan`` in ``LD_PRELOAD``.

    Returns
    -------
    tuple of Path
        The ACL library and the HCCL library; the second finds the first in its own directory. A process can load
        the libraries of one build only: both are loaded for all the world to see, so names of two would mix.
    """
    directory = directory.resolve()
    exports = directory / "exports"
    hidden = "".join(f"{name}; " for name in lacks)
    exports.write_text(f"{{ global: acl*; Hccl*; fake_*; local: {hidden}*; }};\n")
    flags = ["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fPIC", "-fvisibility=hidden", "-pthread"]
    # The sanitizer's own names are defined only in the process that preloads it.
    flags += ["-fsanitize=address", "-fno-omit-frame-pointer"] if sanitize else ["-Wl,-z,defs"]
    acl, hccl = (directory / name for name in PARTS)
    for library, needed in ((acl, []), (hccl, [str(acl), "-Wl,-rpath,$ORIGIN"])):
        link = ["-shared", f"-Wl,-soname,{library.name}", f"-Wl,--version-script,{exports}"]
        sources = [str(HERE / name) for name in PARTS[library.name]]
        subprocess.run(["gcc", *flags, *link, "-o", str(library), *sources, *needed], check=True)
    return acl, hccl
