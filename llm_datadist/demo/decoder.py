"""The decoder process: it pulls the keys and values of a text it never saw, and goes on writing."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection

import numpy as np

from llm_datadist import KvCacheManager, LLMClusterInfo, LLMConfig, LLMDataDist, LLMRole, LLMStatusCode
from llm_datadist.demo.caches import (
    BULK_BLOCKS,
    PAGED_BLOCKS,
    ContiguousKv,
    PagedKv,
    blocks_for,
    bulk_desc,
    bulk_words,
    contiguous_desc,
    digest,
    paged_desc,
    scattered,
    views,
)
from llm_datadist.demo.model import HEAD_SIZE, KV_HEADS, TENSORS, KvStore, Model
from llm_datadist.demo.names import BULK, PAGED, PROMPT_CLUSTER, PROMPT_IP, PROMPT_PORT, REQUEST
from llm_datadist.demo.reports import LIMIT_S, NEW_TOKENS, Answer, Offer, Pull, Report

__all__ = ["run"]

_CLUSTER = 2


def run(connection: Connection, length: int, offer: Offer) -> None:
    """Link to the prompt, pull three times, and send the `Report`."""
    config = LLMConfig()
    config.device_id = 0
    config.sync_kv_timeout = LIMIT_S * 1000
    datadist = LLMDataDist(LLMRole.DECODER, _CLUSTER)
    datadist.init(config.generate_options())
    try:
        link_s = _link(datadist)
        manager, model = datadist.kv_cache_manager, Model()
        contiguous = _pull_contiguous(manager, model, length, offer)
        paged = _pull_paged(manager, model, length, offer)
        connection.send(Report(link_s, contiguous, paged, *_pull_bulk(manager)))
    finally:
        datadist.finalize()


def _link(datadist: LLMDataDist) -> float:
    prompt = LLMClusterInfo()
    prompt.remote_cluster_id = PROMPT_CLUSTER
    prompt.append_local_ip_info("192.168.1.2", 26000)
    prompt.append_remote_ip_info(PROMPT_IP, PROMPT_PORT)
    start = time.perf_counter()
    status, per_cluster = datadist.link_clusters([prompt], LIMIT_S * 1000)
    if status != LLMStatusCode.LLM_SUCCESS:
        raise SystemExit(f"the decoder could not link to the prompt: {status}, {per_cluster}")
    return time.perf_counter() - start


def _pull_contiguous(manager: KvCacheManager, model: Model, length: int, offer: Offer) -> Pull:
    cache = manager.allocate_cache(contiguous_desc())
    store = ContiguousKv(views(cache))
    tensor_bytes = length * KV_HEADS * HEAD_SIZE * 2  # float16
    start = time.perf_counter()
    manager.pull_cache(REQUEST, cache, batch_index=0, size=tensor_bytes)
    seconds = time.perf_counter() - start
    return Pull(TENSORS * tensor_bytes, seconds, _continue(model, store, length, offer))


def _pull_paged(manager: KvCacheManager, model: Model, length: int, offer: Offer) -> Pull:
    cache = manager.allocate_blocks_cache(paged_desc())
    table = scattered(2, PAGED_BLOCKS, blocks_for(length + NEW_TOKENS))
    blocks = table[: len(offer.blocks)]
    start = time.perf_counter()
    manager.pull_blocks(PAGED, cache, offer.blocks, blocks)
    seconds = time.perf_counter() - start
    nbytes = TENSORS * len(blocks) * (cache.cache_desc.size // PAGED_BLOCKS)
    return Pull(nbytes, seconds, _continue(model, PagedKv(views(cache), table), length, offer))


def _continue(model: Model, store: KvStore, length: int, offer: Offer) -> Answer:
    kv = digest(store, length)
    return Answer(kv, model.generate(offer.first_token, length, NEW_TOKENS, store))


def _pull_bulk(manager: KvCacheManager) -> tuple[int, float, bool]:
    cache = manager.allocate_blocks_cache(bulk_desc())
    source = list(range(BULK_BLOCKS))
    destination = scattered(3, BULK_BLOCKS, BULK_BLOCKS)
    seconds = []
    for _ in range(6):  # the first pull also maps the pages
        start = time.perf_counter()
        manager.pull_blocks(BULK, cache, source, destination)
        seconds.append(time.perf_counter() - start)
    equal = all(
        np.array_equal(view[to], bulk_words(tensor, block))
        for tensor, view in enumerate(views(cache))
        for block, to in zip(source, destination, strict=True)
    )
    return cache.cache_desc.num_tensors * cache.cache_desc.size, min(seconds[1:]), equal
