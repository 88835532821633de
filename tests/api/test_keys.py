"""Cache keys (api 6.2 to 6.4, A-18, E-36 to E-43)."""

import pytest

from llm_datadist import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex, LLMException, LLMStatusCode

NONE = 2**64 - 1


def param_invalid(text, cls, *args, **kwargs):
    with pytest.raises(LLMException, match=text) as e:
        cls(*args, **kwargs)
    assert e.value.status_code is LLMStatusCode.LLM_PARAM_INVALID
    assert isinstance(e.value, ValueError)


def fields(key):
    return key.cluster_id, key.req_id, key.model_id, key.prefix_id


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (CacheKey(1, 2), (1, 2, 0, NONE)),
        (CacheKey(1, 2, 3, 4), (1, 2, 3, 4)),
        (CacheKey(1, req_id=2), (1, 2, 0, NONE)),
        (CacheKey(cluster_id=1, req_id=2, prefix_id=4), (1, 2, 0, 4)),
        (CacheKey(prompt_cluster_id=1, req_id=NONE, model_id=3), (1, NONE, 3, NONE)),
        (CacheKey(prompt_cluster_id=9, req_id=2, cluster_id=1), (1, 2, 0, NONE)),
        (CacheKey(1, prompt_cluster_id=9, req_id=2), (1, 2, 0, NONE)),
        (CacheKey(0, 0), (0, 0, 0, NONE)),
    ],
)
def test_cache_key(key, expected):
    assert fields(key) == expected
    assert key.prompt_cluster_id == key.cluster_id


def test_too_many_arguments():
    """E-36."""
    param_invalid("at most 4", CacheKey, 1, 2, 3, 4, 5)
    param_invalid("at most 4", CacheKey, 1, 2, 3, 4, unknown=5)
    param_invalid("at most 2", BlocksCacheKey, 1, 2, 3)


def test_cluster_id_is_required():
    """E-37."""
    param_invalid("cluster_id is required", CacheKey, req_id=1)
    param_invalid("cluster_id is required", CacheKey)
    param_invalid("cluster_id is required", BlocksCacheKey)
    param_invalid("cluster_id is required", BlocksCacheKey, model_id=1)


def test_req_id_is_required():
    """E-38."""
    param_invalid("req_id is required", CacheKey, 1)
    param_invalid("req_id is required", CacheKey, cluster_id=1, prefix_id=2)


def test_unknown_keyword():
    """E-39."""
    param_invalid("Unsupported.*reqid", CacheKey, 1, 2, reqid=3)
    param_invalid("Unsupported", BlocksCacheKey, 1, req_id=3)
    # A misspelt keyword is named together with what is missing.
    param_invalid("Unsupported.*reqid.*req_id is required", CacheKey, 1, reqid=3)


def test_argument_given_twice():
    param_invalid("cluster_id is given twice", CacheKey, 1, 2, cluster_id=1)


@pytest.mark.parametrize("name", ["cluster_id", "prompt_cluster_id", "req_id", "model_id", "prefix_id"])
def test_cache_key_widths(name):
    """E-40."""
    given = {"cluster_id": 1, "req_id": 2}
    if name == "prompt_cluster_id":
        del given["cluster_id"]
    for bad in (-1, 2**64):
        with pytest.raises(ValueError, match="out of range") as e:
            CacheKey(**{**given, name: bad})
        assert not isinstance(e.value, LLMException)
    for wrong in ("1", 1.0, True, None):
        with pytest.raises(TypeError, match="only support int"):
            CacheKey(**{**given, name: wrong})


def test_blocks_cache_key():
    """E-41, E-42."""
    key = BlocksCacheKey(1)
    assert (key.cluster_id, key.prompt_cluster_id, key.model_id) == (1, 1, 0)
    assert BlocksCacheKey(1, 5).model_id == BlocksCacheKey(cluster_id=1, model_id=5).model_id == 5
    with pytest.raises(TypeError, match="only support"):
        BlocksCacheKey("aa")
    for bad in (-1, 2**64):
        with pytest.raises(ValueError, match="out of range"):
            BlocksCacheKey(bad)


def test_key_by_id():
    """E-43."""
    key = CacheKeyByIdAndIndex(1, 2)
    assert (key.cluster_id, key.cache_id, key.batch_index) == (1, 2, 0)
    assert CacheKeyByIdAndIndex(2**64 - 1, -(2**63), 2**32 - 1).cache_id == -(2**63)
    for bad in ((-1, 1), (2**64, 1), (1, 2**63), (1, 1, -1), (1, 1, 2**32)):
        with pytest.raises(ValueError, match="out of range"):
            CacheKeyByIdAndIndex(*bad)
    for wrong in (("1", 1), (1, None), (1, 1, 1.0)):
        with pytest.raises(TypeError):
            CacheKeyByIdAndIndex(*wrong)


def test_repr():
    assert repr(CacheKey(1, 2, 3, 4)) == "CacheKey(cluster_id=1, req_id=2, prefix_id=4, model_id=3)"
    assert repr(BlocksCacheKey(1)) == "BlocksCacheKey(cluster_id=1, model_id=0)"
    assert repr(BlocksCacheKey(cluster_id=1)) == "BlocksCacheKey(cluster_id=1, model_id=0)"
    assert repr(BlocksCacheKey(prompt_cluster_id=1, model_id=2)) == "BlocksCacheKey(prompt_cluster_id=1, model_id=2)"
    assert repr(CacheKeyByIdAndIndex(1, 2, 3)) == "CacheKeyByIdAndIndex(cluster_id=1, cache_id=2, batch_index=3)"


@pytest.mark.parametrize(
    "make", [lambda: CacheKey(1, 2), lambda: BlocksCacheKey(1), lambda: CacheKeyByIdAndIndex(1, 2)]
)
def test_keys_compare_by_identity(make):
    """A-18."""
    key = make()
    assert key == key
    assert key != make()
    assert len({key, make()}) == 2
