"""The examples of the documentation run as written, in two processes, and the README shows them unchanged."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
LIMIT_S = 60


def start(name: str, namespace: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(EXAMPLES / name)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "LLM_DATADIST_NAMESPACE": namespace, "PYTHONUNBUFFERED": "1"},
    )


def test_two_processes_pull_both_kinds_of_cache():
    namespace = f"examples-{os.getpid()}"
    with start("prompt.py", namespace) as prompt:
        try:
            assert prompt.stdout is not None
            assert "The caches are filled" in prompt.stdout.readline()
            with start("decoder.py", namespace) as decoder:
                try:
                    out, err = decoder.communicate(timeout=LIMIT_S)
                finally:
                    decoder.kill()
            assert decoder.returncode == 0, err
            link, contiguous, paged = out.splitlines()
            assert link == "LLMStatusCode.LLM_SUCCESS [<LLMStatusCode.LLM_SUCCESS: 0>]"
            assert contiguous == paged == "[b'AAAA', b'BBBB', b'CCCC', b'DDDD']"
            _, err = prompt.communicate("\n", timeout=LIMIT_S)
            assert prompt.returncode == 0, err
        finally:
            prompt.kill()


def test_the_readme_shows_the_examples_as_they_are():
    shown = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert shown == [(EXAMPLES / name).read_text() for name in ("prompt.py", "decoder.py")]


def test_the_two_commands_come_first():
    readme = (ROOT / "README.md").read_text()
    first = re.search(r"```sh\n(.*?)```", readme, re.DOTALL)
    assert first is not None
    assert [line.split("#")[0].strip() for line in first[1].splitlines()] == ["make demo", "make test"]
    assert readme.index("make demo") < 400
