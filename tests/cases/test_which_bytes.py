"""Which bytes go where, and whether the two sides fit (B09, B11, B12, B13)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from expect import failure
from pairs import Decoder, Prompt, bytes_desc

from llm_datadist import BlocksCacheKey, CacheDesc, CacheKey, DataType, LLMStatusCode

INVALID = LLMStatusCode.LLM_PARAM_INVALID
KEY = BlocksCacheKey(1, 0)
KIB = 1 << 10


def landed(prompt: Prompt, desc: CacheDesc, pairs: list[tuple[int, int]]) -> dict[int, list[tuple[int, bytes]]]:
    """Give what each tensor must hold after blocks were pulled pair by pair."""
    stride = desc.size // desc.shape[0]
    return {
        t: [(d * stride, prompt.expected(desc, t)[s * stride : (s + 1) * stride]) for s, d in pairs]
        for t in range(desc.num_tensors)
    }


@pytest.mark.parametrize(("sources", "destinations"), [(5, 4), (4, 5), (0, 4), (4, 0), (0, 0)])
def test_b09_unequal_lists(linked: tuple[Prompt, Decoder], sources: int, destinations: int) -> None:
    """B09, S-52: refused before anything is written, with both lengths in the text."""
    prompt, decoder = linked
    prompt.allocate_blocks(bytes_desc(4, 64, 8 * KIB), KEY)
    cache = decoder.allocate(bytes_desc(4, 64, 8 * KIB), blocks=True)
    with failure(INVALID, rf"\b{sources}\b.*\b{destinations}\b"):
        decoder.manager.pull_blocks(KEY, cache, list(range(sources)), list(range(destinations)))
    decoder.untouched(cache)


PERMUTED = [int(i) for i in np.random.default_rng(9).permutation(64)]


@pytest.mark.parametrize(
    ("source", "destination"),
    [
        (list(range(64)), PERMUTED),
        (PERMUTED, list(range(64))),
        (PERMUTED, PERMUTED[::-1]),
        (list(range(31, 64)), list(range(33))),
        (list(range(33)), list(range(31, 64))),
        (list(range(63, -1, -1)), list(range(64))),
        ([7] * 10, list(range(20, 30))),
        ([1, 2, 3, 4], [9, 9, 8, 9]),
        (list(range(64)), [i // 2 for i in range(64)]),
    ],
)
@pytest.mark.parametrize("kind", [list, tuple, np.array])
def test_b09_element_by_element(
    linked: tuple[Prompt, Decoder], source: list[int], destination: list[int], kind: Any
) -> None:
    """B09, S-50: pairing is by position, whatever the order; of a repeated destination the last pair wins, whole."""
    prompt, decoder = linked
    desc = bytes_desc(4, 64, 8 * KIB)
    prompt.allocate_blocks(desc, KEY)
    cache = decoder.allocate(desc, blocks=True)
    decoder.manager.pull_blocks(KEY, cache, kind(source), kind(destination))
    decoder.check(cache, landed(prompt, desc, list(zip(source, destination, strict=True))))


def test_b09_ranges_and_what_is_no_list(linked: tuple[Prompt, Decoder]) -> None:
    """B09, E-251: ranges are lists too, also backwards; a generator is not, and nothing of it is consumed."""
    prompt, decoder = linked
    desc = bytes_desc(4, 64, 8 * KIB)
    prompt.allocate_blocks(desc, KEY)
    cache = decoder.allocate(desc, blocks=True)
    numbers = (i for i in range(4))
    for wrong in (numbers, iter([1, 2]), {1: 2}, {1, 2}, "12", 3, None, np.zeros((2, 2), int)):
        with pytest.raises(TypeError):
            decoder.manager.pull_blocks(KEY, cache, wrong, [1, 2])
        with pytest.raises(TypeError):
            decoder.manager.pull_blocks(KEY, cache, [1, 2], wrong)
    assert next(numbers) == 0
    decoder.untouched(cache)
    decoder.manager.pull_blocks(KEY, cache, range(63, 31, -1), range(0, 64, 2))
    decoder.check(cache, landed(prompt, desc, list(zip(range(63, 31, -1), range(0, 64, 2), strict=True))))


def test_b11_block_sizes_differ(linked: tuple[Prompt, Decoder]) -> None:
    """B11, S-51, E-259: refused before the first byte, with both sizes in the text."""
    prompt, decoder = linked
    prompt.allocate_blocks(bytes_desc(4, 1024, 2 * KIB), KEY)
    cache = decoder.allocate(bytes_desc(4, 128, 16 * KIB), blocks=True)
    for source, destination in ((range(8), [0]), ([0], range(8)), ([0], [0])):
        with failure(INVALID):
            decoder.manager.pull_blocks(KEY, cache, source, destination)
    with failure(INVALID, "2048.*16384"):
        decoder.manager.pull_blocks(KEY, cache, [0], [0])
    decoder.untouched(cache)


def test_b11_block_counts_differ(linked: tuple[Prompt, Decoder]) -> None:
    """B11, S-36, S-52: equal blocks, four times as many: fine, and each side has its own limit."""
    prompt, decoder = linked
    desc = bytes_desc(2, 1024, 64)
    prompt.allocate_blocks(desc, KEY)
    cache = decoder.allocate(bytes_desc(2, 4096, 64), blocks=True)
    with failure(INVALID, "1024"):
        decoder.manager.pull_blocks(KEY, cache, [0, 1024], [0, 1])
    with failure(INVALID, "4096"):
        decoder.manager.pull_blocks(KEY, cache, [0, 1], [0, 4096])
    decoder.untouched(cache)
    decoder.manager.pull_blocks(KEY, cache, [1023, 0], [4095, 2000])
    decoder.check(cache, landed(prompt, desc, [(1023, 4095), (0, 2000)]))


def test_b11_size_at_the_border(linked: tuple[Prompt, Decoder]) -> None:
    """B11, S-30 to S-32: one byte under, at, and over what the source slot and the destination slot hold."""
    prompt, decoder = linked
    desc = bytes_desc(2, 2, 4096)
    prompt.allocate(desc, [CacheKey(1, 1), CacheKey(1, 2)])
    longer, shorter = decoder.allocate(bytes_desc(2, 2, 8192)), decoder.allocate(bytes_desc(2, 2, 1000))
    for cache, size in ((longer, 4097), (longer, -1), (shorter, 1001)):
        with failure(INVALID):
            decoder.manager.pull_cache(CacheKey(1, 2), cache, 1, size, dst_cache_offset=0)
        decoder.untouched(cache)
    for cache, size, start in ((longer, 4095, 8192), (longer, 4096, 8192), (shorter, 999, 1000), (shorter, 1000, 1000)):
        decoder.prefill(cache)
        decoder.manager.pull_cache(CacheKey(1, 2), cache, 1, size, dst_cache_offset=0)
        decoder.check(cache, {t: [(start, prompt.expected(desc, t)[4096 : 4096 + size])] for t in range(2)})


HEAD = 16 * 256  # bytes of one head in a block of 16 tokens


def test_b12_fewer_heads_on_each_decoder(linked: tuple[Prompt, Decoder]) -> None:
    """B12: with one block for each head, a decoder rank of one head takes its head out of two."""
    prompt, decoder = linked
    source = bytes_desc(4, 32 * 2, HEAD)
    prompt.allocate_blocks(source, KEY)
    for head in (0, 1):
        cache = decoder.allocate(bytes_desc(4, 32, HEAD), blocks=True)
        decoder.manager.pull_blocks(KEY, cache, range(head, 64, 2), range(32))
        decoder.check(cache, landed(prompt, source, [(2 * block + head, block) for block in range(32)]))


def test_b12_heads_of_a_contiguous_cache(linked: tuple[Prompt, Decoder]) -> None:
    """B12, S-34: with heads outermost in a slot, an offset and a size name the head."""
    prompt, decoder = linked
    source = bytes_desc(4, 2, 2 * HEAD)
    prompt.allocate(source, [CacheKey(1, 1), CacheKey(1, 2)])
    for head in (0, 1):
        cache = decoder.allocate(bytes_desc(4, 1, HEAD))
        decoder.manager.pull_cache(CacheKey(1, 2), cache, 0, HEAD, src_cache_offset=head * HEAD)
        start = 2 * HEAD + head * HEAD
        decoder.check(cache, {t: [(0, prompt.expected(source, t)[start : start + HEAD])] for t in range(4)})


def test_b12_heads_of_two_prompts(peer: Any, start_peer: Any, decoder: Decoder) -> None:
    """B12, S-34: a decoder rank of two heads gets each from another prompt rank, into halves of its slot."""
    second = start_peer()
    prompts = [Prompt(peer, 1), Prompt(second, 3)]
    desc = bytes_desc(4, 1, HEAD)
    for prompt in prompts:
        prompt.allocate(desc, [CacheKey(prompt.cluster_id, 1)])
    decoder.link(*prompts)
    cache = decoder.allocate(bytes_desc(4, 1, 2 * HEAD))
    for half, prompt in enumerate(prompts):
        decoder.manager.pull_cache(CacheKey(prompt.cluster_id, 1), cache, 0, HEAD, dst_cache_offset=half * HEAD)
    decoder.check(cache, {t: [(half * HEAD, p.expected(desc, t)) for half, p in enumerate(prompts)] for t in range(4)})


def test_b12_unlike_ranks_by_mistake(linked: tuple[Prompt, Decoder]) -> None:
    """B12, S-51: blocks of two heads into blocks of one, or the other way: refused, both sizes named."""
    prompt, decoder = linked
    prompt.allocate_blocks(bytes_desc(4, 32, 2 * HEAD), KEY)
    for heads in (1, 4):
        cache = decoder.allocate(bytes_desc(4, 32, heads * HEAD), blocks=True)
        with failure(INVALID, rf"{2 * HEAD}\D.*\b{heads * HEAD}\b"):
            decoder.manager.pull_blocks(KEY, cache, [0], [0])
        decoder.untouched(cache)


def test_b13_one_tensor_a_layer(linked: tuple[Prompt, Decoder]) -> None:
    """B13, S-41, S-45: 61 tensors, each a layer; ranges go by layer on both sides."""
    prompt, decoder = linked
    desc = bytes_desc(61, 8, 576)
    prompt.allocate_blocks(desc, KEY)
    cache = decoder.allocate(desc, blocks=True)
    one = {"tensor_num_per_layer": 1}
    decoder.manager.pull_blocks(KEY, cache, [3], [4], **one)
    decoder.check(cache, landed(prompt, desc, [(3, 4)]))
    decoder.prefill(cache)
    decoder.manager.pull_blocks(KEY, cache, [3], [4], src_layer_range=range(58, 61), dst_layer_range=range(3), **one)
    block = slice(3 * 576, 4 * 576)
    decoder.check(cache, {i: [(4 * 576, prompt.expected(desc, 58 + i)[block])] for i in range(3)})
    with failure(INVALID, "61"):
        decoder.manager.pull_blocks(
            KEY, cache, [3], [4], src_layer_range=range(59, 62), dst_layer_range=range(3), **one
        )


def test_b13_odd_total_with_two_a_layer(linked: tuple[Prompt, Decoder]) -> None:
    """B13, S-45: 61 tensors with the default of two work without ranges, and for layers that are all there."""
    prompt, decoder = linked
    desc = bytes_desc(61, 2, 64)
    prompt.allocate_blocks(desc, KEY)
    cache = decoder.allocate(desc, blocks=True)
    decoder.manager.pull_blocks(KEY, cache, [0], [1])
    decoder.check(cache, landed(prompt, desc, [(0, 1)]))
    decoder.prefill(cache)
    decoder.manager.pull_blocks(KEY, cache, [0], [1], src_layer_range=range(29, 30), dst_layer_range=range(29, 30))
    decoder.check(cache, {t: [(64, prompt.expected(desc, t)[:64])] for t in (58, 59)})
    with failure(INVALID, "61"):
        decoder.manager.pull_blocks(KEY, cache, [0], [1], src_layer_range=range(30, 31), dst_layer_range=range(29, 30))


def test_b13_three_tensors_a_layer(linked: tuple[Prompt, Decoder]) -> None:
    """B13, S-41, S-45: key, value and index of layer 2 go to layer 0; a count that does not divide is refused."""
    prompt, decoder = linked
    desc = bytes_desc(12, 2, 96)
    prompt.allocate_blocks(desc, KEY)
    cache = decoder.allocate(desc, blocks=True)
    ranges = {"src_layer_range": range(2, 3), "dst_layer_range": range(1)}
    decoder.manager.pull_blocks(KEY, cache, [1], [0], tensor_num_per_layer=3, **ranges)
    decoder.check(cache, {t: [(0, prompt.expected(desc, 6 + t)[96:])] for t in range(3)})
    with failure(INVALID, "5.*12"):
        decoder.manager.pull_blocks(KEY, cache, [1], [0], tensor_num_per_layer=5, **ranges)


def test_b13_unlike_widths_in_two_caches(linked: tuple[Prompt, Decoder]) -> None:
    """B13, S-13, S-65: the wide and the narrow part of each layer have caches and model ids of their own."""
    prompt, decoder = linked
    descs = [CacheDesc(61, [16, 16, width], DataType.DT_BF16) for width in (512, 64)]
    keys = [BlocksCacheKey(1, model) for model in (0, 1)]
    for desc, key in zip(descs, keys, strict=True):
        prompt.allocate_blocks(desc, key, salt=desc.shape[2])
    caches = [decoder.allocate(desc, blocks=True) for desc in descs]
    for desc, key, cache in zip(descs, keys, caches, strict=True):
        decoder.manager.pull_blocks(key, cache, [15, 0], [1, 2], tensor_num_per_layer=1)
        stride = desc.size // 16
        whole = [prompt.expected(desc, t, salt=desc.shape[2]) for t in range(61)]
        decoder.check(
            cache, {t: [(stride, whole[t][15 * stride :]), (2 * stride, whole[t][:stride])] for t in range(61)}
        )
    with failure(INVALID):
        decoder.manager.pull_blocks(keys[0], caches[1], [0], [0])
