"""A strict type checker understands the public types, and finds mistakes in their use."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

import llm_datadist

CASES = pathlib.Path(__file__).with_name("typing_cases.py")


def test_cases(tmp_path):
    pytest.importorskip("mypy")
    package_root = pathlib.Path(llm_datadist.__file__).parents[1]
    env = dict(os.environ)
    if package_root.name != "site-packages":  # mypy finds installed packages by itself
        env["MYPYPATH"] = str(package_root)
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--no-error-summary"]
    run = subprocess.run(
        [*command, f"--cache-dir={tmp_path}", "--hide-error-codes", str(CASES)],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert not run.stderr, run.stderr
    found = dict(re.findall(r"typing_cases\.py:(\d+): error: (.*)", run.stdout))
    expected = {}
    for number, line in enumerate(CASES.read_text().splitlines(), 1):
        if " # E: " in line:
            expected[str(number)] = line.split(" # E: ")[1]
    assert len(expected) > 5
    assert found.keys() == expected.keys(), run.stdout
    for number, text in expected.items():
        assert text in found[number]
