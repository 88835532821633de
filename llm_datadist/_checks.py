"""Checks of what users pass in, written once.

The first part is public through ``llm_datadist.utils.utils`` and counts bool as an integer; the second is what
our own functions use at their edge, where bool is a wrong type.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from llm_datadist._log import error
from llm_datadist.status import ParamInvalid

T = TypeVar("T")
E = TypeVar("E", bound=Exception)

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
UINT8_MAX = 2**8 - 1
UINT16_MAX = 2**16 - 1
UINT32_MAX = 2**32 - 1
UINT64_MAX = 2**64 - 1

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 120


def refused(exception: E) -> E:
    """Log why an argument is refused, and give the exception back to be raised."""
    # The text alone: a record that a handler keeps would keep the exception's frames, and the caches in them.
    error("%s", str(exception))
    return exception


def _shown(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 128:  # Python may refuse to print it
        return f"an integer of {value.bit_length()} bits"
    return _repr.repr(value)


def _wrong_type(name: str, value: object, allowed: str) -> TypeError:
    return refused(TypeError(f"{name} only support {allowed}, got {_shown(value)} of type {type(value).__name__}"))


def _out_of_range(name: str, value: int, low: int, high: int) -> ValueError:
    return refused(ValueError(f"{name} is out of range: {_shown(value)}, allowed are {low} to {high}"))


# --- public helpers ---------------------------------------------------------------------------------------------


def check_isinstance(
    name: str,
    value: T,
    classes: type | Sequence[type],
    inner_class: type | Sequence[type] | None = None,
    extra_fmt: str = "",
    allow_none: bool = True,
) -> T:
    """Check the type of a value, and of its elements.

    Parameters
    ----------
    name : str
        Name of the argument, for the text.
    value : object
        The value.
    classes : type or list of type
        What the value may be.
    inner_class : type or list of type, optional
        What its elements may be.
    extra_fmt : str, default ""
        Put at the end of the text.
    allow_none : bool, default True
        Whether None passes.

    Returns
    -------
    object
        The value.

    Raises
    ------
    TypeError
        When the value or an element has another type.
    """
    if value is None and allow_none:
        return value
    outer = _as_tuple(classes)
    if not isinstance(value, outer):
        raise _wrong_type(name, value, _names(outer) + extra_fmt)
    if inner_class is not None and isinstance(value, Iterable):
        inner = _as_tuple(inner_class)
        for element in value:
            if not isinstance(element, inner):
                raise _wrong_type(f"{name} inner type", element, _names(inner) + extra_fmt)
    return value


def check_inner(name: str, values: Iterable[object], classes: type | Sequence[type]) -> None:
    """Check the type of each element; TypeError when one has another type."""
    allowed = _as_tuple(classes)
    for value in values:
        if not isinstance(value, allowed):
            raise _wrong_type(f"{name} inner type", value, _names(allowed))


def check_dict(
    name: str,
    value: dict[Any, Any],
    key_class: type | Sequence[type],
    value_class: type | Sequence[type],
    value_inner_class: type | Sequence[type] | None = None,
) -> None:
    """Check the types of a dict's keys and values, and of the values' elements.

    Raises
    ------
    TypeError
        When one of them has another type.
    """
    check_isinstance(name, value, dict, allow_none=False)
    for key, item in value.items():
        check_isinstance(f"{name} key", key, key_class, allow_none=False)
        check_isinstance(f"{name} value", item, value_class, value_inner_class, allow_none=False)


def check_uint8(name: str, value: int) -> None:
    """Check for an integer in [0, 2**8); TypeError or ValueError otherwise."""
    _check_width(name, value, 0, UINT8_MAX)


def check_uint16(name: str, value: int) -> None:
    """Check for an integer in [0, 2**16); TypeError or ValueError otherwise."""
    _check_width(name, value, 0, UINT16_MAX)


def check_uint32(name: str, value: int) -> None:
    """Check for an integer in [0, 2**32); TypeError or ValueError otherwise."""
    _check_width(name, value, 0, UINT32_MAX)


def check_uint64(name: str, value: int) -> None:
    """Check for an integer in [0, 2**64); TypeError or ValueError otherwise."""
    _check_width(name, value, 0, UINT64_MAX)


def check_int32(name: str, value: int) -> None:
    """Check for an integer in [-2**31, 2**31); TypeError or ValueError otherwise."""
    _check_width(name, value, -INT32_MAX - 1, INT32_MAX)


def check_int64(name: str, value: int) -> None:
    """Check for an integer in [-2**63, 2**63); TypeError or ValueError otherwise."""
    _check_width(name, value, -INT64_MAX - 1, INT64_MAX)


def check_list_int32(name: str, values: Iterable[int]) -> None:
    """Apply `check_int32` to each element."""
    for value in values:
        check_int32(name, value)


def check_list_int64(name: str, values: Iterable[int]) -> None:
    """Apply `check_int64` to each element."""
    for value in values:
        check_int64(name, value)


def check_list_uint64(name: str, values: Iterable[int]) -> None:
    """Apply `check_uint64` to each element."""
    for value in values:
        check_uint64(name, value)


def check_positive_or_set_default(name: str, value: int | None, default: int = -1) -> int:
    """Give a value in [0, 2**63), or the default for None.

    Raises
    ------
    TypeError
        When the value is not an integer.
    ValueError
        When it is negative or too large.
    """
    if value is None:
        return default
    _check_width(name, value, 0, INT64_MAX)
    return value


def _check_width(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int):
        raise _wrong_type(name, value, "int")
    if not low <= value <= high:
        raise _out_of_range(name, value, low, high)


def _as_tuple(classes: type | Sequence[type]) -> tuple[type, ...]:
    return (classes,) if isinstance(classes, type) else tuple(classes)


def _names(classes: tuple[type, ...]) -> str:
    return " or ".join(cls.__name__ for cls in classes)


# --- our own edge -----------------------------------------------------------------------------------------------


def typed(name: str, value: object, cls: type[T]) -> T:
    """Give a value that is of a class and not None; TypeError otherwise."""
    if not isinstance(value, cls):
        raise _wrong_type(name, value, cls.__name__)
    return value


def integer(name: str, value: object, low: int, high: int) -> int:
    """Give an integer in [low, high].

    Raises
    ------
    TypeError
        When the value is not an integer, or a bool.
    ValueError
        When it is outside the limits.
    """
    if type(value) is int and low <= value <= high:
        return value
    number = any_integer(name, value)
    if not low <= number <= high:
        raise _out_of_range(name, number, low, high)
    return number


def any_integer(name: str, value: object) -> int:
    """Give an integer of any size; TypeError for everything else, bool included."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong_type(name, value, "int")
    # A subclass may compare as it likes; from here on only the number counts.
    return int.__index__(value)


def integer_within(name: str, value: object, low: int, high: int) -> int:
    """Like `integer`, for limits that are not those of a machine word: outside them it raises PARAM_INVALID."""
    number = any_integer(name, value)
    if not low <= number <= high:
        raise refused(ParamInvalid(f"{name} is {_shown(number)}, allowed are {low} to {high}"))
    return number


def int32(name: str, value: object) -> int:
    """Give an integer in [-2**31, 2**31)."""
    return integer(name, value, -INT32_MAX - 1, INT32_MAX)


def int64(name: str, value: object) -> int:
    """Give an integer in [-2**63, 2**63)."""
    if type(value) is int and -INT64_MAX <= value <= INT64_MAX:
        return value
    return integer(name, value, -INT64_MAX - 1, INT64_MAX)


def uint32(name: str, value: object) -> int:
    """Give an integer in [0, 2**32)."""
    if type(value) is int and 0 <= value <= UINT32_MAX:
        return value
    return integer(name, value, 0, UINT32_MAX)


def uint64(name: str, value: object) -> int:
    """Give an integer in [0, 2**64)."""
    return integer(name, value, 0, UINT64_MAX)


def uint64s(name: str, values: object) -> Sequence[int]:
    """Give a list or tuple of integers in [0, 2**64); meant for addresses, not for long index lists."""
    if not isinstance(values, (list, tuple)):
        raise _wrong_type(name, values, "list or tuple")
    for position, value in enumerate(values):
        integer(f"{name}[{position}]", value, 0, UINT64_MAX)
    return values


def check_size(size: object) -> int:
    """Give a byte count that is -1 (all) or positive.

    Raises
    ------
    TypeError
        When it is not an integer.
    ValueError
        When it is not in [-2**63, 2**63).
    LLMException
        LLM_PARAM_INVALID when it is 0 or below -1.
    """
    number = int64("size", size)
    if number <= 0 and number != -1:
        raise refused(ParamInvalid(f"size is {number}, allowed are -1 (all) and anything above 0 bytes"))
    return number


def check_offset(name: str, offset: object) -> int | None:
    """Give a byte offset in [0, 2**64), or None when it is not given."""
    return None if offset is None else integer(name, offset, 0, UINT64_MAX)


def check_layer_range(name: str, layers: object) -> range | None:
    """Give a range of layers, or None when it is not given.

    Raises
    ------
    TypeError
        When it is not a range.
    ValueError
        When a bound is 2**32 or more.
    LLMException
        LLM_PARAM_INVALID when it is empty, its step is not 1, or its start is negative.
    """
    if layers is None:
        return None
    if not isinstance(layers, range):
        raise _wrong_type(name, layers, "range")
    start, stop = layers.start, layers.stop
    if layers.step != 1 or not 0 <= start < stop:
        raise refused(ParamInvalid(f"{name} is {layers}, allowed are ranges with step 1 and 0 <= start < stop"))
    if stop > UINT32_MAX:
        raise _out_of_range(f"{name} stop", stop, 1, UINT32_MAX)
    return layers


def check_tensor_num_per_layer(number: object) -> int:
    """Give the number of tensors per layer; None means 2.

    Raises
    ------
    TypeError
        When it is not an integer.
    ValueError
        When it is negative, or 2**32 or more.
    LLMException
        LLM_PARAM_INVALID when it is 0.
    """
    if number is None:
        return 2
    count = uint32("tensor_num_per_layer", number)
    if count == 0:
        raise refused(ParamInvalid("tensor_num_per_layer is 0, allowed are 1 to the cache's number of tensors"))
    return count


def check_pulled_layers(number: object, num_tensors: int, ranged: bool) -> int:
    """Give the number of tensors per layer for a pull.

    Parameters
    ----------
    number : int or None
        What the caller gave as ``tensor_num_per_layer``; None means 2.
    num_tensors : int
        Number of tensors of the destination.
    ranged : bool
        Whether a layer range was given.

    Raises
    ------
    TypeError, ValueError
        As `check_tensor_num_per_layer`.
    LLMException
        LLM_PARAM_INVALID when another number than 2 is larger than `num_tensors`, or does not divide it though a
        layer range was given.
    """
    count = check_tensor_num_per_layer(number)
    if count != 2:
        if count > num_tensors:
            raise refused(ParamInvalid(f"tensor_num_per_layer is {count}, allowed are 1 to {num_tensors}"))
        if ranged and num_tensors % count:
            raise refused(
                ParamInvalid(f"tensor_num_per_layer is {count} and does not divide the cache's {num_tensors} tensors")
            )
    return count
