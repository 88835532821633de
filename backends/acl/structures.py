"""Structures and numbers of the ABI of ACL and of one-sided HCCL, as far as they are used here."""

from __future__ import annotations

import ctypes
import enum
from ctypes import Structure, c_char, c_int, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p
from typing import Final

__all__ = [
    "ALIGNMENT",
    "COMM_NAME_BYTES",
    "DESCRIPTORS",
    "NOT_SET",
    "AclrtMemLocation",
    "AclrtMemcpyBatchAttr",
    "AclrtPtrAttributes",
    "CommMem",
    "CopyKind",
    "DeviceInfo",
    "HcclCommConfig",
    "HcclDataType",
    "HcclMemDesc",
    "HcclMemDescs",
    "HcclOneSideOpDesc",
    "HcclPrepareConfig",
    "LocationType",
    "MallocPolicy",
    "MemInfo",
    "MemType",
    "StreamFlag",
    "comm_config",
]

#: A field of `HcclCommConfig` that leaves the choice to the library.
NOT_SET: Final = 0xFFFFFFFF
#: Where device memory must start so that HCCS can reach it.
ALIGNMENT: Final = 2 << 20
#: The library takes at most 256 descriptors a call.
DESCRIPTORS: Final = 64
#: The longest name of a communicator; a zero byte follows it.
COMM_NAME_BYTES: Final = 127


class MallocPolicy(enum.IntEnum):
    """Pages of device memory (``aclrtMemMallocPolicy``)."""

    HUGE_FIRST = 0


class CopyKind(enum.IntEnum):
    """Direction of a copy (``aclrtMemcpyKind``)."""

    HOST_TO_HOST = 0
    HOST_TO_DEVICE = 1
    DEVICE_TO_HOST = 2
    DEVICE_TO_DEVICE = 3


class MemInfo(enum.IntEnum):
    """What ``aclrtGetMemInfo`` counts."""

    HBM = 1


class StreamFlag(enum.IntFlag):
    """How a stream is made (``aclrtCreateStreamWithConfig``)."""

    FAST_LAUNCH = 0x1
    FAST_SYNC = 0x2


class LocationType(enum.IntEnum):
    """Where memory is (``aclrtMemLocation``)."""

    HOST = 0
    DEVICE = 1
    UNREGISTERED = 2
    MANAGED = 3
    HOST_NUMA = 4


class DeviceInfo(enum.IntEnum):
    """What ``aclrtGetDeviceInfo`` tells."""

    SUPER_POD_DEVICE_ID = 403
    SUPER_POD_ID = 405


class MemType(enum.IntEnum):
    """Memory that HCCL registers (``CommMemType``)."""

    DEVICE = 0
    HOST = 1


class HcclDataType(enum.IntEnum):
    """Element of a transfer; always bytes here."""

    UINT8 = 7


class AclrtMemLocation(Structure):
    """Where memory is: which device, or the host."""

    _fields_ = (("id", c_uint32), ("type", c_int))
    id: int
    type: int


class AclrtMemcpyBatchAttr(Structure):
    """Sides of the copies of a batch from one index on."""

    _fields_ = (("dstLoc", AclrtMemLocation), ("srcLoc", AclrtMemLocation), ("rsv", c_uint8 * 16))
    dstLoc: AclrtMemLocation
    srcLoc: AclrtMemLocation


class AclrtPtrAttributes(Structure):
    """What the driver knows of an address."""

    _fields_ = (("location", AclrtMemLocation), ("pageSize", c_uint32), ("rsv", c_uint32 * 4))
    location: AclrtMemLocation
    pageSize: int


class CommMem(Structure):
    """A range of memory to register."""

    _fields_ = (("type", c_int), ("addr", c_void_p), ("size", c_uint64))
    type: int
    addr: int | None
    size: int


class HcclMemDesc(Structure):
    """A memory descriptor: two ranks, then what the library alone understands."""

    _fields_ = (("desc", c_char * 512),)


class HcclMemDescs(Structure):
    """A list of memory descriptors."""

    _fields_ = (("array", ctypes.POINTER(HcclMemDesc)), ("arrayLength", c_uint32))
    arrayLength: int


class HcclOneSideOpDesc(Structure):
    """One run of a transfer."""

    _fields_ = (("localAddr", c_void_p), ("remoteAddr", c_void_p), ("count", c_uint64), ("dataType", c_int))
    localAddr: int | None
    remoteAddr: int | None
    count: int
    dataType: int


class HcclPrepareConfig(Structure):
    """How ranks are connected; all zero is a full mesh."""

    _fields_ = (("topoType", c_int), ("reserved", c_uint64 * 3))
    topoType: int


class HcclCommConfig(Structure):
    """Settings of a communicator: version 5, the smallest that has all we need and that every release takes.

    The library reads as many bytes as ``size`` says, so the block may be larger than the fields.
    """

    SIZE: Final = 300
    MAGIC: Final = 0xF0F0F0F0
    VERSION: Final = 5

    _fields_ = (
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
        ("rest", c_uint8 * (4096 - SIZE)),
    )
    size: int
    magic: int
    version: int
    hcclBufferSize: int
    hcclDeterministic: int
    hcclCommName: bytes
    hcclOpExpansionMode: int
    hcclRdmaTrafficClass: int
    hcclRdmaServiceLevel: int


def comm_config(name: bytes, traffic_class: int = NOT_SET, service_level: int = NOT_SET) -> HcclCommConfig:
    """Fill the settings of a communicator.

    Parameters
    ----------
    name : bytes
        1 to 127 bytes, none of them zero; the same at both ends.
    traffic_class, service_level : int, optional
        Of the packets on RoCE.
    """
    config = HcclCommConfig()
    config.size, config.magic, config.version = HcclCommConfig.SIZE, HcclCommConfig.MAGIC, HcclCommConfig.VERSION
    config.hcclBufferSize = 200  # MiB, for collectives, which are never run; 0 is refused
    config.hcclCommName = name
    config.hcclRdmaTrafficClass, config.hcclRdmaServiceLevel = traffic_class, service_level
    return config


#: Size of each structure, and the offset of each of its fields.
_LAYOUTS: Final[tuple[tuple[type[Structure], int, tuple[int, ...]], ...]] = (
    (AclrtMemLocation, 8, (0, 4)),
    (AclrtMemcpyBatchAttr, 32, (0, 8, 16)),
    (AclrtPtrAttributes, 28, (0, 8, 12)),
    (CommMem, 24, (0, 8, 16)),
    (HcclMemDesc, 512, (0,)),
    (HcclMemDescs, 16, (0, 8)),
    (HcclOneSideOpDesc, 32, (0, 8, 16, 24)),
    (HcclPrepareConfig, 32, (0, 8)),
    (HcclCommConfig, 4096, (0, 8, 12, 16, 24, 28, 32, 160, 288, 292, 296, HcclCommConfig.SIZE)),
)


def _check_layouts() -> None:
    """Refuse a machine whose C types are not those that the libraries were built with."""
    for structure, size, offsets in _LAYOUTS:
        found = tuple(getattr(structure, field[0]).offset for field in structure._fields_)
        if ctypes.sizeof(structure) != size or found != offsets:
            raise ImportError(
                f"{structure.__name__} has {ctypes.sizeof(structure)} bytes and fields at {found}, the Ascend "
                f"libraries want {size} bytes and fields at {offsets}: they run on 64-bit Linux only"
            )


_check_layouts()
