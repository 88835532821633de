"""What the driver knows of an address."""

from __future__ import annotations

import ctypes

from llm_datadist.backends.acl.devices import Device
from llm_datadist.backends.acl.structures import AclrtMemLocation, AclrtPtrAttributes

__all__ = ["allocation_of", "location_of", "tells_locations"]

_LOCATIONS, _ALLOCATIONS = "aclrtPointerGetAttributes", "aclrtMemGetAddressRange"


def tells_locations(device: Device) -> bool:
    """Say whether the driver has the function that `location_of` asks."""
    return device.library.has(_LOCATIONS)


def location_of(device: Device, address: int) -> AclrtMemLocation | None:
    """Give whose memory an address is; None where the driver can't tell."""
    if not tells_locations(device):
        return None
    attributes = AclrtPtrAttributes()
    with device.current():
        if device.library.code(_LOCATIONS, address, ctypes.byref(attributes)):
            return None
    return attributes.location


def allocation_of(device: Device, address: int) -> tuple[int, int] | None:
    """Give begin and end of the device memory that was allocated around an address; None as above."""
    if not device.library.has(_ALLOCATIONS):
        return None
    base, size = ctypes.c_void_p(), ctypes.c_size_t()
    with device.current():
        if device.library.code(_ALLOCATIONS, address, ctypes.byref(base), ctypes.byref(size)):
            return None
    return base.value or 0, (base.value or 0) + size.value
