"""The secret of control connections between hosts, and the permission to do without: from the environment only."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pairs import options
from refusals import refuses

from llm_datadist import LLMException, LLMRole
from llm_datadist import LLMStatusCode as Code
from llm_datadist._options import EngineConfig, parse_options

SECRET = b"0123456789abcdef"


def parse() -> EngineConfig:
    return parse_options(LLMRole.DECODER, 1, options())


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the file that the environment names; nobody else may read it."""
    path = tmp_path / "secret"
    path.touch(0o600)
    monkeypatch.setenv("LLM_DATADIST_SECRET_FILE", str(path))
    return path


def test_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (parse().secret, parse().allow_insecure) == (None, False)
    monkeypatch.setenv("LLM_DATADIST_SECRET_FILE", "")
    monkeypatch.setenv("LLM_DATADIST_SECRET", "")
    assert parse().secret is None


@pytest.mark.parametrize(
    ("content", "secret"),
    [
        (SECRET, SECRET),
        (SECRET + b"\n", SECRET),
        (SECRET + b"\n\n", SECRET + b"\n"),
        (b" \xff\0" * 6, b" \xff\0" * 6),
        (bytes(4096), bytes(4096)),
        (bytes(4096) + b"\n", bytes(4096)),
    ],
)
def test_a_file(file: Path, content: bytes, secret: bytes) -> None:
    """Any bytes, less one newline at the end."""
    file.write_bytes(content)
    assert parse().secret == secret


def test_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_DATADIST_SECRET", "0123456789abcde\u00e9")
    assert parse().secret == "0123456789abcde\u00e9".encode()


def test_the_configuration_does_not_show_it(file: Path) -> None:
    file.write_bytes(SECRET)
    assert SECRET.decode() not in repr(parse())


@pytest.mark.parametrize("content", [b"", b"\n", SECRET[:-1], SECRET[:-1] + b"\n", bytes(4097), bytes(10000)])
def test_wrong_lengths(file: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused with the length, and without the secret."""
    file.write_bytes(content)
    with pytest.raises(LLMException, match=r"LLM_DATADIST_SECRET_FILE.*bytes, allowed are 16 to 4096") as refusal:
        parse()
    assert refusal.value.status_code is Code.LLM_PARAM_INVALID
    assert SECRET[:-1].decode() not in str(refusal.value)
    monkeypatch.delenv("LLM_DATADIST_SECRET_FILE")
    monkeypatch.setenv("LLM_DATADIST_SECRET", "short")
    with refuses(Code.LLM_PARAM_INVALID, "LLM_DATADIST_SECRET has 5 bytes"):
        parse()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601])
def test_a_file_for_others(file: Path, mode: int) -> None:
    file.write_bytes(SECRET)
    file.chmod(mode)
    with refuses(Code.LLM_PARAM_INVALID, str(file), f"mode {mode:03o}", "chmod 600"):
        parse()


def test_files_that_cannot_be_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.unlink()
    with refuses(Code.LLM_PARAM_INVALID, str(file), "cannot be read", "No such file"):
        parse()
    file.mkdir()
    with refuses(Code.LLM_PARAM_INVALID, "regular file"):
        parse()
    file.rmdir()
    os.mkfifo(file, 0o600)
    with refuses(Code.LLM_PARAM_INVALID, "regular file"):
        parse()


def test_both(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_bytes(SECRET)
    monkeypatch.setenv("LLM_DATADIST_SECRET", SECRET.decode())
    with refuses(Code.LLM_PARAM_INVALID, "LLM_DATADIST_SECRET_FILE and LLM_DATADIST_SECRET", "one of them"):
        parse()


def test_the_permission_to_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable, 0 or 1; there is no option of this name."""
    for text, allowed in (("", False), ("0", False), ("1", True)):
        monkeypatch.setenv("LLM_DATADIST_ALLOW_INSECURE", text)
        assert parse().allow_insecure is allowed
    monkeypatch.setenv("LLM_DATADIST_ALLOW_INSECURE", "yes")
    with refuses(Code.LLM_PARAM_INVALID, "LLM_DATADIST_ALLOW_INSECURE", "'yes'", "0 and 1"):
        parse()
    monkeypatch.delenv("LLM_DATADIST_ALLOW_INSECURE")
    config = parse_options(LLMRole.DECODER, 1, {**options(), "LLM_DATADIST_ALLOW_INSECURE": "1"})
    assert not config.allow_insecure
