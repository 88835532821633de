"""The module paths that existing programs import from (A-2, A-3, A-6): the same objects under each of them."""

import importlib
import os
import subprocess
import sys

import pytest

import llm_datadist
import llm_datadist_v1

# What each path holds.
TYPES = (
    "BlocksCacheKey Cache CacheDesc CacheKey CacheKeyByIdAndIndex CacheTask KvCache LayerSynchronizer MemInfo Memtype "
    "Placement RegisterMemStatus TransferConfig TransferWithCacheKeyConfig LLMClusterInfo LLMConfig LlmConfig LLMRole "
    "DataType LLMException LLMStatusCode Status Tensor TensorDesc int_to_mem_status_dict"
)
CHECKS = (
    "check_isinstance check_inner check_dict check_uint8 check_uint16 check_uint32 check_uint64 check_int32 "
    "check_int64 check_list_int32 check_list_int64 check_list_uint64 check_positive_or_set_default"
)
HELPERS = "layer_range_to_tensor_indices parse_listen_ip_info"
NUMPY = "dtype_to_np_dtype valid_np_dtypes np_dtype_to_dtype"
DTYPES = "DataType python_dtype_2_dwrapper_dtype get_python_dtype_from_wrapper_dtype"
STATUS = "LLMStatusCode LLMException Status code_2_status handle_llm_status raise_if_false raise_if_true"
PATHS = {
    # Path: the module of the package that has the same, and the names.
    "llm_datadist.v2.llm_types": ("llm_datadist._compat", TYPES),
    "llm_datadist.v2.llm_datadist": ("llm_datadist.datadist", "LLMDataDist _shutdown_handler"),
    "llm_datadist.v2.cache_manager": ("llm_datadist.cache_manager", "CacheManager"),
    "llm_datadist.v2.llm_utils": ("llm_datadist.v2.llm_utils", HELPERS),
    "llm_datadist_v1.llm_types": ("llm_datadist._compat", TYPES),
    "llm_datadist_v1.llm_utils": ("llm_datadist.v2.llm_utils", HELPERS),
    "llm_datadist_v1.kv_cache_manager": ("llm_datadist.kv_cache_manager", "KvCacheManager"),
    "llm_datadist_v1.configs": ("llm_datadist.configs", "LLMRole LLMClusterInfo LlmConfig LLMConfig trans_str_ip"),
    "llm_datadist_v1.data_type": ("llm_datadist.data_type", f"{DTYPES} {NUMPY}"),
    "llm_datadist_v1.status": ("llm_datadist.status", STATUS),
    "llm_datadist_v1.tensor": ("llm_datadist.tensor", "Tensor TensorDesc"),
    "llm_datadist_v1.utils.utils": ("llm_datadist.utils.utils", CHECKS),
    "llm_datadist_v1.utils.log": ("llm_datadist.utils.log", "get_logger info warn error _find_caller"),
}


@pytest.mark.parametrize("path", PATHS)
def test_each_name_is_the_same_object(path):
    """A-6: objects made through one path are accepted through the other."""
    same, names = PATHS[path]
    module, source = importlib.import_module(path), importlib.import_module(same)
    for name in names.split():
        assert getattr(module, name) is getattr(source, name), name


@pytest.mark.parametrize("path", [path for path in PATHS if path.endswith(("types", "configs", "status", "tensor"))])
def test_no_other_name_is_shown(path):
    scope = {}
    exec(f"from {path} import *", scope)
    assert sorted(scope.keys() - {"__builtins__"}) == sorted(PATHS[path][1].split())


def test_the_types_of_both_generations_are_those_of_the_package():
    """A-1, A-6."""
    for name in TYPES.split()[:-1]:
        assert getattr(importlib.import_module("llm_datadist.v2.llm_types"), name) is getattr(llm_datadist, name)
    for name in set(llm_datadist.__all__) - {"Cache", "LLMDataDist"}:
        assert getattr(llm_datadist_v1, name) is getattr(llm_datadist, name), name


def test_names_of_the_first_generation():
    """A-6: all but Cache, in the same order; `import *` brings what programs use as bare names."""
    assert llm_datadist_v1.__all__ == [name for name in llm_datadist.__all__ if name != "Cache"]
    scope = {}
    exec("from llm_datadist_v1 import *", scope)
    assert scope.keys() - {"__builtins__"} == set(llm_datadist_v1.__all__)
    assert scope["LLMConfig"] is scope["LlmConfig"]
    assert issubclass(scope["LLMDataDist"], llm_datadist.LLMDataDist)


def test_the_first_generation_overrides_init_only():
    own = {name for name in vars(llm_datadist_v1.LLMDataDist) if not (name.startswith("__") and name.endswith("__"))}
    assert own == {"init"}


@pytest.mark.parametrize("path", ["llm_datadist", "llm_datadist_v1", *PATHS])
def test_a_missing_attribute(path):
    """E-1."""
    with pytest.raises(AttributeError, match="has no attribute"):
        importlib.import_module(path).Nothing  # noqa: B018


def test_importing_loads_neither_numpy_nor_the_kernels():
    """A-4: also the paths of existing programs can be imported where nothing is built."""
    script = f"import sys\nfor path in {list(PATHS)}: __import__(path)\nimport llm_datadist_v1\nprint(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    heavy = ("numpy", "llm_datadist._kernels", "llm_datadist._engine", "llm_datadist.backends")
    assert not [name for name in run.stdout.split() if name.startswith(heavy)]


# ---------------------------------------------------------------------- the two helpers


@pytest.mark.parametrize(
    ("source", "destination", "per_layer", "expected"),
    [
        (range(1, 2), None, 2, ([2, 3], [])),
        (None, None, 2, ([], [])),
        (range(2), range(2, 4), 2, ([0, 1, 2, 3], [4, 5, 6, 7])),
        (range(1, 3), range(1), 3, ([3, 4, 5, 6, 7, 8], [0, 1, 2])),
        (range(5, 6), range(0), 1, ([5], [])),
    ],
)
def test_layers_to_tensors(source, destination, per_layer, expected):
    from llm_datadist.v2.llm_utils import layer_range_to_tensor_indices

    assert layer_range_to_tensor_indices(source, destination, per_layer) == expected
    if per_layer == 2:
        assert layer_range_to_tensor_indices(source, destination) == expected
    with pytest.raises(TypeError, match="dst_layer_range"):
        layer_range_to_tensor_indices(source, [0], per_layer)


@pytest.mark.parametrize(
    ("text", "expected"), [("22:33", ("22", 33)), ("10.0.0.1:26000", ("10.0.0.1", 26000)), ("[::1]:5", ("::1", 5))]
)
def test_listen_info(text, expected):
    from llm_datadist.v2.llm_utils import parse_listen_ip_info

    assert parse_listen_ip_info(text) == expected


@pytest.mark.parametrize("text", ["22", "22:33:44", "22:x", "22:", "22:-1", "22:65536", "::1:5", ""])
def test_listen_info_of_another_form(text):
    from llm_datadist.v2.llm_utils import parse_listen_ip_info

    with pytest.raises(ValueError, match="listen_ip_info") as caught:
        parse_listen_ip_info(text)
    assert caught.value.status_code is llm_datadist.LLMStatusCode.LLM_PARAM_INVALID
    with pytest.raises(TypeError):
        parse_listen_ip_info(None)
