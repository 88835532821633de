"""`KvCacheManager`: caches and pulls of KvCacheManager mode. Checks arguments and calls the engine."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llm_datadist._checks import (
    UINT64_MAX,
    check_inner,
    check_isinstance,
    check_layer_range,
    check_offset,
    check_pulled_layers,
    check_size,
    int32,
    int64,
    refused,
    typed,
    uint32,
)
from llm_datadist._log import get_logger, info
from llm_datadist.cache_types import BlocksCacheKey, CacheDesc, CacheKey, CacheKeyByIdAndIndex, KvCache, Placement
from llm_datadist.configs import LLMRole
from llm_datadist.status import LLMException, LLMStatusCode, ParamInvalid
from llm_datadist.tensor import Tensor, TensorDesc

if TYPE_CHECKING:
    from llm_datadist._engine.directory import Key
    from llm_datadist._engine.engine import Engine
    from llm_datadist._engine.layout import Layers

__all__ = ["KvCacheManager"]

MAX_DIMENSIONS = 31
LAYER_ARGUMENTS = frozenset({"src_layer_range", "dst_layer_range", "tensor_num_per_layer"})
OFFSET_ARGUMENTS = frozenset({"src_cache_offset", "dst_cache_offset"})


class KvCacheManager:
    """Caches of one engine, and pulls into them. `LLMDataDist.kv_cache_manager` gives it.

    Notes
    -----
    Calls must not run at the same time as each other; two operations on one link are refused with LLM_LINK_BUSY. After
    `LLMDataDist.finalize` every method but `is_initialized` raises LLM_ENGINE_FINALIZED.
    """

    def __init__(self, engine: Engine, role: LLMRole) -> None:
        # The engine needs the compiled kernels, which importing this module must not.
        from llm_datadist._engine.directory import BLOCKS, CACHE, PREFIX, REQUEST, Key
        from llm_datadist._engine.layout import Layers
        from llm_datadist._kernels.runs import indices

        self._engine = engine
        self._role = role
        self._logger = get_logger()
        self._kinds = (CACHE, REQUEST, PREFIX, BLOCKS)
        self._key, self._layers, self._indices = Key, Layers, indices
        self._warned: set[str] = set()
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
        self._check_desc(cache_desc)
        check_isinstance("cache_keys", cache_keys, [list, tuple], allow_none=False)
        check_inner("cache_keys", cache_keys, CacheKey)
        if cache_keys and self._role is not LLMRole.PROMPT:
            raise refused(ParamInvalid(f"cache_keys are for role PROMPT, this cluster's role is {self._role}"))
        slots = cache_desc.shape[0]
        if len(cache_keys) > slots:
            raise refused(
                ParamInvalid(f"cache_keys has {len(cache_keys)} keys, allowed are at most {slots}, one a batch slot")
            )
        return self._allocate(cache_desc, [self._owned_key(key) for key in cache_keys], blocks=False)

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
        self._check_desc(cache_desc)
        check_isinstance("blocks_cache_key", blocks_cache_key, BlocksCacheKey)
        if blocks_cache_key is None:
            return self._allocate(cache_desc, [], blocks=True)
        if self._role is LLMRole.DECODER:
            raise refused(ParamInvalid("blocks_cache_key is not for role DECODER, which is this cluster's role"))
        return self._allocate(cache_desc, [self._blocks_key(blocks_cache_key)], blocks=True)

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
            Tensor._over(view, addresses[tensor_index], TensorDesc(desc.data_type, list(desc.shape)))
            for addresses in local.addresses
        ]
        info("get_cache_tensors of cache %d done", cache.cache_id)
        return tensors

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
        self._require_role("pull_cache", LLMRole.DECODER)
        check_isinstance("cache_key", cache_key, [CacheKey, CacheKeyByIdAndIndex], allow_none=False)
        self._device_cache("kv_cache", kv_cache)
        int64("size", size)
        batch_index = uint32("batch_index", batch_index)
        size = check_size(size)
        source_offset = check_offset("src_cache_offset", kwargs.get("src_cache_offset"))
        destination_offset = check_offset("dst_cache_offset", kwargs.get("dst_cache_offset"))
        key, slot = self._pulled_key(cache_key)
        layers = self._check_layers(kv_cache, kwargs)
        self._warn_unknown("pull_cache", kwargs, LAYER_ARGUMENTS | OFFSET_ARGUMENTS)
        verbose = self._logger.isEnabledFor(logging.INFO)
        if verbose:
            info("pull_cache %s into %s, slot %d, size %d, %s", cache_key, kv_cache, batch_index, size, kwargs)
        try:
            self._engine.transfers.pull_slot(
                cache_key.cluster_id,
                key,
                slot,
                self._own_id("kv_cache", kv_cache),
                batch_index,
                size,
                source_offset,
                destination_offset,
                layers,
            )
        except ParamInvalid as e:
            refused(e)
            raise
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
        self._require_role("pull_blocks", LLMRole.DECODER)
        typed("prompt_cache_key", prompt_cache_key, BlocksCacheKey)
        self._device_cache("decoder_kv_cache", decoder_kv_cache)
        try:
            source = self._indices(prompt_blocks, "prompt_blocks")
            destination = self._indices(decoder_blocks, "decoder_blocks")
        except (TypeError, ValueError) as e:
            refused(e)
            raise
        if len(source) != len(destination) or not len(source):
            raise refused(
                ParamInvalid(
                    f"prompt_blocks has {len(source)} and decoder_blocks {len(destination)} indices; "
                    "allowed are equal lengths above 0"
                )
            )
        layers = self._check_layers(decoder_kv_cache, kwargs)
        if kwargs:
            self._warn_unknown("pull_blocks", kwargs, LAYER_ARGUMENTS)
        verbose = self._logger.isEnabledFor(logging.INFO)
        if verbose:
            info("pull_blocks %s into %s, %d blocks, %s", prompt_cache_key, decoder_kv_cache, len(source), kwargs)
        try:
            self._engine.transfers.pull_blocks(
                prompt_cache_key.cluster_id,
                self._blocks_key(prompt_cache_key),
                self._own_id("decoder_kv_cache", decoder_kv_cache),
                source,
                destination,
                layers,
            )
        except ParamInvalid as e:
            refused(e)
            raise
        if verbose:
            info("pull_blocks %s done", prompt_cache_key)

    # ------------------------------------------------------------------ checks

    def _require_role(self, name: str, role: LLMRole) -> None:
        if self._role is not role:
            raise refused(ParamInvalid(f"{name} is for role {role}, this cluster's role is {self._role}"))

    @staticmethod
    def _device_cache(name: str, cache: KvCache) -> None:
        typed(name, cache, KvCache)
        if cache.cache_desc.placement is not Placement.DEVICE:
            raise refused(ParamInvalid(f"{name} is on {cache.cache_desc.placement}, allowed is DEVICE"))

    def _own_id(self, name: str, cache: KvCache) -> int:
        """Give a cache's id in this engine; refuse caches of another engine, which may have the same id."""
        if cache._collected is not self._dropped:
            raise LLMException(
                f"{name} is cache {cache.cache_id} of another engine, or on host memory",
                status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
            )
        return cache.cache_id

    @staticmethod
    def _check_desc(desc: CacheDesc) -> None:
        check_isinstance("cache_desc", desc, CacheDesc)
        if desc.num_tensors <= 0:
            raise refused(ParamInvalid("num_tensors is 0, allowed are 1 and more"))
        if desc.placement is not Placement.DEVICE:
            raise refused(ParamInvalid(f"placement is {desc.placement}, allowed is DEVICE"))
        if not 1 <= len(desc.shape) <= MAX_DIMENSIONS:
            raise refused(ParamInvalid(f"shape has {len(desc.shape)} dimensions, allowed are 1 to {MAX_DIMENSIONS}"))

    def _allocate(self, desc: CacheDesc, keys: list[Key | None], *, blocks: bool) -> KvCache:
        from llm_datadist._engine.caches import Geometry

        info("allocate %s with %s", desc, keys)
        geometry = Geometry(desc.num_tensors, desc.shape[0], desc.size, blocks=blocks)
        cache = self._engine.caches.allocate(geometry, keys)
        info("allocated cache %d", cache.id)
        addresses = [list(device) for device in cache.addresses]
        return KvCache._made(cache.id, desc, addresses, self._dropped)

    def _owned_key(self, key: CacheKey) -> Key | None:
        """Give the key that an owner binds, or None for padding."""
        _, request, prefix, _ = self._kinds
        if key.prefix_id == UINT64_MAX:
            return None if key.req_id == UINT64_MAX else self._key(request, key.req_id, key.model_id)
        if key.req_id != UINT64_MAX:
            raise refused(ParamInvalid(f"{key} has a req_id and a prefix_id, allowed is one of them"))
        return self._key(prefix, key.prefix_id, key.model_id)

    def _pulled_key(self, key: CacheKey | CacheKeyByIdAndIndex) -> tuple[Key, int]:
        """Give the key that a pull looks for, and the slot that it names if it goes by cache id."""
        if isinstance(key, CacheKeyByIdAndIndex):
            # No cache has an id below 1, so 0 stands for what can't exist.
            return self._key(self._kinds[0], max(key.cache_id, 0), 0), key.batch_index
        owned = self._owned_key(key)
        if owned is None:
            raise refused(ParamInvalid(f"{key} has neither a req_id nor a prefix_id, allowed is one of them"))
        return owned, 0

    def _blocks_key(self, key: BlocksCacheKey) -> Key:
        return self._key(self._kinds[3], UINT64_MAX, key.model_id)

    def _check_layers(self, cache: KvCache, kwargs: dict[str, Any]) -> Layers:
        if not kwargs:
            return self._layers()
        source = kwargs.get("src_layer_range")
        destination = kwargs.get("dst_layer_range")
        ranged = source is not None or destination is not None
        count = check_pulled_layers(kwargs.get("tensor_num_per_layer"), cache.cache_desc.num_tensors, ranged)
        return self._layers(
            check_layer_range("src_layer_range", source), check_layer_range("dst_layer_range", destination), count
        )

    def _warn_unknown(self, name: str, kwargs: dict[str, Any], known: frozenset[str]) -> None:
        for unknown in kwargs.keys() - known - self._warned:
            self._warned.add(unknown)
            warnings.warn(f"{name} ignores the unknown argument {unknown!r}", RuntimeWarning, stacklevel=3)
