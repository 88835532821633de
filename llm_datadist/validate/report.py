"""A report as text, JSON and JUnit."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

from llm_datadist.validate.results import Check, Outcome, Report, Step

__all__ = ["check_lines", "summary", "write_json", "write_junit"]


def check_lines(check: Check) -> str:
    """Give the lines of a check."""
    remedy = f"\n             to do: {check.remedy}" if check.remedy else ""
    return f"  {check.outcome.value:<8} {check.name}: {check.text}{remedy}"


def summary(report: Report) -> str:
    """Give the last lines: what each step came to, and all of them."""
    lines = []
    for step in report.steps:
        counts = [f"{_count(step, outcome)} {outcome.value}" for outcome in Outcome if _count(step, outcome)]
        lines.append(f"  {step.name:<12} {step.seconds:8.1f} s  {', '.join(counts)}")
    return "\n".join([*lines, "PASSED" if report.passed else "FAILED"])


def write_json(report: Report, path: Path) -> None:
    """Write everything, numbers too."""
    steps = [
        {
            "name": step.name,
            "seconds": round(step.seconds, 3),
            "checks": [
                {
                    "name": check.name,
                    "outcome": check.outcome.value,
                    "text": check.text,
                    "remedy": check.remedy,
                    "figures": check.figures,
                }
                for check in step.checks
            ],
        }
        for step in report.steps
    ]
    whole = {
        "version": report.version,
        "backend": report.backend,
        "devices": report.devices,
        "peer": report.peer,
        "passed": report.passed,
        "steps": steps,
    }
    path.write_text(json.dumps(whole, indent=1) + "\n")


def write_junit(report: Report, path: Path) -> None:
    """Write a test suite for each step, and those of the test run that was part of one."""
    root = ElementTree.Element("testsuites", name="llm-datadist validate")
    for step in report.steps:
        suite = ElementTree.SubElement(
            root,
            "testsuite",
            name=step.name,
            tests=str(len(step.checks)),
            failures=str(_count(step, Outcome.FAILED)),
            skipped=str(_count(step, Outcome.SKIPPED)),
            errors="0",
            time=f"{step.seconds:.3f}",
        )
        for check in step.checks:
            case = ElementTree.SubElement(suite, "testcase", classname=f"validate.{step.name}", name=check.name)
            text = _printable(f"{check.text}\n{check.remedy}".strip())
            if check.outcome is Outcome.FAILED:
                ElementTree.SubElement(case, "failure", message=_printable(check.text)).text = text
            elif check.outcome is Outcome.SKIPPED:
                ElementTree.SubElement(case, "skipped", message=text)
            else:
                ElementTree.SubElement(case, "system-out").text = f"{check.outcome.value}: {text}"
        if step.junit:
            root.extend(ElementTree.fromstring(step.junit).iter("testsuite"))
    ElementTree.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)


def _count(step: Step, outcome: Outcome) -> int:
    return sum(check.outcome is outcome for check in step.checks)


def _printable(text: str) -> str:
    """Leave out what XML has no way to say, as a driver's message may have."""
    return "".join(character if character.isprintable() or character == "\n" else "?" for character in text)
