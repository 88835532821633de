"""Families of Ascend devices, which differ in how they are wired."""

from __future__ import annotations

import enum

__all__ = ["Product", "product_of"]


class Product(enum.Enum):
    """A family of devices."""

    A2 = "A2"
    A3 = "A3"
    #: Known, and not supported: one-sided HCCL of this kind does not exist there.
    A5 = "A5"
    OTHER = "other"


_PREFIXES = {"Ascend910B": Product.A2, "Ascend910_93": Product.A3, "Ascend950": Product.A5}


def product_of(soc_name: str) -> Product:
    """Give the family of a chip by the name that ``aclrtGetSocName`` gives."""
    return next((product for prefix, product in _PREFIXES.items() if soc_name.startswith(prefix)), Product.OTHER)
