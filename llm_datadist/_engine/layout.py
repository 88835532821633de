"""May two caches exchange bytes, and which tensors meet which? Pure arithmetic, no memory, no peers."""

from __future__ import annotations

from typing import NamedTuple

from llm_datadist.status import ParamInvalid

__all__ = [
    "DEFAULT_TENSORS_PER_LAYER",
    "Layers",
    "check_chunks",
    "check_equal_blocks",
    "check_index",
    "check_room",
    "check_span",
    "pair_tensors",
    "select",
    "select_tensors",
]

DEFAULT_TENSORS_PER_LAYER = 2


class Layers(NamedTuple):
    """The layers that a transfer names; None means all tensors of that side."""

    source: range | None = None
    destination: range | None = None
    per_layer: int = DEFAULT_TENSORS_PER_LAYER


def select(name: str, layers: range | None, per_layer: int, total: int) -> range:
    """Give the tensors of some layers, in order."""
    if layers is None:
        return range(total)
    if layers.stop * per_layer > total:
        raise ParamInvalid(
            f"{name} is {layers} with {per_layer} tensors a layer, which needs {layers.stop * per_layer} tensors; "
            f"that cache has {total}"
        )
    return range(layers.start * per_layer, layers.stop * per_layer)


def pair_tensors(source: range, destination: range) -> None:
    """Check that two selections pair up one to one."""
    if len(source) != len(destination):
        raise ParamInvalid(
            f"{len(source)} source tensors are selected and {len(destination)} destination tensors; "
            "src_layer_range and dst_layer_range must select equally many"
        )


def check_span(side: str, offset_name: str, offset: int, nbytes: int, stride: int) -> None:
    """Check that a span of bytes lies inside one batch slot."""
    if offset + nbytes > stride:
        raise ParamInvalid(
            f"{nbytes} bytes from {offset_name} {offset} do not fit into a {side} batch slot of {stride} bytes"
        )


def check_index(name: str, index: int, count: int, of: str) -> None:
    """Check an index against a count."""
    if index >= count:
        raise ParamInvalid(f"{name} {index} is not below {count}, allowed are 0 to {count - 1}, {of}")


def check_equal_blocks(source: int, destination: int) -> None:
    """Check that blocks have one size on both sides."""
    if source != destination:
        raise ParamInvalid(f"a source block has {source} bytes, a destination block {destination}; they must be equal")


def check_chunks(slot_bytes: int, block_bytes: int, count: int) -> None:
    """Check that so many chunks of a block can be cut from a slot."""
    most = -(-slot_bytes // block_bytes)
    if block_bytes > slot_bytes or count > most:
        raise ParamInvalid(
            f"{count} chunks of {block_bytes} bytes are wanted from a slot of {slot_bytes} bytes, allowed are "
            f"{most if block_bytes <= slot_bytes else 0}"
        )


def check_room(nbytes: int, stride: int) -> None:
    """Check that a slot fits into another."""
    if nbytes > stride:
        raise ParamInvalid(f"a source slot has {nbytes} bytes, the destination slot only {stride}")


def select_tensors(side: str, tensors: range, total: int) -> None:
    """Check tensor indices against a cache's total."""
    if tensors.stop > total:
        raise ParamInvalid(f"the {side} layer needs tensors up to {tensors.stop - 1}, that cache has {total}")
