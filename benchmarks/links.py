"""What links cost: the first pull beside later ones, many links, many caches, doing nothing, and the import.

python benchmarks/links.py                  # all sections
python benchmarks/links.py many --short     # one, with few rounds
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time

from lookups import lookup
from processes import (
    Process,
    address,
    bytes_desc,
    check,
    decoder,
    engine,
    fill,
    main,
    must_link,
    run_sections,
    tensors_of,
)

from llm_datadist import BlocksCacheKey, LLMDataDist, LLMRole

IMPORT = """
import sys, time
begin = time.perf_counter()
import llm_datadist
print((time.perf_counter() - begin) * 1e3, "numpy" in sys.modules)
"""


# ---------------------------------------------------------------- first

LARGE = bytes_desc(64, 160, 64 << 10)


def large_prompt(state, filled):
    engine(state, LLMRole.PROMPT, 1, address(1))
    if filled is not None:
        state.cache = state.manager.allocate_blocks_cache(LARGE, BlocksCacheKey(1, 0))
        if filled:
            fill(tensors_of(state.cache), 1)


def pull_large(state, filled, pulls):
    room = state.manager.allocate_blocks_cache(LARGE)
    blocks, seconds = list(range(LARGE.shape[0])), []
    for _ in range(pulls):
        begin = time.perf_counter()
        state.manager.pull_blocks(BlocksCacheKey(1, 0), room, blocks, blocks)
        seconds.append(time.perf_counter() - begin)
        if filled:
            check(tensors_of(room), 1)
        elif any(words.any() for words in tensors_of(room)):
            raise RuntimeError("fresh memory is not zero")
        for words in tensors_of(room):
            words[:] = 1
    return seconds


def first(short):
    """64 tensors of 10 MiB: the link, the first pull of all, and the median of 5 later ones, in fresh processes"""
    found = {"filled": [], "fresh": [], "no cache": []}
    for _ in range(2 if short else 7):
        for source, runs in found.items():
            filled = {"filled": True, "fresh": False}.get(source)
            with Process() as one, Process() as other:
                one.call(large_prompt, filled)
                linked = other.call(decoder, [1])
                seconds = [] if filled is None else other.call(pull_large, filled, 6)
                runs.append((linked, *seconds))
    rows = []
    for source, runs in found.items():
        links = [run[0] * 1e3 for run in runs]
        row = {"source": source, "rounds": len(runs), "link_ms": statistics.median(links), "link_worst_ms": max(links)}
        if source == "no cache":
            row.update(dict.fromkeys(("first_ms", "later_ms", "ratio", "ratio_least", "ratio_most")))
        else:
            later = [statistics.median(run[2:]) for run in runs]
            ratios = [run[1] / each for run, each in zip(runs, later, strict=True)]
            row["first_ms"] = statistics.median(run[1] for run in runs) * 1e3
            row["later_ms"] = statistics.median(later) * 1e3
            row.update(ratio=statistics.median(ratios), ratio_least=min(ratios), ratio_most=max(ratios))
        rows.append(row)
    return rows


# ---------------------------------------------------------------- many

SMALL = bytes_desc(2, 4, 64)
POOL = {"enable_cache_manager": True, "mem_pool_cfg": json.dumps({"memory_size": 1 << 20, "page_shift": 10})}
CROWD = 128


def crowd(state, begin):
    """Be many clusters, which the rule of one instance in a process is in the way of."""
    state.crowd = []
    for cluster_id in range(begin, begin + CROWD):
        engine(state, LLMRole.PROMPT, cluster_id, address(cluster_id), **POOL)
        fill(tensors_of(state.manager.allocate_blocks_cache(SMALL, BlocksCacheKey(cluster_id, 0))), cluster_id)
        state.crowd.append(state.dd)
        LLMDataDist.llm_engine_instance = None


def leave(state):
    for dd in state.crowd:
        dd.finalize()


def private_kib():
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith("RssAnon")).split()[1])


def link_many(state, cluster_ids):
    engine(state, LLMRole.DECODER, 999, **POOL)
    room = state.manager.allocate_blocks_cache(SMALL)
    before = private_kib()
    seconds = must_link(state.dd, cluster_ids)
    linked = private_kib()
    for cluster_id in cluster_ids:
        state.manager.pull_blocks(BlocksCacheKey(cluster_id, 0), room, range(4), range(4))
        check(tensors_of(room), cluster_id)
    pulled = private_kib()
    return seconds, (linked - before) / len(cluster_ids), (pulled - before) / len(cluster_ids)


def many(short):
    """512 links of one process in one call, to peers with pools of 1 MiB (128 in each of 4 processes)"""
    rows = []
    for number in range(1 if short else 5):
        with contextlib.ExitStack() as stack:
            peers = [stack.enter_context(Process()) for _ in range(4)]
            for i, peer in enumerate(peers):
                peer.start(crowd, 1000 + i * CROWD)
            for peer in peers:
                peer.result()
            with Process() as one:
                seconds, linked, pulled = one.call(link_many, list(range(1000, 1000 + 4 * CROWD)))
            for peer in peers:
                peer.call(leave)
        rows.append(
            {"round": number, "links": 4 * CROWD, "link_s": seconds, "kib_a_link": linked, "kib_after_pulls": pulled}
        )
    return rows


# ---------------------------------------------------------------- idle, import


def idle_end(state, role, cluster_id, settings):
    engine(state, role, cluster_id, address(cluster_id), **settings)
    prompt = role == LLMRole.PROMPT
    state.cache = state.manager.allocate_blocks_cache(SMALL, BlocksCacheKey(cluster_id, 0) if prompt else None)
    if prompt:
        fill(tensors_of(state.cache), 1)
    else:
        must_link(state.dd, [1])
        state.manager.pull_blocks(BlocksCacheKey(1, 0), state.cache, range(4), range(4))
        check(tensors_of(state.cache), 1)


def switches(pid):
    """Context switches of each thread so far."""
    found = {}
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(FileNotFoundError), open(f"/proc/{pid}/task/{thread}/status") as status:
            found[thread] = sum(int(line.split()[1]) for line in status if "ctxt_switches" in line)
    return found


def idle(short):
    """context switches of all threads of two linked processes that do nothing"""
    seconds = 2.0 if short else 5.0
    rows = []
    for mode, settings in (("kv", {}), ("cache manager", POOL)):
        with Process() as one, Process() as other:
            one.call(idle_end, LLMRole.PROMPT, 1, settings)
            other.call(idle_end, LLMRole.DECODER, 2, settings)
            pids = {"prompt": one.pid, "decoder": other.pid}
            # What the link left behind may end first; who never gets quiet is measured all the same.
            for _ in range(20):
                before = [switches(pid) for pid in pids.values()]
                time.sleep(0.5)
                if before == [switches(pid) for pid in pids.values()]:
                    break
            before = {side: switches(pid) for side, pid in pids.items()}
            time.sleep(seconds)
            for side, pid in pids.items():
                after = switches(pid)
                threads = before[side].keys() | after.keys()
                woken = sum(abs(after.get(thread, 0) - before[side].get(thread, 0)) for thread in threads)
                rows.append({"mode": mode, "side": side, "seconds": seconds, "threads": len(after), "switches": woken})
    return rows


def importing(short):
    """`import llm_datadist` in fresh interpreters"""
    answers = []
    for _ in range(5 if short else 21):
        done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, timeout=60, check=True)
        answers.append(done.stdout.split())
    spent = [float(ms) for ms, _ in answers]
    loaded = any(numpy != "False" for _, numpy in answers)
    return [{"runs": len(spent), "import_ms": statistics.median(spent), "worst_ms": max(spent), "numpy_loaded": loaded}]


SECTIONS = {"first": first, "many": many, "lookup": lookup, "idle": idle, "import": importing}


def run(short: bool) -> dict:
    """Run all sections; gives their rows by name."""
    return run_sections(SECTIONS, short)


if __name__ == "__main__":
    main(SECTIONS, __doc__)
