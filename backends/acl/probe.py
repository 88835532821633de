"""Look whether this machine has an Ascend runtime, and which."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator, Mapping
from ctypes import byref, c_int32, c_uint32
from dataclasses import dataclass, replace

from llm_datadist.backends.acl.codes import REPEAT_INITIALIZE
from llm_datadist.backends.acl.library import Broken, Library, NativeError, NotInstalled, Paths, open_library
from llm_datadist.backends.acl.products import Product, product_of

__all__ = ["Installed", "Probe", "is_installed", "probe"]


class Installed(enum.Enum):
    """Whether there is a runtime."""

    NO = "no"
    YES = "yes"
    #: There is one, or the environment names one, and it can't be used.
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Probe:
    """What was found. What could not be asked is None."""

    installed: Installed
    #: What was tried and refused, and what could not be asked.
    reasons: tuple[str, ...]
    paths: Paths | None = None
    #: Optional functions that are not there.
    missing: tuple[str, ...] = ()
    #: Of the runtime's interface.
    version: tuple[int, int, int] | None = None
    soc_name: str | None = None
    product: Product | None = None
    devices: int | None = None


def is_installed(environment: Mapping[str, str]) -> bool:
    """Say whether there is a runtime, be it a broken one. Opens the libraries, and initialises nothing."""
    try:
        open_library(environment)
    except NotInstalled:
        return False
    except Broken:
        return True
    return True


def probe(environment: Mapping[str, str]) -> Probe:
    """Look for a runtime and ask it what it is.

    Parameters
    ----------
    environment : Mapping
        As for `open_library`.

    Notes
    -----
    Raises nothing because of what the machine has or lacks, and leaves ACL as it was. A runtime that can't be left as
    it was (before 8.5, ACL can be initialised once in a process) is not asked.
    """
    try:
        library = open_library(environment)
    except NotInstalled as e:
        return Probe(Installed.NO, e.reasons)
    except Broken as e:
        return Probe(Installed.BROKEN, e.reasons)
    found = Probe(Installed.YES, library.refused, library.paths, library.missing)
    if not library.has("aclFinalizeReference"):
        why = "version and devices are not asked for: without aclFinalizeReference, ACL would stay initialised"
        return replace(found, reasons=(*found.reasons, why))
    try:
        return _ask(library, found)
    except NativeError as e:
        return replace(found, installed=Installed.BROKEN, reasons=(*found.reasons, str(e)))


def _ask(library: Library, found: Probe) -> Probe:
    with _initialised(library):
        version = None
        if library.has("aclrtGetVersion"):
            numbers = c_int32(), c_int32(), c_int32()
            library.call("aclrtGetVersion", *map(byref, numbers))
            version = (numbers[0].value, numbers[1].value, numbers[2].value)
        soc_name = library.soc_name()
        count = c_uint32()
        library.call("aclrtGetDeviceCount", byref(count))
    return replace(
        found,
        version=version,
        soc_name=soc_name or None,
        product=product_of(soc_name) if soc_name else None,
        devices=count.value,
    )


@contextlib.contextmanager
def _initialised(library: Library) -> Iterator[None]:
    """Have ACL initialised for a while; another owner in this process is counted, and keeps it."""
    try:
        library.call("aclInit", None)
    except NativeError as error:
        if error.code != REPEAT_INITIALIZE:
            raise
    try:
        yield
    finally:
        library.call("aclFinalizeReference", None)
