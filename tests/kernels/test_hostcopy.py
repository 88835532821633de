"""Bytes: each kernel against a slow model, between unreadable pages, at any alignment, size and number of threads."""

from __future__ import annotations

import mmap
import os
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llm_datadist._kernels import hostcopy
from llm_datadist._kernels.hostcopy import DONE, copy
from llm_datadist._kernels.runs import Bases, Plan, block_runs, indices, span_runs

KIB, MIB = 1 << 10, 1 << 20
Bytes = npt.NDArray[np.uint8]
#: Every shape of block: whole pages, whole lines, and lengths that fit nothing.
BLOCK_BYTES = [7, 63, 64, 255, 256, 300, 576, 1152, 4095, 4096, 4097, 5000, 8192, 12_345, 65_536, 300_001]
UNTOUCHED = 0x55

few = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def random_bytes(nbytes: int) -> Bytes:
    made: Bytes = np.frombuffer(np.random.default_rng(nbytes).bytes(nbytes), np.uint8)
    return made


def copied(plan: Plan, source: Bytes, destination: Bytes, begin: int, end: int) -> Bytes:
    """What `destination` holds after bytes [begin, end) of the plan, counted tensor by tensor, run by run."""
    result: Bytes = destination.copy()
    position = 0
    for from_base, to_base in plan.bases.tolist():
        for from_offset, to_offset, nbytes in plan.runs.tolist():
            low, high = max(begin - position, 0), min(end - position, nbytes)
            if low < high:
                at = from_base + from_offset - source.ctypes.data
                to = to_base + to_offset - destination.ctypes.data
                result[to + low : to + high] = source[at + low : at + high]
            position += nbytes
    return result


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("block_bytes", BLOCK_BYTES)
@pytest.mark.parametrize("at_start", [False, True], ids=["upper", "lower"])
def test_s50_scattered_blocks(
    kernel: str, arena: Callable[..., Any], block_bytes: int, threads: int, at_start: bool
) -> None:
    """Three tensors, repeated sources and destinations, and the outermost blocks touch unreadable pages."""
    rng = random.Random(block_bytes)
    tensors = 3
    total = 3 * MIB if threads == 1 or block_bytes < 256 else 18 * MIB
    blocks = total // tensors // block_bytes + 2
    destination_list = [blocks - 1, *(rng.randrange(blocks) for _ in range(blocks * 3 // 4)), 0]
    source_list = [0, *(rng.randrange(blocks) for _ in range(blocks * 3 // 4)), blocks - 1]
    source = arena(tensors * blocks * block_bytes, at_start=at_start)
    destination = arena(tensors * blocks * block_bytes, at_start=at_start)
    source.bytes[:] = random_bytes(len(source.bytes))
    source.protect(mmap.PROT_READ)
    destination.bytes[:] = UNTOUCHED
    expected = destination.bytes.copy().reshape(tensors, blocks, block_bytes)
    last_pair = dict(zip(destination_list, source_list, strict=True))
    expected[:, list(last_pair)] = source.bytes.reshape(expected.shape)[:, list(last_pair.values())]
    plan = Plan(
        Bases(
            [source.address + i * blocks * block_bytes for i in range(tensors)],
            [destination.address + i * blocks * block_bytes for i in range(tensors)],
        ),
        block_runs(
            indices(source_list, "source"), indices(destination_list, "destination"), blocks, blocks, block_bytes
        ),
    )
    assert copy(plan, None, None, 0, threads) == DONE
    assert np.array_equal(destination.bytes, expected.reshape(-1))


@pytest.mark.parametrize("nbytes", [0, 1, 64, 4096, 64 * KIB, 64 * KIB + 1, MIB, MIB + 1, 3 * MIB + 777, 9 * MIB])
@few
@given(source_offset=st.integers(0, 130), destination_offset=st.integers(0, 130))
def test_any_alignment(kernel: str, nbytes: int, source_offset: int, destination_offset: int) -> None:
    source = random_bytes(nbytes + 200)
    destination = np.full(nbytes + 200, UNTOUCHED, np.uint8)
    plan = Plan(
        Bases([source.ctypes.data], [destination.ctypes.data]), span_runs(source_offset, destination_offset, nbytes)
    )
    expected = copied(plan, source, destination, 0, nbytes)
    assert copy(plan, None, None, 0, 2) == DONE
    assert np.array_equal(destination, expected)


@few
@given(
    seed=st.integers(0, 2**32),
    block_bytes=st.sampled_from([17, 300, 576, 4096, 5000]),
    gap=st.integers(0, 100),
    threads=st.integers(1, 3),
    cuts=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_any_part_of_any_plan(
    kernel: str, seed: int, block_bytes: int, gap: int, threads: int, cuts: tuple[float, float]
) -> None:
    """Runs of mixed lengths and misaligned tensors, in three parts."""
    rng = random.Random(seed)
    blocks = 2 * MIB // block_bytes
    source_list: list[int] = []
    while len(source_list) < blocks * 3 // 4:
        start, length = rng.randrange(blocks), rng.choice([1, 2, 5, 30])
        source_list += range(start, min(start + length, blocks))
    destination_list = range(blocks)[-len(source_list) :]
    per = blocks * block_bytes + gap
    source, destination = random_bytes(3 * per), np.full(3 * per, UNTOUCHED, np.uint8)
    plan = Plan(
        Bases(
            [source.ctypes.data + i * per for i in range(3)],
            [destination.ctypes.data + (2 - i) * per for i in range(3)],
        ),
        block_runs(
            indices(source_list, "source"), indices(destination_list, "destination"), blocks, blocks, block_bytes
        ),
    )
    begin, end = sorted(int(cut * plan.nbytes) for cut in cuts)
    expected = copied(plan, source, destination, begin, end)
    assert copy(plan, None, None, 0, threads, begin, end) == DONE
    assert np.array_equal(destination, expected)
    expected = copied(plan, source, destination, 0, plan.nbytes)
    assert copy(plan, None, None, 0, 1, 0, begin) == DONE
    assert copy(plan, None, None, 0, 1, end) == DONE
    assert np.array_equal(destination, expected)


def one_page() -> tuple[Bytes, Bytes, Plan]:
    source, destination = random_bytes(4096), np.full(4096, UNTOUCHED, np.uint8)
    return source, destination, Plan(Bases([source.ctypes.data], [destination.ctypes.data]), span_runs(0, 0, 4096))


def test_parts_of_a_plan() -> None:
    source, destination, plan = one_page()
    assert copy(plan, None, None, 0, 1, 100, 100) == DONE
    assert (destination == UNTOUCHED).all()
    assert copy(plan, None, None, 0, 1, 100, 300) == DONE
    assert np.array_equal(np.flatnonzero(destination != UNTOUCHED), 100 + np.flatnonzero(source[100:300] != UNTOUCHED))
    assert copy(plan, None, None, 0, 1, end=-1) == DONE
    assert np.array_equal(destination, source)


@pytest.mark.parametrize("plan", [Plan(Bases([], []), span_runs(0, 0, 9)), Plan(Bases([8], [8]), span_runs(0, 0, 0))])
def test_nothing_to_copy(plan: Plan) -> None:
    assert copy(plan, None, None, 1, 3) == DONE


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"begin": -1}, "begin"),
        ({"begin": 4097}, "begin"),
        ({"begin": 9, "end": 8}, "begin"),
        ({"begin": 2**80}, "begin"),
        ({"end": 4097}, "end"),
        ({"end": -2}, "end"),
        ({"end": -(2**80)}, "end"),
        ({"threads": 0}, "threads"),
        ({"threads": -(2**80)}, "threads"),
        ({"threads": 2**80}, "threads"),
    ],
)
def test_refuses_numbers_out_of_range(arguments: dict[str, int], name: str) -> None:
    _, destination, plan = one_page()
    with pytest.raises(ValueError, match=f"^{name} is .*; allowed are "):
        copy(plan, None, None, 0, **{"threads": 1, **arguments})
    assert (destination == UNTOUCHED).all()


@pytest.mark.parametrize("threads", [1, 1000, 2**62])
@pytest.mark.parametrize("deadline_ns", [0, 2**63 - 1, 2**80])
def test_takes_any_later_deadline_and_any_number_of_threads(threads: int, deadline_ns: int) -> None:
    source, destination = random_bytes(20 * MIB), np.zeros(20 * MIB, np.uint8)
    plan = Plan(Bases([source.ctypes.data], [destination.ctypes.data]), span_runs(0, 0, 20 * MIB))
    assert copy(plan, None, None, deadline_ns, threads) == DONE
    assert np.array_equal(destination, source)


def test_plain_is_always_there_and_last() -> None:
    assert hostcopy.kernels()[-1] == "plain"


def test_select_kernel_gives_the_former_one() -> None:
    former = hostcopy.select_kernel("plain")
    assert hostcopy.select_kernel(former) == "plain"
    with pytest.raises(ValueError, match=r"'fast'.*plain"):
        hostcopy.select_kernel("fast")
    assert hostcopy.select_kernel(former) == former


def in_a_new_process(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_environment_selects_the_kernel() -> None:
    code = "from llm_datadist._kernels import hostcopy; print(hostcopy.select_kernel('plain'))"
    assert in_a_new_process(code, LLM_DATADIST_KERNEL="plain").stdout == "plain\n"
    assert in_a_new_process(code, LLM_DATADIST_KERNEL="").stdout == hostcopy.kernels()[0] + "\n"
    refused = in_a_new_process(code, LLM_DATADIST_KERNEL="fast")
    assert "ValueError" in refused.stderr
    assert "'fast'" in refused.stderr


def test_goes_on_with_the_threads_that_could_be_made() -> None:
    done = in_a_new_process(
        """
import resource, numpy as np
from llm_datadist._kernels.hostcopy import DONE, copy
from llm_datadist._kernels.runs import Bases, Plan, span_runs
n = 64 << 20
source, destination = np.arange(n // 8), np.zeros(n // 8, np.int64)
plan = Plan(Bases([source.ctypes.data], [destination.ctypes.data]), span_runs(0, 0, n))
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (12 << 20), -1))  # room for one stack of 8 MiB
outcome = copy(plan, None, None, 0, 16)
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
assert outcome == DONE
assert (source == destination).all()
"""
    )
    assert done.returncode == 0, done.stderr
