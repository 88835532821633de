"""The thread that ends communicators."""

from __future__ import annotations

import threading

import pytest
from ascend import Link, MakeBackend

from llm_datadist.backend import BackendError, Failure
from llm_datadist.backends.acl.closer import Closer


class Ending:
    """Fails if it is told with what, and notes that it was ended."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error
        self.ended = False

    def end(self, deadline_ns: int) -> None:
        self.ended = True
        if self._error is not None:
            raise self._error


def test_whatever_fails_is_told_and_the_others_are_ended():
    closer, last = Closer(), Ending()
    closer.start()
    for error in (BackendError(Failure.FAILED, "the driver"), KeyError("a mistake"), ValueError()):
        closer.end(Ending(error))
    closer.end(last)
    assert closer.close() == ["the driver", "'a mistake'", "ValueError"]
    assert last.ended


def test_a_process_without_room_for_a_thread_gets_an_error(
    make_acl: MakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, right = make_acl(0), make_acl(1)
    threads = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if "closer" in thread.name:
            raise RuntimeError("can't start new thread")
        threads(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    link = Link(left, right)
    link.close()
    for end in link.ends:
        assert isinstance(end, BackendError), end
        assert end.kind is Failure.LINK_FAILED
        assert "can't start new thread" in end.text
