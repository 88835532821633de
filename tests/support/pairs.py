"""A prompt process and a decoder for tests of KvCacheManager mode.

The decoder is an engine of the test's own process, the prompt lives in a `Peer`. Both sides fill and check memory
through `memory`, never through the library.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import memory
from addresses import bindable
from devices import require as need_devices
from peer import Peer, Remote

from llm_datadist import CacheDesc, DataType, LLMClusterInfo, LLMConfig, LLMDataDist, LLMRole, LLMStatusCode

PREFILL = 0xA5
_ports = itertools.count(26000)


def options(listen: str | None = None, devices: int | list[int] = 0, **extra: Any) -> dict[str, str]:
    """Make the options of an engine; ``extra`` are `LLMConfig` properties, or raw keys with ``__`` for each dot."""
    need_devices(max(devices) if isinstance(devices, list) else devices)
    config = LLMConfig()
    config.device_id = devices
    if listen is not None:
        config.listen_ip_info = bindable(listen)
    raw = {}
    for name, value in extra.items():
        if "__" in name:
            raw[name.replace("__", ".")] = value
        else:
            setattr(config, name, value)
    return {**config.generate_options(), **raw}


def cluster_info(cluster_id: int, addresses: Sequence[str], local: str = "192.168.0.9") -> LLMClusterInfo:
    """Describe a peer that listens at ``ip:port`` addresses, one for each device."""
    info = LLMClusterInfo()
    info.remote_cluster_id = cluster_id
    for address in addresses:
        ip, _, port = bindable(address).rpartition(":")
        info.append_local_ip_info(local, 0)
        info.append_remote_ip_info(ip.strip("[]"), int(port))
    return info


def rank_table(ranks: int) -> str:
    """Describe one device on each of some hosts, where nobody may be."""
    servers = []
    for rank in range(ranks):
        host, _, _ = bindable(f"192.168.10.{rank + 1}:1").rpartition(":")
        servers.append({"server_id": host, "device": [{"device_id": "0", "device_ip": host, "rank_id": str(rank)}]})
    return json.dumps({"version": "1.0", "status": "completed", "server_count": str(ranks), "server_list": servers})


class Prompt:
    """A prompt engine in a peer process."""

    def __init__(self, peer: Peer, cluster_id: int = 1, devices: int | list[int] = 0, **extra: Any) -> None:
        self.peer = peer
        self.cluster_id = cluster_id
        count = len(devices) if isinstance(devices, list) else 1
        self.addresses = [bindable(f"10.0.{cluster_id % 250}.1:{next(_ports)}") for _ in range(count)]
        self.options = options(";".join(self.addresses), devices, **extra)
        self.dd: Remote = peer.make("llm_datadist:LLMDataDist", LLMRole.PROMPT, cluster_id)
        self.dd.init(self.options)
        self.manager: Remote = self.dd.get("kv_cache_manager")

    def info(self) -> LLMClusterInfo:
        """Describe this prompt for `link_clusters`."""
        return cluster_info(self.cluster_id, self.addresses)

    def allocate(self, desc: CacheDesc, keys: Sequence[Any] = (), fill: bool = True, salt: int = 0) -> Remote:
        """Allocate a contiguous cache and fill it with this cluster's pattern."""
        cache: Remote = self.manager.allocate_cache(desc, list(keys))
        if fill:
            self.fill(cache, desc, salt)
        return cache

    def allocate_blocks(self, desc: CacheDesc, key: Any = None, fill: bool = True, salt: int = 0) -> Remote:
        """Allocate a paged cache and fill it."""
        cache: Remote = self.manager.allocate_blocks_cache(desc, key)
        if fill:
            self.fill(cache, desc, salt)
        return cache

    def fill(self, cache: Remote, desc: CacheDesc, salt: int = 0) -> None:
        """Fill a cache with `expected`."""
        for device, addresses in enumerate(cache.get("per_device_tensor_addrs")):
            for tensor, address in enumerate(addresses):
                self.peer.make("memory:write", address, self.expected(desc, tensor, device, salt))

    def expected(self, desc: CacheDesc, tensor: int, device: int = 0, salt: int = 0) -> bytes:
        """Give the bytes of one tensor of a filled cache."""
        return memory.pattern(self.cluster_id, tensor + 1000 * device, desc.size, salt)


class Decoder:
    """A decoder engine in this process."""

    def __init__(self, cluster_id: int = 2, devices: int | list[int] = 0, **extra: Any) -> None:
        self.cluster_id = cluster_id
        self.dd = LLMDataDist(LLMRole.DECODER, cluster_id)
        self.dd.init(options(None, devices, **extra))
        self.manager = self.dd.kv_cache_manager

    def link(self, *prompts: Prompt, timeout: int = 5000) -> None:
        """Link to prompts, which must succeed."""
        result = self.dd.link_clusters([prompt.info() for prompt in prompts], timeout)
        assert result == (LLMStatusCode.LLM_SUCCESS, [LLMStatusCode.LLM_SUCCESS] * len(prompts))

    def allocate(self, desc: CacheDesc, blocks: bool = False) -> Any:
        """Allocate a cache and prefill it with 0xA5."""
        make = self.manager.allocate_blocks_cache if blocks else self.manager.allocate_cache
        cache = make(desc)
        self.prefill(cache)
        return cache

    def prefill(self, cache: Any) -> None:
        """Fill a cache with 0xA5."""
        for addresses in cache.per_device_tensor_addrs:
            for address in addresses:
                memory.write(address, bytes([PREFILL]) * cache.cache_desc.size)

    def tensor(self, cache: Any, tensor: int, device: int = 0) -> bytes:
        """Give the bytes of one tensor."""
        return memory.read(cache.per_device_tensor_addrs[device][tensor], cache.cache_desc.size)

    def check(self, cache: Any, expected: dict[int, list[tuple[int, bytes]]], device: int = 0) -> None:
        """Compare every byte: ``expected[tensor]`` lists (offset, bytes) pieces; all the rest must still be 0xA5."""
        for tensor in range(cache.cache_desc.num_tensors):
            wanted = bytearray([PREFILL]) * cache.cache_desc.size
            for offset, data in expected.get(tensor, []):
                wanted[offset : offset + len(data)] = data
            assert self.tensor(cache, tensor, device) == bytes(wanted), f"tensor {tensor} of device {device}"

    def untouched(self, cache: Any) -> None:
        """Check that nothing was written."""
        for device in range(len(cache.per_device_tensor_addrs)):
            self.check(cache, {}, device)


def bytes_desc(num_tensors: int, slots: int, stride: int) -> CacheDesc:
    """Describe a cache of uint8 tensors of ``slots`` slots of ``stride`` bytes."""
    return CacheDesc(num_tensors, [slots, stride], DataType.DT_UINT8)
