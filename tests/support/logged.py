"""What the library logs, whether or not a test before has made its logger."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from llm_datadist._log import get_logger


@contextmanager
def logged(level: int = logging.WARNING) -> Iterator[list[str]]:
    """Collect the messages from a level on."""

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    texts: list[str] = []
    logger, collector = get_logger(), Collector()
    before = logger.level
    logger.setLevel(level)
    logger.addHandler(collector)
    try:
        yield texts
    finally:
        logger.removeHandler(collector)
        logger.setLevel(before)
