"""Objects given in place of addresses."""

from __future__ import annotations

import array
import ctypes
import gc
import weakref
from typing import Any

import numpy as np
import pytest

from llm_datadist import LLMException, LLMStatusCode
from llm_datadist._buffers import address_of

NAME = "addrs[3]"


def refused(value: object, why: str, least: int = 0) -> None:
    with pytest.raises(ValueError, match=rf"^addrs\[3\] {why}") as caught:
        address_of(NAME, value, least)
    assert isinstance(caught.value, LLMException)
    assert caught.value.status_code == LLMStatusCode.LLM_PARAM_INVALID


# ---- numbers


@pytest.mark.parametrize("number", [0, 1, 2**64 - 1])
def test_a_number_is_an_address(number: int) -> None:
    assert address_of(NAME, number, 1 << 40) == (number, None, None)


@pytest.mark.parametrize("number", [-1, 2**64])
def test_e180_a_number_must_fit(number: int) -> None:
    with pytest.raises(ValueError, match=r"^addrs\[3\] is out of range"):
        address_of(NAME, number)


@pytest.mark.parametrize("value", [None, True, 1.5, "text", [1], np.uint64(4096), np.array(5)], ids=repr)
def test_e180_other_things_are_refused(value: object) -> None:
    with pytest.raises(TypeError, match=r"^addrs\[3\] only support int"):
        address_of(NAME, value)


# ---- arrays and buffers


@pytest.mark.parametrize("dtype", ["f4", "f2", "u1", "V2", "M8[s]", "U3"])
def test_numpy_arrays_of_any_type(dtype: str) -> None:
    made = np.zeros((3, 1, 5), dtype)
    assert address_of(NAME, made) == (made.ctypes.data, made.nbytes, made)
    part = made[1:]
    assert address_of(NAME, part, part.nbytes)[:2] == (part.ctypes.data, part.nbytes)


def test_other_buffers() -> None:
    for made in (bytearray(24), array.array("d", [1, 2, 3]), (ctypes.c_int32 * 6)()):
        address, nbytes, _ = address_of(NAME, made)
        ctypes.memset(address, 1, 24)
        assert (nbytes, bytes(made)) == (24, b"\1" * 24)


def test_what_cannot_be_used_is_refused_by_name() -> None:
    frozen = np.zeros(4)
    frozen.flags.writeable = False
    refused(frozen, "is read-only")
    refused(b"1234", "is read-only")
    refused(np.zeros((4, 4))[:, :2], "is not contiguous")
    refused(np.asfortranarray(np.zeros((4, 4))), "is not contiguous")
    refused(memoryview(bytearray(8))[::2], "is not contiguous")
    refused(np.zeros(4), "has 32 bytes, allowed are 33 and more", 33)
    refused(bytearray(), "has 0 bytes", 1)


def test_array_is_kept_alive() -> None:
    made = np.ones(100)
    gone = weakref.ref(made)
    keeper = address_of(NAME, made)[2]
    del made
    gc.collect()
    assert gone() is not None
    del keeper
    assert gone() is None


def test_bytearray_cannot_move_meanwhile() -> None:
    made = bytearray(8)
    keeper = address_of(NAME, made)[2]
    with pytest.raises(BufferError):
        made.append(1)
    del keeper
    made.append(1)


# ---- DLPack


class Managed(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


DESTRUCTOR = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype, new_capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, DESTRUCTOR)


#: An exception's frames can hold a capsule for longer than its tensor, and the capsule's end calls into the tensor.
_producers: list[Tensor] = []


class Tensor:
    """A bfloat16 tensor that only speaks DLPack."""

    def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...] | None = None, offset: int = 0) -> None:
        self.memory = ctypes.create_string_buffer(256)
        self.device = (1, 0)
        self.freed = 0
        self.error: str | None = None
        self._destructor = DESTRUCTOR(self._free)
        _producers.append(self)
        self._shape = (ctypes.c_int64 * len(shape))(*shape)
        self._strides = None if strides is None else (ctypes.c_int64 * len(strides))(*strides)
        self._managed = Managed(
            ctypes.addressof(self.memory), self.device, len(shape), 4, 16, 1, self._shape, self._strides, offset
        )

    def _free(self, _: int) -> None:
        self.freed += 1

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self) -> Any:
        if self.error is not None:
            raise BufferError(self.error)
        return new_capsule(ctypes.addressof(self._managed), b"dltensor", self._destructor)


@pytest.mark.parametrize("strides", [None, (20, 99, 4, 1)])
def test_dlpack_tensor(strides: tuple[int, ...] | None) -> None:
    tensor = Tensor((3, 1, 5, 4), strides, offset=8)
    address, nbytes, keeper = address_of(NAME, tensor, 120)
    assert (address, nbytes) == (ctypes.addressof(tensor.memory) + 8, 120)
    assert tensor.freed == 0
    del keeper
    assert tensor.freed == 1


def test_dlpack_tensor_that_cannot_be_used() -> None:
    refused(Tensor((3, 4), (1, 3)), "is not contiguous")
    refused(Tensor((3, 4)), "has 24 bytes, allowed are 25 and more", 25)
    tensor = Tensor((3, 4))
    tensor.error = "it needs gradients"
    refused(tensor, "can't be shared: it needs gradients")
    tensor.device = (12, 1)
    refused(tensor, r"is on DLPack device \(12, 1\), allowed is CPU")
    assert tensor.freed == 0


def test_torch_tensor() -> None:
    torch = pytest.importorskip("torch")
    made = torch.zeros((3, 4), dtype=torch.bfloat16)
    assert address_of(NAME, made)[:2] == (made.data_ptr(), 24)
    refused(made.t(), "is not contiguous")
    refused(torch.zeros(3, requires_grad=True), "can't be shared")
