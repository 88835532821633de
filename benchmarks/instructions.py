"""Instructions of the hot calls, counted by valgrind: a slower call shows here on a busy machine too.

A process runs under callgrind and makes each call again and again between two marks, while the prompt that it pulls
from runs outside. What is counted is its main thread alone, in each of several batches; the lowest counts, as a batch in
which something else happened (the service thread took the GIL) has more. callgrind hides AVX-512 from the program, so
the kernels are those of AVX2.

    python benchmarks/instructions.py             # table beside what is recorded in instructions.json
    python benchmarks/instructions.py --record    # write that file

Counts are compared under the versions, and on the kind of processor, that they were recorded with. Elsewhere they are
only shown.
"""

import argparse
import ctypes
import gc
import json
import os
import platform
import random
import re
import select
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
RECORD = HERE / "instructions.json"
START_LIMIT_S, LIMIT_S = 60, 900
BATCHES, CALLS = 5, 10
#: callgrind counts each byte of `rep movsb`, so memcpy and memset must not use it; and where a growing allocation is
#: moved by the kernel, not copied, it does not matter what lies behind it.
TUNABLES = {
    "glibc.cpu.x86_rep_movsb_threshold": 1 << 40,
    "glibc.cpu.x86_rep_stosb_threshold": 1 << 40,
    "glibc.malloc.mmap_threshold": 32 << 10,
}
ADDRESS, PORT = "192.168.1.1", 26000
SLOTS, SLOT_BYTES = 64, 4096

#: Has callgrind write what it has counted, under a name, and begin anew.
MARK = "#include <valgrind/callgrind.h>\nvoid mark(const char *name) { CALLGRIND_DUMP_STATS_AT(name); }\n"


# ---- under valgrind


def measure(library: str) -> None:
    """Make all calls, each batch between two marks."""
    mark = ctypes.CDLL(library).mark

    def count(name: str, call, arguments=None) -> None:
        """Count a call with each of the arguments in turn, or with none."""
        given = iter(arguments or [()] * (CALLS * (BATCHES + 1)))
        for batch in range(BATCHES + 1):
            todo = [next(given) for _ in range(CALLS)]
            mark(b"between")
            for each in todo:
                call(*each)
            mark(b"batch of " + name.encode() if batch else b"warm-up")

    # Valgrind 3.19 does not know this system call. Whoever pulls only polls the descriptor, and so it costs the same.
    os.pidfd_open = lambda pid, flags=0: os.eventfd(0, os.EFD_CLOEXEC)
    gc.disable()
    count("nothing", lambda: None)
    kernels(count)
    decoder(count)
    prompt(count)


def kernels(count) -> None:
    from llm_datadist._engine.directory import REQUEST, Directory, Entry, Key, MappedDirectory
    from llm_datadist._kernels.runs import block_runs, indices
    from llm_datadist.backend import Window

    blocks = 10_000
    source, destination = (random.Random(seed).sample(range(blocks), blocks) for seed in (1, 2))

    def plan() -> None:
        block_runs(indices(source, "source"), indices(destination, "destination"), blocks, blocks, SLOT_BYTES)

    count("plan of 10 000 random blocks", plan)

    memory = (ctypes.c_uint64 * (1 << 21))()
    window = Window(ctypes.addressof(memory), ctypes.sizeof(memory))
    owner = Directory(window, 1)
    keys = [Key(REQUEST, i, 0) for i in range(1000)]
    looked_up = [(key, 0) for key in keys[:CALLS]]
    for number, key in zip(owner.take_entries(len(keys)), keys):
        owner.publish(number, key, Entry(number, 2 * number + 2, owner.layout.arena, 0, 0, 2))
    peer = MappedDirectory(window, 1)
    count("directory lookup, 1 000 keys", peer.find, looked_up * (BATCHES + 1))


def engine(role, cluster_id: int, listen_port: int | None = None):
    from llm_datadist import LLMConfig, LLMDataDist

    config = LLMConfig()
    config.device_id = 0
    if listen_port:
        config.listen_ip_info = f"{ADDRESS}:{listen_port}"
    made = LLMDataDist(role, cluster_id)
    # Valgrind gives a program few addresses, and a pool that is pulled from is mapped whole.
    made.init({**config.generate_options(), "llm.Simulator.AddressSpace": str(256 << 20)})
    return made


def description():
    from llm_datadist import CacheDesc, DataType

    return CacheDesc(2, [SLOTS, SLOT_BYTES], DataType.DT_UINT8)


def one_slot():
    from llm_datadist import CacheDesc, DataType

    return CacheDesc(2, [1, SLOT_BYTES], DataType.DT_UINT8)


def decoder(count) -> None:
    from llm_datadist import BlocksCacheKey, CacheKey, LLMClusterInfo, LLMRole, LLMStatusCode

    mine = engine(LLMRole.DECODER, 2)
    peer = LLMClusterInfo()
    peer.remote_cluster_id = 1
    peer.append_local_ip_info("192.168.1.2", PORT)
    peer.append_remote_ip_info(ADDRESS, PORT)
    linked = mine.link_clusters([peer], 60_000)
    if linked != (LLMStatusCode.LLM_SUCCESS, [LLMStatusCode.LLM_SUCCESS]):
        raise SystemExit(f"link_clusters gave {linked}")
    manager = mine.kv_cache_manager

    paged, blocks_key = manager.allocate_blocks_cache(description()), BlocksCacheKey(1, 0)
    count("pull_blocks, 2 x 4 KiB", lambda: manager.pull_blocks(blocks_key, paged, [3], [5]))
    count("copy_blocks, 1 block to 2, 2 tensors of 4 KiB", lambda: manager.copy_blocks(paged, {1: [2, 7]}))

    slot = manager.allocate_cache(one_slot())
    keys = [(CacheKey(1, req_id=i),) for i in range(CALLS * (BATCHES + 1))]
    count("pull_cache by request key, 2 x 4 KiB", lambda key: manager.pull_cache(key, slot), keys)
    count("allocate_cache + deallocate_cache", lambda: manager.deallocate_cache(manager.allocate_cache(one_slot())))
    mine.finalize()


def prompt(count) -> None:
    from llm_datadist import CacheKey, LLMRole

    mine = engine(LLMRole.PROMPT, 3, PORT + 1)
    manager = mine.kv_cache_manager
    key = [CacheKey(3, req_id=1)]

    def both() -> None:
        cache = manager.allocate_cache(one_slot(), key)
        manager.remove_cache_key(key[0])
        manager.deallocate_cache(cache)

    count("allocate_cache with a key + remove_cache_key + deallocate_cache", both)
    mine.finalize()


# ---- beside it


def serve() -> None:
    """Be the prompt that is pulled from, until stdin ends."""
    from llm_datadist import BlocksCacheKey, CacheKey, LLMRole

    mine = engine(LLMRole.PROMPT, 1, PORT)
    manager = mine.kv_cache_manager
    held = [manager.allocate_blocks_cache(description(), BlocksCacheKey(1, 0))]
    held += [manager.allocate_cache(one_slot(), [CacheKey(1, req_id=i)]) for i in range(CALLS * (BATCHES + 1))]
    print("ready", flush=True)
    sys.stdin.read()
    mine.finalize()


# ---- from outside


def counted(folder: Path) -> dict[str, int]:
    """Run it all and give the instructions of one call of each."""
    environment = dict(
        os.environ,
        PYTHONHASHSEED="0",
        GLIBC_TUNABLES=":".join(f"{name}={value}" for name, value in TUNABLES.items()),
        PYTHONDONTWRITEBYTECODE="1",
        LLM_DATADIST_BACKEND="simulator",
        LLM_DATADIST_NAMESPACE=f"instructions-{os.getpid()}",
    )
    me = [sys.executable, __file__]
    library = folder / "mark.so"
    compiler = [os.environ.get("CC", "gcc"), "-O1", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    subprocess.run(compiler, input=MARK, text=True, check=True)
    callgrind = [
        "valgrind",
        "--tool=callgrind",
        "--quiet",
        "--separate-threads=yes",
        f"--callgrind-out-file={folder}/counts",
    ]
    with subprocess.Popen(
        [*me, "--serve"], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        if not select.select([server.stdout], [], [], START_LIMIT_S)[0] or server.stdout.readline() != "ready\n":
            raise SystemExit("the prompt did not start")
        subprocess.run([*callgrind, *me, "--measure", str(library)], env=environment, check=True, timeout=LIMIT_S)
        server.stdin.close()
    lowest: dict[str, float] = {}
    for file in sorted(folder.glob("counts.*-01"), key=lambda file: int(file.suffix[1:].removesuffix("-01"))):
        text = file.read_text()
        batch = re.search(r"^desc: Trigger: Client Request: batch of (.*)", text, re.MULTILINE)
        total = re.search(r"^summary: (\d+)", text, re.MULTILINE)
        if batch and total:
            lowest[batch[1]] = min(lowest.get(batch[1], float("inf")), int(total[1]) / CALLS)
    # What marks and loop take.
    nothing = lowest.pop("nothing")
    return {name: round(count - nothing) for name, count in lowest.items()}


def versions() -> dict[str, str]:
    """What the counts depend on. Compiler and Cython are read from what was built, and may differ from those here."""
    import numpy

    from llm_datadist._kernels import hostcopy

    model = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    compiler = re.search(rb"GCC: \(.*?\) [\d.]+", Path(hostcopy.__file__).read_bytes())
    cython = next(name for name in sys.modules if re.fullmatch(r"_cython_\d+(_\w+)+", name))
    return {
        "python": platform.python_version(),
        "compiler": compiler[0].decode() if compiler else "unknown",
        "cython": cython.removeprefix("_cython_").replace("_", "."),
        "numpy": numpy.__version__,
        "libc": " ".join(platform.libc_ver()),
        "valgrind": subprocess.run(
            ["valgrind", "--version"], capture_output=True, text=True, check=True
        ).stdout.strip(),
        "processor": model[1] if model else platform.machine(),
    }


def show(now: dict[str, int], recorded: dict[str, int]) -> None:
    width = max(map(len, now))
    print(f"{'instructions of a call':<{width}} {'recorded':>12} {'now':>12} {'difference':>11}")
    for name, count in now.items():
        before = recorded.get(name)
        old, change = (f"{before:,}", f"{count / before - 1:+.1%}") if before else ("-", "-")
        print(f"{name:<{width}} {old:>12} {count:>12,} {change:>11}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="write instructions.json")
    parser.add_argument("--measure", metavar="LIBRARY", help=argparse.SUPPRESS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        return measure(arguments.measure)
    if arguments.serve:
        return serve()

    if shutil.which("valgrind") is None:
        raise SystemExit("valgrind is missing. On Debian: apt-get install valgrind")
    with tempfile.TemporaryDirectory() as folder:
        now = {"versions": versions(), "counts": counted(Path(folder))}
    if arguments.record:
        RECORD.write_text(json.dumps(now, indent=2) + "\n")
        show(now["counts"], {})
        return
    recorded = json.loads(RECORD.read_text())
    other = {
        name: f"{recorded['versions'].get(name)} (here {mine})"
        for name, mine in now["versions"].items()
        if mine != recorded["versions"].get(name)
    }
    show(now["counts"], {} if other else recorded["counts"])
    if other:
        print(
            "\nNot compared, as the recorded counts are of "
            + ", ".join(f"{name} {what}" for name, what in other.items())
        )


if __name__ == "__main__":
    main()
