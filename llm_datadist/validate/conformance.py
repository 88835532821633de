"""The conformance suite of a source checkout, as a part of a validation."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

import llm_datadist
from llm_datadist.validate.results import Check, Outcome, Step

__all__ = ["run_suite"]

LIMIT_S: Final = 3 * 3600.0
#: Tells tests which devices they have; see tests/support/devices.py.
DEVICES_VARIABLE: Final = "LLM_DATADIST_TEST_DEVICES"
_ROOT: Final = Path(llm_datadist.__file__).parents[1]
_TAIL_CHARACTERS: Final = 2000
_NAMED: Final = 20


def run_suite(step: Step, backend: str, devices: Sequence[str], pattern: str) -> None:
    """Run the suite, and put what came of it into a step.

    Parameters
    ----------
    step : Step
        Gets the checks, and the JUnit report of the run.
    backend : str
        Name of the backend.
    devices : sequence of str
        One for each process of a test.
    pattern : str
        Chooses tests as ``pytest -k`` does; all when empty.
    """
    if problem := _missing():
        step.checks.append(Check("suite", Outcome.FAILED, *problem))
        return
    with tempfile.TemporaryDirectory(prefix="llm-datadist-validate-") as folder:
        junit, output = Path(folder, "junit.xml"), Path(folder, "output")
        command = [sys.executable, "-m", "pytest", "tests/conformance", "-q", "--backend", backend]
        command += ["-p", "no:cacheprovider", "-o", "junit_family=xunit2", f"--junit-xml={junit}"]
        command += ["-k", pattern] if pattern else []
        environment = {**os.environ, "PYTHONSAFEPATH": "1"}
        if backend == "acl":
            environment[DEVICES_VARIABLE] = ",".join(devices)
        with output.open("wb") as file:
            code = _run(command, environment, file.fileno())
        tail = output.read_text(errors="replace")[-_TAIL_CHARACTERS:]
        if not junit.exists():
            why = f"did not end within {LIMIT_S:.0f} s" if code is None else f"ended with code {code}"
            step.checks.append(Check("suite", Outcome.FAILED, f"pytest {why}; its last lines are:\n{tail}"))
            return
        step.junit = junit.read_text()
    step.checks += _counted(step.junit, code)


def _missing() -> tuple[str, str] | None:
    """Say what the suite lacks, and what to do."""
    if not (_ROOT / "tests" / "conformance").is_dir():
        return (
            "the tests are not in an installed package",
            "run it from a source checkout (pip install -e '.[test]'), or leave it out: --only environment,...",
        )
    if importlib.util.find_spec("pytest") is None:
        return "pytest is not installed", "pip install -e '.[test]' in the source checkout"
    return None


def _run(command: Sequence[str], environment: dict[str, str], output: int) -> int | None:
    """Run pytest and all that it starts; give its exit code, or None when the time limit ended it."""
    process = subprocess.Popen(
        command,
        cwd=_ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _counted(junit: str, code: int | None) -> list[Check]:
    checks = []
    outcomes: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    failing = []
    for case in ElementTree.fromstring(junit).iter("testcase"):
        what = next((tag for tag in ("failure", "error", "skipped") if case.find(tag) is not None), "passed")
        outcomes[what] += 1
        if what == "skipped":
            reasons[case.find("skipped").get("message", "")] += 1  # type: ignore[union-attr]
        elif what != "passed":
            failing.append(f"{case.get('classname')}.{case.get('name')}")
    text = ", ".join(f"{count} {what}" for what, count in sorted(outcomes.items())) or "no test was run"
    if failing or code != 0:
        named = "; ".join(failing[:_NAMED]) + f"; and {len(failing) - _NAMED} more" * (len(failing) > _NAMED)
        remedy = "read the failures in the JUnit report; run one alone with pytest tests/conformance -k NAME"
        checks.append(Check("suite", Outcome.FAILED, f"{text} (pytest's code {code}): {named}", remedy))
    else:
        checks.append(Check("suite", Outcome.OK, text, figures=dict(outcomes)))
    for reason, count in reasons.most_common():
        checks.append(Check("suite", Outcome.SKIPPED, f"{count} tests: {reason}"))
    return checks
