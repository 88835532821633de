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
        Failure.HOST_OUT_OF_MEMORY: LLMStatusCode.LLM_OUT_OF_MEMORY,
        Failure.INVALID: LLMStatusCode.LLM_PARAM_INVALID,
        Failure.TIMED_OUT: timeout_code(cache_manager),
        Failure.PEER_GONE: LLMStatusCode.LLM_NOT_YET_LINK,
        Failure.STALE: LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
        Failure.TORN: LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
        Failure.LINK_FAILED: LLMStatusCode.LLM_LINK_FAILED,
        Failure.UNLINK_FAILED: LLMStatusCode.LLM_UNLINK_FAILED,
        Failure.DEVICE_MEMORY: LLMStatusCode.LLM_DEVICE_MEM_ERROR,
        Failure.SUSPECT_REMOTE: LLMStatusCode.LLM_SUSPECT_REMOTE_ERROR,
        Failure.CLOSING: LLMStatusCode.LLM_ENGINE_FINALIZED,
        Failure.UNSUPPORTED: LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
        Failure.UNAVAILABLE: LLMStatusCode.LLM_FAILED,
        Failure.FAILED: LLMStatusCode.LLM_FAILED,
    }[error.kind]
    # A driver's text names the number, beside its name.
    named = not error.native_code or f"({error.native_code})" in error.text
    return status_exception(code, error.text if named else f"{error.text} (native code {error.native_code})")
