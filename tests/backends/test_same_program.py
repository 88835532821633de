"""One program, two backends: the environment alone says which."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import ascend
import ascend_session
import pytest

PROGRAM = Path(__file__).with_name("same_program.py")


@pytest.mark.parametrize("backend", ["simulator", "acl"])
def test_a_program_does_not_know_its_backend(backend: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "LLM_DATADIST_BACKEND": backend}
    if backend == "acl":
        libraries = ascend.build(tmp_path)
        environment |= {name: str(path) for name, path in zip(ascend_session.LIBRARIES, libraries, strict=True)}
        environment["FAKE_ASCEND_DOMAIN"] = f"same-{os.getpid()}"
        environment[ascend_session.REPORTS] = str(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-W", "error", str(PROGRAM)]
    with subprocess.Popen(
        [*command, "prompt", port], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as prompt:
        assert prompt.stdout
        assert prompt.stdout.readline() == "ready\n"
        decoder = subprocess.run(
            [*command, "decoder", port], env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        prompt.communicate("\n", timeout=60)
    assert (decoder.returncode, decoder.stdout) == (0, "equal\n"), decoder.stderr
    assert prompt.returncode == 0
    assert not list(tmp_path.glob("*.txt")), [report.read_text() for report in tmp_path.glob("*.txt")]
