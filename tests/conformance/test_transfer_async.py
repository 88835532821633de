"""transfer_cache_async to addresses, in both modes: which bytes go where, in which order, and what comes out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from addresses import bindable
from ends import End, desc
from peer import Peer
from refusals import PARAM_INVALID, Expected, name_of, refuses
from stall import Stalled, clear_faults, set_faults

from llm_datadist import (
    BlocksCacheKey,
    CacheTask,
    KvCache,
    LayerSynchronizer,
    LLMRole,
    LLMStatusCode,
    Placement,
    TransferConfig,
    TransferWithCacheKeyConfig,
)

SUCCESS = LLMStatusCode.LLM_SUCCESS
INVALID = LLMStatusCode.LLM_PARAM_INVALID
FAILED = LLMStatusCode.LLM_FAILED
NOT_EXIST = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
NOT_YET_LINK = LLMStatusCode.LLM_NOT_YET_LINK
LIMIT_MS = 30000
OF = desc(8, 2, 32)
TO = desc(8, 3, 32)


class Layers(LayerSynchronizer):
    """Records the layers, and says what a function says of them."""

    def __init__(self, say: Callable[[int], Any] = lambda layer: True) -> None:
        self.seen: list[int] = []
        self.say = say

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        assert timeout_in_millis is None
        self.seen.append(layer_index)
        return self.say(layer_index)  # type: ignore[no-any-return]


class Scene:
    """The source is cluster 2 in this process, the destination cluster 1 in the peer."""

    def __init__(self, peer: Peer, cm: bool, **extra: Any) -> None:
        self.cm = cm
        self.there = End(peer, 1, LLMRole.DECODER, cm=cm)
        self.here = End(None, 2, LLMRole.PROMPT, cm=cm, **extra)
        self.there.link(self.here) if not cm else self.here.link(self.there)
        self.source = self.here.allocate(OF, salt=0)
        self.target = self.there.allocate(TO)
        self.addresses = self.there.addresses(self.target)

    def close(self) -> None:
        """End both."""
        self.here.close()
        self.there.close()

    def config(self, layers: range | None = None, slot: int = 0, to: int = 0, first: int = 0, **more: Any) -> Any:
        """Send layers of a slot to slot ``to`` of as many layers, starting with ``first``."""
        count = 2 * (len(layers) if layers is not None else 4)
        addresses = [address + to * 32 for address in self.addresses[2 * first : 2 * first + count]]
        return TransferConfig(more.get("cluster", 1), more.get("addresses", addresses), layers, slot)

    def send(self, *configs: Any, say: Callable[[int], Any] = lambda layer: True, **more: Any) -> CacheTask:
        """Start a transfer."""
        self.layers = Layers(say)
        source = more.pop("source", self.source)
        task: CacheTask = self.here.manager.transfer_cache_async(source, self.layers, list(configs), **more)
        return task

    def results(self, *configs: Any, **more: Any) -> list[LLMStatusCode | None]:
        """Transfer, wait, and give the results."""
        task = self.send(*configs, **more)
        overall = task.synchronize(LIMIT_MS)
        results = task.get_results(LIMIT_MS)
        failures = [r for r in results if r not in (None, SUCCESS)]
        assert overall is (failures[0] if failures else SUCCESS)
        return results

    def check(self, pieces: dict[int, list[tuple[int, bytes]]]) -> None:
        """Compare every byte of the destination."""
        self.there.check(self.target, TO, pieces)

    def data(self, tensor: int) -> bytes:
        """Give the bytes of one source tensor."""
        return self.here.expected(OF, tensor)


@pytest.fixture(params=["kv", "cm"])
def scene(request: pytest.FixtureRequest, peer: Peer) -> Iterator[Scene]:
    made = Scene(peer, request.param == "cm")
    yield made
    made.here.close()


# ---------------------------------------------------------------------- bytes


def test_s93_a_slot_to_addresses(scene: Scene) -> None:
    """S-93, S-92, S-90: slot 1 of every layer goes to the addresses, which include the destination's slot."""
    assert scene.results(scene.config(slot=1, to=2)) == [SUCCESS]
    assert scene.layers.seen == [0, 1, 2, 3]
    scene.check({t: [(64, scene.data(t)[32:])] for t in range(8)})


def test_s93_blocks_to_blocks(scene: Scene) -> None:
    """S-93: pair by pair from the address on; of a repeated destination the last counts; the size is optional."""
    for nbytes in (None, 0, 32):
        for address in scene.addresses:
            scene.there.write(address, bytes([0xA5]) * TO.size)
        config = scene.config()
        assert scene.results(
            config, src_block_indices=[0, 1, 0], dst_block_indices=[2, 2, 1], dst_block_memory_size=nbytes
        ) == [SUCCESS]
        scene.check({t: [(64, scene.data(t)[32:]), (32, scene.data(t)[:32])] for t in range(8)})


def test_s94_part_of_the_layers(scene: Scene) -> None:
    """S-94, S-92: only wanted layers are synchronised, each once; each config counts from its own first layer."""
    configs = [scene.config(range(1, 3), 0, 0, 0), scene.config(range(2, 3), 1, 2, 3)]
    assert scene.results(*configs) == [SUCCESS, SUCCESS]
    assert scene.layers.seen == [1, 2]
    pieces = {t: [(0, scene.data(t + 2)[:32])] for t in range(4)}
    scene.check({**pieces, 6: [(64, scene.data(4)[32:])], 7: [(64, scene.data(5)[32:])]})


def test_s91_none_becomes_all_layers(scene: Scene) -> None:
    """S-91: the caller sees the range that was filled in."""
    config = scene.config()
    assert config.src_layer_range is None
    assert scene.results(config) == [SUCCESS]
    assert config.src_layer_range == range(4)


def test_s98_no_configs(scene: Scene) -> None:
    """S-98: nothing is synchronised, nothing fails."""
    assert scene.results() == []
    assert scene.layers.seen == []


def test_empty_lists_are_as_if_not_given(scene: Scene) -> None:
    """E-319: empty lists of blocks mean a slot."""
    assert scene.results(scene.config(), src_block_indices=[], dst_block_indices=[]) == [SUCCESS]
    scene.check({t: [(0, scene.data(t)[:32])] for t in range(8)})


def test_s93_a_slot_cut_into_blocks(peer: Peer) -> None:
    """S-93, S-56: CacheManager mode cuts a slot; the last chunk is short, and nothing of the next slot comes along."""
    scene = Scene(peer, cm=True)
    try:
        of = desc(2, 3, 20)
        source = scene.here.allocate(of, salt=3)
        config = TransferConfig(1, scene.addresses[:2], None, 1)
        assert scene.results(config, source=source, dst_block_indices=[5, 0, 3], dst_block_memory_size=8) == [SUCCESS]
        data = [scene.here.expected(of, t, 3)[20:40] for t in range(2)]
        scene.check({t: [(40, data[t][:8]), (0, data[t][8:16]), (24, data[t][16:])] for t in range(2)})
    finally:
        scene.here.close()


@pytest.mark.needs("any_memory")
def test_registered_destinations_that_overlap(peer: Peer) -> None:
    """S-96, B12, B13: an address belongs to whichever registration holds all its bytes."""
    scene = Scene(peer, cm=True)
    try:
        there, here = scene.there, scene.here
        whole, part = desc(2, 8, 64), desc(2, 1, 64)
        outer = there.register(whole)
        inner = [address + 64 for address in there.addresses(outer)]
        there.manager.register_cache(part, inner)
        source = here.allocate(desc(2, 1, 128), salt=3)
        data = [here.expected(desc(2, 1, 128), t, 3) for t in range(2)]
        for at in (64, 128, 192):
            there.fill(outer, whole, None)
            config = TransferConfig(1, [address + at for address in there.addresses(outer)])
            assert scene.results(config, source=source) == [SUCCESS]
            there.check(outer, whole, {t: [(at, data[t])] for t in range(2)})
    finally:
        scene.here.close()


# ---------------------------------------------------------------------- results


def test_e325_a_layer_that_is_not_ready(scene: Scene) -> None:
    """E-325, S-95: PARAM_INVALID for all that want the layer, None for the rest; what went before stays."""
    configs = [scene.config(range(0, 2)), scene.config(range(2, 4), 0, 1, 2), scene.config(range(1, 2), 1, 2, 1)]
    assert scene.results(*configs, say=lambda layer: layer < 1) == [INVALID, None, INVALID]
    assert scene.layers.seen == [0, 1]
    scene.check({t: [(0, scene.data(t)[:32])] for t in range(2)})


def test_e326_a_synchronizer_that_raises(scene: Scene) -> None:
    """E-326, B27: FAILED for all that want the layer, and the text is kept."""

    def say(layer: int) -> bool:
        if layer == 1:
            raise KeyError("the compute failed")
        return True

    configs = [scene.config(range(2)), scene.config(range(2, 4), 0, 0, 2)]
    assert scene.results(*configs, say=say) == [FAILED, None]
    scene.check({t: [(0, scene.data(t)[:32])] for t in range(2)})


def test_e327_a_transfer_that_fails(scene: Scene) -> None:
    """E-327, S-95: that config gets the status, finished ones keep SUCCESS, others None; nothing goes on."""
    set_faults(scene.here.dd, fail_nth=4)
    configs = [scene.config(range(1), 0, 0, 0), scene.config(range(1, 3), 0, 1, 1), scene.config(range(4), 1, 2, 0)]
    results = scene.results(*configs)
    clear_faults(scene.here.dd)
    # Each layer takes two writes, one a tensor: the fourth is the end of the last config's first layer.
    assert results == [SUCCESS, None, FAILED]
    assert scene.layers.seen == [0]


@pytest.mark.parametrize("bad", ["second", "between", "beyond", "nowhere"])
def test_e329_addresses_outside_of_any_tensor(scene: Scene, bad: str) -> None:
    """E-329, S-96, S-212: the layer's addresses are all checked before its first byte."""
    addresses = list(scene.addresses)
    addresses[3] = {
        "second": addresses[3] + TO.size - 31,
        "between": addresses[3] - 1,
        "beyond": addresses[3] + TO.size,
        "nowhere": 1,
    }[bad]
    assert scene.results(scene.config(addresses=addresses)) == [INVALID]
    scene.check({t: [(0, scene.data(t)[:32])] for t in range(2)})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"src_block_indices": [0, 2], "dst_block_indices": [0, 1]}, "source"),
        ({"src_block_indices": [0, 1], "dst_block_indices": [0, 3]}, "destination"),
        ({"src_block_indices": [0, 1], "dst_block_indices": [0, 1], "dst_block_memory_size": 16}, "size"),
    ],
)
def test_e331_blocks_that_do_not_fit(scene: Scene, change: dict[str, Any], words: str) -> None:
    """E-331, S-96: indices out of range and another block size become the result; nothing is written."""
    del words
    assert scene.results(scene.config(), **change) == [INVALID]
    scene.check({})


def test_s96_slot_out_of_range(scene: Scene) -> None:
    """S-96: a slot that the source lacks becomes the result."""
    assert scene.results(scene.config(slot=2)) == [INVALID]
    scene.check({})


@pytest.mark.parametrize("change", [(9, 64), (1, 64), (3, 0), (3, 30)])
def test_e331_chunks_that_do_not_fit(peer: Peer, change: tuple[int, int]) -> None:
    """E-331: too many chunks, blocks of the size of the tensor, of none, or above the slot."""
    scene = Scene(peer, cm=True)
    try:
        count, nbytes = change
        assert scene.results(scene.config(), dst_block_indices=list(range(count)), dst_block_memory_size=nbytes) == [
            INVALID
        ]
        scene.check({})
    finally:
        scene.here.close()


def test_s96_source_is_gone(scene: Scene) -> None:
    """S-96, S-21: a source that was deallocated becomes KV_CACHE_NOT_EXIST as a result."""
    scene.here.manager.deallocate_cache(scene.source)
    assert scene.results(scene.config()) == [NOT_EXIST]
    scene.check({})


def test_e328_not_linked(scene: Scene) -> None:
    """E-328: a cluster without a link is NOT_YET_LINK, as a result."""
    assert scene.results(scene.config(range(2)), scene.config(range(1, 2), cluster=9)) == [SUCCESS, NOT_YET_LINK]


def test_e328_busy(peer: Peer) -> None:
    """E-328, S-190: a link with a transfer on it is LINK_BUSY in KvCacheManager mode; in the other mode it waits."""
    for cm in (False, True):
        scene = Scene(peer, cm)
        try:
            results: list[Any] = []
            with Stalled(
                scene.here.dd, lambda s=scene, r=results: r.extend(s.results(s.config(range(1)))), 5
            ) as stalled:
                second = Layers()
                task = scene.here.manager.transfer_cache_async(scene.source, second, [scene.config(range(1), 1, 1)])
                if not cm:
                    assert task.get_results(LIMIT_MS) == [LLMStatusCode.LLM_LINK_BUSY]
                else:
                    assert task.get_results(50) == [LLMStatusCode.LLM_TIMEOUT]
                assert stalled.finish() is None
                if cm:
                    assert task.get_results(LIMIT_MS) == [SUCCESS]
            assert results == [SUCCESS]
        finally:
            scene.close()


def test_e328_timeout_and_s97(peer: Peer) -> None:
    """E-328, S-97: each layer has its own limit; a wait for the synchronizer does not count, a slow write does."""
    for cm, expected in ((False, LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT), (True, LLMStatusCode.LLM_TIMEOUT)):
        scene = Scene(peer, cm, sync_kv_timeout=150)
        try:
            set_faults(scene.here.dd, delay_s=0.05)
            # Four layers of two writes: 400 ms in all, 100 ms each.
            assert scene.results(scene.config()) == [SUCCESS]
            clear_faults(scene.here.dd)
            results: list[Any] = []
            with Stalled(scene.here.dd, lambda s=scene, r=results: r.extend(s.results(s.config())), 5) as stalled:
                assert stalled.wait() is None
            assert results == [expected]
            assert scene.results(scene.config()) == [NOT_YET_LINK]
        finally:
            scene.close()


def test_e324_still_running(scene: Scene) -> None:
    """E-324, S-95: until the end each config is reported as timed out; asking again later gives the results."""
    ready = threading.Event()
    task = scene.send(scene.config(range(2)), scene.config(range(1), 1, 1), say=lambda layer: ready.wait(30))
    running = LLMStatusCode.LLM_TIMEOUT if scene.cm else LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT
    try:
        for limit in (0, 20):
            assert task.synchronize(limit) is running
            assert task.get_results(limit) == [running, running]
    finally:
        ready.set()
    assert task.synchronize() is SUCCESS
    assert task.get_results() == [SUCCESS, SUCCESS]


def test_e330_several_devices(peer: Peer) -> None:
    """E-330: with several local devices the result is FEATURE_NOT_ENABLED."""
    scene = Scene(peer, cm=False)
    scene.here.close()
    here = End(None, 2, LLMRole.PROMPT, cm=False, devices=[0, 1], llm__listenIpInfo=bindable("10.1.2.2:1;10.1.2.2:2"))
    try:
        scene.here, scene.source = here, here.allocate(OF)
        assert scene.results(scene.config()) == [LLMStatusCode.LLM_FEATURE_NOT_ENABLED]
    finally:
        here.close()


# ---------------------------------------------------------------------- refusals


def row(rule: str, expected: Expected, *words: object, **changes: Any) -> Any:
    return pytest.param(expected, words, changes, id=name_of(rule, changes))


HOST = KvCache.create_cpu_cache(desc(2, 2, 32, Placement.HOST), [4096, 8192])
BY_KEY = TransferWithCacheKeyConfig(BlocksCacheKey(1), range(4), range(4))


@pytest.mark.parametrize(
    ("expected", "words", "changes"),
    [
        row("E-311", TypeError, "src_cache", src_cache=None),
        row("E-311", TypeError, "src_cache", src_cache=1),
        row("E-313", TypeError, "layer_synchronizer", layer_synchronizer=None),
        row("E-313", TypeError, "layer_synchronizer", layer_synchronizer=lambda layer, timeout: True),
        row("E-314", TypeError, "transfer_configs", transfer_configs=None),
        row("E-314", TypeError, "transfer_configs", transfer_configs=TransferConfig(1, [1, 2])),
        row("E-314", TypeError, "transfer_configs", transfer_configs=[None]),
        row("E-314", TypeError, "transfer_configs", transfer_configs=[BY_KEY]),
        row("E-315", TypeError, "src_block_indices", src_block_indices=["1"], dst_block_indices=[1]),
        row("E-315", TypeError, "dst_block_indices", src_block_indices=[1], dst_block_indices=[True]),
        row("E-316", ValueError, "src_block_indices", src_block_indices=[-1], dst_block_indices=[1]),
        row("E-317", PARAM_INVALID, "transfer from blocks to cache is not supported", src_block_indices=[1]),
        row("E-318", PARAM_INVALID, "1", "2", src_block_indices=[1], dst_block_indices=[1, 2]),
        row("E-319", PARAM_INVALID, "dst_block_indices", dst_block_indices=[1]),
        row("E-320", ValueError, "dst_block_memory_size", dst_block_memory_size=-1),
        row("E-321", PARAM_INVALID, "dst_block_memory_size is 8", dst_block_memory_size=8),
        row("E-322", PARAM_INVALID, "4 layers", transfer_configs=[TransferConfig(1, [1] * 4, range(3, 5))]),
        row("E-322", PARAM_INVALID, "dst_addrs has 4", "8", transfer_configs=[TransferConfig(1, [1] * 4)]),
        row("E-322", PARAM_INVALID, "dst_addrs has 4", "2", transfer_configs=[TransferConfig(1, [1] * 4, range(1))]),
        row(
            "E-322",
            PARAM_INVALID,
            "src_batch_index is 1",
            src_block_indices=[0],
            dst_block_indices=[0],
            transfer_configs=[TransferConfig(1, [1] * 8, None, 1)],
        ),
    ],
)
def test_refused(scene: Scene, expected: Expected, words: tuple[object, ...], changes: dict[str, Any]) -> None:
    """S-91, S-99: what can be known at the call is refused there; no layer is asked for, nothing is written."""
    layers = Layers()
    arguments = {
        "src_cache": scene.source,
        "layer_synchronizer": layers,
        "transfer_configs": [scene.config()],
        **changes,
    }
    with refuses(expected, *words):
        scene.here.manager.transfer_cache_async(**arguments)
    assert layers.seen == []
    scene.check({})


def test_e322_odd_numbers_of_tensors(scene: Scene) -> None:
    """E-322, S-90, B13: a layer has two tensors here, and both the rule and the number are named."""
    source = scene.here.allocate(desc(61, 1, 32))
    with refuses(PARAM_INVALID, "61", "even"):
        scene.send(scene.config(range(1)), source=source)


def test_e312_host_source(scene: Scene) -> None:
    """E-312: nothing is sent from the host."""
    source = scene.here.allocate(desc(8, 2, 32, Placement.HOST)) if scene.cm else HOST
    with refuses(PARAM_INVALID, "src_cache", "HOST"):
        scene.send(scene.config(), source=source)


def test_e310_only_a_prompt(peer: Peer) -> None:
    """E-310: in KvCacheManager mode the role is looked at before anything else."""
    scene = Scene(peer, cm=False)
    try:
        scene.here.manager._role = LLMRole.DECODER
        with refuses(PARAM_INVALID, "transfer_cache_async", "PROMPT"):
            scene.here.manager.transfer_cache_async(None, None, None)
    finally:
        scene.here.close()
