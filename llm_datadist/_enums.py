"""Integer enumerations that print by name, in the same way on every Python version."""

from __future__ import annotations

import enum


class NamedIntEnum(enum.IntEnum):
    """An `enum.IntEnum` whose ``str()`` is ``Class.MEMBER``."""

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"

    def __format__(self, spec: str) -> str:
        # Python 3.11 began to format integer enumerations as bare numbers.
        return format(int(self), spec) if spec else str(self)


class LLMRole(NamedIntEnum):
    """What a process does with caches."""

    PROMPT = 1
    DECODER = 2
    MIX = 3
