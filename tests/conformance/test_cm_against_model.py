"""Pulls, pushes and copies of CacheManager mode of any geometry, compared with a slow model, every byte."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import model
from ends import End, desc
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from model import Layers, Shape
from pairs import PREFILL
from refusals import PARAM_INVALID, refuses

from llm_datadist import BlocksCacheKey, CacheKeyByIdAndIndex

SETTINGS = settings(
    max_examples=60,
    deadline=None,
    database=None,  # nothing is left behind
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
PADDED = 64
MAKE = {"allocated": End.allocate, "registered": End.register}

strides = st.integers(1, 40) | st.sampled_from([63, 64, 65, 513, 4097])
shapes = st.builds(Shape, st.integers(1, 7), st.integers(1, 5), strides)
kinds = st.sampled_from(["allocated", "registered"])


@st.composite
def layers_of(draw: Callable[[Any], Any], source: int, destination: int) -> Layers:
    """Draw layers that mostly exist on both sides."""
    if draw(st.booleans()):
        return Layers(None, None, draw(st.sampled_from([None, 1])))
    divisors = [n for n in range(1, source + 1) if source % n == 0]
    count = draw(st.sampled_from([None, *divisors, *divisors]))
    tensors = count or 2
    length = draw(st.integers(1, max(1, min(source, destination) // tensors)))
    starts = [draw(st.integers(0, max(0, total // tensors - length))) for total in (source, destination)]
    return Layers(*(range(start, start + length) for start in starts), count)


@st.composite
def pairs(draw: Callable[[Any], Any], *, equal_blocks: bool) -> tuple[Shape, Shape, Layers]:
    """Draw two caches that often fit each other, and layers of them."""
    source, destination = draw(shapes), draw(shapes)
    if draw(st.integers(0, 7)):
        destination = destination._replace(tensors=source.tensors)
    if equal_blocks and draw(st.integers(0, 7)):
        destination = destination._replace(stride=source.stride)
    return source, destination, draw(layers_of(source.tensors, destination.tensors))


def blocks(count: int) -> st.SearchStrategy[list[int]]:
    """Draw block indices, of which few do not exist."""
    return st.lists(st.integers(0, count - 1) | st.integers(0, count), min_size=1, max_size=6)


class Example:
    """Two caches for one example, whose bytes are all compared."""

    def __init__(self, source: tuple[End, Shape, str], target: tuple[End, Shape, str], *, paged: tuple[bool, bool]):
        self.ends = source[0], target[0]
        self.descs = desc(*source[1]), desc(*target[1])
        made = []
        for i, (end, _, kind) in enumerate((source, target)):
            extra = {"remote_accessible": True} if kind == "registered" else {}
            key = BlocksCacheKey(1, i) if paged[i] else None
            made.append(MAKE[kind](end, self.descs[i], key, 0 if i == 0 else None, blocks=paged[i], **extra))
        self.caches = made
        self.kinds, self.paged = (source[2], target[2]), paged

    def ids(self, side: int, slot: int) -> CacheKeyByIdAndIndex:
        """Give the key of a slot of one of the two."""
        return CacheKeyByIdAndIndex(self.ends[side].cluster_id, self.ends[side].id(self.caches[side]), slot)

    def blocks_key(self, side: int) -> BlocksCacheKey:
        """Give the key of one of the two, which is paged."""
        return BlocksCacheKey(self.ends[side].cluster_id, side)

    def check(self, call: Callable[[], None], moves: Sequence[model.Byte] | None) -> None:
        """Call, compare everything, and give the caches back."""
        (here, there), (of, to) = self.ends, self.descs
        wanted = [bytearray([PREFILL]) * to.size for _ in range(to.num_tensors)]
        source = [here.expected(of, t) for t in range(of.num_tensors)]
        padding = self.padding()
        event("refused" if moves is None else "done")
        try:
            if moves is None:
                with refuses(PARAM_INVALID):
                    call()
            else:
                call()
                model.apply(moves, source, wanted)
            for end, cache, data in ((here, self.caches[0], source), (there, self.caches[1], wanted)):
                for address, expected in zip(end.addresses(cache), data, strict=True):
                    assert end.read(address, len(expected)) == bytes(expected)
            assert self.padding() == padding
        finally:
            for end, cache, kind, paged in zip(self.ends, self.caches, self.kinds, self.paged, strict=True):
                number = end.id(cache)
                (end.manager.deallocate_blocks_cache if paged else end.manager.deallocate_cache)(cache)
                if kind == "registered":
                    end.manager.unregister_cache(number)

    def padding(self) -> list[bytes]:
        """Give what lies behind each destination tensor up to the next multiple of some bytes."""
        end, of = self.ends[1], self.descs[1]
        return [end.read(address + of.size, -of.size % PADDED) for address in end.addresses(self.caches[1])]


def exists(destination: Shape, layers: Layers, tensors: int) -> bool:
    """Say whether each pushed layer has a destination: else layers before it are written, which is no case of these."""
    count = layers.count or 2
    last = layers.destination.stop if layers.destination is not None else tensors // count
    return last * count <= destination.tensors


@SETTINGS
@given(data=st.data(), call=pairs(equal_blocks=False), kinds=st.tuples(kinds, kinds))
def test_pull_cache(cm: tuple[End, End], data: Any, call: Any, kinds: tuple[str, str]) -> None:
    """S-30 to S-36, S-41 to S-47: slots."""
    source, destination, layers = call
    slot, batch = data.draw(st.integers(0, source.slots - 1)), data.draw(st.integers(0, destination.slots))
    size = data.draw(st.sampled_from([-1, -1, 1]) | st.integers(1, source.stride + 1))
    example = Example((cm[0], source, kinds[0]), (cm[1], destination, kinds[1]), paged=(False, False))
    example.check(
        lambda: cm[1].manager.pull_cache(example.ids(0, slot), example.caches[1], batch, size, **layers.kwargs()),
        model.pull_cache(source, slot, destination, batch, size, None, None, layers),
    )


@SETTINGS
@given(data=st.data(), call=pairs(equal_blocks=True), kinds=st.tuples(kinds, kinds))
def test_pull_blocks(cm: tuple[End, End], data: Any, call: Any, kinds: tuple[str, str]) -> None:
    """S-50 to S-53: blocks."""
    source, destination, layers = call
    of = data.draw(blocks(source.slots))
    to = data.draw(st.lists(st.integers(0, destination.slots - 1), min_size=len(of), max_size=len(of)))
    example = Example((cm[0], source, kinds[0]), (cm[1], destination, kinds[1]), paged=(True, True))
    example.check(
        lambda: cm[1].manager.pull_blocks(example.blocks_key(0), example.caches[1], of, to, **layers.kwargs()),
        model.pull_blocks(source, of, destination, to, layers),
    )


@SETTINGS
@given(data=st.data(), call=pairs(equal_blocks=False), kinds=st.tuples(kinds, kinds))
def test_cut_into_blocks(cm: tuple[End, End], data: Any, call: Any, kinds: tuple[str, str]) -> None:
    """S-56: a slot cut into blocks."""
    source, destination, layers = call
    if data.draw(st.booleans()):
        destination = destination._replace(stride=max(1, source.stride // data.draw(st.integers(1, 4))))
    slot = data.draw(st.integers(0, source.slots - 1))
    to = data.draw(blocks(destination.slots))
    example = Example((cm[0], source, kinds[0]), (cm[1], destination, kinds[1]), paged=(False, True))
    example.check(
        lambda: cm[1].manager.pull_blocks(example.ids(0, slot), example.caches[1], [], to, **layers.kwargs()),
        model.cut_into_blocks(source, slot, destination, to, layers),
    )


@SETTINGS
@given(data=st.data(), call=pairs(equal_blocks=True), kinds=st.tuples(kinds, kinds), by_blocks=st.booleans())
def test_pushes(remote_cm: tuple[End, End], data: Any, call: Any, kinds: tuple[str, str], by_blocks: bool) -> None:
    """S-100 to S-104: slots and blocks, pushed from this process."""
    there, here = remote_cm
    if not here.manager._engine.links.any_live():
        here.link(there)
    source, destination, layers = call
    if by_blocks:
        of = data.draw(blocks(source.slots))
        to = data.draw(st.lists(st.integers(0, destination.slots - 1), min_size=len(of), max_size=len(of)))
        moves = model.push_blocks(source, of, destination, to, layers)
    else:
        batch, slot = data.draw(st.integers(0, source.slots)), data.draw(st.integers(0, destination.slots - 1))
        moves = model.push_cache(source, batch, destination, slot, layers)
    if not exists(destination, layers, source.tensors):
        # The layers that exist there are written, the first that does not ends the push.
        moves = None
        layers = Layers(range(1), range(destination.tensors, destination.tensors + 1), 1)
    more = layers.kwargs()
    example = Example((here, source, kinds[0]), (there, destination, kinds[1]), paged=(by_blocks, by_blocks))

    def push() -> None:
        if by_blocks:
            here.manager.push_blocks(example.blocks_key(1), example.caches[0], of, to, **more)
        else:
            here.manager.push_cache(example.ids(1, slot), example.caches[0], batch, **more)

    example.check(push, moves)


@SETTINGS
@given(data=st.data(), call=pairs(equal_blocks=False), kinds=st.tuples(kinds, kinds))
def test_copy_cache(cm: tuple[End, End], data: Any, call: Any, kinds: tuple[str, str]) -> None:
    """S-70, S-71: local copies."""
    source, destination, _ = call
    slots = data.draw(st.tuples(st.integers(0, source.slots), st.integers(0, destination.slots)))
    offset, size = data.draw(st.integers(0, source.stride)), data.draw(st.sampled_from([-1, 1]) | st.integers(1, 70))
    example = Example((cm[1], source, kinds[0]), (cm[1], destination, kinds[1]), paged=(False, False))
    example.check(
        lambda: cm[1].manager.copy_cache(example.caches[1], example.caches[0], slots[1], slots[0], offset, size),
        model.copy_cache(source, slots[0], destination, slots[1], offset, size),
    )
