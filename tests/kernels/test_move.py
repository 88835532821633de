"""Ordered copies inside one buffer, where what one run writes another reads."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_datadist._kernels.hostcopy import move
from llm_datadist._kernels.runs import Bases, Plan, block_runs, indices, span_runs

MIB = 1 << 20


def moved(plan: Plan, memory: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    result: npt.NDArray[np.uint8] = memory.copy()
    for source, destination in plan.bases.tolist():
        for from_offset, to_offset, nbytes in plan.runs.tolist():
            at, to = (base - memory.ctypes.data for base in (source + from_offset, destination + to_offset))
            result[to : to + nbytes] = result[at : at + nbytes].copy()
    return result


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), blocks=st.integers(1, 60), block_bytes=st.sampled_from([1, 64, 100, 4096, 50_000]))
def test_blocks_that_depend_on_each_other(seed: int, blocks: int, block_bytes: int) -> None:
    rng = random.Random(seed)
    pairs = rng.randrange(blocks) + 1
    source, destination = ([rng.randrange(blocks) for _ in range(pairs)] for _ in range(2))
    memory = np.frombuffer(np.random.default_rng(seed).bytes(2 * blocks * block_bytes), np.uint8).copy()
    base = memory.ctypes.data
    runs = block_runs(indices(source, "source"), indices(destination, "destination"), blocks, blocks, block_bytes)
    # The second tensor pair reads what the first one wrote.
    plan = Plan(Bases([base, base], [base + blocks * block_bytes, base]), runs)
    expected = moved(plan, memory)
    move(plan)
    assert np.array_equal(memory, expected)


@pytest.mark.parametrize("shift", [1, 4097, MIB, MIB + 3, 3 * MIB])
@pytest.mark.parametrize("upwards", [False, True])
def test_one_long_run_onto_itself(shift: int, upwards: bool) -> None:
    nbytes = 4 * MIB + 321
    memory = np.frombuffer(np.random.default_rng(shift).bytes(nbytes + shift + 5), np.uint8).copy()
    offsets = (5, 5 + shift) if upwards else (5 + shift, 5)
    plan = Plan(Bases([memory.ctypes.data], [memory.ctypes.data]), span_runs(*offsets, nbytes))
    expected = moved(plan, memory)
    move(plan)
    assert np.array_equal(memory, expected)


def test_nothing_to_move() -> None:
    move(Plan(Bases([], []), span_runs(0, 0, 100)))
    move(Plan(Bases([1], [1]), span_runs(0, 0, 0)))


class Alarm(Exception):
    pass


def test_signals_are_seen_and_other_threads_run() -> None:
    memory = np.zeros(4 * MIB, np.uint8)
    base = memory.ctypes.data
    plan = Plan(Bases([base] * 200_000, [base + 2 * MIB] * 200_000), span_runs(0, 0, 2 * MIB))
    sent = []

    def send() -> None:
        time.sleep(0.1)
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGALRM)

    def raise_alarm(*_: object) -> None:
        raise Alarm

    former = signal.signal(signal.SIGALRM, raise_alarm)
    thread = threading.Thread(target=send)
    try:
        thread.start()
        with pytest.raises(Alarm):
            move(plan)
        assert time.monotonic() - sent[0] < 2
    finally:
        thread.join()
        signal.signal(signal.SIGALRM, former)
