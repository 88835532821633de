"""Pulls of any geometry, compared with a slow model, every byte of both sides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import memory
import model
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from model import Layers, Shape
from pairs import PREFILL, Decoder, Prompt, bytes_desc
from refusals import refuses

from llm_datadist import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex, LLMStatusCode

SETTINGS = settings(
    max_examples=200,
    deadline=None,
    database=None,  # nothing is left behind
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
PADDED = 512

strides = st.integers(1, 40) | st.sampled_from([63, 64, 65, 511, 512, 513, 1000, 4096, 4097])
shapes = st.builds(Shape, st.integers(1, 9), st.integers(1, 6), strides)


@st.composite
def selections(draw: Callable[[Any], Any], source: int, destination: int) -> Layers:
    """Draw layers that mostly exist on both sides."""
    divisors = [n for n in range(1, destination + 1) if destination % n == 0]
    count = draw(st.sampled_from([None, *divisors, *divisors]) | st.integers(1, 5))
    tensors = count or 2
    ranges: list[range | None] = []
    length = draw(st.integers(1, max(1, min(source, destination) // tensors)))
    for total in (source, destination):
        start = draw(st.integers(0, max(0, total // tensors - length)))
        usual, others = range(start, start + length), [None, range(start), range(start + 1, start + length + 1)]
        ranges.append(draw(st.sampled_from([usual] * 9 + others)))
    return Layers(ranges[0], ranges[1], count)


@st.composite
def calls(draw: Callable[[Any], Any], *, blocks: bool) -> tuple[Shape, Shape, Layers]:
    """Draw two caches that often fit each other, and layers of them."""
    source = draw(shapes)
    destination = draw(shapes)
    if draw(st.integers(0, 7)):
        destination = destination._replace(tensors=source.tensors)
    if draw(st.integers(0, 7)) and blocks:
        destination = destination._replace(stride=source.stride)
    if draw(st.booleans()):
        return source, destination, Layers()
    return source, destination, draw(selections(source.tensors, destination.tensors))


class Caches:
    """One filled source and one destination for one example."""

    def __init__(self, linked: tuple[Prompt, Decoder], source: Shape, destination: Shape, key: Any) -> None:
        self.prompt, self.decoder = linked
        desc = bytes_desc(*source)
        self.keys: list[CacheKey] = []
        if isinstance(key, BlocksCacheKey):
            self.remote = self.prompt.allocate_blocks(desc, key)
        else:
            self.remote, self.keys = self.prompt.allocate(desc, key), key
        self.source = [self.prompt.expected(desc, t) for t in range(source.tensors)]
        self.local = self.decoder.allocate(bytes_desc(*destination))
        self.addresses = self.local.per_device_tensor_addrs[0]
        self.wanted = [bytearray([PREFILL]) * (destination.slots * destination.stride) for _ in self.addresses]
        self.padding = self.paddings()

    def paddings(self) -> list[bytes]:
        """Give what lies behind each tensor up to the next one's alignment."""
        nbytes = len(self.wanted[0])
        return [memory.read(address + nbytes, -nbytes % PADDED) for address in self.addresses]

    def check(self, pull: Callable[[], None], moves: Sequence[model.Byte] | None) -> None:
        """Pull, compare everything, and give the caches back."""
        try:
            self._check(pull, moves)
        finally:
            self.decoder.manager.deallocate_cache(self.local)
            self.prompt.manager.deallocate_cache(self.remote)
            for key in self.keys:
                self.prompt.manager.remove_cache_key(key)

    def _check(self, pull: Callable[[], None], moves: Sequence[model.Byte] | None) -> None:
        if moves is None:
            event("refused")
            with refuses(LLMStatusCode.LLM_PARAM_INVALID):
                pull()
        else:
            event("pulled")
            pull()
            model.apply(moves, self.source, self.wanted)
        for t, wanted in enumerate(self.wanted):
            assert self.decoder.tensor(self.local, t) == bytes(wanted), f"tensor {t}"
        assert self.paddings() == self.padding
        for address, expected in zip(self.remote.get("per_device_tensor_addrs")[0], self.source, strict=True):
            assert self.prompt.peer.make("memory:read", address, len(expected)) == expected


@pytest.mark.timeout(300)
def test_pull_cache(linked: tuple[Prompt, Decoder]) -> None:
    """S-30 to S-36 and S-41 to S-47: any sizes, slots, offsets, layers and kinds of key."""

    @SETTINGS
    @given(call=calls(blocks=False), data=st.data())
    def run(call: tuple[Shape, Shape, Layers], data: st.DataObject) -> None:
        source, destination, layers = call
        slot = data.draw(st.integers(0, source.slots - 1))
        batch_index = data.draw(st.sampled_from([*range(destination.slots)] * 9 + [destination.slots]))
        shorter = min(source.stride, destination.stride)
        offset = st.none() | st.integers(0, shorter - 1)
        so, do = data.draw(offset), data.draw(offset)
        room = min(source.stride - (so or 0), destination.stride - (do or 0))
        size = data.draw(st.integers(1, max(1, room)) | st.sampled_from([-1, max(1, room), max(1, room) + 1]))
        keys = [CacheKey(1, i) if i % 2 else CacheKey(1, 2**64 - 1, 0, i) for i in range(source.slots)]
        by_id = data.draw(st.booleans())
        caches = Caches(linked, source, destination, keys)
        key: Any = keys[slot]
        if by_id:
            key = CacheKeyByIdAndIndex(1, caches.remote.get("cache_id"), slot)
        kwargs = {"src_cache_offset": so, "dst_cache_offset": do, **layers.kwargs()}
        caches.check(
            lambda: caches.decoder.manager.pull_cache(key, caches.local, batch_index, size, **kwargs),
            model.pull_cache(source, slot, destination, batch_index, size, so, do, layers),
        )

    run()


@pytest.mark.timeout(300)
def test_pull_blocks(linked: tuple[Prompt, Decoder]) -> None:
    """S-50 to S-53 and S-41 to S-46: any lists, with repeated and adjacent blocks."""

    @SETTINGS
    @given(call=calls(blocks=True), data=st.data())
    def run(call: tuple[Shape, Shape, Layers], data: st.DataObject) -> None:
        source, destination, layers = call
        lists = []
        length = data.draw(st.integers(1, 12))
        for slots in (source.slots, destination.slots):
            beyond = data.draw(st.sampled_from([0] * 19 + [1]))
            near = data.draw(st.integers(0, slots - 1))
            anywhere = st.lists(st.integers(0, slots - 1 + beyond), min_size=length, max_size=length)
            running = [(near + i) % slots for i in range(length)]
            lists.append(data.draw(anywhere | st.just(running)))
        caches = Caches(linked, source, destination, BlocksCacheKey(1, 0))
        caches.check(
            lambda: caches.decoder.manager.pull_blocks(BlocksCacheKey(1, 0), caches.local, *lists, **layers.kwargs()),
            model.pull_blocks(source, lists[0], destination, lists[1], layers),
        )

    run()
