"""Status codes and exceptions (A-8 to A-10, E-3)."""

import pickle

import pytest

from llm_datadist import LLMException, LLMStatusCode, Status
from llm_datadist.status import (
    ParamInvalid,
    code_2_status,
    handle_llm_status,
    raise_if_false,
    raise_if_true,
)

CODES = {
    "LLM_SUCCESS": 0,
    "LLM_FAILED": 4294967295,
    "LLM_WAIT_PROCESS_TIMEOUT": 1343270913,
    "LLM_KV_CACHE_NOT_EXIST": 1343270914,
    "LLM_REPEAT_REQUEST": 1343270915,
    "LLM_REQUEST_ALREADY_COMPLETED": 1343270916,
    "LLM_PARAM_INVALID": 1343270917,
    "LLM_ENGINE_FINALIZED": 1343270918,
    "LLM_NOT_YET_LINK": 1343270919,
    "LLM_ALREADY_LINK": 1343270920,
    "LLM_LINK_FAILED": 1343270921,
    "LLM_UNLINK_FAILED": 1343270922,
    "LLM_NOTIFY_PROMPT_UNLINK_FAILED": 1343270923,
    "LLM_CLUSTER_NUM_EXCEED_LIMIT": 1343270924,
    "LLM_PROCESSING_LINK": 1343270925,
    "LLM_DEVICE_OUT_OF_MEMORY": 1343270926,
    "LLM_PREFIX_ALREADY_EXIST": 1343270927,
    "LLM_PREFIX_NOT_EXIST": 1343270928,
    "LLM_SEQ_LENOVERLIMIT": 1343270929,
    "LLM_NO_FREE_BLOCK": 1343270930,
    "LLM_BLOCKS_OUT_OF_MEMORY": 1343270931,
    "LLM_EXIST_LINK": 1343270936,
    "LLM_FEATURE_NOT_ENABLED": 1343270937,
    "LLM_TIMEOUT": 1343270938,
    "LLM_LINK_BUSY": 1343270939,
    "LLM_OUT_OF_MEMORY": 1343270940,
    "LLM_DEVICE_MEM_ERROR": 507053,
    "LLM_SUSPECT_REMOTE_ERROR": 507057,
    "LLM_UNKNOWN_ERROR": -1,
}


def test_members_and_numbers():
    assert {m.name: int(m) for m in LLMStatusCode} == CODES


def test_prints_by_name_everywhere():
    code = LLMStatusCode.LLM_LINK_BUSY
    assert str(code) == f"{code}" == "%s" % code == "LLMStatusCode.LLM_LINK_BUSY"  # noqa: UP031
    assert f"{code:d}" == "1343270939"


@pytest.mark.parametrize("code", [20, 0x5010B000 + 20, 0x5010B000 + 23, 7, -2, 2**70])
def test_unknown_number_is_failed(code):
    """A-8, E-3."""
    assert code_2_status(code) is LLMStatusCode.LLM_FAILED


@pytest.mark.parametrize("code", LLMStatusCode)
def test_known_number(code):
    assert code_2_status(int(code)) is code


def test_exception_never_claims_success():
    assert LLMException("x").status_code is LLMStatusCode.LLM_FAILED
    assert LLMException("x", status_code=LLMStatusCode.LLM_SUCCESS).status_code is LLMStatusCode.LLM_FAILED


def test_exception_keeps_its_code():
    e = LLMException("text", 2, status_code=LLMStatusCode.LLM_LINK_BUSY)
    assert (e.args, e.status_code) == (("text", 2), LLMStatusCode.LLM_LINK_BUSY)
    assert isinstance(e, RuntimeError)
    assert not isinstance(e, ValueError)
    with pytest.raises(AttributeError):
        e.status_code = LLMStatusCode.LLM_FAILED


def test_argument_errors_are_both_kinds():
    """A-10."""
    e = ParamInvalid("text")
    assert isinstance(e, LLMException)
    assert isinstance(e, ValueError)
    assert e.status_code is LLMStatusCode.LLM_PARAM_INVALID


@pytest.mark.parametrize("e", [ParamInvalid("a"), LLMException("b", status_code=LLMStatusCode.LLM_TIMEOUT)])
def test_exceptions_travel_between_processes(e):
    copy = pickle.loads(pickle.dumps(e))
    assert (type(copy), copy.args, copy.status_code) == (type(e), e.args, e.status_code)


def test_status():
    assert Status(LLMStatusCode.LLM_SUCCESS).is_ok()
    assert not Status(LLMStatusCode.LLM_FAILED).is_ok()
    assert Status("anything").status_code == "anything"


def test_handle_llm_status():
    handle_llm_status(LLMStatusCode.LLM_SUCCESS, "f", "")
    with pytest.raises(LLMException, match=r"pull.*LLM_TIMEOUT.*cluster 7") as e:
        handle_llm_status(LLMStatusCode.LLM_TIMEOUT, "pull", "cluster 7")
    assert e.value.status_code is LLMStatusCode.LLM_TIMEOUT


def test_raise_if():
    raise_if_false([1], "x")
    raise_if_true(0, "x")
    with pytest.raises(ValueError, match=r"^a 1 b 2$") as e:
        raise_if_false(0, "a {} b {b}", 1, b=2)
    assert e.value.status_code is LLMStatusCode.LLM_PARAM_INVALID
    with pytest.raises(LLMException) as e:
        raise_if_true(1, "x", status_code=LLMStatusCode.LLM_TIMEOUT)
    assert e.value.status_code is LLMStatusCode.LLM_TIMEOUT
