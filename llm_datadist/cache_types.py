"""Public types for caches, their keys, and asynchronous transfers. Each checks its arguments when it is made."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from llm_datadist._buffers import address_of
from llm_datadist._checks import (
    UINT64_MAX,
    any_integer,
    check_isinstance,
    check_layer_range,
    int32,
    int64,
    integer_within,
    refused,
    typed,
    uint32,
    uint64,
    uint64s,
)
from llm_datadist._enums import NamedIntEnum
from llm_datadist.data_type import ELEMENT_BYTES, DataType
from llm_datadist.status import LLMStatusCode, ParamInvalid

__all__ = [
    "BlocksCacheKey",
    "Cache",
    "CacheDesc",
    "CacheKey",
    "CacheKeyByIdAndIndex",
    "CacheTask",
    "KvCache",
    "LayerSynchronizer",
    "MemInfo",
    "Memtype",
    "Placement",
    "RegisterMemStatus",
    "TransferConfig",
    "TransferWithCacheKeyConfig",
    "int_to_mem_status_dict",
]

#: Size limit of one tensor, in bytes: what fits a signed 64-bit integer.
_MAX_TENSOR_BYTES = 2**63 - 1


class Placement(NamedIntEnum):
    """Where the memory of a cache is."""

    HOST = 0
    DEVICE = 1


class Memtype(enum.Enum):
    """Kind of memory in a `MemInfo`; numbered the other way round than `Placement`."""

    MEM_TYPE_DEVICE = 0
    MEM_TYPE_HOST = 1


class RegisterMemStatus(enum.Enum):
    """How far a rank-table link has come."""

    OK = 0
    PREPARING = 1
    FAILED = 2


class _MemStatusByInt(dict[int, RegisterMemStatus]):
    def __missing__(self, code: int) -> RegisterMemStatus:
        return RegisterMemStatus.FAILED


#: The status with a number; FAILED for a number that is none.
int_to_mem_status_dict: dict[int, RegisterMemStatus] = _MemStatusByInt({s.value: s for s in RegisterMemStatus})


class CacheDesc:
    """Description of a cache: a number of tensors of equal shape.

    Parameters
    ----------
    num_tensors : int
        Number of tensors, in [0, 2**32). A cache needs at least one.
    shape : list of int or tuple of int
        Shape of each tensor, each dimension a signed 64-bit integer. Dimension 0 counts batch slots or blocks. The
        object itself is kept, not a copy.
    data_type : DataType
        Type of the elements.
    placement : Placement, default Placement.DEVICE
        Where the memory is.
    batch_dim_index : int, default 0
        Index of the batch dimension, in [0, len(shape)). Does not change which bytes move.
    seq_len_dim_index : int, default -1
        Index of the sequence dimension, in [0, len(shape)), or -1 for none. Does not change which bytes move.
    kv_tensor_format : str, optional
        A name for the format. Does not change which bytes move.

    Raises
    ------
    TypeError
        When an argument has another type.
    ValueError
        When `num_tensors`, a dimension or `seq_len_dim_index` does not fit its width.
    LLMException
        LLM_PARAM_INVALID when a dimension index is out of range or the shape is empty.
    """

    def __init__(
        self,
        num_tensors: int,
        shape: Sequence[int],
        data_type: DataType,
        placement: Placement = Placement.DEVICE,
        batch_dim_index: int = 0,
        seq_len_dim_index: int = -1,
        kv_tensor_format: str | None = None,
    ) -> None:
        self._num_tensors = uint32("num_tensors", num_tensors)
        check_isinstance("shape", shape, [list, tuple], allow_none=False)
        for position, dimension in enumerate(shape):
            int64(f"shape[{position}]", dimension)
        self._shape = shape
        self._data_type = typed("data_type", data_type, DataType)
        self._placement = typed("placement", placement, Placement)
        any_integer("batch_dim_index", batch_dim_index)
        int32("seq_len_dim_index", seq_len_dim_index)
        self._kv_tensor_format = check_isinstance("kv_tensor_format", kv_tensor_format, str)
        if not shape:
            raise refused(ParamInvalid("shape is empty, allowed are 1 or more dimensions"))
        self._batch_dim = integer_within("batch_dim_index", batch_dim_index, 0, len(shape) - 1)
        self._seq_len_dim_index = integer_within("seq_len_dim_index", seq_len_dim_index, -1, len(shape) - 1)
        self._batch_size: int = shape[batch_dim_index]
        self._size: int | None = None

    @property
    def num_tensors(self) -> int:
        """Number of tensors."""
        return self._num_tensors

    @property
    def shape(self) -> Sequence[int]:
        """Shape of each tensor: the object given at construction."""
        return self._shape

    @property
    def data_type(self) -> DataType:
        """Type of the elements."""
        return self._data_type

    @property
    def placement(self) -> Placement:
        """Where the memory is."""
        return self._placement

    @property
    def batch_dim(self) -> int:
        """Index of the batch dimension."""
        return self._batch_dim

    @property
    def batch_size(self) -> int:
        """Length of the batch dimension at construction; `update_dim` does not change it."""
        return self._batch_size

    @property
    def seq_len_dim_index(self) -> int:
        """Index of the sequence dimension, -1 for none."""
        return self._seq_len_dim_index

    @property
    def kv_tensor_format(self) -> str | None:
        """Name of the format."""
        return self._kv_tensor_format

    @property
    def size(self) -> int:
        """Bytes of one tensor, computed once.

        Raises
        ------
        LLMException
            LLM_PARAM_INVALID when a dimension is 0 or negative, or the product is 2**63 or more.
        """
        if self._size is None:
            _, self._size = self._measured()
        return self._size

    def _measured(self) -> tuple[tuple[int, ...], int]:
        """Give the shape as it is now, and the bytes of a tensor of it.

        A cache is made of both together: the user may change the shape in place at any time.
        """
        shape = tuple(self._shape)
        nbytes = ELEMENT_BYTES[self._data_type]
        for position, dimension in enumerate(shape):
            if int64(f"shape[{position}]", dimension) <= 0:
                raise refused(ParamInvalid(f"shape[{position}] is {dimension}, allowed is anything above 0"))
            nbytes *= dimension
        if nbytes > _MAX_TENSOR_BYTES:
            raise refused(
                ParamInvalid(f"a tensor of shape {shape} has {nbytes} bytes, allowed are {_MAX_TENSOR_BYTES}")
            )
        return shape, nbytes

    def update_dim(self, dim_index: int, dim_value: int) -> None:
        """Change one dimension, in the shape object given at construction.

        Parameters
        ----------
        dim_index : int
            Index of the dimension.
        dim_value : int
            Its new length, a signed 64-bit integer.

        Raises
        ------
        TypeError
            When the shape is a tuple, or an argument is not an integer.
        IndexError
            When there is no such dimension.
        ValueError
            When the length does not fit.
        """
        any_integer("dim_index", dim_index)
        int64("dim_value", dim_value)
        typed("shape", self._shape, list)[dim_index] = dim_value
        self._size = None

    def __repr__(self) -> str:
        return (
            f"CacheDesc(num_tensors={self._num_tensors}, shape={self._shape}, data_type={self._data_type}, "
            f"placement={self._placement}, batch_dim_index={self._batch_dim}, "
            f"seq_len_dim_index={self._seq_len_dim_index},kv_tensor_format={self._kv_tensor_format})"
        )


#: Older name of the keyword ``cluster_id`` in keys.
_ALIAS = "prompt_cluster_id"


def _key_fields(
    kind: str, defaults: dict[str, int | None], args: tuple[int, ...], kwargs: dict[str, int]
) -> dict[str, int]:
    """Bring a key's arguments to its fields; a field without default is required."""
    if len(args) + len(kwargs) > len(defaults):
        raise refused(ParamInvalid(f"{kind} takes at most {len(defaults)} arguments, got {len(args) + len(kwargs)}"))
    given = dict(zip(defaults, args, strict=False))
    # All problems go into one text: a misspelt keyword is often a missing one too.
    problems = []
    for name, value in kwargs.items():
        if name in given:
            problems.append(f"{name} is given twice")
        elif name in defaults or name == _ALIAS:
            given[name] = value
        else:
            problems.append(f"Unsupported keyword {name}, allowed are {', '.join(defaults)}")
    if _ALIAS in given:
        given.setdefault("cluster_id", given.pop(_ALIAS))
    fields = {}
    for name, default in defaults.items():
        if name in given:
            fields[name] = uint64(name, given[name])
        elif default is not None:
            fields[name] = default
        else:
            problems.append(f"{name} is required")
    if problems:
        raise refused(ParamInvalid(f"{kind}: {'; '.join(problems)}"))
    return fields


class CacheKey:
    """Names one batch slot of a cache by request or by prefix.

    Parameters
    ----------
    *args, **kwargs : int
        At most four, by position in this order or by keyword, each in [0, 2**64):

        cluster_id (or its older name prompt_cluster_id)
            The cluster that owns the cache. Only pulls read it.
        req_id
            The request; 2**64 - 1 means none.
        model_id, default 0
            The model. Keys of different models never match.
        prefix_id, default 2**64 - 1
            The prefix; 2**64 - 1 means none.

    Raises
    ------
    TypeError
        When a value is not an integer.
    ValueError
        When a value is out of range.
    LLMException
        LLM_PARAM_INVALID for too many arguments, an unknown keyword, or no ``cluster_id`` or ``req_id``.

    Notes
    -----
    Keys are compared by identity.
    """

    def __init__(self, *args: int, **kwargs: int) -> None:
        fields = _key_fields(
            "CacheKey",
            {"cluster_id": None, "req_id": None, "model_id": 0, "prefix_id": UINT64_MAX},
            args,
            kwargs,
        )
        self._cluster_id = fields["cluster_id"]
        self._req_id = fields["req_id"]
        self._model_id = fields["model_id"]
        self._prefix_id = fields["prefix_id"]

    @property
    def cluster_id(self) -> int:
        """The cluster that owns the cache."""
        return self._cluster_id

    @property
    def prompt_cluster_id(self) -> int:
        """Older name of `cluster_id`."""
        return self._cluster_id

    @property
    def req_id(self) -> int:
        """The request, 2**64 - 1 for none."""
        return self._req_id

    @property
    def model_id(self) -> int:
        """The model."""
        return self._model_id

    @property
    def prefix_id(self) -> int:
        """The prefix, 2**64 - 1 for none."""
        return self._prefix_id

    def __repr__(self) -> str:
        return (
            f"CacheKey(cluster_id={self._cluster_id}, req_id={self._req_id}, "
            f"prefix_id={self._prefix_id}, model_id={self._model_id})"
        )


class BlocksCacheKey:
    """Names a blocks cache.

    Parameters
    ----------
    *args, **kwargs : int
        At most two, by position in this order or by keyword, each in [0, 2**64):

        cluster_id (or its older name prompt_cluster_id)
            The cluster that owns the cache. Only pulls and pushes read it.
        model_id, default 0
            The model; each has at most one blocks cache that can be reached by key.

    Raises
    ------
    TypeError
        When a value is not an integer.
    ValueError
        When a value is out of range.
    LLMException
        LLM_PARAM_INVALID for too many arguments, an unknown keyword, or no ``cluster_id``.

    Notes
    -----
    Keys are compared by identity.
    """

    def __init__(self, *args: int, **kwargs: int) -> None:
        fields = _key_fields("BlocksCacheKey", {"cluster_id": None, "model_id": 0}, args, kwargs)
        self._cluster_id = fields["cluster_id"]
        self._model_id = fields["model_id"]
        self._given_as = "cluster_id" if args or "cluster_id" in kwargs else _ALIAS

    @property
    def cluster_id(self) -> int:
        """The cluster that owns the cache."""
        return self._cluster_id

    @property
    def prompt_cluster_id(self) -> int:
        """Older name of `cluster_id`."""
        return self._cluster_id

    @property
    def model_id(self) -> int:
        """The model."""
        return self._model_id

    def __repr__(self) -> str:
        return f"BlocksCacheKey({self._given_as}={self._cluster_id}, model_id={self._model_id})"


class CacheKeyByIdAndIndex:
    """Names one batch slot of a cache by the cache's id.

    Parameters
    ----------
    cluster_id : int
        The cluster that owns the cache, in [0, 2**64).
    cache_id : int
        Id of the cache there, in [-2**63, 2**63); real ids are above 0.
    batch_index : int, default 0
        The batch slot, in [0, 2**32).

    Raises
    ------
    TypeError
        When a value is not an integer.
    ValueError
        When a value is out of range.

    Notes
    -----
    Keys are compared by identity.
    """

    def __init__(self, cluster_id: int, cache_id: int, batch_index: int = 0) -> None:
        self._cluster_id = uint64("cluster_id", cluster_id)
        self._cache_id = int64("cache_id", cache_id)
        self._batch_index = uint32("batch_index", batch_index)

    @property
    def cluster_id(self) -> int:
        """The cluster that owns the cache."""
        return self._cluster_id

    @property
    def cache_id(self) -> int:
        """Id of the cache."""
        return self._cache_id

    @property
    def batch_index(self) -> int:
        """The batch slot."""
        return self._batch_index

    def __repr__(self) -> str:
        return (
            f"CacheKeyByIdAndIndex(cluster_id={self._cluster_id}, cache_id={self._cache_id}, "
            f"batch_index={self._batch_index})"
        )


def _check_cpu_desc(cache_desc: CacheDesc) -> None:
    check_isinstance("cache_desc", cache_desc, CacheDesc)
    if cache_desc.placement is not Placement.HOST:
        raise refused(ParamInvalid(f"cache_desc.placement is {cache_desc.placement}, allowed is {Placement.HOST}"))


def _cpu_addrs(name: str, addrs: object, desc: CacheDesc, nbytes: int, keepers: list[object]) -> list[int]:
    """Check one device's addresses, and note what keeps their memory."""
    given = typed(name, addrs, list)
    if len(given) != desc.num_tensors:
        raise refused(
            ParamInvalid(f"{name} has {len(given)} addresses, allowed are {desc.num_tensors}, one per tensor")
        )
    addresses = []
    for i, item in enumerate(given):
        address, _, keeper = address_of(f"{name}[{i}]", item, nbytes)
        addresses.append(address)
        keepers.append(keeper)
    return addresses


class KvCache:
    """A cache of a `KvCacheManager`, which makes it; `create_cpu_cache` makes one on the user's host memory.

    Notes
    -----
    A cache that is collected without having been deallocated is deallocated by the next call of its manager.
    """

    _cache_id: int
    _cache_desc: CacheDesc
    _per_device_tensor_addrs: list[list[int]]
    #: Shape, and bytes of a tensor, as the cache was made: the description may change.
    _measured: tuple[tuple[int, ...], int]
    #: Objects that the user gave as memory.
    _keepers: Sequence[object] = ()
    #: Also tells which engine made the cache: ids start again from 1 in each.
    _collected: Callable[[int], None] | None = None
    _held = False

    def __init__(self) -> None:
        raise TypeError("a KvCache is made by KvCacheManager.allocate_cache or KvCache.create_cpu_cache")

    @classmethod
    def _made(
        cls,
        cache_id: int,
        cache_desc: CacheDesc,
        per_device_tensor_addrs: list[list[int]],
        measured: tuple[tuple[int, ...], int],
        collected: Callable[[int], None] | None,
    ) -> KvCache:
        """Make a cache object.

        Parameters
        ----------
        collected : callable or None
            Called with the id if the object dies before `_clear`: in any thread, at any moment, so it may only
            append to a deque.
        """
        cache = cls.__new__(cls)
        cache._cache_id = cache_id
        cache._cache_desc = cache_desc
        cache._per_device_tensor_addrs = per_device_tensor_addrs
        cache._measured = measured
        cache._collected = collected
        cache._held = collected is not None
        return cache

    @classmethod
    def create_cpu_cache(cls, cache_desc: CacheDesc, addrs: list[Any]) -> KvCache:
        """Describe host memory of the user's as a cache, for `swap_blocks`.

        Parameters
        ----------
        cache_desc : CacheDesc
            Its placement is HOST.
        addrs : list of int or list of list of int
            One address per tensor, in [0, 2**64), for one device or for each device. The memory must outlive the
            cache. Objects with the buffer protocol or DLPack (numpy, torch CPU tensors) do too, and are kept alive.

        Returns
        -------
        KvCache
            With id -1; it belongs to no manager.

        Raises
        ------
        TypeError
            When `addrs` is not a list, or an address is neither an integer nor an object with memory.
        ValueError
            When an address does not fit 64 bits.
        LLMException
            LLM_PARAM_INVALID when the placement is not HOST, when `addrs` is empty or mixes addresses and lists,
            when a list's length is not the number of tensors, or when an object is too small or can't be written.
        AttributeError
            When `cache_desc` is None.
        """
        _check_cpu_desc(cache_desc)
        typed("addrs", addrs, list)
        if not addrs:
            raise refused(ParamInvalid("addrs is empty, allowed are one address per tensor, or a list per device"))
        nested = [isinstance(item, list) for item in addrs]
        if any(nested) and not all(nested):
            raise refused(ParamInvalid(f"types in addrs should be consistent, all int or all list, got {addrs}"))
        measured = cache_desc._measured()
        keepers: list[object] = []
        if nested[0]:
            devices = [
                _cpu_addrs(f"addrs[{i}]", item, cache_desc, measured[1], keepers) for i, item in enumerate(addrs)
            ]
        else:
            devices = [_cpu_addrs("addrs", addrs, cache_desc, measured[1], keepers)]
        cache = cls._made(-1, cache_desc, devices, measured, None)
        cache._keepers = keepers
        return cache

    @property
    def cache_id(self) -> int:
        """Id of the cache, -1 if it is on the user's host memory."""
        return self._cache_id

    @property
    def cache_desc(self) -> CacheDesc:
        """The description given at allocation."""
        return self._cache_desc

    @property
    def per_device_tensor_addrs(self) -> list[list[int]]:
        """Addresses: a list per device, an address per tensor. Empty once deallocated."""
        return self._per_device_tensor_addrs

    def _clear(self) -> None:
        self._per_device_tensor_addrs = []
        self._held = False

    def __del__(self) -> None:
        if self._held and self._collected is not None:
            self._collected(self._cache_id)

    def __repr__(self) -> str:
        return f"KvCache(cache_id = {self._cache_id}, num_devices = {len(self._per_device_tensor_addrs)})"


class Cache:
    """A cache of a `CacheManager`, which makes it; `create_cpu_cache` makes one on the user's host memory."""

    _cache_id: int
    _cache_desc: CacheDesc
    _tensor_addrs: list[int]
    _is_blocks_cache: bool
    #: Shape, and bytes of a tensor, as the cache was made: the description may change.
    _measured: tuple[tuple[int, ...], int]
    #: Objects that the user gave as memory.
    _keepers: Sequence[object] = ()
    #: The engine that made the cache: ids start again from 1 in each.
    _engine: object

    def __init__(self) -> None:
        raise TypeError("a Cache is made by CacheManager.allocate_cache and its like, or by Cache.create_cpu_cache")

    @classmethod
    def _made(
        cls,
        cache_id: int,
        cache_desc: CacheDesc,
        tensor_addrs: list[int],
        is_blocks_cache: bool,
        measured: tuple[tuple[int, ...], int],
        engine: object = None,
    ) -> Cache:
        cache = cls.__new__(cls)
        cache._measured = measured
        cache._cache_id = cache_id
        cache._engine = engine
        cache._cache_desc = cache_desc
        cache._tensor_addrs = tensor_addrs
        cache._is_blocks_cache = is_blocks_cache
        return cache

    @classmethod
    def create_cpu_cache(cls, cache_desc: CacheDesc, addrs: list[Any]) -> Cache:
        """Describe host memory of the user's as a blocks cache, for `swap_blocks`.

        Parameters
        ----------
        cache_desc : CacheDesc
            Its placement is HOST.
        addrs : list of int
            One address per tensor, in [0, 2**64). The memory must outlive the cache. Objects with the buffer protocol
            or DLPack (numpy, torch CPU tensors) do too, and are kept alive.

        Returns
        -------
        Cache
            With id -1; it belongs to no manager.

        Raises
        ------
        TypeError
            When `addrs` is not a list, or an address is neither an integer nor an object with memory.
        ValueError
            When an address does not fit 64 bits.
        LLMException
            LLM_PARAM_INVALID when the placement is not HOST, the number of addresses is not that of the tensors, or an
            object is too small or can't be written.
        AttributeError
            When `cache_desc` is None.
        """
        _check_cpu_desc(cache_desc)
        measured = cache_desc._measured()
        keepers: list[object] = []
        addresses = _cpu_addrs("addrs", addrs, cache_desc, measured[1], keepers)
        cache = cls._made(-1, cache_desc, addresses, True, measured)
        cache._keepers = keepers
        return cache

    @property
    def cache_id(self) -> int:
        """Id of the cache, -1 if it is on the user's host memory and not registered."""
        return self._cache_id

    @property
    def cache_desc(self) -> CacheDesc:
        """The description given at allocation or registration."""
        return self._cache_desc

    @property
    def tensor_addrs(self) -> list[int]:
        """One address per tensor. Empty once deallocated."""
        return self._tensor_addrs

    @property
    def is_blocks_cache(self) -> bool:
        """Whether dimension 0 counts blocks."""
        return self._is_blocks_cache

    def _clear(self) -> None:
        self._tensor_addrs = []

    def __repr__(self) -> str:
        return (
            f"Cache(cache_id = {self._cache_id}, device_tensor_addrs = {len(self._tensor_addrs)}, "
            f"is_blocks_cache = {self._is_blocks_cache})"
        )


class MemInfo:
    """A range of memory.

    Parameters
    ----------
    mem_type : Memtype
        Where it is.
    addr : int
        Its address.
    size : int
        Its length in bytes.

    Raises
    ------
    TypeError
        When an argument has another type.
    """

    def __init__(self, mem_type: Memtype, addr: int, size: int) -> None:
        self._mem_type = typed("mem_type", mem_type, Memtype)
        self._addr = any_integer("addr", addr)
        self._size = any_integer("size", size)

    @property
    def mem_type(self) -> Memtype:
        """Where the memory is."""
        return self._mem_type

    @property
    def addr(self) -> int:
        """Its address."""
        return self._addr

    @property
    def size(self) -> int:
        """Its length in bytes."""
        return self._size

    def __repr__(self) -> str:
        return f"MemInfo(mem_type={self._mem_type}, addr={self._addr}, size={self._size})"


class LayerSynchronizer(ABC):
    """Says when a layer is ready to be sent. To be derived from by the user of `transfer_cache_async`."""

    @abstractmethod
    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        """Wait until a layer is ready.

        Parameters
        ----------
        layer_index : int
            The layer.
        timeout_in_millis : int or None
            Always None: wait as long as it takes.

        Returns
        -------
        bool
            False when the layer has failed.

        Notes
        -----
        Called once per layer, in the task's own thread.
        """


class TransferConfig:
    """One destination of `transfer_cache_async`, by addresses.

    Parameters
    ----------
    dst_cluster_id : int
        The destination cluster, in [0, 2**64).
    dst_addrs : list of int or tuple of int
        Two addresses per layer, each in [0, 2**64). They include the offset of the destination's batch slot.
    src_layer_range : range, optional
        The layers to send, with step 1; None means all.
    src_batch_index : int, default 0
        The batch slot to send, in [0, 2**32).

    Raises
    ------
    TypeError
        When an argument has another type.
    ValueError
        When an integer is out of range.
    LLMException
        LLM_PARAM_INVALID when the range is empty or its step is not 1.

    Notes
    -----
    All four are properties whose setters check in the same way.
    """

    def __init__(
        self,
        dst_cluster_id: int,
        dst_addrs: Sequence[int],
        src_layer_range: range | None = None,
        src_batch_index: int = 0,
    ) -> None:
        self.dst_cluster_id = dst_cluster_id
        self.dst_addrs = dst_addrs
        self.src_layer_range = src_layer_range
        self.src_batch_index = src_batch_index
        self.dst_layer_range: range | None = None

    @property
    def dst_cluster_id(self) -> int:
        """The destination cluster."""
        return self._dst_cluster_id

    @dst_cluster_id.setter
    def dst_cluster_id(self, value: int) -> None:
        self._dst_cluster_id = uint64("dst_cluster_id", value)

    @property
    def dst_addrs(self) -> Sequence[int]:
        """Two addresses per layer."""
        return self._dst_addrs

    @dst_addrs.setter
    def dst_addrs(self, value: Sequence[int]) -> None:
        self._dst_addrs = uint64s("dst_addrs", value)

    @property
    def src_layer_range(self) -> range | None:
        """The layers to send; a transfer replaces None by the range of all layers."""
        return self._src_layer_range

    @src_layer_range.setter
    def src_layer_range(self, value: range | None) -> None:
        self._src_layer_range = check_layer_range("src_layer_range", value)

    @property
    def src_batch_index(self) -> int:
        """The batch slot to send."""
        return self._src_batch_index

    @src_batch_index.setter
    def src_batch_index(self, value: int) -> None:
        self._src_batch_index = uint32("src_batch_index", value)

    def __repr__(self) -> str:
        return (
            f"TransferConfig(dst_cluster_id={self._dst_cluster_id}, dst_addrs={self._dst_addrs}, "
            f"src_layer_range={self._src_layer_range}, src_batch_index={self._src_batch_index})"
        )


class TransferWithCacheKeyConfig:
    """One destination of `transfer_cache_async`, by the key of a cache.

    Parameters
    ----------
    cache_key : BlocksCacheKey or CacheKeyByIdAndIndex
        The destination cache.
    src_layer_range : range
        The layers to send, with step 1.
    dst_layer_range : range
        The layers to write, with step 1; as many as `src_layer_range`.
    src_batch_index : int, default 0
        The batch slot to send, in [0, 2**32); 0 with a BlocksCacheKey.

    Raises
    ------
    TypeError
        When an argument has another type, or a range is None.
    ValueError
        When an integer is out of range.
    LLMException
        LLM_PARAM_INVALID when a range is empty or its step is not 1, when the ranges differ in length, or for a batch
        slot other than 0 with a BlocksCacheKey.

    Notes
    -----
    All four are properties with setters. The setters of the ranges do not compare their lengths.
    """

    def __init__(
        self,
        cache_key: BlocksCacheKey | CacheKeyByIdAndIndex,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        src_batch_index: int = 0,
    ) -> None:
        self.cache_key = cache_key
        self.src_layer_range = typed("src_layer_range", src_layer_range, range)
        self.dst_layer_range = typed("dst_layer_range", dst_layer_range, range)
        if len(self.src_layer_range) != len(self.dst_layer_range):
            raise refused(
                ParamInvalid(
                    f"src_layer_range {src_layer_range} has {len(self.src_layer_range)} layers, "
                    f"dst_layer_range {dst_layer_range} has {len(self.dst_layer_range)}; allowed are equal numbers"
                )
            )
        self.src_batch_index = src_batch_index

    @property
    def dst_cluster_id(self) -> int:
        """The destination cluster: that of the key."""
        return self._cache_key.cluster_id

    @property
    def cache_key(self) -> BlocksCacheKey | CacheKeyByIdAndIndex:
        """The destination cache."""
        return self._cache_key

    @cache_key.setter
    def cache_key(self, value: BlocksCacheKey | CacheKeyByIdAndIndex) -> None:
        self._cache_key = check_isinstance("cache_key", value, [BlocksCacheKey, CacheKeyByIdAndIndex], allow_none=False)

    @property
    def src_layer_range(self) -> range | None:
        """The layers to send."""
        return self._src_layer_range

    @src_layer_range.setter
    def src_layer_range(self, value: range | None) -> None:
        self._src_layer_range = check_layer_range("src_layer_range", value)

    @property
    def dst_layer_range(self) -> range | None:
        """The layers to write."""
        return self._dst_layer_range

    @dst_layer_range.setter
    def dst_layer_range(self, value: range | None) -> None:
        self._dst_layer_range = check_layer_range("dst_layer_range", value)

    @property
    def src_batch_index(self) -> int:
        """The batch slot to send."""
        return self._src_batch_index

    @src_batch_index.setter
    def src_batch_index(self, value: int) -> None:
        index = uint32("src_batch_index", value)
        if index and isinstance(self._cache_key, BlocksCacheKey):
            raise refused(ParamInvalid(f"src_batch_index is {index}, allowed is 0 with a BlocksCacheKey"))
        self._src_batch_index = index

    def __repr__(self) -> str:
        return (
            f"TransferWithCacheKeyConfig(cache_key={self._cache_key}, src_layer_range={self._src_layer_range}, "
            f"dst_layer_range={self._dst_layer_range}, src_batch_index={self._src_batch_index})"
        )


class TransferJob(Protocol):
    """What a `CacheTask` asks about."""

    #: What a task reports while the job still runs.
    timeout_status: LLMStatusCode

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for the end, for ever if None; False when the time is over."""

    def results(self) -> list[LLMStatusCode | None]:
        """Give one result per configuration, None where there is none (yet)."""


class CacheTask:
    """A running `transfer_cache_async`, which makes it.

    Notes
    -----
    Both methods may be called several times, and from any thread.
    """

    def __init__(self, job: TransferJob) -> None:
        self._job = job

    def synchronize(self, timeout_in_millis: int | None = None) -> LLMStatusCode:
        """Wait for the end of the transfer.

        Parameters
        ----------
        timeout_in_millis : int, optional
            Milliseconds to wait, in [0, 2**32); 0 only looks, None waits for ever.

        Returns
        -------
        LLMStatusCode
            The first failure in the order of the configurations, else LLM_SUCCESS. While the transfer still runs at
            the end of the time: LLM_WAIT_PROCESS_TIMEOUT (KvCacheManager) or LLM_TIMEOUT (CacheManager).

        Raises
        ------
        TypeError
            When the time is not an integer.
        ValueError
            When it is out of range.
        """
        if not self._ended(timeout_in_millis):
            return self._job.timeout_status
        failures = (r for r in self._job.results() if r is not None and r != LLMStatusCode.LLM_SUCCESS)
        return next(failures, LLMStatusCode.LLM_SUCCESS)

    def get_results(self, timeout_in_millis: int | None = None) -> list[LLMStatusCode | None]:
        """Wait for the end of the transfer and give each configuration's result.

        Parameters
        ----------
        timeout_in_millis : int, optional
            Milliseconds to wait, in [0, 2**32); 0 only looks, None waits for ever.

        Returns
        -------
        list of (LLMStatusCode or None)
            In the order of the configurations; None where the transfer ended before it came to an end or failed.
            While the transfer still runs at the end of the time, each is the status that `synchronize` gives.

        Raises
        ------
        TypeError
            When the time is not an integer.
        ValueError
            When it is out of range.
        """
        if self._ended(timeout_in_millis):
            return self._job.results()
        return [self._job.timeout_status for _ in self._job.results()]

    def _ended(self, timeout_in_millis: int | None) -> bool:
        if timeout_in_millis is None:
            return self._job.wait(None)
        return self._job.wait(uint32("timeout_in_millis", timeout_in_millis) / 1000)
