"""Allocation, deallocation and key removal refuse what they must, and leave nothing allocated or bound then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pairs import Decoder, Prompt, bytes_desc, options
from refusals import PARAM_INVALID, Expected, name_of, refuses

from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    KvCache,
    KvCacheManager,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
    Placement,
)

NONE = 2**64 - 1
FAILED = LLMStatusCode.LLM_FAILED
DESC = bytes_desc(2, 2, 64)


@pytest.fixture
def make() -> Iterator[Callable[..., KvCacheManager]]:
    """Give a function that starts an engine of a role in this process; it ends with the test."""
    made = []

    def start(role: LLMRole = LLMRole.PROMPT, **extra: Any) -> KvCacheManager:
        dd = LLMDataDist(role, 1)
        made.append(dd)
        dd.init(options("10.0.0.1:26000" if role is LLMRole.PROMPT else None, **extra))
        return dd.kv_cache_manager

    yield start
    for dd in made:
        dd.finalize()


def check_unharmed(manager: KvCacheManager, next_id: int = 1) -> None:
    """Check that the refused call took neither memory nor an id nor a key (S-10, S-15)."""
    assert manager._engine.caches.used() == [0]
    role = manager._role
    keys = [CacheKey(1, 10), CacheKey(1, 11)] if role is LLMRole.PROMPT else []
    assert manager.allocate_cache(DESC, keys).cache_id == next_id
    blocks = BlocksCacheKey(1) if role is not LLMRole.DECODER else None
    assert manager.allocate_blocks_cache(DESC, blocks).cache_id == next_id + 1


def desc_with(shape: list[int], num_tensors: int = 2, **extra: Any) -> CacheDesc:
    return CacheDesc(num_tensors, shape, DataType.DT_UINT8, **extra)


def row(rule: str, expected: Expected, *words: object, **changes: Any) -> Any:
    return pytest.param(expected, words, changes, id=name_of(rule, changes))


TOO_MANY = desc_with([1] * 32)
DESCRIPTIONS = [
    row("E-160", TypeError, "cache_desc", "CacheDesc", cache_desc=1),
    row("E-160", TypeError, "cache_desc", "CacheDesc", cache_desc=[2, 2, 64]),
    # api 9.1: None passes the type check and ends in an AttributeError.
    row("E-160", AttributeError, cache_desc=None),
    row("E-161", PARAM_INVALID, "num_tensors is 0", cache_desc=desc_with([2, 64], 0)),
    row("E-162", PARAM_INVALID, "placement", "HOST", "DEVICE", cache_desc=desc_with([2, 64], placement=Placement.HOST)),
    row("E-164", PARAM_INVALID, "32", "1 to 31", cache_desc=TOO_MANY),
    row("E-164", PARAM_INVALID, "0", cache_desc=desc_with([2, 0])),
    row("E-164", PARAM_INVALID, "-1", cache_desc=desc_with([2, -1])),
    row("E-164", PARAM_INVALID, cache_desc=desc_with([0, 64])),
    row("E-164", PARAM_INVALID, cache_desc=desc_with([2**32, 2**32])),
]


@pytest.mark.parametrize(
    ("expected", "words", "changes"),
    [
        *DESCRIPTIONS,
        row("E-160", TypeError, "cache_keys", cache_keys=None),
        row("E-160", TypeError, "cache_keys", cache_keys=CacheKey(1, 10)),
        row("E-160", TypeError, "cache_keys", cache_keys={1: CacheKey(1, 10)}),
        row("E-160", TypeError, "cache_keys", "CacheKey", cache_keys=[CacheKey(1, 10), 11]),
        row("E-160", TypeError, "cache_keys", cache_keys=[None]),
        row("E-160", TypeError, "cache_keys", cache_keys=[BlocksCacheKey(1)]),
        row("E-169", PARAM_INVALID, "cache_keys", "3", "2", cache_keys=[CacheKey(1, i) for i in range(3)]),
        row("E-170", PARAM_INVALID, "req_id", "prefix_id", cache_keys=[CacheKey(1, 1), CacheKey(1, 2, prefix_id=3)]),
    ],
)
def test_allocate_cache_refuses(
    make: Callable[..., KvCacheManager], expected: Expected, words: tuple[object, ...], changes: dict[str, Any]
) -> None:
    """S-18: a refused allocation takes nothing."""
    manager = make()
    with refuses(expected, *words):
        manager.allocate_cache(**{"cache_desc": DESC, **changes})
    check_unharmed(manager)


@pytest.mark.parametrize(
    ("expected", "words", "changes"),
    [
        *DESCRIPTIONS,
        row("E-160", TypeError, "blocks_cache_key", "BlocksCacheKey", blocks_cache_key=CacheKey(1, 10)),
        row("E-160", TypeError, "blocks_cache_key", blocks_cache_key=[BlocksCacheKey(1)]),
    ],
)
def test_allocate_blocks_cache_refuses(
    make: Callable[..., KvCacheManager], expected: Expected, words: tuple[object, ...], changes: dict[str, Any]
) -> None:
    """S-18: a refused allocation takes nothing."""
    manager = make()
    with refuses(expected, *words):
        manager.allocate_blocks_cache(**{"cache_desc": DESC, **changes})
    check_unharmed(manager)


def test_e164_most_dimensions(make: Callable[..., KvCacheManager]) -> None:
    """E-164, S-19: 31 dimensions are fine."""
    assert make().allocate_cache(desc_with([2] + [1] * 30)).cache_id == 1


@pytest.mark.parametrize("role", [LLMRole.DECODER, LLMRole.MIX])
def test_e165_keys_are_for_prompts(make: Callable[..., KvCacheManager], role: LLMRole) -> None:
    """E-165: only a PROMPT binds request and prefix keys; an empty list is no key."""
    manager = make(role)
    with refuses(PARAM_INVALID, "cache_keys", "PROMPT", role):
        manager.allocate_cache(DESC, [CacheKey(1, 10)])
    check_unharmed(manager)
    manager.allocate_cache(DESC, [])
    manager.allocate_cache(DESC, ())


def test_e166_blocks_key_is_not_for_decoders(make: Callable[..., KvCacheManager]) -> None:
    """E-166: a DECODER binds no blocks key."""
    manager = make(LLMRole.DECODER)
    with refuses(PARAM_INVALID, "blocks_cache_key", "DECODER"):
        manager.allocate_blocks_cache(DESC, BlocksCacheKey(1))
    check_unharmed(manager)


def test_e166_blocks_key_of_a_mix(make: Callable[..., KvCacheManager]) -> None:
    """E-166: a MIX may bind a blocks key."""
    manager = make(LLMRole.MIX)
    owner = manager.allocate_blocks_cache(DESC, BlocksCacheKey(1))
    with refuses(FAILED, "BlocksCacheKey", f"cache {owner.cache_id}"):
        manager.allocate_blocks_cache(DESC, BlocksCacheKey(1))


@pytest.mark.parametrize(("key", "word"), [(CacheKey(7, 10, 3), "req_id=10"), (CacheKey(7, NONE, 3, 5), "prefix_id=5")])
def test_e167_key_is_bound_already(make: Callable[..., KvCacheManager], key: CacheKey, word: str) -> None:
    """E-167, S-15, S-13: a bound key is refused whatever its cluster id; the other keys of the call stay free."""
    manager = make()
    owner = manager.allocate_cache(DESC, [key])
    used = manager._engine.caches.used()
    again = CacheKey(1, key.req_id, key.model_id, key.prefix_id)
    with refuses(FAILED, word, "model_id=3", f"cache {owner.cache_id}"):
        manager.allocate_cache(DESC, [CacheKey(1, 20), again])
    assert manager._engine.caches.used() == used
    assert manager.allocate_cache(DESC, [CacheKey(1, 20)]).cache_id == 2
    manager.remove_cache_key(key)
    assert manager.allocate_cache(DESC, [again]).cache_id == 3


def test_e168_last_of_equal_keys_wins(linked: tuple[Prompt, Decoder]) -> None:
    """E-168, S-16: the earlier slot ends up without a key."""
    prompt, decoder = linked
    desc = bytes_desc(2, 3, 64)
    prompt.allocate(desc, [CacheKey(1, 10), CacheKey(1, 11), CacheKey(1, 10)])
    cache = decoder.allocate(bytes_desc(2, 1, 64))
    decoder.manager.pull_cache(CacheKey(1, 10), cache)
    decoder.check(cache, {t: [(0, prompt.expected(desc, t)[128:])] for t in range(2)})


def test_e171_out_of_memory_names_the_numbers(make: Callable[..., KvCacheManager]) -> None:
    """E-171, S-18: nothing is kept of a cache that found no room, neither id nor key nor memory."""
    manager = make(ge__flowGraphMemMaxSize="4096", llm__MemoryUtilization="1")
    first = manager.allocate_cache(bytes_desc(4, 1, 512), [CacheKey(1, 9)])
    for tensors in (5, 2**32 - 1):
        with refuses(LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY, tensors * 512, 2048, 4096):
            manager.allocate_cache(bytes_desc(tensors, 1, 500), [CacheKey(1, 10)])
    assert manager._engine.caches.used() == [2048]
    assert manager.allocate_cache(bytes_desc(4, 1, 512), [CacheKey(1, 10)]).cache_id == 2
    with refuses(LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY, 512, 4096):
        manager.allocate_blocks_cache(bytes_desc(1, 1, 1))
    manager.deallocate_cache(first)
    with refuses(LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY, "req_id=9"):
        manager.allocate_cache(bytes_desc(4, 1, 512))
    manager.remove_cache_key(CacheKey(1, 9))
    assert manager.allocate_cache(bytes_desc(4, 1, 512)).cache_id == 3


@pytest.mark.parametrize("cache", [None, 1, "cache"], ids=str)
def test_e172_deallocate_wrong_type(make: Callable[..., KvCacheManager], cache: Any) -> None:
    """E-172: only a KvCache can be deallocated."""
    with refuses(TypeError, "cache", "KvCache"):
        make().deallocate_cache(cache)


def test_e173_deallocate_a_host_cache(make: Callable[..., KvCacheManager]) -> None:
    """E-173: host memory is the user's."""
    cache = KvCache.create_cpu_cache(desc_with([2, 64], placement=Placement.HOST), [4096, 8192])
    with refuses(PARAM_INVALID, "cache", "HOST", "DEVICE"):
        make().deallocate_cache(cache)
    assert cache.per_device_tensor_addrs == [[4096, 8192]]


def test_e174_deallocate_twice(make: Callable[..., KvCacheManager]) -> None:
    """E-174, S-22, S-20: the second call does nothing, also not to a cache that has the memory now."""
    manager = make()
    cache = manager.allocate_cache(DESC)
    manager.deallocate_cache(cache)
    assert cache.per_device_tensor_addrs == []
    other = manager.allocate_cache(DESC)
    used = manager._engine.caches.used()
    manager.deallocate_cache(cache)
    assert manager._engine.caches.used() == used
    manager.deallocate_cache(other)
    assert manager._engine.caches.used() == [0]


@pytest.mark.parametrize("role", [LLMRole.DECODER, LLMRole.MIX])
def test_e177_remove_cache_key_is_for_prompts(make: Callable[..., KvCacheManager], role: LLMRole) -> None:
    """E-177: the role is looked at before the key."""
    with refuses(PARAM_INVALID, "remove_cache_key", "PROMPT", role):
        make(role).remove_cache_key(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("key", [None, 10, BlocksCacheKey(1), CacheKeyByIdAndIndex(1, 1)], ids=str)
def test_e178_remove_cache_key_wrong_type(make: Callable[..., KvCacheManager], key: Any) -> None:
    """E-178: only a CacheKey can be removed."""
    with refuses(TypeError, "cache_key", "CacheKey"):
        make().remove_cache_key(key)


def test_e178_unknown_key_is_harmless(make: Callable[..., KvCacheManager]) -> None:
    """E-178, S-24: removing what is not bound (any more) does nothing."""
    manager = make()
    owner = manager.allocate_cache(DESC, [CacheKey(1, 10)])
    for key in (CacheKey(1, 99), CacheKey(1, 10, 1), CacheKey(1, NONE), CacheKey(1, NONE, prefix_id=10)):
        manager.remove_cache_key(key)
    with refuses(FAILED, "req_id=10", f"cache {owner.cache_id}"):
        manager.allocate_cache(DESC, [CacheKey(1, 10)])
    for _ in range(2):
        manager.remove_cache_key(CacheKey(1, 10))
    manager.allocate_cache(DESC, [CacheKey(1, 10)])
