"""Tiny stand-ins for ACL and HCCL, and processes of their own to open them in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llm_datadist.backends.acl.functions import ACL, HCCL, Function

TEXTS = {
    "aclGetRecentErrMsg": "const char *aclGetRecentErrMsg(void) { return 0; }",
    "aclrtGetSocName": 'const char *aclrtGetSocName(void) { return "Ascend910B2"; }',
}


def build(path: Path, source: str, *flags: str) -> Path:
    """Compile a shared library."""
    command = ["gcc", "-shared", "-fPIC", "-o", str(path), "-x", "c", "-", "-x", "none", *flags]
    done = subprocess.run(command, input=source, text=True, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return path


def build_acl(path: Path, *, lacks: tuple[str, ...] = (), **functions: str) -> Path:
    """Compile an ACL whose functions return 0, but for those whose source is given."""
    return build(path, _source(ACL, lacks, {**TEXTS, **functions}))


def build_hccl(path: Path, *, lacks: tuple[str, ...] = (), **functions: str) -> Path:
    """Compile an HCCL in the same way."""
    return build(path, _source(HCCL, lacks, functions))


def _source(functions: tuple[Function, ...], lacks: tuple[str, ...], sources: Mapping[str, str]) -> str:
    names = [function.name for function in functions if function.mandatory and function.name not in lacks]
    own = [source for name, source in sources.items() if name not in names and name not in lacks]
    return "\n".join([*own, *(sources.get(name, f"int {name}(void) {{ return 0; }}") for name in names)])


def run(script: str, folder: Path, **environment: str) -> Any:
    """Run a script in a process that searches libraries in a folder first; give what it prints, read as JSON.

    Libraries are open to all of a process and stay, so no two tests may open theirs in the same.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LLM_DATADIST_")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        env={**kept, "LD_LIBRARY_PATH": str(folder), **environment},
        cwd=folder,
        text=True,
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
