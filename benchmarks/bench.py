"""All benchmarks of this library: progress on stderr, tables on stdout, every row in a JSON file under results/.

kernels    planning by number of blocks, and the copy kernels, beside the same C loops
pulls      blocks of 4 KiB to 1 MiB and rows of 4 MiB: this library, the machine's limit, and the peers that are installed
registered the same for private memory, which only the kernel can reach
scaling    1 000 to 1 000 000 pieces of 4 KiB, and 61 tensors of blocks of 576 bytes
latency    2 x 4 KiB: back to back, with pauses, with a prompt that computes in Python or is stopped; by request key
requests   allocate, fill, pull and deallocate, again and again
pushes     pushes, layer-wise transfers, contiguous pulls, local copies
links      first pull, 512 links, lookup, idle, import
threads    four threads and four peers; the longest pause of another thread

    python benchmarks/bench.py                        # half an hour, what a goal is judged by
    python benchmarks/bench.py --short                # a few minutes, to see where one stands
    python benchmarks/bench.py --only pulls,latency --no-peers
"""

import argparse
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import cbuild
import lifecycle
import links
import operations
import planning
import threads
from processes import setup, table

HERE = Path(__file__).parent
OURS = "llm_datadist"
#: Besides the limit, what a goal is judged by takes part in every round.
OWN = (OURS, f"{OURS}=reg", "cma=2", "cma=2@X=1")
LIMIT_S = 3600
#: How each peer is at its best on two cores, and the module that tells whether it is there.
PEERS = {
    "nixl=nothread": "nixl_cu12",
    "nixl": "nixl_cu12",
    "mooncake=0@MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER=16384": "mooncake",
    "ucxx@UCX_TLS=posix,self": "ucxx",
}
#: With more pieces in a call than this its queue is full.
MOONCAKE_PIECES = 16384
PACKAGES = ("numpy", "nixl-cu12", "mooncake-transfer-engine-non-cuda", "ucxx-cu12", "libucx-cu12", "llm-datadist")


class Run:
    """What all sections need to know."""

    def __init__(self, short, peers):
        self.short = short
        self.quiet = 9.0 if short else 0.15
        self.peers = [spec for spec, module in PEERS.items() if peers and importlib.util.find_spec(module)]
        found = cbuild.kernels(cbuild.load())
        self.kernel = next(name for name in ("avx512_nt_list", "avx2_nt_list", "memcpy") if name in found)
        self.limit = f"shm_c={self.kernel}:2"

    def rounds(self, few, many):
        return few if self.short else many

    def peers_py(self, title, impls, rounds, *shape, base=None, quiet=None):
        """Run peers.py and give its summary lines; a peer that fails is named and left out."""
        print(f"{title} ...", file=sys.stderr, flush=True)
        command = [sys.executable, str(HERE / "peers.py"), "--no-rows", "--impl", *impls, "--rounds", str(rounds)]
        if rounds > 9:
            # They are far from the limit, so that nine rounds tell enough.
            command += [
                "--seldom",
                *(spec for spec in impls if spec not in (self.limit, self.control(self.limit), *OWN)),
            ]
        command += [
            "--quiet",
            str(self.quiet if quiet is None else quiet),
            "--base",
            base or impls[0],
            *map(str, shape),
        ]
        environment = dict(os.environ, UCX_WARN_UNUSED_ENV_VARS="n", GLOG_minloglevel="2", PYTHONWARNINGS="ignore")
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, env=environment)
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        for line in lines:
            if "failed" in line:
                print(f"  {line['impl']} failed: {line['failed'].strip().splitlines()[-1]}", file=sys.stderr)
                if line["impl"].startswith(OURS):
                    raise SystemExit(line["failed"])
        return [dict(line, title=title) for line in lines if "summary" in line]

    def control(self, spec):
        return f"{spec}@X=1"


def short_name(spec):
    return (
        re.sub(r"@X=1$", " again", spec)
        .replace("@MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER=16384", "")
        .replace("@UCX_TLS=posix,self", "")
    )


def wide_table(title, rows, value):
    """Print one line for each implementation and one column for each title."""
    columns = list(dict.fromkeys(row["title"] for row in rows))
    names = list(dict.fromkeys(row["summary"] for row in rows))
    at = {(row["summary"], row["title"]): row for row in rows}
    table(
        title,
        [
            {"": short_name(name)} | {c: value(at[name, c]) if (name, c) in at else "-" for c in columns}
            for name in names
        ],
    )


def speeds(title, rows):
    wide_table(f"{title}: of the limit (median over rounds of the ratio)", rows, lambda row: f"{row.get('vs', 0):.3f}")
    wide_table(
        f"{title}: GB/s, lowest to highest round", rows, lambda r: f"{r['GBps']:.1f} ({r['lo']:.1f}-{r['hi']:.1f})"
    )
    for column in dict.fromkeys(row["title"] for row in rows):
        control = next((r for r in rows if r["title"] == column and r["summary"].endswith("@X=1")), None)
        if control and not (control["rounds"] >= 25 and 0.96 <= control["vs"] <= 1.04):
            print(f"  {column}: no verdict, {control['rounds']} quiet rounds, control {control['vs']:.3f}")


SHAPES = {
    "4 KiB": (4096, 2048),
    "16 KiB": (16384, 512),
    "64 KiB": (65536, 128),
    "256 KiB": (262144, 32),
    "1 MiB": (1 << 20, 8),
    "rows of 4 MiB": (4 << 20, 1),
}


def shape(nbytes, blocks):
    return "--block-bytes", nbytes, "--blocks", blocks, "--num-blocks", 3 if blocks == 1 else 2 * blocks


def fitting(peers, pieces):
    """Leave out what cannot take so many pieces in a call, or takes minutes."""
    return [spec.replace("mooncake=0", "mooncake") if pieces > MOONCAKE_PIECES else spec for spec in peers]


def kernels(run):
    return planning.run(run.short)


def pulls(run):
    rows = []
    for title, (nbytes, blocks) in SHAPES.items():
        impls = [
            run.limit,
            run.control(run.limit),
            OURS,
            "shm_c",
            "shm_c=memcpy",
            "cma=2",
            *fitting(run.peers, 64 * blocks),
        ]
        rows += run.peers_py(title, impls, run.rounds(5, 41), *shape(nbytes, blocks))
    speeds("pulls, 64 tensors, scattered blocks, 512 MiB (rows: 256 MiB)", rows)
    return rows


def registered(run):
    rows = []
    for title in ("16 KiB", "64 KiB", "256 KiB", "rows of 4 MiB"):
        nbytes, blocks = SHAPES[title]
        impls = ["cma=2", "cma=2@X=1", f"{OURS}=reg", "cma", *fitting(run.peers, 64 * blocks)]
        memory = "--src-mem", "anon", "--dst-mem", "anon"
        rows += run.peers_py(title, impls, run.rounds(3, 41), *shape(nbytes, blocks), *memory)
    speeds("registered private memory, beside process_vm_readv with 2 threads", rows)
    return rows


def scaling(run):
    rows = []
    for blocks in (20, 200, 2000) if run.short else (20, 200, 2000, 20000):
        impls = [run.limit, run.control(run.limit), OURS, *(fitting(run.peers, 50 * blocks) if blocks < 2000 else ())]
        counts = "--tensors", 50, "--blocks", blocks, "--num-blocks", blocks + max(1, blocks // 100)
        again = "--iters", 20 if blocks <= 200 else 1
        rows += run.peers_py(
            f"{50 * blocks}", impls, run.rounds(5, 41 if blocks < 20000 else 25), *counts, "--block-bytes", 4096, *again
        )
    speeds("scaling: pieces of 4 KiB, 50 tensors", rows)
    wide_table("scaling: ns a piece", rows, lambda row: f"{row['ms'] * 1e6 / row['pieces']:.0f}")
    small = []
    for blocks in (15000,) if run.short else (15000, 100000):
        counts = "--tensors", 61, "--blocks", blocks, "--num-blocks", blocks + blocks // 100, "--block-bytes", 576
        small += run.peers_py(f"{blocks}", [run.limit, run.control(run.limit), OURS], run.rounds(3, 25), *counts)
    speeds("scaling: 61 tensors, random blocks of 576 bytes", small)
    return rows + small


LATENCY = {
    "back to back": ("--iters", 1000),
    "pauses of 1 ms": ("--iters", 300, "--gap-us", 1000),
    "target busy": ("--iters", 1000, "--busy-target"),
    "target stopped": ("--iters", 1000, "--stop-target"),
    "pauses, busy": ("--iters", 300, "--gap-us", 1000, "--busy-target"),
}


def latency(run):
    rows = []
    for title, more in LATENCY.items():
        # Only these two answer while the target is stopped or holds the GIL.
        others = [] if "stopped" in title else run.peers
        size = "--tensors", 2, "--blocks", 1, "--num-blocks", 4096, "--block-bytes", 4096
        # Two of the pauses' processes are busy by design, so no round is called noisy for it.
        rows += run.peers_py(title, ["shm_c", OURS, "cma", *others], run.rounds(3, 9), *size, *more, quiet=9.0)
    wide_table("latency of 2 x 4 KiB: median us / p99", rows, lambda row: f"{row['p50_us']:.2f} / {row['p99_us']:.1f}")
    wide_table("latency: times shm_c", rows, lambda row: f"{1 / row['vs']:.2f}")
    return rows + lifecycle.run(run.short, ["latency"])["latency"]


def requests(run):
    return lifecycle.run(run.short, ["loop"])["loop"]


def pushes(run):
    return operations.run(run.short)["operations"]


SECTIONS = {f.__name__: f for f in (kernels, pulls, registered, scaling, latency, requests, pushes)}
SECTIONS |= {"links": lambda run: links.run(run.short), "threads": lambda run: threads.run(run.short)}


def machine():
    model = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "processor": model[1] if model else platform.machine(),
        "cpus": os.cpu_count(),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "python": platform.python_version(),
        "libc": " ".join(platform.libc_ver()),
        "versions": versions,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="few rounds, loud ones too")
    parser.add_argument("--only", help=f"sections, with commas between: {','.join(SECTIONS)}")
    parser.add_argument("--no-peers", action="store_true", help="leave out other libraries though they are installed")
    given = parser.parse_args()
    wanted = given.only.split(",") if given.only else list(SECTIONS)
    if unknown := set(wanted) - set(SECTIONS):
        parser.error(f"--only names {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")

    setup()
    run = Run(given.short, not given.no_peers)
    folder = HERE / "results"
    folder.mkdir(exist_ok=True)
    file = folder / f"bench-{time.strftime('%Y%m%d-%H%M%S')}.json"
    result = {"when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "short": given.short, "machine": machine()}
    print(json.dumps(result["machine"]))
    for name in wanted:
        print(f"== {name}", file=sys.stderr, flush=True)
        result[name] = SECTIONS[name](run)
        # After each section, so that an interrupted run leaves what it has.
        file.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\nsaved in {file.relative_to(HERE.parent)}")


if __name__ == "__main__":
    main()
