"""What a communicator is given of a plan, and how regions are found by address."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from llm_datadist.backend import MemoryKind, Region
from llm_datadist.backends.acl.ranges import MAX_BYTES, batches, chunks, expand
from llm_datadist.backends.acl.regions import RegionTable

small = st.integers(0, 1000)
runs = st.lists(st.tuples(small, small, st.integers(1, 100)), min_size=1, max_size=20)


@given(st.lists(st.tuples(small, small), max_size=5), runs, st.integers(1, 120))
def test_ranges_are_the_plan_byte_for_byte_and_in_its_order(
    pairs: list[tuple[int, int]], runs: list[tuple[int, int, int]], most: int
) -> None:
    ranges = list(expand(pairs, runs, most))
    assert all(1 <= nbytes <= most for _, _, nbytes in ranges)
    found = [(local + i, remote + i) for local, remote, nbytes in ranges for i in range(nbytes)]
    assert found == [(a + so + i, b + do + i) for a, b in pairs for so, do, n in runs for i in range(n)]


@given(st.integers(1, 4 * MAX_BYTES))
def test_no_range_reaches_four_gib(nbytes: int) -> None:
    ranges = list(expand([(1 << 40, 1 << 41)], [(0, 0, nbytes)]))
    assert sum(size for _, _, size in ranges) == nbytes
    assert all(size < 4 << 30 for _, _, size in ranges)
    assert all(remote - local == 1 << 40 for local, remote, _ in ranges)


@given(st.integers(0, 300), st.integers(1, 64))
def test_batches_lose_nothing(count: int, most: int) -> None:
    ranges = [(i, i, 1) for i in range(count)]
    found = list(batches(iter(ranges), most))
    assert list(itertools.chain(*found)) == ranges
    assert all(1 <= len(batch) <= most for batch in found)


@given(st.lists(st.integers(1, 50), max_size=100), st.integers(1, 8))
def test_chunks_have_room(sizes: list[int], most: int) -> None:
    ranges = [(i, i, size) for i, size in enumerate(sizes)]
    found = list(chunks(iter(ranges), most, 50))
    assert list(itertools.chain(*found)) == ranges
    assert all(1 <= len(chunk) <= most and sum(n for _, _, n in chunk) <= 50 for chunk in found)


def region(address: int, nbytes: int) -> Region:
    return Region(address, 0, MemoryKind.DEVICE, address, nbytes)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=10), st.integers(0, 400), st.integers(0, 40))
def test_a_range_is_found_in_one_region_or_not_at_all(sizes: list[int], address: int, nbytes: int) -> None:
    regions, at = [], 10
    for size in sizes:
        regions.append(region(at, size))
        at += size + size % 2  # some are neighbours
    table = RegionTable(regions)
    holders = [r for r in regions if r.address <= address < r.address + r.nbytes]
    fits = [r for r in holders if address + nbytes <= r.address + r.nbytes]
    found = table.find(address, nbytes)
    if nbytes:
        assert found == (fits[0] if fits else None)
    assert not table.overlaps()
    assert RegionTable([*regions, regions[-1]]).overlaps()
