"""What a forked child must do with the engines it inherited: close their descriptors, at once and silently.

`os.register_at_fork` is process-wide and can't be undone, so one hook serves all engines, through weak references.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

__all__ = ["watch"]


class Inherited(Protocol):
    """Something that must let go of its descriptors in a child."""

    def abandon(self) -> None:
        """Close descriptors without telling any peer."""


_watched: weakref.WeakSet[Inherited] = weakref.WeakSet()
_registered = False


def watch(engine: Inherited) -> None:
    """Have `engine.abandon` called in every child that is forked from now on."""
    global _registered
    _watched.add(engine)
    if not _registered:
        os.register_at_fork(after_in_child=_abandon_all)
        _registered = True


def _abandon_all() -> None:
    for engine in list(_watched):
        engine.abandon()
