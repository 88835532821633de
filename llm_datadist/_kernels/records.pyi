from typing import ClassVar, final

from typing_extensions import Buffer

from llm_datadist._kernels.runs import Bases

@final
class Record:
    """One cache as published, in the words of its body; a reader's body comes from a peer, so it is checked.

    Raises
    ------
    ValueError
        The words contradict each other, so no owner can have written them.
    """

    def __new__(cls, generation: int, body: bytes) -> Record: ...
    @property
    def generation(self) -> int: ...
    @property
    def cache_id(self) -> int: ...
    @property
    def flags(self) -> int: ...
    @property
    def devices(self) -> int: ...
    @property
    def num_tensors(self) -> int:
        """Of one device."""
    @property
    def slots(self) -> int: ...
    @property
    def tensor_bytes(self) -> int: ...
    @property
    def stride(self) -> int:
        """Bytes of one batch slot or block."""
    @property
    def key_count(self) -> int:
        """How many slots were given a key, or come before one that was."""
    @property
    def body(self) -> bytes: ...
    @property
    def tensors(self) -> tuple[tuple[int, int], ...]:
        """(region, offset) of each tensor, device after device."""
    def tensor(self, position: int) -> tuple[int, int]:
        """One element of `tensors`."""
    @property
    def keys(self) -> tuple[tuple[int, int], ...]:
        """(entry number + 1, binding generation) of each slot that was given a key; (0, 0) for a slot without."""
    def __eq__(self, value: object, /) -> bool: ...
    __hash__: ClassVar[None]  # type: ignore[assignment]
    def key_of_slot(self, slot: int) -> tuple[int, int]:
        """One element of `keys`; (0, 0) for a slot behind them."""
    def span(self) -> tuple[int, int, int] | None:
        """(region, lowest offset, bytes from there to the end of the furthest tensor), if all lie in one region."""
    def bases(self, first: int, lowest: int, base: int, destination: Buffer, to: int, stride: int, count: int) -> Bases:
        """Pair tensors of this cache with those at addresses.

        `count` of each device, from `first` on, are paired with those from `to` on of each `stride` addresses.
        The offset `lowest` of this cache is at address `base`.
        """
