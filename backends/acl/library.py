"""Open ACL and HCCL at run time, and call them."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from llm_datadist.backend import BackendError, Failure
from llm_datadist.backends.acl.codes import name_of
from llm_datadist.backends.acl.functions import ACL, HCCL, Function

__all__ = [
    "ACL_VARIABLE",
    "HCCL_VARIABLE",
    "Broken",
    "Library",
    "NativeError",
    "NotInstalled",
    "Paths",
    "open_library",
]

ACL_VARIABLE: Final = "LLM_DATADIST_ACL_LIBRARY"
HCCL_VARIABLE: Final = "LLM_DATADIST_HCCL_LIBRARY"


class NativeError(Exception):
    """A function of ACL or HCCL failed.

    Parameters
    ----------
    function : str
        Its name.
    code : int
        What it returned.
    message : str
        The driver's own text, may be empty.
    """

    def __init__(self, function: str, code: int, message: str) -> None:
        self.function = function
        self.code = code
        self.name = name_of(function, code)
        self.message = message
        super().__init__(f"{function} failed, {self.name} ({code})" + (f": {message}" if message else ""))


class _Refused(BackendError):
    """No usable pair of libraries. ``reasons`` says for each candidate why."""

    what: str

    def __init__(self, reasons: Iterable[str]) -> None:
        self.reasons = tuple(reasons)
        super().__init__(Failure.UNAVAILABLE, f"{self.what}: {'; '.join(self.reasons)}")


class NotInstalled(_Refused):
    """No candidate is on this machine."""

    what = "no Ascend runtime is installed"


class Broken(_Refused):
    """Something of an Ascend runtime is on this machine, or is said to be, and can't be used."""

    what = "the Ascend runtime can't be used"


@dataclass(frozen=True, slots=True)
class Paths:
    """Names under which the libraries were opened."""

    acl: str
    hccl: str


class Library:
    """The functions of ACL and HCCL. They release the GIL and may be called from any thread.

    Attributes
    ----------
    paths : Paths
        Which candidates were taken.
    refused : tuple of str
        Why the candidates before them were not.
    missing : tuple of str
        Optional functions that are not there.
    """

    def __init__(self, acl: ctypes.CDLL, hccl: ctypes.CDLL, refused: Iterable[str]) -> None:
        self.paths = Paths(acl._name, hccl._name)
        self.refused = tuple(refused)
        self._functions = {**_declared(acl, ACL), **_declared(hccl, HCCL)}
        self.missing = tuple(function.name for function in (*ACL, *HCCL) if function.name not in self._functions)

    def has(self, name: str) -> bool:
        """Say whether an optional function is there."""
        return name in self._functions

    def code(self, name: str, *args: Any) -> int:
        """Call a function that may fail and give its result. The driver's message is dropped: it is nobody else's."""
        result: int = self._functions[name](*args)
        if result:
            self.recent()
        return result

    def call(self, name: str, *args: Any) -> None:
        """Call a function.

        Raises
        ------
        NativeError
            When it does not return 0.
        """
        if code := self._functions[name](*args):
            # The driver keeps the message for the thread that failed, until its next call.
            raise NativeError(name, code, self.recent())

    def recent(self) -> str:
        """Take the driver's message about the last failure on this thread; empty when there is none."""
        return _text(self._functions["aclGetRecentErrMsg"]()).strip()

    def soc_name(self) -> str:
        """Give the name of the chip; empty when the driver doesn't know."""
        return _text(self._functions["aclrtGetSocName"]())


@dataclass(frozen=True, slots=True)
class _Refusal:
    reason: str
    #: There is no such file.
    absent: bool


def open_library(environment: Mapping[str, str]) -> Library:
    """Open ACL, then HCCL, and check that all mandatory functions are there. They are never closed again.

    Parameters
    ----------
    environment : Mapping
        ``LLM_DATADIST_ACL_LIBRARY`` and ``LLM_DATADIST_HCCL_LIBRARY``, if set, name the first candidates.

    Raises
    ------
    NotInstalled
        No candidate for ACL was found, and the environment names none.
    Broken
        A candidate was found, or named, but no pair of libraries can be used.
    """
    refusals: list[_Refusal] = []
    acl = _first_usable((environment.get(ACL_VARIABLE), "libacl_rt.so", "libascendcl.so"), ACL, refusals)
    if acl is None:
        # HCCL needs what ACL brings: without it, it could only add errors that mislead.
        named = environment.get(ACL_VARIABLE) or environment.get(HCCL_VARIABLE)
        nothing = not named and all(refusal.absent for refusal in refusals)
        raise (NotInstalled if nothing else Broken)(refusal.reason for refusal in refusals)
    hccl = _first_usable((environment.get(HCCL_VARIABLE), "libhcomm.so", "libhccl.so"), HCCL, refusals)
    if hccl is None:
        raise Broken(refusal.reason for refusal in refusals)
    return Library(acl, hccl, (refusal.reason for refusal in refusals))


def _first_usable(
    candidates: Iterable[str | None], functions: Iterable[Function], refusals: list[_Refusal]
) -> ctypes.CDLL | None:
    """Open the candidates in order, up to the first that has all mandatory functions."""
    for candidate in candidates:
        if not candidate:
            continue
        try:
            library = ctypes.CDLL(candidate, mode=os.RTLD_NOW | os.RTLD_GLOBAL)
        except OSError as e:
            refusals.append(_Refusal(str(e) if candidate in str(e) else f"{candidate}: {e}", _is_absent(candidate, e)))
            continue
        lacks = [function.name for function in functions if function.mandatory and not hasattr(library, function.name)]
        if not lacks:
            return library
        refusals.append(_Refusal(f"{candidate} lacks {', '.join(lacks)}", absent=False))
    return None


def _is_absent(candidate: str, error: OSError) -> bool:
    """Say whether the candidate itself is missing, and not something that it needs in turn.

    The loader gives no number, only a text that names the file which it did not find, in the program's language.
    """
    text = str(error)
    return text.endswith(os.strerror(errno.ENOENT)) and (text.startswith(f"{candidate}: ") or f" {candidate}: " in text)


def _declared(library: ctypes.CDLL, functions: Iterable[Function]) -> dict[str, Any]:
    declared = {}
    for function in functions:
        if hasattr(library, function.name):
            native = declared[function.name] = getattr(library, function.name)
            native.argtypes, native.restype = function.parameters, function.result
    return declared


def _text(given: bytes | None) -> str:
    return (given or b"").decode(errors="replace")
