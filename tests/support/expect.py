"""What a test expects of a call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from llm_datadist import LLMException, LLMStatusCode


@contextmanager
def failure(code: LLMStatusCode, text: str | None = None) -> Iterator[None]:
    """Expect an LLMException with a code, and a text that matches a regular expression."""
    with pytest.raises(LLMException, match=text) as caught:
        yield
    assert caught.value.status_code == code, caught.value
