"""Element types of caches. The tables for numpy are made at first use, so that importing does not load numpy."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

    import numpy as np

    #: The numpy type that holds the elements of each data type; bfloat16 is held in float16.
    dtype_to_np_dtype: dict[DataType, type[np.generic]]
    #: The values of `dtype_to_np_dtype`.
    valid_np_dtypes: list[type[np.generic]]
    #: The other way round, without bfloat16.
    np_dtype_to_dtype: dict[np.dtype[Any], DataType]

__all__ = [
    "DataType",
    "get_python_dtype_from_wrapper_dtype",
    "python_dtype_2_dwrapper_dtype",
]


class DataType(enum.Enum):
    """Type of the elements of a cache."""

    DT_FLOAT = 0
    DT_FLOAT16 = 1
    DT_BF16 = 27
    DT_INT8 = 2
    DT_INT16 = 6
    DT_UINT16 = 7
    DT_UINT8 = 4
    DT_INT32 = 3
    DT_INT64 = 9
    DT_UINT32 = 8
    DT_UINT64 = 10
    DT_BOOL = 12
    DT_DOUBLE = 11
    DT_STRING = 13


#: Bytes of one element; a string element is two 64-bit words, offset and length.
ELEMENT_BYTES = {
    DataType.DT_FLOAT: 4,
    DataType.DT_FLOAT16: 2,
    DataType.DT_BF16: 2,
    DataType.DT_INT8: 1,
    DataType.DT_INT16: 2,
    DataType.DT_UINT16: 2,
    DataType.DT_UINT8: 1,
    DataType.DT_INT32: 4,
    DataType.DT_INT64: 8,
    DataType.DT_UINT32: 4,
    DataType.DT_UINT64: 8,
    DataType.DT_BOOL: 1,
    DataType.DT_DOUBLE: 8,
    DataType.DT_STRING: 16,
}

python_dtype_2_dwrapper_dtype = {dtype: dtype.value for dtype in DataType}


def get_python_dtype_from_wrapper_dtype(wrapper_dtype: int) -> DataType:
    """Give the data type with a number.

    Parameters
    ----------
    wrapper_dtype : int
        The number.

    Returns
    -------
    DataType
        The member.

    Raises
    ------
    ValueError
        When no member has this number.
    """
    return DataType(wrapper_dtype)


def __getattr__(name: str) -> object:
    if name not in ("dtype_to_np_dtype", "valid_np_dtypes", "np_dtype_to_dtype"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _make_numpy_tables()
    return globals()[name]


def _make_numpy_tables() -> None:
    import numpy as np

    types: dict[DataType, type[np.generic]] = {
        DataType.DT_FLOAT: np.float32,
        DataType.DT_FLOAT16: np.float16,
        DataType.DT_BF16: np.float16,
        DataType.DT_INT8: np.int8,
        DataType.DT_INT16: np.int16,
        DataType.DT_UINT16: np.uint16,
        DataType.DT_UINT8: np.uint8,
        DataType.DT_INT32: np.int32,
        DataType.DT_INT64: np.int64,
        DataType.DT_UINT32: np.uint32,
        DataType.DT_UINT64: np.uint64,
        DataType.DT_BOOL: np.bool_,
        DataType.DT_DOUBLE: np.double,
        DataType.DT_STRING: np.bytes_,
    }
    globals().update(
        dtype_to_np_dtype=types,
        valid_np_dtypes=list(types.values()),
        np_dtype_to_dtype={np.dtype(t): dtype for dtype, t in types.items() if dtype is not DataType.DT_BF16},
    )
