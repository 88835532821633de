"""What one transfer or copy has taken: caches in use, a link to itself, a pin. All of it is given back, come what may.

A signal handler may raise between any two steps of Python code, so also between taking a thing and noting that it was
taken. Therefore each thing records *who* has it, in one step that no signal can divide, and giving back is harmless for
one who has nothing. Whoever starts an operation makes a `Use` first and gives everything of it back at the end.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Protocol, TypeVar

from llm_datadist._log import error
from llm_datadist.status import ParamInvalid

if TYPE_CHECKING:
    from llm_datadist._engine.board import PeerBoard
    from llm_datadist._engine.directory import Key
    from llm_datadist._engine.links import Link

__all__ = ["Owner", "Turn", "Use", "with_use"]


class Use:
    """One running operation; its identity is what the things that it takes record."""

    link: Link | None = None
    pin: tuple[PeerBoard, int] | None = None
    #: Where bytes may be on their way to the caches after the operation: says when that is over.
    until: Callable[[], bool] | None = None
    #: What is moved, for the text of a failure: a key with a slot, or an address.
    what: tuple[Key, int] | int = 0

    def __init__(self) -> None:
        self.caches: list[int] = []


class Owner(Protocol):
    """Somebody whose operations take things."""

    def give_back(self, use: Use) -> None:
        """Give back what an operation has; harmless when it has nothing."""

    def translated(self, use: Use, error: Exception) -> Exception:
        """Give the exception that the user gets for a failure of an operation."""


Self = TypeVar("Self", bound=Owner)
Args = ParamSpec("Args")


def with_use(
    operation: Callable[Concatenate[Self, Use, Args], None],
) -> Callable[Concatenate[Self, Args], None]:
    """Give an operation its `Use`, and give back what it took."""

    @functools.wraps(operation)
    def run(self: Self, /, *args: Args.args, **kwargs: Args.kwargs) -> None:
        use = Use()
        ended = False
        try:
            try:
                operation(self, use, *args, **kwargs)
            except Exception as e:
                other = self.translated(use, e)
                if other is e:
                    raise
                raise other from e
            finally:
                self.give_back(use)
                ended = True
        except ParamInvalid as e:
            # As what is refused before an operation begins.
            error("%s", str(e))
            raise
        finally:
            if not ended:
                # A signal came while the first attempt to give back was under way.
                self.give_back(use)

    return run


class Turn:
    """Lets one operation at a time have something. `release` by one who does not have it is harmless.

    Those who wait get it in the order in which they came, and nobody who comes later before them: else a thread that
    takes it again and again would leave no other a chance.
    """

    __slots__ = ("_changed", "_holder", "_waiting")

    def __init__(self) -> None:
        # One dict operation takes the turn and records the taker at once.
        self._holder: dict[str, object] = {}
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()

    def claim(self, taker: object, deadline_ns: int | None = None) -> bool:
        """Take the turn, waiting until a deadline if there is one; say whether it was got."""
        if not self._waiting and self._holder.setdefault("holder", taker) is taker:
            return True
        if deadline_ns is None:
            return False
        with self._changed:
            try:
                self._waiting.append(taker)
                while self._waiting[0] is not taker or self._holder.setdefault("holder", taker) is not taker:
                    left = (deadline_ns - time.monotonic_ns()) / 1e9
                    if left <= 0:
                        return False
                    self._changed.wait(left)
            finally:
                if taker in self._waiting:
                    self._waiting.remove(taker)
                self._changed.notify_all()
        return True

    def release(self, taker: object) -> None:
        """Give the turn to the next."""
        if self._holder.get("holder") is taker:
            del self._holder["holder"]
            # A waiter queues before it looks, and this looks after it gave the turn away, so none is missed.
            if self._waiting:
                with self._changed:
                    self._changed.notify_all()
