"""The functions of ACL and of one-sided HCCL: their prototypes, and which of them must be there."""

from __future__ import annotations

from ctypes import POINTER, c_char_p, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any, Final

from llm_datadist.backends.acl.structures import (
    AclrtPtrAttributes,
    CommMem,
    HcclCommConfig,
    HcclMemDescs,
    HcclPrepareConfig,
)

__all__ = ["ACL", "HCCL", "Function"]


@dataclass(frozen=True, slots=True)
class Function:
    """One function of a library."""

    name: str
    #: Without it the library is not accepted.
    mandatory: bool
    parameters: tuple[Any, ...]
    result: Any = c_int


MUST, MAY = True, False

# Handles, addresses, and arrays, which their owner may have filled by other means than ctypes.
context = stream = event = handle = comm = address = array = c_void_p
# Where a result goes.
out_handle = out_address = POINTER(c_void_p)
out_int, out_size = POINTER(c_int), POINTER(c_size_t)
device, milliseconds, kind = c_int32, c_int32, c_int
rank, seconds = c_uint32, c_int

_copy = (address, c_size_t, address, c_size_t, kind)
_copy_batch = (array, array, array, array, c_size_t, array, array, c_size_t, out_size)
_set = (address, c_size_t, c_int32, c_size_t)
_transfer = (comm, rank, array, c_uint32, stream)

ACL: Final = (
    Function("aclInit", MUST, (c_char_p,)),
    Function("aclFinalize", MAY, ()),
    Function("aclFinalizeReference", MAY, (POINTER(c_uint64),)),
    Function("aclGetRecentErrMsg", MUST, (), c_char_p),
    Function("aclrtGetVersion", MAY, (POINTER(c_int32), POINTER(c_int32), POINTER(c_int32))),
    Function("aclrtGetSocName", MUST, (), c_char_p),
    # Device and context
    Function("aclrtSetDevice", MUST, (device,)),
    Function("aclrtResetDevice", MUST, (device,)),
    Function("aclrtGetDevice", MUST, (POINTER(c_int32),)),
    Function("aclrtGetDeviceCount", MUST, (POINTER(c_uint32),)),
    Function("aclrtGetPhyDevIdByLogicDevId", MAY, (device, POINTER(c_int32))),
    Function("aclrtGetDeviceInfo", MAY, (c_uint32, c_int, POINTER(c_int64))),
    Function("aclrtSynchronizeDevice", MAY, ()),
    Function("aclrtDeviceTaskAbort", MAY, (device, c_uint32)),
    Function("aclrtCreateContext", MAY, (out_handle, device)),
    Function("aclrtDestroyContext", MAY, (context,)),
    Function("aclrtSetCurrentContext", MUST, (context,)),
    Function("aclrtGetCurrentContext", MUST, (out_handle,)),
    # Streams and events
    Function("aclrtCreateStream", MAY, (out_handle,)),
    Function("aclrtCreateStreamWithConfig", MUST, (out_handle, c_uint32, c_uint32)),
    Function("aclrtDestroyStream", MUST, (stream,)),
    Function("aclrtDestroyStreamForce", MAY, (stream,)),
    Function("aclrtSynchronizeStream", MUST, (stream,)),
    Function("aclrtSynchronizeStreamWithTimeout", MUST, (stream, milliseconds)),
    Function("aclrtStreamAbort", MUST, (stream,)),
    Function("aclrtStreamQuery", MAY, (stream, out_int)),
    Function("aclrtSetStreamFailureMode", MAY, (stream, c_uint64)),
    Function("aclrtCreateEvent", MAY, (out_handle,)),
    Function("aclrtDestroyEvent", MAY, (event,)),
    Function("aclrtRecordEvent", MAY, (event, stream)),
    Function("aclrtQueryEventStatus", MAY, (event, out_int)),
    Function("aclrtSynchronizeEvent", MAY, (event,)),
    Function("aclrtSynchronizeEventWithTimeout", MAY, (event, milliseconds)),
    Function("aclrtStreamWaitEvent", MAY, (stream, event)),
    # Memory
    Function("aclrtMalloc", MUST, (out_address, c_size_t, c_int)),
    Function("aclrtFree", MUST, (address,)),
    Function("aclrtMallocHost", MUST, (out_address, c_size_t)),
    Function("aclrtFreeHost", MUST, (address,)),
    Function("aclrtGetMemInfo", MUST, (c_int, out_size, out_size)),
    Function("aclrtPointerGetAttributes", MAY, (address, POINTER(AclrtPtrAttributes))),
    Function("aclrtMemGetAddressRange", MAY, (address, out_address, out_size)),
    Function("aclrtHostRegister", MAY, (address, c_uint64, c_int, out_address)),
    Function("aclrtHostUnregister", MAY, (address,)),
    Function("aclrtGetMemUceInfo", MAY, (device, array, c_size_t, out_size)),
    Function("aclrtMemUceRepair", MAY, (device, array, c_size_t)),
    # Copies
    Function("aclrtMemcpy", MUST, _copy),
    Function("aclrtMemcpyAsync", MUST, (*_copy, stream)),
    Function("aclrtMemcpyBatch", MAY, _copy_batch),
    Function("aclrtMemcpyBatchAsync", MAY, (*_copy_batch, stream)),
    Function("aclrtMemset", MUST, _set),
    Function("aclrtMemsetAsync", MAY, (*_set, stream)),
)

HCCL: Final = (
    Function("HcclCommInitClusterInfoMemConfig", MUST, (c_char_p, rank, POINTER(HcclCommConfig), out_handle)),
    Function("HcclCommDestroy", MUST, (comm,)),
    Function("HcclRegisterGlobalMem", MUST, (POINTER(CommMem), out_handle)),
    Function("HcclDeregisterGlobalMem", MUST, (handle,)),
    Function("HcclCommBindMem", MUST, (comm, handle)),
    Function("HcclCommUnbindMem", MUST, (comm, handle)),
    Function("HcclCommPrepare", MUST, (comm, POINTER(HcclPrepareConfig), seconds)),
    Function(
        "HcclExchangeMemDesc",
        MUST,
        (comm, rank, POINTER(HcclMemDescs), seconds, POINTER(HcclMemDescs), POINTER(c_uint32)),
    ),
    Function("HcclBatchGet", MUST, _transfer),
    Function("HcclBatchPut", MUST, _transfer),
    Function("HcclRemapRegistedMemory", MUST, (array, array, c_uint64, c_uint64)),
    Function("HcclGetErrorString", MAY, (c_int,), c_char_p),
)
