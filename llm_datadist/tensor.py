"""Tensors: a cache's memory, or bytes of their own, to be looked at with numpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from llm_datadist import data_type
from llm_datadist._checks import check_isinstance, int64, refused, typed
from llm_datadist.data_type import ELEMENT_BYTES, DataType

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Tensor", "TensorDesc"]


class TensorDesc:
    """Element type and shape of a `Tensor`.

    Parameters
    ----------
    dtype : DataType
        Type of the elements.
    shape : list of int or tuple of int
        Length of each dimension.

    Raises
    ------
    TypeError
        When an argument has another type.
    ValueError
        When a length does not fit a signed 64-bit integer.
    """

    def __init__(self, dtype: DataType, shape: Sequence[int]) -> None:
        self._dtype = typed("dtype", dtype, DataType)
        check_isinstance("shape", shape, [list, tuple], allow_none=False)
        self._shape = [int64(f"shape[{position}]", dimension) for position, dimension in enumerate(shape)]

    @property
    def dtype(self) -> DataType:
        """Type of the elements."""
        return self._dtype

    @property
    def shape(self) -> list[int]:
        """Length of each dimension."""
        return self._shape

    def __repr__(self) -> str:
        return f"TensorDesc(dtype={self._dtype}, shape={self._shape})"


class _Memory:
    """A range of memory in numpy's array interface; arrays on it keep it, and so its holder, alive."""

    def __init__(self, holder: object, address: int, shape: tuple[int, ...], typestr: str) -> None:
        self._holder = holder
        self.__array_interface__ = {
            "version": 3,
            "data": (address, True),  # True: read-only
            "shape": shape,
            "typestr": typestr,
        }


class Tensor:
    """Values with an element type and a shape.

    Parameters
    ----------
    data : numpy.ndarray or Tensor
        The values, which are copied. An array is C-contiguous, and of numpy's type for one of the data types (see
        `llm_datadist.data_type.dtype_to_np_dtype`) or of strings.
    tensor_desc : TensorDesc, optional
        What an array is expected to be. With DT_BF16 a float16 array gives the raw 16 bits of each value.

    Raises
    ------
    TypeError
        When an argument has another type.
    RuntimeError
        When an array is not C-contiguous, its type is not supported, or it does not fit `tensor_desc`.

    Notes
    -----
    `KvCacheManager.get_cache_tensors` makes tensors that show a cache's memory; these, and arrays from their `numpy`,
    keep the memory readable after the cache is gone. Memory of a device that the processor can't read is not shown but
    copied by each `numpy`, until `finalize`.
    """

    _shown: NDArray[Any] | None
    #: Fetches the values, where memory can't be shown.
    _fetch: Callable[[], NDArray[Any]]
    _desc: TensorDesc

    def __init__(self, data: NDArray[Any] | Tensor, tensor_desc: TensorDesc | None = None) -> None:
        import numpy as np

        check_isinstance("data", data, [np.ndarray, Tensor], allow_none=False)
        check_isinstance("tensor_desc", tensor_desc, TensorDesc)
        if isinstance(data, Tensor):
            source, self._desc = data._array, data._desc
        else:
            source, self._desc = data, _describe(data, tensor_desc)
        self._shown = np.array(source, order="C")
        self._shown.flags.writeable = False

    @property
    def _array(self) -> NDArray[Any]:
        return self._fetch() if self._shown is None else self._shown

    @classmethod
    def _over(cls, holder: object, address: int, desc: TensorDesc) -> Tensor:
        """Make a tensor that shows memory at an address.

        Parameters
        ----------
        holder : object
            Kept alive as long as the tensor or an array from its `numpy`.
        address : int
            Where the elements are, in C order; ``holder`` keeps this readable.
        desc : TensorDesc
            Their type and shape.
        """
        import numpy as np

        tensor = cls.__new__(cls)
        tensor._shown = np.asarray(_Memory(holder, address, tuple(desc.shape), _typestr(desc)))
        tensor._desc = desc
        return tensor

    @classmethod
    def _fetching(cls, load: Callable[[], bytes], desc: TensorDesc) -> Tensor:
        """Make a tensor whose values are fetched from a device's memory each time they are asked for.

        Parameters
        ----------
        load : callable
            Gives the bytes of the elements in C order.
        desc : TensorDesc
            Their type and shape.
        """
        import numpy as np

        tensor = cls.__new__(cls)
        tensor._shown = None
        tensor._fetch = lambda: np.frombuffer(load(), _typestr(desc)).reshape(desc.shape)
        tensor._desc = desc
        return tensor

    def numpy(self, copy: bool = False) -> NDArray[Any]:
        """Give the values as an array of the tensor's shape.

        Parameters
        ----------
        copy : bool, default False
            False gives a read-only array on the tensor's own memory, True a writable copy. DT_BF16 is always
            converted to float32, and so never shares memory; copy only says whether the result is writable.

        Returns
        -------
        numpy.ndarray
            The values.

        Raises
        ------
        TypeError
            When `copy` is not a bool.
        RuntimeError
            When a tensor of strings is asked for without a copy.
        """
        typed("copy", copy, bool)
        if self._desc.dtype is DataType.DT_STRING and not copy:
            raise refused(RuntimeError("copy is False, allowed is True for a tensor of strings"))
        if self._desc.dtype is DataType.DT_BF16:
            values = _bfloat16_values(self._array)
            values.flags.writeable = copy
            return values
        array: NDArray[Any] = self._array.copy() if copy else self._array.view()
        return array

    def __repr__(self) -> str:
        return f"Tensor({self.numpy(copy=True)}, tensor_desc={self._desc})"


def _typestr(desc: TensorDesc) -> str:
    import numpy as np

    if desc.dtype is DataType.DT_STRING:
        return f"|V{ELEMENT_BYTES[desc.dtype]}"
    typestr: str = np.dtype(data_type.dtype_to_np_dtype[desc.dtype]).str
    return typestr


def _describe(array: NDArray[Any], expected: TensorDesc | None) -> TensorDesc:
    """Check that a tensor can be made of an array, and describe it."""
    if not array.flags.c_contiguous:
        raise refused(RuntimeError(f"data of shape {array.shape} is not C-contiguous, use numpy.ascontiguousarray"))
    if array.dtype.kind in "SU":
        found = DataType.DT_STRING
    elif array.dtype in data_type.np_dtype_to_dtype:
        found = data_type.np_dtype_to_dtype[array.dtype]
    else:
        raise refused(RuntimeError(f"data is of type {array.dtype}, allowed are the types in dtype_to_np_dtype"))
    if expected is None:
        return TensorDesc(found, array.shape)
    held_in = DataType.DT_FLOAT16 if expected.dtype is DataType.DT_BF16 else expected.dtype
    if found is not held_in:
        raise refused(RuntimeError(f"data is of type {array.dtype}, which does not fit {expected}"))
    if expected.shape != list(array.shape):
        raise refused(RuntimeError(f"data is of shape {array.shape}, which does not fit {expected}"))
    return expected


def _bfloat16_values(raw: NDArray[Any]) -> NDArray[np.float32]:
    """Widen 16-bit patterns to the upper half of a float32."""
    import numpy as np

    values = np.empty(raw.shape, np.float32)
    np.left_shift(raw.view(np.uint16), 16, out=values.view(np.uint32), dtype=np.uint32)
    return values
