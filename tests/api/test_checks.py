"""Argument helpers (A-11, A-12, E-4 to E-7) and our own edge checks (S-44, S-45)."""

import enum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_datadist import LLMException, LLMStatusCode, _checks
from llm_datadist.utils import utils as u

WIDTHS = [
    (u.check_uint8, 0, 2**8 - 1),
    (u.check_uint16, 0, 2**16 - 1),
    (u.check_uint32, 0, 2**32 - 1),
    (u.check_uint64, 0, 2**64 - 1),
    (u.check_int32, -(2**31), 2**31 - 1),
    (u.check_int64, -(2**63), 2**63 - 1),
]


def param_invalid(call, *args):
    with pytest.raises(LLMException) as e:
        call(*args)
    assert e.value.status_code is LLMStatusCode.LLM_PARAM_INVALID
    assert isinstance(e.value, ValueError)
    return str(e.value)


def plain_value_error(call, *args):
    with pytest.raises(ValueError) as e:  # noqa: PT011
        call(*args)
    assert not isinstance(e.value, LLMException)
    return str(e.value)


def test_check_isinstance():
    """E-4."""
    assert u.check_isinstance("x", 1, int) == 1
    assert u.check_isinstance("x", "a", [int, str]) == "a"
    assert u.check_isinstance("x", None, int) is None
    with pytest.raises(TypeError, match=r"name.*only support int"):
        u.check_isinstance("name", "1", int)
    with pytest.raises(TypeError, match=r"only support int or str.*tail"):
        u.check_isinstance("x", None, [int, str], extra_fmt="tail", allow_none=False)


def test_check_isinstance_inner():
    """E-5."""
    assert u.check_isinstance("x", [1, 2], list, int) == [1, 2]
    with pytest.raises(TypeError, match="inner type only support int"):
        u.check_isinstance("x", [1, "2"], list, int)
    u.check_inner("x", (1, "a"), [int, str])
    with pytest.raises(TypeError, match="inner type only support"):
        u.check_inner("x", ["1"], int)


@pytest.mark.parametrize(("check", "low", "high"), WIDTHS)
def test_widths(check, low, high):
    """E-6, E-7."""
    for good in (low, high, 0, True):
        check("x", good)
    for bad in (low - 1, high + 1, 10**5000):
        assert "is out of range" in plain_value_error(check, "x", bad)
    for wrong in (None, 1.0, "1", [1]):
        with pytest.raises(TypeError, match="only support int"):
            check("x", wrong)


def test_lists():
    u.check_list_int32("x", [1, -1])
    u.check_list_int64("x", (2**63 - 1,))
    u.check_list_uint64("x", range(3))
    plain_value_error(u.check_list_int32, "x", [0, 2**31])
    plain_value_error(u.check_list_int64, "x", [2**63])
    plain_value_error(u.check_list_uint64, "x", [0, -1])
    with pytest.raises(TypeError):
        u.check_list_uint64("x", ["1"])


def test_check_dict():
    u.check_dict("x", {1: [2]}, int, list, int)
    with pytest.raises(TypeError, match="only support"):
        u.check_dict("x", [1], int, list)
    with pytest.raises(TypeError, match="only support"):
        u.check_dict("x", {"1": [2]}, int, list)
    with pytest.raises(TypeError, match="only support"):
        u.check_dict("x", {0: "1"}, int, list)
    with pytest.raises(TypeError, match="inner type only support"):
        u.check_dict("x", {0: ["1"]}, int, list, int)


def test_positive_or_default():
    assert u.check_positive_or_set_default("x", None) == -1
    assert u.check_positive_or_set_default("x", None, 5) == 5
    assert u.check_positive_or_set_default("x", 0) == 0
    plain_value_error(u.check_positive_or_set_default, "x", -1)
    plain_value_error(u.check_positive_or_set_default, "x", 2**63)
    with pytest.raises(TypeError):
        u.check_positive_or_set_default("x", "1")


@pytest.mark.parametrize("check", [_checks.uint32, _checks.uint64, _checks.int32, _checks.int64])
def test_own_edge_refuses_bool(check):
    """Api 9.3: bool is a wrong type, an int subclass is fine."""
    with pytest.raises(TypeError, match="x only support int, got True of type bool"):
        check("x", True)
    assert check("x", enum.IntEnum("N", "ONE").ONE) == 1


def test_texts_stay_short():
    with pytest.raises(TypeError) as e:
        _checks.uint32("x", "a" * 10**6)
    assert len(str(e.value)) < 300


def test_check_size():
    """E-206, E-207."""
    assert _checks.check_size(-1) == -1
    assert _checks.check_size(2**63 - 1) == 2**63 - 1
    for bad in (0, -2, -(2**63)):
        assert str(bad) in param_invalid(_checks.check_size, bad)
    for bad in (2**63, -(2**63) - 1):
        plain_value_error(_checks.check_size, bad)
    with pytest.raises(TypeError):
        _checks.check_size(1.0)


def test_check_offset():
    """E-210."""
    assert _checks.check_offset("o", None) is None
    assert _checks.check_offset("o", 0) == 0
    plain_value_error(_checks.check_offset, "o", -1)
    with pytest.raises(TypeError):
        _checks.check_offset("o", "0")


def test_check_layer_range():
    """S-44, E-222 to E-224."""
    assert _checks.check_layer_range("r", None) is None
    assert _checks.check_layer_range("r", range(1, 3)) == range(1, 3)
    for bad in (range(0, 4, 2), range(-1, 2), range(0), range(3, 3), range(3, 1), range(0, -1), range(3, 0, -1)):
        assert str(bad) in param_invalid(_checks.check_layer_range, "r", bad)
    assert _checks.check_layer_range("r", range(2**32 - 1)) is not None
    plain_value_error(_checks.check_layer_range, "r", range(2**32))
    for wrong in ([0, 1], 1, "r", slice(1)):
        with pytest.raises(TypeError):
            _checks.check_layer_range("r", wrong)


def test_tensor_num_per_layer():
    """S-45.1, S-45.2, E-215 to E-218."""
    assert _checks.check_tensor_num_per_layer(None) == 2
    assert _checks.check_tensor_num_per_layer(3) == 3
    for wrong in (1.0, "x", True):
        with pytest.raises(TypeError):
            _checks.check_tensor_num_per_layer(wrong)
    plain_value_error(_checks.check_tensor_num_per_layer, -1)
    plain_value_error(_checks.check_tensor_num_per_layer, 2**32)
    param_invalid(_checks.check_tensor_num_per_layer, 0)


def test_pulled_layers():
    """S-45.3 to S-45.5, E-219 to E-221."""
    param_invalid(_checks.check_pulled_layers, 5, 4, False)
    text = param_invalid(_checks.check_pulled_layers, 3, 8, True)
    assert "3" in text
    assert "8" in text
    assert _checks.check_pulled_layers(3, 8, False) == 3
    assert _checks.check_pulled_layers(2, 61, True) == 2
    assert _checks.check_pulled_layers(None, 1, True) == 2
    assert _checks.check_pulled_layers(1, 61, True) == 1


@given(st.integers(1, 200), st.integers(1, 200), st.booleans())
def test_pulled_layers_rule(count, total, ranged):
    allowed = count == 2 or (count <= total and not (ranged and total % count))
    if allowed:
        assert _checks.check_pulled_layers(count, total, ranged) == count
    else:
        param_invalid(_checks.check_pulled_layers, count, total, ranged)
