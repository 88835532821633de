"""`CacheManager`: caches, pulls and pushes of CacheManager mode. Checks arguments and calls the engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llm_datadist._buffers import address_of
from llm_datadist._checks import (
    check_isinstance,
    check_layer_range,
    check_size,
    check_tensor_num_per_layer,
    int64,
    refused,
    typed,
    uint32,
    uint64,
)
from llm_datadist._log import info
from llm_datadist._manager import Manager
from llm_datadist.cache_types import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    CacheTask,
    LayerSynchronizer,
    MemInfo,
    Memtype,
    Placement,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from llm_datadist.status import ParamInvalid

if TYPE_CHECKING:
    from llm_datadist._engine.directory import Key
    from llm_datadist._engine.engine import Engine

__all__ = ["CacheManager"]


class CacheManager(Manager):
    """Caches of one engine, in its pools or on the user's memory, and transfers between them and those of peers.

    `LLMDataDist.cache_manager` gives it.

    Notes
    -----
    Methods may be called from several threads; transfers with one peer wait for each other. Roles are labels here.
    After `LLMDataDist.finalize` every method raises LLM_ENGINE_FINALIZED.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._remote_accessible = engine.config.remote_accessible
        self._link_called = False

    def set_is_call_linked(self) -> None:
        """Note that `LLMDataDist.link` was called: memory registered from now on is not remote accessible."""
        self._link_called = True

    # ------------------------------------------------------------------ caches of the pools

    def allocate_cache(self, cache_desc: CacheDesc, cache_keys: Sequence[CacheKey] = ()) -> Cache:
        """Allocate a contiguous cache from the pool of its placement.

        Parameters
        ----------
        cache_desc : CacheDesc
            With at least one tensor and 1 to 31 dimensions above 0. Dimension 0 counts batch slots. DEVICE needs
            ``mem_pool_cfg``, HOST ``host_mem_pool_cfg``.
        cache_keys : list or tuple of CacheKey, default ()
            ``cache_keys[i]`` binds batch slot i; a key without request and prefix (``req_id`` 2**64-1) leaves its slot
            unbound; of equal keys the last counts.

        Returns
        -------
        Cache
            Each tensor takes whole pages of the pool. Memory is zero where it is used for the first time.

        Raises
        ------
        TypeError
            For arguments of another type.
        LLMException
            LLM_PARAM_INVALID (also a ValueError) for what is outside of the above, a key that is bound to a live
            cache, or a pool that is not configured; LLM_OUT_OF_MEMORY; LLM_ENGINE_FINALIZED. Nothing is allocated or
            bound then.
        """
        self._engine.require_open()
        measured = self._check_desc(cache_desc)
        return self._allocate(cache_desc, measured, self._check_keys(measured[0][0], cache_keys), blocks=False)

    def allocate_blocks_cache(self, cache_desc: CacheDesc, blocks_cache_key: BlocksCacheKey | None = None) -> Cache:
        """Allocate a paged cache from the pool of its placement.

        Parameters
        ----------
        cache_desc : CacheDesc
            As for `allocate_cache`; dimension 0 counts blocks.
        blocks_cache_key : BlocksCacheKey, optional
            Lets peers pull blocks by this key.

        Returns
        -------
        Cache
            As for `allocate_cache`.

        Raises
        ------
        TypeError
            For arguments of another type.
        LLMException
            As for `allocate_cache`.
        """
        self._engine.require_open()
        measured = self._check_desc(cache_desc)
        check_isinstance("blocks_cache_key", blocks_cache_key, BlocksCacheKey)
        keys = [] if blocks_cache_key is None else [self._blocks_key(blocks_cache_key)]
        return self._allocate(cache_desc, measured, keys, blocks=True)

    def _allocate(
        self, desc: CacheDesc, measured: tuple[tuple[int, ...], int], keys: Sequence[Key | None], *, blocks: bool
    ) -> Cache:
        info("allocate %s with %s", desc, keys)
        cache = self._engine.caches.allocate(self._geometry(desc, measured, blocks=blocks), keys)
        info("allocated cache %d", cache.id)
        return Cache._made(cache.id, desc, list(cache.addresses[0]), blocks, measured, self._engine)

    @staticmethod
    def _geometry(desc: CacheDesc, measured: tuple[tuple[int, ...], int], *, blocks: bool) -> Any:
        from llm_datadist._engine.caches import Geometry
        from llm_datadist.backend import MemoryKind

        shape, nbytes = measured
        return Geometry(desc.num_tensors, shape[0], nbytes, MemoryKind(desc.placement.value), blocks)

    def deallocate_cache(self, cache: Cache) -> None:
        """Give a contiguous cache back.

        Parameters
        ----------
        cache : Cache
            Its addresses are empty afterwards. While request or prefix keys of it live it can still be pulled, and its
            memory goes with the last key. Harmless for caches that were given back, registered, or are on the user's
            memory.

        Raises
        ------
        TypeError
            When `cache` is no Cache.
        LLMException
            LLM_PARAM_INVALID for a blocks cache; LLM_ENGINE_FINALIZED.
        """
        self._deallocate(cache, blocks=False)

    def deallocate_blocks_cache(self, cache: Cache) -> None:
        """Give a paged cache back.

        Parameters
        ----------
        cache : Cache
            Its addresses are empty afterwards, its key and memory go at once. Harmless as for `deallocate_cache`.

        Raises
        ------
        TypeError
            When `cache` is no Cache.
        LLMException
            LLM_PARAM_INVALID for a cache that is no blocks cache; LLM_ENGINE_FINALIZED.
        """
        self._deallocate(cache, blocks=True)

    def _deallocate(self, cache: Cache, *, blocks: bool) -> None:
        self._engine.require_open()
        self._check_form("cache", cache, blocks=blocks)
        info("deallocate cache %d", cache.cache_id)
        if cache._engine is self._engine:
            self._engine.caches.deallocate(cache.cache_id)
        cache._clear()
        info("deallocated cache %d", cache.cache_id)

    def remove_cache_key(self, cache_key: CacheKey) -> None:
        """Remove a key, so that its slot can't be pulled by it any more.

        Parameters
        ----------
        cache_key : CacheKey
            As at allocation; the cluster id does not matter. Harmless for keys that are not bound, and for those of
            registered caches.

        Raises
        ------
        TypeError
            When `cache_key` is no CacheKey.
        LLMException
            LLM_ENGINE_FINALIZED.
        """
        self._engine.require_open()
        typed("cache_key", cache_key, CacheKey)
        info("remove %s", cache_key)
        key = self._owned_key(cache_key)
        if key is not None:
            self._engine.caches.remove_key(key)
        info("removed %s", cache_key)

    # ------------------------------------------------------------------ caches on the user's memory

    def register_cache(
        self,
        cache_desc: CacheDesc,
        addrs: Sequence[Any],
        cache_keys: Sequence[CacheKey] = (),
        remote_accessible: bool | None = None,
    ) -> Cache:
        """Make a contiguous cache of the user's memory.

        Parameters
        ----------
        cache_desc : CacheDesc
            As for `allocate_cache`; no pool is needed.
        addrs : list of int
            One address above 0 per tensor, of `CacheDesc.size` bytes; also objects with the buffer protocol or DLPack
            (numpy, torch CPU tensors), which are kept alive. Memory given by address must live until it is
            unregistered.
        cache_keys : list or tuple of CacheKey, default ()
            As for `allocate_cache`, but never released by pulls or `remove_cache_key`.
        remote_accessible : bool, optional
            Whether peers may reach it in remote-accessible mode. By default DEVICE memory registered before any
            link is, all else is not.

        Returns
        -------
        Cache
            The memory is not touched.

        Raises
        ------
        TypeError
            For arguments of another type.
        AttributeError
            When `cache_desc` is None.
        LLMException
            LLM_PARAM_INVALID (also a ValueError) for another number of addresses than of tensors, an address of 0, a
            bound request or prefix key, `remote_accessible` True after `LLMDataDist.link`; LLM_ENGINE_FINALIZED.
        """
        self._engine.require_open()
        measured = self._check_desc(cache_desc)
        keys = self._check_keys(measured[0][0], cache_keys)
        return self._register(cache_desc, measured, addrs, keys, remote_accessible, blocks=False)

    def register_blocks_cache(
        self,
        cache_desc: CacheDesc,
        addrs: Sequence[Any],
        blocks_cache_key: BlocksCacheKey | None = None,
        remote_accessible: bool | None = None,
    ) -> Cache:
        """Make a paged cache of the user's memory.

        Parameters
        ----------
        cache_desc : CacheDesc
            As for `register_cache`; dimension 0 counts blocks.
        addrs : list of int
            As for `register_cache`.
        blocks_cache_key : BlocksCacheKey, optional
            Goes over to this cache if another registered cache has it.
        remote_accessible : bool, optional
            As for `register_cache`.

        Returns
        -------
        Cache
            The memory is not touched.

        Raises
        ------
        TypeError, AttributeError, LLMException
            As for `register_cache`.
        """
        self._engine.require_open()
        measured = self._check_desc(cache_desc)
        check_isinstance("blocks_cache_key", blocks_cache_key, BlocksCacheKey)
        keys = [] if blocks_cache_key is None else [self._blocks_key(blocks_cache_key)]
        return self._register(cache_desc, measured, addrs, keys, remote_accessible, blocks=True)

    def _register(
        self,
        desc: CacheDesc,
        measured: tuple[tuple[int, ...], int],
        addrs: Sequence[Any],
        keys: Sequence[Key | None],
        remote_accessible: bool | None,
        *,
        blocks: bool,
    ) -> Cache:
        check_isinstance("remote_accessible", remote_accessible, bool)
        if remote_accessible and self._link_called:
            raise refused(ParamInvalid("remote_accessible is True after link, allowed is to register before linking"))
        typed("addrs", addrs, list)
        if len(addrs) != desc.num_tensors:
            raise refused(
                ParamInvalid(f"addrs has {len(addrs)} addresses, allowed are {desc.num_tensors}, one a tensor")
            )
        addresses, keepers = [], []
        for i, given in enumerate(addrs):
            address, _, keeper = address_of(f"addrs[{i}]", given, measured[1])
            if not address:
                raise refused(ParamInvalid(f"addrs[{i}] is 0, allowed are addresses above 0"))
            addresses.append(address)
            keepers.append(keeper)
        if remote_accessible is None:
            linked = self._link_called or self._engine.links.any_made()
            remote_accessible = desc.placement is Placement.DEVICE and not linked
        info("register %s with %s, remote accessible: %s", desc, keys, remote_accessible)
        cache = self._engine.caches.register(
            self._geometry(desc, measured, blocks=blocks),
            self._engine.config.devices[0],
            addresses,
            keys,
            remote_accessible,
            keepers,
        )
        info("registered cache %d", cache.id)
        return Cache._made(cache.id, desc, addresses, blocks, measured, self._engine)

    def unregister_cache(self, cache_id: int) -> None:
        """Forget a registered cache and its keys; afterwards its memory may be freed.

        Parameters
        ----------
        cache_id : int
            In [-2**63, 2**63). Ids of allocated caches and unknown ones are harmless.

        Raises
        ------
        TypeError, ValueError
            For an id of another type or width.
        LLMException
            LLM_TIMEOUT when a transfer uses the memory for longer than ``sync_kv_timeout``: the cache stays
            registered, and its memory must stay; LLM_ENGINE_FINALIZED.
        """
        self._engine.require_open()
        int64("cache_id", cache_id)
        info("unregister cache %d", cache_id)
        deadline_ns = time.monotonic_ns() + self._engine.config.sync_timeout_ms * 1_000_000
        self._engine.caches.unregister(cache_id, deadline_ns)
        info("unregistered cache %d", cache_id)

    def remap_registered_memory(self, mem_infos: MemInfo | list[MemInfo]) -> None:
        """Renew the mapping of registered device memory after a recovery of the device.

        Parameters
        ----------
        mem_infos : MemInfo or list of MemInfo
            Device memory, with address and size above 0.

        Raises
        ------
        LLMException
            LLM_PARAM_INVALID for anything else, LLM_NOT_YET_LINK without a link, LLM_ENGINE_FINALIZED.

        Notes
        -----
        Host memory that stands for a device's never needs it, so the simulator only checks the call.
        """
        self._engine.require_open()
        infos = mem_infos if isinstance(mem_infos, list) else [mem_infos]
        for info_ in infos:
            if not isinstance(info_, MemInfo):
                raise refused(ParamInvalid(f"mem_infos has a {type(info_).__name__}, allowed are MemInfo"))
            if info_.mem_type is not Memtype.MEM_TYPE_DEVICE or info_.addr <= 0 or info_.size <= 0:
                raise refused(
                    ParamInvalid(f"mem_infos has {info_}, allowed is device memory with address and size above 0")
                )
        if not infos:
            raise refused(ParamInvalid("mem_infos is empty, allowed are one MemInfo and more"))
        self._engine.remap([(info_.addr, info_.size) for info_ in infos])

    # ------------------------------------------------------------------ pulls

    @staticmethod
    def check_cache_key(cache_key: CacheKey | CacheKeyByIdAndIndex | BlocksCacheKey) -> None:
        """Check that a value is one of the three kinds of keys; TypeError otherwise."""
        check_isinstance("cache_key", cache_key, [CacheKey, CacheKeyByIdAndIndex, BlocksCacheKey], allow_none=False)

    def pull_cache(
        self,
        cache_key: CacheKey | CacheKeyByIdAndIndex,
        cache: Cache,
        batch_index: int = 0,
        size: int = -1,
        **kwargs: Any,
    ) -> None:
        """Pull one batch slot, or its beginning, from a peer.

        Parameters
        ----------
        cache_key : CacheKey or CacheKeyByIdAndIndex
            The source; in remote-accessible mode by id only.
        cache : Cache
            The destination: a contiguous cache of this manager.
        batch_index : int, default 0
            Destination batch slot.
        size : int, default -1
            Bytes per tensor, above 0; -1 means a destination slot.
        src_layer_range, dst_layer_range : range, optional
            Layers of source and destination, with step 1; all by default. They must select equally many tensors.
        tensor_num_per_layer : int, default 2
            Consecutive tensors that make a layer, in [1, number of tensors]; with a layer range it must divide the
            destination's number of tensors, unless it is 2.

        Raises
        ------
        TypeError, ValueError
            For arguments of another type or width.
        LLMException
            LLM_PARAM_INVALID (also a ValueError) for what does not fit, the own cluster id, a blocks cache on either
            side, or placements that do not go together; LLM_FEATURE_NOT_ENABLED from HOST to HOST;
            LLM_KV_CACHE_NOT_EXIST; LLM_NOT_YET_LINK; LLM_TIMEOUT after ``sync_kv_timeout``: the destination may be
            partly written, and the cluster must be linked again; LLM_ENGINE_FINALIZED.

        Notes
        -----
        A pull by request key that has fetched all tensors of an allocated source releases the key, except in
        remote-accessible mode.
        """
        self._engine.require_open()
        allowed = [CacheKeyByIdAndIndex] if self._remote_accessible else [CacheKey, CacheKeyByIdAndIndex]
        check_isinstance("cache_key", cache_key, allowed, allow_none=False)
        self._check_form("cache", cache, blocks=False)
        int64("size", size)
        batch_index = uint32("batch_index", batch_index)
        size = check_size(size)
        key, slot = self._pulled_key(cache_key)
        layers = self._check_layers("pull_cache", cache, kwargs)
        self._refuse_self(cache_key._cluster_id)
        verbose = self._logger.isEnabledFor(logging.INFO)
        if verbose:
            info("pull_cache %s into %s, slot %d, size %d, %s", cache_key, cache, batch_index, size, kwargs)
        self._engine.transfers.pull_slot(
            cache_key._cluster_id,
            key,
            slot,
            self._own_id("cache", cache),
            batch_index,
            size,
            None,
            None,
            layers,
        )
        if verbose:
            info("pull_cache %s done", cache_key)

    def pull_blocks(
        self,
        src_cache_key: CacheKey | CacheKeyByIdAndIndex | BlocksCacheKey,
        dst_cache: Cache,
        src_blocks: Sequence[int] = (),
        dst_blocks: Sequence[int] = (),
        **kwargs: Any,
    ) -> None:
        """Pull blocks of a peer's paged cache, or one of its batch slots cut into blocks.

        Parameters
        ----------
        src_cache_key : BlocksCacheKey, CacheKey or CacheKeyByIdAndIndex
            A paged source, or a batch slot of a contiguous one.
        dst_cache : Cache
            The destination: a paged cache of this manager.
        src_blocks : list of int, default ()
            Source blocks for a BlocksCacheKey, empty for the other keys.
        dst_blocks : list of int
            Destination blocks: paired with `src_blocks` one by one, or filled with the slot's bytes one after the
            other.
        src_layer_range, dst_layer_range, tensor_num_per_layer
            As for `pull_cache`.

        Raises
        ------
        TypeError, ValueError
            For arguments of another type or width, bool and float among the indices, or a negative index.
        LLMException
            As for `pull_cache`; LLM_PARAM_INVALID also for empty or unequal lists, indices out of range, blocks of
            unequal size, more chunks than the slot has.
        """
        self._engine.require_open()
        self.check_cache_key(src_cache_key)
        self._check_form("dst_cache", dst_cache, blocks=True)
        by_blocks = isinstance(src_cache_key, BlocksCacheKey)
        if by_blocks:
            source, destination = self._check_block_lists("src_blocks", src_blocks, "dst_blocks", dst_blocks)
        else:
            source = self._check_blocks("src_blocks", src_blocks)
            destination = self._check_blocks("dst_blocks", dst_blocks)
            if len(source) or not len(destination):
                raise refused(
                    ParamInvalid(
                        f"src_blocks has {len(source)} and dst_blocks {len(destination)} indices; allowed with a "
                        f"{type(src_cache_key).__name__} are no source and at least one destination"
                    )
                )
        layers = self._check_layers("pull_blocks", dst_cache, kwargs)
        self._refuse_self(src_cache_key._cluster_id)
        verbose = self._logger.isEnabledFor(logging.INFO)
        if verbose:
            info("pull_blocks %s into %s, %d blocks, %s", src_cache_key, dst_cache, len(destination), kwargs)
        cache_id = self._own_id("dst_cache", dst_cache)
        if isinstance(src_cache_key, BlocksCacheKey):
            self._engine.transfers.pull_blocks(
                src_cache_key._cluster_id,
                self._blocks_key(src_cache_key),
                cache_id,
                source,
                destination,
                layers,
            )
        else:
            key, slot = self._pulled_key(src_cache_key)
            self._engine.transfers.pull_slot_into_blocks(
                src_cache_key._cluster_id,
                key,
                slot,
                cache_id,
                destination,
                layers,
            )
        if verbose:
            info("pull_blocks %s done", src_cache_key)

    # ------------------------------------------------------------------ pushes

    def push_cache(
        self,
        dst_cache_key: CacheKeyByIdAndIndex,
        src_cache: Cache,
        src_batch_index: int = 0,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        size: int = -1,
        tensor_num_per_layer: int = 2,
    ) -> None:
        """Push one batch slot into a peer's cache.

        Parameters
        ----------
        dst_cache_key : CacheKeyByIdAndIndex
            The destination: a contiguous cache of the peer, and its batch slot.
        src_cache : Cache
            A contiguous cache of this manager.
        src_batch_index : int, default 0
            Source batch slot.
        src_layer_range, dst_layer_range : range, optional
            Layers with step 1; by default all of the source. They must be equally long.
        size : int, default -1
            Only -1, a whole slot.
        tensor_num_per_layer : int, default 2
            Consecutive tensors that make a layer; it must divide the source's number of tensors.

        Raises
        ------
        TypeError, ValueError
            For arguments of another type or width.
        LLMException
            LLM_PARAM_INVALID (also a ValueError) without ``enable_remote_cache_accessible`` and for what does not fit;
            LLM_KV_CACHE_NOT_EXIST; LLM_NOT_YET_LINK; LLM_TIMEOUT; LLM_ENGINE_FINALIZED. Layers before the first that
            the destination lacks are written all the same.
        """
        self._engine.require_open()
        self._require_remote_access("push_cache")
        typed("dst_cache_key", dst_cache_key, CacheKeyByIdAndIndex)
        self._check_form("src_cache", src_cache, blocks=False)
        uint32("src_batch_index", src_batch_index)
        if int64("size", size) != -1:
            raise refused(ParamInvalid(f"size is {size}, allowed is -1"))
        layers = self._pushed_layers(src_cache, src_layer_range, dst_layer_range, tensor_num_per_layer)
        key, slot = self._pulled_key(dst_cache_key)
        info("push_cache %s slot %d to %s, layers %s", src_cache, src_batch_index, dst_cache_key, layers)
        self._engine.transfers.push_slot(
            dst_cache_key.cluster_id,
            key,
            slot,
            self._own_id("src_cache", src_cache),
            src_batch_index,
            *layers,
        )
        info("push_cache to %s done", dst_cache_key)

    def push_blocks(
        self,
        dst_cache_key: BlocksCacheKey,
        src_cache: Cache,
        src_blocks: Sequence[int] = (),
        dst_blocks: Sequence[int] = (),
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        tensor_num_per_layer: int = 2,
    ) -> None:
        """Push blocks into a peer's paged cache.

        Parameters
        ----------
        dst_cache_key : BlocksCacheKey
            The destination.
        src_cache : Cache
            A paged cache of this manager.
        src_blocks, dst_blocks : list of int
            Source and destination blocks, paired one by one.
        src_layer_range, dst_layer_range, tensor_num_per_layer
            As for `push_cache`.

        Raises
        ------
        TypeError, ValueError, LLMException
            As for `push_cache`, and for block lists as for `pull_blocks`.
        """
        self._engine.require_open()
        self._require_remote_access("push_blocks")
        typed("dst_cache_key", dst_cache_key, BlocksCacheKey)
        self._check_form("src_cache", src_cache, blocks=True)
        source, destination = self._check_block_lists("src_blocks", src_blocks, "dst_blocks", dst_blocks)
        layers = self._pushed_layers(src_cache, src_layer_range, dst_layer_range, tensor_num_per_layer)
        info("push_blocks %s to %s, %d blocks, layers %s", src_cache, dst_cache_key, len(source), layers)
        self._engine.transfers.push_blocks(
            dst_cache_key.cluster_id,
            self._blocks_key(dst_cache_key),
            self._own_id("src_cache", src_cache),
            source,
            destination,
            *layers,
        )
        info("push_blocks to %s done", dst_cache_key)

    def _require_remote_access(self, name: str) -> None:
        if not self._remote_accessible:
            raise refused(ParamInvalid(f'{name} needs llm.EnableRemoteCacheAccessible "1"'))

    @staticmethod
    def _pushed_layers(
        cache: Cache, source: range | None, destination: range | None, per_layer: int
    ) -> tuple[range, range, int]:
        n = check_tensor_num_per_layer(per_layer)
        total = cache.cache_desc.num_tensors
        sources = check_layer_range("src_layer_range", source) or range(total // n)
        destinations = check_layer_range("dst_layer_range", destination) or range(total // n)
        if len(sources) != len(destinations):
            raise refused(
                ParamInvalid(
                    f"src_layer_range is {sources} and dst_layer_range {destinations}; they must be equally long"
                )
            )
        if sources and total % n:
            raise refused(
                ParamInvalid(f"tensor_num_per_layer is {n}, which does not divide the cache's {total} tensors")
            )
        if sources.stop * n > total:
            # Said before the first layer is written, which a later failure would leave written.
            raise refused(
                ParamInvalid(f"src_layer_range is {sources}, the cache has {total // n} layers of {n} tensors")
            )
        return sources, destinations, n

    # ------------------------------------------------------------------ local copies

    def copy_cache(
        self,
        dst: Cache,
        src: Cache,
        dst_batch_index: int = 0,
        src_batch_index: int = 0,
        offset: int = 0,
        size: int = -1,
        req_id: int | None = None,
    ) -> None:
        """Copy one batch slot, or a part of it, from cache to cache in this engine.

        Parameters
        ----------
        dst, src : Cache
            Contiguous caches of this manager, of any placement, with equally many tensors.
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
            LLM_PARAM_INVALID (also a ValueError) for what does not fit; LLM_KV_CACHE_NOT_EXIST; LLM_FAILED when an
            address has no memory; LLM_ENGINE_FINALIZED.
        """
        self._engine.require_open()
        self._check_form("dst", dst, blocks=False)
        self._check_form("src", src, blocks=False)
        if req_id is not None:
            uint64("req_id", req_id)
        destination, source = self._own_id("dst", dst), self._own_id("src", src)
        self._copy_cache(destination, source, dst_batch_index, src_batch_index, offset, size, req_id, plain_caches=True)

    def copy_blocks(self, cache: Cache, copy_block_info: dict[int, list[int]]) -> None:
        """Copy blocks inside a paged cache.

        Parameters
        ----------
        cache : Cache
            A paged cache of this manager.
        copy_block_info : dict of int to list of int
            From each source block to its destinations, in order: a later copy sees what an earlier one wrote.

        Raises
        ------
        TypeError, ValueError
            For arguments of another type or width, or a negative index.
        LLMException
            LLM_PARAM_INVALID for an index at or above the number of blocks, or no blocks cache; LLM_KV_CACHE_NOT_EXIST;
            LLM_ENGINE_FINALIZED. Nothing is written then.
        """
        self._engine.require_open()
        self._check_form("cache", cache, blocks=True)
        pairs = self._check_copy_info(copy_block_info)
        info("copy_blocks in cache %d, %d pairs", cache.cache_id, len(pairs))
        self._engine.copies.copy_blocks(self._own_id("cache", cache), pairs, need_blocks=True)
        info("copy_blocks in cache %d done", cache.cache_id)

    def swap_blocks(self, src_cache: Cache, dst_cache: Cache, src_to_dst: dict[int, int]) -> None:
        """Copy blocks between a HOST and a DEVICE paged cache, in either direction.

        Parameters
        ----------
        src_cache, dst_cache : Cache
            Paged caches, of this manager or from `Cache.create_cpu_cache`; blocks and tensors alike.
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
        """
        self._engine.require_open()
        for name, cache in (("src_cache", src_cache), ("dst_cache", dst_cache)):
            check_isinstance(name, cache, Cache)
            if not cache.is_blocks_cache:
                raise refused(ParamInvalid(f"{name} is not a blocks cache, which swap_blocks needs"))
        self._swap_blocks(
            src_cache,
            dst_cache,
            lambda cache: [cache.tensor_addrs] if cache.tensor_addrs else [],
            [cache.cache_id for cache in (src_cache, dst_cache) if cache._engine is self._engine],
            src_to_dst,
        )

    # ------------------------------------------------------------------ asynchronous transfers

    def transfer_cache_async(
        self,
        src_cache: Cache,
        layer_synchronizer: LayerSynchronizer,
        transfer_configs: Sequence[TransferConfig] | Sequence[TransferWithCacheKeyConfig],
        src_block_indices: Sequence[int] | None = None,
        dst_block_indices: Sequence[int] | None = None,
        dst_block_memory_size: int | None = None,
    ) -> CacheTask:
        """Send a cache to peers layer by layer, as each layer becomes ready.

        Parameters
        ----------
        src_cache : Cache
            Of this manager, on DEVICE, with an even number of tensors: two make a layer.
        layer_synchronizer : LayerSynchronizer
            Its ``synchronize_layer`` returns when a layer may be sent. It runs in a thread of the task.
        transfer_configs : list or tuple
            Destinations: TransferWithCacheKeyConfig in remote-accessible mode, else TransferConfig.
        src_block_indices, dst_block_indices : list of int, optional
            Send these blocks to these; with destination blocks alone a batch slot is cut into blocks of
            `dst_block_memory_size` bytes; with neither, one batch slot is sent.
        dst_block_memory_size : int, optional
            Bytes of a destination block; with source blocks those of a source block, or 0.

        Returns
        -------
        CacheTask
            Gives one result for each configuration.

        Raises
        ------
        TypeError, ValueError
            For arguments of another type or width.
        LLMException
            LLM_PARAM_INVALID (also a ValueError) for a HOST source or what does not fit; LLM_ENGINE_FINALIZED.

        Notes
        -----
        Results: LLM_SUCCESS; LLM_PARAM_INVALID when a layer never became ready, or an address is not inside one tensor
        of the peer; LLM_FAILED when the synchronizer raised; LLM_KV_CACHE_NOT_EXIST, LLM_NOT_YET_LINK, LLM_TIMEOUT. The
        first failure ends the task.
        """
        self._engine.require_open()
        typed("src_cache", src_cache, Cache)
        if src_cache.cache_desc.placement is not Placement.DEVICE:
            raise refused(ParamInvalid(f"src_cache is on {src_cache.cache_desc.placement}, allowed is DEVICE"))
        return self._transfer_cache_async(
            self._own_id("src_cache", src_cache),
            src_cache.cache_desc,
            layer_synchronizer,
            transfer_configs,
            src_block_indices,
            dst_block_indices,
            dst_block_memory_size,
            by_key=self._remote_accessible,
            cache_to_blocks=True,
        )

    # ------------------------------------------------------------------ checks

    @staticmethod
    def _check_form(name: str, cache: Cache, *, blocks: bool) -> None:
        typed(name, cache, Cache)
        if cache.is_blocks_cache is not blocks:
            kind = "a blocks cache" if blocks else "a cache that is not a blocks cache"
            raise refused(ParamInvalid(f"{name} is {cache}, allowed is {kind}"))

    def _own_id(self, name: str, cache: Cache) -> int:
        """Give a cache's id in this engine; refuse caches of another engine, which may have the same id."""
        if cache._engine is not self._engine:
            raise self._foreign(name, cache.cache_id)
        return cache.cache_id

    def _refuse_self(self, cluster_id: int) -> None:
        if cluster_id == self._engine.config.cluster_id:
            raise refused(ParamInvalid(f"cluster_id is {cluster_id}, the own one; allowed is to pull from others"))
