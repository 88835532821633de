"""Engines of CacheManager mode, in this process or in a peer, that check what a link carries.

Every member has a blocks cache full of its own pattern, under the key of its cluster id, and an empty one to pull into.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import warnings
from collections.abc import Sequence
from typing import Any

import disturbed
import inside
import memory
import pairs
import users
from addresses import bindable
from peer import Peer

from llm_datadist import BlocksCacheKey, CacheDesc, LLMClusterInfo, LLMDataDist, LLMRole
from llm_datadist import LLMStatusCode as Code
from llm_datadist._engine.space import Space
from llm_datadist._engine.staging import AREA_BYTES

OK = Code.LLM_SUCCESS
LINKED = (OK, [OK])
POOL = json.dumps({"memory_size": 1 << 20, "page_shift": 10})
DESC = pairs.bytes_desc(2, 4, 64)
_ports = itertools.count(28000)


def options(listen: str | None = None, **extra: Any) -> dict[str, str]:
    """Make the options of a member."""
    return pairs.options(listen, **{"enable_cache_manager": True, "mem_pool_cfg": POOL, **extra})


class Far:
    """Names a member wherever it lives, to link to it and to pull from it."""

    desc, salt = DESC, 0

    def __init__(self, cluster_id: int, address: str = "") -> None:
        self.cluster_id, self.address = cluster_id, address

    def info(self, local: str = "192.168.0.9") -> LLMClusterInfo:
        """Describe it for `link_clusters`."""
        return pairs.cluster_info(self.cluster_id, [self.address], local)

    def bare(self) -> LLMClusterInfo:
        """Describe it by its id alone."""
        info = LLMClusterInfo()
        info.remote_cluster_id = self.cluster_id
        return info

    def expected(self, tensor: int) -> bytes:
        """Give the bytes of a tensor of its source."""
        return memory.pattern(self.cluster_id, tensor, self.desc.size, self.salt)


class Member(Far):
    """One engine; without a peer it is this process's."""

    def __init__(
        self,
        cluster_id: int,
        peer: Peer | None = None,
        *,
        listen: bool | str = True,
        role: LLMRole = LLMRole.MIX,
        desc: CacheDesc = DESC,
        salt: int = 0,
        **extra: Any,
    ) -> None:
        address = listen if isinstance(listen, str) else f"10.0.{cluster_id % 250}.1:{next(_ports)}"
        super().__init__(cluster_id, bindable(address))
        self.peer, self.desc, self.salt = peer, desc, salt
        self.options = options(self.address if listen else None, **extra)
        self.dd: Any = self.run("llm_datadist:LLMDataDist", role, cluster_id)
        self.start()

    def start(self) -> None:
        """Init, and make the two caches."""
        self.dd.init(self.options)
        self.manager: Any = self.get(self.dd, "cache_manager")
        self.source = self.manager.allocate_blocks_cache(self.desc, BlocksCacheKey(self.cluster_id))
        self.room = self.manager.allocate_blocks_cache(self.desc)
        for tensor, address in enumerate(self.get(self.source, "tensor_addrs")):
            self.run("memory:write", address, self.expected(tensor))

    def run(self, target: str, *args: Any) -> Any:
        """Call ``module:name`` where this member lives."""
        if self.peer is not None:
            return self.peer.make(target, *args)
        module, _, name = target.partition(":")
        return getattr(importlib.import_module(module), name)(*args)

    def get(self, held: Any, name: str) -> Any:
        """Read an attribute of an object where this member lives."""
        return getattr(held, name) if self.peer is None else held.get(name)

    def link(self, *others: Far, timeout: int = 5000) -> None:
        """Link to others, which must succeed."""
        result = self.dd.link_clusters([other.info(f"192.168.0.{self.cluster_id % 250}") for other in others], timeout)
        assert result == (OK, [OK] * len(others))

    def unlink(self, *others: Far, force: bool = False) -> None:
        """Unlink others by their ids, which must succeed."""
        result = self.dd.unlink_clusters([other.bare() for other in others], 5000, force)
        assert result == (OK, [OK] * len(others))

    def pull(self, other: Far) -> None:
        """Pull all that another member has, and check every byte; nothing is written if it raises."""
        addresses = self.get(self.room, "tensor_addrs")
        before = bytes([pairs.PREFILL]) * self.desc.size
        for address in addresses:
            self.run("memory:write", address, before)
        slots = range(self.desc.shape[0])
        done = False
        try:
            self.manager.pull_blocks(BlocksCacheKey(other.cluster_id), self.room, slots, slots)
            done = True
        finally:
            for tensor, address in enumerate(addresses):
                found = self.run("memory:read", address, self.desc.size)
                assert found == (other.expected(tensor) if done else before), f"tensor {tensor}, pulled: {done}"

    def finalize(self) -> None:
        """End the engine."""
        self.dd.finalize()


def user_memory(nbytes: int, count: int = 1) -> list[int]:
    """Give addresses of memory of this process that its engine does not own, full of 0xA5."""
    taken = [users.take(nbytes) for _ in range(count)]
    for address in taken:
        memory.write(address, bytes([pairs.PREFILL]) * nbytes)
    return taken


def forbid_process(forbid: bool = True) -> None:
    """Let links of this process's engine from now on find that the kernel forbids to read their peers.

    Where the backend has no such switch, its endpoints say of all regions but the pools that they can't be reached.
    """
    backend = _engine().backend
    if hasattr(backend, "forbid_process"):
        backend.forbid_process = forbid
    else:
        assert forbid
        disturbed.forbid_registered(_engine())


_crowd: list[Member] = []


def crowd(first: int, count: int) -> list[tuple[int, str]]:
    """Start many engines in this process, which the one-instance rule of the facade does not allow; name them."""
    for cluster_id in range(first, first + count):
        _crowd.append(Member(cluster_id, listen=f"10.1.{cluster_id // 250}.{cluster_id % 250}:26000"))
        LLMDataDist.llm_engine_instance = None
    return [(member.cluster_id, member.address) for member in _crowd[-count:]]


def end_crowd() -> None:
    """End the many."""
    while _crowd:
        _crowd.pop().finalize()


def work(member: Member, others: Sequence[tuple[int, str]], rounds: int) -> None:
    """Link to others and pull from each of them again and again, all bytes checked."""
    peers = [Far(*other) for other in others]
    member.link(*peers)
    for _ in range(rounds):
        for peer in peers:
            member.pull(peer)


_mine: list[Member] = []


def make_mine(cluster_id: int, **extra: Any) -> str:
    """Make a member that stays in this process, and is finalized by the fixture; give its address."""
    _mine[:] = [Member(cluster_id, **extra)]
    return _mine[0].address


def work_mine(others: Sequence[tuple[int, str]], rounds: int) -> None:
    """Let the member of this process work."""
    work(_mine[0], others, rounds)


def pull_mine(cluster_id: int) -> None:
    """Let the member of this process pull, by a manager that it has kept."""
    _mine[0].pull(Far(cluster_id))


def unlink_mine(cluster_id: int) -> None:
    """Let the member of this process unlink."""
    _mine[0].unlink(Far(cluster_id))


def finalize_mine() -> None:
    """End the member of this process."""
    _mine[0].finalize()


def start_own(others: Sequence[tuple[int, str]]) -> None:
    """Make a member of one's own in a forked child, link, pull, and end it."""
    own = Member(77, listen=False)
    try:
        work(own, others, 2)
    finally:
        own.finalize()


def in_child(do: str, end: str, *args: Any) -> dict[str, Any]:
    """Fork, and do something in the child while this process waits."""
    return inside.Child(lambda: globals()[do](*args), getattr(inside, end)).outcome()


def _engine() -> Any:
    instance = LLMDataDist.llm_engine_instance
    assert instance is not None
    return instance._engine


def shrink_staging(areas: int) -> None:
    """Leave so many areas for links that are staged from now on."""
    staging = _engine().staging
    staging._space = Space(areas * AREA_BYTES, AREA_BYTES)


def set_timeout(milliseconds: int) -> None:
    """Change sync_kv_timeout of this process's engine."""
    engine = _engine()
    engine.config = dataclasses.replace(engine.config, sync_timeout_ms=milliseconds)


def register_nowhere(desc: CacheDesc, key: BlocksCacheKey) -> None:
    """Register addresses where no memory is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        instance = LLMDataDist.llm_engine_instance
        assert instance is not None
        instance.cache_manager.register_blocks_cache(desc, [1] * desc.num_tensors, key, True)


def pull_registered(address: str, desc: CacheDesc, rounds: int) -> list[bytes]:
    """Let the member of this process pull what cluster 1 has registered, block after block; give the bytes."""
    member = _mine[0]
    addresses = user_memory(desc.size, desc.num_tensors)
    cache = member.manager.register_blocks_cache(desc, addresses)
    member.link(Far(1, address))
    for i in range(rounds):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            block = i % desc.shape[0]
            member.manager.pull_blocks(BlocksCacheKey(1, 7), cache, [block], [block])
    return [memory.read(each, desc.size) for each in addresses]
