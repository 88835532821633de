"""Tensor and TensorDesc (api 8, S-85 to S-88, E-54 to E-56)."""

import gc
import weakref

import numpy as np
import pytest

from llm_datadist import DataType, Tensor, TensorDesc
from llm_datadist.data_type import dtype_to_np_dtype, np_dtype_to_dtype

PLAIN = [d for d in DataType if d not in (DataType.DT_BF16, DataType.DT_STRING)]


def test_desc():
    desc = TensorDesc(DataType.DT_INT8, (2, 3))
    assert (desc.dtype, desc.shape) == (DataType.DT_INT8, [2, 3])
    assert isinstance(desc.shape, list)
    assert str(desc) == "TensorDesc(dtype=DataType.DT_INT8, shape=[2, 3])"


@pytest.mark.parametrize("dtype", PLAIN)
def test_copies_in(dtype):
    """S-88."""
    source = np.arange(6).astype(dtype_to_np_dtype[dtype]).reshape(2, 3)
    before = source.copy()
    tensor = Tensor(source)
    source[:] = 0
    view = tensor.numpy()
    assert view.dtype == before.dtype
    assert view.shape == (2, 3)
    np.testing.assert_array_equal(view, before)


@pytest.mark.parametrize("dtype", PLAIN)
def test_view_and_copy(dtype):
    tensor = Tensor(np.ones((2, 2), dtype_to_np_dtype[dtype]))
    view = tensor.numpy()
    assert np.shares_memory(view, tensor.numpy())
    with pytest.raises(ValueError, match="read-only"):
        view[0, 0] = 0
    with pytest.raises(ValueError, match="WRITEABLE"):
        view.flags.writeable = True
    copy = tensor.numpy(copy=True)
    copy[0, 0] = 0
    assert copy.flags.c_contiguous
    assert tensor.numpy()[0, 0] == 1


def test_from_tensor_is_independent():
    first = Tensor(np.arange(4, dtype=np.int32), TensorDesc(DataType.DT_INT32, [4]))
    second = Tensor(first)
    np.testing.assert_array_equal(second.numpy(), [0, 1, 2, 3])
    assert not np.shares_memory(first.numpy(), second.numpy())


@pytest.mark.parametrize("shape", [(), (3,), (2, 2), (0, 4)])
@pytest.mark.parametrize("copy", [False, True])
def test_bf16(shape, copy):
    """S-88: a float16 array gives the raw bits."""
    tensor = Tensor(np.full(shape, 1.875, np.float16), TensorDesc(DataType.DT_BF16, list(shape)))
    values = tensor.numpy(copy)
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values, np.full(shape, 1.0))
    assert values.flags.writeable == copy


def test_bf16_patterns():
    patterns = np.arange(2**16, dtype=np.uint16)
    tensor = Tensor(patterns.view(np.float16), TensorDesc(DataType.DT_BF16, [2**16]))
    np.testing.assert_array_equal(tensor.numpy().view(np.uint32), patterns.astype(np.uint32) << 16)


def test_fp16_keeps_its_shape():
    tensor = Tensor(np.ones((2, 3), np.float16))
    assert tensor.numpy().shape == tensor.numpy(True).shape == (2, 3)
    assert tensor.numpy().dtype == np.float16


@pytest.mark.parametrize("source", [np.array([["ab", "c"], ["", "é"]]), np.array([b"ab", b"c"])])
def test_strings(source):
    """E-56."""
    tensor = Tensor(source)
    result = tensor.numpy(copy=True)
    assert result.dtype == source.dtype
    np.testing.assert_array_equal(result, source)
    with pytest.raises(RuntimeError):
        tensor.numpy()
    Tensor(source, TensorDesc(DataType.DT_STRING, source.shape))


def test_desc_must_fit():
    """E-54."""
    array = np.zeros((2, 3), np.float32)
    Tensor(array, TensorDesc(DataType.DT_FLOAT, [2, 3]))
    for desc in (
        TensorDesc(DataType.DT_FLOAT, [3, 2]),
        TensorDesc(DataType.DT_FLOAT, [6]),
        TensorDesc(DataType.DT_INT32, [2, 3]),
        TensorDesc(DataType.DT_BF16, [2, 3]),
        TensorDesc(DataType.DT_STRING, [2, 3]),
    ):
        with pytest.raises(RuntimeError, match="does not fit"):
            Tensor(array, desc)


@pytest.mark.parametrize(
    "array", [np.zeros(2, np.complex64), np.zeros(2, ">f4"), np.zeros(2, object), np.zeros(2, "M8[s]")]
)
def test_unsupported_dtype(array):
    """E-54."""
    with pytest.raises(RuntimeError, match="of type"):
        Tensor(array)


def test_not_contiguous():
    """E-54."""
    for array in (np.zeros((2, 3)).T, np.zeros(6)[::2]):
        with pytest.raises(RuntimeError, match="C-contiguous"):
            Tensor(array)


def test_types():
    """E-55."""
    for wrong in ([1, 2], None, 1.0, "x"):
        with pytest.raises(TypeError):
            Tensor(wrong)
    with pytest.raises(TypeError):
        Tensor(np.zeros(1), "desc")
    for wrong in ((1, [1]), (None, [1]), (DataType.DT_INT8, 1), (DataType.DT_INT8, [1.0]), (DataType.DT_INT8, None)):
        with pytest.raises(TypeError):
            TensorDesc(*wrong)
    for wrong in (1, 0, None, "x"):
        with pytest.raises(TypeError):
            Tensor(np.zeros(1)).numpy(copy=wrong)


def test_str():
    assert (
        str(Tensor(np.array([1, 2], np.int8)))
        == "Tensor([1 2], tensor_desc=TensorDesc(dtype=DataType.DT_INT8, shape=[2]))"
    )


class Holder:
    """Owns memory, like a cache's region."""

    def __init__(self, array):
        self.array = array


def over(array, dtype=None):
    holder = Holder(array)
    desc = TensorDesc(dtype or np_dtype_to_dtype[array.dtype], array.shape)
    return holder, Tensor._over(holder, array.ctypes.data, desc)


@pytest.mark.parametrize("dtype", PLAIN)
def test_shows_memory(dtype):
    """S-85: what arrives later is seen through views taken before."""
    array = np.zeros((2, 3), dtype_to_np_dtype[dtype])
    _holder, tensor = over(array)
    view = tensor.numpy()
    copy = tensor.numpy(True)
    array[1, 2] = 1
    assert view[1, 2] == 1
    assert copy[1, 2] == 0
    with pytest.raises(ValueError, match="read-only"):
        view[0, 0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        view.flags.writeable = True


def test_bf16_memory():
    array = np.array([0x3F80, 0xC000], np.uint16)
    _holder, tensor = over(array, DataType.DT_BF16)
    np.testing.assert_array_equal(tensor.numpy(), [1.0, -2.0])
    array[0] = 0
    np.testing.assert_array_equal(tensor.numpy(), [0.0, -2.0])


def test_views_keep_memory_alive():
    """S-87."""
    holder, tensor = over(np.arange(6, dtype=np.int64).reshape(2, 3))
    alive = weakref.ref(holder)
    del holder
    gc.collect()
    assert alive()
    slice_of_view = tensor.numpy()[1].view(np.uint64)[1:]
    del tensor
    gc.collect()
    assert alive()
    np.testing.assert_array_equal(slice_of_view, [4, 5])
    del slice_of_view
    gc.collect()
    assert alive() is None


def test_copies_do_not_keep_memory_alive():
    holder, tensor = over(np.arange(6, dtype=np.int64))
    alive = weakref.ref(holder)
    copy = Tensor(tensor)
    values = tensor.numpy(True)
    del holder, tensor
    gc.collect()
    assert alive() is None
    np.testing.assert_array_equal(copy.numpy(), values)
