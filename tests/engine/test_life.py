"""The word of a directory that tells the death of its owner: whatever ends the process, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import windows
from windows import SharedWindow

from llm_datadist._engine.directory import Directory, MappedDirectory
from llm_datadist._kernels import hostcopy
from llm_datadist._kernels.hostcopy import Liveness
from llm_datadist._kernels.runs import Bases, Plan, span_runs

NBYTES = 1 << 20
OWNER = """
import os, sys, threading
from windows import SharedWindow
from llm_datadist._engine.directory import Directory
shared = SharedWindow({nbytes}, int(sys.argv[1]))
directory = Directory(shared.window, 77)
alive = threading.Event()
def live():
    directory.come_alive()
    alive.set()
    threading.Event().wait()
threading.Thread(target=live, daemon=True).start()
alive.wait()
print("alive", flush=True)
if sys.argv[2] == "fork" and os.fork() == 0:
    print("child", flush=True)
    sys.stdin.read()
    os._exit(0)
line = sys.stdin.readline()
{end}
"""


@pytest.fixture
def shared() -> Iterator[SharedWindow]:
    window = SharedWindow(NBYTES)
    yield window
    window.close()


def start(shared: SharedWindow, end: str = "", how: str = "") -> subprocess.Popen[str]:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER.format(nbytes=NBYTES, end=end), str(shared.fd), how],
        pass_fds=[shared.fd],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"PYTHONPATH": str(Path(windows.__file__).parent)},
        text=True,
    )
    assert owner.stdout
    assert owner.stdout.readline() == "alive\n"
    return owner


@pytest.mark.parametrize("end", ["os._exit(3)", "sys.exit()", "os.abort()", "os.execv('/bin/true', ['true'])"])
def test_the_end_of_the_process_is_told(shared: SharedWindow, end: str) -> None:
    with start(shared, end) as owner:
        reader = MappedDirectory(shared.window, 77)
        assert reader.alive()
        owner.communicate("\n", timeout=60)
        assert not reader.alive()


def test_a_kill_is_told_though_a_forked_child_lives_on(shared: SharedWindow) -> None:
    with start(shared, how="fork") as owner:
        assert owner.stdout
        assert owner.stdout.readline() == "child\n"
        reader = MappedDirectory(shared.window, 77)
        guard = reader.guard([])
        source, target = SharedWindow(4096), SharedWindow(4096)
        plan = Plan(Bases([source.window.address], [target.window.address]), span_runs(0, 0, 64))
        # A closed descriptor would be that of a dead peer, if anybody looked.
        number = os.dup(shared.fd)
        os.close(number)
        closed = Liveness(number, -1)
        assert not closed.alive()
        assert reader.alive()
        assert hostcopy.copy(plan, guard, closed, 0, 1) == hostcopy.DONE
        owner.kill()
        owner.wait(60)
        assert not reader.alive()
        assert hostcopy.copy(plan, guard, closed, 0, 1) == hostcopy.STALE
        source.close()
        target.close()


def test_a_stopped_process_is_alive(shared: SharedWindow) -> None:
    with start(shared) as owner:
        reader = MappedDirectory(shared.window, 77)
        owner.send_signal(signal.SIGSTOP)
        assert reader.alive()
        owner.send_signal(signal.SIGCONT)
        owner.kill()


def test_letting_go_is_told_and_the_memory_is_free(shared: SharedWindow) -> None:
    """What the kernel would mark at the end of the thread is nobody's any more."""
    directory = Directory(shared.window, 77)
    readers = []

    def live() -> None:
        directory.come_alive()
        readers.append(MappedDirectory(shared.window, 77))
        assert readers[0].alive()
        directory.let_go()
        shared.word(512).value = 0

    thread = threading.Thread(target=live)
    thread.start()
    thread.join(60)
    assert not readers[0].alive()
    assert shared.word(512).value == 0


def test_a_directory_that_never_came_alive_says_nothing(shared: SharedWindow) -> None:
    Directory(shared.window, 77)
    reader = MappedDirectory(shared.window, 77)
    assert reader.alive()
    copied = SharedWindow(4096)
    plan = Plan(Bases([copied.window.address], [copied.window.address + 2048]), span_runs(0, 0, 64))
    number = os.dup(shared.fd)
    os.close(number)
    assert hostcopy.copy(plan, reader.guard([]), Liveness(number, -1), 0, 1) == hostcopy.PEER_GONE
    copied.close()
