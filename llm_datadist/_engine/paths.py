"""Find what a key or an address of a peer stands for, and check it against a local cache.

What comes out is ready to be copied: base addresses of tensor pairs, and the words that guard them. Nothing that the
peer published is trusted further than its own memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from llm_datadist._engine.caches import Cache, Caches
from llm_datadist._engine.directory import (
    BLOCKS,
    CACHE,
    F_ACCESSIBLE,
    F_BLOCKS,
    F_HOST,
    F_POOLED,
    F_REGISTERED,
    REQUEST,
    Entry,
    Key,
    Unreadable,
)
from llm_datadist._engine.layout import Layers, pair_tensors, select, select_tensors
from llm_datadist._engine.links import Link
from llm_datadist._kernels.records import Record
from llm_datadist._kernels.runs import Bases, Plan, Runs
from llm_datadist.backend import BackendError, Failure, MemoryKind, Place
from llm_datadist.status import LLMException, LLMStatusCode, ParamInvalid

__all__ = [
    "STAGED",
    "AddressTable",
    "Found",
    "Path",
    "Rules",
    "absent",
    "check_access",
    "check_form",
    "describe",
    "find",
    "keep",
    "plan_again",
    "pull_path",
    "push_path",
    "refuse_lacking",
    "require_epoch",
]

#: The route to memory that no endpoint reaches: by staging. Bases count bytes from the cache's first tensor on.
STAGED = -1
LARGEST_OFFSET = 2**63 - 1
#: How many paths are remembered with one link, above what a serving process uses; and of which records. A path holds
#: its record, mostly of 1 to 4 KiB, but a peer may publish what it likes.
KEPT = 2048
KEPT_RECORD_BYTES = 32 << 10


@dataclass(frozen=True, slots=True)
class Rules:
    """What the manager's mode allows."""

    cache_manager: bool
    remote_accessible: bool
    device_pool: bool


class Found(NamedTuple):
    """A cache of a peer, and the slot that a key names in it."""

    key: Key
    entry: Entry
    record: Record
    slot: int
    #: The request key that a full pull spends, if any.
    spends: Entry | None

    def guard(self, link: Link) -> Any:
        """Give the words that must not change while this is copied."""
        directory, entry = link.directory, self.entry
        memory = entry.record, self.record.generation
        if self.key.kind == CACHE:
            return directory.guard((link.epoch_word, memory))
        return directory.guard((link.epoch_word, memory, (directory.entry_word(entry), entry.generation)))


class Path(NamedTuple):
    """One source and one destination, checked against each other."""

    found: Found
    #: Tensors of source and destination, paired.
    bases: Bases
    route: int
    #: Which tensors of the source take part.
    tensors: range
    #: For `Link.read` and `Link.write`.
    guard: Any


def describe(key: Key, slot: int) -> str:
    """Name a source in a message."""
    return f"cache {key.ident} slot {slot}" if key.kind == CACHE else Caches.describe(key)


def absent(key: Key, slot: int) -> LLMException:
    """Make the exception for a key that stands for nothing."""
    return LLMException(
        f"{describe(key, slot)} does not exist on the peer: never bound, pulled already, or removed",
        status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
    )


def require_epoch(link: Link) -> None:
    """Tell a peer that has gone or dropped the link from one that lacks a key."""
    offset, epoch = link.epoch_word
    if not link.usable() or link.directory.word(offset) != epoch:
        raise BackendError(Failure.PEER_GONE, "the peer has gone, or dropped the link")


def find(link: Link, key: Key, slot: int, deadline_ns: int) -> Found:
    """Look a key up on the peer. ``slot`` counts only for a cache id.

    Raises
    ------
    LLMException
        KV_CACHE_NOT_EXIST.
    BackendError
        PEER_GONE.
    """
    entry = link.directory.find(key, deadline_ns)
    record = link.directory.record(entry) if entry is not None else None
    if entry is None or record is None:
        require_epoch(link)
        raise absent(key, slot)
    spends = None
    if key.kind == CACHE:
        if not _lives(link, entry, record):
            raise absent(key, slot)
        bound = link.directory.entry_of_slot(record, slot)
        if bound is not None and bound[0] == REQUEST:
            spends = bound[1]
    elif key.kind == REQUEST:
        if link.board.is_spent(entry):
            raise absent(key, slot)
        spends = entry
    if key.kind not in (CACHE, BLOCKS):
        slot = entry.slot
        if slot >= record.slots:
            raise Unreadable(f"an entry names slot {slot} of a cache of {record.slots}")
    if record.flags & F_REGISTERED:
        spends = None
    return Found(key, entry, record, slot, spends)


def _lives(link: Link, entry: Entry, record: Record) -> bool:
    """Say whether a cache named by its id is still there: by its handle, or by a key that nobody has spent."""
    if not entry.tags:
        return True
    for slot in range(record.key_count):
        bound = link.directory.entry_of_slot(record, slot)
        if bound is not None and not (bound[0] == REQUEST and link.board.is_spent(bound[1])):
            return True
    return False


def check_access(rules: Rules, cache: Cache, record: Record, *, pull: bool, same_form: bool) -> None:
    """Check placement and remote accessibility of both sides."""
    if record.devices != len(cache.addresses):
        raise ParamInvalid(
            f"the peer's cache lies on {record.devices} devices, the local one on {len(cache.addresses)}"
        )
    if not rules.cache_manager:
        return
    if rules.remote_accessible and not (cache.accessible and record.flags & F_ACCESSIBLE):
        raise ParamInvalid(
            f"cache {cache.id if not cache.accessible else record.cache_id} is not remote accessible: "
            "register it with remote_accessible=True before linking"
        )
    local_host, remote_host = cache.geometry.kind is MemoryKind.HOST, bool(record.flags & F_HOST)
    source_host, destination_host = (remote_host, local_host) if pull else (local_host, remote_host)
    if source_host and destination_host:
        raise LLMException(
            "transfers from HOST to HOST do not exist", status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED
        )
    if source_host and not same_form:
        raise ParamInvalid("from HOST to DEVICE, cache to blocks does not exist: use two caches or two blocks caches")
    if (local_host and not rules.device_pool) or (remote_host and not record.flags & F_POOLED):
        raise ParamInvalid("the side with the HOST cache needs a device pool: set llm.MemPoolConfig there")


def pull_path(link: Link, found: Found, cache: Cache, layers: Layers, rules: Rules, *, same_form: bool = True) -> Path:
    """Pair the tensors of a source with those of a local destination."""
    record = found.record
    if found.key.kind == CACHE and found.slot >= record.slots:
        raise absent(found.key, found.slot)
    check_access(rules, cache, record, pull=True, same_form=same_form)
    source, destination = range(record.num_tensors), range(cache.geometry.num_tensors)
    if layers.source is not None or layers.destination is not None:
        source = select("src_layer_range", layers.source, layers.per_layer, record.num_tensors)
        destination = select("dst_layer_range", layers.destination, layers.per_layer, cache.geometry.num_tensors)
    pair_tensors(source, destination)
    paired = _pair_in_one_region(link, record, source, cache, destination)
    if paired is None:
        remote, route = remote_bases(link, record, source)
        paired = Bases(remote, [addresses[i] for addresses in cache.addresses for i in destination]), route
    return Path(found, *paired, source, found.guard(link))


def plan_again(path: Path, runs: Callable[[Found], Runs]) -> Plan | None:
    """Plan over a path that was kept; None when arguments don't fit it, as what is there now may be another cache."""
    try:
        return Plan(path.bases, runs(path.found))
    except ParamInvalid:
        return None


def push_path(
    link: Link, found: Found, slot: int, cache: Cache, source: range, first_destination: int, per_layer: int
) -> Path:
    """Pair tensors of a local source with those of a slot of a target, as far as it has whole layers of them."""
    record = found.record
    room = max(0, record.num_tensors - first_destination)
    present = source[: room // per_layer * per_layer]
    if not present:
        refuse_lacking(record, first_destination, per_layer)
    remote, route = remote_bases(link, record, range(first_destination, first_destination + len(present)))
    local = [addresses[i] for addresses in cache.addresses for i in present]
    bases = Bases(local, [base + slot * record.stride for base in remote])
    return Path(found, bases, route, present, found.guard(link))


def refuse_lacking(record: Record, tensor: int, per_layer: int) -> None:
    """Refuse the layer that begins with a tensor which the target lacks."""
    select_tensors("destination", range(tensor, tensor + per_layer), record.num_tensors)


def _pair_in_one_region(
    link: Link, record: Record, source: range, cache: Cache, destination: range
) -> tuple[Bases, int] | None:
    """Pair tensors by one look at the peer's memory, or give None when each must be looked for by itself."""
    span = record.span()
    if span is None or not source:
        return None
    try:
        place = link.endpoint.locate(*span)
    except BackendError as e:
        if e.kind not in (Failure.INVALID, Failure.UNSUPPORTED):
            raise
        return None
    n = cache.geometry.num_tensors
    return record.bases(source.start, span[1], place.base, cache.flat, destination.start, n, len(source)), place.route


def keep(link: Link, token: object, path: Path) -> None:
    """Remember with a link what was found out about its peer, unless that is too much."""
    if len(path.found.record.body) <= KEPT_RECORD_BYTES:
        if len(link.kept) >= KEPT:
            link.kept.clear()
        link.kept[token] = path
    else:
        link.kept.pop(token, None)


def remote_bases(link: Link, record: Record, tensors: Sequence[int]) -> tuple[list[int], int]:
    """Give plan bases of tensors of a peer's cache, device after device, and the route to them."""
    bases: list[int] = []
    routes: set[int] = set()
    try:
        for device in range(record.devices):
            for i in tensors:
                place = _place(link, record, device * record.num_tensors + i, 0, record.tensor_bytes)
                bases.append(place.base)
                routes.add(place.route)
    except BackendError as e:
        if e.kind is not Failure.INVALID:
            raise
        raise Unreadable(f"a record of the peer's directory is wrong: {e.text}") from e
    if len(routes) != 1:
        raise Unreadable("the tensors of one cache of the peer are reached in different ways")
    return bases, routes.pop()


def _place(link: Link, record: Record, position: int, offset: int, nbytes: int) -> Place:
    """Say where a range of a peer's tensor is, and which way leads there."""
    region, start = record.tensor(position)
    try:
        return link.endpoint.locate(region, start + offset, nbytes)
    except BackendError as e:
        if e.kind is not Failure.UNSUPPORTED:
            raise
        link.why_staged = e.text
        if position * record.tensor_bytes + offset + nbytes > LARGEST_OFFSET:
            raise Unreadable(f"a peer's cache of {record.tensor_bytes} bytes a tensor is larger than any memory") from e
        return Place(position * record.tensor_bytes + offset, STAGED)


def check_form(found: Found, *, blocks: bool) -> None:
    """Check that a source or target of CacheManager mode is (not) a blocks cache."""
    if bool(found.record.flags & F_BLOCKS) is not blocks:
        raise ParamInvalid(
            f"{describe(found.key, found.slot)} of the peer is {'not ' if blocks else ''}a blocks cache, "
            f"which this call {'needs' if blocks else 'does not take'}"
        )


class AddressTable:
    """A snapshot of where a peer's tensors lie in its own address space."""

    def __init__(self, link: Link, deadline_ns: int) -> None:
        self.version = link.directory.table_version()
        ranges: list[tuple[int, int, Entry, Record]] = []
        for entry in link.directory.caches(deadline_ns):
            record = link.directory.record(entry)
            if record is None:
                continue
            for position, (region, offset) in enumerate(record.tensors):
                try:
                    start = link.endpoint.address_of(region, offset)
                except BackendError as e:
                    if e.kind not in (Failure.INVALID, Failure.UNSUPPORTED):
                        raise
                    continue  # an address that nobody can ask for, or that does not lead there
                ranges.append((start, position, entry, record))
        ranges.sort(key=lambda item: item[0])
        self._ranges = ranges
        self._starts = [item[0] for item in ranges]
        #: The furthest end among a range and all before it: registered caches may overlap.
        self._reach = list(accumulate((start + record.tensor_bytes for start, _, _, record in ranges), max))

    @staticmethod
    def look_up(link: Link, address: int, nbytes: int, deadline_ns: int) -> tuple[Found, Place, int]:
        """Give the cache whose tensor holds a range of a peer's addresses, its place, the bytes to the tensor's end.

        Raises
        ------
        LLMException
            LLM_PARAM_INVALID when no tensor holds it.
        """
        kept: AddressTable | None = link.kept.get(AddressTable)
        if kept is not None and kept.version == link.directory.table_version():
            found = kept._locate(link, address, nbytes)
            if found is not None:
                return found
        # Perhaps a cache came while the table was read, so it is read once more before anything is refused.
        table = link.kept[AddressTable] = AddressTable(link, deadline_ns)
        found = table._locate(link, address, nbytes)
        if found is not None:
            return found
        require_epoch(link)
        raise ParamInvalid(
            f"{nbytes} bytes at address {address:#x} do not lie inside one tensor of cluster {link.cluster_id}"
        )

    def _locate(self, link: Link, address: int, nbytes: int) -> tuple[Found, Place, int] | None:
        at = bisect_right(self._starts, address) - 1
        while at >= 0 and self._reach[at] >= address + nbytes:
            start, position, entry, record = self._ranges[at]
            room = start + record.tensor_bytes - address
            if nbytes <= room:
                place = _place(link, record, position, address - start, nbytes)
                return Found(Key(CACHE, record.cache_id, 0), entry, record, 0, None), place, room
            at -= 1
        return None
