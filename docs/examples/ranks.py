"""Link a set of processes that a rank table describes (`CacheManager` mode)."""

import json
import time

import numpy as np
from both import engine, run

from llm_datadist import BlocksCacheKey, CacheDesc, DataType, LLMRole, RegisterMemStatus

PAGED = CacheDesc(2, [8, 64], DataType.DT_FLOAT)
RANK_OF = {1: 0, 2: 1}  # cluster id -> rank, ascending, the same in all processes
TABLE = json.dumps(
    {
        "version": "1.0",
        "status": "completed",
        "server_count": "1",
        "server_list": [
            {
                "server_id": "192.168.1.1",
                "device": [
                    {"device_id": "0", "device_ip": "10.0.0.1", "rank_id": "0"},
                    {"device_id": "1", "device_ip": "10.0.0.2", "rank_id": "1"},
                ],
            }
        ],
    }
)


def linked(made):
    """Meet the other members. The call returns at once; the links are made in the background."""
    comm = made.link("prompt-1-decoder-2", RANK_OF, TABLE)
    end = time.monotonic() + 30
    while (status := made.query_register_mem_status(comm)) == RegisterMemStatus.PREPARING:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert status == RegisterMemStatus.OK
    return comm


def prompt(pipe):
    made = engine(LLMRole.PROMPT, 1, enable_cache_manager=True, link_total_time=30)
    tensors = [np.full(PAGED.shape, 7 + i, np.float32) for i in range(2)]
    made.cache_manager.register_blocks_cache(PAGED, tensors, BlocksCacheKey(1, 0))
    comm = linked(made)
    pipe.recv()
    made.unlink(comm)
    made.finalize()


def decoder(pipe):
    made = engine(LLMRole.DECODER, 2, enable_cache_manager=True, link_total_time=30)
    tensors = [np.zeros(PAGED.shape, np.float32) for _ in range(2)]
    cache = made.cache_manager.register_blocks_cache(PAGED, tensors)
    comm = linked(made)
    made.cache_manager.pull_blocks(BlocksCacheKey(1, 0), cache, [0], [3])
    print([int(tensor[3, 0]) for tensor in tensors])
    made.unlink(comm)
    pipe.send("done")
    made.finalize()


if __name__ == "__main__":
    run(prompt, decoder)
