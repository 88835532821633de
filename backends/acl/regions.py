"""Regions, looked up by address."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from llm_datadist.backend import Region

__all__ = ["RegionTable"]


class RegionTable:
    """Regions that do not overlap. Never changed, so that any thread may look while another puts a new one in place."""

    def __init__(self, regions: Iterable[Region] = ()) -> None:
        self._regions = sorted(regions, key=lambda region: region.address)
        self._begins = [region.address for region in self._regions]

    def find(self, address: int, nbytes: int) -> Region | None:
        """Give the one region that a range is inside of."""
        at = bisect_right(self._begins, address) - 1
        if at < 0:
            return None
        region = self._regions[at]
        return region if address + nbytes <= region.address + region.nbytes else None

    def overlaps(self) -> bool:
        """Say whether two regions share a byte."""
        pairs = zip(self._regions, self._regions[1:], strict=False)
        return any(second.address < first.address + first.nbytes for first, second in pairs)
