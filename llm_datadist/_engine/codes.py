"""From a backend's failure to a status code: the only such table."""

from __future__ import annotations

from llm_datadist.backend import BackendError, Failure
from llm_datadist.status import LLMException, LLMStatusCode
from llm_datadist.status import exception_of as status_exception

__all__ = ["exception_of", "out_of_memory_code", "timeout_code"]


def timeout_code(cache_manager: bool) -> LLMStatusCode:
    """Give the code of a call that ran out of time, which differs between the modes."""
    return LLMStatusCode.LLM_TIMEOUT if cache_manager else LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT


def out_of_memory_code(cache_manager: bool) -> LLMStatusCode:
    """Give the code of an allocation that found no memory, which differs between the modes."""
    return LLMStatusCode.LLM_OUT_OF_MEMORY if cache_manager else LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY


def exception_of(error: BackendError, cache_manager: bool) -> LLMException:
    """Translate a backend's error."""
    code = {
        Failure.OUT_OF_MEMORY: out_of_memory_code(cache_manager),
        Failure.INVALID: LLMStatusCode.LLM_PARAM_INVALID,
        Failure.TIMED_OUT: timeout_code(cache_manager),
        Failure.PEER_GONE: LLMStatusCode.LLM_NOT_YET_LINK,
        Failure.STALE: LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
        Failure.TORN: LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
        Failure.UNSUPPORTED: LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
        Failure.UNAVAILABLE: LLMStatusCode.LLM_FAILED,
        Failure.FAILED: LLMStatusCode.LLM_FAILED,
    }[error.kind]
    number = f" (native code {error.native_code})" if error.native_code else ""
    return status_exception(code, error.text + number)
