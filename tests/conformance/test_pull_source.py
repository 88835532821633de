"""How a pull finds its source, and which of several faults it names."""

from __future__ import annotations

from typing import Any

import pytest
from bindings import is_bound
from pairs import Decoder, Prompt, bytes_desc
from peer import Peer
from refusals import refuses

from llm_datadist import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex, LLMStatusCode

ABSENT = 2**64 - 1
INVALID = LLMStatusCode.LLM_PARAM_INVALID
NOT_EXIST = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
NOT_LINKED = LLMStatusCode.LLM_NOT_YET_LINK
DESC = bytes_desc(2, 4, 16)


@pytest.mark.parametrize("model", [0, 1, 2**64 - 1])
@pytest.mark.parametrize("number", [0, 1, 2**63, 2**64 - 2])
def test_by_request_and_by_prefix(linked: tuple[Prompt, Decoder], number: int, model: int) -> None:
    """S-37: all 64 bits of request, prefix and model count."""
    prompt, decoder = linked
    request, prefix = CacheKey(1, number, model), CacheKey(1, ABSENT, model, number)
    prompt.allocate(DESC, [CacheKey(1, 77, model), request, prefix])
    cache = decoder.allocate(DESC)
    decoder.manager.pull_cache(request, cache, 0)
    decoder.manager.pull_cache(prefix, cache, 1)
    decoder.check(cache, {t: [(0, prompt.expected(DESC, t)[16:48])] for t in range(2)})


def test_by_id_and_slot(linked: tuple[Prompt, Decoder]) -> None:
    """S-38, E-234: each slot of each cache, bound to what it may be; a prefix slot is read and nothing released."""
    prompt, decoder = linked
    prefix = CacheKey(1, ABSENT, 0, 5)
    sources = [prompt.allocate(DESC, [CacheKey(1, 1), prefix]), prompt.allocate(DESC, salt=1)]
    for salt, source in enumerate(sources):
        for slot in range(4):
            cache = decoder.allocate(DESC)
            decoder.manager.pull_cache(CacheKeyByIdAndIndex(1, source.get("cache_id"), slot), cache, 3)
            decoder.check(cache, {t: [(48, prompt.expected(DESC, t, salt=salt)[slot * 16 :][:16])] for t in range(2)})
    assert is_bound(prompt, prefix)


def test_slots_are_blocks(linked: tuple[Prompt, Decoder]) -> None:
    """S-39, E-205, E-235: this mode pulls a slot out of a blocks cache by id, and into one."""
    prompt, decoder = linked
    source = prompt.allocate_blocks(DESC, BlocksCacheKey(1, 0))
    cache = decoder.allocate(DESC, blocks=True)
    decoder.manager.pull_cache(CacheKeyByIdAndIndex(1, source.get("cache_id"), 3), cache, 1)
    decoder.check(cache, {t: [(16, prompt.expected(DESC, t)[48:])] for t in range(2)})


@pytest.mark.parametrize(
    "key",
    [
        pytest.param(CacheKey(1, 2), id="E-232 request"),
        pytest.param(CacheKey(1, ABSENT, 0, 1), id="E-232 prefix"),
        pytest.param(CacheKey(1, 1, 1), id="E-232 model"),
        pytest.param(CacheKeyByIdAndIndex(1, 2), id="E-233 id"),
        pytest.param(CacheKeyByIdAndIndex(1, 1, 4), id="E-233 slot"),
        pytest.param(CacheKeyByIdAndIndex(1, 1, 2**32 - 1), id="E-233 last slot"),
        pytest.param(CacheKeyByIdAndIndex(1, 0), id="S-38 id 0"),
        pytest.param(CacheKeyByIdAndIndex(1, -1), id="S-38 id -1"),
        pytest.param(CacheKeyByIdAndIndex(1, 2**63 - 1), id="S-38 largest id"),
        pytest.param(CacheKeyByIdAndIndex(1, -(2**63)), id="S-38 smallest id"),
    ],
)
def test_what_is_not_there(linked: tuple[Prompt, Decoder], key: Any) -> None:
    """S-37, S-38: KV_CACHE_NOT_EXIST, and nothing is written."""
    prompt, decoder = linked
    prompt.allocate(DESC, [CacheKey(1, 1)])
    cache = decoder.allocate(DESC)
    with refuses(NOT_EXIST):
        decoder.manager.pull_cache(key, cache)
    decoder.untouched(cache)


def test_keys_belong_to_their_cluster(peer: Peer, decoder: Decoder, start_peer: Any) -> None:
    """S-37: the same key on two prompts is two sources."""
    first = Prompt(peer, 11)
    other = start_peer()
    second = Prompt(other, 12)
    decoder.link(first, second)
    cache = decoder.allocate(DESC)
    for prompt in (first, second):
        prompt.allocate(DESC, [CacheKey(1, 5)])
    decoder.manager.pull_cache(CacheKey(12, 5), cache, 0)
    decoder.manager.pull_cache(CacheKey(11, 5), cache, 1)
    decoder.check(
        cache, {t: [(0, second.expected(DESC, t)[:16]), (16, first.expected(DESC, t)[:16])] for t in range(2)}
    )


def test_a_cache_found_before_is_looked_up_again(linked: tuple[Prompt, Decoder]) -> None:
    """S-37: a prefix or blocks key that is bound anew leads to its new cache at once."""
    prompt, decoder = linked
    prefix, blocks = CacheKey(1, ABSENT, 0, 5), BlocksCacheKey(1, 0)
    cache = decoder.allocate(DESC)
    for salt in range(4):
        desc = bytes_desc(2, 4 + salt, 16)
        source = prompt.allocate(desc, [CacheKey(1, 1000 + salt), prefix], salt=salt)
        paged = prompt.allocate_blocks(desc, blocks, salt=salt + 100)
        for _ in range(2):
            decoder.manager.pull_cache(prefix, cache, 2)
            decoder.manager.pull_blocks(blocks, cache, [3], [0])
        decoder.check(
            cache,
            {
                t: [
                    (32, prompt.expected(desc, t, salt=salt)[16:32]),
                    (0, prompt.expected(desc, t, salt=salt + 100)[48:64]),
                ]
                for t in range(2)
            },
        )
        prompt.manager.remove_cache_key(prefix)
        prompt.manager.deallocate_cache(paged)
        if salt % 2:
            prompt.manager.deallocate_cache(source)


def test_what_was_found_before_refuses_nothing(linked: tuple[Prompt, Decoder]) -> None:
    """S-37, S-60: arguments are judged by the source that is there, not by the one that a key stood for before."""
    prompt, decoder = linked
    key, prefix = BlocksCacheKey(1, 0), CacheKey(1, ABSENT, 0, 5)
    small, large = bytes_desc(2, 2, 16), bytes_desc(2, 4, 16)
    cache = decoder.allocate(large, blocks=True)
    wide = decoder.allocate(bytes_desc(2, 1, 64))
    for of, more in ((small, {}), (large, {"src_cache_offset": 32})):
        paged = prompt.allocate_blocks(of, key)
        plain = prompt.allocate(bytes_desc(2, 1, of.size), [prefix])
        block = of.shape[0] - 1
        decoder.manager.pull_blocks(key, cache, [block], [block])
        decoder.manager.pull_cache(prefix, wide, size=of.size - more.get("src_cache_offset", 0), **more)
        decoder.check(cache, {t: [(block * 16, prompt.expected(of, t)[block * 16 :])] for t in range(2)})
        decoder.prefill(cache)
        prompt.manager.deallocate_cache(paged)
        prompt.manager.remove_cache_key(prefix)
        prompt.manager.deallocate_cache(plain)
    with refuses(NOT_EXIST):
        decoder.manager.pull_blocks(key, cache, [7], [0])
    with refuses(NOT_EXIST):
        decoder.manager.pull_cache(prefix, wide, size=64, src_cache_offset=60)


def test_layers_of_one_source_one_after_the_other(linked: tuple[Prompt, Decoder]) -> None:
    """S-41: what one pull found out of its source is not what another needs: tensors differ, and caches."""
    prompt, decoder = linked
    key, prefix = BlocksCacheKey(1, 0), CacheKey(1, ABSENT, 0, 5)
    of = bytes_desc(4, 1, 64)
    prompt.allocate_blocks(of, key, salt=1)
    prompt.allocate(of, [prefix], salt=2)
    caches = [decoder.allocate(of) for _ in range(2)]
    for source, destination in ((0, 0), (1, 0), (0, 1), (1, 1), (0, 0)):
        layers = {
            "src_layer_range": range(source, source + 1),
            "dst_layer_range": range(destination, destination + 1),
        }
        for cache in caches:
            for salt in (1, 2):
                decoder.prefill(cache)
                if salt == 1:
                    decoder.manager.pull_blocks(key, cache, [0], [0], **layers)
                else:
                    decoder.manager.pull_cache(prefix, cache, **layers)
                pairs = [(2 * destination + i, 2 * source + i) for i in range(2)]
                decoder.check(cache, {to: [(0, prompt.expected(of, t, salt=salt))] for to, t in pairs})


def test_the_first_fault_is_named(linked: tuple[Prompt, Decoder]) -> None:
    """S-40: arguments, local cache, local parameters, link, remote cache, remote parameters."""
    prompt, decoder = linked
    pull = decoder.manager.pull_cache
    prompt.allocate(bytes_desc(2, 1, 8), [CacheKey(1, 1)])
    gone, cache = decoder.manager.allocate_cache(DESC), decoder.allocate(DESC)
    decoder.manager.deallocate_cache(gone)
    unlinked, unknown, present = CacheKey(9, 1), CacheKey(1, 9), CacheKey(1, 1)
    with refuses(INVALID):
        pull(unlinked, gone, 9, 0)
    with refuses(NOT_EXIST):
        pull(unlinked, gone, 9)
    for wrong in (
        {"batch_index": 9},
        {"size": 17},
        {"dst_cache_offset": 16},
        {"dst_layer_range": range(1, 2)},
        {"src_layer_range": range(2)},
        {"src_layer_range": range(2), "dst_layer_range": range(1)},
    ):
        with refuses(INVALID):
            pull(unlinked, cache, **wrong)
    # What only the peer can tell comes later: its slot is too short, and it has no layer 1.
    with refuses(NOT_LINKED):
        pull(unlinked, cache, src_layer_range=range(1, 2), dst_layer_range=range(1))
    with refuses(NOT_EXIST):
        pull(unknown, cache, src_layer_range=range(1, 2), dst_layer_range=range(1))
    with refuses(INVALID):
        pull(present, cache)
    decoder.untouched(cache)
    pull(present, cache, size=8)


def test_the_own_cluster_id_is_not_linked(linked: tuple[Prompt, Decoder]) -> None:
    """S-40, E-230: pulling from oneself finds no link."""
    _, decoder = linked
    with refuses(NOT_LINKED):
        decoder.manager.pull_cache(CacheKey(decoder.cluster_id, 1), decoder.allocate(DESC))
    with refuses(NOT_LINKED):
        decoder.manager.pull_blocks(BlocksCacheKey(decoder.cluster_id, 0), decoder.allocate(DESC), [0], [0])
