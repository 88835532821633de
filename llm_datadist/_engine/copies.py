"""Copies inside one engine: between caches, and between blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from llm_datadist._engine import codes
from llm_datadist._engine.caches import Caches
from llm_datadist._engine.layout import check_index
from llm_datadist._engine.uses import Use, with_use
from llm_datadist._kernels.runs import Bases, Plan, Runs, block_runs, indices, span_runs
from llm_datadist.backend import Backend, BackendError, Failure
from llm_datadist.status import LLMException, LLMStatusCode, ParamInvalid

__all__ = ["Copies", "independent_batches"]


AddressLists: TypeAlias = Sequence[Sequence[int]]


class Copies:
    """Local copies of one engine. Thread-safe as far as the user's memory is."""

    def __init__(self, backend: Backend, caches: Caches, cache_manager: bool) -> None:
        self._backend = backend
        self._caches = caches
        self._cache_manager = cache_manager

    @with_use
    def copy_slot(
        self,
        use: Use,
        destination_id: int,
        source_id: int,
        destination_slot: int,
        source_slot: int,
        offset: int,
        size: int,
        *,
        plain_caches: bool,
    ) -> None:
        """Copy one batch slot, or a part of it, from cache to cache; ``plain_caches`` refuses blocks caches."""
        destination = self._caches.begin(destination_id, use)
        source = self._caches.begin(source_id, use)
        there, here = destination.geometry, source.geometry
        if plain_caches and (there.blocks or here.blocks):
            raise ParamInvalid("copy_cache does not take blocks caches: use copy_blocks")
        if there.num_tensors != here.num_tensors:
            raise ParamInvalid(
                f"the source has {here.num_tensors} tensors and the destination {there.num_tensors}; they must be equal"
            )
        check_index("dst_batch_index", destination_slot, there.slots, "the destination's batch slots")
        check_index("src_batch_index", source_slot, here.slots, "the source's batch slots")
        nbytes = size if size > 0 else here.stride - offset
        room = min(here.stride, there.stride) - offset
        if room <= 0 or nbytes > room:
            raise ParamInvalid(
                f"offset {offset} and size {size} do not fit: a source slot has {here.stride} bytes, "
                f"a destination slot {there.stride}"
            )
        runs = span_runs(source_slot * here.stride + offset, destination_slot * there.stride + offset, nbytes)
        # Registered memory may be any memory, that of another cache too, and a slot may be copied onto itself.
        ordered = destination is source or bool(source.registered or destination.registered)
        for sources, destinations in zip(source.addresses, destination.addresses, strict=True):
            self._run(sources, destinations, runs, ordered=ordered)

    @with_use
    def copy_blocks(self, use: Use, cache_id: int, pairs: Sequence[tuple[int, int]], *, need_blocks: bool) -> None:
        """Copy blocks inside a cache, in order: a later pair sees what an earlier one wrote."""
        cache = self._caches.begin(cache_id, use)
        here = cache.geometry
        if need_blocks and not here.blocks:
            raise ParamInvalid(f"cache {cache_id} is not a blocks cache, which copy_blocks needs")
        for source, destination in pairs:
            check_index("source block", source, here.slots, f"the blocks of cache {cache_id}")
            check_index("destination block", destination, here.slots, f"the blocks of cache {cache_id}")
        for batch in independent_batches(pairs):
            runs = block_runs(
                indices([s for s, _ in batch], "source blocks"),
                indices([d for _, d in batch], "destination blocks"),
                here.slots,
                here.slots,
                here.stride,
            )
            for addresses in cache.addresses:
                self._run(addresses, addresses, runs, ordered=False)

    @with_use
    def swap_blocks(
        self,
        use: Use,
        owned: Sequence[int],
        addresses: Callable[[], tuple[AddressLists, AddressLists]],
        source_blocks: int,
        destination_blocks: int,
        block_bytes: int,
        mapping: Mapping[int, int],
    ) -> None:
        """Copy blocks between addresses of two caches.

        ``addresses`` gives them, one list of tensors a device on each side, once the ``owned`` of the two can't be
        freed.
        """
        self._caches.keep(owned, use)
        source, destination = addresses()
        runs = block_runs(
            indices(list(mapping), "source blocks"),
            indices(list(mapping.values()), "destination blocks"),
            source_blocks,
            destination_blocks,
            block_bytes,
        )
        for sources, destinations in zip(source, destination, strict=True):
            self._run(sources, destinations, runs, ordered=False)

    def give_back(self, use: Use) -> None:
        """Give back what a copy has."""
        self._caches.end(use)

    def translated(self, use: Use, error: Exception) -> Exception:
        """Give the exception that the user gets for a failure of a copy."""
        if not isinstance(error, BackendError):
            return error
        if error.kind is Failure.INVALID:
            return LLMException(f"the copy failed: {error.text}", status_code=LLMStatusCode.LLM_FAILED)
        return codes.exception_of(error, self._cache_manager)

    def _run(self, sources: Sequence[int], destinations: Sequence[int], runs: Runs, *, ordered: bool) -> None:
        self._backend.copy(Plan(Bases(sources, destinations), runs), ordered=ordered)


def independent_batches(pairs: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Cut a sequence of copies into batches that give the same result in any order.

    Inside a batch no block is both read and written; of two writes to one block the later counts, which the planning of
    block copies sees to.
    """
    batches: list[list[tuple[int, int]]] = []
    read: set[int] = set()
    written: set[int] = set()
    for source, destination in pairs:
        if source == destination:
            continue
        if not batches or source in written or destination in read:
            batches.append([])
            read, written = set(), set()
        batches[-1].append((source, destination))
        read.add(source)
        written.add(destination)
    return batches
