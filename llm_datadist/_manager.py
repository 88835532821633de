"""What the two managers share: checks of arguments that both take, and the way from them to the engine."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from llm_datadist._checks import (
    UINT64_MAX,
    check_inner,
    check_isinstance,
    check_layer_range,
    check_pulled_layers,
    check_size,
    int64,
    refused,
    typed,
    uint32,
    uint64,
)
from llm_datadist._log import get_logger, info
from llm_datadist.cache_types import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    CacheTask,
    KvCache,
    LayerSynchronizer,
    Placement,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from llm_datadist.status import LLMException, LLMStatusCode, ParamInvalid

if TYPE_CHECKING:
    from llm_datadist._engine.directory import Key
    from llm_datadist._engine.engine import Engine
    from llm_datadist._engine.layout import Layers
    from llm_datadist._engine.targets import AddressTarget, KeyTarget
    from llm_datadist._kernels.runs import Indices

__all__ = ["Manager"]

MAX_DIMENSIONS = 31
LAYER_ARGUMENTS = frozenset({"src_layer_range", "dst_layer_range", "tensor_num_per_layer"})
OFFSET_ARGUMENTS = frozenset({"src_cache_offset", "dst_cache_offset"})


class Manager:
    """Base of both managers. Not public."""

    def __init__(self, engine: Engine) -> None:
        # The engine needs the compiled kernels, which importing this module must not.
        from llm_datadist._engine.directory import BLOCKS, CACHE, PREFIX, REQUEST, Key
        from llm_datadist._engine.layout import Layers
        from llm_datadist._kernels.runs import indices

        self._engine = engine
        self._logger = get_logger()
        self._kinds = (CACHE, REQUEST, PREFIX, BLOCKS)
        self._key, self._layers, self._indices = Key, Layers, indices
        self._all_layers = Layers()
        self._blocks_keys: dict[int, Key] = {}
        self._warned: set[str] = set()

    # ------------------------------------------------------------------ caches

    @staticmethod
    def _check_desc(desc: CacheDesc) -> tuple[tuple[int, ...], int]:
        """Check a description, and give the shape and the bytes of a tensor that the cache will have."""
        check_isinstance("cache_desc", desc, CacheDesc)
        if desc.num_tensors <= 0:
            raise refused(ParamInvalid("num_tensors is 0, allowed are 1 and more"))
        if not 1 <= len(desc.shape) <= MAX_DIMENSIONS:
            raise refused(ParamInvalid(f"shape has {len(desc.shape)} dimensions, allowed are 1 to {MAX_DIMENSIONS}"))
        return desc._measured()

    def _check_keys(self, slots: int, keys: Sequence[CacheKey]) -> list[Key | None]:
        check_isinstance("cache_keys", keys, [list, tuple], allow_none=False)
        check_inner("cache_keys", keys, CacheKey)
        if len(keys) > slots:
            raise refused(
                ParamInvalid(f"cache_keys has {len(keys)} keys, allowed are at most {slots}, one a batch slot")
            )
        return [self._owned_key(key) for key in keys]

    # ------------------------------------------------------------------ keys

    def _owned_key(self, key: CacheKey) -> Key | None:
        """Give the key that an owner binds, or None for padding."""
        _, request, prefix, _ = self._kinds
        number = key._req_id
        if key._prefix_id == UINT64_MAX:
            return None if number == UINT64_MAX else self._key(request, number, key._model_id)
        if number != UINT64_MAX:
            raise refused(ParamInvalid(f"{key} has a req_id and a prefix_id, allowed is one of them"))
        return self._key(prefix, key._prefix_id, key._model_id)

    def _pulled_key(self, key: CacheKey | CacheKeyByIdAndIndex) -> tuple[Key, int]:
        """Give the key that a transfer looks for, and the slot that it names if it goes by cache id."""
        if isinstance(key, CacheKeyByIdAndIndex):
            # No cache has an id below 1, so 0 stands for what can't exist.
            return self._key(self._kinds[0], max(key.cache_id, 0), 0), key.batch_index
        owned = self._owned_key(key)
        if owned is None:
            raise refused(ParamInvalid(f"{key} has neither a req_id nor a prefix_id, allowed is one of them"))
        return owned, 0

    def _blocks_key(self, key: BlocksCacheKey) -> Key:
        made = self._blocks_keys.get(key._model_id)
        if made is None:
            made = self._blocks_keys[key._model_id] = self._key(self._kinds[3], UINT64_MAX, key._model_id)
        return made

    # ------------------------------------------------------------------ arguments of transfers

    def _check_layers(
        self, name: str, cache: KvCache | Cache, kwargs: dict[str, Any], known: frozenset[str] = LAYER_ARGUMENTS
    ) -> Layers:
        """Give the layers of a pull, and warn of arguments that are not ``known``."""
        if not kwargs:
            return self._all_layers
        source = kwargs.get("src_layer_range")
        destination = kwargs.get("dst_layer_range")
        ranged = source is not None or destination is not None
        count = check_pulled_layers(kwargs.get("tensor_num_per_layer"), cache.cache_desc.num_tensors, ranged)
        layers = self._layers(
            check_layer_range("src_layer_range", source), check_layer_range("dst_layer_range", destination), count
        )
        for unknown in kwargs.keys() - known - self._warned:
            self._warned.add(unknown)
            warnings.warn(f"{name} ignores the unknown argument {unknown!r}", RuntimeWarning, stacklevel=3)
        return layers

    def _check_blocks(self, name: str, blocks: Sequence[int]) -> Indices:
        try:
            return self._indices(blocks, name)
        except (TypeError, ValueError) as e:
            refused(e)
            raise

    def _check_block_lists(
        self, source_name: str, source: Sequence[int], destination_name: str, destination: Sequence[int]
    ) -> tuple[Indices, Indices]:
        try:
            sources, destinations = self._indices(source, source_name), self._indices(destination, destination_name)
        except (TypeError, ValueError) as e:
            refused(e)
            raise
        if len(sources) != len(destinations) or not len(sources):
            raise refused(
                ParamInvalid(
                    f"{source_name} has {len(sources)} and {destination_name} {len(destinations)} indices; "
                    "allowed are equal lengths above 0"
                )
            )
        return sources, destinations

    # ------------------------------------------------------------------ local copies

    def _copy_cache(
        self,
        destination_id: int,
        source_id: int,
        destination_slot: int,
        source_slot: int,
        offset: int,
        size: int,
        req_id: int | None,
        *,
        plain_caches: bool,
    ) -> None:
        uint32("dst_batch_index", destination_slot)
        uint32("src_batch_index", source_slot)
        uint64("offset", offset)
        int64("size", size)
        check_size(size)
        info(
            "copy_cache %d slot %d to %d slot %d, offset %d, size %d, request %s",
            source_id,
            source_slot,
            destination_id,
            destination_slot,
            offset,
            size,
            req_id,
        )
        self._engine.copies.copy_slot(
            destination_id,
            source_id,
            destination_slot,
            source_slot,
            offset,
            size,
            plain_caches=plain_caches,
        )
        info("copy_cache %d to %d done", source_id, destination_id)

    def _check_copy_info(self, copy_block_info: dict[int, list[int]]) -> list[tuple[int, int]]:
        typed("copy_block_info", copy_block_info, dict)
        pairs: list[tuple[int, int]] = []
        for source, destinations in copy_block_info.items():
            uint64("copy_block_info key", source)
            check_isinstance("copy_block_info value", destinations, [list, tuple], allow_none=False)
            check_inner("copy_block_info value", destinations, int)
            pairs += [(source, uint64("copy_block_info value", d)) for d in destinations]
        return pairs

    def _swap_blocks(
        self,
        source: KvCache | Cache,
        destination: KvCache | Cache,
        addresses_of: Callable[[Any], Sequence[Sequence[int]]],
        owned: Sequence[int],
        src_to_dst: dict[int, int],
    ) -> None:
        here, there = source.cache_desc, destination.cache_desc
        source_blocks, source_bytes = source._measured[0][0], source._measured[1]
        destination_blocks, destination_bytes = destination._measured[0][0], destination._measured[1]
        check_isinstance("src_to_dst", src_to_dst, dict)
        for key, value in src_to_dst.items():
            int64("src_to_dst key", key)
            int64("src_to_dst value", value)
        if {here.placement, there.placement} != {Placement.HOST, Placement.DEVICE}:
            raise refused(
                ParamInvalid(f"swap_blocks goes between HOST and DEVICE, not {here.placement} to {there.placement}")
            )
        source_block, destination_block = source_bytes // source_blocks, destination_bytes // destination_blocks
        if source_block != destination_block or here.num_tensors != there.num_tensors:
            raise refused(
                ParamInvalid(
                    f"the source has {here.num_tensors} tensors of blocks of {source_block} bytes, the destination "
                    f"{there.num_tensors} of {destination_block}; they must be equal"
                )
            )
        for name, index, blocks in (
            *(("source", key, source_blocks) for key in src_to_dst),
            *(("destination", value, destination_blocks) for value in src_to_dst.values()),
        ):
            if not 0 <= index < blocks:
                raise refused(ParamInvalid(f"{name} block {index} of src_to_dst, allowed are 0 to {blocks - 1}"))

        def addresses() -> tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]]:
            found = addresses_of(source), addresses_of(destination)
            if not found[0] or len(found[0]) != len(found[1]):
                raise ParamInvalid("a cache was deallocated, or the two lie on different numbers of devices")
            if not all(len(tensors) == here.num_tensors for side in found for tensors in side):
                raise ParamInvalid("a cache was deallocated")
            return found

        info("swap_blocks %s to %s, %d blocks", source, destination, len(src_to_dst))
        if src_to_dst:
            self._engine.copies.swap_blocks(
                owned,
                addresses,
                source_blocks,
                destination_blocks,
                source_block,
                src_to_dst,
            )
        else:
            addresses()
        info("swap_blocks %s to %s done", source, destination)

    # ------------------------------------------------------------------ asynchronous transfers

    def _transfer_cache_async(
        self,
        cache_id: int,
        desc: CacheDesc,
        layer_synchronizer: LayerSynchronizer,
        transfer_configs: Sequence[TransferConfig | TransferWithCacheKeyConfig],
        source_blocks: Sequence[int] | None,
        destination_blocks: Sequence[int] | None,
        block_bytes: int | None,
        *,
        by_key: bool,
        cache_to_blocks: bool,
    ) -> CacheTask:
        from llm_datadist._engine import codes
        from llm_datadist._engine.targets import TENSORS_PER_LAYER, Source
        from llm_datadist._engine.tasks import LayerTask

        sources = None if source_blocks is None else self._check_blocks("src_block_indices", source_blocks)
        destinations = (
            None if destination_blocks is None else self._check_blocks("dst_block_indices", destination_blocks)
        )
        if block_bytes is not None:
            uint64("dst_block_memory_size", block_bytes)
        sources = sources if sources is not None and len(sources) else None
        destinations = destinations if destinations is not None and len(destinations) else None
        if sources is not None and destinations is None:
            raise refused(ParamInvalid("transfer from blocks to cache is not supported: give dst_block_indices"))
        if sources is not None and destinations is not None and len(sources) != len(destinations):
            raise refused(
                ParamInvalid(
                    f"src_block_indices has {len(sources)} and dst_block_indices {len(destinations)} indices; "
                    "they must be equally many"
                )
            )
        if destinations is not None and sources is None and not (cache_to_blocks and block_bytes is not None):
            raise refused(
                ParamInvalid(
                    "dst_block_indices without src_block_indices: "
                    + (
                        "give dst_block_memory_size"
                        if cache_to_blocks
                        else "transfer from cache to blocks is not supported"
                    )
                )
            )
        check_isinstance("layer_synchronizer", layer_synchronizer, LayerSynchronizer, allow_none=False)
        check_isinstance("transfer_configs", transfer_configs, [list, tuple], allow_none=False)
        check_inner("transfer_configs", transfer_configs, TransferWithCacheKeyConfig if by_key else TransferConfig)
        if block_bytes and destinations is None:
            raise refused(
                ParamInvalid(f"dst_block_memory_size is {block_bytes} without dst_block_indices, allowed is 0 or None")
            )
        if desc.num_tensors % TENSORS_PER_LAYER:
            raise refused(ParamInvalid(f"src_cache has {desc.num_tensors} tensors, allowed are even numbers"))
        layers = desc.num_tensors // TENSORS_PER_LAYER
        targets = [
            self._target(
                config, Source(cache_id, config.src_batch_index, sources, destinations, block_bytes or 0), layers
            )
            for config in transfer_configs
        ]
        info("transfer_cache_async of cache %d to %d targets", cache_id, len(targets))

        def synchronize(layer: int) -> bool:
            return layer_synchronizer.synchronize_layer(layer, None)

        timeout_status = codes.timeout_code(self._engine.config.cache_manager)
        return CacheTask(LayerTask(synchronize, targets, layers, lambda: self._engine.closed, timeout_status))

    def _target(
        self, config: TransferConfig | TransferWithCacheKeyConfig, source: Any, layers: int
    ) -> AddressTarget | KeyTarget:
        from llm_datadist._engine.targets import TENSORS_PER_LAYER, AddressTarget, KeyTarget

        if source.source_blocks is not None and config.src_batch_index != 0:
            raise refused(
                ParamInvalid(f"src_batch_index is {config.src_batch_index}, allowed with src_block_indices is 0")
            )
        if config.src_layer_range is None:
            config.src_layer_range = range(layers)
        wanted = config.src_layer_range
        if not 0 <= wanted.start < wanted.stop <= layers:
            raise refused(ParamInvalid(f"src_layer_range is {wanted}, the source has {layers} layers of 2 tensors"))
        transfers = self._engine.transfers
        if isinstance(config, TransferConfig):
            count = TENSORS_PER_LAYER * len(wanted)
            if len(config.dst_addrs) != count:
                raise refused(
                    ParamInvalid(f"dst_addrs has {len(config.dst_addrs)} addresses, {len(wanted)} layers need {count}")
                )
            return AddressTarget(transfers, source, config.dst_cluster_id, tuple(config.dst_addrs), wanted)
        key, slot = (
            (self._blocks_key(config.cache_key), 0)
            if isinstance(config.cache_key, BlocksCacheKey)
            else self._pulled_key(config.cache_key)
        )
        to = config.dst_layer_range
        if to is None or len(to) != len(wanted):
            raise refused(ParamInvalid(f"src_layer_range is {wanted} and dst_layer_range {to}; they must be as long"))
        return KeyTarget(transfers, source, config.dst_cluster_id, key, slot, wanted, to)

    # ------------------------------------------------------------------ belonging

    @staticmethod
    def _foreign(name: str, cache_id: int) -> LLMException:
        return LLMException(
            f"{name} is cache {cache_id} of another engine, or on host memory",
            status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
        )
