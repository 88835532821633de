"""Allocation and registration of CacheManager mode: pools, keys, the user's memory, and what is refused."""

from __future__ import annotations

import array
import ctypes
import itertools
import json
import sys
import threading
from collections.abc import Iterator
from typing import Any

import memory
import numpy as np
import pytest
import users
from ends import End, desc
from pairs import rank_table
from refusals import PARAM_INVALID, Expected, name_of, refuses

from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    KvCache,
    LLMStatusCode,
    Placement,
)

NONE = 2**64 - 1
NOT_EXIST = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
OUT_OF_MEMORY = LLMStatusCode.LLM_OUT_OF_MEMORY
DEVICE, HOST = Placement.DEVICE, Placement.HOST
OF = desc(2, 2, 64)
FOUR_PAGES = json.dumps({"memory_size": 262144})


@pytest.fixture
def end() -> Iterator[End]:
    made = End(None, 1)
    yield made
    made.close()


@pytest.fixture
def small() -> Iterator[End]:
    made = End(None, 1, llm__MemPoolConfig=FOUR_PAGES, llm__HostMemPoolConfig=FOUR_PAGES)
    yield made
    made.close()


# ---------------------------------------------------------------------- pools


@pytest.mark.parametrize("placement", [DEVICE, HOST])
def test_s121_whole_pages(small: End, placement: Placement) -> None:
    """S-121, S-122, E-171, S-18: four tensors up to a page fit exactly; a byte more does not; freed pages fit again."""
    for nbytes in (1 << 16, 1):
        cache = small.allocate(desc(4, 1, nbytes, placement))
        assert all(address % (1 << 16) == 0 for address in small.addresses(cache))
        with refuses(OUT_OF_MEMORY, 262144):
            small.allocate(desc(1, 1, 1, placement))
        small.manager.deallocate_cache(cache)
    with refuses(OUT_OF_MEMORY):
        small.allocate(desc(4, 1, 65537, placement))
    # Nothing was taken by the failure, and no id.
    assert small.id(small.allocate(desc(4, 1, 65536, placement))) == 3


def test_s122_contiguous_pages_per_tensor(small: End) -> None:
    """S-122: a tensor needs pages side by side; tensors of one cache may lie apart."""
    caches = [small.allocate(desc(1, 1, 1)) for _ in range(4)]
    for freed in (0, 2):
        small.manager.deallocate_cache(caches[freed])
    with refuses(OUT_OF_MEMORY, "fragments"):
        small.allocate(desc(1, 1, 65537))
    apart = small.allocate(desc(2, 1, 65536), salt=0)
    small.check(apart, desc(2, 1, 65536), {t: [(0, small.expected(desc(2, 1, 65536), t))] for t in range(2)})


@pytest.mark.parametrize("shift", [10, 16, 20])
def test_s120_page_shift(shift: int) -> None:
    """S-120, S-5, S-121: pages have the said size, and tensors are aligned to it."""
    end = End(None, 1, llm__MemPoolConfig=json.dumps({"memory_size": 5 << shift, "page_shift": shift}))
    try:
        cache = end.allocate(desc(5, 1, 1 << shift))
        assert all(address % min(1 << shift, 4096) == 0 for address in end.addresses(cache))
        with refuses(OUT_OF_MEMORY):
            end.allocate(desc(1, 1, 1))
    finally:
        end.close()


@pytest.mark.parametrize(("placement", "option"), [(DEVICE, "llm.MemPoolConfig"), (HOST, "llm.HostMemPoolConfig")])
def test_s123_a_pool_for_the_placement(placement: Placement, option: str) -> None:
    """S-123, E-162, E-163, E-176: without its pool nothing is allocated, while the rest works, also giving back."""
    end = End(None, 1, **{option.replace(".", "__"): None})
    try:
        of = desc(2, 2, 64, placement)
        for blocks in (False, True):
            with refuses(PARAM_INVALID, option):
                end.allocate(of, blocks=blocks)
        cache = end.register(of, [CacheKey(1, 10)])
        end.manager.deallocate_cache(cache)
        end.manager.remove_cache_key(CacheKey(1, 10))
        end.manager.remove_cache_key(CacheKey(1, 11))
        assert end.id(end.allocate(desc(1, 1, 1, HOST if placement is DEVICE else DEVICE))) == 2
    finally:
        end.close()


def test_e176_without_any_pool() -> None:
    """E-176: an engine without pools takes deallocations and removals as no-ops."""
    end = End(None, 1, llm__MemPoolConfig=None, llm__HostMemPoolConfig=None)
    try:
        end.manager.remove_cache_key(CacheKey(1, 10))
        end.manager.deallocate_blocks_cache(Cache.create_cpu_cache(desc(1, 1, 8, HOST), [4096]))
        end.manager.deallocate_blocks_cache(end.register(OF, blocks=True))
    finally:
        end.close()


# ---------------------------------------------------------------------- keys


def test_keys_of_allocated_caches(cm: tuple[End, End]) -> None:
    """S-12, S-15, S-16, E-167, E-168, E-169: a bound key is invalid here; of equal keys the last counts."""
    there, here = cm
    same, padding = CacheKey(1, 10), CacheKey(1, NONE)
    of = desc(2, 4, 64)
    there.allocate(of, [same, padding, same, padding], salt=0)
    with refuses(PARAM_INVALID, "req_id=10", "already bound"):
        there.allocate(of, [CacheKey(1, 11), same])
    with refuses(PARAM_INVALID, "5", "4"):
        there.allocate(of, [CacheKey(1, 20 + i) for i in range(5)])
    with refuses(PARAM_INVALID, "prefix_id"):
        there.allocate(of, [CacheKey(1, 10, prefix_id=1)])
    cache = here.allocate(of)
    here.manager.pull_cache(same, cache)
    here.check(cache, of, {t: [(0, there.expected(of, t)[128:192])] for t in range(2)})
    # Nothing was bound by what was refused, and the next id is 2.
    assert there.id(there.allocate(of, [CacheKey(1, 11), same])) == 2


def test_s112_keys_of_registered_caches(cm: tuple[End, End]) -> None:
    """S-112, S-24, E-178, S-60: neither pulls nor removals release them, only unregistering does."""
    there, here = cm
    key = CacheKey(1, 10)
    registered = there.register(OF, [key], salt=0)
    cache = here.allocate(OF)
    for _ in range(2):
        here.manager.pull_cache(key, cache)
        there.manager.remove_cache_key(key)
    for make in (there.register, there.allocate):
        with refuses(PARAM_INVALID, "req_id=10", "already bound"):
            make(OF, [key])
    number = there.id(registered)
    there.manager.deallocate_cache(registered)
    assert there.addresses(registered) == []
    here.manager.pull_cache(key, cache)
    there.manager.unregister_cache(number)
    with refuses(NOT_EXIST, "req_id=10"):
        here.manager.pull_cache(key, cache)
    there.allocate(OF, [key])


def test_s112_a_blocks_key_goes_over(cm: tuple[End, End]) -> None:
    """S-112: the last registration under a blocks key wins, for ever; unregistering the former takes nothing away."""
    there, here = cm
    key = BlocksCacheKey(1)
    former = there.register(OF, key, salt=0, blocks=True)
    cache = here.allocate(OF, blocks=True)
    here.manager.pull_blocks(key, cache, [0], [0])
    there.register(OF, key, salt=1, blocks=True)
    here.manager.pull_blocks(key, cache, [0], [0])
    data = [there.expected(OF, t, 1) for t in range(2)]
    here.check(cache, OF, {t: [(0, data[t][:64])] for t in range(2)})
    there.manager.unregister_cache(there.id(former))
    here.manager.pull_blocks(key, cache, [1], [1])
    here.check(cache, OF, {t: [(0, data[t])] for t in range(2)})
    # An allocated cache does not take it over, nor gives it up.
    with refuses(PARAM_INVALID, "already bound"):
        there.allocate(OF, key, blocks=True)


def test_s23_blocks_caches_go_at_once(cm: tuple[End, End]) -> None:
    """S-23, S-20: a blocks cache gives key and memory back; a plain one lives by its keys, then goes."""
    there, here = cm
    blocks, plain = there.allocate(OF, BlocksCacheKey(1), blocks=True), there.allocate(OF, [CacheKey(1, 10)], salt=0)
    there.manager.deallocate_blocks_cache(blocks)
    there.manager.deallocate_cache(plain)
    assert there.addresses(blocks) == there.addresses(plain) == []
    cache = here.allocate(OF)
    with refuses(NOT_EXIST, "model_id=0"):
        here.manager.pull_blocks(BlocksCacheKey(1), here.allocate(OF, blocks=True), [0], [0])
    here.manager.pull_cache(CacheKey(1, 10), cache)
    here.check(cache, OF, {t: [(0, there.expected(OF, t)[:64])] for t in range(2)})
    with refuses(NOT_EXIST):
        here.manager.pull_cache(CacheKeyByIdAndIndex(1, 2, 0), cache)


# ---------------------------------------------------------------------- refusals


def row(rule: str, expected: Expected, *words: object, **changes: Any) -> Any:
    return pytest.param(expected, words, changes, id=name_of(rule, changes))


def shaped(shape: list[int], tensors: int = 2) -> CacheDesc:
    return CacheDesc(tensors, shape, DataType.DT_UINT8, placement=DEVICE)


BAD_DESC = [
    row("E-160", TypeError, "cache_desc", cache_desc=1),
    row("E-160", AttributeError, cache_desc=None),
    row("E-161", PARAM_INVALID, "num_tensors is 0", cache_desc=shaped([2, 64], 0)),
    row("E-164", PARAM_INVALID, "1 to 31", cache_desc=shaped([1] * 32)),
    row("E-164", PARAM_INVALID, cache_desc=shaped([2, 0])),
    row("E-164", PARAM_INVALID, cache_desc=shaped([0, 64])),
    row("E-164", PARAM_INVALID, cache_desc=shaped([2**32, 2**32])),
]
BAD_KEYS = [
    row("E-160", TypeError, "cache_keys", cache_keys=None),
    row("E-160", TypeError, "cache_keys", cache_keys=CacheKey(1, 1)),
    row("E-160", TypeError, "cache_keys", cache_keys=[1]),
    row("E-160", TypeError, "cache_keys", cache_keys=[BlocksCacheKey(1)]),
    row("E-169", PARAM_INVALID, "3", "2", cache_keys=[CacheKey(1, i) for i in range(3)]),
    row("E-170", PARAM_INVALID, "prefix_id", cache_keys=[CacheKey(1, 1, prefix_id=1)]),
]


def check_no_trace(end: End) -> None:
    """Check that the refused call took neither memory nor an id nor a key."""
    assert all(used == 0 for used in end.manager._engine.caches.used())
    assert end.id(end.allocate(OF, [CacheKey(1, 1), CacheKey(1, 2)])) == 1
    assert end.id(end.allocate(OF, BlocksCacheKey(1), blocks=True)) == 2


@pytest.mark.parametrize(("expected", "words", "changes"), BAD_DESC + BAD_KEYS)
def test_allocate_cache(end: End, expected: Expected, words: tuple[object, ...], changes: dict[str, Any]) -> None:
    """S-19: nothing is allocated or bound by what is refused."""
    with refuses(expected, *words):
        end.manager.allocate_cache(**{"cache_desc": OF, **changes})
    check_no_trace(end)


@pytest.mark.parametrize(
    ("expected", "words", "changes"),
    [*BAD_DESC, row("E-160", TypeError, "blocks_cache_key", blocks_cache_key=CacheKey(1, 1))],
)
def test_allocate_blocks(end: End, expected: Expected, words: tuple[object, ...], changes: dict[str, Any]) -> None:
    """S-19: likewise."""
    with refuses(expected, *words):
        end.manager.allocate_blocks_cache(**{"cache_desc": OF, **changes})
    check_no_trace(end)


BAD_ADDRESSES = [
    row("E-180", TypeError, "addrs", addrs=None),
    row("E-180", TypeError, "addrs", addrs=(1, 2)),
    row("E-180", TypeError, "addrs", addrs=[1, "2"]),
    row("E-180", TypeError, "addrs", addrs=[1, 2.0]),
    row("E-180", TypeError, "addrs", addrs=[1, True]),
    row("E-180", TypeError, "addrs", addrs=[1, None]),
    row("E-180", ValueError, "addrs", addrs=[1, -1]),
    row("E-180", ValueError, "addrs", addrs=[1, 2**64]),
    row("E-180", TypeError, "remote_accessible", remote_accessible=1),
    row("E-181", PARAM_INVALID, "addrs has 0", addrs=[]),
    row("E-181", PARAM_INVALID, "addrs has 1", "2", addrs=[1]),
    row("E-181", PARAM_INVALID, "addrs has 3", "2", addrs=[1, 2, 3]),
    row("E-181", PARAM_INVALID, "is 0", addrs=[1, 0]),
    row("E-181", PARAM_INVALID, "127", "128", addrs=[bytearray(128), bytearray(127)]),
    row("E-181", PARAM_INVALID, "read-only", addrs=[bytearray(128), bytes(128)]),
    row("E-183", AttributeError, cache_desc=None),
]


@pytest.mark.parametrize(("expected", "words", "changes"), [*BAD_DESC, *BAD_KEYS, *BAD_ADDRESSES])
def test_register_cache(end: End, expected: Expected, words: tuple[object, ...], changes: dict[str, Any]) -> None:
    """S-110: nothing is registered or bound by what is refused."""
    with refuses(expected, *words):
        end.manager.register_cache(**{"cache_desc": OF, "addrs": [4096, 8192], **changes})
    check_no_trace(end)


@pytest.mark.parametrize(
    ("expected", "words", "changes"),
    [*BAD_DESC, *BAD_ADDRESSES, row("E-180", TypeError, "blocks_cache_key", blocks_cache_key=CacheKey(1, 1))],
)
def test_register_blocks(end: End, expected: Expected, words: tuple[object, ...], changes: dict[str, Any]) -> None:
    """S-110: the same checks."""
    with refuses(expected, *words):
        end.manager.register_blocks_cache(**{"cache_desc": OF, "addrs": [4096, 8192], **changes})
    check_no_trace(end)


@pytest.mark.parametrize(
    ("expected", "cache_id"), [(TypeError, None), (TypeError, "1"), (TypeError, True), (ValueError, 2**63)]
)
def test_e184_unregister(end: End, expected: Expected, cache_id: Any) -> None:
    """E-184: wrong types and widths."""
    with refuses(expected, "cache_id"):
        end.manager.unregister_cache(cache_id)


def test_e172_e174_e175_deallocation(end: End) -> None:
    """E-172, E-174, E-175, S-22: wrong types, wrong forms; twice, unknown and host caches are no-ops."""
    plain, paged = end.allocate(OF), end.allocate(OF, blocks=True)
    for call in (end.manager.deallocate_cache, end.manager.deallocate_blocks_cache):
        for wrong in (None, 1, KvCache.create_cpu_cache(desc(1, 1, 8, HOST), [4096])):
            with refuses(TypeError, "cache"):
                call(wrong)
    with refuses(PARAM_INVALID, "is_blocks_cache = True"):
        end.manager.deallocate_cache(paged)
    with refuses(PARAM_INVALID, "is_blocks_cache = False"):
        end.manager.deallocate_blocks_cache(plain)
    assert len(end.addresses(plain)) == len(end.addresses(paged)) == 2
    for _ in range(2):
        end.manager.deallocate_cache(plain)
        end.manager.deallocate_blocks_cache(paged)
    assert all(used == 0 for used in end.manager._engine.caches.used())
    with refuses(TypeError, "cache_key"):
        end.manager.remove_cache_key(BlocksCacheKey(1))


def test_s25_caches_are_not_deallocated_when_collected(end: End) -> None:
    """S-25: only KvCache objects are."""
    cache = end.allocate(OF)
    del cache
    assert any(end.manager._engine.caches.used())


# ---------------------------------------------------------------------- remote accessibility


def test_s111_defaults(remote_cm: tuple[End, End]) -> None:
    """S-111: DEVICE memory before a link is accessible, HOST is not; after link_clusters neither is, unless told."""
    there, here = remote_cm
    source = there.allocate(OF, salt=0)
    before, host = here.register(OF), here.register(desc(2, 2, 64, HOST))
    told = here.register(desc(2, 2, 64, HOST), remote_accessible=True)
    here.link(there)
    late, late_told = here.register(OF), here.register(OF, remote_accessible=True)
    key = CacheKeyByIdAndIndex(1, there.id(source), 0)
    for cache in (before, told, late_told):
        here.manager.pull_cache(key, cache)
    for cache in (host, late):
        with refuses(PARAM_INVALID, "not remote accessible"):
            here.manager.pull_cache(key, cache)


def test_s111_e182_after_link(end: End) -> None:
    """S-111, E-182, S-153: after link() an explicit True is refused, before the addresses are looked at."""
    end.dd.link("with nobody", {1: 0, 2: 1}, rank_table(2))
    for register in (end.manager.register_cache, end.manager.register_blocks_cache):
        with refuses(PARAM_INVALID, "remote_accessible", "link"):
            register(OF, [0], remote_accessible=True)
        register(OF, [end.take(128) for _ in range(2)])


# ---------------------------------------------------------------------- the user's memory


@pytest.mark.needs("any_memory")
def test_s211_registration_touches_nothing(end: End) -> None:
    """S-211, S-110: any address above 0 is taken, with a warning where nothing is mapped."""
    with pytest.warns(RuntimeWarning, match="not .*mapped"):
        cache = end.manager.register_cache(desc(1, 1, 8), [1])
    with pytest.warns(RuntimeWarning, match="not .*mapped"):
        end.manager.register_blocks_cache(desc(1, 1, 8), [2**64 - 9])
    assert cache.tensor_addrs == [1]
    given = end.take(128)
    end.write(given, b"\x17" * 128)
    end.manager.unregister_cache(end.id(end.manager.register_cache(desc(1, 2, 64), [given])))
    assert end.read(given, 128) == b"\x17" * 128


def objects() -> list[Any]:
    """Give objects of 128 bytes of memory of every kind that is taken."""

    class Dlpack:
        """Only DLPack, as a torch tensor is."""

        def __init__(self) -> None:
            self.array = np.zeros((2, 32), np.float16)

        def __dlpack__(self, **more: Any) -> Any:
            return self.array.__dlpack__(**more)

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.array.__dlpack_device__()

    return [
        np.zeros((2, 64), np.uint8),
        np.zeros(32, np.float32).reshape(2, 16),
        bytearray(128),
        memoryview(bytearray(128)),
        array.array("q", [0] * 16),
        (ctypes.c_double * 16)(),
        Dlpack(),
    ]


@pytest.mark.needs("any_memory")
@pytest.mark.parametrize("number", range(7))
def test_s110_objects_with_memory(cm: tuple[End, End], number: int) -> None:
    """S-110: arrays, buffers and DLPack objects are destinations and sources, and live as long as the registration."""
    there, here = cm
    given = objects()[number]
    of = desc(1, 2, 64)
    cache = here.manager.register_cache(of, [given], [CacheKey(2, 10)])
    there.allocate(of, [CacheKey(1, 10)], salt=0)
    here.manager.pull_cache(CacheKey(1, 10), cache, 1)
    wanted = bytes(64) + there.expected(of, 0)[:64]
    assert np.asarray(getattr(given, "array", given)).tobytes() == wanted
    del given
    back = there.allocate(of)
    there.manager.pull_cache(CacheKey(2, 10), back, 0)
    there.manager.pull_cache(CacheKeyByIdAndIndex(2, here.id(cache), 1), back, 1)
    there.check(back, of, {0: [(0, wanted)]})


@pytest.mark.needs("any_memory")
@pytest.mark.parametrize("side", ["source", "destination"])
def test_unmapped_memory_in_pulls(cm: tuple[End, End], side: str) -> None:
    """S-110: a pull from or into memory that is not there fails and never crashes; the link stays usable."""
    there, here = cm
    of = desc(2, 2, 64)
    if side == "source":
        addresses = [there.peer.make("users:hole") for _ in range(2)]  # type: ignore[union-attr]
        there.peer.make("cm_inside:register_wild", there.manager, of, addresses, [CacheKey(1, 10)])  # type: ignore[union-attr]
        cache = here.allocate(of)
    else:
        there.allocate(of, [CacheKey(1, 10)], salt=0)
        with pytest.warns(RuntimeWarning, match="not .*mapped"):
            cache = here.manager.register_cache(of, [users.hole()] * 2)
    with refuses(PARAM_INVALID, "Bad address"):
        here.manager.pull_cache(CacheKey(1, 10), cache)
    there.allocate(of, [CacheKey(1, 11)], salt=1)
    good = here.allocate(of)
    here.manager.pull_cache(CacheKey(1, 11), good)
    here.check(good, of, {t: [(0, there.expected(of, t, 1)[:64])] for t in range(2)})
    if side == "destination":
        # Nothing of the failed pull was released.
        here.manager.pull_cache(CacheKey(1, 10), good, 1)


@pytest.mark.needs("any_memory")
def test_read_only_destination_fails(cm: tuple[End, End]) -> None:
    """S-110: memory that can't be written is an error, never a signal."""
    there, here = cm
    of = desc(1, 1, 64)
    there.allocate(of, [CacheKey(1, 10)], salt=0)
    data = ctypes.create_string_buffer(8192)
    page = -(-ctypes.addressof(data) // 4096) * 4096
    libc = ctypes.CDLL(None)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert libc.mprotect(page, 4096, 1) == 0
    try:
        cache = here.manager.register_cache(of, [page])
        with refuses(PARAM_INVALID, "Bad address"):
            here.manager.pull_cache(CacheKey(1, 10), cache)
        here.manager.unregister_cache(cache.cache_id)
    finally:
        assert libc.mprotect(page, 4096, 3) == 0


def test_finalize_with_registered_memory(cm: tuple[End, End]) -> None:
    """S-172: registrations are forgotten, and the memory stays the user's."""
    there, here = cm
    cache = here.register(OF, salt=0)
    address = cache.tensor_addrs[0]
    here.close()
    assert memory.read(address, OF.size) == here.expected(OF, 0)
    with refuses(LLMStatusCode.LLM_ENGINE_FINALIZED):
        here.manager.unregister_cache(cache.cache_id)
    there.close()


def test_nothing_needs_torch(end: End) -> None:
    """No call of this mode imports torch."""
    end.register(OF, [CacheKey(1, 10)])
    assert "torch" not in sys.modules


def test_many_threads_allocate_and_register(end: End) -> None:
    """S-191, S-10: calls from several threads get ids of their own and never the same memory."""
    ids: list[int] = []
    spans: list[tuple[int, int]] = []

    def work() -> None:
        for _ in range(20):
            cache = end.manager.allocate_cache(OF)
            registered = end.manager.register_cache(OF, [end.take(128) for _ in range(2)])
            ids.extend((cache.cache_id, registered.cache_id))
            spans.extend((address, address + 128) for address in cache.tensor_addrs)
            end.manager.unregister_cache(registered.cache_id)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(ids) == list(range(1, 161))
    spans.sort()
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_e82_pool_memory_is_not_available() -> None:
    """E-82, S-120: a pool that the machine can't hold is OUT_OF_MEMORY at init, which can then be tried again."""
    for option in ("llm__MemPoolConfig", "llm__HostMemPoolConfig"):
        with refuses(OUT_OF_MEMORY):
            End(None, 1, **{option: json.dumps({"memory_size": 1 << 47, "page_shift": 30})})
    End(None, 1).close()
