"""Native codes: their names, and the failure that each of them is to the engine."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final

from llm_datadist.backend import BackendError, Failure

if TYPE_CHECKING:
    from llm_datadist.backends.acl.library import NativeError

__all__ = ["REPEAT_FINALIZE", "REPEAT_INITIALIZE", "Step", "failure", "name_of"]

#: ACL was initialised, or finalised, already: a success.
REPEAT_INITIALIZE: Final = 100002
REPEAT_FINALIZE: Final = 100037

_ACL_NAMES: Final = {
    100000: "INVALID_PARAM",
    100001: "UNINITIALIZE",
    100002: "REPEAT_INITIALIZE",
    100037: "REPEAT_FINALIZE",
    107000: "RT_PARAM_INVALID",
    107001: "RT_INVALID_DEVICEID",
    107002: "RT_CONTEXT_NULL",
    107003: "RT_STREAM_CONTEXT",
    107008: "RT_ADDR_UNALIGNED",
    107016: "RT_INVALID_MEMORY_TYPE",
    107017: "RT_INVALID_HANDLE",
    107019: "RT_WAIT_TIMEOUT",
    107020: "RT_TASK_TIMEOUT",
    107022: "RT_DEVICE_TASK_ABORT",
    107023: "RT_STREAM_ABORT",
    200000: "BAD_ALLOC",
    200001: "API_NOT_SUPPORT",
    200002: "INVALID_DEVICE",
    207000: "RT_FEATURE_NOT_SUPPORT",
    207001: "RT_MEMORY_ALLOCATION",
    207002: "RT_MEMORY_FREE",
    207004: "no device",
    207005: "no resource",
    207007: "no event",
    207008: "no stream",
    207012: "over limit",
    207018: "RT_DEVICE_OOM",
    300000: "STORAGE_OVER_LIMIT",
    500000: "INTERNAL",
    500001: "FAILURE",
    500003: "RT_FAILURE",
    507000: "internal error of the runtime",
    507001: "internal error of the scheduler",
    507004: "STREAM_NOT_COMPLETE",
    507006: "EVENT_NOT_COMPLETE",
    507010: "LOST_HEARTBEAT",
    507012: "REPORT_TIMEOUT",
    507013: "SYS_DMA",
    507018: "AICPU_EXCEPTION",
    507046: "STREAM_SYNC_TIMEOUT",
    507047: "EVENT_SYNC_TIMEOUT",
    507052: "COPY_DATA",
    507053: "DEVICE_MEM_ERROR",
    507054: "HBM_MULTI_BIT_ECC_ERROR",
    507055: "SUSPECT_DEVICE_MEM_ERROR",
    507056: "LINK_ERROR",
    507057: "SUSPECT_REMOTE_ERROR",
    507899: "internal error of the driver",
    507901: "SOCKET_CLOSE",
    507904: "COMM_OP_RETRY_FAIL",
    507910: "host range already registered",
    507911: "host range not registered",
}

_HCCL_NAMES: Final = {
    1: "PARA",
    2: "PTR",
    3: "MEMORY",
    4: "INTERNAL",
    5: "NOT_SUPPORT",
    6: "NOT_FOUND",
    7: "UNAVAIL",
    8: "SYSCALL",
    9: "TIMEOUT",
    10: "OPEN_FILE_FAILURE",
    11: "TCP_CONNECT",
    12: "ROCE_CONNECT",
    13: "TCP_TRANSFER",
    14: "ROCE_TRANSFER",
    15: "RUNTIME",
    16: "DRV",
    17: "PROFILING",
    18: "CCE",
    19: "NETWORK",
    20: "AGAIN",
    21: "REMOTE",
    22: "SUSPENDING",
    23: "OPRETRY_FAIL",
    24: "OOM",
    1041: "IN_STATUS",
}


def name_of(function: str, code: int) -> str:
    """Give the name of a code that a function returned."""
    return (_HCCL_NAMES if function.startswith("Hccl") else _ACL_NAMES).get(code, "unknown code")


class Step(enum.Enum):
    """What was done when a native call failed."""

    DEVICE = "initialise, claim a device"
    CONTEXT = "make a device current"
    MEMORY = "allocate device memory"
    HOST_MEMORY = "allocate host memory"
    REGISTER = "register or deregister memory"
    LINK = "make a communicator and bind memory to it"
    PREPARE = "prepare a communicator"
    TRANSFER = "read or write"
    COPY = "copy or set inside this process"
    UNLINK = "unbind memory, and end a communicator and its stream"
    REMAP = "remap registered memory"


_WRONG_CONTEXT: Final = frozenset((107002, 107003, 107017))
_BAD_VALUE: Final = frozenset((100000, 107000, 107001))
#: Steps whose arguments come from the user; elsewhere a bad value is a mistake of ours.
_USERS_VALUES: Final = frozenset((Step.DEVICE, Step.MEMORY, Step.HOST_MEMORY, Step.REGISTER, Step.COPY))

_ACL_ANYWHERE: Final = {
    **dict.fromkeys((507046, 507047, 107019, 107020), Failure.TIMED_OUT),
    **dict.fromkeys((507053, 507054, 507055), Failure.DEVICE_MEMORY),
    507057: Failure.SUSPECT_REMOTE,
    **dict.fromkeys((200001, 207000), Failure.UNSUPPORTED),
    # Our own aborts have a reason that was told already; these are of others.
    **dict.fromkeys((107022, 107023), Failure.FAILED),
    **dict.fromkeys(_WRONG_CONTEXT, Failure.FAILED),
}
_ACL_AT: Final = {
    Step.MEMORY: dict.fromkeys((207001, 207018), Failure.OUT_OF_MEMORY),
    Step.HOST_MEMORY: dict.fromkeys((207001, 200000), Failure.HOST_OUT_OF_MEMORY),
}
_HCCL: Final = {1: Failure.INVALID, 5: Failure.UNSUPPORTED, 9: Failure.TIMED_OUT}
_HCCL_AT: Final = {Step.REGISTER: _HCCL, Step.PREPARE: _HCCL, Step.TRANSFER: _HCCL}
_OTHERWISE: Final = {
    Step.LINK: Failure.LINK_FAILED,
    Step.PREPARE: Failure.LINK_FAILED,
    Step.UNLINK: Failure.UNLINK_FAILED,
}


def failure(error: NativeError, doing: str, *, step: Step) -> BackendError:
    """Say what a native failure is to the engine.

    Parameters
    ----------
    error : NativeError
        What the driver said.
    doing : str
        What we did, and with which peer if there is one: the start of the text.
    step : Step
        The same, for the choice of the kind.
    """
    hint = ""
    if error.code in _WRONG_CONTEXT and not error.function.startswith("Hccl"):
        hint = " (internal: wrong context)"
    return BackendError(_kind(error, step), f"{doing}: {error}{hint}", error.code)


def _kind(error: NativeError, step: Step) -> Failure:
    otherwise = _OTHERWISE.get(step, Failure.FAILED)
    if step is Step.UNLINK:
        return otherwise
    if error.function.startswith("Hccl"):
        return _HCCL_AT.get(step, {}).get(error.code, otherwise)
    if error.code in _BAD_VALUE and step in _USERS_VALUES:
        return Failure.INVALID
    return {**_ACL_ANYWHERE, **_ACL_AT.get(step, {})}.get(error.code, otherwise)
