"""A program that hands a paged cache over, and knows nothing of the backend. Usage: prompt|decoder PORT."""

from __future__ import annotations

import ctypes
import sys

from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    DataType,
    KvCache,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
    Placement,
)

BLOCKS, BLOCK_BYTES, TENSORS = 8, 4096, 4
SHAPE = [BLOCKS, BLOCK_BYTES]
ON_DEVICE = CacheDesc(TENSORS, SHAPE, DataType.DT_UINT8)
ON_HOST = CacheDesc(TENSORS, SHAPE, DataType.DT_UINT8, placement=Placement.HOST)
SOURCE, DESTINATION = [6, 1, 3], [0, 5, 2]


def block(tensor: int, number: int) -> bytes:
    """Give the bytes of one block of the prompt."""
    return bytes((31 * tensor + 7 * number + i) % 251 for i in range(BLOCK_BYTES))


def main(role: str, port: int) -> None:
    """Be one of the two."""
    config = LLMConfig()
    config.device_id = 0 if role == "prompt" else 1
    if role == "prompt":
        config.listen_ip_info = f"127.0.0.1:{port}"
    datadist = LLMDataDist(LLMRole[role.upper()], 1 if role == "prompt" else 2)
    datadist.init(config.generate_options())
    manager = datadist.kv_cache_manager
    buffers = [ctypes.create_string_buffer(BLOCKS * BLOCK_BYTES) for _ in range(TENSORS)]
    host = KvCache.create_cpu_cache(ON_HOST, [ctypes.addressof(buffer) for buffer in buffers])
    everything = {number: number for number in range(BLOCKS)}
    if role == "prompt":
        for tensor, buffer in enumerate(buffers):
            buffer.raw = b"".join(block(tensor, number) for number in range(BLOCKS))
        cache = manager.allocate_blocks_cache(ON_DEVICE, BlocksCacheKey(1, 0))
        manager.swap_blocks(host, cache, everything)
        print("ready", flush=True)
        sys.stdin.readline()
    else:
        cache = manager.allocate_blocks_cache(ON_DEVICE)
        cluster = LLMClusterInfo()
        cluster.remote_cluster_id = 1
        cluster.append_local_ip_info("127.0.0.1", 0)
        cluster.append_remote_ip_info("127.0.0.1", port)
        result, _ = datadist.link_clusters([cluster], 10000)
        assert result == LLMStatusCode.LLM_SUCCESS, result
        manager.pull_blocks(BlocksCacheKey(1, 0), cache, SOURCE, DESTINATION)
        manager.swap_blocks(cache, host, everything)
        for tensor, buffer in enumerate(buffers):
            for source, destination in zip(SOURCE, DESTINATION, strict=True):
                found = buffer.raw[destination * BLOCK_BYTES : (destination + 1) * BLOCK_BYTES]
                assert found == block(tensor, source), (tensor, source)
        shown = manager.get_cache_tensors(cache, 1)[0].numpy(True)
        assert shown[DESTINATION[0]].tobytes() == block(1, SOURCE[0])
        datadist.unlink_clusters([cluster], 10000)
        print("equal", flush=True)
    datadist.finalize()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
