"""The decoder process: link to the prompt, and pull one cache of each kind."""

import ctypes

from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    DataType,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
)

config = LLMConfig()
config.device_id = 0
decoder = LLMDataDist(LLMRole.DECODER, 2)  # 2: the cluster id, another for each process
decoder.init(config.generate_options())
peer = LLMClusterInfo()
peer.remote_cluster_id = 1
peer.append_local_ip_info("192.168.1.2", 26000)  # the API wants one; nothing listens there
peer.append_remote_ip_info("192.168.1.1", 26000)
status, each = decoder.link_clusters([peer], timeout=5000)
print(status, each)
if status != LLMStatusCode.LLM_SUCCESS:
    raise SystemExit("not linked; the log says why")
manager = decoder.kv_cache_manager

contiguous = manager.allocate_cache(CacheDesc(4, [1, 1024], DataType.DT_FLOAT16))
manager.pull_cache(CacheKey(1, req_id=7), contiguous, batch_index=0)
paged = manager.allocate_blocks_cache(CacheDesc(4, [16, 256], DataType.DT_FLOAT16))
manager.pull_blocks(BlocksCacheKey(1, model_id=0), paged, [0, 1], [9, 4])  # block 0 -> 9, block 1 -> 4
for cache, offset in ((contiguous, 0), (paged, 9 * 512)):
    print([ctypes.string_at(address + offset, 4) for address in cache.per_device_tensor_addrs[0]])
decoder.finalize()
