"""`finalize`, and the exit of a process, leave nothing behind: thread, descriptor, mapping, memory, name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import scripts
import traces
from addresses import bindable
from pairs import Decoder, Prompt, bytes_desc
from peer import Peer

from llm_datadist import BlocksCacheKey, CacheKey

DESC = bytes_desc(4, 4, 1 << 20)


def test_finalize_leaves_nothing(start_quick: Callable[[], Peer]) -> None:
    """S-172, B06, B07: both sides are what they were before `init`, with caches, keys, tensors and links in use."""
    peer = start_quick()
    mine = traces.of(os.getpid())
    warm = Prompt(peer)
    warm.dd.finalize()
    theirs = traces.of(peer.pid)
    for _ in range(5):
        prompt = Prompt(peer)
        prompt.allocate(DESC, [CacheKey(1, 1), CacheKey(1, 2)])
        prompt.allocate_blocks(DESC, BlocksCacheKey(1, 0))
        decoder = Decoder()
        decoder.link(prompt)
        cache = decoder.allocate(DESC)
        decoder.manager.pull_cache(CacheKey(1, 1), cache)
        decoder.manager.pull_blocks(BlocksCacheKey(1, 0), cache, [0, 1], [2, 3])
        tensor = decoder.manager.get_cache_tensors(cache, 1)[0]
        assert np.all(tensor.numpy()[1] == 0xA5)
        prompt.dd.finalize()
        decoder.dd.finalize()
        del tensor
        assert traces.names(os.environ["LLM_DATADIST_NAMESPACE"]) == []
        traces.wait_for(os.getpid(), mine)
        traces.wait_for(peer.pid, theirs)


@pytest.mark.needs("sparse")
def test_memory_goes_back_at_finalize(linked: tuple[Prompt, Decoder]) -> None:
    """S-172: whoever still holds the file of the pool does not keep the memory in it."""
    prompt, _ = linked
    prompt.peer.make("inside:offer", bytes_desc(1, 1, 64 << 20), [CacheKey(1, 1)], 7)
    folder = f"/proc/{prompt.peer.pid}/fd"
    pool = next(fd for fd in os.listdir(folder) if "pool0" in os.readlink(f"{folder}/{fd}"))
    held = os.open(f"{folder}/{pool}", os.O_RDONLY)
    try:
        assert os.fstat(held).st_blocks * 512 >= 64 << 20
        prompt.dd.finalize()
        assert os.fstat(held).st_blocks == 0
    finally:
        os.close(held)


@pytest.mark.parametrize(
    "last",
    [
        "",
        "raise SystemExit(0)",
        "dd.finalize()",
        "import threading; threading.Thread(target=dd.finalize).start()",
        "del dd",
    ],
)
def test_exit_of_the_interpreter(tmp_path: Path, last: str) -> None:
    """S-174: a program may just end; it is quiet and quick, and its name is free."""
    program = (
        "import sys\n"
        "from llm_datadist import *\n"
        "dd = LLMDataDist(LLMRole.PROMPT, 1)\n"
        "c = LLMConfig(); c.device_id = 0; c.listen_ip_info = sys.argv[1]\n"
        "dd.init(c.generate_options())\n"
        "k = dd.kv_cache_manager.allocate_cache(CacheDesc(2, [1, 64], DataType.DT_UINT8), [CacheKey(1, 1)])\n"
        "t = dd.kv_cache_manager.get_cache_tensors(k, 0)\n" + last
    )
    done = scripts.run(program, bindable("10.0.0.1:26000"), cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert traces.names(os.environ["LLM_DATADIST_NAMESPACE"]) == []
