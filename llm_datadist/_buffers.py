"""Where an object that a user hands in has its bytes: numbers, numpy arrays, DLPack tensors, and buffers."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any, Final

from llm_datadist._checks import integer, refused
from llm_datadist.status import ParamInvalid

__all__ = ["address_of"]

UINT64_MAX: Final = 2**64 - 1
DLPACK_CPU: Final = 1
CAPSULE_NAME: Final = b"dltensor"


class _DLTensor(ctypes.Structure):
    """The first member of a DLManagedTensor, as the DLPack specification lays it out."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),  # in elements; NULL means contiguous
        ("byte_offset", ctypes.c_uint64),
    )


def address_of(name: str, value: Any, least: int = 0) -> tuple[int, int | None, object | None]:
    """Find out where bytes are that a user names by a number or by an object.

    Parameters
    ----------
    name : str
        Name of the argument, for the text.
    value : int or object
        An address in [0, 2**64), which is believed; or an object in CPU memory, writable and C-contiguous, with
        ``__array_interface__`` (numpy), ``__dlpack__`` (torch), or the buffer protocol.
    least : int, default 0
        Bytes that an object must have.

    Returns
    -------
    tuple
        Address; number of bytes, None for a number; and an object that keeps the memory as long as it lives itself,
        None for a number.

    Raises
    ------
    TypeError
        When the value is none of these.
    ValueError
        When a number is negative, or 2**64 or more.
    LLMException
        LLM_PARAM_INVALID when an object is read-only, not contiguous, not in CPU memory, or too small.
    """
    if isinstance(value, int):
        return integer(name, value, 0, UINT64_MAX), None, None
    if hasattr(value, "__array_interface__"):
        address, nbytes, keeper = _of_array(name, value)
    elif hasattr(value, "__dlpack__"):
        address, nbytes, keeper = _of_dlpack(name, value)
    else:
        address, nbytes, keeper = _of_buffer(name, value)
    if nbytes < least:
        raise refused(ParamInvalid(f"{name} has {nbytes} bytes, allowed are {least} and more"))
    return address, nbytes, keeper


def _of_array(name: str, value: Any) -> tuple[int, int, object]:
    import numpy

    interface = value.__array_interface__
    shape, data = interface["shape"], interface.get("data")
    # A numpy number has no dimensions, and what it shows is a copy.
    if not shape or not isinstance(data, tuple):
        raise _wrong_type(name, value)
    address, read_only = data
    if read_only:
        raise _read_only(name)
    itemsize = numpy.dtype(interface["typestr"]).itemsize
    strides = interface.get("strides")
    if strides is not None:
        _check_contiguous(name, shape, strides, itemsize)
    return address, math.prod(shape) * itemsize, value


def _of_dlpack(name: str, value: Any) -> tuple[int, int, object]:
    device, number = value.__dlpack_device__()
    if device != DLPACK_CPU:
        raise refused(
            ParamInvalid(f"{name} is on DLPack device ({int(device)}, {number}), allowed is CPU, ({DLPACK_CPU}, 0)")
        )
    try:
        capsule = value.__dlpack__()
    except BufferError as error:  # read-only, tracked by autograd, ...
        raise refused(ParamInvalid(f"{name} can't be shared: {error}")) from error
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    tensor = _DLTensor.from_address(pointer(capsule, CAPSULE_NAME))
    if tensor.strides:
        _check_contiguous(name, tensor.shape[: tensor.ndim], tensor.strides[: tensor.ndim], 1)
    elements = math.prod(tensor.shape[: tensor.ndim])
    nbytes = elements * tensor.bits * tensor.lanes // 8
    # A capsule that nobody consumes frees the tensor at its own end.
    return (tensor.data or 0) + tensor.byte_offset, nbytes, capsule


def _of_buffer(name: str, value: Any) -> tuple[int, int, object]:
    try:
        view = memoryview(value)
    except TypeError as error:
        raise _wrong_type(name, value) from error
    if view.readonly:
        raise _read_only(name)
    if not view.c_contiguous:
        raise _not_contiguous(name)
    # An empty buffer need not have an address.
    address = ctypes.addressof(ctypes.c_char.from_buffer(view)) if view.nbytes else 0
    return address, view.nbytes, view


def _check_contiguous(name: str, shape: Sequence[int], strides: Sequence[int], step: int) -> None:
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != step:
            raise _not_contiguous(name)
        step *= size


def _wrong_type(name: str, value: object) -> TypeError:
    return refused(
        TypeError(
            f"{name} only support int, or an object with __array_interface__, __dlpack__ or the buffer protocol, "
            f"got {type(value).__name__}"
        )
    )


def _read_only(name: str) -> ParamInvalid:
    return refused(ParamInvalid(f"{name} is read-only, allowed are writable objects"))


def _not_contiguous(name: str) -> ParamInvalid:
    return refused(ParamInvalid(f"{name} is not contiguous, allowed are C-contiguous objects"))
