"""From a plan to the ranges that a communicator is given: cut to size, a few at a time."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

__all__ = ["MAX_BYTES", "Range", "batches", "chunks", "expand"]

#: Address of this side, address of the peer, bytes.
Range = tuple[int, int, int]

#: Of one range: below the 4 GiB that all of HCCL's engines move at once, and on a 2 MiB boundary.
MAX_BYTES: Final = (4 << 30) - (2 << 20)


def expand(
    pairs: Iterable[tuple[int, int]], runs: Sequence[tuple[int, int, int]], most: int = MAX_BYTES
) -> Iterator[Range]:
    """Give the ranges of (local base, remote base) pairs and (local, remote, bytes) runs, cut at ``most`` bytes."""
    for local_base, remote_base in pairs:
        for local, remote, nbytes in runs:
            for done in range(0, nbytes, most):
                yield local_base + local + done, remote_base + remote + done, min(most, nbytes - done)


def batches(ranges: Iterable[Range], count: int) -> Iterator[list[Range]]:
    """Give the ranges, some at a time."""
    ranges = iter(ranges)
    while batch := list(itertools.islice(ranges, count)):
        yield batch


def chunks(ranges: Iterable[Range], count: int, room: int) -> Iterator[list[Range]]:
    """Give the ranges, each of at most ``room`` bytes, so many at a time that together they have room."""
    chunk: list[Range] = []
    free = room
    for one in ranges:
        if one[2] > free or len(chunk) == count:
            yield chunk
            chunk, free = [], room
        chunk.append(one)
        free -= one[2]
    if chunk:
        yield chunk
