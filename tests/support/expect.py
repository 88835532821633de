"""Say what a call must be refused with, and find out what became of a key."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from pairs import Prompt, bytes_desc

from llm_datadist import BlocksCacheKey, CacheKey, LLMException, LLMStatusCode


@contextmanager
def refusal(status: LLMStatusCode) -> Iterator[None]:
    """Expect an LLMException with a status; argument errors are ValueErrors as well."""
    with pytest.raises(LLMException) as caught:
        yield
    assert caught.value.status_code is status, caught.value
    assert isinstance(caught.value, ValueError) == (status is LLMStatusCode.LLM_PARAM_INVALID)


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
