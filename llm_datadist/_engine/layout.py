"""May two caches exchange bytes, and which tensors meet which? Pure arithmetic, no memory, no peers."""

from __future__ import annotations

from typing import NamedTuple

from llm_datadist.status import ParamInvalid

__all__ = ["DEFAULT_TENSORS_PER_LAYER", "Layers", "check_span", "pair_tensors", "select"]

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
