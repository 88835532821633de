"""Section `lookup` of links.py: does a pull cost more the more caches its peer has?"""

import contextlib
import random
import statistics
import time

from processes import Process, address, bytes_desc, decoder, engine, fill, first_word, must_link, tensors_of

from llm_datadist import BlocksCacheKey, CacheKey, LLMClusterInfo, LLMRole, LLMStatusCode

NO_REQUEST = 2**64 - 1
PAGE = bytes_desc(1, 1, 4 << 10)
COUNTS = (10, 100, 1000, 10_000)


def prompt_with(state, cluster_id, count):
    """Have so many caches: every second one of blocks, the others with a slot of a request and one of a prefix."""
    engine(state, LLMRole.PROMPT, cluster_id, address(cluster_id))
    slots = bytes_desc(1, 2, 4 << 10)
    state.caches = []
    for i in range(count):
        if i % 2:
            keys = [CacheKey(cluster_id, req_id=i), CacheKey(cluster_id, NO_REQUEST, prefix_id=i)]
            cache = state.manager.allocate_cache(slots, keys)
        else:
            cache = state.manager.allocate_blocks_cache(PAGE, BlocksCacheKey(cluster_id, i))
        fill(tensors_of(cache), i)
        state.caches.append(cache)


def look(state, cluster_id, kind, numbers, anew):
    """Pull the page of each number by its key, over a new link if asked for; gives the median of seconds."""
    if anew:
        peer = LLMClusterInfo()
        peer.remote_cluster_id = cluster_id
        status, statuses = state.dd.unlink_clusters([peer], 60_000)
        if {status, *statuses} != {LLMStatusCode.LLM_SUCCESS}:
            raise RuntimeError(f"unlink_clusters gave {statuses}")
        must_link(state.dd, [cluster_id])
    if not hasattr(state, "page"):
        state.page = state.manager.allocate_cache(PAGE)
        state.blocks = state.manager.allocate_blocks_cache(PAGE)
    into = tensors_of(state.blocks if kind == "blocks" else state.page)[0]
    seconds = []
    for number in numbers:
        if kind == "blocks":
            key = BlocksCacheKey(cluster_id, number)
            begin = time.perf_counter()
            state.manager.pull_blocks(key, state.blocks, [0], [0])
        else:
            prefix = kind == "prefix"
            key = CacheKey(cluster_id, NO_REQUEST, prefix_id=number) if prefix else CacheKey(cluster_id, req_id=number)
            begin = time.perf_counter()
            # An offset keeps the key of a request from being released.
            state.manager.pull_cache(key, state.page, src_cache_offset=0)
        seconds.append(time.perf_counter() - begin)
        start = first_word(number, 0) + into.dtype.type(512 if kind == "prefix" else 0)
        if into[0] != start or into[-1] != start + into.dtype.type(511):
            raise RuntimeError(f"wrong data by the {kind} key {number}")
    return statistics.median(seconds)


def lookup(short):
    """a pull of 4 KiB from peers with 10 to 10 000 caches: of 5 keys again, of any key, of 5 keys new to the link"""
    rounds, pulls = (5, 200) if short else (25, 400)
    cases = [
        (kind, keys, n) for kind in ("blocks", "request", "prefix") for keys in ("again", "any", "new") for n in COUNTS
    ]
    found = {case: [] for case in cases}
    with contextlib.ExitStack() as stack:
        prompts = [stack.enter_context(Process()) for _ in COUNTS]
        for i, prompt in enumerate(prompts):
            prompt.start(prompt_with, i + 1, COUNTS[i])
        for prompt in prompts:
            prompt.result()
        one = stack.enter_context(Process())
        one.call(decoder, range(1, len(COUNTS) + 1))
        for number in range(rounds):
            rng = random.Random(number)
            for case in rng.sample(cases, len(cases)):
                kind, keys, count = case
                asked = range(0 if kind == "blocks" else 1, count, 2)
                if keys != "any":
                    asked = rng.sample(asked, 5)
                if keys != "new":
                    asked = rng.choices(asked, k=pulls)
                found[case].append(one.call(look, COUNTS.index(count) + 1, kind, asked, keys == "new"))
    rows = []
    for (kind, keys, count), seconds in found.items():
        ratios = [each / ten for each, ten in zip(seconds, found[kind, keys, 10], strict=True)]
        row = {"key": kind, "keys": keys, "caches": count, "pull_us": statistics.median(seconds) * 1e6}
        rows.append({**row, "to_10": statistics.median(ratios)})
    return rows
