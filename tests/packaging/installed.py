"""Check an installed wheel: its list of files, that it imports, and that two processes hand over real bytes.

Run by ``make wheel`` from an empty folder, with the interpreter of a fresh environment. No pytest there.
"""

import ctypes
import importlib.metadata
import multiprocessing
import os
import sys
from pathlib import Path

import llm_datadist.backends
from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    DataType,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
)

ROOT = Path(__file__).parents[2]
LISTEN = ("192.168.1.1", 26000)
LIMIT_S = 60


def expected_files() -> set[str]:
    files = set()
    for package, folder in (
        ("llm_datadist", ROOT / "llm_datadist"),
        ("llm_datadist/backends", ROOT / "backends"),
        ("llm_datadist_v1", ROOT / "llm_datadist_v1"),
    ):
        for suffix in ("py", "pyi", "pxd", "h", "typed"):
            files |= {f"{package}/{file.relative_to(folder).as_posix()}" for file in folder.rglob(f"*.{suffix}")}
    compiled = {f"llm_datadist/_kernels/{file.stem}.so" for file in (ROOT / "llm_datadist/_kernels").glob("*.pyx")}
    return files | compiled


def installed_files() -> set[str]:
    files = set()
    for file in importlib.metadata.files("llm-datadist") or ():
        if file.parts[0].endswith(".dist-info") or file.suffix == ".pyc" or file.parts[0] == "..":
            continue
        # ``runs.cpython-311-x86_64-linux-gnu.so`` is ``runs.so`` here.
        files.add(f"{file.parent.as_posix()}/{file.name.split('.')[0]}.so" if file.suffix == ".so" else file.as_posix())
    return files


def options(listen: str = "") -> dict[str, str]:
    config = LLMConfig()
    config.device_id = 0
    if listen:
        config.listen_ip_info = listen
    return config.generate_options()


def prompt(connection) -> None:
    datadist = LLMDataDist(LLMRole.PROMPT, 1)
    datadist.init(options(f"{LISTEN[0]}:{LISTEN[1]}"))
    desc = CacheDesc(2, [4, 16], DataType.DT_UINT8)
    contiguous = datadist.kv_cache_manager.allocate_cache(desc, [CacheKey(1, req_id=7)])
    paged = datadist.kv_cache_manager.allocate_blocks_cache(desc, BlocksCacheKey(1, 0))
    for cache in (contiguous, paged):
        for tensor, address in enumerate(cache.per_device_tensor_addrs[0]):
            ctypes.memmove(address, bytes(range(100 * tensor, 100 * tensor + 64)), 64)
    connection.send("ready")
    connection.poll(LIMIT_S)
    datadist.finalize()


def pull() -> list[bytes]:
    datadist = LLMDataDist(LLMRole.DECODER, 2)
    datadist.init(options())
    peer = LLMClusterInfo()
    peer.remote_cluster_id = 1
    peer.append_local_ip_info("192.168.1.2", 26000)
    peer.append_remote_ip_info(*LISTEN)
    status, _ = datadist.link_clusters([peer], 10000)
    assert status == LLMStatusCode.LLM_SUCCESS, status
    manager = datadist.kv_cache_manager
    contiguous = manager.allocate_cache(CacheDesc(2, [1, 16], DataType.DT_UINT8))
    manager.pull_cache(CacheKey(1, req_id=7), contiguous)
    paged = manager.allocate_blocks_cache(CacheDesc(2, [4, 16], DataType.DT_UINT8))
    manager.pull_blocks(BlocksCacheKey(1, 0), paged, [3, 0], [1, 2])
    got = [ctypes.string_at(address, 16) for address in contiguous.per_device_tensor_addrs[0]]
    got += [ctypes.string_at(address + 16, 32) for address in paged.per_device_tensor_addrs[0]]
    datadist.finalize()
    return got


def main() -> None:
    assert llm_datadist.backends.__file__ is not None
    assert Path(sys.prefix) in Path(llm_datadist.__file__).parents, llm_datadist.__file__
    assert "backends" not in sys.modules
    missing, extra = expected_files() - installed_files(), installed_files() - expected_files()
    assert not missing, f"the wheel lacks {sorted(missing)}"
    assert not extra, f"the wheel has {sorted(extra)} beyond the source tree"

    os.environ["LLM_DATADIST_NAMESPACE"] = f"installed-{os.getpid()}"
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=prompt, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    assert ours.poll(LIMIT_S), "the prompt process is not ready in time"
    assert ours.recv() == "ready"
    assert pull() == [
        bytes(range(16)),
        bytes(range(100, 116)),
        bytes(range(48, 64)) + bytes(range(16)),
        bytes(range(148, 164)) + bytes(range(100, 116)),
    ]
    ours.close()
    process.join(LIMIT_S)
    assert process.exitcode == 0, process.exitcode
    print(f"{len(installed_files())} files, two pulls: right (Python {sys.version.split()[0]})")


if __name__ == "__main__":
    main()
