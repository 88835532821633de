"""Fixtures for tests that need many processes, or whose processes die."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator

import pytest
from peer import Peer


@pytest.fixture
def start_quick() -> Iterator[Callable[[], Peer]]:
    """Give a function that starts a peer within milliseconds; the peers end with the test."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["llm_datadist._engine.engine", "inside"])
    peers: list[Peer] = []

    def start() -> Peer:
        peers.append(Peer("forkserver"))
        return peers[-1]

    yield start
    for peer in peers:
        peer.close()
