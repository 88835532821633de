"""Scenes of HCCL: registered memory, communicators, transfers, in one process that has both ends of the pair."""

from __future__ import annotations

import copy
import ctypes
import json
import mmap
from collections.abc import Callable
from ctypes import addressof, byref, c_uint32, c_void_p, create_string_buffer
from typing import Any

from driver import (
    DEVICE,
    HOST,
    MIB,
    CommMem,
    Driver,
    MemDescs,
    OneSideOpDesc,
    PrepareConfig,
    config,
    pod_table,
    rank_table,
    text,
)
from scenes import allowed, equal, in_thread, mistake, together

LAZY = {"FAKE_ASCEND_LAZY": "1"}
QUICK = {"FAKE_ASCEND_SECOND": "50"}
A3 = {"FAKE_ASCEND_SOC": "Ascend910_9391"}
SIZE = 4 * MIB
HCCS = rank_table(("a", 0), ("a", 1))
RDMA = rank_table(("a", 0), ("b", 1))


class Side:
    """One end: a device with a stream, a communicator, and memory that is registered and bound."""

    def __init__(self, d: Driver, rank: int, table: dict[str, Any], name: str = "pair") -> None:
        self.d, self.rank = d, rank
        d.do("aclrtSetDevice", rank)
        self.context = d.out("aclrtGetCurrentContext")
        self.stream = d.stream()
        self.memory = d.aligned(SIZE)
        self.handle = d.register(self.memory, SIZE)
        self.comm = d.comm(text(table), rank, name)
        self.bound: list[int] = []
        self.bind(self.handle)
        d.write(self.memory, bytes([65 + rank]) * 64)

    def current(self) -> None:
        """Make this side's device current."""
        self.d.do("aclrtSetCurrentContext", self.context)

    def bind(self, handle: int) -> None:
        """Bind more memory."""
        self.d.do("HcclCommBindMem", self.comm, handle)
        self.bound.append(handle)

    def prepare(self, timeout: int = 20) -> int:
        """Prepare, on any thread."""
        self.current()
        return self.d.prepare(self.comm, timeout)

    def get(self, *ranges: tuple[int, int, int], comm: int | None = None) -> int:
        """Queue a get from the other side."""
        self.current()
        return self.d.transfer("HcclBatchGet", comm or self.comm, 1 - self.rank, ranges, self.stream)

    def put(self, *ranges: tuple[int, int, int]) -> int:
        """Queue a put to the other side."""
        self.current()
        return self.d.transfer("HcclBatchPut", self.comm, 1 - self.rank, ranges, self.stream)

    def sync(self, timeout_ms: int = 20000) -> int:
        """Wait for the stream."""
        return self.d.sync(self.stream, timeout_ms)

    def unbind(self) -> None:
        """Unbind everything."""
        self.current()
        for handle in self.bound:
            self.d.do("HcclCommUnbindMem", self.comm, handle)
        self.bound.clear()

    def destroy(self) -> int:
        """Unbind everything and destroy the comm."""
        self.unbind()
        return self.d.HcclCommDestroy(self.comm)


def sides(d: Driver, table: dict[str, Any] = HCCS) -> tuple[Side, Side]:
    """Make both ends, not prepared."""
    return Side(d, 0, table), Side(d, 1, table)


def prepare(*both: Side) -> list[int]:
    """Prepare both ends at the same time and give the codes."""
    return together(*((side.prepare, ()) for side in both))


def pair(d: Driver, table: dict[str, Any] = HCCS) -> tuple[Side, Side]:
    """Make both ends, prepared; the first one is current."""
    both = sides(d, table)
    equal(prepare(*both), [0, 0])
    both[0].current()
    return both


def check_transfers(d: Driver, left: Side, right: Side) -> None:
    """Get and put and look at the bytes on both sides."""
    equal(left.get((left.memory, right.memory, 8), (left.memory + 100, right.memory + 4, 2)), 0)
    equal(left.sync(), 0)
    equal((d.read(left.memory, 10), d.read(left.memory + 100, 3)), (b"BBBBBBBBAA", b"BB\xa5"))
    data = bytes(range(256)) * 4096
    d.write(left.memory + MIB, data)
    equal(left.put((left.memory + MIB, right.memory + 2 * MIB, MIB)), 0)
    equal(left.sync(), 0)
    equal(d.read(right.memory + 2 * MIB, MIB), data)


@allowed()
def transfers_over_hccs_on_a2(d: Driver) -> None:
    check_transfers(d, *pair(d, HCCS))


@allowed()
def transfers_over_rdma_on_a2(d: Driver) -> None:
    check_transfers(d, *pair(d, RDMA))


@allowed(HCCL_INTRA_ROCE_ENABLE="1")
def transfers_over_rdma_by_request(d: Driver) -> None:
    check_transfers(d, *pair(d, HCCS))


@allowed(**A3)
def transfers_within_a_super_pod(d: Driver) -> None:
    table = pod_table(("a", 0), ("b", 1))
    for server in table["server_list"]:
        del server["device"][0]["device_ip"]
    check_transfers(d, *pair(d, table))


@allowed(**A3)
def transfers_between_super_pods(d: Driver) -> None:
    check_transfers(d, *pair(d, pod_table(("a", 0), ("b", 1), pods=(7, 8))))


@allowed()
def host_memory_over_rdma(d: Driver) -> None:
    left, right = sides(d, RDMA)
    host = d.out("aclrtMallocHost", 4096)
    ctypes.memmove(host, b"host", 4)
    right.bind(d.register(host, 4096, HOST))
    equal(prepare(left, right), [0, 0])
    equal((left.get((left.memory, host, 4)), left.sync(), d.read(left.memory, 4)), (0, 0, b"host"))
    equal((left.put((left.memory + 8, host + 8, 2)), left.sync(), ctypes.string_at(host + 8, 3)), (0, 0, b"AA\xa5"))


@allowed()
def tear_down_in_order(d: Driver) -> None:
    for side in pair(d, RDMA):
        equal(side.destroy(), 0)
        d.do("HcclDeregisterGlobalMem", side.handle)
        d.do("aclrtDestroyStream", side.stream)


@allowed(**LAZY)
def data_read_before_sync_is_old(d: Driver) -> None:
    left, right = pair(d)
    equal(left.get((left.memory, right.memory, 8)), 0)
    # As many steps as it takes, several times over.
    for _ in range(20):
        equal((right.get((right.memory + MIB, left.memory + MIB, 8)), right.sync()), (0, 0))
    equal(d.read(left.memory, 8), b"A" * 8)
    equal((left.sync(), d.read(left.memory, 8)), (0, b"B" * 8))


@allowed()
def three_ranks(d: Driver) -> None:
    table = rank_table(("a", 0), ("a", 1), ("a", 2))
    three = [Side(d, rank, table) for rank in range(3)]
    equal(prepare(*three), [0] * 3)
    for side in three:
        side.current()
        for other in three:
            if other is not side:
                ranges = [(side.memory + MIB, other.memory, 8)]
                equal(d.transfer("HcclBatchGet", side.comm, other.rank, ranges, side.stream), 0)
                equal((side.sync(), d.read(side.memory + MIB, 8)), (0, bytes([65 + other.rank]) * 8))
    for side in three:
        equal(side.destroy(), 0)


@mistake("H1")
def no_current_device(d: Driver) -> None:
    comm = d.comm(text(HCCS), 0)

    def calls() -> list[int]:
        made = d.HcclCommInitClusterInfoMemConfig(None, 0, None, None)
        return [made, d.HcclCommDestroy(comm), d.prepare(comm), d.HcclCommDestroy(None)]

    equal(in_thread(calls), [15] * 4)


# Configuration.


def make(d: Driver, table: str | None = None, rank: int = 0, **fields: Any) -> int:
    """Give the code of an init."""
    name = fields.pop("name", "pair")
    given = config(name, **fields)
    return d.HcclCommInitClusterInfoMemConfig((table or text(HCCS)).encode(), rank, byref(given), byref(c_void_p()))


@mistake("H2")
def bad_configuration(d: Driver) -> None:
    bad: list[dict[str, Any]] = [
        {"magic": 1},
        {"name": ""},
        {"hcclBufferSize": 0},
        {"hcclDeterministic": 3},
        {"hcclRdmaTrafficClass": 6},
        {"hcclRdmaTrafficClass": 256},
        {"hcclRdmaServiceLevel": 8},
    ]
    equal([make(d, **fields) for fields in bad], [1] * len(bad))
    equal(len(d.violations()), len(bad))
    equal(d.HcclCommInitClusterInfoMemConfig(None, 0, None, None), 2)


@mistake("H2b")
def bad_size_of_the_configuration(d: Driver) -> None:
    bad: list[dict[str, Any]] = [{"size": 299}, {"size": 0}, {"size": 2 << 20}, {"version": 1}, {"version": 8}]
    equal([make(d, **fields) for fields in bad], [1] * len(bad))
    given = config("x" * 128, hcclUdi=b"y")
    equal(d.HcclCommInitClusterInfoMemConfig(text(HCCS).encode(), 0, byref(given), byref(c_void_p())), 1)


@allowed()
def configuration_is_read_to_its_size_only(d: Driver) -> None:
    pages = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    start = addressof(ctypes.c_char.from_buffer(pages))
    equal(ctypes.CDLL(None).mprotect(c_void_p(start + mmap.PAGESIZE), mmap.PAGESIZE, 0), 0)
    at = start + mmap.PAGESIZE - 304  # as aligned as it has to be
    ctypes.memmove(at, byref(config(size=304)), 300)
    given = type(config()).from_address(at)
    d.do("HcclCommInitClusterInfoMemConfig", text(HCCS).encode(), 0, byref(given), byref(c_void_p()))


# Rank tables.


def change(*path: Any, to: Any = None) -> Callable[[dict[str, Any]], None]:
    """Set a place in a table, or delete it."""

    def apply(table: Any) -> None:
        for key in path[:-1]:
            table = table[key]
        if to is None:
            del table[path[-1]]
        else:
            table[path[-1]] = to

    return apply


FIRST, SECOND = ("server_list", 0), ("server_list", 1)
DEVICE_0, DEVICE_1 = (*FIRST, "device", 0), (*SECOND, "device", 0)
BAD_TABLES: list[tuple[Callable[[dict[str, Any]], None], int]] = [
    (change("status"), 6),
    (change("server_list"), 6),
    (change(*FIRST, "server_id"), 6),
    (change(*FIRST, "device"), 6),
    (change(*DEVICE_0, "device_id"), 6),
    (change(*DEVICE_1, "rank_id"), 6),
    (change("status", to=1), 1),
    (change("server_count", to=2), 1),
    (change("server_count", to="3"), 1),
    (change("version"), 5),
    (change("version", to="9.9"), 5),
    (change(*FIRST, "server_id", to="x" * 65), 1),
    (change(*FIRST, "server_id", to=""), 1),
    (change(*FIRST, "server_id", to="b"), 1),
    (change(*DEVICE_0, "device_id", to=0), 1),
    (change(*DEVICE_0, "device_id", to="16"), 1),
    (change(*DEVICE_0, "device_id", to="x"), 1),
    (change(*DEVICE_0, "device_id", to="3"), 7),
    (change(*DEVICE_0, "device_ip", to="198.51.100.21"), 1),
    (change(*DEVICE_0, "device_ip", to="nowhere"), 1),
    (change(*DEVICE_0, "device_ip", to="2001:db8::1"), 1),
    (change(*DEVICE_0, "device_ip"), 1),
    (change(*DEVICE_0, "device_port", to="0"), 1),
    (change(*DEVICE_0, "device_port", to="65536"), 1),
    (change(*DEVICE_0, "rank_id", to="2"), 7),
    (change(*DEVICE_1, "rank_id", to="2"), 1),
    (change(*FIRST, "device", to=[]), 1),
]


@mistake("H4")
def bad_rank_table(d: Driver) -> None:
    for index, (apply, code) in enumerate(BAD_TABLES):
        table = copy.deepcopy(RDMA)
        apply(table)
        equal((index, make(d, text(table))), (index, code))
    equal(make(d, text(RDMA), rank=2), 1)
    equal(len(d.violations()), len(BAD_TABLES) + 1)


@mistake("H4", **A3)
def bad_rank_table_of_pods(d: Driver) -> None:
    bad = [
        change("super_pod_list"),
        change(*DEVICE_0, "super_device_id"),
        change("super_pod_list", 0, "server_list", to=[{"server_id": "a"}]),
        change("super_pod_list", 0, "server_list", 0, "server_id", to="c"),
        change("super_pod_list", 0, "super_pod_id", to=7),
    ]
    for index, apply in enumerate(bad):
        table = pod_table(("a", 0), ("b", 1))
        apply(table)
        equal((index, make(d, text(table))), (index, 1))


@mistake("H4", **A3)
def no_device_ip_where_rdma_needs_it(d: Driver) -> None:
    table = pod_table(("a", 0), ("b", 1), pods=(7, 8))
    change(*DEVICE_0, "device_ip")(table)
    equal(prepare(*sides(d, table)), [6, 6])


@allowed()
def good_rank_tables(d: Driver) -> None:
    table = copy.deepcopy(RDMA)
    change("server_count")(table)
    change("status", to="whatever")(table)
    change(*DEVICE_0, "device_port", to="16666")(table)
    equal(make(d, json.dumps(table, indent=2)), 0)


@mistake("H5")
def rank_table_that_is_not_json(d: Driver) -> None:
    bad = ["", "rank_table.json", "{", text(HCCS)[:-1], text(HCCS) + "x", "[" * 100, '{"status" "x"}', "[]", '"x"']
    equal([make(d, each or " ") for each in bad], [1] * len(bad))


@mistake("H6")
def name_used_twice(d: Driver) -> None:
    comm = d.comm(text(HCCS), 0)
    equal(make(d), 1)
    d.do("HcclCommDestroy", comm)
    equal(make(d), 0)


@mistake("H7")
def two_threads_make_comms(d: Driver) -> None:
    context = d.out("aclrtGetCurrentContext")

    def several(thread: int) -> None:
        d.do("aclrtSetCurrentContext", context)
        for attempt in range(2000):
            make(d, name=f"{thread}-{attempt}")
            if d.violations():
                return

    together((several, (0,)), (several, (1,)))


@allowed(FAKE_ASCEND_FAULTS="HcclCommInitClusterInfoMemConfig:1:7")
def init_that_must_be_tried_again(d: Driver) -> None:
    equal([make(d), make(d)], [7, 0])


# Registered memory.


@mistake("H8")
def bad_registration(d: Driver) -> None:
    memory, out = d.out("aclrtMalloc", 4096, 0), c_void_p()

    def register(address: int | None, size: int, kind: int = DEVICE) -> int:
        return d.HcclRegisterGlobalMem(byref(CommMem(kind, address, size)), byref(out))

    equal([d.HcclRegisterGlobalMem(None, byref(out)), d.HcclRegisterGlobalMem(byref(CommMem()), None)], [2, 2])
    equal([register(None, 8), register(memory, 0), register(memory, 8, 2)], [1, 1, 1])
    handle = d.register(memory, 100)
    equal(register(memory + 99, 8), 1)
    equal((register(memory, 100), out.value), (0, handle))
    equal(len(d.violations()), 7)
    d.do("HcclDeregisterGlobalMem", handle)


@mistake("H9")
def registered_range_outside_one_allocation(d: Driver) -> None:
    left, right = sides(d)
    left.current()
    memory = d.aligned(SIZE)
    left.bind(d.register(memory, 2 * SIZE))
    equal(len(d.violations()), 1)
    equal(sorted(prepare(left, right)), [4, 4])


@mistake("H10")
def pageable_memory_over_rdma(d: Driver) -> None:
    left, right = sides(d, RDMA)
    buffer = create_string_buffer(b"pageable")
    right.bind(d.register(addressof(buffer), 8, HOST))
    equal(prepare(left, right), [0, 0])
    equal((left.get((left.memory, addressof(buffer), 8)), left.sync(), d.read(left.memory, 8)), (0, 0, b"pageable"))


@mistake("H10", FAKE_ASCEND_PAGEABLE="fail")
def pageable_memory_over_rdma_refused(d: Driver) -> None:
    left, right = sides(d, RDMA)
    right.bind(d.register(addressof(create_string_buffer(8)), 8, HOST))
    equal(prepare(left, right), [4, 4])


def unaligned(d: Driver) -> list[int]:
    """Prepare with a range that isn't aligned."""
    left, right = sides(d)
    left.current()
    left.bind(d.register(d.aligned(SIZE) + 64, MIB))
    return prepare(left, right)


@mistake("H11")
def unaligned_memory_over_hccs(d: Driver) -> None:
    equal(unaligned(d), [4, 4])


@mistake("H11", FAKE_ASCEND_UNALIGNED="record")
def unaligned_memory_over_hccs_accepted(d: Driver) -> None:
    equal(unaligned(d), [0, 0])


@mistake("H12")
def bad_bind(d: Driver) -> None:
    left, _ = sides(d)
    left.current()
    other = d.register(d.aligned(64), 64)
    found = [
        d.HcclCommBindMem(left.comm, left.handle),
        d.HcclCommUnbindMem(left.comm, other),
        d.HcclCommBindMem(left.comm, 77),
        d.HcclCommUnbindMem(left.comm, None),
    ]
    equal(found, [1] * 4)
    equal([d.HcclCommBindMem(None, other), d.HcclCommUnbindMem(None, other)], [2, 2])


@mistake("H13")
def bad_deregistration(d: Driver) -> None:
    left, _ = sides(d)
    left.current()
    equal(d.HcclDeregisterGlobalMem(left.handle), 1)
    d.do("HcclCommUnbindMem", left.comm, left.handle)
    d.do("HcclDeregisterGlobalMem", left.handle)
    equal([d.HcclDeregisterGlobalMem(left.handle), d.HcclDeregisterGlobalMem(None)], [1, 1])


@mistake("H14")
def memory_handled_under_another_device(d: Driver) -> None:
    left, right = sides(d)
    right.current()
    free = d.register(d.aligned(64), 64)
    left.current()
    found = [
        d.HcclCommBindMem(left.comm, free),
        d.HcclCommUnbindMem(right.comm, right.handle),
        d.HcclDeregisterGlobalMem(free),
        in_thread(d.HcclDeregisterGlobalMem, free),
    ]
    equal(found, [1] * 4)


@mistake("H14b", "H14")
def registration_without_device(d: Driver) -> None:
    left, _ = sides(d)
    left.current()
    handle = in_thread(d.register, d.aligned(64), 64)
    equal([d.HcclCommBindMem(left.comm, handle), d.HcclDeregisterGlobalMem(handle)], [1, 1])


@mistake("H15", "H24")
def bound_after_prepare(d: Driver) -> None:
    left, right = pair(d)
    right.current()
    late = d.aligned(64)
    right.bind(d.register(late, 64))
    equal(left.get((left.memory, late, 8)), 4)


# Prepare and exchange.


@mistake("H16", **QUICK)
def prepare_alone(d: Driver) -> None:
    left, right = sides(d)
    equal((left.prepare(1), right.prepare(1)), (9, 9))
    equal(d.violations(), [])
    equal([d.prepare(left.comm, -2), d.HcclCommPrepare(left.comm, None, 1)], [1, 2])
    equal(d.HcclCommPrepare(left.comm, byref(PrepareConfig(1)), 1), 1)


@mistake("H17", **QUICK)
def different_rank_tables(d: Driver) -> None:
    left = Side(d, 0, HCCS)
    right = Side(d, 1, HCCS | {"status": "other"})
    equal(together((left.prepare, (40,)), (right.prepare, (40,))), [9, 9])
    equal(len(d.violations()), 2)


@allowed(**QUICK)
def prepare_again(d: Driver) -> None:
    left, right = sides(d)
    equal(left.prepare(1), 9)
    equal(together((left.prepare, (400,)), (right.prepare, (400,))), [0, 0])
    equal(left.prepare(1), 0)
    check_transfers(d, left, right)


@allowed(FAKE_ASCEND_SECOND="300")
def python_goes_on_during_a_prepare(d: Driver) -> None:
    left, _ = sides(d)
    done: list[int] = []
    counted = 0

    def count() -> None:
        nonlocal counted
        while not done:
            counted += 1

    together((count, ()), (lambda: done.append(left.prepare(1)), ()))
    equal(done, [9])
    assert counted > 1000, counted


def exchange(side: Side, words: list[int], room: int, timeout: int = 20) -> tuple[int, list[bytes]]:
    """Exchange descriptors whose second words are given; the code and the payloads received."""
    side.current()
    sent = b"".join(
        side.rank.to_bytes(4, "little") + word.to_bytes(4, "little") + bytes([side.rank + 1]) * 504 for word in words
    )
    mine, theirs, actual = create_string_buffer(sent), create_string_buffer(512 * room), c_uint32()
    local, remote = MemDescs(addressof(mine), len(words)), MemDescs(addressof(theirs), room)
    code = side.d.HcclExchangeMemDesc(side.comm, 1 - side.rank, byref(local), timeout, byref(remote), byref(actual))
    return code, [theirs.raw[512 * i + 8 : 512 * i + 9] for i in range(actual.value if not code else 0)]


@allowed()
def exchange_of_descriptors(d: Driver) -> None:
    left, right = sides(d)
    for _ in range(2):
        found = together((exchange, (left, [1, 0xFFFFFFFF], 4)), (exchange, (right, [0], 4)))
        equal(found, [(0, [b"\x02"]), (0, [b"\x01"] * 2)])
        equal(prepare(left, right), [0, 0])
    check_transfers(d, left, right)


@mistake("H21")
def exchange_for_another_rank(d: Driver) -> None:
    left, right = pair(d)
    found = together((exchange, (left, [5], 4)), (exchange, (right, [0], 4)))
    equal(found, [(0, [b"\x02"]), (4, [])])


@mistake("H21")
def exchange_with_too_little_room(d: Driver) -> None:
    left, right = pair(d)
    found = together((exchange, (left, [1, 1], 4)), (exchange, (right, [0], 1)))
    equal(found, [(0, [b"\x02"]), (4, [])])


# Transfers.


@mistake("H22")
def bad_arguments_of_a_transfer(d: Driver) -> None:
    left, right = pair(d)
    one = (left.memory, right.memory, 8)
    descs = (OneSideOpDesc * 1)(OneSideOpDesc(*one, 7))
    found = [
        d.HcclBatchGet(None, 1, descs, 1, left.stream),
        d.HcclBatchPut(left.comm, 1, None, 1, left.stream),
        d.HcclBatchGet(left.comm, 1, descs, 1, None),
    ]
    equal(found, [2] * 3)
    equal([left.get(*[one] * 257), left.get()], [1, 1])
    equal([d.HcclBatchGet(left.comm, rank, descs, 1, left.stream) for rank in (0, 2)], [1, 1])
    equal((left.get(*[one] * 256), left.sync()), (0, 0))


@mistake("H23", "H35")
def transfer_by_a_comm_that_is_not_ready(d: Driver) -> None:
    left, right = sides(d)
    one = (left.memory, right.memory, 8)
    equal(left.get(one), 6)
    equal(prepare(left, right), [0, 0])
    equal(left.destroy(), 0)
    equal(left.get(one), 1)


@mistake("H24")
def ranges_outside_the_regions(d: Driver) -> None:
    left, right = pair(d)
    found = [
        left.get((left.memory, right.memory + SIZE - 7, 8)),
        left.get((left.memory, left.memory, 8)),
        left.get((left.memory - 64, right.memory, 8)),
    ]
    equal(found[1:2], [4])
    d.fake_reset()
    equal(left.get((left.memory, right.memory + SIZE, 8)), 4)
    equal(left.get((left.memory + SIZE, right.memory, 8)), 4)
    equal(len(d.violations()), 2)


@mistake("H24", **A3)
def remote_range_outside_the_regions_on_a3(d: Driver) -> None:
    left, right = pair(d, pod_table(("a", 0), ("b", 1)))
    equal(left.get((left.memory, right.memory + SIZE, 8)), 1)
    equal(left.get((left.memory + SIZE, right.memory, 8)), 4)


@mistake("H25")
def range_over_two_regions(d: Driver) -> None:
    left, right = sides(d)
    two: list[int] = []
    for side in (left, right):
        side.current()
        memory = d.aligned(SIZE)
        for half in (memory, memory + 2 * MIB):
            side.bind(d.register(half, 2 * MIB))
        two.append(memory)
    equal(prepare(left, right), [0, 0])
    equal(left.get((left.memory, two[1] + 2 * MIB - 4, 8)), 4)
    equal(left.get((two[0] + 2 * MIB - 4, right.memory, 8)), 4)
    equal((left.get((two[0], two[1] + 2 * MIB, 2 * MIB)), left.sync()), (0, 0))


@mistake("H26")
def local_memory_that_is_not_bound(d: Driver) -> None:
    left, right = pair(d, RDMA)
    memory = d.aligned(64)
    d.register(memory, 64)
    equal(left.get((memory, right.memory, 8)), 4)


@mistake("H27")
def remote_host_memory_over_hccs(d: Driver) -> None:
    left, right = sides(d)
    host = d.out("aclrtMallocHost", 4096)
    right.bind(d.register(host, 4096, HOST))
    equal(prepare(left, right), [0, 0])
    equal(left.get((left.memory, host, 8)), 4)


@mistake("H28")
def bad_lengths(d: Driver) -> None:
    left, right = pair(d)

    def get(local: int | None, remote: int | None, count: int, kind: int) -> int:
        descs = (OneSideOpDesc * 1)(OneSideOpDesc(local, remote, count, kind))
        return d.HcclBatchGet(left.comm, 1, descs, 1, left.stream)

    mine, theirs = left.memory, right.memory
    equal([get(mine, theirs, 0, 7), get(mine, theirs, 2**62, 4), get(mine, theirs, 1, 255)], [1] * 3)
    equal([get(None, theirs, 1, 7), get(mine, None, 1, 7)], [1] * 2)
    equal((get(mine, theirs, 2, 5), left.sync(), d.read(mine, 17)), (0, 0, b"B" * 16 + b"A"))


@mistake("H29")
def stream_of_another_device(d: Driver) -> None:
    left, right = pair(d)
    one = [(left.memory, right.memory, 8)]
    equal(d.transfer("HcclBatchGet", left.comm, 1, one, right.stream), 15)
    d.do("aclrtDestroyStream", left.stream)
    equal(left.get(*one), 15)


@mistake("H30", **LAZY)
def two_streams_on_one_comm(d: Driver) -> None:
    left, right = pair(d)
    other, one = d.stream(), [(left.memory, right.memory, 8)]
    equal([left.get(*one), d.transfer("HcclBatchGet", left.comm, 1, one, other)], [0, 0])
    equal([d.sync(other), left.sync()], [0, 0])


@mistake("H30")
def two_threads_on_one_comm(d: Driver) -> None:
    left, right = pair(d)

    def several() -> None:
        for _ in range(2000):
            left.get((left.memory, right.memory, 8))
            if d.violations():
                return

    together((several, ()), (several, ()))
    equal(left.sync(), 0)


@mistake("H24", **LAZY)
def bad_descriptor_in_the_middle(d: Driver) -> None:
    left, right = pair(d)
    equal(left.get((left.memory, right.memory, 4), (left.memory + 4, 64, 4), (left.memory + 8, right.memory, 4)), 4)
    equal((left.sync(), d.read(left.memory, 12)), (0, b"BBBBAAAAAAAA"))


def lose_the_peer(d: Driver, how: Callable[[Side], object]) -> Side:
    """Prepare, let something happen to the second side, and queue a get on the first."""
    left, right = pair(d)
    right.current()
    how(right)
    equal(left.get((left.memory, right.memory, 8)), 0)
    return left


def deregister(side: Side) -> None:
    side.unbind()
    side.d.do("HcclDeregisterGlobalMem", side.handle)


@allowed()
def peer_destroyed_its_comm(d: Driver) -> None:
    equal(lose_the_peer(d, Side.destroy).sync(), 507057)


@allowed(FAKE_ASCEND_DEAD_PEER="507056")
def peer_deregistered_its_memory(d: Driver) -> None:
    equal(lose_the_peer(d, deregister).sync(), 507056)


@allowed(FAKE_ASCEND_DEAD_PEER="hang")
def peer_lost_without_a_word(d: Driver) -> None:
    left = lose_the_peer(d, Side.destroy)
    equal(left.sync(20), 507046)
    d.do("aclrtStreamAbort", left.stream)
    equal(left.destroy(), 0)


@allowed()
def abort_in_mid_transfer(d: Driver) -> None:
    d.fake_inject(b"HcclBatchGet:1:hang")
    left, right = pair(d)
    equal((left.get((left.memory, right.memory, 8)), left.sync(10)), (0, 507046))
    d.do("aclrtStreamAbort", left.stream)
    equal((left.destroy(), d.read(left.memory, 8)), (0, b"A" * 8))


@mistake("H33")
def destroy_with_bound_memory(d: Driver) -> None:
    left, right = pair(d)
    equal(d.HcclCommDestroy(left.comm), 1)
    equal(left.destroy(), 0)
    equal((right.get((right.memory, left.memory, 8)), right.sync()), (0, 507057))


@mistake("H34", **LAZY)
def destroy_with_work_queued(d: Driver) -> None:
    left, right = pair(d)
    equal(left.get((left.memory, right.memory, 8)), 0)
    left.unbind()
    equal([d.HcclCommDestroy(left.comm) for _ in range(3)], [20, 20, 0])
    equal(left.sync(), 507057)


@allowed(FAKE_ASCEND_FAULTS="HcclCommDestroy:1:20")
def destroy_that_must_be_tried_again(d: Driver) -> None:
    left, _ = pair(d)
    equal([left.destroy(), left.destroy()], [20, 0])


@mistake("A31")
def reset_with_a_live_comm(d: Driver) -> None:
    left, _ = sides(d)
    left.current()
    d.do("aclrtResetDevice", 0)
    d.do("aclrtResetDevice", 0)
    assert any("1 comms are live" in line for line in d.violations()), d.violations()


@mistake("H35")
def comm_used_after_destroy(d: Driver) -> None:
    left, _ = pair(d)
    equal(left.destroy(), 0)
    equal([d.HcclCommDestroy(left.comm), d.prepare(left.comm), d.HcclCommBindMem(left.comm, left.handle)], [1, 1, 1])
    equal(d.HcclCommDestroy(77), 1)


def remap(d: Driver, comms: list[int], ranges: list[CommMem]) -> int:
    """Give the code of a remap."""
    return d.HcclRemapRegistedMemory(
        (c_void_p * len(comms))(*comms), (CommMem * len(ranges))(*ranges), len(comms), len(ranges)
    )


@mistake("H36")
def bad_remap(d: Driver) -> None:
    left, _ = pair(d, RDMA)
    good = CommMem(DEVICE, left.memory, SIZE)
    equal(d.HcclRemapRegistedMemory(None, byref(good), 1, 1), 2)
    equal([remap(d, [], [good]), remap(d, [left.comm], [])], [1, 1])
    equal(remap(d, [left.comm], [good, CommMem(DEVICE, left.memory, 8)]), 1)
    equal(remap(d, [left.comm], [good, good, CommMem(HOST, 64, 8), CommMem(DEVICE, None, 0)]), 0)


@allowed()
def remap_over_hccs_does_nothing(d: Driver) -> None:
    left, _ = pair(d)
    equal(remap(d, [left.comm], [CommMem(DEVICE, 64, 8)]), 0)


@mistake("H38", FAKE_ASCEND_SOC="Ascend950")
def no_global_registration_on_a5(d: Driver) -> None:
    comm = d.comm(text(HCCS), 0)
    equal(d.HcclRegisterGlobalMem(byref(CommMem(DEVICE, d.aligned(64), 64)), byref(c_void_p())), 5)
    equal(d.prepare(comm), 5)
