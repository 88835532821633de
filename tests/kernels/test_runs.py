"""Merged runs against a slow model, and their bounds."""

from __future__ import annotations

import random
import time
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_datadist._kernels.runs import Bases, Plan, Runs, block_runs, indices, span_runs

MOST = 2**63 - 1


def paired(
    source: object, destination: object, source_blocks: int = 100, destination_blocks: int = 100, block_bytes: int = 8
) -> Runs:
    return block_runs(
        indices(source, "source"), indices(destination, "destination"), source_blocks, destination_blocks, block_bytes
    )


def pairs_of(runs: Runs, block_bytes: int) -> dict[int, int]:
    """Destination block to source block; fails when a destination is written twice."""
    found: dict[int, int] = {}
    for source, destination, nbytes in runs.tolist():
        assert nbytes > 0
        assert source % block_bytes == destination % block_bytes == nbytes % block_bytes == 0
        for i in range(nbytes // block_bytes):
            assert destination // block_bytes + i not in found
            found[destination // block_bytes + i] = source // block_bytes + i
    return found


@pytest.mark.parametrize(
    ("source", "destination", "expected"),
    [
        ([], [], []),
        ([5], [7], [(40, 56, 8)]),
        ([1, 2, 3], [5, 6, 7], [(8, 40, 24)]),
        ([3, 2, 1], [7, 6, 5], [(8, 40, 24)]),
        ([2, 3, 1, 4], [6, 7, 5, 8], [(8, 40, 32)]),
        ([1, 2, 3], [7, 6, 5], [(8, 56, 8), (16, 48, 8), (24, 40, 8)]),
        ([1, 2, 4, 5], [1, 2, 3, 4], [(8, 8, 16), (32, 24, 16)]),
        ([1, 1], [1, 2], [(8, 8, 8), (8, 16, 8)]),
        (range(10), range(20, 30), [(0, 160, 80)]),
        (range(9, -1, -1), range(29, 19, -1), [(0, 160, 80)]),
    ],
)
def test_s50_merges_neighbours_in_both_directions(
    source: object, destination: object, expected: list[tuple[int, int, int]]
) -> None:
    runs = paired(source, destination)
    assert runs.tolist() == expected
    assert len(runs) == len(expected)
    assert runs.nbytes == sum(nbytes for _, _, nbytes in expected)


@pytest.mark.parametrize("blocks", [100, 10**9], ids=["bitmap", "table"])
@pytest.mark.parametrize("length", [2, 10, 17, 80])
@given(data=st.data())
def test_s50_of_repeated_destinations_the_last_pair_wins(blocks: int, length: int, data: st.DataObject) -> None:
    block = st.one_of(st.integers(0, 20), st.integers(0, blocks - 1))
    destination = data.draw(st.lists(block, min_size=length, max_size=length))
    source = data.draw(st.lists(st.integers(0, 99), min_size=length, max_size=length))
    runs = paired(source, destination, 100, blocks, 24)
    assert pairs_of(runs, 24) == dict(zip(destination, source, strict=True))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=40))
def test_s50_pairs_element_by_element(pairs: list[tuple[int, int]]) -> None:
    source = [a for a, _ in pairs]
    destination = [b for _, b in pairs]
    assert pairs_of(paired(source, destination), 8) == dict(zip(destination, source, strict=True))


def test_s50_repeats_among_many() -> None:
    rng = random.Random(5)
    for blocks in (50_000, 2**40):
        destination = [rng.randrange(blocks) % 30_000 for _ in range(40_000)]
        source = [rng.randrange(1000) for _ in destination]
        assert pairs_of(paired(source, destination, 1000, blocks, 1), 1) == dict(zip(destination, source, strict=True))


@pytest.mark.parametrize("stride", [1, 64, 1024, 2**20, 2**32])
def test_regular_indices_do_not_slow_the_table_down(stride: int) -> None:
    count = 100_000
    destination = [i * stride for i in range(count)]
    destination[0], destination[1] = destination[1], destination[0]  # else there is nothing to look for
    begin = time.monotonic()
    runs = paired(range(count), destination, count, 2**62, 1)
    assert time.monotonic() - begin < 5
    assert runs.nbytes == count


def test_s52_refuses_indices_out_of_bounds() -> None:
    with pytest.raises(ValueError, match=r"source index 100 .* source blocks, 100"):
        paired([0, 100, 1], [0, 1, 2])
    with pytest.raises(ValueError, match=r"destination index 3 .* destination blocks, 3"):
        paired([0, 1, 2], [1, 2, 3], 100, 3)
    with pytest.raises(ValueError, match="source index 0 "):
        paired([0], [0], 0, 1)
    with pytest.raises(ValueError, match=f"source index {MOST} "):
        paired([2**64 - 1], [0], MOST, 1, 1)


def test_s52_refuses_unequal_lengths() -> None:
    with pytest.raises(ValueError, match="2 source indices do not pair with 3 destination"):
        paired([0, 1], [0, 1, 2])


@pytest.mark.parametrize(
    ("source_blocks", "destination_blocks", "block_bytes"),
    [
        (2**62, 1, 2),
        (1, 2**62, 2),
        (2**32, 1, 2**31),
        (-1, 1, 1),
        (1, -1, 1),
        (1, 1, 0),
        (1, 1, -8),
        (2**63, 1, 1),
        (1, 1, 2**64),
    ],
)
def test_refuses_sizes_out_of_range(source_blocks: int, destination_blocks: int, block_bytes: int) -> None:
    with pytest.raises(ValueError, match=r"2\*\*63 - 1"):
        paired([0], [0], source_blocks, destination_blocks, block_bytes)


def test_the_greatest_sizes() -> None:
    assert paired([MOST - 1], [0], MOST, 1, 1).tolist() == [(MOST - 1, 0, 1)]
    assert paired([1, 0], [1, 0], 2, 2, 2**62 - 1).tolist() == [(0, 0, 2**63 - 2)]


def test_span() -> None:
    assert span_runs(3, 5, 7).tolist() == [(3, 5, 7)]
    assert span_runs(3, 5, 0).tolist() == []
    assert span_runs(MOST - 1, 0, 1).nbytes == 1


@pytest.mark.parametrize("numbers", [(-1, 0, 1), (0, -1, 1), (0, 0, -1), (MOST, 0, 1), (0, MOST, 1), (2**64, 0, 1)])
def test_refuses_spans_out_of_range(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"2\*\*63 - 1"):
        span_runs(*numbers)


def test_bases_and_plan() -> None:
    bases = Bases([0, 2**64 - 1], (2, 3))
    assert len(bases) == 2
    assert bases.tolist() == [(0, 2), (2**64 - 1, 3)]
    runs = span_runs(0, 4, 5)
    with pytest.raises(ValueError, match=r"end above 2\*\*64 - 1"):
        Plan(bases, runs)
    plan = Plan(Bases([1, 2], [3, 4]), runs)
    assert plan.nbytes == 10
    assert plan.runs is runs
    assert Plan(Bases([], []), runs).nbytes == 0
    with pytest.raises(ValueError, match="2 tensors of"):
        Plan(Bases([1, 2], [3, 4]), span_runs(0, 0, 2**62))


@pytest.mark.parametrize(("source", "destination"), [([1], []), ([-1], [0]), ([0], [2**64])])
def test_refuses_bases_out_of_range(source: list[int], destination: list[int]) -> None:
    with pytest.raises(ValueError, match="address"):
        Bases(source, destination)


def test_memory_is_bounded_by_the_merged_runs() -> None:
    count = 100_000
    scattered = indices(random.Random(1).sample(range(count), count), "blocks")
    sparse = indices(random.Random(2).sample(range(10**9), count), "blocks")
    together = indices([*range(1, count), 0], "blocks")
    tracemalloc.start()
    try:
        for source, destination, blocks, most in [
            (scattered, sparse, 10**9, 64 * count),
            (sparse, scattered, 10**9, 64 * count),
            (together, together, count, 64 * 4 + count // 8),  # a bitmap of the blocks finds repeats
            (indices(range(count), "blocks"), indices(range(count), "blocks"), count, 512),
        ]:
            tracemalloc.clear_traces()
            runs = block_runs(source, destination, blocks, blocks, 4096)
            size, peak = tracemalloc.get_traced_memory()
            assert peak <= most + 1024
            assert size <= 24 * len(runs) + 1024
    finally:
        tracemalloc.stop()
