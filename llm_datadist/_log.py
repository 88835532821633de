"""The package's logger: made at first use, so that importing has no side effects."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time

__all__ = ["Seldom", "error", "get_logger", "info", "warn"]

NAME = "LLM_DATADIST"
LEVEL_VARIABLE = "ASCEND_GLOBAL_LOG_LEVEL"
LEVELS = {"0": logging.DEBUG, "1": logging.INFO, "2": logging.WARNING, "3": logging.ERROR}
FORMAT = (
    "[%(levelname)s] %(name)s(%(process)d,%(processName)s):%(asctime)s.%(msecs)03d "
    "[%(filename)s:%(lineno)d]%(thread)d %(funcName)s: %(message)s"
)

#: Seconds between two warnings that strangers can cause at will.
SELDOM_S = 1.0

#: Modules that only pass a message on: the interesting line is the one that called them.
_PASSING_ON = frozenset(
    {
        __name__,
        "llm_datadist._checks",
        "llm_datadist._engine.uses",
        "llm_datadist._manager",
        "llm_datadist.status",
    }
)

_logger: logging.Logger | None = None


class _StdoutHandler(logging.Handler):
    """Writes to what ``sys.stdout`` is now, not to what it was at the first record."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stdout, flush=True)
        except (OSError, ValueError):
            self.handleError(record)


def get_logger() -> logging.Logger:
    """Give the logger ``LLM_DATADIST``.

    Returns
    -------
    logging.Logger
        With one handler to standard output. Its level is that of the environment variable
        ``ASCEND_GLOBAL_LOG_LEVEL`` at the first call: 0 debug, 1 info, 2 warning, 3 or anything else error.

    Notes
    -----
    May be called from any thread. Records do not go on to the root logger, or programs that configure it would
    see each one twice.
    """
    global _logger
    if _logger is None:
        logger = logging.getLogger(NAME)
        logger.setLevel(LEVELS.get(os.environ.get(LEVEL_VARIABLE, ""), logging.ERROR))
        logger.propagate = False
        # Without a lock of ours, which a fork could leave held for ever in the child.
        if not any(isinstance(handler, _StdoutHandler) for handler in logger.handlers):
            handler = _StdoutHandler()
            handler.setFormatter(logging.Formatter(FORMAT, "%Y-%m-%d %H:%M:%S"))
            logger.addHandler(handler)
        _logger = logger
    return _logger


class Seldom:
    """Warnings that strangers can cause at will: one in a second, with the number of those left out before it.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 0.0
        self._left_out = 0

    def warn(self, text: str, *args: object) -> None:
        """Log as `warn` does, or count."""
        with self._lock:
            now = time.monotonic()
            if now < self._next:
                self._left_out += 1
                return
            self._next = now + SELDOM_S
            left_out, self._left_out = self._left_out, 0
        warn(f"{text} (and {left_out} such warnings were left out before it)" if left_out else text, *args)


def info(text: str, *args: object) -> None:
    """Log at INFO level, as `logging.info` does, for the caller's line."""
    _log(logging.INFO, text, args)


def warn(text: str, *args: object) -> None:
    """Log at WARNING level, as `logging.warning` does, for the caller's line."""
    _log(logging.WARNING, text, args)


def error(text: str, *args: object) -> None:
    """Log at ERROR level, as `logging.error` does, for the caller's line."""
    _log(logging.ERROR, text, args)


def _log(level: int, text: str, args: tuple[object, ...]) -> None:
    logger = _logger or get_logger()
    if logger.isEnabledFor(level):
        path, line, function, stack = _find_caller()
        logger.handle(logger.makeRecord(logger.name, level, path, line, text, args, None, function, sinfo=stack))


def _find_caller() -> tuple[str, int, str, str | None]:
    """Find file, line and function of the nearest frame that does not merely pass a message on.

    Returns
    -------
    tuple
        File, line, function and None (no stack text), also when every frame of the thread is one of ours.
    """
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__") in _PASSING_ON:
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name, None
