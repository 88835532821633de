"""Status codes, and the exceptions that carry them."""

from __future__ import annotations

from llm_datadist._enums import NamedIntEnum
from llm_datadist._log import error

__all__ = [
    "LLMException",
    "LLMStatusCode",
    "Status",
    "code_2_status",
    "handle_llm_status",
    "raise_if_false",
    "raise_if_true",
]

_BASE = 0x5010B000


class LLMStatusCode(NamedIntEnum):
    """How an operation ended. ``str()`` gives ``LLMStatusCode.<NAME>``."""

    LLM_SUCCESS = 0
    LLM_FAILED = 0xFFFFFFFF
    LLM_WAIT_PROCESS_TIMEOUT = _BASE + 1
    LLM_KV_CACHE_NOT_EXIST = _BASE + 2
    LLM_REPEAT_REQUEST = _BASE + 3
    LLM_REQUEST_ALREADY_COMPLETED = _BASE + 4
    LLM_PARAM_INVALID = _BASE + 5
    LLM_ENGINE_FINALIZED = _BASE + 6
    LLM_NOT_YET_LINK = _BASE + 7
    LLM_ALREADY_LINK = _BASE + 8
    LLM_LINK_FAILED = _BASE + 9
    LLM_UNLINK_FAILED = _BASE + 10
    LLM_NOTIFY_PROMPT_UNLINK_FAILED = _BASE + 11
    LLM_CLUSTER_NUM_EXCEED_LIMIT = _BASE + 12
    LLM_PROCESSING_LINK = _BASE + 13
    LLM_DEVICE_OUT_OF_MEMORY = _BASE + 14
    LLM_PREFIX_ALREADY_EXIST = _BASE + 15
    LLM_PREFIX_NOT_EXIST = _BASE + 16
    LLM_SEQ_LENOVERLIMIT = _BASE + 17
    LLM_NO_FREE_BLOCK = _BASE + 18
    LLM_BLOCKS_OUT_OF_MEMORY = _BASE + 19
    LLM_EXIST_LINK = _BASE + 24
    LLM_FEATURE_NOT_ENABLED = _BASE + 25
    LLM_TIMEOUT = _BASE + 26
    LLM_LINK_BUSY = _BASE + 27
    LLM_OUT_OF_MEMORY = _BASE + 28
    LLM_DEVICE_MEM_ERROR = 507053
    LLM_SUSPECT_REMOTE_ERROR = 507057
    LLM_UNKNOWN_ERROR = -1


_STATUS_BY_CODE = {int(status): status for status in LLMStatusCode}


class LLMException(RuntimeError):
    """An operation failed.

    Parameters
    ----------
    *args : object
        As for `RuntimeError`; usually one text.
    status_code : LLMStatusCode, default LLMStatusCode.LLM_FAILED
        Why it failed. An exception never claims success: LLM_SUCCESS becomes LLM_FAILED.
    """

    def __init__(self, *args: object, status_code: LLMStatusCode = LLMStatusCode.LLM_FAILED) -> None:
        super().__init__(*args)
        self._status_code = status_code if status_code != LLMStatusCode.LLM_SUCCESS else LLMStatusCode.LLM_FAILED

    @property
    def status_code(self) -> LLMStatusCode:
        """Why the operation failed."""
        return self._status_code


class ParamInvalid(LLMException, ValueError):
    """An argument's value is not allowed; the status code is always LLM_PARAM_INVALID.

    It is a `ValueError` too, so that callers may catch whichever they know.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args, status_code=LLMStatusCode.LLM_PARAM_INVALID)


class Status:
    """The outcome of an operation, as a value.

    Parameters
    ----------
    status_code : LLMStatusCode
        What `status_code` gives back.
    """

    def __init__(self, status_code: LLMStatusCode) -> None:
        self._status_code = status_code

    def is_ok(self) -> bool:
        """Tell whether the operation succeeded."""
        return self._status_code == LLMStatusCode.LLM_SUCCESS

    @property
    def status_code(self) -> LLMStatusCode:
        """The status code given at construction."""
        return self._status_code


def code_2_status(code: int) -> LLMStatusCode:
    """Turn a number into a status code.

    Parameters
    ----------
    code : int
        Any number.

    Returns
    -------
    LLMStatusCode
        The member with this value, LLM_FAILED if there is none.
    """
    return _STATUS_BY_CODE.get(code, LLMStatusCode.LLM_FAILED)


def handle_llm_status(status: int, func_name: str, other_info: object) -> None:
    """Raise unless a status is success.

    Parameters
    ----------
    status : LLMStatusCode or int
        The outcome.
    func_name : str
        Name of the operation, for the text.
    other_info : object
        Whatever else helps the reader of the text.

    Raises
    ------
    LLMException
        With this status code, when it is not LLM_SUCCESS.
    """
    code = code_2_status(status)
    if code != LLMStatusCode.LLM_SUCCESS:
        raise exception_of(code, f"{func_name} failed with {code}: {other_info}")


def raise_if_false(
    predicate: object,
    text: str,
    *args: object,
    status_code: LLMStatusCode = LLMStatusCode.LLM_PARAM_INVALID,
    **kwargs: object,
) -> None:
    """Log an error and raise when a condition does not hold.

    Parameters
    ----------
    predicate : object
        The condition.
    text : str
        Completed with ``str.format(*args, **kwargs)``.
    status_code : LLMStatusCode, default LLMStatusCode.LLM_PARAM_INVALID
        What the exception carries.

    Raises
    ------
    LLMException
        With `status_code`; a `ValueError` too when that is LLM_PARAM_INVALID.
    """
    if not predicate:
        message = text.format(*args, **kwargs)
        error("%s", message)
        raise exception_of(status_code, message)


def raise_if_true(
    predicate: object,
    text: str,
    *args: object,
    status_code: LLMStatusCode = LLMStatusCode.LLM_PARAM_INVALID,
    **kwargs: object,
) -> None:
    """Log an error and raise when a condition holds; otherwise like `raise_if_false`."""
    raise_if_false(not predicate, text, *args, status_code=status_code, **kwargs)


def exception_of(status_code: LLMStatusCode, text: str) -> LLMException:
    """Make the exception for a status code."""
    if status_code == LLMStatusCode.LLM_PARAM_INVALID:
        return ParamInvalid(text)
    return LLMException(text, status_code=status_code)
