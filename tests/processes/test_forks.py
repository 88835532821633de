"""A process forks after init (B28): the parent is unharmed, and the child can't use what it has inherited."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import traces
from pairs import Decoder, Prompt, bytes_desc, options
from peer import Peer, Remote

from llm_datadist import CacheKey, LLMRole, LLMStatusCode

DESC = bytes_desc(2, 1, 1 << 20)
KEY = CacheKey(1, 10)


class Parent:
    """A linked decoder in a peer, where forking does no harm to the test."""

    def __init__(self, peer: Peer, prompt: Prompt) -> None:
        self.peer = peer
        self.prompt = prompt
        self.dd: Remote = peer.make("llm_datadist:LLMDataDist", LLMRole.DECODER, 2)
        self.dd.init(options(sync_kv_timeout=20_000))
        assert self.dd.link_clusters([prompt.info()], 5000)[0] == LLMStatusCode.LLM_SUCCESS
        peer.make("inside:bind", DESC, [])
        self.cache = self.dd.get("kv_cache_manager").allocate_cache(DESC)

    def in_child(self, do: str, end: str = "leave_at_once", *args: Any) -> dict[str, Any]:
        """Fork, and do something in the child."""
        outcome: dict[str, Any] = self.peer.make("inside:in_child", do, end, *args)
        return outcome

    def check(self) -> None:
        """Pull, ask the prompt, and look at the bytes."""
        assert self.peer.make("inside:pull_again", KEY) == 7
        self.dd.check_link_status(1)


@pytest.fixture
def parent(start_quick: Callable[[], Peer], prompt: Prompt) -> Parent:
    """Give a linked decoder that may fork, and has something to pull."""
    prompt.peer.make("inside:offer", DESC, [KEY], 7)
    made = Parent(start_quick(), prompt)
    made.check()
    return made


@pytest.mark.parametrize("end", ["leave_at_once", "leave_with_hooks"])
def test_child_exits(parent: Parent, end: str) -> None:
    """S-176, B28: whether the child runs its exit hooks or not, nothing changes for the parent."""
    before = traces.of(parent.peer.pid)
    for _ in range(3):
        assert parent.in_child("nothing", end) == {"value": None, "exit": 0}
        parent.check()
    assert traces.of(parent.peer.pid) == before


@pytest.mark.parametrize("end", ["leave_at_once", "leave_with_hooks"])
@pytest.mark.parametrize("do", ["pull_inherited", "pull_kept", "allocate_kept", "check_inherited", "unlink_inherited"])
def test_child_uses_what_it_has_inherited(parent: Parent, do: str, end: str) -> None:
    """S-176, B28: a clear error at once, and the parent goes on."""
    parent.peer.make("inside:keep_manager", parent.cache)
    args = {
        "pull_inherited": (KEY, parent.cache),
        "pull_kept": (KEY,),
        "allocate_kept": (DESC,),
        "check_inherited": (1,),
        "unlink_inherited": (parent.prompt.info(),),
    }[do]
    outcome = parent.in_child(do, end, *args)
    assert outcome["raised"] == "LLMException"
    assert outcome["code"] == "LLM_ENGINE_FINALIZED"
    assert "parent" in outcome["text"]
    assert outcome["exit"] == 0
    parent.check()


@pytest.mark.parametrize("end", ["leave_at_once", "leave_with_hooks"])
def test_child_finalizes(parent: Parent, end: str) -> None:
    """S-176, B28: what the child ends is its own copy."""
    assert parent.in_child("finalize_inherited", end) == {"value": None, "exit": 0}
    parent.check()
    assert len(traces.names(os.environ["LLM_DATADIST_NAMESPACE"])) >= 2


@pytest.mark.needs("forks")
@pytest.mark.parametrize("end", ["leave_at_once", "leave_with_hooks"])
def test_child_makes_its_own(parent: Parent, end: str) -> None:
    """S-170, S-176, B28: a fresh instance in the child links and pulls, beside the one of the parent."""
    outcome = parent.in_child("start_own", end, parent.prompt.info(), KEY, DESC)
    assert outcome == {"value": 7, "exit": 0}
    parent.check()


@pytest.mark.needs("forks")
def test_grandchild_makes_its_own(parent: Parent) -> None:
    """B28: forks of forks are no different."""
    outcome = parent.in_child(
        "in_child", "leave_at_once", "start_own", "leave_with_hooks", parent.prompt.info(), KEY, DESC
    )
    assert outcome == {"value": {"value": 7, "exit": 0}, "exit": 0}
    parent.check()


def test_child_lives_on(parent: Parent) -> None:
    """B28: the parent pulls, unlinks, links and ends while a child of it waits; the child holds nothing of it."""
    child = parent.peer.make("inside:fork_waiting")
    try:
        traces.wait_until(lambda: not any("llm_datadist" in name for name in traces.of(child)), "an empty child")
        assert not any("pidfd" in name for name in traces.of(child))
        parent.check()
        info = parent.prompt.info()
        assert parent.dd.unlink_clusters([info])[0] == LLMStatusCode.LLM_SUCCESS
        assert parent.dd.link_clusters([info], 5000)[0] == LLMStatusCode.LLM_SUCCESS
        parent.check()
        parent.dd.finalize()
    finally:
        os.kill(child, 9)


@pytest.mark.needs("forks")
def test_fork_during_a_pull(parent: Parent) -> None:
    """B28: a child that forks off in the middle of a pull starts its own; the pull ends well."""
    outcome = parent.peer.make("inside:stalled_pull_and_fork", KEY, parent.cache, parent.prompt.info(), DESC)
    assert outcome == {"value": 7, "exit": 0, "failures": []}
    parent.check()


def test_prompt_forks(start_quick: Callable[[], Peer], decoder: Decoder) -> None:
    """B28: the prompt's child ends with its hooks; the prompt's caches and keys stay, and it can be finalized."""
    prompt = Prompt(start_quick())
    prompt.peer.make("inside:offer", DESC, [KEY], 7)
    decoder.link(prompt)
    cache = decoder.allocate(DESC)
    child = prompt.peer.make("inside:fork_waiting")
    try:
        for do in ("nothing", "finalize_inherited"):
            assert prompt.peer.make("inside:in_child", do, "leave_with_hooks") == {"value": None, "exit": 0}
            decoder.manager.pull_cache(KEY, cache, 0, dst_cache_offset=0)
        decoder.dd.check_link_status(1)
        decoder.manager.pull_cache(KEY, cache)
        assert not prompt.peer.make("inside:is_bound", KEY, DESC)
        prompt.dd.finalize()
        assert traces.names(os.environ["LLM_DATADIST_NAMESPACE"]) == []
        prompt.dd.init(prompt.options)
    finally:
        os.kill(child, 9)
