"""Programs of their own, as users start them, on the backend of the test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import devices


def run(program: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a program in an empty folder; warnings are errors."""
    own = devices.take()
    try:
        return subprocess.run(
            [sys.executable, "-W", "error", "-c", program, *arguments],
            cwd=cwd,
            # The folder of this module has backends that only tests use.
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent), "PYTHONSAFEPATH": "1", **own},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        devices.give_back(own)
