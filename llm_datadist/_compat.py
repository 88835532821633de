"""The public types, for the paths that programs of both generations import them from.

This is the one list: `llm_datadist.v2.llm_types` and `llm_datadist_v1.llm_types` hold exactly these names. Each module
beside them holds those of one module of `llm_datadist`. What is not there is left out on purpose: nobody outside of
the original used it.
"""

from llm_datadist.cache_types import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    CacheTask,
    KvCache,
    LayerSynchronizer,
    MemInfo,
    Memtype,
    Placement,
    RegisterMemStatus,
    TransferConfig,
    TransferWithCacheKeyConfig,
    int_to_mem_status_dict,
)
from llm_datadist.configs import LLMClusterInfo, LLMConfig, LlmConfig, LLMRole
from llm_datadist.data_type import DataType
from llm_datadist.status import LLMException, LLMStatusCode, Status
from llm_datadist.tensor import Tensor, TensorDesc

__all__ = [
    "BlocksCacheKey",
    "Cache",
    "CacheDesc",
    "CacheKey",
    "CacheKeyByIdAndIndex",
    "CacheTask",
    "DataType",
    "KvCache",
    "LLMClusterInfo",
    "LLMConfig",
    "LLMException",
    "LLMRole",
    "LLMStatusCode",
    "LayerSynchronizer",
    "LlmConfig",
    "MemInfo",
    "Memtype",
    "Placement",
    "RegisterMemStatus",
    "Status",
    "Tensor",
    "TensorDesc",
    "TransferConfig",
    "TransferWithCacheKeyConfig",
    "int_to_mem_status_dict",
]
