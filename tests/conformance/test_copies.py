"""copy_cache, copy_blocks and swap_blocks, in both modes: local, and compared byte by byte."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import users
from ends import End, desc
from refusals import PARAM_INVALID, Expected, name_of, refuses

from llm_datadist import (
    Cache,
    CacheDesc,
    CacheKey,
    DataType,
    KvCache,
    LLMStatusCode,
    Placement,
)

NOT_EXIST = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
FAILED = LLMStatusCode.LLM_FAILED
DEVICE, HOST = Placement.DEVICE, Placement.HOST
OF = desc(3, 4, 32)


@pytest.fixture(params=["kv", "cm"])
def end(request: pytest.FixtureRequest) -> Iterator[End]:
    made = End(None, 1, cm=request.param == "cm")
    yield made
    made.close()


@pytest.fixture
def cm_end() -> Iterator[End]:
    made = End(None, 1)
    yield made
    made.close()


def cpu_cache(end: End, of: CacheDesc, addresses: list[int]) -> Any:
    """Describe host memory as a cache of the mode."""
    return (Cache if end.cm else KvCache).create_cpu_cache(of, addresses)  # type: ignore[attr-defined]


# ---------------------------------------------------------------------- copy_cache


def test_s73_worked_examples(end: End) -> None:
    """S-73, S-70: the three copies of integers, and 128 bytes from slot 1 to slot 0."""
    of, to = CacheDesc(1, [4, 4], DataType.DT_INT32), CacheDesc(1, [4, 8], DataType.DT_INT32)
    source, cache = end.allocate(of), end.allocate(to)
    end.write(end.addresses(source)[0], np.arange(16, dtype=np.int32).tobytes())
    for arguments, elements in (
        ((2, 1), {16: [4, 5, 6, 7]}),
        ((1, 0, 0, 8), {8: [0, 1]}),
        ((0, 2, 4, 8), {0: [0, 9, 10, 0]}),
    ):
        end.write(end.addresses(cache)[0], bytes(to.size))
        end.manager.copy_cache(cache, source, *arguments)
        wanted = np.zeros(32, np.int32)
        for at, values in elements.items():
            wanted[at : at + len(values)] = values
        assert end.read(end.addresses(cache)[0], to.size) == wanted.tobytes()
    wide = desc(2, 2, 256)
    both = end.allocate(wide, salt=0)
    end.manager.copy_cache(both, both, 0, 1, 0, 128)
    data = [end.expected(wide, t) for t in range(2)]
    end.check(both, wide, {t: [(0, data[t][256:384] + data[t][128:])] for t in range(2)})


def test_s71_edges_of_the_slots(end: End) -> None:
    """S-70, S-71: the rest of a source slot from an offset, up to the last byte on either side."""
    source, cache = end.allocate(OF, salt=0), end.allocate(desc(3, 2, 40))
    end.manager.copy_cache(cache, source, 1, 3, 31)
    end.manager.copy_cache(cache, source, dst_batch_index=0, src_batch_index=2, offset=8, size=24, req_id=7)
    data = [end.expected(OF, t) for t in range(3)]
    end.check(cache, desc(3, 2, 40), {t: [(40 + 31, data[t][127:128]), (8, data[t][72:96])] for t in range(3)})


def test_s72_onto_itself(end: End) -> None:
    """S-72: a slot may be copied onto itself, and to another slot of its cache."""
    cache = end.allocate(OF, salt=0)
    end.manager.copy_cache(cache, cache, 2, 2)
    end.manager.copy_cache(cache, cache, 0, 3)
    data = [end.expected(OF, t) for t in range(3)]
    end.check(cache, OF, {t: [(0, data[t][96:] + data[t][32:])] for t in range(3)})


@pytest.mark.parametrize("shift", [-3, 5])
@pytest.mark.parametrize("pooled", [pytest.param(False, marks=pytest.mark.needs("any_memory")), True])
def test_s72_overlapping_registrations(cm_end: End, shift: int, pooled: bool) -> None:
    """S-72: two caches that share memory are copied as if through a buffer, whoever the memory is from."""
    end = cm_end
    of = desc(1, 1, 4096)
    base = end.addresses(end.allocate(desc(1, 1, 8192)))[0] if pooled else end.take(8192)
    end.write(base, bytes(range(256)) * 32)
    caches = [end.manager.register_cache(of, [base + 1000 + at]) for at in (0, shift)]
    before = end.read(base, 8192)
    end.manager.copy_cache(caches[1], caches[0])
    wanted = bytearray(before)
    wanted[1000 + shift : 1000 + shift + 4096] = before[1000 : 1000 + 4096]
    assert end.read(base, 8192) == bytes(wanted)


def test_s72_a_registration_over_an_allocated_cache(cm_end: End) -> None:
    """S-72: also when only the destination is registered, over memory of the source."""
    end = cm_end
    for nbytes in (4096, 1 << 21):
        of = desc(1, 1, nbytes)
        source = end.allocate(of, salt=0)
        shared = end.manager.register_cache(of, [end.addresses(source)[0] + 64])
        data = end.read(end.addresses(source)[0], nbytes)
        end.manager.copy_cache(shared, source)
        assert end.read(end.addresses(shared)[0], nbytes) == data
        end.fill(source, of, 0)
        data = end.read(end.addresses(shared)[0], nbytes)
        end.manager.copy_cache(source, shared)
        assert end.read(end.addresses(source)[0], nbytes) == data


@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize(("source", "destination"), [(a, b) for a in (DEVICE, HOST) for b in (DEVICE, HOST)])
def test_s74_e273_between_placements(cm_end: End, source: Placement, destination: Placement, registered: bool) -> None:
    """S-74, E-273: CacheManager mode copies between any placements."""
    end = cm_end
    of, to = desc(3, 4, 32, source), desc(3, 2, 32, destination)
    make = {False: End.allocate, True: End.register}[registered]
    here, there = make(end, of, None, 0), make(end, to)
    end.manager.copy_cache(there, here, 1, 2)
    end.check(there, to, {t: [(32, end.expected(of, t)[64:96])] for t in range(3)})


def row(rule: str, expected: Expected, *words: object, **changes: Any) -> Any:
    return pytest.param(expected, words, changes, id=name_of(rule, changes))


@pytest.mark.parametrize(
    ("expected", "words", "changes"),
    [
        row("E-270", TypeError, "dst", dst=None),
        row("E-270", TypeError, "src", src=1),
        row("E-270", TypeError, "dst_batch_index", dst_batch_index="0"),
        row("E-270", TypeError, "src_batch_index", src_batch_index=True),
        row("E-270", TypeError, "offset", offset=0.0),
        row("E-270", TypeError, "size", size=None),
        row("E-271", ValueError, "dst_batch_index", dst_batch_index=-1),
        row("E-271", ValueError, "src_batch_index", src_batch_index=2**32),
        row("E-271", ValueError, "offset", offset=-1),
        row("E-271", ValueError, "offset", offset=2**64),
        row("E-271", ValueError, "size", size=2**63),
        row("E-272", PARAM_INVALID, "size is 0", size=0),
        row("E-272", PARAM_INVALID, "size is -2", size=-2),
        row("E-275", PARAM_INVALID, "dst_batch_index 4", "0 to 3", dst_batch_index=4),
        row("E-275", PARAM_INVALID, "src_batch_index 4", "0 to 3", src_batch_index=4),
        row("E-275", PARAM_INVALID, "offset 32", "32 bytes", offset=32),
        row("E-275", PARAM_INVALID, "offset", offset=2**64 - 1, size=1),
        row("E-275", PARAM_INVALID, "size 33", size=33),
        row("E-275", PARAM_INVALID, "offset 8", "size 25", offset=8, size=25),
        row("E-275", PARAM_INVALID, "size", size=2**63 - 1),
        row("E-277", TypeError, "req_id", req_id="1"),
        row("E-277", TypeError, "req_id", req_id=1.0),
    ],
)
def test_copy_cache_refuses(end: End, expected: Expected, words: tuple[object, ...], changes: dict[str, Any]) -> None:
    """S-71: what does not fit is refused before the first byte."""
    source, cache = end.allocate(OF, salt=0), end.allocate(OF)
    with refuses(expected, *words):
        end.manager.copy_cache(**{"dst": cache, "src": source, **changes})
    end.untouched(cache, OF)


def test_e275_unlike_caches(end: End) -> None:
    """E-275: another number of tensors, and a destination slot that is shorter."""
    source = end.allocate(OF, salt=0)
    for of, words in ((desc(2, 4, 32), ("3 tensors", "2")), (desc(3, 4, 31), (31, 32))):
        cache = end.allocate(of)
        with refuses(PARAM_INVALID, *words):
            end.manager.copy_cache(cache, source)
        end.untouched(cache, of)


def test_e276_caches_that_are_gone(end: End) -> None:
    """E-276, S-72, S-21: deallocated caches do not exist for copies, on either side; keys change nothing in that."""
    source, cache = end.allocate(OF, [CacheKey(1, 10)], salt=0), end.allocate(OF)
    end.manager.deallocate_cache(source)
    for arguments in ((cache, source), (source, cache)):
        with refuses(NOT_EXIST, f"cache {source.cache_id}"):
            end.manager.copy_cache(*arguments)
    paged = end.allocate(OF, blocks=True)
    (end.manager.deallocate_blocks_cache if end.cm else end.manager.deallocate_cache)(paged)
    with refuses(NOT_EXIST, f"cache {paged.cache_id}"):
        end.manager.copy_blocks(paged, {0: [1]})
    end.untouched(cache, OF)


def test_e277_width_of_req_id(end: End) -> None:
    """E-277: only CacheManager mode limits the width of what goes into the log."""
    source, cache = end.allocate(OF, salt=0), end.allocate(OF)
    for req_id in (-1, 2**64):
        if end.cm:
            with refuses(ValueError, "req_id"):
                end.manager.copy_cache(cache, source, req_id=req_id)
            end.untouched(cache, OF)
        else:
            end.manager.copy_cache(cache, source, req_id=req_id)


def test_e273_e274_e284_forms_and_placements(end: End) -> None:
    """E-273, E-274, E-284: HOST is refused in one mode, and the form of the cache matters in the other."""
    plain, paged = end.allocate(OF, salt=0), end.allocate(OF, salt=0, blocks=True)
    if end.cm:
        for arguments in ((plain, paged), (paged, plain)):
            with refuses(PARAM_INVALID, "blocks cache"):
                end.manager.copy_cache(*arguments)
        with refuses(PARAM_INVALID, "blocks cache"):
            end.manager.copy_blocks(plain, {0: [1]})
        host = end.allocate(desc(3, 4, 32, HOST), salt=0, blocks=True)
        end.manager.copy_blocks(host, {0: [1]})
        data = [end.expected(OF, t) for t in range(3)]
        end.check(host, OF, {t: [(0, data[t][:32] * 2 + data[t][64:])] for t in range(3)})
    else:
        cpu = cpu_cache(end, desc(3, 4, 32, HOST), [end.take(128, HOST) for _ in range(3)])
        for call in (
            lambda: end.manager.copy_cache(cpu, plain),
            lambda: end.manager.copy_cache(plain, cpu),
            lambda: end.manager.copy_blocks(cpu, {0: [1]}),
        ):
            with refuses(PARAM_INVALID, "HOST"):
                call()
        end.manager.copy_cache(plain, paged, 1, 0)
        end.manager.copy_blocks(plain, {1: [2]})
        data = [end.expected(OF, t) for t in range(3)]
        end.check(plain, OF, {t: [(0, data[t][:32] * 3 + data[t][96:])] for t in range(3)})


# ---------------------------------------------------------------------- copy_blocks


def test_s75_pairs_in_order(end: End) -> None:
    """S-75: in the order of the dict and of each list, so that later pairs see what earlier ones wrote."""
    of = desc(2, 6, 40)
    for info, wanted in (
        ({0: [1, 2]}, [0, 0, 0, 3, 4, 5]),
        ({0: [1], 1: [2], 2: [3]}, [0, 0, 0, 0, 4, 5]),
        ({2: [3], 1: [2], 0: [1]}, [0, 0, 1, 2, 4, 5]),
        ({3: [4, 4], 5: [4], 4: [0, 4]}, [5, 1, 2, 3, 5, 5]),
        ({0: [1], 2: [1], 1: [5]}, [0, 2, 2, 3, 4, 2]),
        ({2: [2], 0: []}, [0, 1, 2, 3, 4, 5]),
        ({}, [0, 1, 2, 3, 4, 5]),
    ):
        cache = end.allocate(of, salt=0, blocks=True)
        end.manager.copy_blocks(cache, info)
        data = [end.expected(of, t) for t in range(2)]
        end.check(
            cache, of, {t: [(40 * i, data[t][40 * b : 40 * b + 40]) for i, b in enumerate(wanted)] for t in range(2)}
        )


@pytest.mark.parametrize("stride", [40, 1 << 16])  # one thread and small copies; several threads
def test_s75_many_pairs(end: End, stride: int) -> None:
    """S-75: long chains up and down, and pairs without order, give what one copy after the other gives."""
    count, rng = 200, random.Random(1)
    up = {i: [i + 1] for i in range(count - 1)}
    mixed = {s: rng.choices(range(count), k=3) for s in rng.sample(range(count), count)}
    of = desc(1, count, stride)
    cache = end.allocate(of, blocks=True)
    for info in (up, dict(reversed(up.items())), mixed):
        end.fill(cache, of, 0)
        data = end.expected(of, 0)
        blocks = [data[i * stride : (i + 1) * stride] for i in range(count)]
        for source, destinations in info.items():
            for destination in destinations:
                blocks[destination] = blocks[source]
        end.manager.copy_blocks(cache, info)
        end.check(cache, of, {0: [(0, b"".join(blocks))]})


@pytest.mark.parametrize(
    ("expected", "words", "info"),
    [
        (TypeError, "only support", None),
        (TypeError, "only support", [(0, [1])]),
        (TypeError, "only support", {0: "1"}),
        (TypeError, "only support", {0: 1}),
        (TypeError, "only support", {"0": [1]}),
        (TypeError, "inner type only support", {0: ["1"]}),
        (TypeError, "", {0: [True]}),
        (TypeError, "", {True: [0]}),
        (ValueError, "-1", {-1: [0]}),
        (ValueError, "-1", {0: [1, -1]}),
        (PARAM_INVALID, "source block 6", {0: [1], 6: [2]}),
        (PARAM_INVALID, "destination block 6", {0: [1, 6]}),
        (PARAM_INVALID, "block", {0: [1], 2: [2**64 - 1]}),
    ],
)
def test_copy_blocks_refuses(end: End, expected: Expected, words: str, info: Any) -> None:
    """E-280, E-281, E-282, E-283, S-75: the whole call is looked at before the first block is copied."""
    of = desc(2, 6, 40)
    cache = end.allocate(of, salt=0, blocks=True)
    with refuses(expected, words):
        end.manager.copy_blocks(cache, info)
    end.check(cache, of, {t: [(0, end.expected(of, t))] for t in range(2)})


# ---------------------------------------------------------------------- swap_blocks


def swap_pair(end: End, of: CacheDesc, blocks: int) -> tuple[Any, Any, list[int]]:
    """Make a device cache filled with 0xA5, and a host cache on the user's memory filled by pattern."""
    device = end.allocate(desc(of.num_tensors, blocks, of.size // of.shape[0]), blocks=True)
    addresses = [end.take(of.size, HOST) for _ in range(of.num_tensors)]
    for tensor, address in enumerate(addresses):
        end.write(address, end.expected(of, tensor))
    return device, cpu_cache(end, of, addresses), addresses


def test_s84_worked_example(end: End) -> None:
    """S-84, S-80: out to the host, one way; nothing else changes, nor does the source."""
    of = CacheDesc(2, [8, 4], DataType.DT_INT32, placement=HOST)
    device, cpu, addresses = swap_pair(end, of, 8)
    end.manager.swap_blocks(device, cpu, {1: 2, 3: 4})
    for tensor, address in enumerate(addresses):
        wanted = bytearray(end.expected(of, tensor))
        wanted[32:48] = wanted[64:80] = b"\xa5" * 16
        assert end.read(address, of.size) == bytes(wanted)
    end.untouched(device, of)


def test_s80_s82_swap_in(end: End) -> None:
    """S-80, S-82: in from the host; numbers of blocks may differ; many blocks come in any order."""
    of = desc(3, 50, 48, HOST)
    device, cpu, _ = swap_pair(end, of, 60)
    mapping = {i: (7 * i + 3) % 60 for i in range(0, 50, 2)}
    end.manager.swap_blocks(cpu, device, mapping)
    data = [end.expected(of, t) for t in range(3)]
    to = desc(3, 60, 48)
    end.check(device, to, {t: [(48 * d, data[t][48 * s : 48 * s + 48]) for s, d in mapping.items()] for t in range(3)})
    end.manager.swap_blocks(cpu, device, {})
    end.manager.swap_blocks(cpu, device, {1: 0, 2: 0})
    assert end.read(end.addresses(device)[0], 48) == data[0][96:144]


@pytest.mark.parametrize("make", [End.allocate, End.register])
def test_s82_host_caches_of_the_manager(cm_end: End, make: Callable[..., Any]) -> None:
    """S-82: allocated and registered host caches are swapped like those on plain memory."""
    end = cm_end
    host = make(end, desc(2, 4, 32, HOST), None, 0, True)
    device = end.allocate(desc(2, 4, 32), blocks=True)
    end.manager.swap_blocks(host, device, {3: 0})
    end.check(device, desc(2, 4, 32), {t: [(0, end.expected(OF, t)[96:128])] for t in range(2)})


@pytest.mark.parametrize(
    ("expected", "words", "mapping"),
    [
        (TypeError, "src_to_dst", [(0, 1)]),
        (TypeError, "src_to_dst", {"0": 1}),
        (TypeError, "src_to_dst", {0: "1"}),
        (TypeError, "src_to_dst", {0: [1]}),
        (TypeError, "src_to_dst", {0: True}),
        (AttributeError, "", None),
        (PARAM_INVALID, "source block 8", {0: 1, 8: 0}),
        (PARAM_INVALID, "destination block 9", {0: 9}),
        (PARAM_INVALID, "source block -1", {-1: 0}),
        (PARAM_INVALID, "destination block -1", {0: -1}),
    ],
)
def test_swap_blocks_refuses(end: End, expected: Expected, words: str, mapping: Any) -> None:
    """E-290, E-291, E-292, S-81: wrong mappings; nothing is copied."""
    device, cpu, _ = swap_pair(end, desc(2, 8, 16, HOST), 9)
    with refuses(expected, words):
        end.manager.swap_blocks(cpu, device, mapping)
    end.untouched(device, desc(2, 9, 16))


def test_e290_e291_caches(end: End) -> None:
    """E-290, E-291: None ends in an AttributeError, any other wrong type in a TypeError."""
    device, cpu, _ = swap_pair(end, desc(2, 8, 16, HOST), 8)
    for arguments in ((None, device), (cpu, None)):
        with refuses(AttributeError):
            end.manager.swap_blocks(*arguments, {0: 1})
    other = (KvCache if end.cm else Cache).create_cpu_cache(desc(2, 8, 16, HOST), [4096, 8192])  # type: ignore[attr-defined]
    for arguments in ((1, device), (cpu, "dst"), (other, device)):
        with refuses(TypeError):
            end.manager.swap_blocks(*arguments, {0: 1})


def test_e292_e293_unlike_caches(end: End) -> None:
    """E-292, E-293, S-81: block bytes and tensors must be equal, and one side HOST, the other DEVICE."""
    device, cpu, _ = swap_pair(end, desc(2, 8, 16, HOST), 8)
    for of, words in ((desc(2, 8, 32), (16, 32)), (desc(3, 8, 16), ("2 tensors", "3"))):
        other = end.allocate(of, blocks=True)
        with refuses(PARAM_INVALID, *words):
            end.manager.swap_blocks(cpu, other, {0: 1})
        end.untouched(other, of)
    for cache in (device, cpu):
        with refuses(PARAM_INVALID, "HOST", "DEVICE"):
            end.manager.swap_blocks(cache, cache, {0: 1})
    end.untouched(device, desc(2, 8, 16))


def test_e294_plain_caches(cm_end: End) -> None:
    """E-294: both must be blocks caches."""
    end = cm_end
    _, cpu, _ = swap_pair(end, desc(2, 8, 16, HOST), 8)
    plain = end.allocate(desc(2, 8, 16))
    for arguments in ((cpu, plain), (plain, cpu)):
        with refuses(PARAM_INVALID, "not a blocks cache"):
            end.manager.swap_blocks(*arguments, {0: 1})
    end.untouched(plain, desc(2, 8, 16))


def test_e295_deallocated_and_devices(end: End) -> None:
    """E-295, S-82: a deallocated cache has no addresses left, and each side has one list a device."""
    device, cpu, addresses = swap_pair(end, desc(2, 8, 16, HOST), 8)
    if not end.cm:
        two = KvCache.create_cpu_cache(desc(2, 8, 16, HOST), [addresses, addresses])
        for arguments in ((two, device), (device, two)):
            with refuses(PARAM_INVALID, "devices"):
                end.manager.swap_blocks(*arguments, {0: 1})
        end.untouched(device, desc(2, 8, 16))
    (end.manager.deallocate_blocks_cache if end.cm else end.manager.deallocate_cache)(device)
    for arguments in ((cpu, device), (device, cpu)):
        for mapping in ({0: 1}, {}):
            with refuses(PARAM_INVALID, "deallocated"):
                end.manager.swap_blocks(*arguments, mapping)


def test_e295_both_deallocated(cm_end: End) -> None:
    """E-295: also when neither side has addresses left, so that none is missing beside the other."""
    device = cm_end.allocate(desc(2, 8, 16), blocks=True)
    host = cm_end.manager.allocate_blocks_cache(desc(2, 8, 16, HOST))
    for cache in (device, host):
        cm_end.manager.deallocate_blocks_cache(cache)
    for arguments in ((host, device), (device, host)):
        for mapping in ({0: 1}, {}):
            with refuses(PARAM_INVALID, "deallocated"):
                cm_end.manager.swap_blocks(*arguments, mapping)


def test_e296_no_memory_at_the_address(end: End) -> None:
    """E-296, S-83: an address without memory, and one that can't be written, are FAILED and never a crash."""
    device, _, _ = swap_pair(end, desc(2, 8, 16, HOST), 8)
    wild = cpu_cache(end, desc(2, 8, 16, HOST), [users.hole()] * 2)
    for arguments in ((wild, device), (device, wild)):
        with refuses(FAILED, "failed"):
            end.manager.swap_blocks(*arguments, {0: 1})
    end.manager.swap_blocks(
        cpu_cache(end, desc(2, 8, 16, HOST), [end.take(128, HOST) for _ in range(2)]), device, {0: 1}
    )


@pytest.mark.needs("any_memory")
def test_copies_of_unmapped_registered_memory(cm_end: End) -> None:
    """S-211, S-110: memory that is not there is registered with a warning; copies of it fail, and never crash."""
    end = cm_end
    with pytest.warns(RuntimeWarning, match="not .*mapped"):
        wild = end.manager.register_cache(OF, [users.hole()] * 3)
    good = end.allocate(OF)
    for arguments in ((good, wild), (wild, good)):
        with refuses(FAILED, "failed"):
            end.manager.copy_cache(*arguments)


def test_swap_with_objects(end: End) -> None:
    """S-82: a cpu cache may be made of arrays and buffers, which it keeps; too small ones are refused."""
    of = desc(2, 4, 32, HOST)
    made = Cache if end.cm else KvCache
    given = [np.zeros((4, 32), np.uint8), bytearray(128)]
    cpu = made.create_cpu_cache(of, given)
    device = end.allocate(desc(2, 4, 32), salt=0, blocks=True)
    end.manager.swap_blocks(device, cpu, {1: 3})
    for tensor, data in enumerate(given):
        assert bytes(data) == bytes(96) + end.expected(of, tensor)[32:64]
    with pytest.raises(BufferError):
        given[1].append(1)  # type: ignore[union-attr]
    with refuses(PARAM_INVALID, "addrs[1]", 127, 128):
        made.create_cpu_cache(of, [bytearray(128), bytearray(127)])
    if not end.cm:
        nested = KvCache.create_cpu_cache(of, [given])
        end.manager.swap_blocks(device, nested, {0: 0})
        assert bytes(given[0])[:32] == end.expected(of, 0)[:32]
