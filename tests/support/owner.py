"""What tests let a prompt's process do with caches beyond single calls."""

import gc
from typing import Any

from llm_datadist import CacheDesc


def allocate_and_lose(manager: Any, desc: CacheDesc, keys: list[Any]) -> int:
    """Allocate a cache, let its object be collected, and give its id."""
    cache = manager.allocate_cache(desc, keys)
    cache_id: int = cache.cache_id
    del cache
    gc.collect()
    return cache_id
