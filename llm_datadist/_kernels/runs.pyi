from collections.abc import Sequence
from typing import final

@final
class Indices:
    """Block indices, copied into C once. `maximum` is -1 when empty; indices >= 2**63 are held as 2**63 - 1."""

    @property
    def maximum(self) -> int: ...
    def __len__(self) -> int: ...
    def tolist(self) -> list[int]: ...

def indices(values: object, name: str) -> Indices:
    """Copy a list of indices in one pass.

    Accepts list, tuple, range and one-dimensional integer buffers (any stride, any native integer type);
    elements are int or have ``__index__``.

    Raises
    ------
    TypeError
        Another container; an element that is bool, float, str or has no ``__index__``. Names `name`, position, type.
    ValueError
        A negative element or one above 2**64 - 1. Names `name`, position and value.
    """

@final
class Runs:
    """Merged (source offset, destination offset, bytes) runs inside one tensor pair."""

    @property
    def nbytes(self) -> int:
        """Bytes of one tensor pair."""
    def __len__(self) -> int: ...
    def tolist(self) -> list[tuple[int, int, int]]: ...

def block_runs(
    source: Indices, destination: Indices, source_blocks: int, destination_blocks: int, block_bytes: int
) -> Runs:
    """Pair block lists element by element; neighbours are merged, of repeated destinations the last pair wins whole."""

def span_runs(source_offset: int, destination_offset: int, nbytes: int) -> Runs:
    """Make one run."""

@final
class Bases:
    """Base addresses of tensor pairs."""

    def __new__(cls, source: Sequence[int], destination: Sequence[int]) -> Bases: ...
    def __len__(self) -> int: ...
    def tolist(self) -> list[tuple[int, int]]: ...

@final
class Plan:
    """Runs, to be copied for each of the tensor pairs. Never expanded per tensor in memory."""

    def __new__(cls, bases: Bases, runs: Runs) -> Plan: ...
    @property
    def bases(self) -> Bases: ...
    @property
    def runs(self) -> Runs: ...
    @property
    def nbytes(self) -> int: ...
