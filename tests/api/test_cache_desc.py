"""CacheDesc (api 6.1, E-30 to E-35)."""

import pytest

from llm_datadist import CacheDesc, DataType, LLMException, LLMStatusCode, Placement

F16 = DataType.DT_FLOAT16


class Size(tuple):
    """Stands for torch.Size."""


def param_invalid(call):
    with pytest.raises(LLMException) as e:
        call()
    assert e.value.status_code is LLMStatusCode.LLM_PARAM_INVALID
    assert isinstance(e.value, ValueError)


def value_error(call):
    with pytest.raises(ValueError) as e:  # noqa: PT011
        call()
    assert not isinstance(e.value, LLMException)


def test_properties():
    shape = [2, 16]
    desc = CacheDesc(4, shape, F16, seq_len_dim_index=1, kv_tensor_format="BSH")
    assert desc.num_tensors == 4
    assert desc.shape is shape
    assert desc.data_type is F16
    assert desc.placement is Placement.DEVICE
    assert (desc.batch_dim, desc.batch_size, desc.seq_len_dim_index) == (0, 2, 1)
    assert desc.kv_tensor_format == "BSH"
    assert desc.size == 64


def test_repr():
    assert repr(CacheDesc(4, [2, 16], F16)) == (
        "CacheDesc(num_tensors=4, shape=[2, 16], data_type=DataType.DT_FLOAT16, placement=Placement.DEVICE, "
        "batch_dim_index=0, seq_len_dim_index=-1,kv_tensor_format=None)"
    )


@pytest.mark.parametrize("shape", [(10, 2, 2), [10, 2, 2], Size((10, 2, 2))])
def test_kinds_of_shape(shape):
    desc = CacheDesc(1, shape, F16)
    assert desc.shape is shape
    assert desc.shape == type(shape)((10, 2, 2))
    assert desc.size == 80


def test_num_tensors():
    """E-30."""
    assert CacheDesc(0, [1], F16).num_tensors == 0
    assert CacheDesc(2**32 - 1, [1], F16).num_tensors == 2**32 - 1
    for bad in (-1, 2**32):
        value_error(lambda bad=bad: CacheDesc(bad, [1], F16))


@pytest.mark.parametrize(
    "args",
    [
        ("1", [1], F16),
        (True, [1], F16),
        (None, [1], F16),
        (1, None, F16),
        (1, range(2), F16),
        (1, {1}, F16),
        (1, ["1"], F16),
        (1, [1.0], F16),
        (1, [True], F16),
        (1, [1], 1),
        (1, [1], None),
        (1, [1], F16, 1),
        (1, [1], F16, None),
        (1, [1], F16, Placement.HOST, "0"),
        (1, [1], F16, Placement.HOST, 0, "0"),
        (1, [1], F16, Placement.HOST, 0, -1, 1),
    ],
)
def test_types(args):
    """E-31."""
    with pytest.raises(TypeError):
        CacheDesc(*args)


def test_widths():
    """E-32."""
    value_error(lambda: CacheDesc(1, [1, 2**63], F16))
    value_error(lambda: CacheDesc(1, [-(2**63) - 1], F16))
    value_error(lambda: CacheDesc(1, [1], F16, seq_len_dim_index=2**64 - 1))


def test_dimension_indices():
    """E-33."""
    param_invalid(lambda: CacheDesc(1, [], F16))
    for bad in (-1, 2, 2**40):
        param_invalid(lambda bad=bad: CacheDesc(1, [1, 2], F16, batch_dim_index=bad))
    for bad in (-2, 2):
        param_invalid(lambda bad=bad: CacheDesc(1, [1, 2], F16, seq_len_dim_index=bad))
    assert CacheDesc(1, [3, 5], F16, batch_dim_index=1).batch_size == 5


@pytest.mark.parametrize("shape", [[0], [2, -1], [2**62, 1], [2**31, 2**31, 2], [2**63 - 1] * 30])
def test_size_that_does_not_exist(shape):
    """E-34."""
    desc = CacheDesc(1, shape, F16)
    param_invalid(lambda: desc.size)


def test_largest_size():
    assert CacheDesc(1, [2**63 - 1], DataType.DT_INT8).size == 2**63 - 1
    assert CacheDesc(1, [3], DataType.DT_STRING).size == 48


def test_update_dim():
    """E-35, and what it does to size and batch_size."""
    shape = [2, 16]
    desc = CacheDesc(4, shape, F16)
    assert desc.size == 64
    desc.update_dim(0, 3)
    assert shape == [3, 16]
    assert (desc.size, desc.batch_size) == (96, 2)
    with pytest.raises(IndexError):
        desc.update_dim(2, 1)
    with pytest.raises(TypeError):
        CacheDesc(4, (2, 16), F16).update_dim(0, 1)
    with pytest.raises(TypeError):
        desc.update_dim(0, 1.0)
