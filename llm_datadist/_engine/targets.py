"""Destinations of asynchronous transfers. Layers have two tensors here."""

from __future__ import annotations

from dataclasses import dataclass

from llm_datadist._engine.caches import Cache
from llm_datadist._engine.directory import F_BLOCKS, Key
from llm_datadist._engine.layout import check_chunks, check_equal_blocks, check_index, check_room
from llm_datadist._engine.paths import Found
from llm_datadist._engine.transfers import Transfers
from llm_datadist._kernels.runs import Indices, Runs, block_runs, chunk_runs, span_runs
from llm_datadist.status import LLMException, LLMStatusCode, ParamInvalid

__all__ = ["TENSORS_PER_LAYER", "AddressTarget", "KeyTarget", "Source"]

TENSORS_PER_LAYER = 2


@dataclass(frozen=True, slots=True)
class Source:
    """What a task sends of each tensor: a batch slot, blocks to blocks, or a slot cut into blocks."""

    cache_id: int
    slot: int
    source_blocks: Indices | None
    destination_blocks: Indices | None
    #: Bytes of a destination block; 0 means those of a source block.
    block_bytes: int

    def check(self, cache: Cache) -> None:
        """Check what concerns the source alone."""
        here = cache.geometry
        if len(cache.addresses) > 1:
            raise LLMException(
                "transfer_cache_async works with one device", status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED
            )
        check_index("src_batch_index", self.slot, here.slots, f"the batch slots of cache {cache.id}")
        if self.source_blocks is not None:
            check_index("source block", self.source_blocks.maximum, here.slots, f"the blocks of cache {cache.id}")
            check_equal_blocks(here.stride, self.block_bytes or here.stride)
        elif self.destination_blocks is not None:
            if not 0 < self.block_bytes < here.tensor_bytes:
                raise ParamInvalid(
                    f"dst_block_memory_size is {self.block_bytes}, allowed are 1 to {here.tensor_bytes - 1}"
                )
            check_chunks(here.stride, self.block_bytes, len(self.destination_blocks))

    def nbytes(self, cache: Cache) -> int:
        """Check the source, and give the bytes from a destination's start that are written, gaps included."""
        self.check(cache)
        size = self.block_bytes or cache.geometry.stride
        return size if self.destination_blocks is None else (self.destination_blocks.maximum + 1) * size

    def runs(self, cache: Cache, room: int) -> Runs:
        """Plan the copy into a destination that has ``room`` bytes from its start to the end of its tensor."""
        here = cache.geometry
        if self.destination_blocks is None:
            return span_runs(self.slot * here.stride, 0, here.stride)
        size = self.block_bytes or here.stride
        check_index("destination block", self.destination_blocks.maximum, room // size, "the destination's blocks")
        if self.source_blocks is not None:
            return block_runs(self.source_blocks, self.destination_blocks, here.slots, room // size, size)
        return chunk_runs(self.destination_blocks, room // size, size, self.slot * here.stride, here.stride)


@dataclass(frozen=True, slots=True)
class AddressTarget:
    """A destination by addresses, one for each tensor of each layer."""

    transfers: Transfers
    source: Source
    cluster_id: int
    addresses: tuple[int, ...]
    layers: range

    def transfer(self, layer: int) -> None:
        """Write one layer."""
        first = TENSORS_PER_LAYER * layer
        at = TENSORS_PER_LAYER * (layer - self.layers.start)
        self.transfers.write_addresses(
            self.cluster_id,
            self.source.cache_id,
            range(first, first + TENSORS_PER_LAYER),
            self.addresses[at : at + TENSORS_PER_LAYER],
            self.source.nbytes,
            self.source.runs,
        )


@dataclass(frozen=True, slots=True)
class KeyTarget:
    """A destination by blocks key, or by cache id and batch slot."""

    transfers: Transfers
    source: Source
    cluster_id: int
    key: Key
    slot: int
    layers: range
    destination_layers: range

    def transfer(self, layer: int) -> None:
        """Write one layer."""
        first = TENSORS_PER_LAYER * layer
        to = self.destination_layers.start + layer - self.layers.start
        self.transfers.write_layer(
            self.cluster_id,
            self.key,
            self.slot,
            self.source.cache_id,
            range(first, first + TENSORS_PER_LAYER),
            TENSORS_PER_LAYER * to,
            self.source.check,
            self._runs,
        )

    def _runs(self, cache: Cache, found: Found, room: int) -> Runs:
        stride = found.record.stride
        if self.source.destination_blocks is None:
            check_room(cache.geometry.stride, stride)
        elif found.record.flags & F_BLOCKS:
            check_equal_blocks(self.source.block_bytes or cache.geometry.stride, stride)
        return self.source.runs(cache, room)
