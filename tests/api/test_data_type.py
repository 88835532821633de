"""DataType and its tables (A-14, E-8)."""

import subprocess
import sys

import numpy as np
import pytest

from llm_datadist import DataType, data_type

TABLE = [
    ("DT_FLOAT", 0, 4, np.float32),
    ("DT_FLOAT16", 1, 2, np.float16),
    ("DT_BF16", 27, 2, np.float16),
    ("DT_INT8", 2, 1, np.int8),
    ("DT_INT16", 6, 2, np.int16),
    ("DT_UINT16", 7, 2, np.uint16),
    ("DT_UINT8", 4, 1, np.uint8),
    ("DT_INT32", 3, 4, np.int32),
    ("DT_INT64", 9, 8, np.int64),
    ("DT_UINT32", 8, 4, np.uint32),
    ("DT_UINT64", 10, 8, np.uint64),
    ("DT_BOOL", 12, 1, np.bool_),
    ("DT_DOUBLE", 11, 8, np.double),
    ("DT_STRING", 13, 16, np.bytes_),
]


def test_table():
    """A-14: members, order, numbers, sizes, numpy types."""
    found = [(m.name, m.value, data_type.ELEMENT_BYTES[m], data_type.dtype_to_np_dtype[m]) for m in DataType]
    assert found == TABLE
    assert data_type.python_dtype_2_dwrapper_dtype == {m: m.value for m in DataType}
    assert len({DataType.DT_INT8: 1}) == 1


def test_numpy_tables():
    assert data_type.valid_np_dtypes == [row[3] for row in TABLE]
    assert len(data_type.np_dtype_to_dtype) == 13
    assert data_type.np_dtype_to_dtype[np.dtype("float16")] is DataType.DT_FLOAT16
    assert DataType.DT_BF16 not in data_type.np_dtype_to_dtype.values()
    assert data_type.dtype_to_np_dtype is data_type.dtype_to_np_dtype
    with pytest.raises(AttributeError, match="has no attribute"):
        data_type.nothing  # noqa: B018


def test_numpy_is_loaded_late():
    program = (
        "import sys; from llm_datadist import data_type as d; assert 'numpy' not in sys.modules;"
        "from llm_datadist.data_type import np_dtype_to_dtype; assert 'numpy' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_from_number():
    """E-8."""
    for member in DataType:
        assert data_type.get_python_dtype_from_wrapper_dtype(member.value) is member
    for unknown in (5, 14, -1, 28):
        with pytest.raises(ValueError, match=str(unknown)):
            data_type.get_python_dtype_from_wrapper_dtype(unknown)
