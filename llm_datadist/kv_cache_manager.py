"""`KvCacheManager`: caches and pulls of KvCacheManager mode. Checks arguments and calls the engine."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from llm_datadist._checks import (
    any_integer,
    check_inner,
    check_isinstance,
    check_offset,
    check_size,
    int32,
    int64,
    refused,
    typed,
    uint32,
)
from llm_datadist._log import info
from llm_datadist._manager import LAYER_ARGUMENTS, OFFSET_ARGUMENTS, Manager
from llm_datadist.cache_types import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    CacheTask,
    KvCache,
    LayerSynchronizer,
    Placement,
    TransferConfig,
)
from llm_datadist.configs import LLMRole
from llm_datadist.data_type import ELEMENT_BYTES
from llm_datadist.status import ParamInvalid
from llm_datadist.tensor import Tensor, TensorDesc

if TYPE_CHECKING:
    from llm_datadist._engine.directory import Key
    from llm_datadist._engine.engine import Engine

__all__ = ["KvCacheManager"]


class KvCacheManager(Manager):
    """Caches of one engine, and pulls into them. `LLMDataDist.kv_cache_manager` gives it.

    Notes
    -----
    Calls must not run at the same time as each other; two operations on one link are refused with LLM_LINK_BUSY. After
    `LLMDataDist.finalize` every method but `is_initialized` raises LLM_ENGINE_FINALIZED.
    """

    def __init__(self, engine: Engine, role: LLMRole) -> None:
        super().__init__(engine)
        self._role = role
        self._dropped = engine.caches.dropped.append

    def is_initialized(self) -> bool:
        """Say whether the engine of this manager still runs.

        Returns
        -------
        bool
            False after `LLMDataDist.finalize`, for ever.
        """
        return self._engine.closed is None

    # ------------------------------------------------------------------ caches

    def allocate_cache(self, cache_desc: CacheDesc, cache_keys: Sequence[CacheKey] = ()) -> KvCache:
        """Allocate a contiguous cache on each device.

        Parameters
        ----------
        cache_desc : CacheDesc
            With at least one tensor, 1 to 31 dimensions above 0, and placement DEVICE. Dimension 0 counts batch slots.
        cache_keys : list or tuple of CacheKey, default ()
            ``cache_keys[i]`` binds batch slot i, so that decoders can pull it by this key. A key without request and
            prefix (``req_id`` 2**64-1) leaves its slot unbound; of equal keys the last counts. Role PROMPT only.

        Returns
        -------
        KvCache
            Its memory is zero where it is used for the first time; memory of freed caches is used again as it is.

        Raises
        ------
        TypeError
            For arguments of another type.
        LLMException
            LLM_PARAM_INVALID (also a ValueError) for a description or keys outside what is said above, or a key with
            request and prefix; LLM_FAILED when a key is bound to a live cache; LLM_DEVICE_OUT_OF_MEMORY;
            LLM_ENGINE_FINALIZED. Nothing is allocated or bound then.
        """
        self._engine.require_open()
        measured = self._check_device_desc(cache_desc)
        check_isinstance("cache_keys", cache_keys, [list, tuple], allow_none=False)
        check_inner("cache_keys", cache_keys, CacheKey)
        if cache_keys and self._role is not LLMRole.PROMPT:
            raise refused(ParamInvalid(f"cache_keys are for role PROMPT, this cluster's role is {self._role}"))
        keys = self._check_keys(measured[0][0], cache_keys)
        return self._allocate(cache_desc, measured, keys, blocks=False)

    def allocate_blocks_cache(self, cache_desc: CacheDesc, blocks_cache_key: BlocksCacheKey | None = None) -> KvCache:
        """Allocate a paged cache on each device.

        Parameters
        ----------
        cache_desc : CacheDesc
            As for `allocate_cache`; dimension 0 counts blocks.
        blocks_cache_key : BlocksCacheKey, optional
            Lets decoders pull blocks by this key. Not for role DECODER.

        Returns
        -------
        KvCache
            As for `allocate_cache`.

        Raises
        ------
        TypeError
            For arguments of another type.
        LLMException
            As for `allocate_cache`.
        """
        self._engine.require_open()
        measured = self._check_device_desc(cache_desc)
        check_isinstance("blocks_cache_key", blocks_cache_key, BlocksCacheKey)
        if blocks_cache_key is None:
            return self._allocate(cache_desc, measured, [], blocks=True)
        if self._role is LLMRole.DECODER:
            raise refused(ParamInvalid("blocks_cache_key is not for role DECODER, which is this cluster's role"))
        return self._allocate(cache_desc, measured, [self._blocks_key(blocks_cache_key)], blocks=True)

    def deallocate_cache(self, cache: KvCache) -> None:
        """Give a cache back.

        Parameters
        ----------
        cache : KvCache
            Of this manager. Its addresses are empty afterwards. A cache whose request or prefix keys live can still be
            pulled, and its memory goes with the last key; a blocks cache goes at once. A second call is harmless.

        Raises
        ------
        TypeError
            When `cache` is no KvCache.
        LLMException
            LLM_PARAM_INVALID for a HOST cache; LLM_ENGINE_FINALIZED.
        """
        self._engine.require_open()
        self._device_cache("cache", cache)
        info("deallocate cache %d", cache.cache_id)
        if cache._collected is self._dropped:
            self._engine.caches.deallocate(cache.cache_id)
        cache._clear()
        info("deallocated cache %d", cache.cache_id)

    def remove_cache_key(self, cache_key: CacheKey) -> None:
        """Remove a key, so that its slot can't be pulled by it any more.

        Parameters
        ----------
        cache_key : CacheKey
            As it was given at allocation; the cluster id does not matter. A key that is not bound is no error.

        Raises
        ------
        TypeError
            When `cache_key` is no CacheKey.
        LLMException
            LLM_PARAM_INVALID for another role than PROMPT; LLM_ENGINE_FINALIZED.
        """
        self._engine.require_open()
        self._require_role("remove_cache_key", LLMRole.PROMPT)
        typed("cache_key", cache_key, CacheKey)
        key = self._owned_key(cache_key)
        info("remove %s", cache_key)
        if key is not None:
            self._engine.caches.remove_key(key)
        info("removed %s", cache_key)

    def get_cache_tensors(self, cache: KvCache, tensor_index: int = 0) -> list[Tensor]:
        """Give one tensor of a cache, on each device, sharing the cache's memory.

        Parameters
        ----------
        cache : KvCache
            Of this manager, not deallocated.
        tensor_index : int, default 0
            In [0, number of tensors).

        Returns
        -------
        list of Tensor
            One a device. Data pulled later shows in them. They keep the memory readable after deallocation.

        Raises
        ------
        TypeError, ValueError
            For arguments of another type or width.
        LLMException
            LLM_PARAM_INVALID for an index out of range; LLM_KV_CACHE_NOT_EXIST for a cache that was deallocated, or was
            made by `KvCache.create_cpu_cache`; LLM_ENGINE_FINALIZED.
        """
        self._engine.require_open()
        typed("cache", cache, KvCache)
        int32("tensor_index", tensor_index)
        desc = cache.cache_desc
        if not 0 <= tensor_index < desc.num_tensors:
            raise refused(ParamInvalid(f"tensor_index is {tensor_index}, allowed are 0 to {desc.num_tensors - 1}"))
        info("get_cache_tensors of cache %d, tensor %d", cache.cache_id, tensor_index)
        local, view = self._engine.caches.view(self._own_id("cache", cache))
        tensors = [
            self._tensor(view, addresses[tensor_index], TensorDesc(desc.data_type, cache._measured[0]))
            for addresses in local.addresses
        ]
        info("get_cache_tensors of cache %d done", cache.cache_id)
        return tensors

    def _tensor(self, view: object, address: int, desc: TensorDesc) -> Tensor:
        engine = self._engine
        if engine.backend.capabilities.host_access:
            return Tensor._over(view, address, desc)
        nbytes = ELEMENT_BYTES[desc.dtype] * math.prod(desc.shape)
        # The tensor keeps the function, and so the view, and so the memory.
        return Tensor._fetching(partial(_load, engine, view, address, nbytes), desc)

    # ------------------------------------------------------------------ pulls

    def pull_cache(
        self,
        cache_key: CacheKey | CacheKeyByIdAndIndex,
        kv_cache: KvCache,
        batch_index: int = 0,
        size: int = -1,
        **kwargs: Any,
    ) -> None:
        """Pull one batch slot, or a part of it, from a prompt cluster.

        Parameters
        ----------
        cache_key : CacheKey or CacheKeyByIdAndIndex
            The source: by request or prefix as it was bound at allocation, or by cache id and batch slot.
        kv_cache : KvCache
            The destination, of this manager.
        batch_index : int, default 0
            Destination batch slot.
        size : int, default -1
            Bytes per tensor, above 0; -1 means a destination slot less `dst_cache_offset`.
        src_layer_range, dst_layer_range : range, optional
            Layers of source and destination, with step 1; all by default. They must select equally many tensors.
        src_cache_offset, dst_cache_offset : int, optional
            Bytes from the start of the slot, at least 0. If one is given, even as 0, the pull does not release the key.
        tensor_num_per_layer : int, default 2
            Consecutive tensors that make a layer, in [1, number of tensors]; with a layer range it must divide the
            destination's number of tensors, unless it is 2.

        Raises
        ------
        TypeError, ValueError
            For arguments of another type or width.
        LLMException
            LLM_PARAM_INVALID (also a ValueError) for values outside what is said above or that do not fit the caches;
            LLM_KV_CACHE_NOT_EXIST when source or destination does not exist (any more); LLM_NOT_YET_LINK;
            LLM_LINK_BUSY; LLM_WAIT_PROCESS_TIMEOUT after ``sync_kv_timeout``: the destination may then be partly
            written, and the cluster must be linked again; LLM_ENGINE_FINALIZED. After any other error nothing is
            written, except that a source that is released during the pull leaves the destination undefined, which the
            text says.

        Notes
        -----
        Role DECODER only. A pull by request key that has fetched all source tensors releases the key.
        """
        self._engine.require_open()
        if self._role is not LLMRole.DECODER:
            self._require_role("pull_cache", LLMRole.DECODER)
        if type(cache_key) is not CacheKey:
            check_isinstance("cache_key", cache_key, [CacheKey, CacheKeyByIdAndIndex], allow_none=False)
        mine = type(kv_cache) is KvCache and kv_cache._collected is self._dropped
        if not mine:
            self._device_cache("kv_cache", kv_cache)
        int64("size", size)
        batch_index = uint32("batch_index", batch_index)
        size = check_size(size)
        source_offset = destination_offset = None
        if kwargs:
            source_offset = check_offset("src_cache_offset", kwargs.get("src_cache_offset"))
            destination_offset = check_offset("dst_cache_offset", kwargs.get("dst_cache_offset"))
        key, slot = self._pulled_key(cache_key)
        layers = self._check_layers("pull_cache", kv_cache, kwargs, LAYER_ARGUMENTS | OFFSET_ARGUMENTS)
        verbose = self._logger.isEnabledFor(logging.INFO)
        if verbose:
            info("pull_cache %s into %s, slot %d, size %d, %s", cache_key, kv_cache, batch_index, size, kwargs)
        self._engine.transfers.pull_slot(
            cache_key._cluster_id,
            key,
            slot,
            kv_cache._cache_id if mine else self._own_id("kv_cache", kv_cache),
            batch_index,
            size,
            source_offset,
            destination_offset,
            layers,
        )
        if verbose:
            info("pull_cache %s done", cache_key)

    def pull_blocks(
        self,
        prompt_cache_key: BlocksCacheKey,
        decoder_kv_cache: KvCache,
        prompt_blocks: Sequence[int],
        decoder_blocks: Sequence[int],
        **kwargs: Any,
    ) -> None:
        """Pull blocks of a prompt cluster's paged cache.

        Parameters
        ----------
        prompt_cache_key : BlocksCacheKey
            The source cache.
        decoder_kv_cache : KvCache
            The destination, of this manager.
        prompt_blocks, decoder_blocks : list of int
            Source and destination block indices, paired one by one; also tuple, range, or a one-dimensional integer
            buffer such as a numpy array. Of a repeated destination the last pair counts.
        src_layer_range, dst_layer_range : range, optional
            As for `pull_cache`.
        tensor_num_per_layer : int, default 2
            As for `pull_cache`.

        Raises
        ------
        TypeError, ValueError
            For arguments of another type or width, bool and float among the indices, or a negative index.
        LLMException
            As for `pull_cache`; LLM_PARAM_INVALID also for empty or unequal lists, an index at or above the number of
            blocks, or blocks of unequal size.

        Notes
        -----
        Role DECODER only. The key is not released.
        """
        self._engine.require_open()
        if self._role is not LLMRole.DECODER:
            self._require_role("pull_blocks", LLMRole.DECODER)
        if type(prompt_cache_key) is not BlocksCacheKey:
            typed("prompt_cache_key", prompt_cache_key, BlocksCacheKey)
        mine = type(decoder_kv_cache) is KvCache and decoder_kv_cache._collected is self._dropped
        if not mine:
            self._device_cache("decoder_kv_cache", decoder_kv_cache)
        source, destination = self._check_block_lists("prompt_blocks", prompt_blocks, "decoder_blocks", decoder_blocks)
        layers = self._check_layers("pull_blocks", decoder_kv_cache, kwargs)
        verbose = self._logger.isEnabledFor(logging.INFO)
        if verbose:
            info("pull_blocks %s into %s, %d blocks, %s", prompt_cache_key, decoder_kv_cache, len(source), kwargs)
        self._engine.transfers.pull_blocks(
            prompt_cache_key._cluster_id,
            self._blocks_key(prompt_cache_key),
            decoder_kv_cache._cache_id if mine else self._own_id("decoder_kv_cache", decoder_kv_cache),
            source,
            destination,
            layers,
        )
        if verbose:
            info("pull_blocks %s done", prompt_cache_key)

    # ------------------------------------------------------------------ local copies

    def copy_cache(
        self,
        dst: KvCache,
        src: KvCache,
        dst_batch_index: int = 0,
        src_batch_index: int = 0,
        offset: int = 0,
        size: int = -1,
        req_id: int | None = None,
    ) -> None:
        """Copy one batch slot, or a part of it, from cache to cache in this engine.

        Parameters
        ----------
        dst, src : KvCache
            Of this manager, with equally many tensors.
        dst_batch_index, src_batch_index : int, default 0
            Batch slots.
        offset : int, default 0
            Bytes from the start of the slot, the same on both sides.
        size : int, default -1
            Bytes per tensor, above 0; -1 means the rest of the source slot.
        req_id : int, optional
            Only goes into the log.

        Raises
        ------
        TypeError, ValueError
            For arguments of another type or width.
        LLMException
            LLM_PARAM_INVALID (also a ValueError) for what does not fit or a HOST cache; LLM_KV_CACHE_NOT_EXIST;
            LLM_ENGINE_FINALIZED. Nothing is written then.

        Notes
        -----
        Any role. May be called at the same time as other copies.
        """
        self._engine.require_open()
        self._device_cache("dst", dst)
        self._device_cache("src", src)
        if req_id is not None:
            any_integer("req_id", req_id)
        destination, source = self._own_id("dst", dst), self._own_id("src", src)
        self._copy_cache(
            destination, source, dst_batch_index, src_batch_index, offset, size, req_id, plain_caches=False
        )

    def copy_blocks(self, cache: KvCache, copy_block_info: dict[int, list[int]]) -> None:
        """Copy blocks inside a cache.

        Parameters
        ----------
        cache : KvCache
            Of this manager.
        copy_block_info : dict of int to list of int
            From each source block to its destinations, in order: a later copy sees what an earlier one wrote.

        Raises
        ------
        TypeError, ValueError
            For arguments of another type or width, or a negative index.
        LLMException
            LLM_PARAM_INVALID for an index at or above the number of blocks or a HOST cache; LLM_KV_CACHE_NOT_EXIST;
            LLM_ENGINE_FINALIZED. Nothing is written then.

        Notes
        -----
        Any role.
        """
        self._engine.require_open()
        self._device_cache("cache", cache)
        pairs = self._check_copy_info(copy_block_info)
        info("copy_blocks in cache %d, %d pairs", cache.cache_id, len(pairs))
        self._engine.copies.copy_blocks(self._own_id("cache", cache), pairs, need_blocks=False)
        info("copy_blocks in cache %d done", cache.cache_id)

    def swap_blocks(self, src: KvCache, dst: KvCache, src_to_dst: dict[int, int]) -> None:
        """Copy blocks between a cache of this manager and one on the user's host memory, in either direction.

        Parameters
        ----------
        src, dst : KvCache
            One from `KvCache.create_cpu_cache`, the other of this manager; blocks and tensors alike.
        src_to_dst : dict of int to int
            From source blocks to destination blocks. The source stays as it is.

        Raises
        ------
        TypeError, ValueError
            For arguments of another type or width.
        AttributeError
            When an argument is None.
        LLMException
            LLM_PARAM_INVALID (also a ValueError) for what does not fit or a deallocated cache; LLM_FAILED when an
            address has no memory; LLM_ENGINE_FINALIZED.

        Notes
        -----
        Any role.
        """
        self._engine.require_open()
        check_isinstance("src", src, KvCache)
        check_isinstance("dst", dst, KvCache)
        self._swap_blocks(
            src,
            dst,
            lambda cache: cache.per_device_tensor_addrs,
            [cache.cache_id for cache in (src, dst) if cache._collected is self._dropped],
            src_to_dst,
        )

    # ------------------------------------------------------------------ asynchronous transfers

    def transfer_cache_async(
        self,
        src_cache: KvCache,
        layer_synchronizer: LayerSynchronizer,
        transfer_configs: Sequence[TransferConfig],
        src_block_indices: Sequence[int] | None = None,
        dst_block_indices: Sequence[int] | None = None,
        dst_block_memory_size: int | None = None,
    ) -> CacheTask:
        """Send a cache to decoders layer by layer, as each layer becomes ready.

        Parameters
        ----------
        src_cache : KvCache
            Of this manager, with an even number of tensors: two make a layer.
        layer_synchronizer : LayerSynchronizer
            Its ``synchronize_layer`` returns when a layer may be sent. It runs in a thread of the task.
        transfer_configs : list or tuple of TransferConfig
            Destinations. A ``src_layer_range`` of None becomes all layers.
        src_block_indices, dst_block_indices : list of int, optional
            Send these blocks to these; without, one batch slot is sent.
        dst_block_memory_size : int, optional
            Bytes of a destination block: those of a source block, or 0.

        Returns
        -------
        CacheTask
            Gives one result for each configuration.

        Raises
        ------
        TypeError, ValueError
            For arguments of another type or width.
        LLMException
            LLM_PARAM_INVALID (also a ValueError) for another role than PROMPT, a HOST cache, or what does not fit;
            LLM_ENGINE_FINALIZED.

        Notes
        -----
        Role PROMPT only, one device. Results: LLM_SUCCESS; LLM_PARAM_INVALID when a layer never became ready, or an
        address is not inside one tensor that the receiving engine allocated; LLM_FAILED when the synchronizer raised;
        LLM_KV_CACHE_NOT_EXIST, LLM_NOT_YET_LINK, LLM_LINK_BUSY, LLM_WAIT_PROCESS_TIMEOUT. The first failure ends the
        task.
        """
        self._engine.require_open()
        self._require_role("transfer_cache_async", LLMRole.PROMPT)
        self._device_cache("src_cache", src_cache)
        return self._transfer_cache_async(
            self._own_id("src_cache", src_cache),
            src_cache.cache_desc,
            layer_synchronizer,
            transfer_configs,
            src_block_indices,
            dst_block_indices,
            dst_block_memory_size,
            by_key=False,
            cache_to_blocks=False,
        )

    # ------------------------------------------------------------------ checks

    def _switch_role(self, role: LLMRole) -> None:
        self._role = role

    def _require_role(self, name: str, role: LLMRole) -> None:
        if self._role is not role:
            raise refused(ParamInvalid(f"{name} is for role {role}, this cluster's role is {self._role}"))

    def _device_cache(self, name: str, cache: KvCache) -> None:
        typed(name, cache, KvCache)
        if cache.cache_desc.placement is not Placement.DEVICE:
            raise refused(ParamInvalid(f"{name} is on {cache.cache_desc.placement}, allowed is DEVICE"))

    @staticmethod
    def _check_device_desc(desc: CacheDesc) -> tuple[tuple[int, ...], int]:
        measured = Manager._check_desc(desc)
        if desc.placement is not Placement.DEVICE:
            raise refused(ParamInvalid(f"placement is {desc.placement}, allowed is DEVICE"))
        return measured

    def _own_id(self, name: str, cache: KvCache) -> int:
        """Give a cache's id in this engine; refuse caches of another engine, which may have the same id."""
        if cache._collected is not self._dropped:
            raise self._foreign(name, cache.cache_id)
        return cache.cache_id

    def _allocate(
        self, desc: CacheDesc, measured: tuple[tuple[int, ...], int], keys: list[Key | None], *, blocks: bool
    ) -> KvCache:
        from llm_datadist._engine.caches import Geometry

        info("allocate %s with %s", desc, keys)
        geometry = Geometry(desc.num_tensors, measured[0][0], measured[1], blocks=blocks)
        cache = self._engine.caches.allocate(geometry, keys)
        info("allocated cache %d", cache.id)
        addresses = [list(device) for device in cache.addresses]
        return KvCache._made(cache.id, desc, addresses, measured, self._dropped)


def _load(engine: Engine, view: object, address: int, nbytes: int) -> bytes:
    return engine.load(address, nbytes)
