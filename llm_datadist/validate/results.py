"""What a validation finds: checks, in steps."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Check", "Outcome", "Report", "Step", "explained"]


class Outcome(enum.Enum):
    """How a check came out."""

    OK = "ok"
    #: Something to know, or to mend before it matters.
    WARNING = "warning"
    FAILED = "failed"
    #: It does not apply here.
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    outcome: Outcome
    text: str
    #: What to do about it.
    remedy: str = ""
    #: Numbers behind the text, for programs.
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass
class Step:
    """One part of a validation."""

    name: str
    checks: list[Check] = field(default_factory=list)
    seconds: float = 0.0
    #: The JUnit file of a test run that was part of it.
    junit: str = ""


@dataclass(frozen=True)
class Report:
    """All of a validation."""

    version: str
    backend: str
    devices: list[str]
    peer: str
    steps: list[Step]

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return not any(check.outcome is Outcome.FAILED for step in self.steps for check in step.checks)


def explained(error: BaseException) -> str:
    """Say in one line what an exception says."""
    return " ".join(f"{type(error).__name__}: {error}".split())
