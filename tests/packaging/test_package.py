"""The package as it is installed: one copy of each module, light to import, one version."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

import llm_datadist.backends
from llm_datadist import _built
from llm_datadist._version import __version__

ROOT = Path(__file__).parents[2]


def python(script: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONSAFEPATH": "1", **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_mapped_package_is_a_real_one():
    assert llm_datadist.backends.__file__ is not None


def test_no_second_copy_of_the_backends():
    assert "backends" not in sys.modules


def test_import_needs_neither_numpy_nor_the_kernels():
    loaded = python("import sys, llm_datadist; print(*sys.modules)").split()
    assert "llm_datadist" in loaded
    assert "numpy" not in loaded
    assert not [name for name in loaded if name.startswith(("llm_datadist._kernels.", "llm_datadist.backends"))]


def test_import_has_no_side_effects():
    script = """
import os, signal, sys, threading, logging
before = dict(os.environ), signal.getsignal(signal.SIGINT), threading.active_count(), list(logging.root.handlers)
import llm_datadist
after = dict(os.environ), signal.getsignal(signal.SIGINT), threading.active_count(), list(logging.root.handlers)
print(before == after)
"""
    assert python(script) == "True\n"


def test_the_version_is_written_once():
    assert importlib.metadata.version("llm-datadist") == __version__
    assert f"## {__version__} " in (ROOT / "CHANGELOG.md").read_text()


def test_a_built_package_passes():
    _built.require_built()


def test_a_missing_part_is_told_in_one_line_with_the_remedy(monkeypatch):
    monkeypatch.setattr(_built, "_PARTS", ("llm_datadist._kernels.absent",))
    with pytest.raises(
        ImportError, match=r"llm_datadist\._kernels\.absent is not .*built in .*: run 'pip install -e \.'"
    ) as caught:
        _built.require_built()
    assert "\n" not in str(caught.value)


def test_a_stray_folder_in_the_place_of_the_backends_is_told(monkeypatch, tmp_path):
    (tmp_path / "stray").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(_built, "_PARTS", ("stray",))
    with pytest.raises(ImportError, match="an empty folder of that name is in the way"):
        _built.require_built()


def test_the_console_script_tells_it_too():
    script = """
import sys
from llm_datadist import _built, cli
_built._PARTS = ("llm_datadist._kernels.absent",)
sys.exit(cli.main(["demo"]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("llm-datadist: llm_datadist._kernels.absent is not installed or not built")
    assert done.stderr.count("\n") == 1
