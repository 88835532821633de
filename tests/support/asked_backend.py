"""The simulator with all that a device's backend lacks: mapped words, sparse memory, late regions.

It joins as another package's backend would, by an entry point, and shows that the engine needs none of these.
"""

from __future__ import annotations

import dataclasses

from llm_datadist.backend import BackendError, Export, Failure, MemoryKind, Pair, Place, Region
from llm_datadist.backends.simulator.backend import DEFAULT_ADDRESS_SPACE, SimulatorBackend
from llm_datadist.backends.simulator.endpoint import SimulatorEndpoint
from llm_datadist.backends.simulator.registered import REGISTERED


class AskedSimulator(SimulatorBackend):
    """A simulator whose peers are asked for their words."""

    capabilities = dataclasses.replace(
        SimulatorBackend.capabilities, mapped_words=False, sparse=False, host_access=False, late_regions=False
    )

    def reserve(self, device: int, nbytes: int | None, kind: MemoryKind) -> Region:
        return super().reserve(device, nbytes or DEFAULT_ADDRESS_SPACE, kind)

    def connect(self, peer: Export, pair: Pair, deadline_ns: int) -> AskedEndpoint:
        return AskedEndpoint(self, peer, pair, self._threads)


class AskedEndpoint(SimulatorEndpoint):
    """Reaches pools only, and shows no windows."""

    windows = None  # type: ignore[assignment]

    def _map(self, *args: object) -> None:
        super()._map(*args)  # type: ignore[arg-type]
        self.windows = None  # type: ignore[assignment]

    def locate(self, region: int, offset: int, nbytes: int) -> Place:
        if region == REGISTERED:
            raise BackendError(Failure.UNSUPPORTED, "This backend reaches pools only.")
        return super().locate(region, offset, nbytes)

    def _transfer(self, plan: object, guard: object, *rest: object, **how: object) -> None:
        assert guard is None
        super()._transfer(plan, guard, *rest, **how)  # type: ignore[arg-type]
