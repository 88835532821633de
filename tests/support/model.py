"""What pulls should do, worked out slowly and without the library: byte by byte, tensor by tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Shape(NamedTuple):
    """A cache of uint8 tensors."""

    tensors: int
    slots: int
    stride: int


class Byte(NamedTuple):
    """One byte that moves."""

    source_tensor: int
    source_at: int
    destination_tensor: int
    destination_at: int


@dataclass(frozen=True)
class Layers:
    """Arguments that select tensors."""

    source: range | None = None
    destination: range | None = None
    count: int | None = None

    def kwargs(self) -> dict[str, object]:
        """Give them as keyword arguments."""
        given = {
            "src_layer_range": self.source,
            "dst_layer_range": self.destination,
            "tensor_num_per_layer": self.count,
        }
        return {name: value for name, value in given.items() if value is not None}


def pairs_of_tensors(source: Shape, destination: Shape, layers: Layers) -> list[tuple[int, int]] | None:
    """Pair tensors up; None when the call must be refused."""
    count = 2 if layers.count is None else layers.count
    ranged = layers.source is not None or layers.destination is not None
    if count != 2:
        if not 1 <= count <= destination.tensors:
            return None
        if ranged and destination.tensors % count:
            return None
    chosen = []
    for wanted, total in ((layers.source, source.tensors), (layers.destination, destination.tensors)):
        if wanted is None:
            chosen.append(list(range(total)))
            continue
        if not wanted:
            return None
        chosen.append([layer * count + i for layer in wanted for i in range(count)])
        if any(tensor >= total for tensor in chosen[-1]):
            return None
    if len(chosen[0]) != len(chosen[1]):
        return None
    return list(zip(*chosen, strict=True))


def pull_cache(
    source: Shape,
    slot: int,
    destination: Shape,
    batch_index: int,
    size: int,
    source_offset: int | None,
    destination_offset: int | None,
    layers: Layers,
) -> list[Byte] | None:
    """Name the bytes of a pull of one slot, in order; None when the call must be refused."""
    so, do = source_offset or 0, destination_offset or 0
    length = size if size > 0 else destination.stride - do
    tensors = pairs_of_tensors(source, destination, layers)
    if tensors is None or batch_index >= destination.slots or length <= 0:
        return None
    if do + length > destination.stride or so + length > source.stride:
        return None
    return [
        Byte(s, slot * source.stride + so + i, d, batch_index * destination.stride + do + i)
        for s, d in tensors
        for i in range(length)
    ]


def pull_blocks(
    source: Shape,
    source_blocks: Sequence[int],
    destination: Shape,
    destination_blocks: Sequence[int],
    layers: Layers,
) -> list[Byte] | None:
    """Name the bytes of a pull of blocks, in order; None when the call must be refused."""
    tensors = pairs_of_tensors(source, destination, layers)
    if tensors is None or source.stride != destination.stride:
        return None
    if len(source_blocks) != len(destination_blocks) or not source_blocks:
        return None
    if any(b >= source.slots for b in source_blocks) or any(b >= destination.slots for b in destination_blocks):
        return None
    stride = source.stride
    return [
        Byte(s, of * stride + i, d, to * stride + i)
        for s, d in tensors
        for of, to in zip(source_blocks, destination_blocks, strict=True)
        for i in range(stride)
    ]


def apply(moves: Sequence[Byte], source: Sequence[bytes], destination: Sequence[bytearray]) -> None:
    """Move the bytes, in order."""
    for move in moves:
        destination[move.destination_tensor][move.destination_at] = source[move.source_tensor][move.source_at]


def cut_into_blocks(
    source: Shape, slot: int, destination: Shape, destination_blocks: Sequence[int], layers: Layers
) -> list[Byte] | None:
    """Name the bytes of a slot that is cut into blocks; None when the call must be refused."""
    tensors = pairs_of_tensors(source, destination, layers)
    size = destination.stride
    if tensors is None or not destination_blocks or any(b >= destination.slots for b in destination_blocks):
        return None
    if size > source.stride or (len(destination_blocks) - 1) * size >= source.stride:
        return None
    # Of a block that is named twice the last chunk counts, also when it is short.
    last = {block: i for i, block in enumerate(destination_blocks)}
    return [
        Byte(s, slot * source.stride + i * size + k, d, block * size + k)
        for s, d in tensors
        for block, i in last.items()
        for k in range(min(size, source.stride - i * size))
    ]


def pushed_tensors(source: Shape, destination: Shape, layers: Layers) -> list[tuple[int, int]] | None:
    """Pair tensors of a push up; None when the call must be refused before anything is written."""
    count = 2 if layers.count is None else layers.count
    here = range(source.tensors // count) if layers.source is None else layers.source
    there = range(source.tensors // count) if layers.destination is None else layers.destination
    given = [wanted for wanted in (layers.source, layers.destination) if wanted is not None]
    if not all(given) or len(here) != len(there):
        return None
    if here and (source.tensors % count or here.stop * count > source.tensors):
        return None
    return [(s * count + i, d * count + i) for s, d in zip(here, there, strict=True) for i in range(count)]


def push_cache(source: Shape, batch_index: int, destination: Shape, slot: int, layers: Layers) -> list[Byte] | None:
    """Name the bytes of a push of one slot; None when the call must be refused."""
    tensors = pushed_tensors(source, destination, layers)
    if tensors is None or batch_index >= source.slots:
        return None
    if tensors and (slot >= destination.slots or source.stride > destination.stride):
        return None
    return [
        Byte(s, batch_index * source.stride + i, d, slot * destination.stride + i)
        for s, d in tensors
        for i in range(source.stride)
    ]


def push_blocks(
    source: Shape,
    source_blocks: Sequence[int],
    destination: Shape,
    destination_blocks: Sequence[int],
    layers: Layers,
) -> list[Byte] | None:
    """Name the bytes of a push of blocks; None when the call must be refused."""
    tensors = pushed_tensors(source, destination, layers)
    if tensors is None or len(source_blocks) != len(destination_blocks) or not source_blocks:
        return None
    if any(b >= source.slots for b in source_blocks):
        return None
    if tensors and (source.stride != destination.stride or any(b >= destination.slots for b in destination_blocks)):
        return None
    return [
        Byte(s, of * source.stride + i, d, to * source.stride + i)
        for s, d in tensors
        for of, to in zip(source_blocks, destination_blocks, strict=True)
        for i in range(source.stride)
    ]


def copy_cache(
    source: Shape, source_slot: int, destination: Shape, destination_slot: int, offset: int, size: int
) -> list[Byte] | None:
    """Name the bytes of a local copy; None when the call must be refused."""
    if source.tensors != destination.tensors or source_slot >= source.slots or destination_slot >= destination.slots:
        return None
    length = size if size > 0 else source.stride - offset
    if length <= 0 or offset + length > source.stride or offset + length > destination.stride:
        return None
    return [
        Byte(t, source_slot * source.stride + offset + i, t, destination_slot * destination.stride + offset + i)
        for t in range(source.tensors)
        for i in range(length)
    ]
