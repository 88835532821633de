"""A backend whose control runs over TCP, for engines that all live in this process."""

from __future__ import annotations

import dataclasses
import itertools
import os

from llm_datadist.backend import Export, Pair
from llm_datadist.backends.simulator.backend import SimulatorBackend
from llm_datadist.backends.simulator.endpoint import SimulatorEndpoint

_numbers = itertools.count()
_backends: dict[int, Networked] = {}


class Networked(SimulatorBackend):
    """The simulator, but an export tells where in this process the descriptors are, instead of having them."""

    capabilities = dataclasses.replace(SimulatorBackend.capabilities, network=True)

    def __init__(self) -> None:
        super().__init__()
        self._number = next(_numbers)
        _backends[self._number] = self

    def export(self) -> Export:
        return Export(f"{self._number}:".encode() + super().export().data)

    def connect(self, peer: Export, pair: Pair, deadline_ns: int) -> SimulatorEndpoint:
        assert not peer.fds
        assert (pair.pid, pair.pidfd) == (-1, -1)
        number, _, data = peer.data.partition(b":")
        fds = tuple(os.dup(fd) for fd in _backends[int(number)].descriptors())
        return super().connect(Export(data, fds), pair, deadline_ns)
