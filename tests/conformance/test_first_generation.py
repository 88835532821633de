"""`llm_datadist_v1.LLMDataDist`: like the package's, but `init` writes into the caller's dictionary (A-7)."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Callable
from typing import Any

import memory
import pytest
from addresses import bindable
from pairs import Prompt, bytes_desc, cluster_info, options
from peer import Peer
from refusals import refuses

import llm_datadist
import llm_datadist_v1
from llm_datadist_v1 import CacheKey, LLMDataDist, LLMRole, LLMStatusCode

LISTEN = bindable("10.0.0.1:26000")
LITTLE_ENDIAN = int.from_bytes(ipaddress.ip_address(LISTEN.partition(":")[0]).packed, "little")
DESC = bytes_desc(2, 2, 64)


@pytest.fixture
def made(request: pytest.FixtureRequest) -> Any:
    """Give a function that makes instances, which are finalized with the test."""

    def make(role: LLMRole, cluster_id: int = 1) -> LLMDataDist:
        instance = LLMDataDist(role, cluster_id)
        request.addfinalizer(instance.finalize)
        return instance

    return make


def test_init_completes_the_callers_options(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A-7: role, cluster info with addresses as little-endian integers, path of the resources."""
    monkeypatch.setenv("RESOURCE_CONFIG_PATH", "numa.json")
    given = options(LISTEN)
    before = dict(given)
    made(LLMRole.PROMPT, 7).init(given)
    cluster = json.loads(given.pop("llm.ClusterInfo"))
    assert cluster == {"cluster_id": 7, "listen_ip_info": [{"ip": LITTLE_ENDIAN, "port": 26000}]}
    assert given == {**before, "llm.Role": "Prompt", "ge.resourceConfigPath": "numa.json"}


def test_what_the_caller_gave_stays(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A-7: only what is missing is added."""
    monkeypatch.setenv("RESOURCE_CONFIG_PATH", "numa.json")
    mine = json.dumps({"listen_ip_info": [{"ip": LITTLE_ENDIAN, "port": 26001}]})
    given = {"llm.ClusterInfo": mine, "ge.resourceConfigPath": "mine.json"}
    made(LLMRole.PROMPT).init(given)
    assert given == {"llm.ClusterInfo": mine, "ge.resourceConfigPath": "mine.json", "llm.Role": "Prompt"}


@pytest.mark.parametrize("role", LLMRole)
@pytest.mark.parametrize(
    "listen", ["10.0.0.1:26000", pytest.param("[::1]:26000", marks=pytest.mark.needs(network=False))]
)
def test_the_completed_options_can_be_used_again(made: Any, role: LLMRole, listen: str) -> None:
    """A-7: init, finalize and init with one dictionary."""
    given = options(listen if role is LLMRole.PROMPT else None)
    instance = made(role)
    instance.init(given)
    completed = dict(given)
    instance.finalize()
    instance.init(given)
    assert given == completed


def test_refused_options_stay_as_they_are(made: Any) -> None:
    given = {"ge.exec.deviceId": "x"}
    with refuses(LLMStatusCode.LLM_PARAM_INVALID):
        made(LLMRole.DECODER).init(given)
    assert given == {"ge.exec.deviceId": "x"}


def test_a_second_init_does_nothing(made: Any) -> None:
    """S-171."""
    instance = made(LLMRole.DECODER)
    instance.init(options())
    other: dict[str, str] = {}
    instance.init(other)
    assert other == {}


def test_both_packages_share_one_instance(made: Any) -> None:
    """S-170: the rule of one instance holds across the two, and either class shows it."""
    ours = made(LLMRole.DECODER)
    ours.init(options())
    theirs = llm_datadist.LLMDataDist(LLMRole.DECODER, 2)
    with refuses(LLMStatusCode.LLM_FAILED):
        theirs.init(options())
    assert LLMDataDist.llm_engine_instance is llm_datadist.LLMDataDist.llm_engine_instance is ours
    ours.finalize()
    assert LLMDataDist.llm_engine_instance is None
    theirs.init(options())
    assert LLMDataDist.llm_engine_instance is theirs
    theirs.finalize()


@pytest.mark.parametrize("name", ["llm_datadist", "llm_datadist_v1"])
def test_programs_may_reset_the_instance(made: Any, name: str) -> None:
    """Set through either class, it is the one instance that is forgotten."""
    package = {"llm_datadist": llm_datadist, "llm_datadist_v1": llm_datadist_v1}[name]
    first, second = made(LLMRole.DECODER, 1), made(LLMRole.DECODER, 2)
    first.init(options())
    package.LLMDataDist.llm_engine_instance = None  # type: ignore[attr-defined]
    second.init(options())
    assert llm_datadist.LLMDataDist.llm_engine_instance is LLMDataDist.llm_engine_instance is second


def test_a_pull_between_the_generations(made: Any, start_peer: Callable[[], Peer]) -> None:
    """A-6: types of one package, engines of the other."""
    prompt = Prompt(start_peer(), 1)
    prompt.allocate(DESC, [CacheKey(1, req_id=5)])
    decoder = made(LLMRole.DECODER, 2)
    decoder.init(options())
    linked = decoder.link_clusters([cluster_info(1, prompt.addresses)], 5000)
    assert linked == (LLMStatusCode.LLM_SUCCESS, [LLMStatusCode.LLM_SUCCESS])
    manager = decoder.kv_cache_manager
    assert isinstance(manager, llm_datadist.KvCacheManager)
    cache = manager.allocate_cache(DESC)
    manager.pull_cache(llm_datadist.CacheKey(1, req_id=5), cache, 1)
    for tensor, address in enumerate(cache.per_device_tensor_addrs[0]):
        assert memory.read(address + 64, 64) == prompt.expected(DESC, tensor)[:64]
