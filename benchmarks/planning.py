"""The compiled kernels by themselves: making plans from index lists, and copying them.

plan   seconds from two Python lists of random block indices to a plan, by number of blocks; what share that is of a copy
       of 4 KiB blocks of 50 tensors; and bytes of plan memory a run
copy   each copy kernel beside the C loop of the same kind, one thread, 64 MiB in scattered blocks

    python benchmarks/planning.py [--short]
"""

import argparse
import random
import statistics
import sys

import cbuild
import numpy as np
from loops import Loop, ratio, timed
from processes import table

from llm_datadist._kernels import hostcopy
from llm_datadist._kernels.runs import Bases, Plan, block_runs, indices

TENSORS, BLOCK = 50, 4096
COUNTS = (20, 200, 2000, 20000, 200000, 1000000)
COPIED = 64 << 20


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def plans(rounds):
    rows = []
    bases = Bases(range(0, TENSORS << 40, 1 << 40), range(1 << 39, (TENSORS << 40) + (1 << 39), 1 << 40))
    for count in COUNTS:
        print(f"planning: {count} blocks", file=sys.stderr)
        draw = random.Random(count)
        source, destination = (draw.sample(range(count), count) for _ in range(2))

        def plan():
            made = indices(source, "source"), indices(destination, "destination")
            return Plan(bases, block_runs(*made, count, count, BLOCK))

        seconds = [timed(plan) for _ in range(rounds)]
        before = resident()
        kept = plan()
        grown = resident() - before
        rows.append(
            {
                "blocks": count,
                "pieces": TENSORS * count,
                "median_us": statistics.median(seconds) * 1e6,
                "ns_a_block": statistics.median(seconds) / count * 1e9,
                "bytes_a_run": grown / len(kept.runs) if count >= 20000 else "-",
            }
        )
    table(f"planning random blocks, once for all {TENSORS} tensors", rows)
    return rows


def copies(rounds):
    loop = Loop(threads=1)
    twins = {"avx512": "avx512_nt_list", "avx2": "avx2_nt_list", "plain": "memcpy"}
    found = cbuild.kernels(loop.lib)
    rows = []
    for nbytes in (576, 4096, 65536, 1 << 20):
        count = COPIED // nbytes
        source, destination = (loop.memory(1, 2 * count, nbytes, salt) for salt in (0, 1))
        source.fill()
        draw = np.random.default_rng(1)
        here, there = (draw.permutation(2 * count)[:count].tolist() for _ in range(2))
        runs = block_runs(indices(here, "source"), indices(there, "destination"), 2 * count, 2 * count, nbytes)
        plan = Plan(Bases(source.addresses, destination.addresses), runs)
        for kernel in hostcopy.kernels():
            if kernel not in twins:
                continue
            former = hostcopy.select_kernel(kernel)
            loop.kernel = found[twins[kernel]]
            by_loop, ours = [], []
            for _ in range(rounds):
                by_loop.append(timed(loop.copy, source, destination, here, there))
                destination.wipe(there)
                ours.append(timed(hostcopy.copy, plan, None, None, 0, 1))
                if not destination.has(there, here, source):
                    raise SystemExit(f"kernel {kernel}, blocks of {nbytes}: wrong bytes")
            hostcopy.select_kernel(former)
            rows.append(
                {
                    "kernel": kernel,
                    "block": nbytes,
                    "GBps": count * nbytes / statistics.median(ours) / 1e9,
                    "of_loop": ratio(by_loop, ours),
                }
            )
        for memory in loop.held:
            source = destination = plan = None
            memory.close()
        loop.held.clear()
    table("copy kernels, one thread, 64 MiB scattered", rows)
    return rows


def run(short=False):
    return {"plan": plans(5 if short else 21), "copy": copies(5 if short else 21)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="few rounds")
    run(parser.parse_args().short)
