"""What a refused call must look like: the exception's kind, its status code, and what the text names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest

from llm_datadist import LLMException, LLMStatusCode

PARAM_INVALID = LLMStatusCode.LLM_PARAM_INVALID

Expected = LLMStatusCode | type[Exception]


@contextmanager
def refuses(expected: Expected, *words: object) -> Iterator[None]:
    """Expect a status code, or TypeError or ValueError without one; the text must have each of the words."""
    kind = LLMException if isinstance(expected, LLMStatusCode) else expected
    with pytest.raises(kind) as caught:
        yield
    error = caught.value
    if isinstance(expected, LLMStatusCode):
        assert error.status_code is expected, error
        # who catches ValueError gets what the seeds promise.
        assert isinstance(error, ValueError) == (expected is PARAM_INVALID), error
    else:
        assert not isinstance(error, LLMException), error
    for word in words:
        assert str(word) in str(error), f"{word!r} is not in {str(error)!r}"


def name_of(rule: str, changes: Mapping[str, object]) -> str:
    """Name a row of a table of mistakes, without what differs from process to process."""
    return re.sub(" at 0x[0-9a-f]+", "", f"{rule}-{'-'.join(f'{k}={v}' for k, v in changes.items())}")[:70]
