"""Any order of allocations, pulls, removals and deallocations, compared with a model of dicts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import model
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)
from model import Layers, Shape
from pairs import PREFILL, Decoder, Prompt, bytes_desc
from peer import Peer
from refusals import refuses

from llm_datadist import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex, LLMStatusCode

ABSENT = 2**64 - 1
PADDING = CacheKey(1, ABSENT)
#: All the keys there are. Few, so that they meet.
KEYS = [CacheKey(1, 0), CacheKey(1, 1), CacheKey(1, 0, 1), CacheKey(1, ABSENT, 0, 0)]
BLOCKS_KEYS = [BlocksCacheKey(1, model_id) for model_id in range(2)]
#: Each tensor takes 512 bytes of the prompt's memory, so that fragments are of no account.
TENSORS = 40

# Most caches fit each other, and most selections fit them.
shapes = st.builds(Shape, st.sampled_from([4, 4, 4, 2]), st.sampled_from([3, 3, 2]), st.sampled_from([16, 16, 32]))
layers = st.sampled_from(
    [Layers()] * 4
    + [Layers(range(i, i + 1), range(j, j + 1)) for i in range(2) for j in range(2)]
    + [Layers(range(i, i + 2), range(2 - i, 4 - i), 1) for i in range(3)]
    + [Layers(range(0, 2), range(0, 2)), Layers(range(1)), Layers(range(2)), Layers(None, range(1))]
    + [Layers(range(2, 3), range(0, 1)), Layers(range(1), range(1), 3)]
)
batch_indices = st.sampled_from([0, 0, 0, 1, 1, 1, 2])
sizes = st.sampled_from([16, 16, 16, 7, -1])
offsets = st.sampled_from([None, None, None, None, 0])


@dataclass(eq=False)
class Source:
    """A cache of the prompt."""

    id: int
    shape: Shape
    handle: Any
    data: list[bytes]
    blocks: bool
    held: bool = True
    #: What is bound to which slot.
    keys: dict[Any, int] = field(default_factory=dict)

    @property
    def lives(self) -> bool:
        return self.held or bool(self.keys)


@dataclass(eq=False)
class Destination:
    """A cache of the decoder."""

    shape: Shape
    cache: Any
    data: list[bytearray]
    held: bool = True


class Machine(RuleBasedStateMachine):
    """Two engines, and what should be in them."""

    sources = Bundle("sources")

    def __init__(self, prompt: Prompt, decoder: Decoder) -> None:
        super().__init__()
        self.prompt, self.decoder = prompt, decoder
        self.bound: dict[Any, Source] = {}
        self.unpulled: dict[Any, set[int]] = {}
        self.live: set[Source] = set()
        self.filled: list[Destination] = []
        self.last_id: int | None = None

    # ------------------------------------------------------------------ the prompt

    @initialize(target=sources)
    def begin(self) -> Any:
        """Start with one cache on each side, so that there is something to pull from and into."""
        self.allocate_destination(Shape(4, 3, 16))
        return self.allocate(Shape(4, 3, 16), KEYS[:2], "any")

    @rule(
        target=sources,
        shape=shapes,
        keys=st.lists(st.sampled_from([*KEYS, PADDING]), max_size=4),
        which=st.sampled_from(["free", "free", "free", "any"]),
    )
    def allocate(self, shape: Shape, keys: list[CacheKey], which: str) -> Any:
        """Allocate a contiguous cache: S-10, S-12, S-15 to S-18."""
        if which == "free":
            keys = [key for key in keys if key not in self.bound][: shape.slots]
        if len(keys) > shape.slots:
            status = LLMStatusCode.LLM_PARAM_INVALID
        elif any(key in self.bound for key in keys):
            status = LLMStatusCode.LLM_FAILED
        elif not self.fits(shape):
            status = LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY
        else:
            slot_of = {key: slot for slot, key in enumerate(keys) if key is not PADDING}
            return self.made(shape, self.prompt.manager.allocate_cache(bytes_desc(*shape), keys), slot_of, blocks=False)
        with refuses(status):
            self.prompt.manager.allocate_cache(bytes_desc(*shape), keys)
        return multiple()

    @rule(target=sources, shape=shapes, key=st.sampled_from([None, *BLOCKS_KEYS]))
    def allocate_blocks(self, shape: Shape, key: BlocksCacheKey | None) -> Any:
        """Allocate a paged cache: S-10, S-13, S-15, S-18."""
        if key in self.bound:
            status = LLMStatusCode.LLM_FAILED
        elif not self.fits(shape):
            status = LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY
        else:
            handle = self.prompt.manager.allocate_blocks_cache(bytes_desc(*shape), key)
            return self.made(shape, handle, {key: 0} if key else {}, blocks=True)
        with refuses(status):
            self.prompt.manager.allocate_blocks_cache(bytes_desc(*shape), key)
        return multiple()

    def fits(self, shape: Shape) -> bool:
        return sum(source.shape.tensors for source in self.live) + shape.tensors <= TENSORS

    def made(self, shape: Shape, handle: Any, slot_of: dict[Any, int], *, blocks: bool) -> Source:
        cache_id = handle.get("cache_id")
        assert self.last_id is None or cache_id == self.last_id + 1
        self.last_id = cache_id
        desc = bytes_desc(*shape)
        self.prompt.fill(handle, desc, cache_id)
        data = [self.prompt.expected(desc, t, salt=cache_id) for t in range(shape.tensors)]
        source = Source(cache_id, shape, handle, data, blocks, keys=slot_of)
        self.live.add(source)
        for key in slot_of:
            self.bound[key] = source
            self.unpulled[key] = set(range(shape.tensors))
        return source

    @rule(source=sources)
    def deallocate(self, source: Source) -> None:
        """Let a handle go, perhaps for the second time: S-20, S-22, S-23."""
        self.prompt.manager.deallocate_cache(source.handle)
        source.held = False
        if source.blocks:
            for key in list(source.keys):
                self.unbind(key)
        self.forget_dead(source)

    @rule(key=st.sampled_from(KEYS))
    def remove(self, key: CacheKey) -> None:
        """Remove a key, bound or not: S-24."""
        self.prompt.manager.remove_cache_key(key)
        if key in self.bound:
            source = self.bound[key]
            self.unbind(key)
            self.forget_dead(source)

    def unbind(self, key: Any) -> None:
        del self.bound.pop(key).keys[key]
        del self.unpulled[key]

    def forget_dead(self, source: Source) -> None:
        if not source.lives:
            self.live.discard(source)

    # ------------------------------------------------------------------ the decoder

    @rule(shape=shapes)
    def allocate_destination(self, shape: Shape) -> None:
        """Allocate a cache to pull into."""
        cache = self.decoder.allocate(bytes_desc(*shape))
        data = [bytearray([PREFILL]) * (shape.slots * shape.stride) for _ in range(shape.tensors)]
        self.filled.append(Destination(shape, cache, data))

    @precondition(lambda self: len(self.filled) > 2)
    @rule(number=st.integers(0, 9))
    def deallocate_destination(self, number: int) -> None:
        """Give one back; a pull into it is refused afterwards: S-21."""
        destination = self.filled.pop(number % len(self.filled))
        self.decoder.manager.deallocate_cache(destination.cache)
        with refuses(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST):
            self.decoder.manager.pull_cache(KEYS[0], destination.cache)

    @rule(
        number=st.integers(0, 19),
        destination=st.integers(0, 9),
        batch_index=batch_indices,
        size=sizes,
        offset=offsets,
        chosen=layers,
    )
    def pull(self, number: int, **call: Any) -> None:
        """Pull by request or prefix, which most of the time is bound: S-37, S-60, S-61."""
        bound = [key for key in KEYS if key in self.bound]
        key = bound[number % len(bound)] if bound and number < 15 else KEYS[number % len(KEYS)]
        source = self.bound.get(key)
        self.pull_slot(key, source, source.keys[key] if source else 0, **call)

    @rule(
        source=sources,
        slot=st.integers(0, 4),
        destination=st.integers(0, 9),
        batch_index=batch_indices,
        size=sizes,
        offset=offsets,
        chosen=layers,
    )
    def pull_by_id(self, source: Source, slot: int, **call: Any) -> None:
        """Pull by id and slot: S-38, S-60, S-64."""
        there = source if source.lives and slot < source.shape.slots else None
        self.pull_slot(CacheKeyByIdAndIndex(1, source.id, slot), there, slot, **call)

    def pull_slot(
        self,
        key: Any,
        source: Source | None,
        slot: int,
        *,
        destination: int,
        batch_index: int,
        size: int,
        offset: int | None,
        chosen: Layers,
    ) -> None:
        into = self.filled[destination % len(self.filled)]
        here = into.shape

        def run() -> None:
            self.decoder.manager.pull_cache(
                key, into.cache, batch_index, size, src_cache_offset=offset, **chosen.kwargs()
            )

        # What the destination alone can tell comes first, and does not depend on what is at the other end: S-40.
        agreeable = Shape(self.tensors_that_pair(here, chosen), 1, here.stride)
        if model.pull_cache(agreeable, 0, here, batch_index, size, offset, None, chosen) is None:
            with refuses(LLMStatusCode.LLM_PARAM_INVALID):
                run()
            return
        if source is None:
            with refuses(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST):
                run()
            return
        moves = model.pull_cache(source.shape, slot, here, batch_index, size, offset, None, chosen)
        if moves is None:
            with refuses(LLMStatusCode.LLM_PARAM_INVALID):
                run()
            return
        run()
        model.apply(moves, source.data, into.data)
        spent = [k for k, at in source.keys.items() if at == slot and isinstance(k, CacheKey) and k.req_id != ABSENT]
        if spent and offset is None:
            self.unpulled[spent[0]] -= {move.source_tensor for move in moves}
            if not self.unpulled[spent[0]]:
                self.unbind(spent[0])
                self.forget_dead(source)

    @staticmethod
    def tensors_that_pair(destination: Shape, chosen: Layers) -> int:
        """Give the tensors of a source at which a destination would find nothing to complain about."""
        count = 2 if chosen.count is None else chosen.count
        if chosen.source is not None:
            return chosen.source.stop * count
        return destination.tensors if chosen.destination is None else len(chosen.destination) * count

    @rule(
        key=st.sampled_from(BLOCKS_KEYS),
        destination=st.integers(0, 9),
        blocks=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=5),
        chosen=layers,
    )
    def pull_blocks(self, key: BlocksCacheKey, destination: int, blocks: list[tuple[int, int]], chosen: Layers) -> None:
        """Pull blocks: S-50, S-55, S-60."""
        of, to = [pair[0] for pair in blocks], [pair[1] for pair in blocks]
        into = self.filled[destination % len(self.filled)]
        here, source = into.shape, self.bound.get(key)
        agreeable = Shape(self.tensors_that_pair(here, chosen), 3, here.stride)
        if model.pull_blocks(agreeable, of, here, to, chosen) is None:
            status, moves = LLMStatusCode.LLM_PARAM_INVALID, None
        elif source is None:
            status, moves = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, None
        else:
            status, moves = LLMStatusCode.LLM_PARAM_INVALID, model.pull_blocks(source.shape, of, here, to, chosen)
        if moves is None or source is None:
            with refuses(status):
                self.decoder.manager.pull_blocks(key, into.cache, of, to, **chosen.kwargs())
            return
        self.decoder.manager.pull_blocks(key, into.cache, of, to, **chosen.kwargs())
        model.apply(moves, source.data, into.data)

    # ------------------------------------------------------------------ what holds after each step

    @invariant()
    def destinations_hold_what_was_pulled(self) -> None:
        """Compare every byte of the decoder's caches."""
        for destination in self.filled:
            for t, wanted in enumerate(destination.data):
                assert self.decoder.tensor(destination.cache, t) == bytes(wanted)

    def teardown(self) -> None:
        """Give everything back, after which all the prompt's memory must be free: S-11, S-24."""
        for source in self.live:
            self.prompt.manager.deallocate_cache(source.handle)
        for key in KEYS:
            self.prompt.manager.remove_cache_key(key)
        for destination in self.filled:
            self.decoder.manager.deallocate_cache(destination.cache)
        self.prompt.manager.deallocate_cache(self.prompt.manager.allocate_cache(bytes_desc(TENSORS, 1, 1)))


@pytest.mark.timeout(300)
def test_any_order_of_calls(peer: Peer, decoder: Decoder) -> None:
    """S-10 to S-24, S-37, S-38, S-60, S-61, S-63, S-64: see the rules of the machine."""
    prompt = Prompt(peer, ge__flowGraphMemMaxSize=str(TENSORS * 512), mem_utilization=1.0)
    decoder.link(prompt)
    run_state_machine_as_test(
        lambda: Machine(prompt, decoder),
        settings=settings(
            max_examples=120,
            stateful_step_count=60,
            deadline=None,
            database=None,  # nothing is left behind
            suppress_health_check=list(HealthCheck),
        ),
    )
