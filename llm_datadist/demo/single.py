"""What one process gets that does all by itself: the measure for the other two."""

from __future__ import annotations

from multiprocessing.connection import Connection

from llm_datadist.demo.caches import ContiguousKv, contiguous_desc, digest, plain
from llm_datadist.demo.model import Model
from llm_datadist.demo.reports import NEW_TOKENS, Answer

__all__ = ["run"]


def run(connection: Connection, text: bytes) -> None:
    """Read the text and go on writing; send the `Answer`."""
    model, store = Model(), ContiguousKv(plain(contiguous_desc()))
    first = model.forward(list(text), 0, store)
    kv = digest(store, len(text))
    connection.send(Answer(kv, model.generate(first, len(text), NEW_TOKENS, store)))
