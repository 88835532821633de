"""Options that limit or describe memory."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pairs import Decoder, bytes_desc, options
from refusals import refuses

from llm_datadist import LLMDataDist, LLMRole, LLMStatusCode

INVALID = LLMStatusCode.LLM_PARAM_INVALID
NO_MEMORY = LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY
MIB = 2**20


def room(decoder: Decoder) -> int:
    """Count the caches of one 512-byte tensor that fit, and give them back."""
    caches = []
    with refuses(NO_MEMORY):
        while len(caches) < 1000:
            caches.append(decoder.manager.allocate_cache(bytes_desc(1, 1, 1)))
    for cache in caches:
        decoder.manager.deallocate_cache(cache)
    return len(caches)


@pytest.mark.parametrize(
    ("nbytes", "utilization", "fits"),
    [
        ("10240", 1.0, 20),
        ("10240", None, 19),  # the default of 0.95
        ("10240", 0.5, 10),
        ("10239", 1.0, 19),
        ("511", 1.0, 0),
        ("512", 1.0, 1),
        ("100000", 0.1, 19),
        ("10240", 0.0, 0),
        ("0", 1.0, 0),
    ],
)
def test_limit(nbytes: str, utilization: float | None, fits: int) -> None:
    """S-124, S-18: a share of the bytes, tensors rounded up to 512, and what was freed can be used again."""
    more = {} if utilization is None else {"mem_utilization": utilization}
    decoder = Decoder(ge__flowGraphMemMaxSize=nbytes, **more)
    assert room(decoder) == fits
    assert room(decoder) == fits
    decoder.dd.finalize()


def test_limit_counts_each_device() -> None:
    """S-124: the bytes are there once a device."""
    decoder = Decoder(devices=[0, 1], ge__flowGraphMemMaxSize="2048", mem_utilization=1.0)
    assert room(decoder) == 4
    decoder.dd.finalize()


def test_all_or_nothing() -> None:
    """S-18, E-171: what was taken before memory ran out is given back, in one piece or in pieces."""
    decoder = Decoder(ge__flowGraphMemMaxSize="4096", mem_utilization=1.0)
    manager = decoder.manager
    caches = [manager.allocate_cache(bytes_desc(1, 1, 512)) for _ in range(8)]
    for cache in caches[::2]:
        manager.deallocate_cache(cache)
    for num_tensors, nbytes in ((5, 512), (3, 513), (1, 4096), (2**20, 1), (1, 2**62)):
        with refuses(NO_MEMORY):
            manager.allocate_cache(bytes_desc(num_tensors, 1, nbytes))
    # Four free pieces apart from each other hold four tensors, but none of twice the size.
    scattered = manager.allocate_cache(bytes_desc(4, 1, 512))
    decoder.prefill(scattered)
    decoder.untouched(scattered)
    with refuses(NO_MEMORY):
        manager.allocate_cache(bytes_desc(1, 1, 1))
    manager.deallocate_cache(scattered)
    manager.deallocate_cache(caches[1])
    assert manager.allocate_cache(bytes_desc(1, 1, 1536))
    decoder.dd.finalize()


def test_a_limit_that_is_not_enforced() -> None:
    """S-124: the switch lets more be allocated than the option says."""
    decoder = Decoder(ge__flowGraphMemMaxSize="10240", llm__Simulator__EnforceMemoryLimit="0")
    cache = decoder.allocate(bytes_desc(80, 1, 20480))
    decoder.untouched(cache)
    decoder.dd.finalize()


def test_without_a_limit() -> None:
    """S-124: the pool alone bounds what can be allocated, and says so as lack of memory."""
    decoder = Decoder()
    decoder.untouched(decoder.allocate(bytes_desc(2, 2, 8 * MIB)))
    with refuses(NO_MEMORY):
        decoder.manager.allocate_cache(bytes_desc(1, 1, 2**62))
    decoder.dd.finalize()


@pytest.mark.needs("sparse")
def test_a_limit_far_above_the_machine() -> None:
    """S-124: it is an upper bound, which need not be there."""
    decoder = Decoder(ge__flowGraphMemMaxSize=str(2**40))
    decoder.untouched(decoder.allocate(bytes_desc(2, 1, 4096)))
    decoder.dd.finalize()


def tier(total: Any, block: Any, largest: Any) -> dict[str, Any]:
    """Make one buffer tier."""
    return {"total_size": total, "blk_size": block, "max_buf_size": largest}


DOCUMENTED = [tier(2097152, 256, 8192), tier(10485760, 8192, 8388608), tier(69206016, 8192, 67108864)]


def start(tiers: Any) -> LLMDataDist:
    """Init a decoder with buffer tiers."""
    made = LLMDataDist(LLMRole.DECODER, 2)
    text = tiers if isinstance(tiers, str) else json.dumps({"buf_cfg": tiers})
    made.init(options(buf_pool_cfg=text))
    return made


@pytest.mark.parametrize(
    "tiers",
    [
        DOCUMENTED,
        DOCUMENTED[:1],
        [tier(2 * MIB, 1, 1)],
        [tier(4 * MIB, 2 * MIB, 2 * MIB)],
        [tier(0xFFFFFFFF // (2 * MIB) * (2 * MIB), 1, 2)],
    ],
    ids=["documented", "one", "smallest", "largest block", "largest total"],
)
def test_buffer_tiers(tiers: Any) -> None:
    """S-125: what is fine."""
    start(tiers).finalize()


@pytest.mark.parametrize(
    "tiers",
    [
        pytest.param([tier(2 * MIB + 256, 256, 8192)], id="total no multiple of 2 MiB"),
        pytest.param([tier(MIB, 256, 8192)], id="total below 2 MiB"),
        pytest.param([tier(0, 256, 8192)], id="total 0"),
        pytest.param([tier(2**32, 256, 8192)], id="total of 33 bits"),
        pytest.param([tier(-2 * MIB, 256, 8192)], id="negative"),
        pytest.param([tier(2 * MIB, 768, 8192)], id="block no power of two"),
        pytest.param([tier(2 * MIB, 0, 8192)], id="block 0"),
        pytest.param([tier(8 * MIB, 4 * MIB, 4 * MIB)], id="block above 2 MiB"),
        pytest.param([tier(2 * MIB, 8192, 256)], id="block above the buffer"),
        pytest.param([tier(2 * MIB, 256, 2 * MIB)], id="buffer equals total"),
        pytest.param([tier(2 * MIB, 256, 3 * MIB)], id="buffer above total"),
        pytest.param([DOCUMENTED[0], DOCUMENTED[0]], id="buffers equal"),
        pytest.param(DOCUMENTED[::-1], id="buffers falling"),
        pytest.param([tier("2097152", 256, 8192)], id="text"),
        pytest.param([tier(2097152.0, 256, 8192)], id="float"),
        pytest.param([tier(2 * MIB, True, 8192)], id="bool"),
        pytest.param([{"total_size": 2 * MIB, "blk_size": 256}], id="field missing"),
        pytest.param([7], id="no object"),
        pytest.param("{", id="no JSON"),
        pytest.param("[]", id="no object at the top"),
        pytest.param("{}", id="no tiers"),
    ],
)
def test_buffer_tiers_that_are_refused(tiers: Any) -> None:
    """S-125, E-83: PARAM_INVALID at init, and init can be tried again."""
    with refuses(INVALID):
        start(tiers)
    start(DOCUMENTED).finalize()
