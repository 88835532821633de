"""How fast blocks go between two processes, and whether all of their bytes arrive."""

from __future__ import annotations

import json
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Final

from llm_datadist import BlocksCacheKey, CacheDesc, DataType, LLMClusterInfo, LLMConfig, LLMDataDist, LLMRole, Placement
from llm_datadist._addresses import Address
from llm_datadist.cache_types import Cache
from llm_datadist.validate.environment import table
from llm_datadist.validate.partner import Partner, count
from llm_datadist.validate.results import Check, Outcome

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llm_datadist.cache_manager import CacheManager

__all__ = ["Target", "measure"]

KIB: Final = 1 << 10
#: K and V of one layer.
TENSORS: Final = 2
TARGET, ACTING = 1, 2
KEY: Final = BlocksCacheKey(TARGET, model_id=0)
LINK_MS: Final = 60_000
TRANSFER_MS: Final = 30_000
LAYOUTS: Final = ("contiguous", "scattered")
#: For sizes that the acting process tells its partner.
MOST_BYTES: Final = 1 << 30


@dataclass(frozen=True)
class Extent:
    """What is measured."""

    block_bytes: tuple[int, ...]
    #: Of a cache, in all tensors.
    cache_bytes: int
    #: Timed transfers of a whole cache, and of one block.
    rounds: int
    single_rounds: int


FULL: Final = Extent(tuple(16 * KIB << n for n in range(8)), 64 << 20, 10, 200)
QUICK: Final = Extent((16 * KIB, 256 * KIB), 2 << 20, 2, 5)


# ---------------------------------------------------------------------- both sides


def _engine(cluster_id: int, cache_bytes: int, listen: Address | None) -> LLMDataDist:
    config = LLMConfig()
    config.device_id = 0
    config.enable_cache_manager = True
    config.enable_remote_cache_accessible = True
    config.local_comm_res = table(0)
    config.sync_kv_timeout = TRANSFER_MS
    # Room for alignment, and for what other blocks leave unused.
    config.mem_pool_cfg = json.dumps({"memory_size": cache_bytes + (16 << 20)})
    if listen is not None:
        config.listen_ip_info = str(listen)
    made = LLMDataDist(LLMRole.PROMPT if listen else LLMRole.DECODER, cluster_id)
    made.init(config.generate_options())
    return made


class Blocks:
    """A paged cache; its memory is a device's, so it is filled and looked at by way of host memory."""

    def __init__(self, manager: CacheManager, blocks: int, block_bytes: int, key: BlocksCacheKey | None) -> None:
        import numpy as np

        self._manager = manager
        self._shape = [blocks, block_bytes]
        self.cache = manager.allocate_blocks_cache(CacheDesc(TENSORS, self._shape, DataType.DT_UINT8), key)
        self._tensors = [np.zeros(self._shape, np.uint8) for _ in range(TENSORS)]
        on_host = CacheDesc(TENSORS, self._shape, DataType.DT_UINT8, placement=Placement.HOST)
        self._host = Cache.create_cpu_cache(on_host, self._tensors)
        self._all = {block: block for block in range(blocks)}

    def fill(self, seed: int) -> None:
        """Fill every block with bytes of its own."""
        for tensor, values in zip(self._tensors, self._pattern(seed), strict=True):
            tensor[:] = values
        self._manager.swap_blocks(self._host, self.cache, self._all)

    def clear(self) -> None:
        """Fill all of it with zeros."""
        for tensor in self._tensors:
            tensor[:] = 0
        self._manager.swap_blocks(self._host, self.cache, self._all)

    def wrong(self, seed: int, layout: str) -> int:
        """Count the bytes that are not those of a cache filled with the seed, brought here in a layout."""
        sources, destinations = order(layout, self._shape[0])
        self._manager.swap_blocks(self.cache, self._host, self._all)
        pairs = zip(self._tensors, self._pattern(seed), strict=True)
        return sum(int((tensor[destinations] != values[sources]).sum()) for tensor, values in pairs)

    def free(self) -> None:
        """Give the memory back."""
        self._manager.deallocate_blocks_cache(self.cache)

    def _pattern(self, seed: int) -> Iterator[NDArray[np.uint8]]:
        import numpy as np

        for tensor in range(TENSORS):
            yield np.random.default_rng([seed, tensor]).integers(0, 256, self._shape, np.uint8)


def order(layout: str, blocks: int) -> tuple[list[int], list[int]]:
    """Give source and destination blocks: in order, or so mixed that no two of them are neighbours on both sides."""
    import numpy as np

    if layout == "contiguous":
        return list(range(blocks)), list(range(blocks))
    numbers = np.random.default_rng(blocks)
    return numbers.permutation(blocks).tolist(), numbers.permutation(blocks).tolist()


# ---------------------------------------------------------------------- the partner


class Target:
    """The engine that is read from and written to; it does nothing meanwhile.

    Parameters
    ----------
    address : Address or None
        Where it listens; None for somewhere on this host.
    """

    def __init__(self, address: Address | None) -> None:
        self._address = address
        self._stack = ExitStack()
        self._engine: LLMDataDist | None = None
        self._blocks: Blocks | None = None
        self.calls: dict[str, Callable[..., object]] = {
            "listen": self._listen,
            "allocate": self._allocate,
            "fill": lambda seed: self._allocated().fill(count("seed", seed, MOST_BYTES)),
            "clear": lambda: self._allocated().clear(),
            "wrong": lambda seed, layout: self._allocated().wrong(count("seed", seed, MOST_BYTES), layout),
        }

    def __enter__(self) -> Target:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _listen(self, cache_bytes: int) -> list[Any]:
        address = self._address or _free_address()
        self._engine = _engine(TARGET, count("cache_bytes", cache_bytes, MOST_BYTES), address)
        self._stack.callback(self._engine.finalize)
        return [address.host, address.port]

    def _allocate(self, blocks: int, block_bytes: int) -> None:
        if self._engine is None:
            raise ValueError("no engine listens yet")
        if self._blocks is not None:
            self._blocks.free()
        count("blocks * block_bytes", count("blocks", blocks, MOST_BYTES) * block_bytes, MOST_BYTES)
        self._blocks = Blocks(self._engine.cache_manager, blocks, block_bytes, KEY)

    def _allocated(self) -> Blocks:
        if self._blocks is None:
            raise ValueError("no cache is allocated yet")
        return self._blocks


def _free_address() -> Address:
    """Give an address of this host that no other process has: its second to fourth byte are our process id."""
    high, middle, low = os.getpid().to_bytes(3, "big")
    host = f"127.{high}.{middle}.{low}"
    with socket.socket() as trial:
        trial.bind((host, 0))
        return Address(host, trial.getsockname()[1])


# ---------------------------------------------------------------------- the acting process


def measure(connection: Connection, quick: bool) -> Iterator[Check]:
    """Link to the partner, and measure transfers in both directions.

    Parameters
    ----------
    connection : Connection
        Leads to the partner.
    quick : bool
        A few sizes and rounds only.
    """
    extent = QUICK if quick else FULL
    partner = Partner(connection)
    host, port = partner.ask("listen", cache_bytes=extent.cache_bytes)
    engine = _engine(ACTING, extent.cache_bytes, None)
    try:
        yield _link(engine, Address(host, port))
        for block_bytes in extent.block_bytes:
            yield from _measure_size(partner, engine.cache_manager, block_bytes, extent)
    finally:
        engine.finalize()


def _link(engine: LLMDataDist, address: Address) -> Check:
    info = LLMClusterInfo()
    info.remote_cluster_id = TARGET
    info.append_local_ip_info("127.0.0.1", 0)
    info.append_remote_ip_info(address.host, address.port)
    start = time.perf_counter()
    status, each = engine.link_clusters([info], LINK_MS)
    seconds = time.perf_counter() - start
    if status:
        raise ConnectionError(f"the link to {address} failed with {each[0].name}; ASCEND_GLOBAL_LOG_LEVEL=1 tells more")
    return Check("link", Outcome.OK, f"to {address} in {seconds * 1e3:.1f} ms", figures={"seconds": seconds})


def _measure_size(partner: Partner, manager: CacheManager, block_bytes: int, extent: Extent) -> Iterator[Check]:
    blocks = extent.cache_bytes // TENSORS // block_bytes
    partner.ask("allocate", blocks=blocks, block_bytes=block_bytes)
    here = Blocks(manager, blocks, block_bytes, None)
    try:
        for name, seed, act in (
            ("read", block_bytes + 1, partial(manager.pull_blocks, KEY, here.cache)),
            ("write", block_bytes + 2, partial(manager.push_blocks, KEY, here.cache)),
        ):
            clear: Callable[[], object] = here.clear
            wrong: Callable[..., int] = here.wrong
            if name == "read":
                partner.ask("fill", seed=seed)
            else:
                here.fill(seed)
                clear, wrong = partial(partner.ask, "clear"), partial(partner.ask, "wrong")
            yield _measure_direction(f"{name} {block_bytes // KIB} KiB", seed, blocks, extent, act, clear, wrong)
    finally:
        here.free()


def _measure_direction(
    name: str,
    seed: int,
    blocks: int,
    extent: Extent,
    act: Callable[[list[int], list[int]], None],
    clear: Callable[[], object],
    wrong: Callable[..., int],
) -> Check:
    figures: dict[str, float] = {}
    for layout in LAYOUTS:
        sources, destinations = order(layout, blocks)
        seconds = _times(partial(act, sources, destinations), extent.rounds)
        clear()
        act(sources, destinations)
        if bad := wrong(seed=seed, layout=layout):
            text = f"{bad} of {extent.cache_bytes} bytes are wrong after a {layout} transfer that raised nothing"
            return Check(name, Outcome.FAILED, text, "do not use this machine with these versions; report it")
        figures[f"{layout}_gb_per_s"] = extent.cache_bytes / statistics.median(seconds) / 1e9
    single = statistics.median(_times(partial(act, [0], [blocks - 1]), extent.single_rounds))
    figures["block_us"] = single * 1e6
    text = (
        f"{figures['contiguous_gb_per_s']:8.3f} GB/s contiguous {figures['scattered_gb_per_s']:8.3f} GB/s scattered "
        f"{figures['block_us']:9.1f} us for one block of {TENSORS} tensors"
    )
    return Check(name, Outcome.OK, text, figures=figures)


def _times(act: Callable[[], None], rounds: int) -> Sequence[float]:
    """Time some rounds, after one that is not timed."""
    act()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        act()
        times.append(time.perf_counter() - start)
    return times
