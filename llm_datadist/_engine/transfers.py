"""Move bytes between a local cache and one of a peer: pulls, pushes, and single layers of asynchronous transfers.

A pull reads under a guard and looks at the guard again: what came is right, or is called wrong. A push pins the
memory it writes to before it looks at the guard, since a check after the write could only report the damage. What is
found out about a peer's cache is kept with the link; the guard, not a message, tells when it no longer holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from llm_datadist._engine import codes, paths
from llm_datadist._engine.caches import Cache, Caches
from llm_datadist._engine.directory import BLOCKS, F_REGISTERED, PREFIX, Key, Unreadable
from llm_datadist._engine.layout import (
    Layers,
    check_chunks,
    check_equal_blocks,
    check_index,
    check_room,
    check_span,
    pair_tensors,
    select,
    select_tensors,
)
from llm_datadist._engine.links import Link, Links
from llm_datadist._engine.paths import STAGED, AddressTable, Found, Path, Rules
from llm_datadist._engine.staging import Staging
from llm_datadist._engine.uses import Use, with_use
from llm_datadist._kernels.records import Record
from llm_datadist._kernels.runs import Bases, Indices, Plan, Runs, block_runs, chunk_runs, span_runs
from llm_datadist.backend import BackendError, Failure
from llm_datadist.status import LLMException, LLMStatusCode, ParamInvalid

__all__ = ["Transfers"]


class Transfers:
    """Transfers of one engine. Thread-safe; operations on one link exclude each other."""

    def __init__(self, caches: Caches, links: Links, staging: Staging, timeout_ms: int, rules: Rules) -> None:
        self._caches = caches
        self.links = links
        self._staging = staging
        self._timeout_ms = timeout_ms
        self._rules = rules

    # ------------------------------------------------------------------ pulls

    @with_use
    def pull_blocks(
        self,
        use: Use,
        cluster_id: int,
        key: Key,
        cache_id: int,
        source: Indices,
        destination: Indices,
        layers: Layers,
    ) -> None:
        """Pull blocks of a peer's blocks cache into blocks (or slots) of a local cache."""
        cache = self._caches.begin(cache_id, use)
        here = cache.geometry
        if layers.source is not None or layers.destination is not None:
            self._check_local(cache, layers)
        if destination.maximum >= here.slots:
            check_index("destination block", destination.maximum, here.slots, f"the blocks of cache {cache.id}")

        def runs(found: Found) -> Runs:
            record = found.record
            if record.stride != here.stride or source.maximum >= record.slots:
                check_equal_blocks(record.stride, here.stride)
                check_index("source block", source.maximum, record.slots, "the blocks of the source cache")
            return block_runs(source, destination, record.slots, here.slots, here.stride)

        self._pull(use, cluster_id, key, 0, cache, layers, runs, spend=False, blocks=True)

    @with_use
    def pull_slot(
        self,
        use: Use,
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
        cache = self._caches.begin(cache_id, use)
        here = cache.geometry
        if batch_index >= here.slots:
            check_index("batch_index", batch_index, here.slots, f"the batch slots of cache {cache.id}")
        nbytes = size if size > 0 else here.stride - do
        if nbytes <= 0:
            raise ParamInvalid(f"dst_cache_offset is {do}, allowed are 0 to {here.stride - 1}")
        check_span("destination", "dst_cache_offset", do, nbytes, here.stride)
        if layers.source is not None or layers.destination is not None:
            self._check_local(cache, layers)

        def runs(found: Found) -> Runs:
            stride = found.record.stride
            check_span("source", "src_cache_offset", so, nbytes, stride)
            return span_runs(found.slot * stride + so, batch_index * here.stride + do, nbytes)

        with_offset = source_offset is not None or destination_offset is not None
        self._pull(use, cluster_id, key, slot, cache, layers, runs, spend=not with_offset, blocks=False)

    @with_use
    def pull_slot_into_blocks(
        self, use: Use, cluster_id: int, key: Key, slot: int, cache_id: int, destination: Indices, layers: Layers
    ) -> None:
        """Pull one batch slot, cut into chunks of a block, into blocks of a local cache."""
        cache = self._caches.begin(cache_id, use)
        here = cache.geometry
        if layers.source is not None or layers.destination is not None:
            self._check_local(cache, layers)
        check_index("destination block", destination.maximum, here.slots, f"the blocks of cache {cache.id}")

        def runs(found: Found) -> Runs:
            stride = found.record.stride
            check_chunks(stride, here.stride, len(destination))
            return chunk_runs(destination, here.slots, here.stride, found.slot * stride, stride)

        self._pull(use, cluster_id, key, slot, cache, layers, runs, spend=True, blocks=False, same_form=False)

    @staticmethod
    def _check_local(cache: Cache, layers: Layers) -> None:
        n = layers.per_layer
        destination = select("dst_layer_range", layers.destination, n, cache.geometry.num_tensors)
        if layers.source is not None:
            # How many it selects is known here, whether the source has them is not.
            pair_tensors(range(layers.source.start * n, layers.source.stop * n), destination)

    def _pull(
        self,
        use: Use,
        cluster_id: int,
        key: Key,
        slot: int,
        cache: Cache,
        layers: Layers,
        runs: Callable[[Found], Runs],
        *,
        spend: bool,
        blocks: bool,
        same_form: bool = True,
    ) -> None:
        link = self.links.to(cluster_id)
        use.what = key, slot
        deadline_ns = self.links.take(link, use, self._timeout_ms)
        # Whoever pulls by cache id or request does it once.
        token = (key, cache.id, layers) if key.kind in (BLOCKS, PREFIX) else None
        while True:
            path: Path | None = None if token is None else link.kept.get(token)
            plan = None if path is None else paths.plan_again(path, runs)
            if path is None or plan is None:
                found = paths.find(link, key, slot, deadline_ns)
                if self._rules.cache_manager:
                    paths.check_form(found, blocks=blocks)
                path = paths.pull_path(link, found, cache, layers, self._rules, same_form=same_form)
                if token is not None:
                    paths.keep(link, token, path)
                plan = Plan(path.bases, runs(found))
            found, _, route, tensors, guard = path
            try:
                if route == STAGED:
                    self._staging.read(link, found.record, plan, guard, deadline_ns)
                elif link.directory.pins_reads and found.record.flags & F_REGISTERED:
                    move = partial(link.read, plan, guard, deadline_ns, route)
                    self._pinned(use, link, found.record, move)
                else:
                    link.read(plan, guard, deadline_ns, route)
                break
            except BackendError as e:
                link.kept.pop(token, None)
                self._look_again(link, e, deadline_ns)
        if spend and found.spends is not None and not self._rules.remote_accessible:
            if len(tensors) == found.record.num_tensors:
                link.board.spend(found.spends)
            else:
                link.board.spend_tensors(found.spends, tensors, found.record.num_tensors)

    # ------------------------------------------------------------------ pushes

    @with_use
    def push_slot(
        self,
        use: Use,
        cluster_id: int,
        key: Key,
        slot: int,
        cache_id: int,
        batch_index: int,
        source: range,
        destination: range,
        n: int,
    ) -> None:
        """Push one batch slot. ``source`` and ``destination`` are layers of ``n`` tensors each."""
        cache = self._caches.begin(cache_id, use)
        here = cache.geometry
        check_index("src_batch_index", batch_index, here.slots, f"the batch slots of cache {cache.id}")

        def runs(found: Found, room: int) -> Runs:
            check_room(here.stride, found.record.stride)
            return span_runs(batch_index * here.stride, 0, here.stride)

        tensors = range(source.start * n, source.stop * n)
        self._write(use, cluster_id, key, slot, cache, tensors, destination.start * n, n, runs, blocks=False)

    @with_use
    def push_blocks(
        self,
        use: Use,
        cluster_id: int,
        key: Key,
        cache_id: int,
        source: Indices,
        destination: Indices,
        source_layers: range,
        destination_layers: range,
        n: int,
    ) -> None:
        """Push blocks of layers of ``n`` tensors each."""
        cache = self._caches.begin(cache_id, use)
        here = cache.geometry
        check_index("source block", source.maximum, here.slots, f"the blocks of cache {cache.id}")

        def runs(found: Found, room: int) -> Runs:
            record = found.record
            check_equal_blocks(here.stride, record.stride)
            check_index("destination block", destination.maximum, record.slots, "the peer's blocks")
            return block_runs(source, destination, here.slots, record.slots, here.stride)

        tensors = range(source_layers.start * n, source_layers.stop * n)
        self._write(use, cluster_id, key, 0, cache, tensors, destination_layers.start * n, n, runs, blocks=True)

    @with_use
    def write_layer(
        self,
        use: Use,
        cluster_id: int,
        key: Key,
        slot: int,
        cache_id: int,
        source: range,
        first_destination: int,
        check: Callable[[Cache], None],
        runs: Callable[[Cache, Found, int], Runs],
    ) -> None:
        """Write some tensors of a local cache into consecutive tensors of the cache that a key names.

        ``check`` looks at the local cache before the link is looked for. ``runs`` plans from the start of the batch
        slot on, and is given the bytes from there to the end of the tensor.
        """
        cache = self._caches.begin(cache_id, use)
        check(cache)
        self._write(
            use,
            cluster_id,
            key,
            slot,
            cache,
            source,
            first_destination,
            len(source),
            lambda found, room: runs(cache, found, room),
            blocks=None,
        )

    def _write(
        self,
        use: Use,
        cluster_id: int,
        key: Key,
        slot: int,
        cache: Cache,
        source: range,
        first_destination: int,
        per_layer: int,
        runs: Callable[[Found, int], Runs],
        *,
        blocks: bool | None,
    ) -> None:
        """Write tensors to consecutive ones; ``blocks`` says if the target must be a blocks cache, None takes either.

        Where the target has too few tensors, the layers before the first that it lacks are written.
        """
        if not source:
            return
        select_tensors("source", source, cache.geometry.num_tensors)
        link = self.links.to(cluster_id)
        use.what = key, slot
        # The time limit is that of a layer.
        deadline_ns = self.links.take(link, use, self._timeout_ms, len(source) // per_layer)

        def planned(found: Found) -> Runs:
            return runs(found, found.record.tensor_bytes - slot * found.record.stride)

        # Spent keys are not looked at again: where there are pushes no pull spends any.
        token = (key, slot, cache.id, source, first_destination, per_layer, blocks)
        while True:
            path: Path | None = link.kept.get(token)
            plan = None if path is None else paths.plan_again(path, planned)
            if path is None or plan is None:
                found = paths.find(link, key, 0, deadline_ns)
                if blocks is not None:
                    paths.check_form(found, blocks=blocks)
                check_index("batch_index of the key", slot, found.record.slots, "the batch slots of the peer's cache")
                paths.check_access(self._rules, cache, found.record, pull=False, same_form=True)
                path = paths.push_path(link, found, slot, cache, source, first_destination, per_layer)
                paths.keep(link, token, path)
                plan = Plan(path.bases, planned(found))
            found, _, route, present, guard = path
            try:
                self._write_plan(use, link, found.record, plan, guard, deadline_ns, route)
                break
            except BackendError as e:
                link.kept.pop(token, None)
                self._look_again(link, e, deadline_ns)
        if len(present) < len(source):
            paths.refuse_lacking(found.record, first_destination + len(present), per_layer)

    @with_use
    def write_addresses(
        self,
        use: Use,
        cluster_id: int,
        cache_id: int,
        source: range,
        addresses: Sequence[int],
        nbytes: Callable[[Cache], int],
        runs: Callable[[Cache, int], Runs],
    ) -> None:
        """Write tensors of a local cache to addresses of a peer.

        ``nbytes`` checks the cache and says how many bytes from each address on are written at most. ``runs`` is given
        the bytes from the address to the end of the tensor that it lies in.
        """
        cache = self._caches.begin(cache_id, use)
        span = nbytes(cache)
        link = self.links.to(cluster_id, accepted=not self._rules.cache_manager)
        use.what = addresses[0]
        deadline_ns = self.links.take(link, use, self._timeout_ms)
        while True:
            located = [AddressTable.look_up(link, address, span, deadline_ns) for address in addresses]
            # All are planned before the first is written, since planning checks too.
            plans = [
                Plan(Bases([cache.addresses[0][i]], [place.base]), runs(cache, room))
                for i, (_, place, room) in zip(source, located, strict=True)
            ]
            try:
                for plan, (found, place, _) in zip(plans, located, strict=True):
                    self._write_plan(use, link, found.record, plan, found.guard(link), deadline_ns, place.route)
                return
            except BackendError as e:
                link.kept.pop(AddressTable, None)
                self._look_again(link, e, deadline_ns)

    def _write_plan(
        self, use: Use, link: Link, record: Record, plan: Plan, guard: Any, deadline_ns: int, route: int
    ) -> None:
        def move() -> None:
            if route == STAGED:
                self._staging.write(link, record, plan, guard, deadline_ns)
            else:
                link.write(plan, guard, deadline_ns, route)

        self._pinned(use, link, record, move)

    @staticmethod
    def _pinned(use: Use, link: Link, record: Record, move: Callable[[], None]) -> None:
        """Have the owner keep a cache's memory while bytes are moved."""
        use.pin = link.board, link.peer_slot
        link.board.pin(link.peer_slot, record.generation)
        try:
            move()
        except BackendError as e:
            if e.breaks_link:
                # Bytes may be on their way still, so the pin stays: the owner keeps the memory until its own end of the
                # link has been taken down.
                use.pin = None
                link.give_up(f"a transfer failed: {e.text}")
            raise
        finally:
            if use.pin is not None:
                link.board.unpin(link.peer_slot)
                # Once the link is given back, the pin is another's.
                use.pin = None

    # ------------------------------------------------------------------ failures

    def _look_again(self, link: Link, error: BackendError, deadline_ns: int) -> None:
        """Return if only what was known of the peer is out of date, and there is time to look again; else raise."""
        if error.kind is not Failure.STALE:
            raise error
        paths.require_epoch(link)
        if time.monotonic_ns() > deadline_ns:
            raise BackendError(Failure.TIMED_OUT, "the peer's cache kept changing") from error

    def give_back(self, use: Use) -> None:
        """Give back what a transfer has."""
        if use.pin is not None:
            board, slot = use.pin
            board.unpin(slot)
        self.links.give_back(use)
        self._caches.end(use)

    def translated(self, use: Use, error: Exception) -> Exception:
        """Turn a failure on a link into what the user gets, and break the link where it must be."""
        if use.link is None or not isinstance(error, (BackendError, Unreadable)):
            return error
        if isinstance(error, BackendError) and error.breaks_link:
            use.until = use.link.endpoint.revoked
        what = f"address {use.what:#x}" if isinstance(use.what, int) else paths.describe(*use.what)
        return self._failed(use.link, error, what)

    def _failed(self, link: Link, error: BackendError | Unreadable, what: str) -> LLMException:
        if isinstance(error, Unreadable):
            link.break_(str(error))
            return self.links.not_linked(link.cluster_id, link)
        if error.kind is Failure.TIMED_OUT:
            why = f"took more than the sync_kv_timeout of {self._timeout_ms} ms"
            if time.monotonic_ns() < link.deadline_ns:
                why = "timed out in the driver"
            link.break_(f"a transfer {why} (timed out): {error.text}")
            return LLMException(
                f"the transfer of {what} with cluster {link.cluster_id} {why} ({error.text}); the destination may be "
                "partly written; link the cluster again",
                status_code=codes.timeout_code(self._rules.cache_manager),
            )
        if error.breaks_link:
            link.break_(f"a transfer failed: {error.text}")
            if error.kind is Failure.PEER_GONE:
                return self.links.not_linked(link.cluster_id, link)
            return codes.exception_of(error, self._rules.cache_manager)
        try:
            paths.require_epoch(link)
        except (BackendError, Unreadable):
            link.break_("the peer has dropped the link or was finalized (peer gone)")
            return self.links.not_linked(link.cluster_id, link)
        if error.kind in (Failure.STALE, Failure.TORN):
            return LLMException(
                f"{what} of cluster {link.cluster_id} was released or removed during the transfer; "
                "the content of the destination is undefined",
                status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
            )
        return codes.exception_of(error, self._rules.cache_manager)
