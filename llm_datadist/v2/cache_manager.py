"""`CacheManager`."""

from llm_datadist.cache_manager import CacheManager

__all__ = ["CacheManager"]
