"""Pulls of CacheManager mode refuse what they must, with the right words, and write nothing then."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from ends import End, desc
from pairs import rank_table
from refusals import PARAM_INVALID, Expected, name_of, refuses
from stall import Running, Stalled

from llm_datadist import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex, KvCache, LLMRole, LLMStatusCode, Placement

NONE = 2**64 - 1
NOT_EXIST = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
NOT_YET_LINK = LLMStatusCode.LLM_NOT_YET_LINK
OF = desc(4, 2, 32)
PAGED = desc(4, 8, 32)
TO = desc(4, 4, 32)


@dataclass
class Scene:
    """A linked pair with plain and paged caches on both sides, and pulls between them that work."""

    there: End
    here: End
    plain: Any
    paged: Any

    def pull(self, **changes: Any) -> None:
        """Pull request 10 as a slot, but for the changes."""
        self.here.manager.pull_cache(**{"cache_key": CacheKey(1, 10), "cache": self.plain, **changes})

    def pull_blocks(self, **changes: Any) -> None:
        """Pull two blocks, but for the changes."""
        arguments = {"src_cache_key": BlocksCacheKey(1), "dst_cache": self.paged, "src_blocks": [0, 5], **changes}
        self.here.manager.pull_blocks(**{"dst_blocks": [2, 3], **arguments})

    def check_unharmed(self) -> None:
        """Check that nothing was written, and that both keys are still bound (S-60, S-212)."""
        self.here.untouched(self.plain, TO)
        self.here.untouched(self.paged, TO)
        for slot, request in enumerate((10, 11)):
            self.pull(cache_key=CacheKey(1, request), batch_index=slot)
        self.here.check(self.plain, TO, {t: [(0, self.there.expected(OF, t))] for t in range(4)})


@pytest.fixture
def scene(cm: tuple[End, End]) -> Scene:
    there, here = cm
    there.allocate(OF, [CacheKey(1, 10), CacheKey(1, 11)], salt=0)
    there.allocate(PAGED, BlocksCacheKey(1), salt=1, blocks=True)
    return Scene(there, here, here.allocate(TO), here.allocate(TO, blocks=True))


def row(rule: str, expected: Expected, *words: object, **changes: Any) -> Any:
    return pytest.param(expected, words, changes, id=name_of(rule, changes))


SHARED = [
    row("E-215", TypeError, "tensor_num_per_layer", tensor_num_per_layer=1.0),
    row("E-215", TypeError, "tensor_num_per_layer", tensor_num_per_layer="x"),
    row("E-217", ValueError, "tensor_num_per_layer", tensor_num_per_layer=-1),
    row("E-218", PARAM_INVALID, "tensor_num_per_layer is 0", tensor_num_per_layer=0),
    row("E-219", PARAM_INVALID, "1 to 4", tensor_num_per_layer=5),
    row("E-220", PARAM_INVALID, "tensor_num_per_layer is 3", tensor_num_per_layer=3, dst_layer_range=range(1)),
    row("E-222", TypeError, "src_layer_range", src_layer_range=[0]),
    row("E-223", PARAM_INVALID, "step 1", dst_layer_range=range(0, 2, 2)),
    row("E-224", PARAM_INVALID, "src_layer_range", src_layer_range=range(0)),
    row("E-225", PARAM_INVALID, "2 source", "4 destination", src_layer_range=range(1)),
    row("E-226", PARAM_INVALID, "src_layer_range", src_layer_range=range(1, 3), dst_layer_range=range(2)),
    row("E-226", PARAM_INVALID, "dst_layer_range", src_layer_range=range(2), dst_layer_range=range(1, 3)),
]


@pytest.mark.parametrize(
    ("expected", "words", "changes"),
    [
        row("E-201", TypeError, "cache_key", cache_key=BlocksCacheKey(1)),
        row("E-201", TypeError, "cache_key", cache_key=None),
        row("E-203", TypeError, "cache", cache=None),
        row("E-203", TypeError, "cache", cache=1),
        row("E-206", TypeError, "size", size=1.0),
        row("E-206", ValueError, "size", size=2**63),
        row("E-207", PARAM_INVALID, "size is 0", size=0),
        row("E-207", PARAM_INVALID, "size is -2", size=-2),
        row("E-208", TypeError, "batch_index", batch_index="0"),
        row("E-208", ValueError, "batch_index", batch_index=-1),
        row("E-208", ValueError, "batch_index", batch_index=2**32),
        row("E-209", PARAM_INVALID, "batch_index", "0 to 3", batch_index=4),
        row("E-211", PARAM_INVALID, "req_id", cache_key=CacheKey(1, NONE)),
        row("E-211", PARAM_INVALID, "req_id", cache_key=CacheKey(1, 10, prefix_id=3)),
        row("E-212", PARAM_INVALID, "33", "32", size=33),
        row("E-229", NOT_YET_LINK, "cluster 9", cache_key=CacheKey(9, 10)),
        row("E-230", PARAM_INVALID, "cluster_id is 2", cache_key=CacheKey(2, 10)),
        row("E-232", NOT_EXIST, "req_id=99", cache_key=CacheKey(1, 99)),
        row("E-233", NOT_EXIST, "cache 7", cache_key=CacheKeyByIdAndIndex(1, 7, 0)),
        row("E-233", NOT_EXIST, "slot 2", cache_key=CacheKeyByIdAndIndex(1, 1, 2)),
        row("E-233", NOT_EXIST, "cache", cache_key=CacheKeyByIdAndIndex(1, 0, 0)),
        row("E-235", PARAM_INVALID, "blocks cache", cache_key=CacheKeyByIdAndIndex(1, 2, 0)),
        *SHARED,
    ],
)
def test_pull_cache(scene: Scene, expected: Expected, words: tuple[object, ...], changes: dict[str, Any]) -> None:
    """E-200, S-212: any role may pull; what is wrong is refused before the first byte."""
    with refuses(expected, *words):
        scene.pull(**changes)
    scene.check_unharmed()


@pytest.mark.parametrize(
    ("expected", "words", "changes"),
    [
        row("E-250", TypeError, "cache_key", src_cache_key=None),
        row("E-250", TypeError, "cache_key", src_cache_key=1),
        row("E-203", TypeError, "dst_cache", dst_cache=None),
        row("E-251", TypeError, "src_blocks", src_blocks={0, 5}),
        row("E-251", TypeError, "dst_blocks", dst_blocks=[2, 3.0]),
        row("E-251", TypeError, "dst_blocks", dst_blocks=[2, True]),
        row("E-251", TypeError, "src_blocks", src_blocks=["0", 5]),
        row("E-252", PARAM_INVALID, "0", dst_blocks=[]),
        row("E-252", PARAM_INVALID, "dst_blocks", src_blocks=[], dst_blocks=[]),
        row("E-253", PARAM_INVALID, "src_blocks", src_blocks=[]),
        row("E-254", PARAM_INVALID, "src_blocks has 2", "CacheKey", src_cache_key=CacheKey(1, 10)),
        row("E-254", PARAM_INVALID, "src_blocks has 2", src_cache_key=CacheKeyByIdAndIndex(1, 1, 0)),
        row("E-252", PARAM_INVALID, "dst_blocks", src_cache_key=CacheKey(1, 10), src_blocks=[], dst_blocks=[]),
        row("E-255", PARAM_INVALID, "1", "2", src_blocks=[0]),
        row("E-256", ValueError, "src_blocks", src_blocks=[0, -1]),
        row("E-256", ValueError, "dst_blocks", dst_blocks=[0, 2**64]),
        row("E-257", PARAM_INVALID, "source block 8", "0 to 7", src_blocks=[0, 8]),
        row("E-257", PARAM_INVALID, "destination block 4", "0 to 3", dst_blocks=[0, 4]),
        row("E-229", NOT_YET_LINK, "cluster 9", src_cache_key=BlocksCacheKey(9)),
        row("E-230", PARAM_INVALID, "cluster_id is 2", src_cache_key=BlocksCacheKey(2)),
        row("E-260", NOT_EXIST, "model_id=3", src_cache_key=BlocksCacheKey(1, 3)),
        row("E-232", NOT_EXIST, "req_id=99", src_cache_key=CacheKey(1, 99), src_blocks=[]),
        row("E-233", NOT_EXIST, "slot 2", src_cache_key=CacheKeyByIdAndIndex(1, 1, 2), src_blocks=[]),
        row("E-261", PARAM_INVALID, "2 chunks", src_cache_key=CacheKey(1, 10), src_blocks=[]),
        *SHARED,
    ],
)
def test_pull_blocks(scene: Scene, expected: Expected, words: tuple[object, ...], changes: dict[str, Any]) -> None:
    """S-52, S-55, S-212: what is wrong is refused before the first byte."""
    with refuses(expected, *words):
        scene.pull_blocks(**changes)
    scene.check_unharmed()


@pytest.mark.parametrize("role", list(LLMRole))
def test_e200_roles_are_labels(peer: Any, role: LLMRole) -> None:
    """E-200, E-165, E-166, E-177, E-310: every role allocates with keys, pulls and removes keys."""
    there, here = End(peer, 1, role), End(None, 2, role)
    try:
        here.link(there)
        there.allocate(OF, [CacheKey(1, 10)], salt=0)
        there.allocate(PAGED, BlocksCacheKey(1), salt=0, blocks=True)
        cache = here.allocate(TO)
        here.manager.pull_cache(CacheKey(1, 10), cache)
        here.check(cache, TO, {t: [(0, there.expected(OF, t)[:32])] for t in range(4)})
        there.manager.remove_cache_key(CacheKey(1, 10))
    finally:
        here.close()


def test_e203_a_cache_of_the_other_mode(scene: Scene) -> None:
    """E-203: a KvCache is a wrong type here."""
    of = desc(4, 4, 32, Placement.HOST)
    with refuses(TypeError, "cache"):
        scene.pull(cache=KvCache.create_cpu_cache(of, [4096] * 4))
    scene.check_unharmed()


def test_e213_e227(scene: Scene) -> None:
    """E-213, E-227: a longer destination slot, and another number of tensors."""
    here = scene.here
    for of, words in ((desc(4, 1, 64), (64, 32)), (desc(2, 1, 32), ("4 source", "2 destination"))):
        cache = here.allocate(of)
        with refuses(PARAM_INVALID, *words):
            scene.pull(cache=cache)
        here.untouched(cache, of)
    scene.check_unharmed()


def test_e216_e221_e234_what_is_allowed(scene: Scene) -> None:
    """E-216, E-221, E-234: None is the default, odd totals take the default of two, prefix slots go by id."""
    there, here = scene.there, scene.here
    of = desc(3, 1, 32)
    source = there.allocate(of, [CacheKey(1, NONE, prefix_id=5)], salt=2)
    cache = here.allocate(of)
    for _ in range(2):
        here.manager.pull_cache(
            CacheKeyByIdAndIndex(1, there.id(source), 0),
            cache,
            src_layer_range=range(1),
            dst_layer_range=range(1),
            tensor_num_per_layer=None,
        )
    here.check(cache, of, {t: [(0, there.expected(of, t, 2))] for t in range(2)})


def test_e228_local_cache_is_gone(scene: Scene) -> None:
    """E-228, S-21: deallocated and unregistered destinations do not exist, nor does one that no engine knows."""
    here = scene.here
    allocated, registered = here.allocate(TO), here.register(TO)
    here.manager.deallocate_cache(allocated)
    here.manager.unregister_cache(registered.cache_id)
    for cache in (allocated, registered):
        with refuses(NOT_EXIST, f"cache {cache.cache_id}"):
            scene.pull(cache=cache)
    cpu = type(allocated).create_cpu_cache(
        desc(4, 4, 32, Placement.HOST), [here.take(128, Placement.HOST) for _ in range(4)]
    )
    with refuses(NOT_EXIST):
        scene.pull_blocks(dst_cache=cpu)
    scene.check_unharmed()


def test_e239_transfers_of_one_link_wait_for_each_other(scene: Scene) -> None:
    """E-239, S-191: a second pull over the same link waits, and is refused only by its own time limit."""
    here = scene.here
    with (
        Stalled(here.dd, scene.pull, 5) as stalled,
        Running(lambda: scene.pull(cache_key=CacheKey(1, 11), batch_index=1)) as second,
    ):
        assert not second.ended(0.05)
        assert stalled.finish() is None
        assert second.wait() is None
    here.check(scene.plain, TO, {t: [(0, scene.there.expected(OF, t))] for t in range(4)})


def test_e240_a_pull_that_takes_too_long(peer: Any) -> None:
    """E-240, S-180: after the time limit TIMEOUT, and the link must be made anew."""
    there, here = End(peer, 1), End(None, 2, sync_kv_timeout=100)
    try:
        here.link(there)
        there.allocate(OF, [CacheKey(1, 10)], salt=0)
        cache = here.allocate(TO)
        with Stalled(here.dd, lambda: here.manager.pull_cache(CacheKey(1, 10), cache), 5) as stalled:
            error = stalled.wait()
        assert getattr(error, "status_code", None) is LLMStatusCode.LLM_TIMEOUT, error
        with refuses(NOT_YET_LINK, "timed out"):
            here.manager.pull_cache(CacheKey(1, 10), cache)
        here.link(there)
        here.manager.pull_cache(CacheKey(1, 10), cache)
        here.check(cache, TO, {t: [(0, there.expected(OF, t)[:32])] for t in range(4)})
    finally:
        here.close()


def test_e241_unknown_arguments(scene: Scene) -> None:
    """E-241: they are ignored, with one warning."""
    with pytest.warns(RuntimeWarning, match="pull_cache.*'layers'"):
        scene.pull(layers=3)
    with pytest.warns(RuntimeWarning, match="pull_blocks.*'size'"):
        scene.pull_blocks(size=3)


def test_e262_a_slot_of_a_host_cache_into_blocks(scene: Scene) -> None:
    """E-262: cut into blocks goes only what is on the device."""
    there, here = scene.there, scene.here
    there.allocate(desc(4, 1, 32, Placement.HOST), [CacheKey(1, 30)], salt=0)
    with refuses(PARAM_INVALID, "HOST"):
        here.manager.pull_blocks(CacheKey(1, 30), scene.paged, [], [0])
    scene.check_unharmed()


def test_e231_while_the_memory_is_not_ready(cm: tuple[End, End]) -> None:
    """E-231, E-229: a cluster that a rank-table link still prepares is not linked yet."""
    _, here = cm
    table = rank_table(2)
    cache = here.allocate(TO)
    here.dd.link("with nobody", {2: 0, 3: 1}, table)
    with refuses(NOT_YET_LINK, "cluster 3"):
        here.manager.pull_cache(CacheKey(3, 1), cache)
    here.untouched(cache, TO)
