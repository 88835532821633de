"""What a type checker must see in the public types; read by test_typing.py, never run.

A line that ends in ``# E: text`` must be an error with this text; all others must be fine.
"""

from collections.abc import Sequence

from typing_extensions import assert_type

import llm_datadist
from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    CacheTask,
    DataType,
    KvCache,
    LayerSynchronizer,
    LLMClusterInfo,
    LLMConfig,
    LLMException,
    LLMStatusCode,
    MemInfo,
    Memtype,
    Placement,
    Tensor,
    TensorDesc,
    TransferConfig,
    TransferWithCacheKeyConfig,
)

desc = CacheDesc(2, (4, 8), DataType.DT_FLOAT16, placement=Placement.HOST)
CacheDesc(2, [4, 8], DataType.DT_FLOAT16, seq_len_dim_index=1)
CacheDesc("2", [4, 8], DataType.DT_FLOAT16)  # E: incompatible type "str"
assert_type(desc.size, int)
assert_type(desc.shape, Sequence[int])
desc.num_tensors = 3  # E: read-only

assert_type(CacheKey(1, req_id=2).prefix_id, int)
CacheKey("1", 2)  # E: incompatible type "str"
assert_type(BlocksCacheKey(prompt_cluster_id=1).model_id, int)
assert_type(CacheKeyByIdAndIndex(1, 2).batch_index, int)

assert_type(KvCache.create_cpu_cache(desc, [1, 2]).per_device_tensor_addrs, list[list[int]])
assert_type(Cache.create_cpu_cache(desc, [1, 2]).tensor_addrs, list[int])
MemInfo(Memtype.MEM_TYPE_HOST, 1, 2)
MemInfo(Placement.HOST, 1, 2)  # E: incompatible type "Placement"

config = LLMConfig()
config.device_id = 0
config.device_id = [0, 1]
config.device_id = "0"  # E: Incompatible types in assignment
config.sync_kv_timeout = "3000"
config.sync_kv_timeout = 3000
config.enable_cache_manager = 1  # E: Incompatible types in assignment
config.enable_cachemanager = True  # E: has no attribute "enable_cachemanager"
assert_type(config.mem_utilization, float)
assert_type(config.listen_ip_info, str)
assert_type(config.ge_options, dict[str, str])
assert_type(config.generate_options(), dict[str, str])

info = LLMClusterInfo()
info.remote_cluster_id = 1
info.append_local_ip_info("1.1.1.1", 1)
assert_type(info.remote_ip_info_list, list[tuple[int | str, int]])

transfer = TransferConfig(1, [2, 3], range(1))
transfer.src_layer_range = None
transfer.dst_addrs = (1, 2)
TransferConfig(1, None)  # E: incompatible type "None"
TransferWithCacheKeyConfig(BlocksCacheKey(1), range(1), range(1))
TransferWithCacheKeyConfig(CacheKey(1, 2), range(1), range(1))  # E: incompatible type "CacheKey"


class Ready(LayerSynchronizer):
    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return True


LayerSynchronizer()  # E: Cannot instantiate abstract class


def finish(task: CacheTask) -> None:
    assert_type(task.synchronize(), LLMStatusCode)
    assert_type(task.get_results(5), list[LLMStatusCode | None])


try:
    Tensor(Tensor.__new__(Tensor), TensorDesc(DataType.DT_INT8, [1])).numpy(copy=True).sum()
except LLMException as e:
    assert_type(e.status_code, LLMStatusCode)

print(llm_datadist.Nothing)  # E: has no attribute "Nothing"
