"""Other Python threads run while bytes move."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator

import pytest
from pairs import Decoder, Prompt, bytes_desc

from llm_datadist import BlocksCacheKey, CacheKey


@pytest.fixture
def nobody_is_interrupted() -> Iterator[None]:
    """Let a thread run only when another one lets it."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.parametrize("blocks", [False, True], ids=["cache", "blocks"])
def test_a_large_pull_lets_others_run(
    linked: tuple[Prompt, Decoder], nobody_is_interrupted: None, blocks: bool
) -> None:
    """S-194: a thread that waits for the GIL gets it before the pull returns."""
    prompt, decoder = linked
    desc = bytes_desc(2, 4, 2 << 20)
    key = BlocksCacheKey(1, 0)
    if blocks:
        prompt.allocate_blocks(desc, key, fill=False)
    cache = decoder.allocate(desc)

    # On a busy machine the other thread may come too late once; if the GIL were kept it always would.
    for attempt in range(20):
        if not blocks:
            prompt.manager.remove_cache_key(CacheKey(1, attempt))
            prompt.allocate(desc, [CacheKey(1, attempt + 1)], fill=False)
        if _other_thread_runs_during(
            lambda key=key, attempt=attempt: (
                decoder.manager.pull_blocks(key, cache, range(4), range(4))
                if blocks
                else decoder.manager.pull_cache(CacheKey(1, attempt + 1), cache)
            )
        ):
            return
    pytest.fail("no other thread ever ran during a large pull")


def _other_thread_runs_during(call: Callable[[], object]) -> bool:
    go, returned = threading.Lock(), False
    saw: list[bool] = []

    def other() -> None:
        if go.acquire(timeout=30):
            saw.append(returned)

    go.acquire()
    thread = threading.Thread(target=other)
    thread.start()
    go.release()
    call()
    returned = True
    thread.join(30)
    return saw == [False]
