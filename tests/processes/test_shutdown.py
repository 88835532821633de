"""Engines that end, or are forked, while daemon threads of the program copy: never by a signal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import scripts
from pairs import bytes_desc, cluster_info
from pairs import options as engine_options
from peer import Peer

from llm_datadist import CacheKey, LLMRole

SCRIPT = """
import ctypes, json, mmap, sys, threading, time
from llm_datadist import CacheDesc, DataType, KvCache, LLMConfig, LLMDataDist, LLMException, LLMRole, Placement

mode, what, how = sys.argv[1:]
config = LLMConfig()
config.device_id = 0
if mode == "cm":
    config.enable_cache_manager = True
    config.mem_pool_cfg = json.dumps({"memory_size": 1 << 30})
dd = LLMDataDist(LLMRole.DECODER, 2)
dd.init(config.generate_options())
manager = dd.cache_manager if mode == "cm" else dd.kv_cache_manager
desc = CacheDesc(4, [1, 64 << 20], DataType.DT_UINT8)
started = threading.Event()

if what == "copy":
    one, other = manager.allocate_cache(desc), manager.allocate_cache(desc)
    step = lambda: manager.copy_cache(one, other)
else:
    mine = manager.allocate_blocks_cache(desc)
    memory = mmap.mmap(-1, 4 * desc.size)
    at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    host = KvCache.create_cpu_cache(
        CacheDesc(4, [1, 64 << 20], DataType.DT_UINT8, placement=Placement.HOST), [at + i * desc.size for i in range(4)]
    )
    step = lambda: manager.swap_blocks(host, mine, {0: 0})

copy = dd._engine.backend.copy
def late(*args, **kwargs):
    started.set()
    if how == "finalize":
        time.sleep(0.2)
    copy(*args, **kwargs)

dd._engine.backend.copy = late
told = []
def work():
    try:
        while True:
            step()
    except LLMException as error:
        told.append(error.status_code.name)

thread = threading.Thread(target=work, daemon=True)
thread.start()
assert started.wait(30)
time.sleep(0.02)
if how == "finalize":
    dd.finalize()
    thread.join(20)
    print(told)
"""


@pytest.mark.parametrize("how", ["finalize", "exit"])
@pytest.mark.parametrize(("mode", "what"), [("kv", "copy"), ("kv", "swap"), ("cm", "copy")])
def test_end_while_a_thread_copies(tmp_path: Path, mode: str, what: str, how: str) -> None:
    """S-172: memory is not unmapped under a copy; the thread is told that the engine has ended."""
    ended = scripts.run(SCRIPT, mode, what, how, cwd=tmp_path)
    assert ended.returncode == 0, ended
    assert ended.stdout.strip() == ("['LLM_ENGINE_FINALIZED']" if how == "finalize" else ""), ended


@pytest.mark.needs("forks")
@pytest.mark.parametrize("end", ["leave_at_once", "leave_with_hooks"])
def test_child_inits_what_it_inherited(start_quick: Callable[[], Peer], peer: Peer, end: str) -> None:
    """B28: an object that a child has inherited can be initialised in the child, and ends there, not in the parent."""
    desc, key = bytes_desc(2, 1, 64), CacheKey(1, 10)
    address = "10.0.1.1:25999"
    prompt = start_quick()
    dd = prompt.make("llm_datadist:LLMDataDist", LLMRole.PROMPT, 1)
    dd.init(engine_options(address))
    prompt.make("inside:offer", desc, [key], 7)
    parent = peer.make("llm_datadist:LLMDataDist", LLMRole.DECODER, 2)
    parent.init(engine_options())
    info = cluster_info(1, [address])
    assert peer.make("inside:in_child", "init_inherited", end, engine_options(), info, key, desc) == {
        "value": 7,
        "exit": 0,
    }
    assert parent.link_clusters([info], 5000)[0] == 0
