"""Find out what became of a key."""

from __future__ import annotations

from pairs import Prompt, bytes_desc

from llm_datadist import BlocksCacheKey, CacheKey, LLMException, LLMStatusCode


def is_bound(prompt: Prompt, key: CacheKey | BlocksCacheKey) -> bool:
    """Find out whether a key is bound, by trying to bind it to another cache."""
    try:
        if isinstance(key, BlocksCacheKey):
            probe = prompt.manager.allocate_blocks_cache(bytes_desc(1, 1, 8), key)
        else:
            probe = prompt.manager.allocate_cache(bytes_desc(1, 1, 8), [key])
    except LLMException as e:
        if e.status_code is LLMStatusCode.LLM_FAILED:
            return True
        raise
    if isinstance(key, CacheKey):
        prompt.manager.remove_cache_key(key)
    prompt.manager.deallocate_cache(probe)
    return False
