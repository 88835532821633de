"""Run a pull: find the source, check both sides, copy under a guard, and tell the owner what was taken.

Nothing here asks the peer's process for anything. What is found out about a source that stays (a blocks or prefix key)
is kept with the link; the guard, not a message, tells when it no longer holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from llm_datadist._engine import codes
from llm_datadist._engine.caches import Cache, Caches
from llm_datadist._engine.directory import BLOCKS, CACHE, PREFIX, REQUEST, Entry, Key, Record, Unreadable
from llm_datadist._engine.layout import Layers, check_span, pair_tensors, select
from llm_datadist._engine.links import Link, Links
from llm_datadist._kernels import words
from llm_datadist._kernels.hostcopy import Guard
from llm_datadist._kernels.runs import Bases, Indices, Plan, Runs, block_runs, span_runs
from llm_datadist.backend import BackendError, Failure
from llm_datadist.status import LLMException, LLMStatusCode, ParamInvalid

__all__ = ["Transfers"]

#: Sources that are remembered with one link; far above what a serving process uses.
KEPT = 256


@dataclass(frozen=True, slots=True)
class Path:
    """One source and one destination, checked against each other, ready to be copied."""

    key: Key
    record: Record
    slot: int
    bases: Bases
    guard: Guard
    source_tensors: range
    #: The request key that a pull spends, if any.
    spends: Entry | None


class Transfers:
    """Pulls of one engine. Thread-safe; two operations on one link are refused."""

    def __init__(self, caches: Caches, links: Links, timeout_ms: int, cache_manager: bool) -> None:
        self._caches = caches
        self._links = links
        self._timeout_ms = timeout_ms
        self._cache_manager = cache_manager

    def pull_blocks(
        self, cluster_id: int, key: Key, cache_id: int, source: Indices, destination: Indices, layers: Layers
    ) -> None:
        """Pull blocks of a peer's blocks cache into blocks (or slots) of a local cache."""
        cache = self._caches.begin(cache_id)
        try:
            self._check_local(cache, layers)
            here = cache.geometry
            if destination.maximum >= here.slots:
                raise ParamInvalid(
                    f"destination block {destination.maximum} is not below {here.slots}, the blocks of cache {cache.id}"
                )

            def runs(record: Record, slot: int) -> Runs:
                if record.stride != here.stride:
                    raise ParamInvalid(
                        f"a source block has {record.stride} bytes, a destination block {here.stride}; "
                        "they must be equal"
                    )
                if source.maximum >= record.slots:
                    raise ParamInvalid(
                        f"source block {source.maximum} is not below {record.slots}, the blocks of the source cache"
                    )
                return block_runs(source, destination, record.slots, here.slots, here.stride)

            self._pull(cluster_id, key, 0, cache, layers, runs, spend=False)
        finally:
            self._caches.end(cache)

    def pull_slot(
        self,
        cluster_id: int,
        key: Key,
        slot: int,
        cache_id: int,
        batch_index: int,
        size: int,
        source_offset: int | None,
        destination_offset: int | None,
        layers: Layers,
    ) -> None:
        """Pull one batch slot, or a part of it. ``slot`` counts only when the key is a cache id."""
        so, do = source_offset or 0, destination_offset or 0
        cache = self._caches.begin(cache_id)
        try:
            here = cache.geometry
            if batch_index >= here.slots:
                raise ParamInvalid(
                    f"batch_index is {batch_index}, allowed are 0 to {here.slots - 1}, the slots of cache {cache.id}"
                )
            nbytes = size if size > 0 else here.stride - do
            if nbytes <= 0:
                raise ParamInvalid(f"dst_cache_offset is {do}, allowed is 0 to {here.stride - 1}")
            check_span("destination", "dst_cache_offset", do, nbytes, here.stride)
            self._check_local(cache, layers)

            def runs(record: Record, slot: int) -> Runs:
                check_span("source", "src_cache_offset", so, nbytes, record.stride)
                return span_runs(slot * record.stride + so, batch_index * here.stride + do, nbytes)

            with_offset = source_offset is not None or destination_offset is not None
            self._pull(cluster_id, key, slot, cache, layers, runs, spend=not with_offset)
        finally:
            self._caches.end(cache)

    @staticmethod
    def _check_local(cache: Cache, layers: Layers) -> None:
        n = layers.per_layer
        destination = select("dst_layer_range", layers.destination, n, cache.geometry.num_tensors)
        if layers.source is not None:
            # How many it selects is known here, whether the source has them is not.
            pair_tensors(range(layers.source.start * n, layers.source.stop * n), destination)

    def _pull(
        self,
        cluster_id: int,
        key: Key,
        slot: int,
        cache: Cache,
        layers: Layers,
        runs: Callable[[Record, int], Runs],
        *,
        spend: bool,
    ) -> None:
        link = self._links.client(cluster_id)
        with self._links.exclusive(link):
            deadline_ns = time.monotonic_ns() + self._timeout_ms * 1_000_000
            token = (key, cache.id, layers)
            try:
                while True:
                    path: Path = link.kept.get(token) or self._resolve(link, key, slot, cache, layers, deadline_ns)
                    plan = Plan(path.bases, runs(path.record, path.slot))
                    try:
                        link.endpoint.read(plan, path.guard, deadline_ns)
                        break
                    except BackendError as e:
                        link.kept.pop(token, None)
                        if e.kind is not Failure.STALE or words.load(link.guard_word[0]) != link.peer_epoch:
                            raise
                        # Only what was known of the source is out of date: look again, until the deadline.
                        if time.monotonic_ns() > deadline_ns:
                            raise BackendError(Failure.TIMED_OUT, "the source kept changing") from e
            except BackendError as e:
                raise self._failed(link, e, self._describe(key, slot)) from e
            except Unreadable as e:
                link.break_(str(e))
                raise self._links.not_linked(cluster_id, link) from e
            if path.key.kind in (BLOCKS, PREFIX):
                if len(link.kept) >= KEPT:
                    link.kept.clear()
                link.kept[token] = path
            if spend and path.spends is not None:
                if len(path.source_tensors) == path.record.num_tensors:
                    link.board.spend(path.spends)
                else:
                    link.board.spend_tensors(path.spends, path.source_tensors, path.record.num_tensors)

    def _resolve(self, link: Link, key: Key, slot: int, cache: Cache, layers: Layers, deadline_ns: int) -> Path:
        entry = link.directory.find(key, deadline_ns)
        record = link.directory.record(entry) if entry is not None else None
        if entry is None or record is None:
            if not link.usable() or words.load(link.guard_word[0]) != link.peer_epoch:
                raise BackendError(Failure.PEER_GONE, "the peer has gone, or dropped the link")
            raise self._absent(key, slot)
        spends = entry if key.kind == REQUEST else None
        if key.kind == CACHE:
            if slot >= record.slots or not self._lives(link, entry, record):
                raise self._absent(key, slot)
            bound = link.directory.entry_of_slot(record, slot)
            spends = bound[1] if bound is not None and bound[0] == REQUEST else None
        elif key.kind == REQUEST and link.board.is_spent(entry):
            raise self._absent(key, slot)
        elif key.kind != BLOCKS:
            slot = entry.slot
        if slot >= record.slots:
            raise Unreadable(f"an entry names slot {slot} of a cache of {record.slots}")
        if record.devices != len(cache.addresses):
            raise ParamInvalid(
                f"the source cache lies on {record.devices} devices, the destination on {len(cache.addresses)}"
            )
        source = select("src_layer_range", layers.source, layers.per_layer, record.num_tensors)
        here = cache.geometry.num_tensors
        destination = select("dst_layer_range", layers.destination, layers.per_layer, here)
        pair_tensors(source, destination)
        endpoint, n = link.endpoint, record.num_tensors
        source_bases: list[int] = []
        destination_bases: list[int] = []
        try:
            for device in range(record.devices):
                for i in source:
                    region, offset = record.tensors[device * n + i]
                    source_bases.append(endpoint.locate(region, offset, record.tensor_bytes))
                destination_bases += [cache.addresses[device][i] for i in destination]
        except BackendError as e:
            raise Unreadable(f"a record of the peer's directory is wrong: {e.text}") from e
        guard = [link.guard_word, (link.directory.record_word(entry), record.generation)]
        if key.kind != CACHE:
            guard.append((link.directory.entry_word(entry), entry.generation))
        return Path(key, record, slot, Bases(source_bases, destination_bases), Guard(guard), source, spends)

    @staticmethod
    def _lives(link: Link, entry: Entry, record: Record) -> bool:
        """Say whether a cache named by its id is still there: by its handle, or by a key that nobody has spent."""
        if not entry.tags:
            return True
        for slot in range(len(record.keys)):
            bound = link.directory.entry_of_slot(record, slot)
            if bound is not None and not (bound[0] == REQUEST and link.board.is_spent(bound[1])):
                return True
        return False

    def _failed(self, link: Link, error: BackendError, source: str) -> LLMException:
        if error.kind is Failure.TIMED_OUT:
            link.break_(f"a transfer exceeded {self._timeout_ms} ms (timed out)")
            return LLMException(
                f"{source} from cluster {link.cluster_id} took more than the sync_kv_timeout of {self._timeout_ms} ms; "
                "the destination may be partly written; link the cluster again",
                status_code=codes.timeout_code(self._cache_manager),
            )
        if not link.usable() or words.load(link.guard_word[0]) != link.peer_epoch:
            link.break_("the peer has dropped the link or was finalized (peer gone)")
            return self._links.not_linked(link.cluster_id, link)
        if error.kind in (Failure.STALE, Failure.TORN):
            return LLMException(
                f"{source} of cluster {link.cluster_id} was released or removed during the pull; "
                "the content of the destination is undefined",
                status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
            )
        return codes.exception_of(error, self._cache_manager)

    def _absent(self, key: Key, slot: int) -> LLMException:
        return LLMException(
            f"{self._describe(key, slot)} does not exist on the peer: never bound, pulled already, or removed",
            status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
        )

    @staticmethod
    def _describe(key: Key, slot: int) -> str:
        if key.kind == CACHE:
            return f"cache {key.ident} slot {slot}"
        return Caches.describe(key)
