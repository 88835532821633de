"""The prompt process: it reads the text and owns the caches that the decoder pulls."""

from __future__ import annotations

from multiprocessing.connection import Connection

from llm_datadist import KvCache, LLMConfig, LLMDataDist, LLMRole
from llm_datadist.demo.caches import (
    PAGED_BLOCKS,
    ContiguousKv,
    PagedKv,
    blocks_for,
    bulk_desc,
    bulk_words,
    contiguous_desc,
    paged_desc,
    scattered,
    views,
)
from llm_datadist.demo.model import TENSORS, KvStore, Model
from llm_datadist.demo.names import BULK, PAGED, PROMPT_CLUSTER, PROMPT_IP, PROMPT_PORT, REQUEST
from llm_datadist.demo.reports import LIMIT_S, Offer

__all__ = ["run"]


def run(connection: Connection, text: bytes) -> None:
    """Fill the caches, send the `Offer`, and keep the caches until the other end of the connection is closed."""
    config = LLMConfig()
    config.device_id = 0
    config.listen_ip_info = f"{PROMPT_IP}:{PROMPT_PORT}"
    datadist = LLMDataDist(LLMRole.PROMPT, PROMPT_CLUSTER)
    datadist.init(config.generate_options())
    try:
        manager = datadist.kv_cache_manager
        # Held until the end: a cache that nobody refers to any more is given back.
        contiguous = manager.allocate_cache(contiguous_desc(), [REQUEST])
        paged = manager.allocate_blocks_cache(paged_desc(), PAGED)
        bulk = manager.allocate_blocks_cache(bulk_desc(), BULK)
        blocks = scattered(1, PAGED_BLOCKS, blocks_for(len(text)))
        first_token = _read(text, ContiguousKv(views(contiguous)), PagedKv(views(paged), blocks))
        _fill(bulk)
        connection.send(Offer(first_token, blocks))
        connection.poll(2 * LIMIT_S)
    finally:
        datadist.finalize()


def _read(text: bytes, contiguous: KvStore, paged: KvStore) -> int:
    first_token = Model().forward(list(text), 0, contiguous)
    for tensor in range(TENSORS):
        paged.write(tensor, 0, contiguous.read(tensor, len(text)))
    return first_token


def _fill(bulk: KvCache) -> None:
    for tensor, view in enumerate(views(bulk)):
        for block in range(len(view)):
            view[block] = bulk_words(tensor, block)
