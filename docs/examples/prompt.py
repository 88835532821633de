"""The prompt process: fill two caches, and keep them until the decoder has pulled. Start it first."""

import ctypes

from llm_datadist import BlocksCacheKey, CacheDesc, CacheKey, DataType, LLMConfig, LLMDataDist, LLMRole

config = LLMConfig()
config.device_id = 0
config.listen_ip_info = "192.168.1.1:26000"
prompt = LLMDataDist(LLMRole.PROMPT, 1)  # 1: the cluster id, by which the decoder names it
prompt.init(config.generate_options())
manager = prompt.kv_cache_manager

# Two layers of K and V = four tensors; each has room for 2 requests of 1024 numbers. Slot 0 is bound to request 7.
contiguous = manager.allocate_cache(CacheDesc(4, [2, 1024], DataType.DT_FLOAT16), [CacheKey(1, req_id=7)])
# The same for paged attention: 8 blocks of 256 numbers in each tensor.
paged = manager.allocate_blocks_cache(CacheDesc(4, [8, 256], DataType.DT_FLOAT16), BlocksCacheKey(1, model_id=0))
for cache in (contiguous, paged):
    for tensor, address in enumerate(cache.per_device_tensor_addrs[0]):
        ctypes.memset(address, ord("A") + tensor, cache.cache_desc.size)

input("The caches are filled. Start the decoder, then press Enter to end.\n")
prompt.finalize()
