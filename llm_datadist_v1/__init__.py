"""The API under the name of its first generation: the classes of `llm_datadist`, except for `LLMDataDist`."""

from llm_datadist._compat import *
from llm_datadist_v1.kv_cache_manager import KvCacheManager
from llm_datadist_v1.llm_datadist import LLMDataDist

# The first generation had no `Cache`.
__all__ = [  # noqa: RUF022, the order is part of the interface
    "LLMClusterInfo",
    "LLMStatusCode",
    "LLMException",
    "LLMRole",
    "LlmConfig",
    "LLMConfig",
    "DataType",
    "Status",
    "CacheDesc",
    "CacheKey",
    "CacheKeyByIdAndIndex",
    "KvCache",
    "BlocksCacheKey",
    "LLMDataDist",
    "Placement",
    "RegisterMemStatus",
    "LayerSynchronizer",
    "TransferConfig",
    "CacheTask",
    "TransferWithCacheKeyConfig",
    "Memtype",
    "MemInfo",
    "TensorDesc",
    "Tensor",
    "KvCacheManager",
]
