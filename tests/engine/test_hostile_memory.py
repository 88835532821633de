"""Memory that a hostile peer offers, on which plain access could end this process by a signal."""

from __future__ import annotations

import fcntl
import os

import pytest
from windows import SharedWindow

from llm_datadist._engine.board import SPENT_AT, MappedBoard
from llm_datadist._engine.directory import Layout, Unreadable
from llm_datadist.backend import BackendError, Failure
from llm_datadist.backends.simulator.segments import F_ADD_SEALS, HUGE_PAGE, READ_BY_PEERS, SHARED, map_peer


@pytest.mark.parametrize("writable", [False, True])
def test_huge_pages_are_refused(writable: bool) -> None:
    """The size fits and the seals are right, but touching a page for which no huge page is free raises SIGBUS."""
    try:
        fd = os.memfd_create("huge", os.MFD_HUGETLB | os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    except OSError as error:
        pytest.skip(f"no memory file of huge pages can be made here: {error}")
    try:
        os.ftruncate(fd, HUGE_PAGE)
        fcntl.fcntl(fd, F_ADD_SEALS, SHARED if writable else READ_BY_PEERS)
        with pytest.raises(BackendError, match="not a memory file") as caught:
            map_peer(fd, HUGE_PAGE, writable=writable, name="board")
        assert caught.value.kind is Failure.LINK_FAILED
    finally:
        os.close(fd)


def test_a_board_too_small_for_its_directory_is_refused() -> None:
    """Spending a key of the directory's last entry would write behind the board."""
    layout = Layout.of(1 << 20)
    needed = SPENT_AT + layout.entry_count * 8
    for nbytes in (4096, needed - 8):
        small = SharedWindow(nbytes)
        try:
            with pytest.raises(Unreadable, match=f"{nbytes} bytes.*needs {needed}"):
                MappedBoard(small.window, layout)
        finally:
            small.close()
