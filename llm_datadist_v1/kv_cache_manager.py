"""`KvCacheManager`."""

from llm_datadist.kv_cache_manager import KvCacheManager

__all__ = ["KvCacheManager"]
