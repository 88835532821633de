"""What existing programs rely on in KvCacheManager mode (cases/compat.md)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from addresses import bindable
from bindings import is_bound
from pairs import Decoder, Prompt, bytes_desc, cluster_info, options
from peer import Peer
from refusals import refuses

from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    DataType,
    LLMConfig,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
)

SUCCESS = LLMStatusCode.LLM_SUCCESS
FINALIZED = LLMStatusCode.LLM_ENGINE_FINALIZED
NOT_EXIST = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
DESC = bytes_desc(2, 2, 64)


# ---------------------------------------------------------------------- ids and life time


def test_finalize_and_init_in_any_number() -> None:
    """S-170, S-171: finalize without init, init twice, finalize twice."""
    made = LLMDataDist(LLMRole.DECODER, 2)
    made.finalize()
    made.init(options())
    manager = made.kv_cache_manager
    made.init(options())
    assert made.kv_cache_manager is manager
    made.finalize()
    made.finalize()
    assert LLMDataDist.llm_engine_instance is None


def test_one_engine_at_a_time(decoder: Decoder) -> None:
    """S-170, E-63: a second engine of the process is FAILED, and leaves the first alone."""
    other = LLMDataDist(LLMRole.DECODER, 3)
    with refuses(LLMStatusCode.LLM_FAILED):
        other.init(options())
    assert LLMDataDist.llm_engine_instance is decoder.dd
    decoder.dd.finalize()
    other.init(options())
    other.finalize()


def test_dozens_of_engines_in_one_process(linked: tuple[Prompt, Decoder]) -> None:
    """Init after finalize, by the same object and by new ones, each time as good as the first time."""
    prompt, decoder = linked
    prompt.allocate_blocks(DESC, BlocksCacheKey(1, 0))
    decoder.dd.finalize()
    same = LLMDataDist(LLMRole.DECODER, 4)
    for i in range(36):
        made = same if i % 2 else LLMDataDist(LLMRole.DECODER, 5)
        made.init(options())
        if i % 4 == 0:
            assert made.link_clusters([prompt.info()], 5000) == (SUCCESS, [SUCCESS])
            cache = made.kv_cache_manager.allocate_cache(DESC)
            assert cache.cache_id == 1
            made.kv_cache_manager.pull_blocks(BlocksCacheKey(1, 0), cache, [1], [0])
            assert decoder.tensor(cache, 1)[:64] == prompt.expected(DESC, 1)[64:]
        made.finalize()


def test_a_manager_ends_with_its_engine(linked: tuple[Prompt, Decoder]) -> None:
    """S-173, E-87: ENGINE_FINALIZED from each method, also after a new init."""
    prompt, decoder = linked
    prompt.allocate(DESC, [CacheKey(1, 1)])
    old = decoder.manager
    cache = decoder.allocate(DESC)
    calls: list[Callable[[], Any]] = [
        lambda: old.allocate_cache(DESC),
        lambda: old.allocate_blocks_cache(DESC),
        lambda: old.deallocate_cache(cache),
        lambda: old.remove_cache_key(CacheKey(1, 1)),
        lambda: old.get_cache_tensors(cache),
        lambda: old.pull_cache(CacheKey(1, 1), cache),
        lambda: old.pull_blocks(BlocksCacheKey(1, 0), cache, [0], [0]),
    ]
    decoder.dd.finalize()
    for _ in range(2):
        assert not old.is_initialized()
        for call in calls:
            with refuses(FINALIZED):
                call()
        decoder.dd.init(options())
    assert decoder.dd.kv_cache_manager.is_initialized()


@pytest.mark.parametrize("cluster_id", [0, 1, 192 << 56 | 168 << 48 | 26000 << 16 | 7, 2**63, 2**64 - 1])
def test_cluster_ids_use_64_bits(peer: Peer, cluster_id: int) -> None:
    """S-130: any cluster id, and prompt and decoder may have the same."""
    prompt, decoder = Prompt(peer, cluster_id), Decoder(cluster_id)
    decoder.link(prompt)
    prompt.allocate(DESC, [CacheKey(cluster_id, 1)])
    cache = decoder.allocate(DESC)
    decoder.manager.pull_cache(CacheKey(cluster_id, 1), cache)
    assert decoder.tensor(cache, 1)[:64] == prompt.expected(DESC, 1)[:64]
    decoder.dd.check_link_status(cluster_id)
    assert decoder.dd.unlink_clusters([prompt.info()], 5000) == (SUCCESS, [SUCCESS])
    decoder.dd.finalize()


def test_deallocate_right_after_allocate(linked: tuple[Prompt, Decoder]) -> None:
    """S-20, S-63, S-24: the memory waits for the pull; a second pull fails; removing the pulled key is a no-op."""
    prompt, decoder = linked
    key = CacheKey(1, 1)
    prompt.manager.deallocate_cache(prompt.allocate(DESC, [key, CacheKey(1, 2**64 - 1)]))
    cache = decoder.allocate(DESC)
    decoder.manager.pull_cache(key, cache)
    decoder.check(cache, {t: [(0, prompt.expected(DESC, t)[:64])] for t in range(2)})
    with refuses(NOT_EXIST):
        decoder.manager.pull_cache(key, cache)
    prompt.manager.remove_cache_key(key)


def test_one_description_for_both_kinds(linked: tuple[Prompt, Decoder]) -> None:
    """S-4: a CacheDesc carries no trace of what it was used for."""
    prompt, decoder = linked
    paged, plain = decoder.allocate(DESC, blocks=True), decoder.allocate(DESC)
    prompt.allocate_blocks(DESC, BlocksCacheKey(1, 0))
    prompt.allocate(DESC, [CacheKey(1, 1)], salt=1)
    decoder.manager.pull_blocks(BlocksCacheKey(1, 0), paged, [1], [0])
    decoder.manager.pull_cache(CacheKey(1, 1), plain, 1)
    decoder.check(paged, {t: [(0, prompt.expected(DESC, t)[64:])] for t in range(2)})
    decoder.check(plain, {t: [(64, prompt.expected(DESC, t, salt=1)[:64])] for t in range(2)})


# ---------------------------------------------------------------------- arguments and options


def test_options_by_hand(peer: Peer) -> None:
    """Raw dicts, without LLMConfig."""
    prompt: Any = peer.make("llm_datadist:LLMDataDist", LLMRole.PROMPT, 1)
    prompt.init({"ge.exec.deviceId": "0", "llm.listenIpInfo": bindable("192.168.1.1:26000")})
    decoder = LLMDataDist(LLMRole.DECODER, 2)
    decoder.init({"ge.exec.deviceId": "1", "llm.SyncKvCacheWaitTime": "5000"})
    assert decoder.link_clusters([cluster_info(1, ["192.168.1.1:26000"])]) == (SUCCESS, [SUCCESS])
    decoder.finalize()


@pytest.mark.parametrize("timeout", [3000, "3000"])
def test_sync_kv_timeout_as_number_or_digits(timeout: int | str) -> None:
    """E-15: both are the same option."""
    config = LLMConfig()
    config.ge_options["ge.exec.deviceId"] = "0"
    config.sync_kv_timeout = timeout
    made = LLMDataDist(LLMRole.DECODER, 2)
    made.init(config.generate_options())
    made.finalize()


def test_options_changed_between() -> None:
    """What generate_options gave may be changed before init, which leaves the caller's dict as it is."""
    config = LLMConfig()
    config.device_id = 0
    given = config.generate_options()
    given["llm.SyncKvCacheWaitTime"] = "4000"
    given["something.else"] = "ignored"
    before = dict(given)
    made = LLMDataDist(LLMRole.DECODER, 2)
    made.init(given)
    assert given == before
    made.finalize()


def test_shapes_as_given(decoder: Decoder) -> None:
    """A tuple stays a tuple, and what looks like a sequence of its own kind (torch.Size) is fine."""

    class Size(tuple):  # type: ignore[type-arg]
        """Stands for torch.Size."""

    for shape in ((10, 2, 2), Size((10, 2, 2))):
        cache = decoder.manager.allocate_cache(CacheDesc(1, shape, DataType.DT_FLOAT16))
        assert cache.cache_desc.shape == (10, 2, 2)
        assert cache.cache_desc.size == 80


@pytest.mark.parametrize("wrong", [[True], (False,), [0.0], ["0"], [None], {0}, {0: 0}, iter([0]), 0, None, "0"])
def test_index_lists(linked: tuple[Prompt, Decoder], wrong: Any) -> None:
    """E-251: booleans are no integers there, and only sequences will do."""
    prompt, decoder = linked
    prompt.allocate_blocks(DESC, BlocksCacheKey(1, 0))
    cache = decoder.allocate(DESC)
    for lists in ((wrong, [0]), ([0], wrong)):
        with pytest.raises(TypeError):
            decoder.manager.pull_blocks(BlocksCacheKey(1, 0), cache, *lists)
    decoder.untouched(cache)


def test_the_role_may_be_overwritten(decoder: Decoder) -> None:
    """`KvCacheManager._role` is what the role checks read (api 12)."""
    manager = decoder.manager
    with refuses(LLMStatusCode.LLM_PARAM_INVALID):
        manager.allocate_cache(DESC, [CacheKey(1, 1)])
    manager._role = LLMRole.PROMPT
    manager.allocate_cache(DESC, [CacheKey(1, 1)])
    manager.remove_cache_key(CacheKey(1, 1))
    with refuses(LLMStatusCode.LLM_PARAM_INVALID):
        manager.pull_cache(CacheKey(1, 1), manager.allocate_cache(DESC))


def test_mix_neither_binds_nor_pulls() -> None:
    """E-165, E-166, E-177, E-200: MIX may only have blocks keys."""
    made = LLMDataDist(LLMRole.MIX, 3)
    made.init(options())
    manager = made.kv_cache_manager
    cache = manager.allocate_blocks_cache(DESC, BlocksCacheKey(3, 0))
    for call in (
        lambda: manager.allocate_cache(DESC, [CacheKey(3, 1)]),
        lambda: manager.remove_cache_key(CacheKey(3, 1)),
        lambda: manager.pull_cache(CacheKey(1, 1), cache),
        lambda: manager.pull_blocks(BlocksCacheKey(1, 0), cache, [0], [0]),
    ):
        with refuses(LLMStatusCode.LLM_PARAM_INVALID):
            call()
    made.finalize()


# ---------------------------------------------------------------------- transport


def test_several_clusters_in_one_call(peer: Peer, start_peer: Callable[[], Peer], decoder: Decoder) -> None:
    """S-132: a list of clusters, local port 0."""
    prompts = [Prompt(peer, 11), Prompt(start_peer(), 12)]
    decoder.link(*prompts)
    for prompt in prompts:
        decoder.dd.check_link_status(prompt.cluster_id)


def test_a_closed_port_fails_in_time(decoder: Decoder) -> None:
    """S-136, E-104: a peer that does not listen is LINK_FAILED, not an exception."""
    result = decoder.dd.link_clusters([cluster_info(9, ["10.9.9.9:26999"])], 500)
    assert result == (LLMStatusCode.LLM_LINK_FAILED, [LLMStatusCode.LLM_LINK_FAILED])


def test_a_peer_that_came_back(linked: tuple[Prompt, Decoder]) -> None:
    """S-172, S-183: under the same id and address: LLMException first; unlinked by force and linked again, it works."""
    prompt, decoder = linked
    key = CacheKey(1, 1)
    for salt in range(3):
        prompt.allocate(DESC, [key, CacheKey(1, 2)], salt=salt)
        cache = decoder.allocate(DESC)
        decoder.manager.pull_cache(key, cache)
        decoder.check(cache, {t: [(0, prompt.expected(DESC, t, salt=salt)[:64])] for t in range(2)})
        prompt.dd.finalize()
        prompt.dd.init(prompt.options)
        prompt.manager = prompt.dd.get("kv_cache_manager")
        with refuses(LLMStatusCode.LLM_NOT_YET_LINK):
            decoder.manager.pull_cache(CacheKey(1, 2), cache)
        decoder.dd.unlink_clusters([prompt.info()], 3000, True)
        decoder.link(prompt)


def test_threads_on_two_links(peer: Peer, start_peer: Callable[[], Peer], decoder: Decoder) -> None:
    """S-190, S-191: four threads pull through two links at once; unlinking one leaves the other alone."""
    prompts = [Prompt(peer, 11), Prompt(start_peer(), 12)]
    decoder.link(*prompts)
    desc = bytes_desc(4, 8, 4096)
    for prompt in prompts:
        prompt.allocate_blocks(desc, BlocksCacheKey(1, 0))
    turns = [threading.Lock(), threading.Lock()]  # one operation a link; a second one would be LINK_BUSY
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            which = number % 2
            cache = caches[number]
            for _ in range(20):
                with turns[which]:
                    decoder.manager.pull_blocks(BlocksCacheKey(11 + which, 0), cache, range(8), range(8))
        except BaseException as e:
            failures.append(e)

    caches = [decoder.allocate(desc) for _ in range(4)]
    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not failures
    for number, cache in enumerate(caches):
        decoder.check(cache, {t: [(0, prompts[number % 2].expected(desc, t))] for t in range(4)})
    assert decoder.dd.unlink_clusters([prompts[0].info()], 3000)[0] is SUCCESS
    decoder.manager.pull_blocks(BlocksCacheKey(12, 0), caches[0], [1], [0])
    with refuses(LLMStatusCode.LLM_NOT_YET_LINK):
        decoder.manager.pull_blocks(BlocksCacheKey(11, 0), caches[0], [1], [0])


def test_errors_compare_as_programs_do(linked: tuple[Prompt, Decoder]) -> None:
    """Status codes compare with == and !=, and tell what may be tried again."""
    prompt, decoder = linked
    prompt.allocate(DESC, [CacheKey(1, 1)])
    cache = decoder.allocate(DESC)
    with pytest.raises(LLMException) as caught:
        decoder.manager.pull_cache(CacheKey(1, 2), cache)
    assert caught.value.status_code != LLMStatusCode.LLM_SUCCESS
    assert caught.value.status_code == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    decoder.manager.pull_cache(CacheKey(1, 1), cache)
    assert not is_bound(prompt, CacheKey(1, 1))
