"""Asynchronous transfer types (api 11, E-49 to E-53, E-323, E-324, S-95)."""

import pytest

from llm_datadist import (
    BlocksCacheKey,
    CacheKey,
    CacheKeyByIdAndIndex,
    CacheTask,
    LayerSynchronizer,
    LLMException,
    LLMStatusCode,
    TransferConfig,
    TransferWithCacheKeyConfig,
)

SUCCESS = LLMStatusCode.LLM_SUCCESS
FAILED = LLMStatusCode.LLM_FAILED
TIMEOUT = LLMStatusCode.LLM_TIMEOUT
BUSY = LLMStatusCode.LLM_LINK_BUSY
BAD_RANGES = [range(0, 4, 2), range(0), range(2, 2), range(3, 1), range(-1, 2), range(2, 0, -1)]


def param_invalid(call, *args, **kwargs):
    with pytest.raises(LLMException) as e:
        call(*args, **kwargs)
    assert e.value.status_code is LLMStatusCode.LLM_PARAM_INVALID
    assert isinstance(e.value, ValueError)
    return str(e.value)


def test_synchronizer_is_abstract():
    with pytest.raises(TypeError):
        LayerSynchronizer()

    class Ready(LayerSynchronizer):
        def synchronize_layer(self, layer_index, timeout_in_millis):
            return True

    assert Ready().synchronize_layer(0, None)


def test_transfer_config():
    config = TransferConfig(1, [10, 20], range(0, 1), 3)
    assert (config.dst_cluster_id, config.dst_addrs, config.src_layer_range) == (1, [10, 20], range(0, 1))
    assert (config.src_batch_index, config.dst_layer_range) == (3, None)
    expected = "TransferConfig(dst_cluster_id=1, dst_addrs=[10, 20], src_layer_range=range(0, 1), src_batch_index=3)"
    assert repr(config) == str(config) == expected
    assert TransferConfig(1, ()).src_layer_range is None


WRONG = {
    "dst_cluster_id": ["1", 1.0, None, True],
    "dst_addrs": [None, 1, "12", ["1"], [None], [True], {1}],
    "src_layer_range": [1, [0, 1], "r"],
    "src_batch_index": ["0", None, 1.0, True],
}
OUTSIDE = {
    "dst_cluster_id": [-1, 2**64],
    "dst_addrs": [[1, -1], [2**64]],
    "src_batch_index": [-1, 2**32],
}
GOOD = {"dst_cluster_id": 1, "dst_addrs": [10, 20], "src_layer_range": range(1), "src_batch_index": 0}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in WRONG.items() for v in values])
def test_transfer_config_types(name, value):
    """E-49, at construction and in the setter."""
    with pytest.raises(TypeError):
        TransferConfig(**{**GOOD, name: value})
    config = TransferConfig(**GOOD)
    with pytest.raises(TypeError):
        setattr(config, name, value)
    assert getattr(config, name) == GOOD[name]


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in OUTSIDE.items() for v in values])
def test_transfer_config_widths(name, value):
    """E-50, at construction and in the setter."""
    with pytest.raises(ValueError, match="out of range"):
        TransferConfig(**{**GOOD, name: value})
    config = TransferConfig(**GOOD)
    with pytest.raises(ValueError, match="out of range"):
        setattr(config, name, value)
    assert getattr(config, name) == GOOD[name]


@pytest.mark.parametrize("layers", BAD_RANGES)
def test_transfer_config_range(layers):
    """E-51, at construction and in the setter."""
    param_invalid(TransferConfig, 1, [1, 2], layers)
    config = TransferConfig(**GOOD)
    param_invalid(setattr, config, "src_layer_range", layers)
    config.src_layer_range = None
    assert config.src_layer_range is None


BY_ID = CacheKeyByIdAndIndex(5, 1)
BLOCKS = BlocksCacheKey(6)


def test_key_config():
    config = TransferWithCacheKeyConfig(BY_ID, range(0, 2), range(3, 5), 4)
    assert config.cache_key is BY_ID
    assert (config.src_layer_range, config.dst_layer_range, config.src_batch_index) == (range(0, 2), range(3, 5), 4)
    assert config.dst_cluster_id == 5
    config.src_batch_index = 0
    config.cache_key = BLOCKS
    assert config.dst_cluster_id == 6


def test_key_config_types():
    """E-52."""
    for key in (None, CacheKey(1, 2), 1):
        with pytest.raises(TypeError):
            TransferWithCacheKeyConfig(key, range(1), range(1))
    for ranges in ((), (range(1),), (None, range(1)), (range(1), None), ([0], range(1))):
        with pytest.raises(TypeError):
            TransferWithCacheKeyConfig(BY_ID, *ranges)
    config = TransferWithCacheKeyConfig(BY_ID, range(1), range(1))
    with pytest.raises(TypeError):
        config.cache_key = None
    with pytest.raises(TypeError):
        config.src_layer_range = 1
    config.dst_layer_range = None
    assert config.dst_layer_range is None


def test_key_config_values():
    """E-53."""
    text = param_invalid(TransferWithCacheKeyConfig, BY_ID, range(0, 2), range(2, 5))
    assert "2" in text
    assert "3" in text
    # Equal lengths, unlike starts.
    TransferWithCacheKeyConfig(BY_ID, range(0, 2), range(7, 9))
    for layers in BAD_RANGES:
        param_invalid(TransferWithCacheKeyConfig, BY_ID, layers, range(1))
        param_invalid(TransferWithCacheKeyConfig, BY_ID, range(1), layers)
    param_invalid(TransferWithCacheKeyConfig, BLOCKS, range(1), range(1), 1)
    TransferWithCacheKeyConfig(BLOCKS, range(1), range(1), 0)
    for bad in (-1, 2**32):
        with pytest.raises(ValueError, match="out of range"):
            TransferWithCacheKeyConfig(BY_ID, range(1), range(1), bad)


class Job:
    """Ended, or never ending; remembers how long it was waited for."""

    timeout_status = TIMEOUT

    def __init__(self, results, ended=True):
        self._results = results
        self._ended = ended
        self.waits = []

    def wait(self, timeout_s):
        self.waits.append(timeout_s)
        return self._ended

    def results(self):
        return list(self._results)


@pytest.mark.parametrize(
    ("results", "overall"),
    [
        ([], SUCCESS),
        ([SUCCESS, SUCCESS], SUCCESS),
        ([None, SUCCESS], SUCCESS),
        ([None, BUSY, FAILED], BUSY),
        ([SUCCESS, FAILED], FAILED),
    ],
)
def test_ended_task(results, overall):
    """S-95, S-98."""
    task = CacheTask(Job(results))
    assert task.synchronize() is overall
    assert task.get_results() == results
    assert task.synchronize(5) is overall


def test_running_task():
    """E-324."""
    task = CacheTask(Job([SUCCESS, None], ended=False))
    assert task.synchronize(0) is TIMEOUT
    assert task.get_results(0) == [TIMEOUT, TIMEOUT]


@pytest.mark.parametrize("method", ["synchronize", "get_results"])
def test_task_timeout(method):
    """E-323, and ms become s."""
    job = Job([])
    call = getattr(CacheTask(job), method)
    for given in (None, 0, 1500, 2**32 - 1):
        call(given)
    call(timeout_in_millis=20)
    assert job.waits == [None, 0, 1.5, 4294967.295, 0.02]
    for bad in (-1, 2**32):
        with pytest.raises(ValueError, match="out of range"):
            call(bad)
    for wrong in (1.0, "1", True):
        with pytest.raises(TypeError):
            call(wrong)
    assert len(job.waits) == 5
