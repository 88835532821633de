"""LLMConfig (api 4.1, A-15, A-16, E-10 to E-21)."""

import json

import pytest

from llm_datadist import LLMConfig, LlmConfig, LLMException, LLMStatusCode

TEXTS = {
    "deploy_res_path": "llm.deployResPath",
    "listen_ip_info": "llm.listenIpInfo",
    "buf_pool_cfg": "llm.BufPoolCfg",
    "mem_pool_cfg": "llm.MemPoolConfig",
    "host_mem_pool_cfg": "llm.HostMemPoolConfig",
    "local_comm_res": "llm.LocalCommRes",
    "transfer_backend": "llm.TransferBackend",
    "global_resource_config": "llm.GlobalResourceConfig",
}
FLAGS = {
    "enable_cache_manager": "llm.EnableCacheManager",
    "enable_remote_cache_accessible": "llm.EnableRemoteCacheAccessible",
    "enable_switch_role": "llm.EnableSwitchRole",
}
EMPTY = {"llm.MemoryUtilization": "0.95"}


def config(**values):
    made = LLMConfig()
    for name, value in values.items():
        setattr(made, name, value)
    return made


def options(**values):
    made = config(**values).generate_options()
    return {key: value for key, value in made.items() if key != "llm.MemoryUtilization"}


def param_invalid(**values):
    with pytest.raises(LLMException) as e:
        config(**values)
    assert e.value.status_code is LLMStatusCode.LLM_PARAM_INVALID
    assert isinstance(e.value, ValueError)
    (name,) = values
    assert name in str(e.value)


def test_one_class_two_names():
    assert LLMConfig is LlmConfig


def test_defaults():
    empty = LLMConfig()
    assert empty.generate_options() == EMPTY
    assert empty.ge_options == {}
    for name in (*TEXTS, "cluster_info"):
        assert getattr(empty, name) == ""
    for name in FLAGS:
        assert getattr(empty, name) is False
    for name in ("device_id", "sync_kv_timeout", "rdma_traffic_class", "rdma_service_level", "output_max_size"):
        assert getattr(empty, name) is None
    assert (empty.mem_utilization, empty.link_total_time, empty.link_retry_count) == (0.95, 0, 1)


def test_options_accumulate_in_one_dict():
    made = config(device_id=1)
    first = made.generate_options()
    assert first is made.gen_options() is made.options
    assert "llm.EnableCacheManager" not in first
    made.device_id = None
    made.enable_cache_manager = True
    made.generate_options()
    assert first["ge.exec.deviceId"] == "1"
    assert first["llm.EnableCacheManager"] == "1"


def test_ge_options_of_a_fresh_config():
    made = LLMConfig()
    made.ge_options["ge.flowGraphMemMaxSize"] = "1024"
    assert LLMConfig().ge_options == {}
    assert made.generate_options() == {"ge.flowGraphMemMaxSize": "1024", **EMPTY}


def test_ge_options_come_first():
    made = config(ge_options={"ge.exec.deviceId": "9", "a": "b"}, device_id=1)
    assert made.generate_options()["ge.exec.deviceId"] == "1"
    assert next(iter(made.options)) == "ge.exec.deviceId"
    assert made.options["a"] == "b"


@pytest.mark.parametrize(
    ("value", "devices", "session"),
    [(0, "0", "0"), ([0, 1], "0;1", "0"), ((3,), "3", "3"), (2**31 - 1, "2147483647", "2147483647")],
)
def test_device_id(value, devices, session):
    made = config(device_id=value)
    assert made.device_id is value
    assert options(device_id=value) == {"ge.exec.deviceId": devices, "ge.session_device_id": session}


@pytest.mark.parametrize("value", [3000, "3000", 1, 2**31 - 1])
def test_sync_kv_timeout(value):
    """A-15: kept as it was given."""
    made = config(sync_kv_timeout=value)
    assert made.sync_kv_timeout is value
    assert made.generate_options()["llm.SyncKvCacheWaitTime"] == str(value)


@pytest.mark.parametrize(("name", "key"), TEXTS.items())
def test_texts(name, key):
    assert options(**{name: "text"}) == {key: "text"}
    emitted_when_empty = name in ("local_comm_res", "transfer_backend", "global_resource_config")
    assert options(**{name: ""}) == ({key: ""} if emitted_when_empty else {})


@pytest.mark.parametrize(("name", "key"), FLAGS.items())
def test_flags(name, key):
    assert options(**{name: True}) == {key: "1"}
    assert options(**{name: False}) == ({} if name == "enable_switch_role" else {key: "0"})


def test_private_flag_that_tests_set():
    made = LLMConfig()
    made._enable_remote_cache_accessible = True
    assert made.enable_remote_cache_accessible is True
    assert made.generate_options()["llm.EnableRemoteCacheAccessible"] == "1"


def test_numbers():
    assert options(link_total_time=5) == {"llm.LinkTotalTime": "5"}
    assert options(link_retry_count=100) == {"llm.LinkRetryCount": "100"}
    assert options(rdma_traffic_class=132) == {"llm.RdmaTrafficClass": "132"}
    assert options(output_max_size=7) == {"llm.OutputMaxSize": "7"}
    assert config(mem_utilization=0.5).generate_options() == {"llm.MemoryUtilization": "0.5"}
    # the documented narrow range is not enforced here.
    assert options(rdma_service_level=100) == {"llm.RdmaServiceLevel": "100"}


def test_cluster_info():
    text = json.dumps(
        {
            "cluster_id": 1,
            "listen_ip_info": [{"ip": "127.0.0.1", "port": 1}, {"ip": 5, "port": 2}, {"ip": "::1", "port": 3}],
        }
    )
    made = config(cluster_info=text)
    assert made.cluster_info == text
    assert json.loads(made.generate_options()["llm.ClusterInfo"]) == {
        "cluster_id": 1,
        "listen_ip_info": [{"ip": 16777343, "port": 1}, {"ip": 5, "port": 2}, {"ip": "::1", "port": 3}],
    }
    assert options(cluster_info="[]") == {"llm.ClusterInfo": "[]"}


def test_all_emitted_values_are_text():
    made = config(
        device_id=[0, 1],
        sync_kv_timeout=5,
        enable_cache_manager=True,
        enable_switch_role=True,
        link_total_time=1,
        link_retry_count=2,
        rdma_traffic_class=3,
        rdma_service_level=4,
        output_max_size=5,
    )
    assert all(type(value) is str for value in made.generate_options().values())
    assert len(made.options) == 11


WRONG_TYPES = {
    **{name: [1, None, b"x", True] for name in TEXTS},
    "cluster_info": [1, None, {}],
    **{name: [1, "1", None] for name in FLAGS},
    "ge_options": [None, [("a", "b")], "a"],
    "device_id": ["0", 0.0, True, [0, "1"], [True], {0}],
    "sync_kv_timeout": [1.0, True, [1]],
    "mem_utilization": ["0.5", None],
    "link_total_time": ["1", None, 1.0, True],
    "link_retry_count": ["1", None, 1.0, True],
    "rdma_traffic_class": ["1", 1.0, True],
    "rdma_service_level": ["1", 1.0, True],
    "output_max_size": ["1", 1.0, True],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in WRONG_TYPES.items() for v in values])
def test_wrong_type(name, value):
    """E-10; A-15: None is a wrong type unless it is the default."""
    made = LLMConfig()
    before = getattr(made, name)
    with pytest.raises(TypeError, match=name):
        setattr(made, name, value)
    assert getattr(made, name) == before


def test_every_setting_is_tested_for_types():
    settings = {name for name, value in vars(LLMConfig).items() if hasattr(value, "__set__") and name[0] != "_"}
    assert settings == set(WRONG_TYPES)


@pytest.mark.parametrize(
    "name", ["device_id", "sync_kv_timeout", "rdma_traffic_class", "rdma_service_level", "output_max_size"]
)
def test_none_means_unset(name):
    made = config(**{name: 1})
    setattr(made, name, None)
    assert getattr(made, name) is None
    assert made.generate_options() == EMPTY


def test_mem_utilization():
    """E-11, E-12."""
    for good in (0.0, 1.0):
        assert config(mem_utilization=good).mem_utilization == good
    for bad in (-0.1, 1.1, float("nan"), float("inf")):
        param_invalid(mem_utilization=bad)
    with pytest.raises(TypeError):
        config(mem_utilization=1)


def test_device_id_values():
    """E-13, E-14."""
    param_invalid(device_id=-1)
    param_invalid(device_id=[0, -1])
    param_invalid(device_id=[])
    for bad in (2**31, [0, 2**31]):
        with pytest.raises(ValueError, match="out of range") as e:
            config(device_id=bad)
        assert not isinstance(e.value, LLMException)


def test_sync_kv_timeout_values():
    """E-15, E-16, E-17."""
    for bad in ("12a", "-5", "1.5", "", " 1", "\u0661", "0", 0, -1):
        param_invalid(sync_kv_timeout=bad)
    for bad in (2**31, "2147483648"):
        with pytest.raises(ValueError, match="out of range") as e:
            config(sync_kv_timeout=bad)
        assert not isinstance(e.value, LLMException)


def test_link_values():
    """E-18."""
    for bad in (-1, 2**32, 2**70):
        param_invalid(link_total_time=bad)
    for bad in (0, 101, -1, 2**70):
        param_invalid(link_retry_count=bad)
    assert config(link_total_time=2**32 - 1).link_total_time == 2**32 - 1


def test_rdma_values():
    """E-19."""
    for name in ("rdma_traffic_class", "rdma_service_level"):
        for bad in (-1, 2**32):
            with pytest.raises(ValueError, match="out of range"):
                config(**{name: bad})


def test_ge_options_types():
    """E-20."""
    for wrong in ({1: "a"}, {"a": 1}, {"a": None}):
        with pytest.raises(TypeError):
            config(ge_options=wrong)


def test_cluster_info_that_is_not_json():
    """E-21."""
    with pytest.raises(json.JSONDecodeError, match="cluster_info"):
        config(cluster_info="{")


def test_properties_are_documented():
    for name, value in vars(LLMConfig).items():
        if not name.startswith("_"):
            assert value.__doc__.strip().splitlines()[0].endswith("."), name
