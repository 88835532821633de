"""Which pulls release a key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from bindings import is_bound
from pairs import Decoder, Prompt, bytes_desc
from refusals import refuses

from llm_datadist import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex, LLMException, LLMStatusCode

ABSENT = 2**64 - 1
NOT_EXIST = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
DESC = bytes_desc(8, 3, 32)
KEY = CacheKey(1, 5)
PREFIX = CacheKey(1, ABSENT, 0, 6)
BY_ID = CacheKeyByIdAndIndex(1, 1, 0)
ALL, FIRST, SECOND = range(0, 4), range(0, 2), range(2, 4)


def part(layers: range, **more: Any) -> dict[str, Any]:
    """Make the arguments that pull some layers into layers from 0 on."""
    return {"src_layer_range": layers, "dst_layer_range": range(len(layers)), **more}


#: What is pulled, in which ways one after the other, and whether `KEY` is gone after each of them.
ROWS = [
    pytest.param(KEY, [({}, True)], id="all tensors"),
    pytest.param(KEY, [({"batch_index": 2}, True)], id="all tensors into another slot"),
    pytest.param(KEY, [({"size": 1}, True)], id="size is not considered"),
    pytest.param(KEY, [(part(ALL), True)], id="a range that covers all"),
    pytest.param(KEY, [(part(FIRST), False)], id="some tensors"),
    pytest.param(KEY, [(part(FIRST), False), (part(SECOND), True)], id="the union covers all"),
    pytest.param(
        KEY, [(part(SECOND, size=3), False), (part(FIRST, size=7), True)], id="the union, size not considered"
    ),
    pytest.param(KEY, [({"src_cache_offset": 0}, False)], id="source offset 0"),
    pytest.param(KEY, [({"dst_cache_offset": 0}, False)], id="destination offset 0"),
    pytest.param(KEY, [({"src_cache_offset": 0, "dst_cache_offset": 0}, False)], id="both offsets 0"),
    pytest.param(KEY, [({"src_cache_offset": 4, "size": 4}, False)], id="source offset"),
    pytest.param(KEY, [({"dst_cache_offset": 4}, False)], id="destination offset"),
    pytest.param(KEY, [({"src_cache_offset": None, "dst_cache_offset": None}, True)], id="offsets None"),
    pytest.param(
        KEY, [(part(FIRST, src_cache_offset=0), False), (part(SECOND), False)], id="an offset part counts not"
    ),
    pytest.param(PREFIX, [({}, False), (part(FIRST), False)], id="by prefix"),
    pytest.param(BY_ID, [({}, True)], id="by id of the bound slot"),
    pytest.param(BY_ID, [(part(FIRST), False), (part(SECOND), True)], id="by id, parts"),
    pytest.param(BY_ID, [({"src_cache_offset": 0}, False)], id="by id, offset"),
    pytest.param(CacheKeyByIdAndIndex(1, 1, 1), [({}, False)], id="by id of the prefix slot"),
    pytest.param(CacheKeyByIdAndIndex(1, 1, 2), [({}, False)], id="by id of the unbound slot"),
]


@pytest.mark.parametrize(("key", "pulls"), ROWS)
def test_table(linked: tuple[Prompt, Decoder], key: Any, pulls: list[tuple[dict[str, Any], bool]]) -> None:
    """S-60, line by line, as far as pull_cache goes."""
    prompt, decoder = linked
    prompt.allocate(DESC, [KEY, PREFIX])
    for kwargs, released in pulls:
        layers = kwargs.get("src_layer_range", ALL)
        cache = decoder.allocate(bytes_desc(2 * len(layers), 3, 32))
        decoder.manager.pull_cache(key, cache, **kwargs)
        assert is_bound(prompt, KEY) != released
    assert is_bound(prompt, PREFIX)


def test_pull_blocks_releases_nothing(linked: tuple[Prompt, Decoder]) -> None:
    """S-60: a blocks key may be pulled as often as one likes."""
    prompt, decoder = linked
    key = BlocksCacheKey(1, 0)
    prompt.allocate_blocks(DESC, key)
    cache = decoder.allocate(DESC)
    for _ in range(3):
        decoder.manager.pull_blocks(key, cache, [0, 1, 2], [0, 1, 2])
    assert is_bound(prompt, key)


FAILING: list[tuple[str, dict[str, Any]]] = [
    ("slot", {"batch_index": 3}),
    ("size", {"size": 33}),
    ("layers", {"src_layer_range": range(3, 5), "dst_layer_range": range(2)}),
    ("counts", {"src_layer_range": range(2)}),
]


@pytest.mark.parametrize("kwargs", [pytest.param(kwargs, id=name) for name, kwargs in FAILING])
@pytest.mark.parametrize("key", [KEY, BY_ID], ids=["by key", "by id"])
def test_a_failed_pull_releases_nothing(linked: tuple[Prompt, Decoder], key: Any, kwargs: dict[str, Any]) -> None:
    """S-60: whoever finds the fault, and the pull can be tried again."""
    prompt, decoder = linked
    prompt.allocate(DESC, [KEY])
    cache = decoder.allocate(DESC)
    for _ in range(2):
        with pytest.raises(LLMException):
            decoder.manager.pull_cache(key, cache, **kwargs)
        assert is_bound(prompt, KEY)
    decoder.untouched(cache)
    decoder.manager.pull_cache(key, cache)
    assert not is_bound(prompt, KEY)


def test_a_failed_part_counts_not(linked: tuple[Prompt, Decoder]) -> None:
    """S-60, S-61: a part that the source refuses leaves its tensors to be pulled."""
    prompt, decoder = linked
    prompt.allocate(DESC, [KEY])
    cache = decoder.allocate(bytes_desc(4, 1, 33))
    with refuses(LLMStatusCode.LLM_PARAM_INVALID):
        decoder.manager.pull_cache(KEY, cache, **part(FIRST))
    decoder.manager.pull_cache(KEY, cache, size=32, **part(SECOND))
    assert is_bound(prompt, KEY)
    decoder.manager.pull_cache(KEY, cache, size=32, **part(FIRST))
    assert not is_bound(prompt, KEY)


def test_the_worked_example_of_parts(linked: tuple[Prompt, Decoder]) -> None:
    """S-61: the same layers twice do not help; the missing ones do, once."""
    prompt, decoder = linked
    prompt.allocate(DESC, [KEY])
    cache = decoder.allocate(bytes_desc(4, 3, 32))
    for _ in range(2):
        decoder.manager.pull_cache(KEY, cache, **part(FIRST))
        assert is_bound(prompt, KEY)
    decoder.manager.pull_cache(KEY, cache, **part(SECOND))
    assert not is_bound(prompt, KEY)
    with refuses(NOT_EXIST):
        decoder.manager.pull_cache(KEY, cache, **part(FIRST))


@pytest.mark.parametrize("kwargs", [{}, part(ALL), {"src_layer_range": ALL}, {"dst_layer_range": ALL}])
def test_a_full_pull_after_a_part(linked: tuple[Prompt, Decoder], kwargs: dict[str, Any]) -> None:
    """S-61: releases at once."""
    prompt, decoder = linked
    prompt.allocate(DESC, [KEY])
    decoder.manager.pull_cache(KEY, decoder.allocate(bytes_desc(2, 1, 32)), src_layer_range=range(1, 2))
    decoder.manager.pull_cache(KEY, decoder.allocate(DESC), **kwargs)
    assert not is_bound(prompt, KEY)


def test_only_the_source_selection_counts(linked: tuple[Prompt, Decoder]) -> None:
    """S-61: without a source range all source tensors count, whatever part of the destination they fill."""
    prompt, decoder = linked
    prompt.allocate(bytes_desc(4, 1, 32), [KEY])
    decoder.manager.pull_cache(KEY, decoder.allocate(DESC), dst_layer_range=range(1, 3))
    assert not is_bound(prompt, KEY)


def test_overlapping_and_uneven_parts(linked: tuple[Prompt, Decoder]) -> None:
    """S-61: what counts is tensors, not layers: parts may overlap and differ in tensors a layer."""
    prompt, decoder = linked
    prompt.allocate(DESC, [KEY])
    steps = [(range(0, 3), 1), (range(2, 5), 1), (range(1, 2), 4)]
    for layers, count in steps:
        assert is_bound(prompt, KEY)
        cache = decoder.allocate(bytes_desc(len(layers) * count, 1, 32))
        decoder.manager.pull_cache(KEY, cache, src_layer_range=layers, tensor_num_per_layer=count)
    assert not is_bound(prompt, KEY)


def test_slots_do_not_interfere(linked: tuple[Prompt, Decoder]) -> None:
    """S-61: each key of a cache has its own set of tensors to be pulled."""
    prompt, decoder = linked
    keys = [CacheKey(1, i) for i in range(3)]
    prompt.allocate(DESC, keys)
    cache = decoder.allocate(bytes_desc(4, 1, 32))
    decoder.manager.pull_cache(keys[0], cache, **part(FIRST))
    decoder.manager.pull_cache(keys[1], cache, **part(SECOND))
    assert [is_bound(prompt, key) for key in keys] == [True, True, True]
    decoder.manager.pull_cache(keys[1], cache, **part(FIRST))
    assert [is_bound(prompt, key) for key in keys] == [True, False, True]


def test_key_and_id_count_together(linked: tuple[Prompt, Decoder]) -> None:
    """S-60, S-61: a part by id and a part by key make a whole."""
    prompt, decoder = linked
    prompt.allocate(DESC, [KEY])
    cache = decoder.allocate(bytes_desc(4, 1, 32))
    decoder.manager.pull_cache(BY_ID, cache, **part(SECOND))
    decoder.manager.pull_cache(KEY, cache, **part(FIRST))
    assert not is_bound(prompt, KEY)


def test_the_three_calls_of_the_seed(linked: tuple[Prompt, Decoder]) -> None:
    """S-62: they run as written, in this order, and leave the second key bound."""
    prompt, decoder = linked
    desc = bytes_desc(8, 2, 32)
    cache_keys = [CacheKey(1, req_id=1), CacheKey(1, req_id=2)]
    prompt.allocate(desc, cache_keys)
    cache = decoder.allocate(desc)
    kv_cache_manager = decoder.manager
    kv_cache_manager.pull_cache(cache_keys[0], cache, 0)
    kv_cache_manager.pull_cache(cache_keys[1], cache, 1, src_layer_range=range(0, 2), dst_layer_range=range(2, 4))
    slots = [[prompt.expected(desc, t)[at : at + 32] for t in range(8)] for at in (0, 32)]
    decoder.check(cache, {t: [(0, slots[0][t])] + ([(32, slots[1][t - 4])] if t >= 4 else []) for t in range(8)})
    kv_cache_manager.pull_cache(cache_keys[1], cache, src_cache_offset=0, dst_cache_offset=0)
    decoder.check(cache, {t: [(0, slots[1][t])] + ([(32, slots[1][t - 4])] if t >= 4 else []) for t in range(8)})
    assert [is_bound(prompt, key) for key in cache_keys] == [False, True]
    prompt.manager.remove_cache_key(cache_keys[1])
    assert not is_bound(prompt, cache_keys[1])


def test_the_three_calls_and_the_memory(peer: Any, decoder: Decoder) -> None:
    """S-62: the cache of the seed's example goes once the second key is removed."""
    prompt = Prompt(peer, ge__flowGraphMemMaxSize=str(8 * 512), mem_utilization=1.0)
    decoder.link(prompt)
    desc = bytes_desc(8, 2, 32)
    keys = [CacheKey(1, 1), CacheKey(1, 2)]
    prompt.manager.deallocate_cache(prompt.allocate(desc, keys))
    cache = decoder.allocate(desc)
    decoder.manager.pull_cache(keys[0], cache, 0)
    decoder.manager.pull_cache(keys[1], cache, 1, src_layer_range=range(0, 2), dst_layer_range=range(2, 4))
    decoder.manager.pull_cache(keys[1], cache, src_cache_offset=0, dst_cache_offset=0)
    with refuses(LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY):
        prompt.manager.allocate_cache(desc)
    prompt.manager.remove_cache_key(keys[1])
    prompt.manager.allocate_cache(desc)


@pytest.mark.parametrize("held", [True, False], ids=["cache held", "cache deallocated"])
def test_a_released_key_is_gone(linked: tuple[Prompt, Decoder], held: bool) -> None:
    """S-63: it can't be pulled, and may be bound to another cache, which then is what it stands for."""
    prompt, decoder = linked
    cache = decoder.allocate(DESC)
    for salt in range(3):
        source = prompt.allocate(DESC, [KEY], salt=salt)
        if not held:
            prompt.manager.deallocate_cache(source)
        decoder.manager.pull_cache(KEY, cache)
        assert all(decoder.tensor(cache, t)[:32] == prompt.expected(DESC, t, salt=salt)[:32] for t in range(8))
        with refuses(NOT_EXIST):
            decoder.manager.pull_cache(KEY, cache)


def test_a_released_slot_releases_nothing_more(linked: tuple[Prompt, Decoder]) -> None:
    """S-60, S-63: pulling the old slot by id leaves the key alone that was bound anew elsewhere."""
    prompt, decoder = linked
    prompt.allocate(DESC, [KEY])
    cache = decoder.allocate(DESC)
    decoder.manager.pull_cache(KEY, cache)
    prompt.allocate(DESC, [CacheKey(1, 77), KEY], salt=1)
    decoder.manager.pull_cache(BY_ID, cache)
    assert is_bound(prompt, KEY)


def test_models_are_apart(linked: tuple[Prompt, Decoder]) -> None:
    """S-65: one request number in two models is two keys, released one by one."""
    prompt, decoder = linked
    keys = [CacheKey(1, 5, model) for model in (0, 1, 2**64 - 1)]
    prompt.allocate(DESC, keys)
    cache = decoder.allocate(DESC)
    decoder.manager.pull_cache(keys[1], cache)
    assert [is_bound(prompt, key) for key in keys] == [True, False, True]
    prompt.manager.remove_cache_key(keys[2])
    assert [is_bound(prompt, key) for key in keys] == [True, False, False]


@pytest.mark.parametrize(
    "order",
    [lambda keys: keys, lambda keys: keys[::-1], lambda keys: keys[1::2] + keys[::2]],
    ids=["on", "back", "odd"],
)
def test_many_keys_of_one_cache(
    linked: tuple[Prompt, Decoder], order: Callable[[list[CacheKey]], list[CacheKey]]
) -> None:
    """S-60, S-64: each is released alone, in any order, and the last takes the cache with it."""
    prompt, decoder = linked
    desc = bytes_desc(1, 12, 8)
    keys = [CacheKey(1, i) for i in range(12)]
    source = prompt.allocate(desc, keys)
    prompt.manager.deallocate_cache(source)
    cache = decoder.allocate(desc)
    for key in order(keys):
        decoder.manager.pull_cache(key, cache, key.req_id)
        with refuses(NOT_EXIST):
            decoder.manager.pull_cache(key, cache)
    decoder.check(cache, {0: [(0, prompt.expected(desc, 0))]})
    with refuses(NOT_EXIST):
        decoder.manager.pull_cache(CacheKeyByIdAndIndex(1, source.get("cache_id"), 0), cache)
