"""What the library says: levels, format, which operations are logged, and that data never is."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import memory
import pytest
import scripts
from addresses import bindable
from pairs import Decoder, Prompt, bytes_desc, options
from refusals import PARAM_INVALID, refuses

from llm_datadist import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex, LLMDataDist, LLMRole
from llm_datadist.utils.log import get_logger

DESC = bytes_desc(2, 2, 64)


class Records(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.taken.append(record)

    def take(self, level: int = logging.INFO) -> list[str]:
        """Give the texts of a level since the last call."""
        texts = [record.getMessage() for record in self.taken if record.levelno == level]
        self.taken.clear()
        return texts


@pytest.fixture
def records() -> Iterator[Records]:
    """Listen at INFO level."""
    logger, handler = get_logger(), Records()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


SCRIPT = """
import sys
from llm_datadist import *
dd = LLMDataDist(LLMRole.PROMPT, 1)
dd.init({"ge.exec.deviceId": "0", "llm.listenIpInfo": sys.argv[1]})
try:
    dd.kv_cache_manager.allocate_cache(CacheDesc(0, [2, 64], DataType.DT_UINT8))
except LLMException:
    pass
dd.finalize()
"""
LINE = re.compile(
    r"\[(INFO|ERROR)\] LLM_DATADIST\(\d+,MainProcess\):\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} "
    r"\[(datadist|kv_cache_manager|_checks|engine|links)\.py:\d+\]\d+ \w+: .+"
)


@pytest.mark.parametrize(
    ("level", "seen"), [("1", {"INFO", "ERROR"}), ("2", {"ERROR"}), (None, {"ERROR"}), ("x", {"ERROR"})]
)
def test_s200_s201_level_and_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str | None, seen: set[str]
) -> None:
    """S-200, S-201: the environment sets the level, records go to stdout, one line each, with the caller's place."""
    monkeypatch.delenv("ASCEND_GLOBAL_LOG_LEVEL", raising=False)
    if level is not None:
        monkeypatch.setenv("ASCEND_GLOBAL_LOG_LEVEL", level)
    ended = scripts.run(SCRIPT, bindable("10.0.0.1:26000"), cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    lines = [LINE.fullmatch(line) for line in ended.stdout.splitlines()]
    assert all(lines), ended.stdout
    assert {line[1] for line in lines if line} == seen


def test_s202_operations_of_a_prompt(records: Records) -> None:
    """S-202: start and success of each operation, with its main parameters and keys."""
    dd = LLMDataDist(LLMRole.PROMPT, 1)
    dd.init(options("10.0.0.1:26000"))
    assert any("1" in text and "PROMPT" in text for text in records.take())
    manager = dd.kv_cache_manager
    try:
        cache = manager.allocate_cache(DESC, [CacheKey(1, 4711)])
        texts = records.take()
        assert len(texts) >= 2
        assert "4711" in texts[0]
        assert "64" in texts[0]
        blocks = manager.allocate_blocks_cache(DESC, BlocksCacheKey(1, 8))
        texts = records.take()
        assert len(texts) >= 2
        assert "8" in texts[0]
        for call, word in (
            (lambda: manager.get_cache_tensors(cache, 1), "1"),
            (lambda: manager.remove_cache_key(CacheKey(1, 4711)), "4711"),
            (lambda: manager.deallocate_cache(cache), "1"),
        ):
            call()
            texts = records.take()
            assert len(texts) >= 2, texts
            assert all(word in text for text in texts)
        number = blocks.cache_id
        del blocks
        manager.allocate_cache(DESC)
        assert any(f"cache {number}" in text and "collected" in text for text in records.take()), (
            "automatic deallocation"
        )
    finally:
        dd.finalize()
    assert records.take()


def test_s202_operations_of_a_decoder(prompt: Prompt, decoder: Decoder, records: Records) -> None:
    """S-202: start with key, ranges and sizes, and success, of links and pulls."""
    prompt.allocate(DESC, [CacheKey(1, 4711)])
    prompt.allocate_blocks(DESC, BlocksCacheKey(1, 815))
    decoder.link(prompt)
    assert any("[1]" in text for text in records.take())
    cache = decoder.allocate(DESC)
    records.take()
    layers = {"src_layer_range": range(0, 1), "dst_layer_range": range(0, 1)}
    decoder.manager.pull_cache(CacheKey(1, 4711), cache, 1, 33, **layers)
    start, *_, success = records.take()
    for word in ("pull_cache", "4711", "slot 1", "33", "range(0, 1)"):
        assert word in start
    assert "4711" in success
    decoder.manager.pull_blocks(BlocksCacheKey(1, 815), cache, [0], [1], **layers)
    start, *_, success = records.take()
    for word in ("pull_blocks", "815", "1 blocks", "range(0, 1)"):
        assert word in start
    assert "815" in success
    decoder.dd.unlink_clusters([prompt.info()], 5000)
    assert any("[1]" in text for text in records.take())


def test_s202_failed_argument_checks(linked: tuple[Prompt, Decoder], records: Records) -> None:
    """S-202: each is logged at ERROR before it is raised, whichever part of the library makes the check."""
    prompt, decoder = linked
    prompt.allocate(DESC, [CacheKey(1, 10)])
    cache, wide = decoder.allocate(DESC), decoder.allocate(bytes_desc(2, 2, 128))
    prompt.allocate_blocks(DESC, BlocksCacheKey(1))
    pull, blocks, key = decoder.manager.pull_cache, decoder.manager.pull_blocks, CacheKey(1, 10)
    for call in (
        lambda: pull(key, cache, size=0),
        lambda: pull(key, cache, 2),
        lambda: pull(key, cache, size=65),
        lambda: pull(key, cache, dst_cache_offset=64),
        lambda: pull(key, cache, src_cache_offset=1),
        lambda: pull(key, wide),
        lambda: pull(key, cache, dst_layer_range=range(2)),
        lambda: pull(key, cache, src_layer_range=range(2)),
        lambda: pull(key, cache, src_layer_range=range(1), tensor_num_per_layer=1),
        lambda: blocks(BlocksCacheKey(1), cache, [0], [2]),
        lambda: blocks(BlocksCacheKey(1), cache, [2], [0]),
        lambda: blocks(BlocksCacheKey(1), wide, [0], [0]),
        lambda: blocks(BlocksCacheKey(1), cache, [0], []),
    ):
        records.take()
        with pytest.raises(ValueError, match=r".") as caught:
            call()
        assert records.take(logging.ERROR) == [str(caught.value)]
    for call in (lambda: pull(None, cache), lambda: blocks(BlocksCacheKey(1), cache, [0], [0.5])):
        records.take()
        with pytest.raises(TypeError) as type_error:
            call()
        assert records.take(logging.ERROR) == [str(type_error.value)]


def test_s202_data_is_never_logged(linked: tuple[Prompt, Decoder], records: Records) -> None:
    """S-202: not a byte of a cache appears, in no form."""
    prompt, decoder = linked
    get_logger().setLevel(logging.DEBUG)
    prompt.allocate(DESC, [CacheKey(1, 10)], fill=False)
    source = prompt.manager.allocate_cache(DESC, [CacheKey(1, 11)])
    for address in source.get("per_device_tensor_addrs")[0]:
        prompt.peer.make("memory:write", address, b"SECRET42" * 16)
    cache = decoder.allocate(DESC)
    decoder.manager.pull_cache(CacheKey(1, 11), cache)
    decoder.manager.get_cache_tensors(cache, 0)
    with refuses(PARAM_INVALID):
        decoder.manager.pull_cache(CacheKeyByIdAndIndex(1, 2), cache, 7)
    assert memory.read(cache.per_device_tensor_addrs[0][0], 8) == b"SECRET42"
    everything = " ".join(record.getMessage() for record in records.taken)
    assert everything
    for form in ("SECRET42", b"SECRET42".hex(), str(list(b"SECRET42"))[1:-1]):
        assert form not in everything


def test_s203_chosen_backend_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-203: that auto took the simulator is a warning at the caller's line, since the default level hides the log."""
    for name in ("BACKEND", "ACL_LIBRARY", "HCCL_LIBRARY"):
        monkeypatch.delenv(f"LLM_DATADIST_{name}", raising=False)
    dd = LLMDataDist(LLMRole.DECODER, 2)
    with pytest.warns(RuntimeWarning, match="simulator") as caught:
        dd.init(options())
    dd.finalize()
    assert [warning.filename for warning in caught] == [__file__]
