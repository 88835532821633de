"""Move KV caches between prompt and decoder processes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

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
)
from llm_datadist.configs import LLMClusterInfo, LLMConfig, LlmConfig, LLMRole
from llm_datadist.data_type import DataType
from llm_datadist.status import LLMException, LLMStatusCode, Status

if TYPE_CHECKING:
    from llm_datadist.datadist import LLMDataDist
    from llm_datadist.kv_cache_manager import KvCacheManager
    from llm_datadist.tensor import Tensor, TensorDesc

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
    "Cache",
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

#: The names that both generations of the API share.
v2_list = __all__[:-3]

# These need numpy or the compiled kernels, which importing the types must not.
_LAZY = {
    "LLMDataDist": "llm_datadist.datadist",
    "KvCacheManager": "llm_datadist.kv_cache_manager",
    "Tensor": "llm_datadist.tensor",
    "TensorDesc": "llm_datadist.tensor",
}

if not TYPE_CHECKING:  # else a type checker would believe in any name

    def __getattr__(name: str) -> object:
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
