"""The life of requests: a cache with a key is allocated, filled, pulled by its key and deallocated on both sides.

loop      100 requests of 64 tensors of 4 MiB: each step's time, and the pull beside a C loop with two threads
latency   `pull_cache` of 2 x 4 KiB by a request key, which the pull spends

    python benchmarks/lifecycle.py [--short] [--only latency]
"""

import argparse
import gc
import statistics
import sys
import time
from types import SimpleNamespace

from loops import Blocks, Loop, quantile, ratio, timed
from processes import Process, address, ask, become, bytes_desc, decoder, engine, setup, table

from llm_datadist import CacheKey, LLMRole

TENSORS, ROW = 64, 4 << 20
REQUESTS = 100
#: Rounds after which nothing is new any more.
WARM = 2
PIECE = 4096
#: Pulls by which code and caches become warm.
FIRST = 100


class Prompt:
    """Has the caches that are pulled."""

    def __init__(self):
        engine(self, LLMRole.PROMPT, 1, address(1))

    def allocate(self, tensors, nbytes, request):
        """Give the seconds it took; the cache is filled then."""
        desc, key = bytes_desc(tensors, 1, nbytes), CacheKey(1, request, 0)
        began = time.perf_counter()
        self.cache = self.manager.allocate_cache(desc, [key])
        taken = time.perf_counter() - began
        Blocks(self.cache.per_device_tensor_addrs[0], 1, nbytes, request).fill()
        return taken

    def deallocate(self):
        return timed(self.manager.deallocate_cache, self.cache)

    def many(self, count):
        for request in range(count):
            self.allocate(2, PIECE, request)


def request_loop(peer, mine, requests):
    manager, loop = mine.manager, Loop()
    source, destination = (loop.memory(TENSORS, 1, ROW, salt) for salt in (1, 2))
    source.fill()
    seconds = {
        name: [] for name in ("loop", "pull", "control", "peer's allocate + deallocate", "allocate + deallocate")
    }
    desc = bytes_desc(TENSORS, 1, ROW)

    def by_loop(name):
        destination.wipe([0])
        seconds[name].append(timed(loop.copy, source, destination, [0], [0]))
        if not destination.has([0], [0], source):
            raise SystemExit("the loop: wrong bytes")

    def by_pull(request):
        theirs = peer.call(ask, "allocate", TENSORS, ROW, request)
        began = time.perf_counter()
        cache = manager.allocate_cache(desc)
        taken = time.perf_counter() - began
        key = CacheKey(1, request, 0)
        seconds["pull"].append(timed(manager.pull_cache, key, cache))
        got = Blocks(cache.per_device_tensor_addrs[0], 1, ROW)
        if not got.has([0], [0], Blocks([], 1, ROW, request), every_word=request % 10 == 0):
            raise SystemExit(f"request {request}: wrong bytes")
        got.wipe([0])
        seconds["allocate + deallocate"].append(taken + timed(manager.deallocate_cache, cache))
        seconds["peer's allocate + deallocate"].append(theirs + peer.call(ask, "deallocate"))

    for request in range(requests):
        steps = [lambda: by_loop("loop"), lambda: by_pull(request), lambda: by_loop("control")]
        for step in steps[request % 3 :] + steps[: request % 3]:
            step()
        if request % 10 == 9:
            print(f"requests: {request + 1} of {requests}", file=sys.stderr)
    pulls = seconds["pull"]
    warm = {name: values[WARM:] for name, values in seconds.items()}
    rows = [
        {
            "step": name,
            "first_ms": values[0] * 1e3,
            "median_ms": statistics.median(warm[name]) * 1e3,
            "worst_ms": max(warm[name]) * 1e3,
            "of_loop": ratio(warm["loop"], warm[name]) if name in ("pull", "control") else "-",
        }
        for name, values in seconds.items()
    ]
    table(
        f"request loop, {len(pulls)} requests of {TENSORS} x 4 MiB; from the {WARM + 1}rd on: median, worst, and speed beside "
        f"{loop.name} (1 is as fast; control is the loop once more)",
        rows,
    )
    return rows


def latency(peer, mine, pulls):
    manager = mine.manager
    # Into a slot each, so that all can be checked afterwards.
    cache = manager.allocate_cache(bytes_desc(2, pulls, PIECE))
    got = Blocks(cache.per_device_tensor_addrs[0], pulls, PIECE)
    peer.call(ask, "many", pulls)
    seconds = []
    keys = [CacheKey(1, request, 0) for request in range(pulls)]
    gc.collect()
    gc.disable()
    for request, key in enumerate(keys):
        seconds.append(timed(manager.pull_cache, key, cache, request))
    gc.enable()
    for request in range(pulls):
        if not got.has([request], [0], Blocks([], 1, PIECE, request)):
            raise SystemExit(f"request {request}: wrong bytes")
    manager.deallocate_cache(cache)
    seconds = seconds[FIRST:]
    row = {
        "call": "pull_cache by request key, 2 x 4 KiB",
        "median_us": statistics.median(seconds) * 1e6,
        "p99_us": quantile(seconds, 0.99) * 1e6,
        "calls": len(seconds),
    }
    table("latency by request key", [row])
    return [row]


SECTIONS = {"loop": (request_loop, 10, REQUESTS), "latency": (latency, 300, 2000)}


def run(short=False, only=None):
    setup()
    rows = {}
    for name, (section, few, many) in SECTIONS.items():
        if only and name not in only:
            continue
        with Process() as peer:
            peer.call(become, Prompt)
            mine = SimpleNamespace()
            decoder(mine, [1])
            rows[name] = section(peer, mine, few if short else many)
            mine.dd.finalize()
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="few requests")
    parser.add_argument("--only", help="sections, with commas between")
    given = parser.parse_args()
    run(given.short, given.only and given.only.split(","))
