"""What the package shows (A-1 to A-5, E-1), and what importing it costs."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

import llm_datadist

NAMES = [
    "LLMClusterInfo",
    "LLMStatusCode",
    "LLMException",
    "LLMRole",
    "LlmConfig",
    "LLMConfig",
    "DataType",
    "Status",
    "CacheDesc",
    "CacheKey",
    "CacheKeyByIdAndIndex",
    "KvCache",
    "Cache",
    "BlocksCacheKey",
    "LLMDataDist",
    "Placement",
    "RegisterMemStatus",
    "LayerSynchronizer",
    "TransferConfig",
    "CacheTask",
    "TransferWithCacheKeyConfig",
    "Memtype",
    "MemInfo",
    "TensorDesc",
    "Tensor",
    "KvCacheManager",
]


def test_names():
    """A-1, A-2."""
    assert llm_datadist.__all__ == NAMES
    assert llm_datadist.v2_list == NAMES[:-3]
    assert set(NAMES) <= set(dir(llm_datadist))


def test_all_names_resolve():
    """A-2, A-4."""
    pytest.importorskip("llm_datadist.datadist")
    pytest.importorskip("llm_datadist.kv_cache_manager")
    scope = {}
    exec("from llm_datadist import *", scope)
    for name in NAMES:
        assert scope[name] is getattr(llm_datadist, name)
    assert not hasattr(llm_datadist, "CacheManager")


def test_lazy_names():
    """A-4."""
    from llm_datadist.tensor import Tensor, TensorDesc

    assert llm_datadist.Tensor is Tensor
    assert llm_datadist.TensorDesc is TensorDesc


def test_unknown_attribute():
    """E-1."""
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        llm_datadist.Nothing  # noqa: B018


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("status", "LLMStatusCode LLMException Status code_2_status handle_llm_status raise_if_false raise_if_true"),
        ("configs", "LLMRole LLMClusterInfo LlmConfig LLMConfig trans_str_ip"),
        (
            "data_type",
            "DataType python_dtype_2_dwrapper_dtype get_python_dtype_from_wrapper_dtype dtype_to_np_dtype "
            "valid_np_dtypes np_dtype_to_dtype",
        ),
        (
            "utils.utils",
            "check_isinstance check_inner check_dict check_uint8 check_uint16 check_uint32 check_uint64 check_int32 "
            "check_int64 check_list_int32 check_list_int64 check_list_uint64 check_positive_or_set_default",
        ),
        ("utils.log", "get_logger info warn error _find_caller"),
    ],
)
def test_submodules(module, names):
    found = __import__(f"llm_datadist.{module}", fromlist=["x"])
    for name in names.split():
        assert hasattr(found, name), name


PROBE = """
import json, os, signal, sys, threading, time
environment, threads, hooks = dict(os.environ), threading.active_count(), signal.getsignal(signal.SIGTERM)
start = time.process_time()
import llm_datadist
spent = time.process_time() - start
assert dict(os.environ) == environment and threading.active_count() == threads
import logging
assert not logging.getLogger("LLM_DATADIST").handlers
print(json.dumps([spent, sorted(sys.modules)]))
"""


def test_import_is_light(tmp_path):
    """A-4, A-5: no numpy, no compiled module, no side effects, below 60 ms."""
    # Byte code is kept for these runs, as it is for users.
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    env["PYTHONPYCACHEPREFIX"] = str(tmp_path)
    env["PYTHONPATH"] = str(pathlib.Path(llm_datadist.__file__).parents[1])
    times = []
    for _ in range(4):
        run = subprocess.run(
            [sys.executable, "-c", PROBE], env=env, capture_output=True, text=True, timeout=60, check=True
        )
        spent, modules = json.loads(run.stdout)
        times.append(spent)
    loaded = {name for name in modules if name.startswith("llm_datadist")}
    assert "numpy" not in modules
    assert not any(name.startswith("llm_datadist._kernels") for name in loaded)
    assert not loaded & {"llm_datadist.backends", "llm_datadist._engine", "llm_datadist.backend"}
    assert min(times) < 0.06, times
