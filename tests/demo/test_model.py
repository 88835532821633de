"""The demo's transformer: what it computes doesn't depend on how its keys and values are stored or fed."""

import os
import subprocess
import sys

import pytest

from llm_datadist.demo.caches import (
    PAGED_BLOCKS,
    ContiguousKv,
    PagedKv,
    blocks_for,
    bulk_words,
    contiguous_desc,
    digest,
    paged_desc,
    plain,
    scattered,
)
from llm_datadist.demo.model import LAYERS, TENSORS, Model
from llm_datadist.demo.reports import MAX_TOKENS

TEXT = list("Räder müssen rollen".encode())


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


def contiguous() -> ContiguousKv:
    return ContiguousKv(plain(contiguous_desc()))


def test_the_next_token_depends_on_every_token_before(model):
    answers = set()
    for first in range(64):
        answers.add(model.forward([first, *TEXT], 0, contiguous()))
    assert len(answers) > 2


def test_a_token_does_not_look_ahead(model):
    long, short = contiguous(), contiguous()
    model.forward(TEXT, 0, long)
    model.forward(TEXT[:7], 0, short)
    for tensor in range(TENSORS):
        difference = abs(long.read(tensor, 7).astype(float) - short.read(tensor, 7).astype(float))
        assert difference.max() < 0.02


def test_reading_in_two_parts_goes_on_from_the_stored_rows(model):
    whole, parts = contiguous(), contiguous()
    expected = model.forward(TEXT, 0, whole)
    model.forward(TEXT[:9], 0, parts)
    assert model.forward(TEXT[9:], 9, parts) == expected
    assert not (whole.read(2 * LAYERS - 1, len(TEXT)) == 0).all()


def test_wrong_keys_and_values_give_other_tokens(model):
    right, wrong = contiguous(), contiguous()
    first = model.forward(TEXT, 0, right)
    model.forward(TEXT[::-1], 0, wrong)
    assert model.generate(first, len(TEXT), 8, right) != model.generate(first, len(TEXT), 8, wrong)


def test_blocks_hold_the_same_bits_and_give_the_same_tokens(model):
    straight = contiguous()
    first = model.forward(TEXT, 0, straight)
    expected = digest(straight, len(TEXT))
    tokens = model.generate(first, len(TEXT), 20, straight)

    paged = PagedKv(plain(paged_desc()), scattered(5, PAGED_BLOCKS, blocks_for(len(TEXT) + 20)))
    assert model.forward(TEXT, 0, paged) == first
    assert digest(paged, len(TEXT)) == expected
    assert model.generate(first, len(TEXT), 20, paged) == tokens


def test_generate_gives_the_tokens_that_single_steps_give(model):
    store, other = contiguous(), contiguous()
    token = model.forward(TEXT, 0, store)
    model.forward(TEXT, 0, other)
    steps = [token]
    for step in range(5):
        steps.append(model.forward([steps[-1]], len(TEXT) + step, other))
    assert model.generate(token, len(TEXT), 6, store) == steps


def test_another_process_computes_the_same_bits(model):
    script = (
        "from llm_datadist.demo.caches import *; from llm_datadist.demo.model import Model\n"
        "store = ContiguousKv(plain(contiguous_desc()))\n"
        f"print(Model().forward({TEXT}, 0, store), digest(store, {len(TEXT)}))\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script], check=True, capture_output=True, timeout=60, env=one_thread()
        ).stdout
        for _ in range(2)
    }
    assert len(outputs) == 1


def one_thread() -> dict[str, str]:
    return {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}


def test_scattered_blocks_are_different_and_inside():
    blocks = scattered(7, PAGED_BLOCKS, blocks_for(MAX_TOKENS))
    assert len(set(blocks)) == len(blocks) == blocks_for(MAX_TOKENS)
    assert min(blocks) >= 0
    assert max(blocks) < PAGED_BLOCKS
    assert blocks != sorted(blocks)


def test_no_two_blocks_of_the_bulk_cache_are_equal():
    firsts = {int(bulk_words(tensor, block)[0]) for tensor in range(64) for block in range(64)}
    assert len(firsts) == 64 * 64
    assert bulk_words(0, 0)[-1] < bulk_words(0, 1)[0]


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (16, 1), (17, 2), (MAX_TOKENS, 32)])
def test_blocks_for(tokens, blocks):
    assert blocks_for(tokens) == blocks
