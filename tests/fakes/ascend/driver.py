"""The fake driver through ctypes, as its own tests call it: no code of the backend, so that neither proves itself."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator, Sequence
from ctypes import POINTER, byref, c_char, c_int, c_int32, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p
from pathlib import Path

HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE = range(4)
DEVICE, HOST = 0, 1
UINT8 = 7
MIB = 1 << 20


class CommMem(ctypes.Structure):
    """A range of memory to register."""

    _fields_ = [("type", c_int), ("addr", c_void_p), ("size", c_uint64)]


class OneSideOpDesc(ctypes.Structure):
    """One range of a get or put."""

    _fields_ = [("localAddr", c_void_p), ("remoteAddr", c_void_p), ("count", c_uint64), ("dataType", c_int)]


class PrepareConfig(ctypes.Structure):
    """The argument of HcclCommPrepare."""

    _fields_ = [("topoType", c_int), ("reserved", c_uint64 * 3)]


class CommConfig(ctypes.Structure):
    """The first 300 bytes of the configuration of a comm, version 5."""

    _fields_ = [
        ("size", c_size_t),
        ("magic", c_uint32),
        ("version", c_uint32),
        ("reserved", c_uint64),
        ("hcclBufferSize", c_uint32),
        ("hcclDeterministic", c_uint32),
        ("hcclCommName", c_char * 128),
        ("hcclUdi", c_char * 128),
        ("hcclOpExpansionMode", c_uint32),
        ("hcclRdmaTrafficClass", c_uint32),
        ("hcclRdmaServiceLevel", c_uint32),
    ]


class MemDescs(ctypes.Structure):
    """A list of 512-byte descriptors."""

    _fields_ = [("array", c_void_p), ("arrayLength", c_uint32)]


class MemLocation(ctypes.Structure):
    """Where memory is."""

    _fields_ = [("id", c_uint32), ("type", c_int)]


class MemcpyBatchAttr(ctypes.Structure):
    """What a run of entries of a batch copy has in common."""

    _fields_ = [("dstLoc", MemLocation), ("srcLoc", MemLocation), ("rsv", c_uint8 * 16)]


class PtrAttributes(ctypes.Structure):
    """What the driver knows about a pointer."""

    _fields_ = [("location", MemLocation), ("pageSize", c_uint32), ("rsv", c_uint32 * 4)]


ADDRESS, SIZE, INT, WORD = c_void_p, c_size_t, c_int32, c_uint32
OUT = POINTER(c_void_p)
COPY = [ADDRESS, SIZE, ADDRESS, SIZE, INT]
BATCH = [OUT, POINTER(SIZE), OUT, POINTER(SIZE), SIZE, POINTER(MemcpyBatchAttr), POINTER(SIZE), SIZE, POINTER(SIZE)]
TRANSFER = [ADDRESS, WORD, POINTER(OneSideOpDesc), WORD, ADDRESS]
PROTOTYPES = {
    "aclInit": [ctypes.c_char_p],
    "aclFinalize": [],
    "aclFinalizeReference": [POINTER(c_uint64)],
    "aclrtGetVersion": [POINTER(INT)] * 3,
    "aclrtSetDevice": [INT],
    "aclrtResetDevice": [INT],
    "aclrtGetDevice": [POINTER(INT)],
    "aclrtGetDeviceCount": [POINTER(WORD)],
    "aclrtCreateContext": [OUT, INT],
    "aclrtDestroyContext": [ADDRESS],
    "aclrtSetCurrentContext": [ADDRESS],
    "aclrtGetCurrentContext": [OUT],
    "aclrtCreateStream": [OUT],
    "aclrtCreateStreamWithConfig": [OUT, WORD, WORD],
    "aclrtDestroyStream": [ADDRESS],
    "aclrtDestroyStreamForce": [ADDRESS],
    "aclrtSynchronizeStream": [ADDRESS],
    "aclrtSynchronizeStreamWithTimeout": [ADDRESS, INT],
    "aclrtStreamAbort": [ADDRESS],
    "aclrtStreamQuery": [ADDRESS, POINTER(INT)],
    "aclrtSetStreamFailureMode": [ADDRESS, c_uint64],
    "aclrtSynchronizeDevice": [],
    "aclrtMalloc": [OUT, SIZE, INT],
    "aclrtFree": [ADDRESS],
    "aclrtMallocHost": [OUT, SIZE],
    "aclrtFreeHost": [ADDRESS],
    "aclrtMemcpy": COPY,
    "aclrtMemcpyAsync": [*COPY, ADDRESS],
    "aclrtMemcpyBatch": BATCH,
    "aclrtMemcpyBatchAsync": [*BATCH, ADDRESS],
    "aclrtMemset": [ADDRESS, SIZE, INT, SIZE],
    "aclrtMemsetAsync": [ADDRESS, SIZE, INT, SIZE, ADDRESS],
    "aclrtGetMemInfo": [INT, POINTER(SIZE), POINTER(SIZE)],
    "aclrtCreateEvent": [OUT],
    "aclrtDestroyEvent": [ADDRESS],
    "aclrtRecordEvent": [ADDRESS, ADDRESS],
    "aclrtQueryEventStatus": [ADDRESS, POINTER(INT)],
    "aclrtSynchronizeEvent": [ADDRESS],
    "aclrtSynchronizeEventWithTimeout": [ADDRESS, INT],
    "aclrtStreamWaitEvent": [ADDRESS, ADDRESS],
    "aclrtGetPhyDevIdByLogicDevId": [INT, POINTER(INT)],
    "aclrtGetDeviceInfo": [WORD, INT, POINTER(ctypes.c_int64)],
    "aclrtPointerGetAttributes": [ADDRESS, POINTER(PtrAttributes)],
    "aclrtMemGetAddressRange": [ADDRESS, OUT, POINTER(SIZE)],
    "aclrtHostRegister": [ADDRESS, c_uint64, INT, OUT],
    "aclrtHostUnregister": [ADDRESS],
    "aclrtDeviceTaskAbort": [INT, WORD],
    "aclrtGetMemUceInfo": [INT, ADDRESS, SIZE, POINTER(SIZE)],
    "aclrtMemUceRepair": [INT, ADDRESS, SIZE],
    "HcclCommInitClusterInfoMemConfig": [ctypes.c_char_p, WORD, POINTER(CommConfig), OUT],
    "HcclCommDestroy": [ADDRESS],
    "HcclRegisterGlobalMem": [POINTER(CommMem), OUT],
    "HcclDeregisterGlobalMem": [ADDRESS],
    "HcclCommBindMem": [ADDRESS, ADDRESS],
    "HcclCommUnbindMem": [ADDRESS, ADDRESS],
    "HcclCommPrepare": [ADDRESS, POINTER(PrepareConfig), INT],
    "HcclExchangeMemDesc": [ADDRESS, WORD, POINTER(MemDescs), INT, POINTER(MemDescs), POINTER(WORD)],
    "HcclBatchGet": TRANSFER,
    "HcclBatchPut": TRANSFER,
    "HcclRemapRegistedMemory": [OUT, POINTER(CommMem), c_uint64, c_uint64],
}
TEXTS = {"aclrtGetSocName": [], "aclGetRecentErrMsg": [], "HcclGetErrorString": [INT]}


class Driver:
    """Both libraries, loaded. A function of theirs is an attribute: called with plain numbers, it gives its code."""

    def __init__(self, acl: Path, hccl: Path) -> None:
        self.starts: dict[int, int] = {}
        self.acl = ctypes.CDLL(str(acl), ctypes.RTLD_GLOBAL)
        self.hccl = ctypes.CDLL(str(hccl), ctypes.RTLD_GLOBAL)
        for name, arguments in PROTOTYPES.items():
            function = getattr(self.hccl if name.startswith("Hccl") else self.acl, name)
            function.argtypes, function.restype = arguments, c_int
            setattr(self, name, function)
        for name, arguments in TEXTS.items():
            function = getattr(self.hccl if name.startswith("Hccl") else self.acl, name)
            function.argtypes, function.restype = arguments, ctypes.c_char_p
            setattr(self, name, function)
        self.acl.fake_violations.argtypes, self.acl.fake_violations.restype = [ctypes.c_char_p, SIZE], SIZE
        self.acl.fake_inject.argtypes = self.acl.fake_delay.argtypes = [ctypes.c_char_p]
        self.acl.fake_current.argtypes = [POINTER(INT), OUT]
        self.acl.fake_release_stream.argtypes = self.acl.fake_waiting.argtypes = [ADDRESS]
        self.acl.fake_layout.argtypes, self.acl.fake_layout.restype = [ctypes.c_char_p], ctypes.c_long

    def __getattr__(self, name: str) -> ctypes._NamedFuncPointer:
        """Give a control function of the fake."""
        return getattr(self.acl, name)

    def violations(self) -> list[str]:
        """List what was recorded, a line each."""
        buffer = ctypes.create_string_buffer(1 << 20)
        self.acl.fake_violations(buffer, len(buffer))
        return buffer.value.decode().splitlines()

    def ids(self) -> list[str]:
        """List the ids of what was recorded."""
        return [line.split()[0] for line in self.violations()]

    # Steps that a test takes on its way to what it is about: they raise when they fail.

    def do(self, name: str, *arguments: object) -> None:
        """Call a function that must succeed."""
        code = getattr(self, name)(*arguments)
        if code:
            raise AssertionError(f"{name} gave {code}: {self.aclGetRecentErrMsg()}, {self.violations()}")

    def out(self, name: str, *arguments: object) -> int:
        """Call a function whose first argument takes an address or handle that it gives."""
        result = c_void_p()
        self.do(name, byref(result), *arguments)
        return result.value or 0

    def start(self, device: int = 0) -> None:
        """Initialise, and make a device current."""
        code = self.aclInit(None)
        if code not in (0, 100002):
            raise AssertionError(f"aclInit gave {code}")
        self.do("aclrtSetDevice", device)

    def stream(self) -> int:
        """Make a stream as a backend does."""
        return self.out("aclrtCreateStreamWithConfig", 0, 3)

    def aligned(self, size: int) -> int:
        """Allocate device memory and give its first multiple of 2 MiB, behind which there is room for `size` bytes."""
        start = self.out("aclrtMalloc", size + 2 * MIB, 0)
        aligned = -(-start // (2 * MIB)) * 2 * MIB
        self.starts[aligned] = start
        return aligned

    def free_aligned(self, address: int) -> None:
        """Free what `aligned` has given."""
        self.do("aclrtFree", self.starts.pop(address))

    def write(self, device: int, data: bytes) -> None:
        """Copy bytes to device memory."""
        buffer = ctypes.create_string_buffer(data, len(data))
        self.do("aclrtMemcpy", device, len(data), ctypes.addressof(buffer), len(data), HOST_TO_DEVICE)

    def read(self, device: int, size: int) -> bytes:
        """Copy bytes from device memory."""
        buffer = ctypes.create_string_buffer(size)
        self.do("aclrtMemcpy", ctypes.addressof(buffer), size, device, size, DEVICE_TO_HOST)
        return buffer.raw

    def register(self, address: int, size: int, kind: int = DEVICE) -> int:
        """Register memory with HCCL."""
        handle = c_void_p()
        self.do("HcclRegisterGlobalMem", byref(CommMem(kind, address, size)), byref(handle))
        return handle.value or 0

    def comm(self, table: str, rank: int, name: str = "pair") -> int:
        """Make a communicator."""
        handle = c_void_p()
        self.do("HcclCommInitClusterInfoMemConfig", table.encode(), rank, byref(config(name)), byref(handle))
        return handle.value or 0

    def prepare(self, comm: int, timeout: int = 20) -> int:
        """Give the code of a Prepare."""
        return int(self.HcclCommPrepare(comm, byref(PrepareConfig()), timeout))

    def transfer(self, name: str, comm: int, rank: int, ranges: Sequence[tuple[int, int, int]], stream: int) -> int:
        """Give the code of a get or put of (local, remote, bytes) ranges."""
        descs = (OneSideOpDesc * max(len(ranges), 1))(*(OneSideOpDesc(*each, UINT8) for each in ranges))
        return int(getattr(self, name)(comm, rank, descs, len(ranges), stream))

    def sync(self, stream: int, timeout_ms: int = 20000) -> int:
        """Give the code of a sync."""
        return int(self.aclrtSynchronizeStreamWithTimeout(stream, timeout_ms))


def config(name: str = "pair", **fields: int) -> CommConfig:
    """Give the configuration of a comm, with some fields changed."""
    made = CommConfig(300, 0xF0F0F0F0, 5, 0, 200, 0, name.encode(), b"", 0, 0xFFFFFFFF, 0xFFFFFFFF)
    for field, value in fields.items():
        setattr(made, field, value)
    return made


def servers(*devices: tuple[str, int]) -> Iterator[dict[str, object]]:
    """Give the server list of (server id, physical device) ranks, counted in the order of servers."""
    names = list(dict.fromkeys(server for server, _ in devices))
    rank = 0
    for name in names:
        entries = []
        for device in (device for server, device in devices if server == name):
            address = f"198.51.100.{10 * (1 + names.index(name)) + device}"
            entries.append({"device_id": str(device), "device_ip": address, "rank_id": str(rank)})
            rank += 1
        yield {"server_id": name, "device": entries}


def rank_table(*devices: tuple[str, int]) -> dict[str, object]:
    """Give a rank table of version 1.0."""
    listed = list(servers(*devices))
    return {"version": "1.0", "server_count": str(len(listed)), "status": "completed", "server_list": listed}


def pod_table(*devices: tuple[str, int], pods: Sequence[int] = (7,)) -> dict[str, object]:
    """Give a rank table of version 1.2; servers are dealt out to the pods in turn."""
    table = rank_table(*devices) | {"version": "1.2"}
    listed = list(servers(*devices))
    for server in listed:
        for device in server["device"]:  # type: ignore[attr-defined]
            device["super_device_id"] = str(100 + int(device["device_id"]))
    members: dict[int, list[dict[str, object]]] = {pod: [] for pod in pods}
    for index, server in enumerate(listed):
        members[pods[index % len(pods)]].append({"server_id": server["server_id"]})
    table["server_list"] = listed
    table["super_pod_list"] = [{"super_pod_id": str(pod), "server_list": of} for pod, of in members.items()]
    return table


def text(table: dict[str, object]) -> str:
    """Give the bytes that both sides pass."""
    return json.dumps(table, separators=(",", ":"))
