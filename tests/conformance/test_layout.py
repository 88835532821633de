"""Where a cache lies in memory."""

import itertools

import memory
import pytest
from bindings import is_bound
from pairs import Decoder, Prompt, bytes_desc
from peer import Peer

from llm_datadist import BlocksCacheKey, CacheDesc, CacheKey, CacheKeyByIdAndIndex, DataType


def test_tensors_are_apart_and_aligned(decoder: Decoder) -> None:
    """S-1, S-5, S-6, S-210: one allocation a tensor, at multiples of 512."""
    desc = CacheDesc(4, [2, 16], DataType.DT_FLOAT16)
    assert desc.size == 64
    cache = decoder.manager.allocate_cache(desc)
    (addresses,) = cache.per_device_tensor_addrs
    assert len(addresses) == 4
    ordered = sorted(addresses)
    assert all(b - a >= desc.size for a, b in itertools.pairwise(ordered))
    assert all(address % 512 == 0 for address in addresses)


@pytest.mark.needs("sparse")
def test_fresh_memory_is_zero(decoder: Decoder) -> None:
    """S-210: where the pool takes memory only when it is used, what comes is zero."""
    desc = CacheDesc(4, [2, 16], DataType.DT_FLOAT16)
    (addresses,) = decoder.manager.allocate_cache(desc).per_device_tensor_addrs
    assert all(memory.read(address, desc.size) == bytes(desc.size) for address in addresses)


@pytest.mark.parametrize("nbytes", [1, 511, 512, 513, 65537])
def test_alignment_at_any_size(decoder: Decoder, nbytes: int) -> None:
    """S-5: aligned to 512 bytes, whatever came before."""
    for _ in range(3):
        cache = decoder.allocate(bytes_desc(3, 1, nbytes))
        assert all(address % 512 == 0 for address in cache.per_device_tensor_addrs[0])
        decoder.untouched(cache)


@pytest.mark.parametrize("data_type", [t for t in DataType if t is not DataType.DT_STRING])
def test_stride_follows_the_data_type(linked: tuple[Prompt, Decoder], data_type: DataType) -> None:
    """S-1, S-2: slot i begins at i times tensor bytes by dimension 0."""
    prompt, decoder = linked
    desc = CacheDesc(2, [3, 5], data_type)
    stride = desc.size // 3
    prompt.allocate(desc, [CacheKey(1, 0), CacheKey(1, 1), CacheKey(1, 2)])
    cache = decoder.allocate(desc)
    decoder.manager.pull_cache(CacheKey(1, 2), cache, 1)
    decoder.check(cache, {t: [(stride, prompt.expected(desc, t)[2 * stride :])] for t in range(2)})


@pytest.mark.parametrize(
    ("batch_dim", "seq_dim", "tensor_format"), [(0, -1, None), (1, -1, None), (1, 1, "BSND"), (2, 0, "anything")]
)
def test_dimension_0_counts_slots(
    linked: tuple[Prompt, Decoder], batch_dim: int, seq_dim: int, tensor_format: str | None
) -> None:
    """S-3, S-4: batch_dim_index, seq_len_dim_index and kv_tensor_format move no byte."""
    prompt, decoder = linked
    desc = CacheDesc(
        2,
        [4, 2, 8],
        DataType.DT_INT8,
        batch_dim_index=batch_dim,
        seq_len_dim_index=seq_dim,
        kv_tensor_format=tensor_format,
    )
    source = prompt.allocate(desc, [CacheKey(1, i) for i in range(4)])
    cache = decoder.allocate(desc)
    decoder.manager.pull_cache(CacheKey(1, 3), cache, 2)
    decoder.manager.pull_cache(CacheKeyByIdAndIndex(1, source.get("cache_id"), 1), cache, 3)
    decoder.check(
        cache,
        {t: [(32, prompt.expected(desc, t)[48:64]), (48, prompt.expected(desc, t)[16:32])] for t in range(2)},
    )


def test_one_dimension(linked: tuple[Prompt, Decoder]) -> None:
    """S-2, S-4: with one dimension a slot is one element."""
    prompt, decoder = linked
    desc = CacheDesc(1, [6], DataType.DT_INT32)
    prompt.allocate_blocks(desc, BlocksCacheKey(1, 0))
    cache = decoder.allocate(desc)
    decoder.manager.pull_blocks(BlocksCacheKey(1, 0), cache, [5], [0])
    decoder.check(cache, {0: [(0, prompt.expected(desc, 0)[20:24])]})


def test_the_description_is_kept(decoder: Decoder) -> None:
    """The cache has the very description that was given (api 9.1)."""
    desc = bytes_desc(1, 1, 8)
    assert decoder.manager.allocate_cache(desc).cache_desc is desc


def test_every_operation_reaches_all_devices(peer: Peer) -> None:
    """S-26: each tensor exists once a device, and pulls of both kinds fill all of them."""
    prompt = Prompt(peer, devices=[0, 3])
    decoder = Decoder(devices=[1, 2])
    decoder.link(prompt)
    desc = bytes_desc(3, 4, 24)
    source = prompt.allocate(desc, [CacheKey(1, 7), CacheKey(1, 8)])
    prompt.allocate_blocks(desc, BlocksCacheKey(1, 0), salt=5)
    assert [len(addresses) for addresses in source.get("per_device_tensor_addrs")] == [3, 3]
    cache = decoder.allocate(desc)
    assert [len(addresses) for addresses in cache.per_device_tensor_addrs] == [3, 3]
    decoder.manager.pull_cache(CacheKey(1, 8), cache, 0, 9, src_cache_offset=2, dst_cache_offset=4)
    decoder.manager.pull_blocks(BlocksCacheKey(1, 0), cache, [3, 0], [1, 2])
    decoder.manager.pull_cache(
        CacheKeyByIdAndIndex(1, source.get("cache_id"), 0),
        cache,
        3,
        src_layer_range=range(1, 3),
        dst_layer_range=range(0, 2),
        tensor_num_per_layer=1,
    )
    for device in range(2):
        expected: dict[int, list[tuple[int, bytes]]] = {}
        for t in range(3):
            slots, blocks = prompt.expected(desc, t, device), prompt.expected(desc, t, device, salt=5)
            expected[t] = [(4, slots[26:35]), (24, blocks[72:96]), (48, blocks[0:24])]
            if t < 2:
                expected[t].append((72, prompt.expected(desc, t + 1, device)[0:24]))
        decoder.check(cache, expected, device)
    tensors = decoder.manager.get_cache_tensors(cache, 2)
    assert [t.numpy().tobytes() for t in tensors] == [decoder.tensor(cache, 2, device) for device in range(2)]
    decoder.dd.finalize()


def test_keys_count_once_for_all_devices(peer: Peer) -> None:
    """S-26, S-61: a key is released when its source tensors are pulled, each on all devices."""
    prompt = Prompt(peer, devices=[0, 1])
    decoder = Decoder(devices=[0, 1])
    decoder.link(prompt)
    key = CacheKey(1, 7)
    prompt.allocate(bytes_desc(4, 1, 16), [key])
    cache = decoder.allocate(bytes_desc(4, 1, 16))
    decoder.manager.pull_cache(key, cache, src_layer_range=range(0, 1), dst_layer_range=range(0, 1))
    assert is_bound(prompt, key)
    decoder.manager.pull_cache(key, cache, src_layer_range=range(1, 2), dst_layer_range=range(1, 2))
    assert not is_bound(prompt, key)
    decoder.dd.finalize()
