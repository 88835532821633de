"""Logging (S-200 to S-202)."""

import _thread
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from logged import logged

from llm_datadist import _log
from llm_datadist.utils.log import _find_caller

PROGRAM = """
import logging, sys
import llm_datadist
assert not logging.getLogger("LLM_DATADIST").handlers, "importing has a side effect"
from llm_datadist.utils.log import error, get_logger, info, warn
assert get_logger() is get_logger() is logging.getLogger("LLM_DATADIST")
get_logger().debug("a debug record")
info("an info %s", "record")
def careful(): warn("a %s", "warning")
careful()
error("100% error")
try: llm_datadist.CacheDesc(-1, [1], llm_datadist.DataType.DT_INT8)
except ValueError: pass
"""


def lines(tmp_path, level):
    env = {k: v for k, v in os.environ.items() if k != "ASCEND_GLOBAL_LOG_LEVEL"}
    if level is not None:
        env["ASCEND_GLOBAL_LOG_LEVEL"] = level
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    run = subprocess.run([sys.executable, str(path)], env=env, capture_output=True, text=True, timeout=60, check=True)
    assert run.stderr == ""
    return run.stdout.splitlines()


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        (None, ["ERROR", "ERROR"]),
        ("3", ["ERROR", "ERROR"]),
        ("4", ["ERROR", "ERROR"]),
        ("x", ["ERROR", "ERROR"]),
        ("2", ["WARNING", "ERROR", "ERROR"]),
        ("1", ["INFO", "WARNING", "ERROR", "ERROR"]),
        ("0", ["DEBUG", "INFO", "WARNING", "ERROR", "ERROR"]),
    ],
)
def test_level(tmp_path, level, expected):
    """S-200."""
    assert [line.split("]")[0].lstrip("[") for line in lines(tmp_path, level)] == expected


def test_format_names_the_caller(tmp_path):
    """S-201: file, line and function are those of the caller, S-202: a refused argument is logged."""
    _, warning, error, refused = lines(tmp_path, "1")
    assert "LLM_DATADIST(" in warning
    assert "[program.py:9]" in warning
    assert warning.endswith("careful: a warning")
    assert error.endswith("<module>: 100% error")
    assert "[cache_types.py:" in refused
    assert "num_tensors" in refused


def test_warnings_that_strangers_cause(monkeypatch):
    """One in a second, which tells how many were left out."""
    now = 100.0
    monkeypatch.setattr(_log, "time", SimpleNamespace(monotonic=lambda: now))
    seldom = _log.Seldom()
    with logged() as texts:
        for number in range(5):
            seldom.warn("a warning %d", number)
        now += 1
        seldom.warn("a warning %d", 5)
        now += 1
        seldom.warn("a warning %d", 6)
    assert texts == ["a warning 0", "a warning 5 (and 4 such warnings were left out before it)", "a warning 6"]


def run_as_bottom_frame(module):
    """Run _find_caller in a thread whose bottom frame belongs to a module of this name."""
    found = []
    ended = threading.Event()

    class Ended:
        def __del__(self):
            ended.set()

    scope = {"__name__": module, "find": _find_caller, "found": found}
    exec(compile("def bottom(_ended): found.append(find())", "bottom.py", "exec"), scope)
    _thread.start_new_thread(scope["bottom"], (Ended(),))
    assert ended.wait(10)
    return found[0]


@pytest.mark.parametrize("module", ["program", "llm_datadist.status"])
def test_find_caller_at_the_bottom_of_a_stack(module):
    """Also when there is no frame but ours."""
    assert run_as_bottom_frame(module) == ("bottom.py", 1, "bottom", None)
