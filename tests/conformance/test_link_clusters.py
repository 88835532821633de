"""link_clusters and unlink_clusters: whole-call checks, one result for each cluster, and what a link then is."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from pairs import Decoder, Prompt, bytes_desc, cluster_info, options
from peer import Peer
from refusals import PARAM_INVALID, refuses
from stall import Stalled

from llm_datadist import BlocksCacheKey, CacheKey, LLMClusterInfo, LLMDataDist, LLMRole
from llm_datadist import LLMStatusCode as Code

DESC = bytes_desc(2, 4, 64)
OK = Code.LLM_SUCCESS
LINKED = (OK, [OK])


def info(cluster_id: int | None, local: list[str], remote: list[str]) -> LLMClusterInfo:
    """Describe a peer with any number of addresses."""
    made = LLMClusterInfo()
    if cluster_id is not None:
        made.remote_cluster_id = cluster_id
    for ip in local:
        made.append_local_ip_info(ip, 0)
    for address in remote:
        ip, _, port = address.rpartition(":")
        made.append_remote_ip_info(ip, int(port))
    return made


def check_pull(prompt: Prompt, decoder: Decoder, model: int = 0) -> None:
    """Check that a link carries bytes; keys of a model are used once."""
    source = prompt.allocate_blocks(DESC, BlocksCacheKey(1, model))
    cache = decoder.allocate(DESC, blocks=True)
    decoder.manager.pull_blocks(BlocksCacheKey(prompt.cluster_id, model), cache, range(4), range(4))
    decoder.check(cache, {t: [(0, prompt.expected(DESC, t))] for t in range(2)})
    prompt.manager.deallocate_cache(source)
    decoder.manager.deallocate_cache(cache)


@contextmanager
def stopped(peer: Peer) -> Iterator[None]:
    """Keep a peer stopped during the block."""
    peer.stop()
    try:
        yield
    finally:
        peer.signal(signal.SIGCONT)


CALLS = ["link_clusters", "unlink_clusters"]
SOMEONE = cluster_info(1, ["10.0.1.1:25000"])


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("rule", "timeout", "expected", "word"),
    [
        ("E-90", None, TypeError, "int"),
        ("E-90", "100", TypeError, "int"),
        ("E-90", 100.0, TypeError, "int"),
        ("E-90", True, TypeError, "int"),
        ("E-91", 2**31, ValueError, 2**31 - 1),
        ("E-92", 0, PARAM_INVALID, 2**31 - 1),
        ("E-92", -1, PARAM_INVALID, 2**31 - 1),
    ],
)
def test_timeout(decoder: Decoder, call: str, rule: str, timeout: Any, expected: Any, word: object) -> None:
    """E-90, E-91, E-92: the time limit is checked before the clusters."""
    with refuses(expected, "timeout", word):
        getattr(decoder.dd, call)([None], timeout)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("clusters", [None, SOMEONE, {1: SOMEONE}, iter([SOMEONE]), [1], (SOMEONE, None)], ids=type)
def test_e93_clusters(decoder: Decoder, call: str, clusters: Any) -> None:
    """E-93: clusters are a list or tuple of LLMClusterInfo."""
    with refuses(TypeError, "clusters"):
        getattr(decoder.dd, call)(clusters, 100)


@pytest.mark.parametrize("force", [None, 1, "True"])
def test_e94_force(decoder: Decoder, force: Any) -> None:
    """E-94: force is a bool, by position too."""
    with refuses(TypeError, "force", "bool"):
        decoder.dd.unlink_clusters([SOMEONE], 100, force)


@pytest.mark.parametrize("call", CALLS)
def test_e96_cluster_id_unset(decoder: Decoder, call: str) -> None:
    """E-96: an entry without a cluster id has a wrong type."""
    with refuses(TypeError, "remote_cluster_id"):
        getattr(decoder.dd, call)([info(None, ["10.0.0.9"], ["10.0.1.1:25000"])], 100)


@pytest.mark.parametrize(
    "clusters",
    [
        pytest.param([], id="E-97 no clusters"),
        pytest.param([info(1, [], ["10.0.1.1:25000"])], id="E-95 no local address"),
        pytest.param([info(1, ["10.0.0.9"], [])], id="E-99 no remote address"),
        pytest.param([info(1, [], [])], id="E-95 no address"),
        pytest.param([info(1, ["10.0.0.9"], ["10.0.1.1:25000"] * 2)], id="E-99 counts differ"),
        pytest.param([info(1, ["10.0.0.9"] * 2, ["10.0.1.1:25000"] * 2)], id="E-99 more than devices"),
        pytest.param(
            [info(1, ["10.0.0.9"], ["10.0.1.1:25000"]), info(3, ["10.0.0.8"], ["10.0.1.1:25001"])],
            id="S-135 local addresses differ between entries",
        ),
    ],
)
def test_whole_call_refused(prompt: Prompt, decoder: Decoder, clusters: list[LLMClusterInfo]) -> None:
    """E-95, E-97, E-99, S-135: the whole call is refused without an exception, and nothing is linked."""
    assert decoder.dd.link_clusters(clusters, 500) == (Code.LLM_PARAM_INVALID, [])
    decoder.link(prompt)


@pytest.mark.parametrize("role", [LLMRole.PROMPT, LLMRole.MIX])
def test_e98_only_a_decoder_links(prompt: Prompt, role: LLMRole) -> None:
    """E-98, S-134: other roles are told so, without an exception."""
    dd = LLMDataDist(role, 5)
    dd.init(options("10.0.5.1:26000"))
    try:
        assert dd.link_clusters([prompt.info()], 500) == (Code.LLM_PARAM_INVALID, [])
    finally:
        dd.finalize()


@pytest.mark.parametrize("call", CALLS)
def test_e100_sixteen_clusters_a_call(decoder: Decoder, call: str) -> None:
    """E-100, S-135: 16 clusters are one call's limit."""
    many = [cluster_info(100 + i, [f"10.0.7.1:{25000 + i}"]) for i in range(17)]
    call_it = getattr(decoder.dd, call)
    assert call_it(many, 500) == (Code.LLM_CLUSTER_NUM_EXCEED_LIMIT, [])
    result, results = call_it(many[:16], 2000)
    if call == "link_clusters":
        assert (result, results) == (Code.LLM_LINK_FAILED, [Code.LLM_LINK_FAILED] * 16)
    else:
        assert (result, results) == (OK, [Code.LLM_NOT_YET_LINK] * 16)


def test_e101_one_link_call_at_a_time(prompt: Prompt, decoder: Decoder) -> None:
    """E-101: while a link or unlink is in progress, another one is told to come later, and the first is not harmed."""
    entered, results = threading.Event(), []
    original = decoder.dd._engine.links.link

    def slow(*args: Any) -> Any:
        entered.set()
        return original(*args)

    decoder.dd._engine.links.link = slow
    with stopped(prompt.peer):
        first = threading.Thread(target=lambda: results.append(decoder.dd.link_clusters([prompt.info()], 20000)))
        first.start()
        assert entered.wait(20)
        assert decoder.dd.link_clusters([prompt.info()], 500) == (Code.LLM_PROCESSING_LINK, [])
        assert decoder.dd.unlink_clusters([prompt.info()], 500) == (Code.LLM_PROCESSING_LINK, [])
    first.join(30)
    assert results == [LINKED]
    check_pull(prompt, decoder)


def test_e102_e103_again(prompt: Prompt, decoder: Decoder) -> None:
    """E-102, E-103, S-136, S-137: repeated and standing links are told of in their entry; overall a success."""
    again = prompt.info()
    repeat = Code.LLM_REPEAT_REQUEST
    assert decoder.dd.link_clusters((again, prompt.info(), again), 5000) == (OK, [OK, repeat, repeat])
    assert decoder.dd.link_clusters([again], 5000) == (OK, [Code.LLM_ALREADY_LINK])
    assert decoder.dd.link_clusters([again, again], 5000) == (OK, [Code.LLM_ALREADY_LINK, repeat])
    check_pull(prompt, decoder)


def test_e104_nobody_there(prompt: Prompt, decoder: Decoder) -> None:
    """E-104, S-137: a closed port fails at once, the log says who and where, and other entries are not harmed."""
    nobody = cluster_info(7, ["10.0.7.1:25000"])
    start = time.monotonic()
    result = decoder.dd.link_clusters([nobody, prompt.info()], 20000)
    assert time.monotonic() - start < 10
    assert result == (Code.LLM_LINK_FAILED, [Code.LLM_LINK_FAILED, OK])
    with refuses(Code.LLM_NOT_YET_LINK, "cluster 7"):
        decoder.dd.check_link_status(7)
    check_pull(prompt, decoder)


def test_e105_link_runs_out_of_time(prompt: Prompt, decoder: Decoder) -> None:
    """E-105, S-136, S-137, S-138: a server that does not answer; nothing is left of the attempt when it wakes up."""
    with stopped(prompt.peer):
        start = time.monotonic()
        result = decoder.dd.link_clusters([prompt.info()], 300)
        assert 0.29 <= time.monotonic() - start < 5
        assert result == (Code.LLM_LINK_FAILED, [Code.LLM_WAIT_PROCESS_TIMEOUT])
        with refuses(Code.LLM_NOT_YET_LINK, "cluster 1"):
            decoder.dd.check_link_status(1)
    decoder.link(prompt)
    check_pull(prompt, decoder)


def test_e106_most_links(
    prompt: Prompt, decoder: Decoder, start_peer: Callable[[], Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """E-106, S-136: above the limit an entry is PARAM_INVALID; unlinking makes room; the limit is lowered here."""
    from llm_datadist._engine import links

    assert links.LIMIT == 512
    monkeypatch.setattr(links, "LIMIT", 1)
    decoder.link(prompt)
    other = cluster_info(3, ["10.0.3.1:25000"])
    assert decoder.dd.link_clusters([other], 500) == (OK, [Code.LLM_PARAM_INVALID])
    assert decoder.dd.link_clusters([prompt.info()], 500) == (OK, [Code.LLM_ALREADY_LINK])
    assert decoder.dd.unlink_clusters([prompt.info()], 5000) == LINKED
    assert decoder.dd.link_clusters([other], 500) == (Code.LLM_LINK_FAILED, [Code.LLM_LINK_FAILED])
    decoder.link(prompt)


def test_e106_most_links_of_the_server(prompt: Prompt, decoder: Decoder) -> None:
    """E-106: a server with too many links refuses, with the same code."""
    prompt.peer.make("conftest_support:set_attribute", "llm_datadist._engine.links", "LIMIT", 0)
    try:
        assert decoder.dd.link_clusters([prompt.info()], 5000) == (OK, [Code.LLM_PARAM_INVALID])
    finally:
        prompt.peer.make("conftest_support:set_attribute", "llm_datadist._engine.links", "LIMIT", 512)
    decoder.link(prompt)


def test_e108_another_cluster_listens(prompt: Prompt, decoder: Decoder) -> None:
    """E-108, S-133: a server of another id is not linked, under neither id."""
    result = decoder.dd.link_clusters([cluster_info(8, prompt.addresses)], 5000)
    assert result == (Code.LLM_LINK_FAILED, [Code.LLM_LINK_FAILED])
    for number in (1, 8):
        with refuses(Code.LLM_NOT_YET_LINK, f"cluster {number}"):
            decoder.dd.check_link_status(number)
    decoder.link(prompt)


def test_modes_do_not_mix(prompt: Prompt, decoder: Decoder) -> None:
    """S-130: a prompt with another number of devices is refused."""
    prompt.dd.finalize()
    other = Prompt(prompt.peer, 1, [0, 1])
    result = decoder.dd.link_clusters([cluster_info(1, other.addresses[:1])], 5000)
    assert result == (Code.LLM_LINK_FAILED, [Code.LLM_LINK_FAILED])


def test_several_devices_have_an_address_each(peer: Peer) -> None:
    """S-135, S-131: with two devices there are two addresses on each side, and one is too few."""
    prompt = Prompt(peer, 1, [0, 1])
    decoder = Decoder(2, [0, 1])
    try:
        assert decoder.dd.link_clusters([cluster_info(1, prompt.addresses[:1])], 5000) == (Code.LLM_PARAM_INVALID, [])
        wrong = cluster_info(1, [prompt.addresses[0], "10.0.1.1:25999"])
        assert decoder.dd.link_clusters([wrong], 5000) == (Code.LLM_LINK_FAILED, [Code.LLM_LINK_FAILED])
        decoder.link(prompt)
        assert decoder.dd.unlink_clusters([prompt.info()], 5000) == LINKED
    finally:
        decoder.dd.finalize()


def test_s139_a_client_that_links_again_replaces_its_old_link(
    prompt: Prompt, decoder: Decoder, start_peer: Callable[[], Peer]
) -> None:
    """S-139: the same cluster id and address again: the server drops the old link, whose pulls then fail at once."""
    decoder.link(prompt)
    cache = decoder.allocate(DESC)
    prompt.allocate(DESC, [CacheKey(1, 10)])
    restarted = start_peer()

    dd = restarted.make("llm_datadist:LLMDataDist", LLMRole.DECODER, decoder.cluster_id)
    dd.init(options())
    assert restarted.make("conftest_support:link", dd, 1, prompt.addresses) == LINKED
    with refuses(Code.LLM_NOT_YET_LINK, "cluster 1"):
        decoder.manager.pull_cache(CacheKey(1, 10), cache)
    decoder.untouched(cache)
    dd.check_link_status(1)


def test_unlink_ends_both_sides(linked: tuple[Prompt, Decoder]) -> None:
    """S-140, S-144: after an unlink neither side knows the link; nothing is written; it can be linked again."""
    prompt, decoder = linked
    cache = decoder.allocate(DESC)
    prompt.allocate(DESC, [CacheKey(1, 10)])
    for _ in range(3):
        assert decoder.dd.unlink_clusters([prompt.info()], 5000) == LINKED
        assert unlink_at(prompt, decoder) == (OK, [Code.LLM_NOT_YET_LINK])
        with refuses(Code.LLM_NOT_YET_LINK, "cluster 1 is not linked"):
            decoder.manager.pull_cache(CacheKey(1, 10), cache)
        decoder.untouched(cache)
        decoder.link(prompt)
    check_pull(prompt, decoder)


def unlink_at(prompt: Prompt, decoder: Decoder, force: bool = False) -> Any:
    """Unlink the decoder in the prompt's process."""
    return prompt.peer.make("conftest_support:unlink", prompt.dd, decoder.cluster_id, ["192.168.0.9:0"], force)


def test_forced_unlink_is_local(linked: tuple[Prompt, Decoder]) -> None:
    """S-140: a forced unlink removes one end; the other end can then be removed at its own side, and linked again."""
    prompt, decoder = linked
    assert decoder.dd.unlink_clusters([prompt.info()], 5000, True) == LINKED
    assert decoder.dd.unlink_clusters([prompt.info()], 5000, True) == (OK, [Code.LLM_NOT_YET_LINK])
    assert unlink_at(prompt, decoder, force=True) == LINKED
    decoder.link(prompt)
    check_pull(prompt, decoder)


@pytest.mark.parametrize("force", [False, True])
def test_a_prompt_unlinks(linked: tuple[Prompt, Decoder], force: bool) -> None:
    """S-140: a PROMPT cleans its own end, and the decoder's next pull fails at once."""
    prompt, decoder = linked
    cache = decoder.allocate(DESC)
    prompt.allocate(DESC, [CacheKey(1, 10)])
    assert unlink_at(prompt, decoder, force) == LINKED
    with refuses(Code.LLM_NOT_YET_LINK, "cluster 1", "gone"):
        decoder.manager.pull_cache(CacheKey(1, 10), cache)
    decoder.untouched(cache)
    decoder.link(prompt)
    decoder.manager.pull_cache(CacheKey(1, 10), cache)


def test_e110_not_linked(prompt: Prompt, decoder: Decoder) -> None:
    """E-110: unlinking what is not linked is no failure."""
    for force in (False, True):
        assert decoder.dd.unlink_clusters([prompt.info()], 500, force) == (OK, [Code.LLM_NOT_YET_LINK])


@pytest.mark.parametrize("force", [False, True])
def test_e111_unlink_at_another_address(linked: tuple[Prompt, Decoder], force: bool) -> None:
    """E-111: a wrong address does not unlink."""
    prompt, decoder = linked
    ip, _, port = prompt.addresses[0].rpartition(":")
    for wrong in (f"10.0.9.9:{port}", f"{ip}:{int(port) + 1}"):
        result = decoder.dd.unlink_clusters([cluster_info(1, [wrong])], 5000, force)
        assert result == (Code.LLM_UNLINK_FAILED, [Code.LLM_PARAM_INVALID])
    check_pull(prompt, decoder)


@pytest.mark.parametrize("force", [False, True])
def test_e112_unlink_during_a_pull(linked: tuple[Prompt, Decoder], force: bool) -> None:
    """E-112, S-190: a link in use is not removed; the pull goes on, and then it can be."""
    prompt, decoder = linked
    prompt.allocate(DESC, [CacheKey(1, 10)])
    cache = decoder.allocate(DESC)
    decoder.dd._engine.transfers._timeout_ms = 60000
    with Stalled(decoder.dd, lambda: decoder.manager.pull_cache(CacheKey(1, 10), cache), at=64) as pull:
        result = decoder.dd.unlink_clusters([prompt.info()], 5000, force)
        assert result == (Code.LLM_UNLINK_FAILED, [Code.LLM_LINK_BUSY])
        assert pull.finish() is None
    decoder.check(cache, {t: [(0, prompt.expected(DESC, t)[:64])] for t in range(2)})
    assert decoder.dd.unlink_clusters([prompt.info()], 5000, force) == LINKED


def test_e113_peer_could_not_be_told(linked: tuple[Prompt, Decoder]) -> None:
    """E-113: a silent peer: this end is removed, and the result tells of the other; force needs no peer."""
    prompt, decoder = linked
    with stopped(prompt.peer):
        start = time.monotonic()
        result = decoder.dd.unlink_clusters([prompt.info()], 300)
        assert time.monotonic() - start < 5
        assert result == (Code.LLM_UNLINK_FAILED, [Code.LLM_NOTIFY_PROMPT_UNLINK_FAILED])
        assert decoder.dd.unlink_clusters([prompt.info()], 300) == (OK, [Code.LLM_NOT_YET_LINK])
    decoder.link(prompt)
    with stopped(prompt.peer):
        assert decoder.dd.unlink_clusters([prompt.info()], 300, True) == LINKED
    decoder.link(prompt)
    check_pull(prompt, decoder)


@pytest.mark.parametrize("force", [False, True])
def test_e114_unlink_without_addresses(linked: tuple[Prompt, Decoder], force: bool) -> None:
    """E-114, S-146: programs unlink by the cluster id alone, from either side; two remote addresses are wrong."""
    prompt, decoder = linked
    many = info(1, ["10.0.0.9"] * 2, prompt.addresses * 2)
    assert decoder.dd.unlink_clusters([many], 500, force) == (Code.LLM_PARAM_INVALID, [])
    assert decoder.dd.unlink_clusters([info(1, [], [])], 5000, force) == LINKED
    assert decoder.dd.unlink_clusters([info(1, [], [])], 5000, force) == (OK, [Code.LLM_NOT_YET_LINK])
    decoder.link(prompt)
    assert prompt.peer.make("conftest_support:unlink", prompt.dd, decoder.cluster_id, [], force) == LINKED
    with refuses(Code.LLM_NOT_YET_LINK, "cluster 1"):
        decoder.dd.check_link_status(1)


def test_both_ends_may_have_the_same_cluster_id(prompt: Prompt) -> None:
    """S-130, compat: prompt and decoder may bear the same cluster id, and pull, check and unlink work."""
    decoder = Decoder(prompt.cluster_id)
    try:
        decoder.link(prompt)
        check_pull(prompt, decoder)
        decoder.dd.check_link_status(1)
        assert decoder.dd.unlink_clusters([prompt.info()], 5000) == LINKED
    finally:
        decoder.dd.finalize()
