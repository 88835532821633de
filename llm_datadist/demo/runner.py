"""Starts the demo's processes, compares what they say, prints it, and leaves no process behind."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from typing import TypeVar

from llm_datadist.demo.reports import LIMIT_S, MAX_TOKENS, NEW_TOKENS, Answer, Offer, Report

__all__ = ["MAX_TEXT_BYTES", "run"]

MAX_TEXT_BYTES = MAX_TOKENS - NEW_TOKENS
_STOP_S = 5

_T = TypeVar("_T")


class _DemoError(Exception):
    """A process ended or kept silent."""


def _enter(name: str, *arguments: object) -> None:
    importlib.import_module(f"llm_datadist.demo.{name}").run(*arguments)


class _Child:
    """One process of the demo, named after its module, and the connection over which it reports."""

    def __init__(self, name: str, *arguments: object) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        self.process = multiprocessing.get_context("spawn").Process(
            target=_enter, args=(name, theirs, *arguments), name=name, daemon=True
        )
        # Ctrl-C reaches every process of the terminal. Here it is this process alone that acts on it, so a child is
        # started with the signal blocked; it learns of the end by its connection. That holds off Ctrl-C here meanwhile,
        # because this process has one thread only: it leaves numpy to the others.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()

    def stop(self) -> None:
        self.connection.close()
        self.process.join(_STOP_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(_STOP_S)


@contextmanager
def _children() -> Iterator[list[_Child]]:
    children: list[_Child] = []
    try:
        yield children
    except BaseException:
        for child in children:
            child.process.terminate()  # not asked first: it may be deep in a pull
        raise
    finally:
        for child in children:
            child.stop()


def _receive(kind: type[_T], child: _Child, needed: list[_Child]) -> _T:
    """Wait for a child's report, as long as it and the children it needs are there."""
    processes = [one.process for one in (child, *needed)]
    ready = wait([child.connection, *(process.sentinel for process in processes)], LIMIT_S)
    ended = [process for process in processes if process.sentinel in ready]
    if child.connection in ready:
        try:
            report = child.connection.recv()
        except EOFError:
            ended = [child.process]
        else:
            assert isinstance(report, kind)
            return report
    if not ended:
        raise _DemoError(f"the {child.process.name} process said nothing within {LIMIT_S} s")
    ended[0].join(_STOP_S)
    raise _DemoError(f"the {ended[0].name} process ended too early, exit code {ended[0].exitcode}")


def run(text: bytes) -> int:
    """Run the demo.

    Parameters
    ----------
    text : bytes
        1 to `MAX_TEXT_BYTES` bytes, one token each.

    Returns
    -------
    int
        0 if the decoder got and wrote what one process alone does, 1 if not or if a process failed, 130 after Ctrl-C.
    """
    # The demo reads and writes cache memory as host memory, whatever else the machine has.
    os.environ["LLM_DATADIST_BACKEND"] = "simulator"
    # Two demos on one machine must not meet.
    os.environ["LLM_DATADIST_NAMESPACE"] = f"demo-{os.getpid()}-{time.monotonic_ns()}"
    # Sums in one order everywhere, so that two processes get the same bits.
    os.environ.update(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    # The helper process of multiprocessing; its start would unblock the signal that `_Child` blocks.
    resource_tracker.ensure_running()
    try:
        with _children() as children:
            children += [_Child("single", text), _Child("prompt", text)]
            single, owner = children
            expected = _receive(Answer, single, [])
            offer = _receive(Offer, owner, [])
            children.append(_Child("decoder", len(text), offer))
            report = _receive(Report, children[-1], [owner])
    except _DemoError as error:
        print(f"llm-datadist demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("llm-datadist demo: interrupted, all processes are ended", file=sys.stderr)
        return 130
    return _show(text, expected, report)


def _show(text: bytes, expected: Answer, report: Report) -> int:
    print("A prompt process computes the KV cache of a text; a decoder process pulls it and goes on writing.")
    print("The weights are random, so what it writes is nonsense. What counts is that every bit agrees.\n")
    print(f"  text         {len(text)} tokens, {text[:60]!r}{'...' if len(text) > 60 else ''}")
    print(f"  link         {report.link_s * 1e3:.2f} ms")
    correct = report.bulk_equal
    for call, what, pull in (
        ("pull_cache", "contiguous", report.contiguous),
        ("pull_blocks", "scattered blocks", report.paged),
    ):
        kv, tokens = pull.answer.kv == expected.kv, pull.answer.tokens == expected.tokens
        correct = correct and kv and tokens
        print(f"  {call:<12} {_speed(what, pull.nbytes, pull.seconds)}  KV {_equal(kv)}, new tokens {_equal(tokens)}")
    bulk = _speed("best of 5", report.bulk_nbytes, report.bulk_s)
    print(f"  pull_blocks  {bulk}  bytes {_equal(report.bulk_equal)}")
    print(f"  wrote        {bytes(report.contiguous.answer.tokens)!r}\n")
    if not correct:
        print("WRONG: two processes did not get what one process alone gets.")
        return 1
    print("Right: two processes got what one process alone gets.")
    return 0


def _speed(what: str, nbytes: int, seconds: float) -> str:
    unit, size = ("MiB", nbytes / 2**20) if nbytes >= 2**20 else ("KiB", nbytes / 2**10)
    return f"{what:<16} {size:6.1f} {unit} {seconds * 1e3:8.3f} ms {nbytes / seconds / 1e9:6.2f} GB/s"


def _equal(same: bool) -> str:
    return "equal" if same else "DIFFERENT"
