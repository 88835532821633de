"""Pulls of CacheManager mode: which bytes go where, from which placements, and what is released."""

from __future__ import annotations

from typing import Any

import pytest
from ends import End, desc
from refusals import PARAM_INVALID, refuses

from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    LLMStatusCode,
    MemInfo,
    Memtype,
    Placement,
)

NOT_EXIST = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
DEVICE, HOST = Placement.DEVICE, Placement.HOST
KEY = CacheKey(1, 10)
BLOCKS = BlocksCacheKey(1)


@pytest.mark.parametrize(("size", "length"), [(-1, 64), (1, 1), (64, 64)])
def test_s35_length_is_size_or_the_destination_slot(cm: tuple[End, End], size: int, length: int) -> None:
    """S-35: no offsets; the length is the size or a destination slot, and the source slot may be longer."""
    there, here = cm
    of, to = desc(4, 3, 96), desc(4, 2, 64)
    there.allocate(of, [CacheKey(1, 9), KEY], salt=0)
    cache = here.allocate(to)
    here.manager.pull_cache(KEY, cache, 1, size)
    here.check(cache, to, {t: [(64, there.expected(of, t)[96 : 96 + length])] for t in range(4)})


def test_s35_lengths_that_do_not_fit(cm: tuple[End, End]) -> None:
    """S-35: neither slot may be shorter than the length; offsets do not exist, and only warn."""
    there, here = cm
    there.allocate(desc(2, 1, 256), [KEY], salt=0)
    to = desc(2, 1, 512)
    cache = here.allocate(to)
    for size in (513, 257, -1):
        with refuses(PARAM_INVALID, 512 if size < 0 else size):
            here.manager.pull_cache(KEY, cache, 0, size)
    here.untouched(cache, to)
    with pytest.warns(RuntimeWarning, match="src_cache_offset"):
        here.manager.pull_cache(KEY, cache, 0, 256, src_cache_offset=8)
    here.check(cache, to, {t: [(0, there.expected(desc(2, 1, 256), t))] for t in range(2)})


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("registered", [False, True])
def test_layers_of_any_number_of_tensors(cm: tuple[End, End], n: int, registered: bool) -> None:
    """S-41: a layer is n consecutive tensors, in pools and in registered memory, for slots and for blocks."""
    there, here = cm
    of = desc(4 * n, 3, 40)
    layers = {"src_layer_range": range(1, 3), "dst_layer_range": range(2, 4), "tensor_num_per_layer": n}
    make = {False: End.allocate, True: End.register}[registered]
    make(there, of, [KEY], salt=0)
    make(there, of, BLOCKS, salt=1, blocks=True)
    cache, paged = make(here, of), make(here, of, blocks=True)
    here.manager.pull_cache(KEY, cache, 2, **layers)
    here.manager.pull_blocks(BLOCKS, paged, [0, 2], [1, 0], **layers)
    pairs = [(n + i, 2 * n + i) for i in range(2 * n)]
    here.check(cache, of, {d: [(80, there.expected(of, s)[:40])] for s, d in pairs})
    here.check(
        paged,
        of,
        {d: [(40, there.expected(of, s, 1)[:40]), (0, there.expected(of, s, 1)[80:])] for s, d in pairs},
    )


def test_s57_worked_example(cm: tuple[End, End]) -> None:
    """S-57, S-56: seven integers into blocks of two: 8, 8, 8 and 4 bytes; two blocks alone get 16 bytes."""
    there, here = cm
    of = CacheDesc(2, [1, 7], DataType.DT_INT32)
    to = CacheDesc(2, [8, 2], DataType.DT_INT32)
    there.allocate(of, [KEY], salt=0)
    there.allocate(of, [CacheKey(1, 11)], salt=0)
    cache, other = here.allocate(to, blocks=True), here.allocate(to, blocks=True)
    here.manager.pull_blocks(KEY, cache, [], [1, 3, 5, 7])
    here.manager.pull_blocks(CacheKey(1, 11), other, dst_blocks=[1, 3])
    data = [there.expected(of, t) for t in range(2)]
    here.check(cache, to, {t: [(16 * i + 8, data[t][8 * i : 8 * i + 8]) for i in range(4)] for t in range(2)})
    here.check(other, to, {t: [(16 * i + 8, data[t][8 * i : 8 * i + 8]) for i in range(2)] for t in range(2)})


def test_s56_slots_of_several(cm: tuple[End, End]) -> None:
    """S-56: a slot is cut, never the tensor: the last chunk of slot 1 is short, and no byte of slot 2 comes along."""
    there, here = cm
    of, to = desc(2, 3, 100), desc(2, 6, 32)
    source = there.allocate(of, [CacheKey(1, 9), KEY], salt=0)
    data = [there.expected(of, t)[100:200] for t in range(2)]
    pieces = {t: [(32 * b, data[t][32 * i : 32 * i + 32]) for i, b in enumerate([5, 0, 3, 1])] for t in range(2)}
    for key in (CacheKeyByIdAndIndex(1, there.id(source), 1), KEY):
        if key is KEY:
            # By id the bound key was released as if pulled by it (S-60), so it is bound anew.
            there.allocate(of, [CacheKey(1, 12), KEY], salt=0)
        cache = here.allocate(to, blocks=True)
        here.manager.pull_blocks(key, cache, [], [5, 0, 3, 1])
        here.check(cache, to, pieces)
    cache = here.allocate(to, blocks=True)
    slot = CacheKeyByIdAndIndex(1, there.id(source), 2)
    for blocks in ([0, 1, 2, 3, 4], [0, 6]):
        with refuses(PARAM_INVALID, 5 if len(blocks) == 5 else 6):
            here.manager.pull_blocks(slot, cache, [], blocks)
    here.untouched(cache, to)
    wide = here.allocate(desc(2, 2, 101), blocks=True)
    with refuses(PARAM_INVALID, 101, 100):
        here.manager.pull_blocks(slot, wide, [], [0])
    here.untouched(wide, desc(2, 2, 101))


def test_s60_a_slot_cut_into_blocks_releases_its_key(cm: tuple[End, End]) -> None:
    """S-60: cache to blocks releases like pull_cache, also by id; pulls from registered caches release nothing."""
    there, here = cm
    of = desc(2, 2, 64)
    there.allocate(of, [KEY], salt=0)
    by_id = there.allocate(of, [CacheKey(1, 11)], salt=0)
    there.register(of, [CacheKey(1, 12)], salt=0)
    cache = here.allocate(of, blocks=True)
    here.manager.pull_blocks(KEY, cache, [], [0])
    here.manager.pull_blocks(CacheKeyByIdAndIndex(1, there.id(by_id), 0), cache, [], [0])
    for request in (10, 11):
        with refuses(NOT_EXIST, f"req_id={request}"):
            here.manager.pull_blocks(CacheKey(1, request), cache, [], [0])
    for _ in range(2):
        here.manager.pull_blocks(CacheKey(1, 12), cache, [], [0])
        here.manager.pull_cache(CacheKey(1, 12), here.allocate(of))


def test_s39_s58_forms(cm: tuple[End, End]) -> None:
    """S-39, S-58, E-205, E-235, E-258: paged caches take no part in pulls of slots, nor plain ones in blocks."""
    there, here = cm
    of = desc(2, 2, 64)
    paged = there.allocate(of, BLOCKS, salt=0, blocks=True)
    there.allocate(of, [KEY], salt=0)
    plain, blocks = here.allocate(of), here.allocate(of, blocks=True)
    with refuses(PARAM_INVALID, "cache", "not a blocks cache"):
        here.manager.pull_cache(KEY, blocks)
    with refuses(PARAM_INVALID, "dst_cache", "a blocks cache"):
        here.manager.pull_blocks(BLOCKS, plain, [0], [0])
    with refuses(PARAM_INVALID, "a blocks cache"):
        here.manager.pull_cache(CacheKeyByIdAndIndex(1, there.id(paged), 0), plain)
    with refuses(PARAM_INVALID, "a blocks cache"):
        here.manager.pull_blocks(CacheKeyByIdAndIndex(1, there.id(paged), 0), blocks, [], [0])
    # No key leads from blocks to a slot: a list of source blocks needs a paged destination.
    with refuses(PARAM_INVALID, "dst_cache"):
        here.manager.pull_blocks(BLOCKS, plain, [0, 1], [0])
    here.untouched(plain, of)
    here.untouched(blocks, of)


PLACEMENTS = [(DEVICE, DEVICE), (DEVICE, HOST), (HOST, DEVICE)]


@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize(("source", "destination"), PLACEMENTS)
def test_s59_what_goes_between_placements(
    cm: tuple[End, End], source: Placement, destination: Placement, registered: bool
) -> None:
    """S-59: slots and blocks go both ways between device and host; a slot is cut into blocks from the device only."""
    there, here = cm
    of, to = desc(3, 2, 64, source), desc(3, 2, 64, destination)
    make = {False: End.allocate, True: End.register}[registered]
    make(there, of, [KEY, CacheKey(1, 11)], salt=0)
    make(there, of, BLOCKS, salt=1, blocks=True)
    plain, paged, cut = make(here, to), make(here, to, blocks=True), make(here, to, blocks=True)
    here.manager.pull_cache(KEY, plain, 1)
    here.manager.pull_blocks(BLOCKS, paged, [1, 0], [0, 1])
    here.check(plain, to, {t: [(64, there.expected(of, t)[:64])] for t in range(3)})
    swapped = [there.expected(of, t, 1) for t in range(3)]
    here.check(paged, to, {t: [(0, swapped[t][64:] + swapped[t][:64])] for t in range(3)})
    if source is HOST:
        with refuses(PARAM_INVALID, "HOST"):
            here.manager.pull_blocks(CacheKey(1, 11), cut, [], [1])
        here.untouched(cut, to)
    else:
        here.manager.pull_blocks(CacheKey(1, 11), cut, [], [1])
        here.check(cut, to, {t: [(64, there.expected(of, t)[64:])] for t in range(3)})


def test_s59_blocks_must_be_equal(cm: tuple[End, End]) -> None:
    """S-59, E-259: blocks of unequal size do not go from device to host."""
    there, here = cm
    there.allocate(desc(2, 4, 32), BLOCKS, salt=0, blocks=True)
    to = desc(2, 4, 64, HOST)
    cache = here.allocate(to, blocks=True)
    with refuses(PARAM_INVALID, 32, 64):
        here.manager.pull_blocks(BLOCKS, cache, [0], [0])
    here.untouched(cache, to)


@pytest.mark.parametrize("registered", [False, True])
def test_e236_host_to_host(cm: tuple[End, End], registered: bool) -> None:
    """E-236, S-59: nothing goes from host to host."""
    there, here = cm
    of = desc(2, 2, 64, HOST)
    make = {False: End.allocate, True: End.register}[registered]
    make(there, of, [KEY], salt=0)
    make(there, of, BLOCKS, salt=0, blocks=True)
    plain, paged = make(here, of), make(here, of, blocks=True)
    calls: list[tuple[Any, ...]] = [(KEY, paged, [], [0]), (BLOCKS, paged, [0], [0])]
    with refuses(LLMStatusCode.LLM_FEATURE_NOT_ENABLED, "HOST"):
        here.manager.pull_cache(KEY, plain)
    for call in calls:
        with refuses(LLMStatusCode.LLM_FEATURE_NOT_ENABLED, "HOST"):
            here.manager.pull_blocks(*call)
    here.untouched(plain, of)
    here.untouched(paged, of)
    # The failure released nothing.
    here.manager.pull_cache(KEY, here.allocate(desc(2, 2, 64)))


@pytest.mark.parametrize("side", ["source", "destination"])
def test_e237_the_host_side_needs_a_device_pool(peer: Any, side: str) -> None:
    """E-237, E-204: without a device pool on the side of the host cache nothing goes; with one it does."""
    there = End(peer, 1, llm__MemPoolConfig=None) if side == "source" else End(peer, 1)
    here = End(None, 2, llm__MemPoolConfig=None) if side == "destination" else End(None, 2)
    try:
        here.link(there)
        placed = {"source": (HOST, DEVICE), "destination": (DEVICE, HOST)}[side]
        of, to = (desc(2, 1, 64, placement) for placement in placed)
        there.allocate(of, [KEY], salt=0)
        cache = here.allocate(to)
        with refuses(PARAM_INVALID, "device pool", "llm.MemPoolConfig"):
            here.manager.pull_cache(KEY, cache)
        here.untouched(cache, to)
    finally:
        here.close()


def test_s60_key_stays_after_a_refused_pull(cm: tuple[End, End]) -> None:
    """S-60: a pull that is refused releases nothing."""
    there, here = cm
    of = desc(2, 1, 64)
    there.allocate(of, [KEY], salt=0)
    small, cache = here.allocate(desc(4, 1, 64)), here.allocate(of)
    with refuses(PARAM_INVALID, "2 source", "4 destination"):
        here.manager.pull_cache(KEY, small)
    here.manager.pull_cache(KEY, cache)
    here.check(cache, of, {t: [(0, there.expected(of, t))] for t in range(2)})
    with refuses(NOT_EXIST, "req_id=10"):
        here.manager.pull_cache(KEY, cache)


def test_links_carry_pulls_both_ways(cm: tuple[End, End]) -> None:
    """S-130: the side that was linked to pulls over the same link."""
    there, here = cm
    of = desc(2, 2, 64)
    here.allocate(of, [CacheKey(2, 10)], salt=0)
    cache = there.allocate(of)
    there.manager.pull_cache(CacheKey(2, 10), cache, 1)
    there.check(cache, of, {t: [(64, here.expected(of, t)[:64])] for t in range(2)})


# ---------------------------------------------------------------------- remote-accessible mode


def test_s114_s116_pulls_by_id_and_by_blocks(remote_cm: tuple[End, End]) -> None:
    """S-114, S-116: unequal strides, every slot by its id, no key released; pool memory and registered memory."""
    there, here = remote_cm
    of, to = desc(2, 3, 96), desc(2, 3, 64)
    key = CacheKey(1, 10)
    sources = [there.allocate(of, [key], salt=0), there.register(of, salt=0)]
    there.register(desc(2, 3, 64), BLOCKS, salt=1, blocks=True)
    cache, paged = here.register(to), here.allocate(to, blocks=True)
    here.link(there)
    for source in sources:
        here.fill(cache, to, None)
        for _ in range(2):
            here.manager.pull_cache(CacheKeyByIdAndIndex(1, there.id(source), 2), cache, 1)
        here.check(cache, to, {t: [(64, there.expected(of, t)[192:256])] for t in range(2)})
    for _ in range(2):
        here.manager.pull_blocks(CacheKeyByIdAndIndex(1, there.id(sources[0]), 0), paged, [], [2, 0])
        here.manager.pull_blocks(key, paged, [], [2, 0])
    data = [there.expected(of, t) for t in range(2)]
    here.check(paged, to, {t: [(128, data[t][:64]), (0, data[t][64:96])] for t in range(2)})
    here.manager.pull_blocks(BLOCKS, paged, [1], [1])
    data = [there.expected(to, t, 1)[64:128] + data[t][:64] for t in range(2)]
    assert [here.read(address + 64, 128) for address in here.addresses(paged)] == data


def test_e202_request_keys_in_remote_accessible_mode(remote_cm: tuple[End, End]) -> None:
    """E-202, S-114: pull_cache takes ids only."""
    there, here = remote_cm
    there.allocate(desc(2, 1, 64), [KEY], salt=0)
    cache = here.allocate(desc(2, 1, 64))
    here.link(there)
    with refuses(TypeError, "cache_key", "CacheKeyByIdAndIndex"):
        here.manager.pull_cache(KEY, cache)
    here.untouched(cache, desc(2, 1, 64))


@pytest.mark.parametrize("side", ["source", "destination"])
def test_e238_both_caches_must_be_accessible(remote_cm: tuple[End, End], side: str) -> None:
    """E-238, S-114: a cache that was registered as not accessible, or after the link, is not pulled from or into."""
    there, here = remote_cm
    of = desc(2, 1, 64)
    source = there.register(of, salt=0, remote_accessible=side == "destination")
    before = here.register(of, remote_accessible=side == "source")
    here.link(there)
    late = here.register(of)
    allocated = here.allocate(of)
    caches = [before] if side == "source" else [before, late]
    for cache in caches:
        with refuses(PARAM_INVALID, "not remote accessible"):
            here.manager.pull_cache(CacheKeyByIdAndIndex(1, there.id(source), 0), cache)
        here.untouched(cache, of)
    if side == "destination":
        here.manager.pull_cache(CacheKeyByIdAndIndex(1, there.id(source), 0), allocated)


def test_s115_the_table_is_current(remote_cm: tuple[End, End]) -> None:
    """S-115: caches that come after the first pull are found, and those that went are not."""
    there, here = remote_cm
    of = desc(2, 1, 64)
    first = there.allocate(of, salt=0)
    cache = here.allocate(of)
    here.link(there)
    here.manager.pull_cache(CacheKeyByIdAndIndex(1, there.id(first), 0), cache)
    second = there.allocate(of, salt=1)
    number = there.id(first)
    there.manager.deallocate_cache(first)
    here.manager.pull_cache(CacheKeyByIdAndIndex(1, there.id(second), 0), cache)
    here.check(cache, of, {t: [(0, there.expected(of, t, 1))] for t in range(2)})
    with refuses(NOT_EXIST, f"cache {number}"):
        here.manager.pull_cache(CacheKeyByIdAndIndex(1, number, 0), cache)


def test_s117_remap(remote_cm: tuple[End, End]) -> None:
    """S-117, E-185, E-186: without a link NOT_YET_LINK, with one a no-op that touches nothing."""
    there, here = remote_cm
    of = desc(1, 1, 64)
    good = MemInfo(Memtype.MEM_TYPE_DEVICE, here.addresses(here.register(of))[0], of.size)
    for bad in (
        None,
        1,
        [],
        [1],
        [good, None],
        MemInfo(Memtype.MEM_TYPE_HOST, 1234, 1),
        *(MemInfo(Memtype.MEM_TYPE_DEVICE, address, size) for address, size in ((0, 1), (-1, 1), (1, 0), (1, -1))),
    ):
        with refuses(PARAM_INVALID):
            here.manager.remap_registered_memory(bad)
    with refuses(LLMStatusCode.LLM_NOT_YET_LINK):
        here.manager.remap_registered_memory(good)
    here.link(there)
    here.manager.remap_registered_memory(good)
    here.manager.remap_registered_memory([good, good])
