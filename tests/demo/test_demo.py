"""The demo as a user starts it: three processes, Ctrl-C, and a process that is killed."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

LIMIT_S = 60


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "llm_datadist", "demo", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # its own process group, as a terminal gives
        env={**os.environ, "PYTHONSAFEPATH": "1"},
    )


@contextmanager
def demo(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = start(*arguments)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=LIMIT_S)


def members(group: int) -> dict[int, str]:
    """Give the living processes of a group by id, with their command lines."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (folder / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found[int(folder.name)] = command
    return found


def children(group: int) -> list[int]:
    return sorted(pid for pid, command in members(group).items() if "spawn_main" in command)


def wait_until(condition, what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not in {LIMIT_S} s: {what}"
        time.sleep(0.01)


def test_the_decoder_gets_what_one_process_alone_gets():
    with demo("A text of the test, with ümlauts.") as process:
        out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    assert err == ""
    assert len(re.findall("KV equal, new tokens equal", out)) == 2
    assert "bytes equal" in out
    assert "256.0 MiB" in out
    assert "DIFFERENT" not in out
    wait_until(lambda: members(process.pid) == {}, "no process is left")


def test_one_token_and_the_longest_text():
    for text in ("x", "y" * 488):
        with demo(text) as process:
            _, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, err


@pytest.mark.parametrize("text", ["", "y" * 489])
def test_a_text_of_a_wrong_length_is_refused(text):
    with demo(text) as process:
        _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 2
    assert "allowed are 1 to 488" in err


def test_two_demos_at_once_do_not_meet():
    with demo("one") as one, demo("two") as two:
        for process in (one, two):
            out, err = process.communicate(timeout=LIMIT_S)
            assert process.returncode == 0, out + err


@pytest.mark.parametrize("delay_s", [0, 0.05, 0.3, 0.6])
def test_ctrl_c_ends_all_processes_quietly(delay_s):
    with demo() as process:
        wait_until(lambda: children(process.pid), "a child is there")
        time.sleep(delay_s)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=LIMIT_S)
    # On a quick machine it may have come to its end before.
    assert process.returncode in (130, 0)
    assert "Traceback" not in err
    wait_until(lambda: members(process.pid) == {}, "no process is left")


def test_a_killed_process_is_reported_and_takes_the_others_along():
    with demo() as process:
        wait_until(lambda: children(process.pid), "a child is there")
        os.kill(children(process.pid)[-1], signal.SIGKILL)
        _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert re.search(r"the (single|prompt|decoder) process ended too early, exit code -9", err)
    assert "Traceback" not in err
    wait_until(lambda: members(process.pid) == {}, "no process is left")


def test_the_parent_leaves_numpy_to_the_others():
    # Threads of numpy's library would take the signal that is held off while a child is started.
    script = "import sys, llm_datadist.demo.runner; print('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=LIMIT_S).stdout == b"False\n"
