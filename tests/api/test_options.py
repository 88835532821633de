"""The options of init (api 4.4, 4.5, 5.1; S-120, S-124, S-125; E-65 to E-83)."""

import json
import os

import pytest

from llm_datadist import LLMConfig, LLMException, LLMRole, LLMStatusCode
from llm_datadist._addresses import Address
from llm_datadist._options import PoolConfig, parse_options

PROMPT, DECODER, MIX = LLMRole.PROMPT, LLMRole.DECODER, LLMRole.MIX
DEVICE = {"ge.exec.deviceId": "0"}
LISTEN = {"llm.listenIpInfo": "127.0.0.1:26000"}
#: The smallest options of either mode.
KCM = DEVICE
CM = {**DEVICE, "llm.EnableCacheManager": "1"}
HIXL = {**CM, **LISTEN, "llm.TransferBackend": "hixl"}


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    for name in [n for n in os.environ if n.startswith("LLM_DATADIST_")]:
        monkeypatch.delenv(name)


def parse(options, role=DECODER):
    return parse_options(role, 7, options)


def refused(options, *texts, role=DECODER, status=LLMStatusCode.LLM_PARAM_INVALID):
    with pytest.raises(LLMException) as e:
        parse(options, role)
    assert e.value.status_code is status
    assert isinstance(e.value, ValueError) == (status is LLMStatusCode.LLM_PARAM_INVALID)
    for text in texts:
        assert text in str(e.value)


def test_defaults():
    config = parse(KCM)
    assert config.role is DECODER
    assert config.cluster_id == 7
    assert config.devices == (0,)
    assert config.listen == ()
    assert config.sync_timeout_ms == 1000
    assert (config.cache_manager, config.remote_accessible, config.switch_role, config.loopback) == (False,) * 4
    assert (config.memory_limit, config.device_pool, config.host_pool) == (None, None, None)
    assert (config.link_total_time_s, config.link_retry_count) == (0, 1)
    assert (config.transfer_backend, config.local_comm_res) == (None, None)
    assert (config.backend, config.namespace) == ("auto", "")
    assert config.copy_threads == min(2, len(os.sched_getaffinity(0)))


def test_options_are_copied():
    given = {**KCM, "unknown": "x"}
    config = parse(given)
    given["unknown"] = "y"
    assert given.keys() == {"ge.exec.deviceId", "unknown"}
    assert config.options == {"ge.exec.deviceId": "0", "unknown": "x", "llm.Role": "Decoder"}
    with pytest.raises(TypeError):
        config.options["unknown"] = "z"
    with pytest.raises(AttributeError):
        config.role = PROMPT


@pytest.mark.parametrize(("role", "text"), [(PROMPT, "Prompt"), (DECODER, "Decoder"), (MIX, "Mix")])
def test_role_option(role, text):
    assert parse({**KCM, **LISTEN, "llm.Role": "other"}, role).options["llm.Role"] == text


def test_what_llm_config_makes():
    made = LLMConfig()
    made.device_id = 3
    made.listen_ip_info = "[::1]:26000"
    made.sync_kv_timeout = "5000"
    made.enable_cache_manager = True
    made.enable_remote_cache_accessible = True
    made.mem_pool_cfg = '{"memory_size": 1048576, "page_shift": 12}'
    made.host_mem_pool_cfg = '{"memory_size": 65536}'
    made.link_total_time = 20
    made.link_retry_count = 3
    made.local_comm_res = ""
    made.transfer_backend = "hixl"
    config = parse(made.generate_options(), PROMPT)
    assert (config.cache_manager, config.remote_accessible) == (True, True)
    assert config.devices == (3,)
    assert config.listen == (Address("::1", 26000),)
    assert config.sync_timeout_ms == 5000
    assert (config.device_pool, config.host_pool) == (PoolConfig(2**20, 12), PoolConfig(2**16, 16))
    assert (config.link_total_time_s, config.link_retry_count) == (20, 3)
    assert (config.local_comm_res, config.transfer_backend) == ("", "hixl")


def test_not_a_dict():
    """E-65."""
    for wrong in (None, [("a", "b")], "x"):
        with pytest.raises(TypeError):
            parse(wrong)
    for wrong in ({**KCM, 1: "x"}, {**KCM, "x": 1}, {**KCM, "x": None}):
        with pytest.raises(TypeError, match="only support str"):
            parse(wrong)


@pytest.mark.parametrize("base", [KCM, CM])
def test_memory_size_type(base):
    """E-66, also before the other options are looked at."""
    for options in ({**base, "ge.flowGraphMemMaxSize": 1024}, {"ge.flowGraphMemMaxSize": 1024, "llm.LocalCommRes": 1}):
        with pytest.raises(TypeError, match="flowGraphMemMaxSize"):
            parse(options)


@pytest.mark.parametrize("base", [KCM, CM])
@pytest.mark.parametrize("bad", ["1,2", "-1", "1.23", "", " 1", "1e3", "\u0661", "9" * 5000])
def test_memory_size_value(base, bad):
    """E-67."""
    refused({**base, "ge.flowGraphMemMaxSize": bad}, "ge.flowGraphMemMaxSize")


def test_memory_limit():
    """S-124."""
    size = {"ge.flowGraphMemMaxSize": "10240"}
    assert parse({**KCM, **size}).memory_limit == 9728
    assert parse({**KCM, **size, "llm.MemoryUtilization": "0.5"}).memory_limit == 5120
    assert parse({**KCM, **size, "llm.MemoryUtilization": "0"}).memory_limit == 0
    assert parse({**KCM, **size, "llm.Simulator.EnforceMemoryLimit": "0"}).memory_limit is None
    assert parse({**KCM, **size, "llm.Simulator.EnforceMemoryLimit": "1"}).memory_limit == 9728
    assert parse({**CM, **size}).memory_limit is None
    for bad in ("x", "-0.1", "1.1", "nan", ""):
        refused({**KCM, "llm.MemoryUtilization": bad}, "llm.MemoryUtilization", repr(bad))


def test_transfer_backend_needs_cache_manager():
    """E-68."""
    refused({**KCM, **LISTEN, "llm.TransferBackend": "hixl"}, "EnableCacheManager")


def test_transfer_backend_needs_remote_access():
    """E-69."""
    refused({**HIXL, "llm.EnableRemoteCacheAccessible": "0"}, "EnableRemoteCacheAccessible")
    assert parse(HIXL).remote_accessible


def test_transfer_backend_needs_listen_info():
    """E-70."""
    refused({**CM, "llm.TransferBackend": "hixl"}, "listenIpInfo")


@pytest.mark.parametrize("bad", ["", "HIXL", "other"])
def test_unknown_transfer_backend(bad):
    """E-71."""
    refused({**HIXL, "llm.TransferBackend": bad}, "llm.TransferBackend", "hixl")


@pytest.mark.parametrize("resources", ["", "{}"])
def test_local_comm_res(resources):
    """E-72, and what communication resources imply, also when empty."""
    given = {**DEVICE, "llm.LocalCommRes": resources}
    config = parse(given)
    assert (config.cache_manager, config.remote_accessible, config.local_comm_res) == (True, True, resources)
    assert not parse({**given, "llm.EnableRemoteCacheAccessible": "0"}).remote_accessible
    refused({**given, "llm.EnableCacheManager": "0"}, "EnableCacheManager", "LocalCommRes")


def test_remote_access_belongs_to_cache_manager():
    assert not parse({**KCM, "llm.EnableRemoteCacheAccessible": "1"}).remote_accessible
    assert parse({**CM, "llm.EnableRemoteCacheAccessible": "1"}).remote_accessible
    assert not parse(CM).remote_accessible


@pytest.mark.parametrize("base", [{}, {"llm.EnableCacheManager": "1"}])
@pytest.mark.parametrize("role", LLMRole)
def test_no_device(base, role):
    """E-73."""
    refused({**base, **LISTEN}, "ge.exec.deviceId", role=role)


@pytest.mark.parametrize("base", [KCM, CM])
@pytest.mark.parametrize(
    "bad", ["", "a", "-1", "1.0", " 1", "0;", ";0", "0;x", "0,1", "\u0661", "2147483648", "9" * 5000]
)
def test_bad_device(base, bad):
    """E-74."""
    refused({**base, "ge.exec.deviceId": bad}, "ge.exec.deviceId")


def test_several_devices():
    assert parse({"ge.exec.deviceId": "0;3;1"}).devices == (0, 3, 1)
    refused({"ge.exec.deviceId": "0;1;0"}, "ge.exec.deviceId", "once")
    refused({**CM, "ge.exec.deviceId": "0;1"}, "one device")


def test_prompt_needs_listen_info():
    """E-75."""
    refused(KCM, "llm.listenIpInfo", role=PROMPT)
    assert parse(KCM, MIX).listen == ()
    assert parse(CM, PROMPT).listen == ()


def test_listen_entries():
    """E-76."""
    two = {"ge.exec.deviceId": "0;1"}
    config = parse({**two, "llm.listenIpInfo": "1.1.1.1:1;[::1]:2"}, PROMPT)
    assert config.listen == (Address("1.1.1.1", 1), Address("::1", 2))
    refused({**two, **LISTEN}, "1 addresses", "2 devices", role=PROMPT)
    refused({**DEVICE, "llm.listenIpInfo": "1.1.1.1:1;1.1.1.2:2"}, role=PROMPT)


@pytest.mark.parametrize("base", [KCM, CM])
@pytest.mark.parametrize(
    "bad", ["", "1.1.1.1", "1.1.1.1:1:2", "::1:80", "host:1", "1.1.1.1:0", "1.1.1.1:65536", "1.1.1.1:x", "1.1.1.1:80x"]
)
def test_bad_listen_entry(base, bad):
    """E-76, E-77."""
    refused({**base, "llm.listenIpInfo": bad}, "llm.listenIpInfo", role=PROMPT)


def test_cache_manager_listens_at_one_address():
    """E-76."""
    assert parse({**CM, **LISTEN}).listen == (Address("127.0.0.1", 26000),)
    refused({**CM, "llm.listenIpInfo": "1.1.1.1:1;1.1.1.2:2"}, "llm.listenIpInfo")


@pytest.mark.parametrize("role", [DECODER, MIX])
def test_only_a_prompt_listens(role):
    """In KvCacheManager mode others need no listen info, and what they give is not used."""
    assert parse({**KCM, **LISTEN}, role).listen == ()
    assert parse({**KCM, "llm.listenIpInfo": "anything"}, role).listen == ()


def cluster(*entries):
    return {"llm.ClusterInfo": json.dumps({"cluster_id": 7, "listen_ip_info": entries})}


def test_cluster_info():
    first, second = {"ip": 16777343, "port": 1}, {"ip": "::1", "port": 2}
    config = parse(cluster(first, second), PROMPT)
    assert config.listen == (Address("127.0.0.1", 1), Address("::1", 2))
    assert config.devices == (0, 1)
    assert parse({**cluster(first), "ge.exec.deviceId": "5"}, PROMPT).devices == (5,)
    assert parse({**cluster(first), "llm.listenIpInfo": "1.1.1.1:9"}, PROMPT).listen == (Address("127.0.0.1", 1),)
    decoder = parse({"llm.ClusterInfo": "{}"})
    assert (decoder.devices, decoder.listen) == ((0,), ())


def test_bad_cluster_info():
    refused({"llm.ClusterInfo": "{"}, "llm.ClusterInfo")
    refused({"llm.ClusterInfo": "[]"}, "llm.ClusterInfo")
    refused({"llm.ClusterInfo": '{"listen_ip_info": 1}'}, "llm.ClusterInfo")
    refused({"llm.ClusterInfo": "{}"}, role=PROMPT)
    refused({**cluster({"ip": 1, "port": 1}), "ge.exec.deviceId": "0;1"}, role=PROMPT)
    for entry in (
        1,
        {},
        {"ip": 1},
        {"ip": 1, "port": 0},
        {"ip": 1, "port": 65536},
        {"ip": True, "port": 1},
        {"ip": 1.0, "port": 1},
    ):
        refused(cluster(entry), "llm.ClusterInfo", role=PROMPT)
    refused(cluster({"ip": "host", "port": 1}), "'host'", role=PROMPT)


@pytest.mark.parametrize("key", ["llm.EnableCacheManager", "llm.EnableRemoteCacheAccessible", "llm.EnableSwitchRole"])
@pytest.mark.parametrize("bad", ["", "2", "true", "01"])
def test_bad_flag(key, bad):
    """E-79."""
    refused({**KCM, key: bad}, key, status=LLMStatusCode.LLM_FAILED)
    if key != "llm.EnableCacheManager":
        refused({**CM, key: bad}, key, status=LLMStatusCode.LLM_FAILED)


def test_switch_role():
    assert parse({**KCM, "llm.EnableSwitchRole": "1"}).switch_role
    assert not parse({**KCM, "llm.EnableSwitchRole": "0"}).switch_role


@pytest.mark.parametrize("base", [KCM, CM])
@pytest.mark.parametrize(
    ("key", "bad"),
    [
        *(("llm.SyncKvCacheWaitTime", bad) for bad in ("", "0", "-1", "1.5", "x", "2147483648")),
        *(("llm.LinkRetryCount", bad) for bad in ("", "0", "101", "x")),
        *(("llm.LinkTotalTime", bad) for bad in ("", "-1", "4294967296", "x")),
    ],
)
def test_bad_number(base, key, bad):
    """E-80, and the numbers of links."""
    refused({**base, key: bad}, key, repr(bad))


@pytest.mark.parametrize("key", ["llm.MemPoolConfig", "llm.HostMemPoolConfig"])
@pytest.mark.parametrize(
    "bad",
    [
        "",
        "{",
        "[" * 100_000,
        "[]",
        "1",
        "{}",
        '{"page_shift": 16}',
        '{"memory_size": 0}',
        '{"memory_size": -65536}',
        '{"memory_size": "65536"}',
        '{"memory_size": 65536.0}',
        '{"memory_size": true}',
        '{"memory_size": null}',
        '{"memory_size": 65535}',
        '{"memory_size": 2048, "page_shift": 9}',
        '{"memory_size": 4294967296, "page_shift": 31}',
        '{"memory_size": 65536, "page_shift": "16"}',
        '{"memory_size": 65536, "page_shift": 16.0}',
        '{"memory_size": 65536, "page_shift": null}',
        '{"memory_size": 65536, "page_shift": true}',
        '{"memory_size": 1023, "page_shift": 10}',
        '{"memory_size": %d, "page_shift": 10}' % ((2**32 - 1) << 10),  # noqa: UP031
    ],
)
def test_bad_pool(key, bad):
    """E-81, S-120. KvCacheManager mode has no pools and looks at none."""
    refused({**CM, key: bad}, key)
    config = parse({**KCM, key: bad})
    assert (config.device_pool, config.host_pool) == (None, None)


def test_pool_limits():
    """S-120."""
    for text, pool in [
        ('{"memory_size": 65536}', PoolConfig(65536, 16)),
        ('{"memory_size": 1024, "page_shift": 10, "more": []}', PoolConfig(1024, 10)),
        ('{"memory_size": 1073741824, "page_shift": 30}', PoolConfig(2**30, 30)),
    ]:
        assert parse({**CM, "llm.MemPoolConfig": text}).device_pool == pool
    largest = ((2**32 - 1) << 10) - 1
    config = parse({**CM, "llm.HostMemPoolConfig": json.dumps({"memory_size": largest, "page_shift": 10})})
    assert config.host_pool == PoolConfig(largest, 10)
    assert config.device_pool is None


TIERS = [(2097152, 256, 8192), (10485760, 8192, 8388608), (69206016, 8192, 67108864)]


def buffers(*tiers):
    names = ("total_size", "blk_size", "max_buf_size")
    return {"llm.BufPoolCfg": json.dumps({"buf_cfg": [dict(zip(names, tier, strict=True)) for tier in tiers]})}


def test_buffer_tiers():
    """S-125."""
    parse({**KCM, **buffers(*TIERS)})
    parse({**KCM, **buffers((2**32 - 2**21, 2**21, 2**31))})


@pytest.mark.parametrize(
    "tier",
    [
        (2097153, 256, 8192),
        (2**32, 256, 8192),
        (0, 256, 8192),
        (2097152, 0, 8192),
        (2097152, 300, 8192),
        (2**22, 2**22, 2**22),
        (2097152, 8192, 256),
        (2097152, 256, 2097152),
        (2097152, 256, "8192"),
        (2097152.0, 256, 8192),
        (2097152, True, 8192),
    ],
)
def test_bad_buffer_tier(tier):
    """E-83; CacheManager mode ignores it."""
    refused({**KCM, **buffers(tier)}, "llm.BufPoolCfg")
    parse({**CM, **buffers(tier)})


def test_bad_buffer_tiers():
    """E-83."""
    refused({**KCM, **buffers(TIERS[1], TIERS[0])}, "llm.BufPoolCfg", "above 8388608")
    refused({**KCM, **buffers(TIERS[0], TIERS[0])}, "llm.BufPoolCfg")
    for bad in ("", "[]", "{}", '{"buf_cfg": {}}', '{"buf_cfg": [1]}', '{"buf_cfg": [{}]}'):
        refused({**KCM, "llm.BufPoolCfg": bad}, "llm.BufPoolCfg")


# --- switches of our own: the option wins over the environment variable


def test_backend(monkeypatch):
    monkeypatch.setenv("LLM_DATADIST_BACKEND", "acl")
    assert parse(KCM).backend == "acl"
    assert parse({**KCM, "llm.Backend": "simulator"}).backend == "simulator"
    monkeypatch.setenv("LLM_DATADIST_BACKEND", "")
    assert parse(KCM).backend == "auto"
    refused({**KCM, "llm.Backend": ""}, "llm.Backend", "simulator")


def test_namespace(monkeypatch):
    monkeypatch.setenv("LLM_DATADIST_NAMESPACE", "job 7")
    assert parse(KCM).namespace == "job 7"


def test_loopback(monkeypatch):
    assert parse({**KCM, "llm.Simulator.Loopback": "1"}).loopback
    monkeypatch.setenv("LLM_DATADIST_LOOPBACK", "1")
    assert parse(KCM).loopback
    assert not parse({**KCM, "llm.Simulator.Loopback": "0"}).loopback
    refused({**KCM, "llm.Simulator.Loopback": "yes"}, "llm.Simulator.Loopback", "'yes'", "0 and 1")
    monkeypatch.setenv("LLM_DATADIST_LOOPBACK", "on")
    refused(KCM, "LLM_DATADIST_LOOPBACK", "'on'", "0 and 1")


def test_enforce_memory_limit():
    refused({**KCM, "llm.Simulator.EnforceMemoryLimit": "off"}, "llm.Simulator.EnforceMemoryLimit", "'off'")


def test_copy_threads(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert parse(KCM).copy_threads == 2
    monkeypatch.setenv("LLM_DATADIST_COPY_THREADS", "3")
    assert parse(KCM).copy_threads == 3
    assert parse({**KCM, "llm.CopyThreads": "4"}).copy_threads == 4
    assert parse({**KCM, "llm.CopyThreads": "100"}).copy_threads == 8
    for bad in ("0", "-1", "x", "", "1.5"):
        refused({**KCM, "llm.CopyThreads": bad}, "llm.CopyThreads", repr(bad))
    monkeypatch.setenv("LLM_DATADIST_COPY_THREADS", "many")
    refused(KCM, "LLM_DATADIST_COPY_THREADS", "'many'")
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    monkeypatch.delenv("LLM_DATADIST_COPY_THREADS")
    assert parse(KCM).copy_threads == 1


# --- order of the checks (api 5.1)


def test_order():
    # 4 before 6, 6 before 7, 7 before 8, 8 before 9, 9 before 10
    bad_memory = {"ge.flowGraphMemMaxSize": "x"}
    bad_resources = {"llm.LocalCommRes": "", "llm.EnableCacheManager": "0"}
    refused({**bad_memory, **bad_resources}, "flowGraphMemMaxSize")
    refused({**bad_resources, "llm.TransferBackend": "x"}, "LocalCommRes")
    refused(
        {
            "llm.EnableCacheManager": "1",
            "llm.TransferBackend": "x",
            "llm.listenIpInfo": "x",
            "llm.EnableRemoteCacheAccessible": "0",
        },
        "Remote",
    )
    refused({"llm.EnableCacheManager": "1", "llm.listenIpInfo": "x", "llm.SyncKvCacheWaitTime": "x"}, "listenIpInfo")
    refused({"llm.SyncKvCacheWaitTime": "x", "llm.EnableSwitchRole": "x"}, "deviceId")
