"""Memory that users own: which of it is really there, and which only the kernel may touch for us."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from typing import Final

from llm_datadist._kernels.runs import Plan
from llm_datadist.backend import MemoryKind, Region
from llm_datadist.backends.host import memory

__all__ = ["ADDRESSES", "REGISTERED", "UserMemory"]

#: Id of the one region that all registered memory is in. It is any peer's too, so late registration needs no message.
REGISTERED: Final = 1 << 16
#: No address of a user's memory is higher: 48 bits on aarch64, 47 on x86-64.
ADDRESSES: Final = 1 << 48


class UserMemory:
    """Registered ranges, and what is known of addresses that local copies use. Thread-safe."""

    def __init__(self) -> None:
        #: Registered ranges that can't be read and written as they are.
        self._wild: list[tuple[int, int]] = []
        self._memory = memory.HostMemory()
        self._lock = threading.Lock()
        self.add = self._memory.add
        self.copy = self._memory.copy

    def register(self, addresses: Sequence[int], nbytes: int) -> list[Region]:
        """Take in ranges of one size, and say it when there is no memory."""
        mapped, usable = memory.maps()
        absent = [address for address in addresses if mapped.gaps(address, address + nbytes)]
        if absent:
            warnings.warn(
                f"Registered memory of {nbytes} bytes at {', '.join(map(hex, absent[:4]))}"
                f"{', ...' if len(absent) > 4 else ''} is not (all) mapped in this process; transfers of it will fail",
                RuntimeWarning,
                stacklevel=2,
            )
        for address in addresses:
            if usable.gaps(address, address + nbytes):
                with self._lock:
                    self._wild.append((address, address + nbytes))
            else:
                self._memory.add(address, nbytes)
        return [Region(REGISTERED, 0, MemoryKind.HOST, 0, 2**64 - 1) for _ in addresses]

    def unregister(self, addresses: Sequence[int], nbytes: int) -> None:
        """Forget ranges."""
        for address in addresses:
            span = address, address + nbytes
            with self._lock:
                wild = span in self._wild
                if wild:
                    self._wild.remove(span)
            if not wild:
                self._memory.remove(address, nbytes)

    def wild(self, plan: Plan, *, written: bool) -> bool:
        """Say whether the sources (or what is ``written``) of a plan may only be touched by the kernel."""
        if not self._wild:
            return False
        wild = tuple(self._wild)
        nbytes = plan.runs.destination_end if written else plan.runs.source_end
        bases = [pair[written] for pair in plan.bases.tolist()]
        return any(begin < base + nbytes and base < end for base in bases for begin, end in wild)
