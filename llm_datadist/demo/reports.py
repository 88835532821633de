"""What the processes of the demo tell each other. Needs no numpy, so that the parent stays light."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LIMIT_S", "MAX_TOKENS", "NEW_TOKENS", "Answer", "Offer", "Pull", "Report"]

LIMIT_S = 60
MAX_TOKENS = 512
NEW_TOKENS = 24


@dataclass(frozen=True)
class Answer:
    """The digest of the prompt's keys and values, and the tokens that follow the text."""

    kv: str
    tokens: list[int]


@dataclass(frozen=True)
class Offer:
    """What the decoder must be told beside the keys: the first new token, and where the text's blocks are."""

    first_token: int
    blocks: list[int]


@dataclass(frozen=True)
class Pull:
    """One pull of the text's keys and values, and what came of it."""

    nbytes: int
    seconds: float
    answer: Answer


@dataclass(frozen=True)
class Report:
    """All that the decoder measured."""

    link_s: float
    contiguous: Pull
    paged: Pull
    bulk_nbytes: int
    bulk_s: float
    bulk_equal: bool
