"""Tensors that show a cache's memory."""

from __future__ import annotations

import memory
import numpy as np
import pytest
from pairs import Decoder, Prompt, bytes_desc, options
from refusals import refuses

from llm_datadist import CacheDesc, CacheKey, DataType, KvCache, LLMStatusCode, Placement, Tensor, TensorDesc
from llm_datadist.data_type import dtype_to_np_dtype

PLAIN = [t for t in DataType if t not in (DataType.DT_BF16, DataType.DT_STRING)]
KEY = CacheKey(1, 1)


@pytest.mark.parametrize("data_type", PLAIN)
def test_arrays_show_what_was_pulled(linked: tuple[Prompt, Decoder], data_type: DataType) -> None:
    """S-85, S-86: shape, type and bytes of the cache; only a copy is writable, and of no effect on the cache."""
    prompt, decoder = linked
    desc = CacheDesc(2, [2, 3, 4], data_type)
    prompt.allocate(desc, [CacheKey(1, 0), KEY], fill=data_type is not DataType.DT_BOOL)
    cache = decoder.allocate(desc)
    (tensor,) = decoder.manager.get_cache_tensors(cache, 1)
    assert tensor.numpy().tobytes() == b"\xa5" * desc.size
    decoder.manager.pull_cache(KEY, cache, 1)
    for copy in (False, True):
        array = tensor.numpy(copy)
        assert (array.shape, array.dtype) == ((2, 3, 4), np.dtype(dtype_to_np_dtype[data_type]))
        assert array.flags.writeable == copy
        assert array.tobytes() == decoder.tensor(cache, 1)
    array[...] = 0
    assert tensor.numpy().tobytes() == decoder.tensor(cache, 1)


@pytest.mark.needs("host_access")
@pytest.mark.parametrize("data_type", PLAIN)
def test_views_show_what_is_pulled_later(linked: tuple[Prompt, Decoder], data_type: DataType) -> None:
    """S-85, S-86: where the processor can read it, the array is the cache's own memory, read-only."""
    prompt, decoder = linked
    desc = CacheDesc(2, [2, 3, 4], data_type)
    prompt.allocate(desc, [CacheKey(1, 0), KEY], fill=data_type is not DataType.DT_BOOL)
    cache = decoder.manager.allocate_cache(desc)
    (tensor,) = decoder.manager.get_cache_tensors(cache, 1)
    view = tensor.numpy()
    assert not view.any()
    assert view.ctypes.data == cache.per_device_tensor_addrs[0][1]
    assert not view.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        view[...] = 1
    decoder.manager.pull_cache(KEY, cache, 1)
    assert view.tobytes() == decoder.tensor(cache, 1)
    tensor.numpy(copy=True)[...] = 0
    assert view.tobytes() == decoder.tensor(cache, 1)


def test_bfloat16(linked: tuple[Prompt, Decoder]) -> None:
    """S-85, S-88: the cache's 16-bit patterns come as float32 values, converted at each call."""
    _, decoder = linked
    cache = decoder.manager.allocate_cache(CacheDesc(1, [2, 3], DataType.DT_BF16))
    memory.write(cache.per_device_tensor_addrs[0][0], bytes(12))
    (tensor,) = decoder.manager.get_cache_tensors(cache)
    before = tensor.numpy()
    patterns = np.array([0x3F80, 0x4000, 0xBF80, 0x0000, 0x7F80, 0x3FF0], np.uint16)
    memory.write(cache.per_device_tensor_addrs[0][0], patterns.tobytes())
    assert not before.any()
    for copy in (False, True):
        values = tensor.numpy(copy)
        assert (values.dtype, values.shape) == (np.float32, (2, 3))
        assert values.ravel().tolist() == [1.0, 2.0, -1.0, 0.0, np.inf, 1.875]
        assert values.flags.writeable == copy


def test_bfloat16_from_an_array() -> None:
    """S-88: a float16 array gives the raw patterns; 1.875 has 0x3F80, which is 1.0 as bfloat16."""
    tensor = Tensor(np.array([1.875, 2.0], np.float16), TensorDesc(DataType.DT_BF16, [2]))
    assert tensor.numpy().tolist() == [1.0, 2.0]
    assert Tensor(tensor).numpy().tolist() == [1.0, 2.0]


def test_tensors_of_their_own(decoder: Decoder) -> None:
    """S-88: what is made of an array, or of a cache's tensor, is a copy."""
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    tensor = Tensor(array)
    array[0, 0] = 99
    assert tensor.numpy().tolist() == [[0, 1, 2], [3, 4, 5]]
    cache = decoder.manager.allocate_cache(CacheDesc(1, [4], DataType.DT_UINT8))
    memory.write(cache.per_device_tensor_addrs[0][0], bytes(4))
    (shown,) = decoder.manager.get_cache_tensors(cache)
    clone = Tensor(shown)
    memory.write(cache.per_device_tensor_addrs[0][0], b"\1\2\3\4")
    assert shown.numpy().tolist() == [1, 2, 3, 4]
    assert clone.numpy().tolist() == [0, 0, 0, 0]


def test_which_tensor(decoder: Decoder) -> None:
    """S-86, E-300, E-301, E-302: each index its tensor; others are refused."""
    cache = decoder.allocate(bytes_desc(3, 2, 8))
    for i in range(3):
        memory.write(cache.per_device_tensor_addrs[0][i], bytes([i]) * 16)
        (tensor,) = decoder.manager.get_cache_tensors(cache, i)
        assert (tensor.numpy() == i).all()
    for index in (3, -1, 2**31 - 1, -(2**31)):
        with refuses(LLMStatusCode.LLM_PARAM_INVALID):
            decoder.manager.get_cache_tensors(cache, index)
    for index in (2**31, -(2**31) - 1):
        with pytest.raises(ValueError, match="tensor_index"):
            decoder.manager.get_cache_tensors(cache, index)
    for arguments in ((cache, 1.0), (cache, True), (cache, None), (None, 0), ("cache", 0)):
        with pytest.raises(TypeError):
            decoder.manager.get_cache_tensors(*arguments)
    on_host = KvCache.create_cpu_cache(CacheDesc(1, [1], DataType.DT_INT8, Placement.HOST), [1])
    with refuses(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST):
        decoder.manager.get_cache_tensors(on_host)


@pytest.mark.parametrize("what", ["tensor", pytest.param("array", marks=pytest.mark.needs("host_access"))])
def test_memory_outlives_the_cache(what: str) -> None:
    """S-87: while a Tensor, or an array from it, is there, nobody else gets the memory; afterwards they do."""
    decoder = Decoder(ge__flowGraphMemMaxSize="512", mem_utilization=1.0)
    desc = bytes_desc(1, 2, 256)
    cache = decoder.allocate(desc)
    (tensor,) = decoder.manager.get_cache_tensors(cache)
    kept = tensor if what == "tensor" else tensor.numpy()
    del tensor
    decoder.manager.deallocate_cache(cache)
    with refuses(LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY):
        decoder.manager.allocate_cache(desc)
    array = kept.numpy() if isinstance(kept, Tensor) else kept
    assert (array == 0xA5).all()
    del kept, array
    assert decoder.manager.allocate_cache(desc)
    decoder.dd.finalize()


@pytest.mark.needs("host_access")
def test_memory_outlives_the_engine(linked: tuple[Prompt, Decoder]) -> None:
    """S-87: also after finalize, with a new engine running."""
    prompt, decoder = linked
    desc = bytes_desc(2, 2, 5000)
    prompt.allocate(desc, [CacheKey(1, 0), KEY])
    cache = decoder.allocate(desc)
    decoder.manager.pull_cache(KEY, cache, 0)
    (tensor,) = decoder.manager.get_cache_tensors(cache, 1)
    decoder.dd.finalize()
    expected = prompt.expected(desc, 1)[5000:] + b"\xa5" * 5000
    assert tensor.numpy().tobytes() == expected
    decoder.dd.init(options())
    decoder.prefill(decoder.dd.kv_cache_manager.allocate_cache(desc))
    array = tensor.numpy()
    del tensor
    decoder.dd.finalize()
    assert array.tobytes() == expected
    del array, cache
