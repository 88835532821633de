"""Init, finalize, and what must not work before, between and after them."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import scripts
from addresses import bindable
from conftest_support import open_things
from pairs import Decoder, Prompt, bytes_desc, cluster_info, options
from refusals import PARAM_INVALID, refuses

from llm_datadist import (
    BlocksCacheKey,
    CacheKey,
    KvCacheManager,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
)
from llm_datadist.backend import BackendError, Failure, make_backend

FAILED = LLMStatusCode.LLM_FAILED
FINALIZED = LLMStatusCode.LLM_ENGINE_FINALIZED
LISTEN = "10.0.0.1:26000"
DESC = bytes_desc(2, 2, 64)

MEMBERS: dict[str, Callable[[LLMDataDist], object]] = {
    "kv_cache_manager": lambda dd: dd.kv_cache_manager,
    "cache_manager": lambda dd: dd.cache_manager,
    "link_clusters": lambda dd: dd.link_clusters([cluster_info(1, [LISTEN])], 100),
    "unlink_clusters": lambda dd: dd.unlink_clusters([cluster_info(1, [LISTEN])], 100),
    "check_link_status": lambda dd: dd.check_link_status(1),
    "link": lambda dd: dd.link("name", {1: 0, 2: 1}, "{}"),
    "unlink": lambda dd: dd.unlink(1),
    "query_register_mem_status": lambda dd: dd.query_register_mem_status(1),
}


@pytest.mark.parametrize("member", MEMBERS)
def test_e62_members_need_init(member: str) -> None:
    """E-62: before init and after finalize a plain RuntimeError, whatever the arguments."""
    dd = LLMDataDist(LLMRole.DECODER, 2)
    assert dd.cluster_id == 2
    with refuses(RuntimeError, "init"):
        MEMBERS[member](dd)
    dd.init(options())
    dd.finalize()
    with refuses(RuntimeError, "init"):
        MEMBERS[member](dd)
    assert dd.cluster_id == 2


def test_e60_e61_constructor() -> None:
    """E-60, E-61: role and cluster id are checked at construction."""
    for role in (None, 1, "PROMPT"):
        with refuses(TypeError, "role", "LLMRole"):
            LLMDataDist(role, 1)  # type: ignore[arg-type]
    for number in (None, "1", 1.0, True):
        with refuses(TypeError, "cluster_id"):
            LLMDataDist(LLMRole.PROMPT, number)  # type: ignore[arg-type]
    for number in (-1, 2**64):
        with refuses(ValueError, "cluster_id", number, 2**64 - 1):
            LLMDataDist(LLMRole.PROMPT, number)
    assert LLMDataDist(LLMRole.PROMPT, 2**64 - 1).cluster_id == 2**64 - 1


def test_e63_one_instance_a_process(decoder: Decoder) -> None:
    """E-63, S-170: several objects may exist, one at a time is initialised, and the first is not disturbed."""
    other = LLMDataDist(LLMRole.PROMPT, 1)
    with refuses(FAILED, "finalize"):
        other.init(options(LISTEN))
    with refuses(RuntimeError, "init"):
        MEMBERS["kv_cache_manager"](other)
    assert LLMDataDist.llm_engine_instance is decoder.dd
    decoder.manager.allocate_cache(DESC)
    other.finalize()
    assert LLMDataDist.llm_engine_instance is decoder.dd
    decoder.dd.finalize()
    other.init(options(LISTEN))
    assert LLMDataDist.llm_engine_instance is other
    other.finalize()
    assert LLMDataDist.llm_engine_instance is None


def test_e64_init_and_finalize_again() -> None:
    """E-64, S-171: init of an initialised and finalize of an uninitialised instance do nothing."""
    dd = LLMDataDist(LLMRole.PROMPT, 1)
    dd.finalize()
    dd.init(options(LISTEN))
    cache = dd.kv_cache_manager.allocate_cache(DESC, [CacheKey(1, 10)])
    manager = dd.kv_cache_manager
    dd.init(options("10.0.0.1:26001"))
    dd.init(None)  # type: ignore[arg-type]
    assert dd.kv_cache_manager is manager
    assert manager.get_cache_tensors(cache)
    dd.finalize()
    dd.finalize()


def test_ids_start_again(decoder: Decoder) -> None:
    """S-10, S-171: each engine counts its caches from 1."""
    for _ in range(3):
        assert decoder.dd.kv_cache_manager.allocate_cache(DESC).cache_id == 1
        decoder.dd.finalize()
        decoder.dd.init(options())


@pytest.mark.parametrize("role", LLMRole)
def test_e84_e85_other_mode(role: LLMRole) -> None:
    """E-84, E-85: what belongs to CacheManager mode is refused, before its arguments are looked at."""
    dd = LLMDataDist(role, 1)
    dd.init(options(LISTEN))
    try:
        for name in ("cache_manager", "link", "unlink", "query_register_mem_status"):
            with refuses(PARAM_INVALID, name, "llm.EnableCacheManager"):
                MEMBERS[name](dd)
        for call in (lambda: dd.link(1, 2, 3), lambda: dd.unlink("x"), lambda: dd.query_register_mem_status(None)):
            with refuses(PARAM_INVALID):
                call()
    finally:
        dd.finalize()


def test_e84_e86_in_cache_manager_mode() -> None:
    """E-84, E-86: what belongs to KvCacheManager mode is refused in the other."""
    dd = LLMDataDist(LLMRole.DECODER, 1)
    dd.init(options(enable_cache_manager=True))
    try:
        with refuses(PARAM_INVALID, "kv_cache_manager", "llm.EnableCacheManager"):
            MEMBERS["kv_cache_manager"](dd)
        with refuses(PARAM_INVALID, "check_link_status"):
            dd.check_link_status(1)
    finally:
        dd.finalize()


CALLS: dict[str, Callable[[KvCacheManager, Any], object]] = {
    "allocate_cache": lambda manager, cache: manager.allocate_cache(DESC),
    "allocate_blocks_cache": lambda manager, cache: manager.allocate_blocks_cache(DESC),
    "deallocate_cache": lambda manager, cache: manager.deallocate_cache(cache),
    "remove_cache_key": lambda manager, cache: manager.remove_cache_key(CacheKey(1, 1)),
    "get_cache_tensors": lambda manager, cache: manager.get_cache_tensors(cache),
    "pull_cache": lambda manager, cache: manager.pull_cache(CacheKey(1, 1), cache),
    "pull_blocks": lambda manager, cache: manager.pull_blocks(BlocksCacheKey(1), cache, [0], [0]),
    "copy_cache": lambda manager, cache: manager.copy_cache(cache, cache),
    "copy_blocks": lambda manager, cache: manager.copy_blocks(cache, {0: [1]}),
    "swap_blocks": lambda manager, cache: manager.swap_blocks(cache, cache, {0: 1}),
    "transfer_cache_async": lambda manager, cache: manager.transfer_cache_async(cache, None, []),
}


#: Arguments that a method must have, where that is not one.
WANTED = {
    "pull_cache": 2,
    "pull_blocks": 4,
    "copy_cache": 2,
    "copy_blocks": 2,
    "swap_blocks": 3,
    "transfer_cache_async": 3,
}


def test_e87_closed_manager() -> None:
    """E-87, S-173: a manager kept across finalize refuses every call, right or wrong, also after a new init."""
    methods = {name for name in dir(KvCacheManager) if not name.startswith("_")} - {"is_initialized"}
    assert methods <= CALLS.keys(), "a method has no row here"
    dd = LLMDataDist(LLMRole.DECODER, 2)
    dd.init(options())
    manager = dd.kv_cache_manager
    cache = manager.allocate_cache(DESC)
    assert manager.is_initialized()
    for again in range(2):
        dd.finalize()
        for name, call in CALLS.items():
            assert not manager.is_initialized()
            with refuses(FINALIZED):
                call(manager, cache)
            with refuses(FINALIZED):
                getattr(manager, name)(*[None] * WANTED.get(name, 1))
        dd.init(options())
        assert not manager.is_initialized()
        with refuses(FINALIZED):
            manager.allocate_cache(DESC)
        assert dd.kv_cache_manager.is_initialized()
        assert again == 0 or dd.kv_cache_manager is not manager
    del cache
    gc.collect()
    assert dd.kv_cache_manager.allocate_cache(DESC).cache_id == 1
    dd.finalize()


def test_s172_finalize_gives_everything_back() -> None:
    """S-172: caches, keys of deallocated caches and listener go; the address is free at once."""
    for _ in range(3):
        before = open_things()
        dd = LLMDataDist(LLMRole.PROMPT, 1)
        dd.init(options(LISTEN))
        manager = dd.kv_cache_manager
        kept = manager.allocate_cache(DESC, [CacheKey(1, 10)])
        manager.deallocate_cache(manager.allocate_cache(DESC, [CacheKey(1, 11)]))
        manager.allocate_blocks_cache(DESC, BlocksCacheKey(1))
        assert open_things() != before
        dd.finalize()
        assert open_things() == before
        del kept


def test_s172_peers_find_out_at_their_next_transfer(linked: tuple[Prompt, Decoder]) -> None:
    """S-172: a pull from a finalized prompt fails at once, says why, and writes nothing."""
    prompt, decoder = linked
    prompt.allocate(DESC, [CacheKey(1, 10)])
    prompt.allocate_blocks(DESC, BlocksCacheKey(1))
    cache = decoder.allocate(DESC)
    prompt.dd.finalize()
    for _ in range(2):
        with refuses(LLMStatusCode.LLM_NOT_YET_LINK, "cluster 1", "gone"):
            decoder.manager.pull_cache(CacheKey(1, 10), cache)
        with refuses(LLMStatusCode.LLM_NOT_YET_LINK, "cluster 1", "gone"):
            decoder.manager.pull_blocks(BlocksCacheKey(1), cache, [0], [0])
        with refuses(LLMStatusCode.LLM_NOT_YET_LINK, "cluster 1", "gone"):
            decoder.dd.check_link_status(1)
    decoder.untouched(cache)


def test_e78_address_in_use(prompt: Prompt) -> None:
    """E-78, S-175, case B19: init says which address and why, leaves nothing, and works with another one."""
    before = open_things()
    dd = LLMDataDist(LLMRole.PROMPT, 3)
    address = prompt.addresses[0]
    for _ in range(2):
        with refuses(FAILED, address, "holds"):
            dd.init(options(address))
        assert LLMDataDist.llm_engine_instance is None
        assert open_things() == before
    dd.init(options("10.0.3.1:26999"))
    dd.finalize()
    prompt.dd.finalize()
    dd.init(options(address))
    dd.finalize()


def test_e78_second_of_two_addresses_in_use(prompt: Prompt) -> None:
    """E-78, S-175: when one of several addresses is taken, none of the others stays bound."""
    free = "10.9.9.9:26000"
    before = open_things()
    dd = LLMDataDist(LLMRole.PROMPT, 3)
    with refuses(FAILED, prompt.addresses[0]):
        dd.init(options(f"{free};{prompt.addresses[0]}", [0, 1]))
    assert open_things() == before
    dd.init(options(free))
    dd.finalize()


@pytest.mark.parametrize("step", ["make_windows", "reserve", "open"])
def test_s175_failed_init_leaves_no_trace(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """S-175: whatever step of init fails, all former steps are undone, and init can be called again."""
    before = open_things()

    def fail(*_: object, **__: object) -> None:
        raise BackendError(Failure.OUT_OF_MEMORY, "no memory, for a test")

    dd = LLMDataDist(LLMRole.PROMPT, 1)
    with monkeypatch.context() as patch:
        patch.setattr(type(make_backend(os.environ["LLM_DATADIST_BACKEND"])), step, fail)
        with refuses(LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY, "no memory, for a test"):
            dd.init(options(LISTEN, [0, 1], listen_ip_info=f"{LISTEN};10.0.0.2:26000"))
    gc.collect()
    assert open_things() == before
    assert LLMDataDist.llm_engine_instance is None
    with refuses(RuntimeError, "init"):
        MEMBERS["kv_cache_manager"](dd)
    dd.init(options(LISTEN))
    dd.finalize()


def test_s175_unknown_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-175: an unknown backend is refused by name."""
    before = open_things()
    dd = LLMDataDist(LLMRole.PROMPT, 1)
    with refuses(PARAM_INVALID, "llm.Backend", "'tape'", "simulator"):
        dd.init(options(LISTEN, llm__Backend="tape"))
    assert open_things() == before
    assert LLMDataDist.llm_engine_instance is None


EXIT = """
import sys
from llm_datadist import *
dd = LLMDataDist(LLMRole.PROMPT, 1)
dd.init({"ge.exec.deviceId": "0", "llm.listenIpInfo": sys.argv[2]})
cache = dd.kv_cache_manager.allocate_cache(CacheDesc(2, [2, 64], DataType.DT_UINT8), [CacheKey(1, 10)])
manager = dd.kv_cache_manager
if sys.argv[1] == "raise":
    raise SystemExit(3)
"""


@pytest.mark.parametrize(("how", "code"), [("return", 0), ("raise", 3)])
def test_s174_interpreter_exit_finalizes(tmp_path: Path, how: str, code: int) -> None:
    """S-174: a live instance does not keep the interpreter from ending, quietly and with its own exit code."""
    ended = scripts.run(EXIT, how, bindable(LISTEN), cwd=tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, "", "")


def test_s174_exit_hook_swallows_llm_exceptions(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-174: an LLMException of the last finalize is logged, not raised."""
    from llm_datadist import datadist

    def fail(self: LLMDataDist) -> None:
        raise LLMException("broken, for a test")

    with monkeypatch.context() as patch:
        patch.setattr(LLMDataDist, "finalize", fail)
        datadist._shutdown_handler()
    datadist._shutdown_handler()
    assert LLMDataDist.llm_engine_instance is None


def test_s176_forked_child_is_refused(linked: tuple[Prompt, Decoder]) -> None:
    """S-176: in a forked child each use of the parent's instance fails at once, and the parent goes on unharmed."""
    prompt, decoder = linked
    prompt.allocate_blocks(DESC, BlocksCacheKey(1))
    cache = decoder.allocate(DESC, blocks=True)
    threads = threading.active_count()
    out, into = os.pipe()
    pid = os.fork()
    if pid == 0:
        verdict = b"?"
        try:
            codes = []
            for call in (
                lambda: decoder.manager.pull_blocks(BlocksCacheKey(1), cache, [0], [0]),
                lambda: decoder.manager.allocate_cache(DESC),
                lambda: decoder.dd.check_link_status(1),
                lambda: decoder.dd.link_clusters([prompt.info()], 500),
            ):
                try:
                    call()
                except LLMException as error:
                    codes.append(error.status_code is FINALIZED)
            verdict = b"1" if codes == [True] * 4 else b"0"
        finally:
            os.write(into, verdict)
            os._exit(0)
    os.close(into)
    try:
        assert os.read(out, 1) == b"1"
    finally:
        os.close(out)
        os.waitpid(pid, 0)
    assert threading.active_count() == threads
    decoder.dd.check_link_status(1)
    decoder.manager.pull_blocks(BlocksCacheKey(1), cache, [0, 1], [0, 1])
    decoder.check(cache, {t: [(0, prompt.expected(DESC, t))] for t in range(2)})
