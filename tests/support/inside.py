"""What tests have done inside peer processes: offers and withdrawals, forks, deaths at chosen moments."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import memory
import pairs
from addresses import bindable
from stall import clear_faults, set_faults

from llm_datadist import (
    CacheDesc,
    CacheKey,
    KvCache,
    KvCacheManager,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
)
from llm_datadist._engine.control import Channel
from llm_datadist._engine.wire import Frame, Kind
from llm_datadist.backends.simulator.faults import Faults
from llm_datadist.backends.simulator.limits import Room

LIMIT_S = 30
_caches: dict[int, KvCache] = {}


def _instance() -> LLMDataDist:
    instance = LLMDataDist.llm_engine_instance
    assert instance is not None
    return instance


def _manager() -> KvCacheManager:
    return _instance().kv_cache_manager


# ---------------------------------------------------------------------- caches whose bytes are one word


def offer(desc: CacheDesc, keys: Sequence[CacheKey], word: int, keep: bool = True) -> tuple[int, list[int]]:
    """Allocate a cache with keys and fill it with one word; give id and addresses."""
    cache = _manager().allocate_cache(desc, keys)
    addresses = list(cache.per_device_tensor_addrs[0])
    for address in addresses:
        memory.fill(address, word, desc.size)
    if keep:
        _caches[cache.cache_id] = cache
    else:
        _manager().deallocate_cache(cache)
    return cache.cache_id, addresses


def bind(desc: CacheDesc, keys: Sequence[CacheKey]) -> int | None:
    """Allocate a cache with keys and leave its bytes as they are; give the word that is in it."""
    cache = _manager().allocate_cache(desc, keys)
    _caches[cache.cache_id] = cache
    words = {memory.word(address, desc.size) for address in cache.per_device_tensor_addrs[0]}
    return words.pop() if len(words) == 1 else None


def rebind(desc: CacheDesc, key: CacheKey) -> int | None:
    """Bind a key to a new cache while its old cache lives on."""
    _manager().remove_cache_key(key)
    return bind(desc, [key])


def pull_first(key: CacheKey) -> int | None:
    """Pull into the cache that was bound first; give its word, or None when the source did not exist."""
    return pull_layers(key, [None])


def pull_layers(key: CacheKey, parts: Sequence[tuple[int, int] | None]) -> int | None:
    """Pull layers, part by part; give the one word of what was pulled, or None when the source did not exist."""
    cache = _caches[1]
    desc = cache.cache_desc
    words: set[int | None] = set()
    for part in parts:
        layers = None if part is None else range(*part)
        try:
            _manager().pull_cache(key, cache, 0, src_layer_range=layers, dst_layer_range=layers)
        except LLMException as e:
            if e.status_code != LLMStatusCode.LLM_KV_CACHE_NOT_EXIST:
                raise
            return None
        tensors = range(desc.num_tensors) if part is None else range(2 * part[0], 2 * part[1])
        words |= {memory.word(cache.per_device_tensor_addrs[0][t], desc.size) for t in tensors}
    assert len(words) == 1, words
    return words.pop()


def used() -> list[int]:
    """Give the bytes that are in use, after a look at what peers have spent."""
    return _instance()._engine.caches.used()  # type: ignore[union-attr]


def drop(cache_id: int) -> None:
    """Deallocate a cache."""
    _manager().deallocate_cache(_caches.pop(cache_id))


def drop_all() -> None:
    """Deallocate all caches that were made here."""
    while _caches:
        _manager().deallocate_cache(_caches.popitem()[1])


def withdraw(cache_id: int, keys: Sequence[CacheKey], desc: CacheDesc, foreign: int) -> list[int]:
    """Release a cache in every way there is, and give its memory to a cache with other bytes; give the addresses."""
    for key in keys:
        _manager().remove_cache_key(key)
    drop(cache_id)
    return offer(desc, [], foreign, keep=False)[1]


def churn(desc: CacheDesc, first: int, rounds: int) -> None:
    """Allocate, remove and deallocate other caches; each step makes the engine collect what peers have spent."""
    for i in range(rounds):
        key = CacheKey(1, first + i)
        cache = _manager().allocate_cache(desc, [key])
        if i % 2:
            _manager().deallocate_cache(cache)
            _manager().remove_cache_key(key)
        else:
            _manager().remove_cache_key(key)
            _manager().deallocate_cache(cache)


def is_bound(key: CacheKey, desc: CacheDesc) -> bool:
    """Say whether a key is bound: then it can't be bound to another cache."""
    try:
        cache = _manager().allocate_cache(desc, [key])
    except LLMException as e:
        if e.status_code != LLMStatusCode.LLM_FAILED:
            raise
        return True
    _manager().remove_cache_key(key)
    _manager().deallocate_cache(cache)
    return False


def spin(ns: int) -> None:
    """Pass a little time, to meet others at another point of their work."""
    end = time.monotonic_ns() + ns
    while time.monotonic_ns() < end:
        pass


def keep_finalizing(options: dict[str, str], desc: CacheDesc, key: CacheKey, rounds: int) -> None:
    """Init, offer, and finalize again and again, sooner or later in the work of those who link."""
    for word in range(1, rounds + 1):
        instance = LLMDataDist(LLMRole.PROMPT, 1)
        instance.init(options)
        offer(desc, [key], word)
        # Not to wait for anybody, but to end at another point of what others do.
        time.sleep(word % 10 / 1000)
        _caches.clear()
        instance.finalize()


# ---------------------------------------------------------------------- faults, shortage, stacks of engines


def start_stalled_pull(key: CacheKey, cache: KvCache, at_byte: int) -> None:
    """Start a pull in a thread, and return when it stands still at a byte."""
    faults = inject(_instance(), stall_at_byte=at_byte)
    threading.Thread(target=pull_inherited, args=(key, cache), daemon=True).start()
    assert faults.stall_entered.wait(LIMIT_S)


def inject(instance: LLMDataDist, **faults: Any) -> Faults:
    """Let the transfers of an engine fail in some way."""
    return set_faults(instance, **faults)


def limit_addresses(more: int) -> None:
    """Allow this process so many more bytes of addresses."""
    with open("/proc/self/statm") as statm:
        now = int(statm.read().split()[0]) * os.sysconf("SC_PAGESIZE")
    resource.setrlimit(resource.RLIMIT_AS, (now + more, resource.RLIM_INFINITY))


def pretend_room(nbytes: int) -> None:
    """Let the engine believe that its cgroup allows so many more bytes, whatever it has taken already."""
    pools = _instance()._engine.backend._pools  # type: ignore[union-attr,attr-defined]
    pools._room = lambda: Room(nbytes - sum(p.backed.total for p in pools._pools.values()) * 4096, "memory.max")


def many(role: LLMRole, first: int, count: int, desc: CacheDesc) -> list[list[str]]:
    """Start many engines in this process, which the one-instance rule of the facade does not allow."""
    options = []
    for cluster in range(first, first + count):
        listen = [bindable(f"10.1.{cluster // 250}.{cluster % 250}:26000")]
        instance = LLMDataDist(role, cluster)
        # Each takes its share of the device, which all have in common.
        instance.init(pairs.options(listen[0] if role is LLMRole.PROMPT else None, ge__flowGraphMemMaxSize="8388608"))
        cache = instance.kv_cache_manager.allocate_blocks_cache(desc)
        if role is LLMRole.PROMPT:
            instance.kv_cache_manager.deallocate_cache(cache)
            key = CacheKey(cluster, cluster)
            cache = instance.kv_cache_manager.allocate_cache(desc, [key])
            for address in cache.per_device_tensor_addrs[0]:
                memory.fill(address, cluster, desc.size)
        _crowd.append((instance, cache))
        LLMDataDist.llm_engine_instance = None
        options.append(listen)
    return options


_crowd: list[tuple[LLMDataDist, KvCache]] = []


def many_pull(info: Any, key: CacheKey, desc: CacheDesc) -> list[int | None]:
    """Let each of many decoders link and pull by offset, which keeps the key."""
    words = []
    for instance, cache in _crowd:
        result = instance.link_clusters([info], 10_000)
        assert result[0] == 0, result
        instance.kv_cache_manager.pull_cache(key, cache, 0, dst_cache_offset=0)
        words.append(memory.word(cache.per_device_tensor_addrs[0][0], desc.size))
    return words


def many_end() -> None:
    """Finalize the many."""
    while _crowd:
        _crowd.pop()[0].finalize()


def start_at_signal(fifo: str, role: LLMRole, cluster: int, options: dict[str, str]) -> None:
    """Wait until the test opens a named pipe, as all others do, then init."""
    os.close(os.open(fifo, os.O_RDONLY))
    instance = LLMDataDist(role, cluster)
    instance.init(options)
    offer(pairs.bytes_desc(2, 1, 64), [CacheKey(cluster, 1)], cluster)


# ---------------------------------------------------------------------- deaths


def die_when(kind: str, after: bool) -> None:
    """Let this process be killed when it sends a frame of a kind, just before or just after."""
    send = Channel.send

    def deadly(channel: Channel, frame: Frame, deadline_ns: int, fds: Sequence[int] = ()) -> None:
        if frame.kind is not Kind[kind]:
            send(channel, frame, deadline_ns, fds)
            return
        if after:
            send(channel, frame, deadline_ns, fds)
        os.kill(os.getpid(), signal.SIGKILL)

    Channel.send = deadly  # type: ignore[method-assign]


# ---------------------------------------------------------------------- forks


class Child:
    """A forked child that does something, tells its outcome, and ends."""

    def __init__(self, do: Callable[[], Any], end: Callable[[], None]) -> None:
        self._out, theirs = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            signal.alarm(LIMIT_S)
            try:
                outcome = {"value": do()}
            except BaseException as e:
                code = getattr(e, "status_code", None)
                outcome = {"raised": type(e).__name__, "text": str(e), "code": None if code is None else code.name}
            os.write(theirs, json.dumps(outcome).encode())
            os.close(theirs)
            end()
            os._exit(99)
        os.close(theirs)

    def outcome(self) -> dict[str, Any]:
        """Wait for the end and give what the child has told, with its exit code."""
        data = b""
        while select.select([self._out], [], [], LIMIT_S)[0]:
            part = os.read(self._out, 65536)
            data += part
            if not part:
                break
        os.close(self._out)
        _, status = os.waitpid(self.pid, 0)
        told: dict[str, Any] = json.loads(data) if data else {}
        return {**told, "exit": os.waitstatus_to_exitcode(status)}


def leave_at_once() -> None:
    """End like a child of a data loader."""
    os._exit(0)


def leave_with_hooks() -> None:
    """End like a program that comes to its last line."""
    atexit.register(os.write, 2, b"")
    ctypes.pythonapi.Py_Exit(0)


def nothing() -> None:
    """Do nothing."""


def pull_inherited(key: CacheKey, cache: KvCache) -> None:
    """Use what the parent has made."""
    _manager().pull_cache(key, cache, 0, dst_cache_offset=0)


def keep_manager(cache: KvCache) -> None:
    """Remember a manager and a cache, as programs do."""
    _kept.append((_manager(), cache))


_kept: list[tuple[KvCacheManager, KvCache]] = []


def pull_kept(key: CacheKey) -> None:
    """Use a manager that the parent has made."""
    manager, cache = _kept[-1]
    manager.pull_cache(key, cache, 0, dst_cache_offset=0)


def allocate_kept(desc: CacheDesc) -> None:
    """Allocate with a manager that the parent has made."""
    _kept[-1][0].allocate_cache(desc)


def pull_again(key: CacheKey) -> int | None:
    """Pull by offset, which keeps the key, into the cache that was bound first; give its word."""
    cache = _caches[1]
    for address in cache.per_device_tensor_addrs[0]:
        memory.fill(address, 0, cache.cache_desc.size)
    _manager().pull_cache(key, cache, 0, dst_cache_offset=0)
    words = {memory.word(address, cache.cache_desc.size) for address in cache.per_device_tensor_addrs[0]}
    return words.pop() if len(words) == 1 else None


def check_inherited(cluster_id: int) -> None:
    """Ask for a sign of life over a link that the parent has made."""
    _instance().check_link_status(cluster_id)


def unlink_inherited(info: Any) -> None:
    """Drop a link that the parent has made."""
    _instance().unlink_clusters([info])


def link_inherited(ranks: dict[int, int], table: str) -> list[str]:
    """Use the rank-table calls of what the parent has made; give the status codes."""
    codes = []
    for call in (
        lambda: _instance().link("name", ranks, table),
        lambda: _instance().query_register_mem_status(1),
        lambda: _instance().unlink(1),
    ):
        try:
            call()
        except LLMException as e:
            codes.append(e.status_code.name)
    return codes


def finalize_inherited() -> None:
    """End what the parent has made."""
    _instance().finalize()


def start_own(info: Any, key: CacheKey, desc: CacheDesc) -> int | None:
    """Make an instance of one's own, link, pull, and end it."""
    mine = LLMDataDist(LLMRole.DECODER, 77)
    mine.init(pairs.options())
    try:
        result = mine.link_clusters([info], 5000)
        assert result[0] == 0, result
        cache = mine.kv_cache_manager.allocate_cache(desc)
        mine.kv_cache_manager.pull_cache(key, cache, 0, dst_cache_offset=0)
        return memory.word(cache.per_device_tensor_addrs[0][0], desc.size)
    finally:
        mine.finalize()


def init_inherited(options: dict[str, str], info: Any, key: CacheKey, desc: CacheDesc) -> int | None:
    """Initialise what the parent has made, link, pull, and end it."""
    mine = _instance()
    mine.init(options)
    try:
        result = mine.link_clusters([info], 5000)
        assert result[0] == 0, result
        cache = mine.kv_cache_manager.allocate_cache(desc)
        mine.kv_cache_manager.pull_cache(key, cache, 0, dst_cache_offset=0)
        return memory.word(cache.per_device_tensor_addrs[0][0], desc.size)
    finally:
        mine.finalize()


def in_child(do: str, end: str, *args: Any) -> dict[str, Any]:
    """Fork, and do something in the child while this process waits."""
    return Child(lambda: globals()[do](*args), globals()[end]).outcome()


def fork_waiting() -> int:
    """Fork a child that waits until it is killed, or 60 s. It has run Python's hooks."""
    pid = os.fork()
    if pid == 0:
        _wait_for_the_end()
    return pid


def fork_without_hooks() -> int:
    """Fork like foreign code does: Python's hooks don't run, so the child holds every descriptor of its parent."""
    pid: int = ctypes.PyDLL(None).fork()
    if pid == 0:
        _wait_for_the_end()
    return pid


def _wait_for_the_end() -> None:
    try:
        signal.alarm(60)
        while True:
            signal.pause()
    finally:
        os._exit(0)


def stalled_pull_and_fork(key: CacheKey, cache: KvCache, info: Any, desc: CacheDesc) -> dict[str, Any]:
    """Fork while a thread of this process is in the middle of a pull, then let the pull go on."""
    faults = inject(_instance(), stall_at_byte=desc.size // 2)
    failures: list[BaseException] = []

    def pull() -> None:
        try:
            _manager().pull_cache(key, cache, 0, dst_cache_offset=0)
        except BaseException as e:
            failures.append(e)

    thread = threading.Thread(target=pull)
    thread.start()
    with resumed(faults):
        assert faults.stall_entered.wait(LIMIT_S)
        outcome = in_child("start_own", "leave_at_once", info, key, desc)
    thread.join(LIMIT_S)
    clear_faults(_instance())
    return {**outcome, "failures": [str(e) for e in failures]}


@contextlib.contextmanager
def resumed(faults: Faults) -> Iterator[None]:
    """Let a stalled transfer go on at the end, whatever happens."""
    try:
        yield
    finally:
        faults.resume.set()
