"""What the driver, the user and the machine's files say of the devices, put together for peers."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

from llm_datadist.backend import BackendError, Failure
from llm_datadist.backends.acl.codes import Step, failure
from llm_datadist.backends.acl.devices import Device
from llm_datadist.backends.acl.library import Library, NativeError
from llm_datadist.backends.acl.local_comm_res import Given
from llm_datadist.backends.acl.products import Product, product_of
from llm_datadist.backends.acl.structures import DeviceInfo
from llm_datadist.backends.acl.topology import INTRA_ROCE_VARIABLE, Side, agree, device_ip, own_side

__all__ = ["find_sides"]


def find_sides(
    library: Library, devices: Sequence[Device], given: Given, environment: Mapping[str, str]
) -> tuple[Side, ...]:
    """Describe devices.

    Raises
    ------
    BackendError
        ``UNSUPPORTED`` for a product that one-sided HCCL does not run on; ``INVALID`` when something that links need
        is not known, or known differently.
    """
    soc_name = library.soc_name()
    product = product_of(soc_name)
    if product not in (Product.A2, Product.A3):
        raise BackendError(
            Failure.UNSUPPORTED, f"the acl backend runs on Atlas A2 and A3; the driver calls this device {soc_name!r}"
        )
    return tuple(_find_side(device, product, given, environment.get(INTRA_ROCE_VARIABLE) == "1") for device in devices)


def _find_side(device: Device, product: Product, given: Given, intra_roce: bool) -> Side:
    told = _ask(device, "aclrtGetPhyDevIdByLogicDevId", ctypes.c_int32())
    device_id = agree("device_id", told, given.device_id)
    pods = product is Product.A3
    return own_side(
        product,
        device_id,
        device_ip(device_id, given),
        given,
        super_device_id=_ask(device, "aclrtGetDeviceInfo", ctypes.c_int64(), DeviceInfo.SUPER_POD_DEVICE_ID)
        if pods
        else None,
        super_pod_id=_ask(device, "aclrtGetDeviceInfo", ctypes.c_int64(), DeviceInfo.SUPER_POD_ID) if pods else None,
        intra_roce=intra_roce,
    )


def _ask(device: Device, function: str, answer: Any, *what: int) -> int | None:
    """Ask the driver for a number; None where it does not have the function."""
    if not device.library.has(function):
        return None
    try:
        with device.current():
            device.library.call(function, device.id, *what, ctypes.byref(answer))
    except NativeError as error:
        raise failure(error, f"device {device.id} could not be identified", step=Step.DEVICE) from error
    value: int = answer.value
    return value
