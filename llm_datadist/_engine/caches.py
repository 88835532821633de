"""The caches of one engine: memory, ids, keys, references and release.

A cache lives while its id handle or one of its keys lives. What peers may know of it stands in the directory; what
they have pulled is collected from the board before every step that could depend on it.
"""

from __future__ import annotations

import functools
import itertools
import secrets
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Concatenate, ParamSpec, TypeVar

from llm_datadist._engine import codes
from llm_datadist._engine.board import Board
from llm_datadist._engine.directory import (
    BLOCKS,
    CACHE,
    F_ACCESSIBLE,
    F_BLOCKS,
    F_HOST,
    F_POOLED,
    F_REGISTERED,
    REQUEST,
    Directory,
    Entry,
    Key,
    record_of,
)
from llm_datadist._engine.space import Space
from llm_datadist._engine.uses import Use
from llm_datadist._kernels.records import Record
from llm_datadist._log import get_logger
from llm_datadist.backend import Backend, BackendError, MemoryKind, Region
from llm_datadist.status import LLMException, LLMStatusCode, ParamInvalid

__all__ = ["Binding", "Cache", "Caches", "Geometry", "Pool"]


@dataclass(frozen=True, slots=True)
class Geometry:
    """Numbers of a cache: tensors of ``slots`` batch slots (or blocks) of ``stride`` bytes."""

    num_tensors: int
    slots: int
    tensor_bytes: int
    kind: MemoryKind = MemoryKind.DEVICE
    blocks: bool = False
    #: Bytes of one batch slot or block.
    stride: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stride", self.tensor_bytes // self.slots)


@dataclass(slots=True)
class Pool:
    """One region that caches are cut from, with the room that its user may take."""

    region: Region
    space: Space
    limit: int
    #: The options that say so.
    limited_by: str


@dataclass(slots=True)
class Binding:
    """One key of one cache. ``tags`` is 0 for keys that pulls don't spend."""

    key: Key
    cache: Cache
    slot: int
    entry: int
    generation: int
    tags: int
    since: float
    #: Position among the bindings that peers can spend.
    position: int = -1


@dataclass(slots=True)
class Cache:
    """One cache of this engine."""

    id: int
    geometry: Geometry
    #: (pool, offset) of each tensor, device after device; empty for memory of the user's.
    places: list[tuple[Pool, int]]
    #: The user's memory, tensor after tensor; empty for memory from pools.
    registered: list[tuple[Region, int]]
    #: What the user gave as memory, kept alive.
    keepers: Sequence[object]
    accessible: bool
    addresses: tuple[tuple[int, ...], ...]
    #: The same, device after device, for kernels.
    flat: array[int]
    record: Record
    record_at: int
    entry: int
    entry_generation: int
    bindings: dict[int, Binding] = field(default_factory=dict)
    #: The user still holds the handle.
    held: bool = True
    #: Local transfers that use the memory now; it is not reused before they end.
    users: set[Use] = field(default_factory=set)
    #: Live Tensors on the memory; likewise.
    views: int = 0
    #: Withdrawn from the directory; the memory waits for users, views, and peers that write into it.
    withdrawn: bool = False
    #: (link slot, generation) of peers that were writing when it was withdrawn; a registered cache that has come back
    #: since may still have pins of earlier generations.
    pinned_by: list[tuple[int, int]] = field(default_factory=list)


def merged(places: Sequence[tuple[Pool, int]], tensor_bytes: int) -> list[tuple[Pool, int, int]]:
    """Join tensors that lie side by side, so that most caches are given back in one step a device."""
    ranges: list[tuple[Pool, int, int]] = []
    for pool, at in places:
        nbytes = pool.space.round(tensor_bytes)
        if ranges and ranges[-1][0] is pool and ranges[-1][1] + ranges[-1][2] == at:
            ranges[-1] = (pool, ranges[-1][1], ranges[-1][2] + nbytes)
        else:
            ranges.append((pool, at, nbytes))
    return ranges


class View:
    """Keeps a cache's memory from being used again as long as it lives."""

    def __init__(self, cache: Cache, regions: Sequence[object], ended: deque[Cache]) -> None:
        self._cache = cache
        self._regions = regions
        self._ended = ended

    def __del__(self) -> None:
        # May run in any thread at any point, so it takes no lock: the next call on the table finds it.
        self._ended.append(self._cache)


Args = ParamSpec("Args")
Result = TypeVar("Result")


def while_open(method: Callable[Concatenate[Caches, Args], Result]) -> Callable[Concatenate[Caches, Args], Result]:
    """Refuse a method once the table is closed, and let the end of the engine wait for those that run."""

    @functools.wraps(method)
    def run(self: Caches, /, *args: Args.args, **kwargs: Args.kwargs) -> Result:
        token = object()
        try:
            # First the token, then the look: who closes does it the other way round, so one of the two sees the other.
            self._inside.add(token)
            if self._closed:
                raise LLMException("the engine was finalized", status_code=LLMStatusCode.LLM_ENGINE_FINALIZED)
            return method(self, *args, **kwargs)
        finally:
            self._inside.discard(token)

    return run


class Caches:
    """The table of caches. All methods are thread-safe."""

    def __init__(
        self, backend: Backend, directory: Directory, board: Board, pools: Sequence[Pool], cache_manager: bool
    ) -> None:
        self._backend = backend
        self._directory = directory
        self._board = board
        self._pools = list(pools)
        self._cache_manager = cache_manager
        # A table of fixed size is a limit of what may be asked for; one that grows ends with the memory.
        sparse = backend.capabilities.sparse
        self._table_full = self._out_of_memory() if sparse else LLMStatusCode.LLM_PARAM_INVALID
        self._closed = False
        #: Calls that use the directory, the board or a pool now.
        self._inside: set[object] = set()
        self._lock = threading.Lock()
        self._caches: dict[int, Cache] = {}
        self._keys: dict[Key, Binding] = {}
        self._next_id = 1
        # Even numbers, never used twice. They start at a random place far from 0, since the word where a reader expects
        # the generation of a record that is gone may by then hold any number of another record's body.
        self._generations = itertools.count(secrets.randbelow(1 << 61) + (1 << 61) << 1, 2)
        # What peers can spend: bindings, and the flat (entry, generation) pairs that one kernel call compares.
        self._spendable: list[Binding] = []
        self._spendable_words = array("Q")
        self._ended_views: deque[Cache] = deque()
        #: Operations that failed with bytes on their way.
        self._late: deque[Use] = deque()
        self._pinned: list[Cache] = []
        self._pooled = any(pool.region.kind is MemoryKind.DEVICE for pool in self._pools)
        #: Says of a link slot whether its peer can't write any more; set by the engine once there are links.
        self.proved_gone: Callable[[int], bool] = lambda slot: False
        #: Ids of handles that were garbage-collected.
        self.dropped: deque[int] = deque()

    # ------------------------------------------------------------------ allocation

    @while_open
    def allocate(self, geometry: Geometry, keys: Sequence[Key | None]) -> Cache:
        """Allocate a cache and bind ``keys[i]`` to slot i (the blocks key of a blocks cache: slot 0)."""
        slot_of = {key: slot for slot, key in enumerate(keys) if key is not None}
        pools = [p for p in self._pools if p.region.kind is geometry.kind]
        if not pools:
            option = "llm.HostMemPoolConfig" if geometry.kind is MemoryKind.HOST else "llm.MemPoolConfig"
            raise ParamInvalid(f"no pool holds {geometry.kind.name} memory: set {option}")
        places: list[tuple[Pool, int]] = []
        backed = 0
        published = False
        try:
            with self._lock:
                self._collect()
                self._check_unbound(slot_of)
                for pool in pools:
                    self._take(pool, geometry, places)
            # Backing memory takes a while, and transfers of other threads must not wait for it.
            for pool, at, nbytes in merged(places, geometry.tensor_bytes):
                self._commit(pool, at, nbytes)
                backed += 1
            with self._lock:
                self._check_unbound(slot_of)
                where = [(pool.region, pool.region.address + at) for pool, at in places]
                cache = self._publish(geometry, where, slot_of, places=places)
                published = True
            return cache
        finally:
            if not published and not self._take_back(places):
                with self._lock:
                    for number, (pool, at, nbytes) in enumerate(merged(places, geometry.tensor_bytes)):
                        pool.space.give(at, nbytes)
                        if number < backed:
                            self._backend.discard(pool.region, at, nbytes)

    def _take_back(self, places: Sequence[tuple[Pool, int]]) -> bool:
        """Release a cache whose publication was interrupted; say whether there was one."""
        with self._lock:
            for cache in self._caches.values():
                if cache.places is places:
                    for binding in list(cache.bindings.values()):
                        self._unbind(binding)
                    self._drop(cache.id)
                    return True
        return False

    def _check_unbound(self, keys: Iterable[Key]) -> None:
        for key in keys:
            if key in self._keys:
                self._refuse_bound(key)

    @while_open
    def register(
        self,
        geometry: Geometry,
        device: int,
        addresses: Sequence[int],
        keys: Sequence[Key | None],
        accessible: bool,
        keepers: Sequence[object],
    ) -> Cache:
        """Make a cache of the user's memory. A blocks key that another registered cache has goes over to this one."""
        slot_of = {key: slot for slot, key in enumerate(keys) if key is not None}
        try:
            regions = self._backend.register(device, addresses, geometry.tensor_bytes, geometry.kind)
        except BackendError as e:
            raise codes.exception_of(e, self._cache_manager) from e
        where = list(zip(regions, addresses, strict=True))
        published = False
        try:
            with self._lock:
                self._collect()
                taken_over = [self._keys[key] for key in slot_of if key in self._keys]
                for bound in taken_over:
                    if bound.key.kind != BLOCKS or not bound.cache.registered:
                        self._refuse_bound(bound.key)
                cache = self._publish(geometry, where, slot_of, keepers=keepers, accessible=accessible)
                published = True
                for bound in taken_over:
                    self._unbind(bound)
            return cache
        finally:
            if not published and not self._forget_registered(where):
                self._backend.unregister(where, geometry.tensor_bytes)

    def _forget_registered(self, where: Sequence[tuple[Region, int]]) -> bool:
        """Forget a cache of the user's memory whose publication was interrupted; say whether there was one."""
        with self._lock:
            for cache in self._caches.values():
                if cache.registered is where:
                    for binding in list(cache.bindings.values()):
                        self._unbind(binding)
                    self._withdraw(cache)
                    self._free(cache)
                    return True
        return False

    @while_open
    def unregister(self, cache_id: int, deadline_ns: int) -> None:
        """Forget a registered cache as soon as no transfer uses it; ids of anything else are harmless.

        Raises
        ------
        LLMException
            LLM_TIMEOUT when a transfer still uses the memory at the deadline: the cache stays registered.
        """
        with self._lock:
            self._collect()
            cache = self._caches.get(cache_id)
            if cache is None or not cache.registered:
                return
        ended = False
        try:
            while True:
                with self._lock:
                    if cache_id not in self._caches:  # another thread was quicker
                        ended = True
                        return
                    cache.held = False
                    if not cache.withdrawn:
                        self._withdraw(cache)
                    self._look_at_pins(cache)
                    self._end_late()
                    if not cache.users and not cache.pinned_by:
                        for binding in list(cache.bindings.values()):
                            self._unbind(binding)
                        ended = True
                        self._free(cache)
                        return
                if self._closed:
                    raise LLMException("the engine was finalized", status_code=LLMStatusCode.LLM_ENGINE_FINALIZED)
                if time.monotonic_ns() > deadline_ns:
                    raise LLMException(
                        f"cache {cache_id} is still used by a transfer, so it stays registered: "
                        "call again when that has ended",
                        status_code=codes.timeout_code(self._cache_manager),
                    )
                time.sleep(0.001)
        except BackendError as e:
            told = codes.exception_of(e, self._cache_manager)
            raise LLMException(
                f"cache {cache_id} is unregistered here, but the driver keeps its memory: {told}",
                status_code=told.status_code,
            ) from e
        finally:
            if not ended:
                # Out of time, or interrupted: the user goes on to own a registered cache.
                with self._lock:
                    if cache_id in self._caches and cache.withdrawn:
                        self._publish_again(cache)

    def _publish_again(self, cache: Cache) -> None:
        """Make a withdrawn registered cache visible once more, under new generations."""
        cache.held, cache.withdrawn = True, False
        for binding in cache.bindings.values():
            self._directory.withdraw(binding.entry, binding.key, binding.generation)
        numbers = self._directory.take_entries(1 + len(cache.bindings))
        table = list(cache.record.keys)
        for binding, number in zip(cache.bindings.values(), numbers[1:], strict=True):
            binding.entry, binding.generation = number, next(self._generations)
            table[binding.slot] = (number + 1, binding.generation)
        old = cache.record
        cache.record = record_of(
            next(self._generations),
            old.cache_id,
            old.flags,
            old.devices,
            old.num_tensors,
            old.slots,
            old.tensor_bytes,
            old.tensors,
            table,
        )
        cache.record_at = self._directory.write_record(cache.record)
        cache.entry, cache.entry_generation = numbers[0], next(self._generations)
        self._announce(cache)

    def _refuse_bound(self, key: Key) -> None:
        owner = self._keys[key].cache.id
        text = f"{self.describe(key)} is already bound to cache {owner}; remove it or have it pulled first"
        if self._cache_manager:
            raise ParamInvalid(text)
        raise LLMException(text, status_code=LLMStatusCode.LLM_FAILED)

    def _out_of_memory(self) -> LLMStatusCode:
        return codes.out_of_memory_code(self._cache_manager)

    def _take(self, pool: Pool, geometry: Geometry, places: list[tuple[Pool, int]]) -> None:
        """Reserve room for all tensors of a cache on one device, and note each place at once."""
        each = pool.space.round(geometry.tensor_bytes)
        total = each * geometry.num_tensors
        if pool.space.used + total > pool.limit:
            raise self._no_room(pool, total, f"the limit is {pool.limit} ({pool.limited_by})")
        if not self._directory.holds(geometry.num_tensors * len(self._pools), geometry.slots):
            raise self._no_room(pool, total, f"a cache of {geometry.num_tensors} tensors is too large to be recorded")
        # One range for all tensors is found fastest and merges best; in a crowded pool one by one may still fit.
        start = pool.space.take(total)
        if start is not None:
            places += [(pool, start + i * each) for i in range(geometry.num_tensors)]
            return
        for _ in range(geometry.num_tensors):
            at = pool.space.take(each)
            if at is None:
                raise self._no_room(pool, total, f"the rest of its {pool.space.nbytes} is in fragments")
            places.append((pool, at))

    def _commit(self, pool: Pool, at: int, nbytes: int) -> None:
        try:
            self._backend.commit(pool.region, at, nbytes)
        except BackendError as e:
            with self._lock:
                usage = self._usage()
            raise LLMException(f"{e.text} {usage}.", status_code=self._out_of_memory()) from e

    def _no_room(self, pool: Pool, wanted: int, why: str) -> LLMException:
        return LLMException(
            f"no memory for {wanted} bytes on device {pool.region.device}: {pool.space.used} bytes are used, {why}; "
            f"{self._usage()}",
            status_code=self._out_of_memory(),
        )

    def _publish(
        self,
        geometry: Geometry,
        where: list[tuple[Region, int]],
        slot_of: dict[Key, int],
        *,
        places: list[tuple[Pool, int]] | None = None,
        keepers: Sequence[object] = (),
        accessible: bool = True,
    ) -> Cache:
        devices = len(where) // geometry.num_tensors
        with ExitStack() as undo:
            try:
                numbers = self._directory.take_entries(1 + len(slot_of))
                undo.callback(self._directory.return_entries, numbers)
                bound: dict[int, tuple[Key, int, int, int]] = {}
                for (key, slot), number in zip(slot_of.items(), numbers[1:], strict=True):
                    tags = 0
                    if key.kind == REQUEST and places is not None:
                        tags = self._board.take_tags(geometry.num_tensors)
                        undo.callback(self._board.give_tags, tags, geometry.num_tensors)
                    bound[slot] = (key, number, next(self._generations), tags)
                table = [(0, 0)] * (max(bound) + 1 if bound else 0)
                for slot, (_, number, generation, _) in bound.items():
                    table[slot] = (number + 1, generation)
                record = record_of(
                    next(self._generations),
                    self._next_id,
                    (F_ACCESSIBLE if accessible else 0)
                    | (F_BLOCKS if geometry.blocks else 0)
                    | (F_HOST if geometry.kind is MemoryKind.HOST else 0)
                    | (F_REGISTERED if places is None else 0)
                    | (F_POOLED if self._pooled else 0),
                    devices,
                    geometry.num_tensors,
                    geometry.slots,
                    geometry.tensor_bytes,
                    [(region.id, address - region.address) for region, address in where],
                    table,
                )
                record_at = self._directory.write_record(record)
            except MemoryError as e:
                raise LLMException(str(e), status_code=self._table_full) from e
            n = geometry.num_tensors
            flat = array("Q", [address for _, address in where])
            cache = Cache(
                record.cache_id,
                geometry,
                places or [],
                where if places is None else [],
                keepers,
                accessible,
                tuple(tuple(flat[d * n : (d + 1) * n]) for d in range(devices)),
                flat,
                record,
                record_at,
                numbers[0],
                next(self._generations),
            )
            now = time.monotonic()
            for slot, (key, number, generation, tags) in bound.items():
                binding = Binding(key, cache, slot, number, generation, tags, now)
                cache.bindings[slot] = self._keys[key] = binding
                if tags:
                    binding.position = len(self._spendable)
                    self._spendable.append(binding)
                    self._spendable_words.extend((number, generation))
            self._next_id += 1
            self._caches[cache.id] = cache
            # From here on the cache owns what was taken, and whatever interrupts this releases all of it together.
            undo.pop_all()
        self._announce(cache)
        return cache

    def _announce(self, cache: Cache) -> None:
        """Make the entries of a cache and its keys findable."""
        at, generation = cache.record_at, cache.record.generation
        self._directory.publish(
            cache.entry, Key(CACHE, cache.id, 0), Entry(cache.entry, cache.entry_generation, at, 0, 0, generation)
        )
        for binding in cache.bindings.values():
            entry = Entry(binding.entry, binding.generation, at, binding.slot, binding.tags, generation)
            self._directory.publish(binding.entry, binding.key, entry)

    # ------------------------------------------------------------------ release

    @while_open
    def deallocate(self, cache_id: int) -> None:
        """Drop the handle's reference. Unknown ids and a second call are harmless."""
        with self._lock:
            self._collect()
            self._drop(cache_id)

    def _drop(self, cache_id: int) -> None:
        cache = self._caches.get(cache_id)
        if cache is None or not cache.held or cache.registered:
            return
        cache.held = False
        if cache.geometry.blocks:
            for binding in list(cache.bindings.values()):
                self._unbind(binding)
        if cache.bindings:
            # It lives by its keys alone now, which readers by id must know.
            cache.entry_generation = next(self._generations)
            entry = Entry(cache.entry, cache.entry_generation, cache.record_at, 0, 1, cache.record.generation)
            self._directory.replace(cache.entry, Key(CACHE, cache.id, 0), entry)
        self._release_if_unused(cache)

    @while_open
    def remove_key(self, key: Key) -> None:
        """Remove a binding at once; an unknown key is harmless."""
        with self._lock:
            self._collect()
            binding = self._keys.get(key)
            if binding is not None and not binding.cache.registered:
                self._unbind(binding)
                self._release_if_unused(binding.cache)

    def _unbind(self, binding: Binding) -> None:
        self._directory.withdraw(binding.entry, binding.key, binding.generation)
        if binding.tags:
            self._board.give_tags(binding.tags, binding.cache.geometry.num_tensors)
            self._forget_spendable(binding)
        if self._keys.get(binding.key) is binding:
            del self._keys[binding.key]
        del binding.cache.bindings[binding.slot]

    def _forget_spendable(self, binding: Binding) -> None:
        last, last_words = self._spendable.pop(), self._spendable_words[-2:]
        del self._spendable_words[-2:]
        if last is not binding:
            last.position = binding.position
            self._spendable[last.position] = last
            self._spendable_words[2 * last.position : 2 * last.position + 2] = last_words

    def _release_if_unused(self, cache: Cache) -> None:
        if cache.held or cache.bindings:
            return
        if not cache.withdrawn:
            self._withdraw(cache)
        if cache.pinned_by:
            if cache not in self._pinned:
                self._pinned.append(cache)
        elif not cache.users and not cache.views:
            self._free(cache)

    def _withdraw(self, cache: Cache) -> None:
        """Take a cache out of the directory, and find out who is writing into it."""
        cache.withdrawn = True
        self._directory.retire_record(cache.record_at, cache.record.generation)
        self._directory.withdraw(cache.entry, Key(CACHE, cache.id, 0), cache.entry_generation)
        self._directory.free_record(cache.record_at, cache.record)
        generation = cache.record.generation
        cache.pinned_by += [(slot, generation) for slot in self._board.pinned(generation)]

    def _look_at_pins(self, cache: Cache) -> None:
        cache.pinned_by = [
            (slot, generation)
            for slot, generation in cache.pinned_by
            if self._board.pin(slot) == generation and not self.proved_gone(slot)
        ]

    def _free(self, cache: Cache) -> None:
        del self._caches[cache.id]
        for pool, at, nbytes in merged(cache.places, cache.geometry.tensor_bytes):
            pool.space.give(at, nbytes)
            self._backend.discard(pool.region, at, nbytes)
        if cache.registered:
            self._backend.unregister(cache.registered, cache.geometry.tensor_bytes)

    def _collect(self) -> None:
        """Take in what has happened since the last call: keys that peers have spent, handles and views that died."""
        if self._spendable:
            for binding in [self._spendable[i] for i in self._board.spent(self._spendable_words)]:
                self._unbind(binding)
                self._release_if_unused(binding.cache)
        self._end_late()
        while self.dropped:
            cache_id = self.dropped.popleft()
            get_logger().info("cache %d was collected without deallocate_cache: deallocating it", cache_id)
            self._drop(cache_id)
        waiting, self._pinned = self._pinned, []
        for cache in waiting:
            self._look_at_pins(cache)
            self._release_if_unused(cache)
        while self._ended_views:
            cache = self._ended_views.popleft()
            cache.views -= 1
            if cache.withdrawn:
                self._release_if_unused(cache)

    # ------------------------------------------------------------------ use

    def _held(self, cache_id: int) -> Cache:
        cache = self._caches.get(cache_id)
        if cache is None or not cache.held:
            raise self._unheld(cache_id)
        return cache

    @staticmethod
    def _unheld(cache_id: int) -> LLMException:
        return LLMException(
            f"cache {cache_id} does not exist in this engine, or was deallocated",
            status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
        )

    def begin(self, cache_id: int, use: Use) -> Cache:
        """Start to use a cache's memory; `end` must follow."""
        use.caches.append(cache_id)
        # No lock: who lets a cache go first marks it and then looks for users, so if this looks at the mark after it
        # has become a user, at least one of the two sees the other.
        cache = self._caches.get(cache_id)
        if cache is not None:
            cache.users.add(use)
            if cache.held:
                return cache
        raise self._unheld(cache_id)

    def keep(self, cache_ids: Iterable[int], use: Use) -> None:
        """Start to use the memory of those caches that exist."""
        use.caches.extend(cache_ids)
        with self._lock:
            for cache_id in use.caches:
                cache = self._caches.get(cache_id)
                if cache is not None:
                    cache.users.add(use)

    def begin_generation(self, cache_id: int, generation: int, use: Use) -> Cache | None:
        """Start to use the memory that a peer has found in the directory, or give None if it was withdrawn since."""
        use.caches.append(cache_id)
        with self._lock:
            cache = self._caches.get(cache_id)
            if cache is None or cache.withdrawn or cache.record.generation != generation:
                return None
            cache.users.add(use)
            return cache

    def end(self, use: Use) -> None:
        """Stop to use the memory of all caches that an operation has, once no bytes come to it any more."""
        if use.until is not None and not use.until():
            self._late.append(use)
            return
        for cache_id in use.caches:
            cache = self._caches.get(cache_id)
            if cache is not None:
                cache.users.discard(use)
                # As in `begin`: whoever let it go meanwhile has seen this user, or has marked it before this look.
                if not cache.held and not cache.users:
                    self._end_of_use(cache)

    def _end_late(self) -> None:
        for _ in range(len(self._late)):
            use = self._late.popleft()
            if use.until is not None and not use.until():
                self._late.append(use)
                continue
            for cache_id in use.caches:
                cache = self._caches.get(cache_id)
                if cache is not None:
                    cache.users.discard(use)
                    if not cache.users and cache.withdrawn and not cache.registered:
                        self._release_if_unused(cache)

    def _end_of_use(self, cache: Cache) -> None:
        with self._lock:
            # The end of the engine may have given the memory back already.
            still_there = not self._closed and self._caches.get(cache.id) is cache
            if still_there and not cache.users and cache.withdrawn and not cache.registered:
                self._release_if_unused(cache)

    @while_open
    def view(self, cache_id: int) -> tuple[Cache, View]:
        """Give a cache, and an object that keeps its memory while it lives."""
        with self._lock:
            self._collect()
            cache = self._held(cache_id)
            regions = {id(pool): pool.region for pool, _ in cache.places}
            view = View(cache, [self._backend.hold(r) for r in regions.values()], self._ended_views)
            cache.views += 1
            return cache, view

    @while_open
    def used(self) -> list[int]:
        """Bytes in use in each pool."""
        with self._lock:
            self._collect()
            return [pool.space.used for pool in self._pools]

    def close(self, deadline_ns: int) -> str | None:
        """Withdraw everything; give one sentence on keys that nobody pulled, or None.

        Waits, until the deadline, for peers that are still writing into memory that the user may free next.
        """
        self._closed = True
        # With a time limit: a signal handler that finalizes may have interrupted the very thread that holds the lock.
        if not self._lock.acquire(timeout=max(deadline_ns - time.monotonic_ns(), 0) / 1e9):
            return "the table of caches was in use, so nothing was withdrawn"
        try:
            self._collect()
            left = self._unpulled()
            for cache in list(self._caches.values()):
                for binding in list(cache.bindings.values()):
                    self._unbind(binding)
                cache.held = False
                try:
                    self._release_if_unused(cache)
                except BackendError as e:
                    get_logger().error("cache %d is gone, but the driver keeps its memory: %s", cache.id, e.text)
        finally:
            self._lock.release()
        while any(cache.registered for cache in self._pinned) and time.monotonic_ns() < deadline_ns:
            time.sleep(0.001)
            with self._lock:
                self._collect()
        return left

    def wait_unused(self, deadline_ns: int) -> bool:
        """Wait until no operation of this process uses the tables or any cache's memory; say whether that came."""
        while self._inside or any(cache.users for cache in list(self._caches.values())):
            if time.monotonic_ns() > deadline_ns:
                return False
            time.sleep(0.001)
            with self._lock:
                self._end_late()
        return True

    def _unpulled(self) -> str | None:
        waiting = [b for b in self._keys.values() if not b.cache.held and b.key.kind != BLOCKS]
        if not waiting:
            return None
        oldest = time.monotonic() - min(b.since for b in waiting)
        names = ", ".join(self.describe(b.key) for b in waiting[:20])
        return (
            f"{len(waiting)} keys of deallocated caches have been neither pulled nor removed "
            f"(the oldest for {oldest:.1f} s): {names}{', ...' if len(waiting) > 20 else ''}"
        )

    def _usage(self) -> str:
        return self._unpulled() or f"{len(self._caches)} caches are allocated"

    @staticmethod
    def describe(key: Key) -> str:
        """Name a key in a message."""
        if key.kind == BLOCKS:
            return f"BlocksCacheKey(model_id={key.model})"
        what = "req_id" if key.kind == REQUEST else "prefix_id"
        return f"CacheKey({what}={key.ident}, model_id={key.model})"
