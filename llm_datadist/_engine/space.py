"""Hand out ranges of a space of bytes: the lowest that fits, so that what was used before is used again."""

from __future__ import annotations

from bisect import bisect_left

__all__ = ["Space"]


class Space:
    """Free ranges of ``[0, nbytes)``, kept sorted and merged. Not thread-safe.

    Parameters
    ----------
    nbytes : int
        Size of the space.
    granule : int
        Sizes are rounded up to it, so every range starts at a multiple of it.
    """

    def __init__(self, nbytes: int, granule: int) -> None:
        self.granule = granule
        self.nbytes = nbytes // granule * granule
        self.used = 0
        self._starts = [0] if self.nbytes else []
        self._sizes = [self.nbytes] if self.nbytes else []

    def round(self, nbytes: int) -> int:
        """Give the bytes that a range of this size really takes."""
        return -(-nbytes // self.granule) * self.granule

    def take(self, nbytes: int) -> int | None:
        """Take the lowest range that fits and give its offset, or None."""
        nbytes = self.round(nbytes)
        for i, size in enumerate(self._sizes):
            if size >= nbytes:
                start = self._starts[i]
                if size == nbytes:
                    del self._starts[i], self._sizes[i]
                else:
                    self._starts[i] += nbytes
                    self._sizes[i] -= nbytes
                self.used += nbytes
                return start
        return None

    def give(self, offset: int, nbytes: int) -> None:
        """Give a range back that `take` handed out with this size."""
        nbytes = self.round(nbytes)
        self.used -= nbytes
        i = bisect_left(self._starts, offset)
        joins_next = i < len(self._starts) and self._starts[i] == offset + nbytes
        joins_former = i > 0 and self._starts[i - 1] + self._sizes[i - 1] == offset
        if joins_former and joins_next:
            self._sizes[i - 1] += nbytes + self._sizes[i]
            del self._starts[i], self._sizes[i]
        elif joins_former:
            self._sizes[i - 1] += nbytes
        elif joins_next:
            self._starts[i] = offset
            self._sizes[i] += nbytes
        else:
            self._starts.insert(i, offset)
            self._sizes.insert(i, nbytes)
