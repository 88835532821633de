"""Cache objects, MemInfo and small enumerations (api 3.3, 7, E-44 to E-48)."""

import gc

import pytest

from llm_datadist import (
    Cache,
    CacheDesc,
    DataType,
    KvCache,
    LLMException,
    LLMRole,
    LLMStatusCode,
    MemInfo,
    Memtype,
    Placement,
    RegisterMemStatus,
)
from llm_datadist.cache_types import int_to_mem_status_dict

HOST = CacheDesc(2, [4, 8], DataType.DT_INT8, Placement.HOST)
DEVICE = CacheDesc(2, [4, 8], DataType.DT_INT8)
BOTH = pytest.mark.parametrize("cls", [KvCache, Cache])


def param_invalid(call, *args):
    with pytest.raises(LLMException) as e:
        call(*args)
    assert e.value.status_code is LLMStatusCode.LLM_PARAM_INVALID
    assert isinstance(e.value, ValueError)
    return str(e.value)


def test_kv_cpu_cache():
    cache = KvCache.create_cpu_cache(HOST, [10, 20])
    assert (cache.cache_id, cache.cache_desc, cache.per_device_tensor_addrs) == (-1, HOST, [[10, 20]])
    assert KvCache.create_cpu_cache(HOST, [[1, 2], [3, 4]]).per_device_tensor_addrs == [[1, 2], [3, 4]]
    assert str(cache) == "KvCache(cache_id = -1, num_devices = 1)"


def test_cpu_cache():
    cache = Cache.create_cpu_cache(HOST, [10, 20])
    assert (cache.cache_id, cache.cache_desc, cache.tensor_addrs, cache.is_blocks_cache) == (-1, HOST, [10, 20], True)
    assert str(cache) == "Cache(cache_id = -1, device_tensor_addrs = 2, is_blocks_cache = True)"


@BOTH
def test_cpu_cache_keeps_its_own_list(cls):
    addrs = [10, 20]
    cache = cls.create_cpu_cache(HOST, addrs)
    addrs.clear()
    assert [10, 20] in (getattr(cache, "tensor_addrs", None), *getattr(cache, "per_device_tensor_addrs", []))


@BOTH
def test_cpu_cache_placement(cls):
    """E-44."""
    assert "Placement.HOST" in param_invalid(cls.create_cpu_cache, DEVICE, [1, 2])


@BOTH
def test_cpu_cache_count(cls):
    """E-45."""
    for bad in ([1], [1, 2, 3], []):
        param_invalid(cls.create_cpu_cache, HOST, bad)
    param_invalid(KvCache.create_cpu_cache, HOST, [[1, 2], [3]])


def test_cpu_cache_mixed():
    """E-46."""
    assert "should be consistent" in param_invalid(KvCache.create_cpu_cache, HOST, [1, [2]])
    assert "should be consistent" in param_invalid(KvCache.create_cpu_cache, HOST, [[1], 2])


@BOTH
def test_cpu_cache_none(cls):
    """E-47."""
    with pytest.raises(AttributeError):
        cls.create_cpu_cache(None, [1, 2])
    with pytest.raises(TypeError):
        cls.create_cpu_cache(HOST, None)
    with pytest.raises(TypeError):
        cls.create_cpu_cache("desc", [1, 2])


@BOTH
def test_cpu_cache_addresses(cls):
    for wrong in ((1, 2), [1, "2"], [1, True], [1, None], "12"):
        with pytest.raises(TypeError):
            cls.create_cpu_cache(HOST, wrong)
    for bad in ([1, -1], [1, 2**64]):
        with pytest.raises(ValueError, match="out of range"):
            cls.create_cpu_cache(HOST, bad)


@BOTH
def test_caches_are_made_by_managers(cls):
    with pytest.raises(TypeError, match=r"create_cpu_cache"):
        cls()


def test_collected_kv_cache_is_reported_once():
    """S-25."""
    reported = []
    cache = KvCache._made(7, DEVICE, [[1, 2]], DEVICE._measured(), reported.append)
    assert (cache.cache_id, cache.per_device_tensor_addrs) == (7, [[1, 2]])
    del cache
    gc.collect()
    assert reported == [7]


def test_deallocated_kv_cache_is_not_reported():
    reported = []
    cache = KvCache._made(7, DEVICE, [[1, 2]], DEVICE._measured(), reported.append)
    cache._clear()
    assert cache.per_device_tensor_addrs == []
    assert str(cache) == "KvCache(cache_id = 7, num_devices = 0)"
    del cache
    gc.collect()
    assert reported == []


def test_cache_clears():
    cache = Cache._made(7, DEVICE, [1, 2], False, DEVICE._measured())
    assert (cache.cache_id, cache.cache_desc, cache.tensor_addrs, cache.is_blocks_cache) == (7, DEVICE, [1, 2], False)
    cache._clear()
    assert cache.tensor_addrs == []


def test_mem_info():
    """E-48."""
    info = MemInfo(Memtype.MEM_TYPE_DEVICE, 1234, 1)
    assert (info.mem_type, info.addr, info.size) == (Memtype.MEM_TYPE_DEVICE, 1234, 1)
    assert str(info) == "MemInfo(mem_type=Memtype.MEM_TYPE_DEVICE, addr=1234, size=1)"
    MemInfo(Memtype.MEM_TYPE_HOST, 0, -1)  # values are looked at where it is used
    for wrong in ((0, 1, 1), (None, 1, 1), (Memtype.MEM_TYPE_HOST, "1", 1), (Memtype.MEM_TYPE_HOST, 1, 1.0)):
        with pytest.raises(TypeError):
            MemInfo(*wrong)


def test_enumerations():
    assert [(m.name, int(m), str(m)) for m in Placement] == [
        ("HOST", 0, "Placement.HOST"),
        ("DEVICE", 1, "Placement.DEVICE"),
    ]
    assert [(m.name, int(m), str(m)) for m in LLMRole] == [
        ("PROMPT", 1, "LLMRole.PROMPT"),
        ("DECODER", 2, "LLMRole.DECODER"),
        ("MIX", 3, "LLMRole.MIX"),
    ]
    assert [(m.name, m.value) for m in Memtype] == [("MEM_TYPE_DEVICE", 0), ("MEM_TYPE_HOST", 1)]
    assert [(m.name, m.value) for m in RegisterMemStatus] == [("OK", 0), ("PREPARING", 1), ("FAILED", 2)]


def test_mem_status_by_number():
    assert [int_to_mem_status_dict[i] for i in (0, 1, 2, 3, -1)] == [
        RegisterMemStatus.OK,
        RegisterMemStatus.PREPARING,
        RegisterMemStatus.FAILED,
        RegisterMemStatus.FAILED,
        RegisterMemStatus.FAILED,
    ]
    assert len(int_to_mem_status_dict) == 3
