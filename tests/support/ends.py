"""Two engines that exchange caches, one in this process and one in a `Peer`, in either mode and any role.

Both are used alike. Memory is filled and read through `memory`, in the process that owns it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import memory
import users
from addresses import bindable
from pairs import PREFILL, cluster_info, options
from peer import Peer

from llm_datadist import CacheDesc, DataType, LLMClusterInfo, LLMDataDist, LLMRole, LLMStatusCode, Placement

_ports = itertools.count(28000)
POOL = json.dumps({"memory_size": 64 << 20})
SUCCESS = LLMStatusCode.LLM_SUCCESS


def desc(tensors: int, slots: int, stride: int, placement: Placement = Placement.DEVICE) -> CacheDesc:
    """Describe a cache of uint8 tensors."""
    return CacheDesc(tensors, [slots, stride], DataType.DT_UINT8, placement=placement)


def cm_options(listen: str | None = None, *, remote: bool = False, **extra: Any) -> dict[str, str]:
    """Make options of CacheManager mode, with a pool of each kind unless ``extra`` says otherwise."""
    pools = {"llm__MemPoolConfig": POOL, "llm__HostMemPoolConfig": POOL, **extra}
    given = {name: value for name, value in pools.items() if value is not None}
    return options(
        listen, llm__EnableCacheManager="1", llm__EnableRemoteCacheAccessible="1" if remote else "0", **given
    )


class End:
    """One engine, here (``peer`` is None) or in a peer process; PROMPTs and CacheManagers listen."""

    def __init__(
        self, peer: Peer | None, cluster_id: int, role: LLMRole = LLMRole.PROMPT, *, cm: bool = True, **extra: Any
    ) -> None:
        self.peer, self.cluster_id, self.cm = peer, cluster_id, cm
        self.address = bindable(f"10.1.{cluster_id % 250}.1:{next(_ports)}")
        listen = self.address if cm or role is LLMRole.PROMPT else None
        self.dd: Any = (
            LLMDataDist(role, cluster_id) if peer is None else peer.make("llm_datadist:LLMDataDist", role, cluster_id)
        )
        self.dd.init(cm_options(listen, **extra) if cm else options(listen, **extra))
        self.manager: Any = self.get(self.dd, "cache_manager" if cm else "kv_cache_manager")

    # ------------------------------------------------------------------ links

    def info(self) -> LLMClusterInfo:
        """Describe this engine for its peers."""
        return cluster_info(self.cluster_id, [self.address])

    def link(self, other: End) -> None:
        """Link to another engine, which must succeed."""
        if self.peer is None:
            result = self.dd.link_clusters([other.info()], 5000)
        else:
            result = self.peer.make("conftest_support:link", self.dd, other.cluster_id, [other.address])
        assert result == (SUCCESS, [SUCCESS]), result

    # ------------------------------------------------------------------ caches

    def allocate(self, of: CacheDesc, key: Any = None, salt: int | None = None, blocks: bool = False) -> Any:
        """Allocate a cache; fill it with a pattern if there is a salt, else with 0xA5."""
        cache = self.manager.allocate_blocks_cache(of, key) if blocks else self.manager.allocate_cache(of, key or [])
        self.fill(cache, of, salt)
        return cache

    def register(
        self, of: CacheDesc, key: Any = None, salt: int | None = None, blocks: bool = False, **more: Any
    ) -> Any:
        """Register fresh memory of the user's."""
        addresses = [self.take(of.size, of.placement) for _ in range(of.num_tensors)]
        if blocks:
            cache = self.manager.register_blocks_cache(of, addresses, key, **more)
        else:
            cache = self.manager.register_cache(of, addresses, key or [], **more)
        self.fill(cache, of, salt)
        return cache

    def take(self, nbytes: int, placement: Placement = Placement.DEVICE) -> int:
        """Give the address of memory of the user's, which lives until the end of the test."""
        address: int = (
            users.take(nbytes, placement) if self.peer is None else self.peer.make("users:take", nbytes, placement)
        )
        return address

    def fill(self, cache: Any, of: CacheDesc, salt: int | None) -> None:
        """Fill every tensor."""
        for tensor, address in enumerate(self.addresses(cache)):
            self.write(address, bytes([PREFILL]) * of.size if salt is None else self.expected(of, tensor, salt))

    def expected(self, of: CacheDesc, tensor: int, salt: int = 0) -> bytes:
        """Give the bytes of one filled tensor."""
        return memory.pattern(self.cluster_id, tensor, of.size, salt)

    def addresses(self, cache: Any) -> list[int]:
        """Give the addresses of a cache's tensors."""
        if self.cm:
            return list(self.get(cache, "tensor_addrs"))
        return list(self.get(cache, "per_device_tensor_addrs")[0])

    def id(self, cache: Any) -> int:
        """Give the id of a cache."""
        number: int = self.get(cache, "cache_id")
        return number

    def check(self, cache: Any, of: CacheDesc, pieces: dict[int, Sequence[tuple[int, bytes]]]) -> None:
        """Compare every byte: ``pieces[tensor]`` lists (offset, bytes); all the rest must still be 0xA5."""
        for tensor, address in enumerate(self.addresses(cache)):
            wanted = bytearray([PREFILL]) * of.size
            for offset, data in pieces.get(tensor, ()):
                wanted[offset : offset + len(data)] = data
            assert self.read(address, of.size) == bytes(wanted), f"tensor {tensor}"

    def untouched(self, cache: Any, of: CacheDesc) -> None:
        """Check that nothing was written."""
        self.check(cache, of, {})

    # ------------------------------------------------------------------ this process or the other

    def get(self, thing: Any, name: str) -> Any:
        """Give an attribute."""
        return getattr(thing, name) if self.peer is None else thing.get(name)

    def write(self, address: int, data: bytes) -> None:
        """Put bytes into this engine's process."""
        if self.peer is None:
            memory.write(address, data)
        else:
            self.peer.make("memory:write", address, data)

    def read(self, address: int, nbytes: int) -> bytes:
        """Give bytes of this engine's process."""
        data: bytes = (
            memory.read(address, nbytes) if self.peer is None else self.peer.make("memory:read", address, nbytes)
        )
        return data

    def close(self) -> None:
        """Finalize."""
        self.dd.finalize()
