"""What each native code becomes: its name, the failure's kind, and the status code of either mode."""

from __future__ import annotations

import pytest

from llm_datadist._engine.codes import exception_of
from llm_datadist.backend import BackendError, Failure
from llm_datadist.backends.acl.codes import Step, failure, name_of
from llm_datadist.backends.acl.library import NativeError
from llm_datadist.status import LLMStatusCode, ParamInvalid

ACL_STEPS = [step for step in Step if step is not Step.UNLINK]
USERS = [Step.DEVICE, Step.MEMORY, Step.HOST_MEMORY, Step.REGISTER, Step.COPY]

#: Steps, library, codes, and the status in CacheManager mode; KvCacheManager mode has other names for two of them.
TABLE = [
    (ACL_STEPS, "acl", (507046, 507047, 107019, 107020), "TIMEOUT"),
    (ACL_STEPS, "acl", (507053, 507054, 507055), "DEVICE_MEM_ERROR"),
    (ACL_STEPS, "acl", (507057,), "SUSPECT_REMOTE_ERROR"),
    ([Step.TRANSFER], "acl", (507056, 507901, 507904, 507010, 507012), "FAILED"),
    ([Step.MEMORY], "acl", (207001, 207018), "OUT_OF_MEMORY"),
    ([Step.HOST_MEMORY], "acl", (207001, 200000), "OUT_OF_MEMORY"),
    (ACL_STEPS, "acl", (200001, 207000), "FEATURE_NOT_ENABLED"),
    (USERS, "acl", (100000, 107000, 107001), "PARAM_INVALID"),
    ([Step.TRANSFER, Step.REMAP], "acl", (100000, 107000, 107001), "FAILED"),
    (ACL_STEPS, "acl", (107002, 107003, 107017, 107022, 107023), "FAILED"),
    ([Step.REGISTER, Step.TRANSFER], "hccl", (1,), "PARAM_INVALID"),
    ([Step.REGISTER, Step.TRANSFER], "hccl", (9,), "TIMEOUT"),
    ([Step.REGISTER, Step.TRANSFER], "hccl", (5,), "FEATURE_NOT_ENABLED"),
    ([Step.REGISTER, Step.TRANSFER], "hccl", (2, 4, 6, 15, 24, 1041, 77), "FAILED"),
    ([Step.LINK], "hccl", (1, 5, 7, 9, 15, 77), "LINK_FAILED"),
    ([Step.LINK, Step.PREPARE], "acl", (207008, 507899), "LINK_FAILED"),
    ([Step.PREPARE], "hccl", (9,), "TIMEOUT"),
    ([Step.PREPARE], "hccl", (1,), "PARAM_INVALID"),
    ([Step.PREPARE], "hccl", (5,), "FEATURE_NOT_ENABLED"),
    ([Step.PREPARE], "hccl", (4, 6, 11, 19, 77), "LINK_FAILED"),
    ([Step.UNLINK], "hccl", (1, 5, 9, 20), "UNLINK_FAILED"),
    ([Step.UNLINK], "acl", (507046, 507053, 107003, 107000), "UNLINK_FAILED"),
    ([Step.REMAP], "hccl", (1, 5, 9), "FAILED"),
]
ROWS = [(step, lib, code, status) for steps, lib, codes, status in TABLE for step in steps for code in codes]
KV_CACHE_MANAGER = {"TIMEOUT": "WAIT_PROCESS_TIMEOUT", "OUT_OF_MEMORY": "DEVICE_OUT_OF_MEMORY"}


def native(library: str, code: int, message: str = "") -> NativeError:
    return NativeError({"acl": "aclrtCall", "hccl": "HcclCall"}[library], code, message)


@pytest.mark.parametrize(("step", "library", "code", "status"), ROWS)
def test_each_native_code_has_the_status_of_the_table(step: Step, library: str, code: int, status: str):
    error = failure(native(library, code), "doing", step=step)
    assert exception_of(error, True).status_code is LLMStatusCode[f"LLM_{status}"]
    if step is not Step.HOST_MEMORY or status != "OUT_OF_MEMORY":
        status = KV_CACHE_MANAGER.get(status, status)
    assert exception_of(error, False).status_code is LLMStatusCode[f"LLM_{status}"]


@pytest.mark.parametrize("code", [107022, 107023])
def test_who_is_aborted_by_others_has_failed(code: int):
    assert failure(native("acl", code), "doing", step=Step.TRANSFER).kind is Failure.FAILED


def test_a_device_that_is_gone_is_no_mistake_of_the_user():
    assert failure(native("acl", 107000), "doing", step=Step.CONTEXT).kind is Failure.FAILED


def test_the_text_says_what_was_done_and_all_that_the_driver_told():
    error = failure(native("hccl", 4, "EI9999: no such range"), "reading from cluster 3", step=Step.TRANSFER)
    assert error.native_code == 4
    assert error.text == "reading from cluster 3: HcclCall failed, INTERNAL (4): EI9999: no such range"
    assert str(exception_of(error, True)) == error.text


def test_a_number_that_no_text_has_is_added():
    text = str(exception_of(BackendError(Failure.FAILED, "no room for 28 bytes", 28), True))
    assert text == "no room for 28 bytes (native code 28)"


@pytest.mark.parametrize("code", [107002, 107003, 107017])
def test_a_wrong_context_is_called_our_mistake(code: int):
    assert "internal: wrong context" in failure(native("acl", code), "doing", step=Step.COPY).text


def test_the_other_memory_faults_are_told_apart():
    texts = [failure(native("acl", code), "doing", step=Step.TRANSFER).text for code in (507053, 507054, 507055)]
    names = ["DEVICE_MEM_ERROR (507053)", "HBM_MULTI_BIT_ECC_ERROR (507054)", "SUSPECT_DEVICE_MEM_ERROR (507055)"]
    assert texts == [f"doing: aclrtCall failed, {name}" for name in names]


def test_an_invalid_value_is_a_value_error_too():
    error = failure(native("hccl", 1), "registering tensor 3", step=Step.REGISTER)
    assert isinstance(exception_of(error, True), ParamInvalid)


def test_each_kind_of_failure_has_a_status():
    for kind in Failure:
        assert exception_of(BackendError(kind, "text"), True).status_code is not LLMStatusCode.LLM_SUCCESS


@pytest.mark.parametrize(
    ("function", "code", "name"),
    [
        ("aclrtMalloc", 207001, "RT_MEMORY_ALLOCATION"),
        ("aclrtSynchronizeStreamWithTimeout", 507046, "STREAM_SYNC_TIMEOUT"),
        ("aclInit", 1, "unknown code"),
        ("HcclBatchGet", 1, "PARA"),
        ("HcclCommPrepare", 9, "TIMEOUT"),
        ("HcclCommPrepare", 19, "NETWORK"),
        ("HcclCommDestroy", 20, "AGAIN"),
        ("HcclCommDestroy", 24, "OOM"),
        ("HcclCommDestroy", 1041, "IN_STATUS"),
        ("HcclCommDestroy", 507046, "unknown code"),
        ("HcclCommDestroy", -1, "unknown code"),
    ],
)
def test_names_of_codes(function: str, code: int, name: str):
    assert name_of(function, code) == name
