"""The how-to pages: their scripts run as they are, each with two processes, and print what the page says."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLES = DOCS / "examples"
LIMIT_S = 60
# Two terminals, or shared by the others.
NOT_ALONE = {"prompt", "decoder", "unchanged", "both"}
ALONE = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem not in NOT_ALONE)


def shown(page: str) -> list[str]:
    return re.findall(r"```text\n(.*?)```", (DOCS / "howto" / page).read_text(), re.DOTALL)


def environment(name: str) -> dict[str, str]:
    # Scripts import what lies beside them, which this variable forbids.
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    return {**inherited, "LLM_DATADIST_NAMESPACE": f"{name}-{os.getpid()}", "PYTHONDONTWRITEBYTECODE": "1"}


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-u", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment("howto"),
    )


@pytest.mark.parametrize("name", ALONE)
def test_a_page_shows_what_its_script_prints(name):
    page = next(page for page in (DOCS / "howto").glob("*.md") if f"examples/{name}.py\n" in page.read_text())
    with start(str(EXAMPLES / f"{name}.py")) as script:
        try:
            out, err = script.communicate(timeout=LIMIT_S)
        finally:
            script.kill()
    assert script.returncode == 0, err
    assert out in shown(page.name), f"{page.name} does not show:\n{out}"


def test_a_failing_side_fails_the_script():
    script = "import os, sys; sys.path.insert(0, sys.argv[1])\nimport both\nboth.run(print, os.close)"
    with start("-c", script, str(EXAMPLES)) as done:
        _, err = done.communicate(timeout=LIMIT_S)
    assert done.returncode == 1
    assert err.endswith("a side of the example has failed; the first traceback above says why\n")


def test_the_script_for_devices():
    path = str(EXAMPLES / "unchanged.py")
    with start(path, "prompt") as prompt:
        try:
            assert prompt.stdout is not None
            assert "filled" in prompt.stdout.readline()
            with start(path, "decoder", "--device_id", "1") as decoder:
                try:
                    out, err = decoder.communicate(timeout=LIMIT_S)
                finally:
                    decoder.kill()
            assert decoder.returncode == 0, err
            assert out
            assert out in shown("vendor.md")[0]
            _, err = prompt.communicate("\n", timeout=LIMIT_S)
            assert prompt.returncode == 0, err
        finally:
            prompt.kill()


@pytest.mark.parametrize(("prompts", "decoders"), [(4, 8), (4, 16), (8, 4), (8, 8), (2, 4), (1, 16), (16, 2)])
def test_each_decoder_rank_gets_its_heads(monkeypatch, prompts, decoders):
    """The arithmetic of the page on heads, for all ranks: with replicated heads, and with several sources."""
    monkeypatch.syspath_prepend(EXAMPLES)
    spec = importlib.util.spec_from_file_location("heads_example", EXAMPLES / "heads.py")
    heads = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(heads)
    monkeypatch.delitem(sys.modules, "both")
    for rank in range(decoders):
        mine = heads.heads_of(rank, decoders)
        got = {}
        for owner, wanted in heads.sources(rank, decoders, prompts).items():
            theirs = heads.heads_of(owner, prompts)
            source = heads.pieces([4, 9], owner, prompts, wanted)
            destination = heads.pieces([0, 1], rank, decoders, wanted)
            for from_piece, to_piece in zip(source, destination, strict=True):
                assert to_piece not in got
                got[to_piece] = divmod(from_piece, len(theirs))[0], theirs[from_piece % len(theirs)]
        assert got == {
            place + len(mine) * i: (b, mine[place]) for i, b in enumerate((4, 9)) for place in range(len(mine))
        }
        assert sorted({h for r in range(decoders) for h in heads.heads_of(r, decoders)}) == list(range(heads.HEADS))
