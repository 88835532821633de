"""Processes of a validation: whatever a driver does to one of them, the report is written by another."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Mapping
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Final

from llm_datadist.validate.results import Check, Outcome, explained

__all__ = ["Child", "checks_of"]

_STOP_S: Final = 10.0


class Child:
    """A process that runs ``function`` of a module with these arguments.

    Parameters
    ----------
    target : str
        ``module:function``.
    environment : mapping
        Variables that the process gets before it imports anything.
    arguments : object
        May be connections.
    """

    def __init__(self, target: str, environment: Mapping[str, str], *arguments: object) -> None:
        self.process = multiprocessing.get_context("spawn").Process(
            target=_enter, args=(target, dict(environment), arguments), name=target.rpartition(".")[2], daemon=True
        )
        # Ctrl-C reaches every process of the terminal, and one of them is to act on it. The helper process of
        # multiprocessing would unblock the signal when it starts.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def join(self, seconds: float) -> None:
        """Wait for the end of the process as long as that, and then end it."""
        self.process.join(seconds)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _enter(target: str, environment: dict[str, str], arguments: tuple[object, ...]) -> None:
    os.environ.update(environment)
    module, _, function = target.partition(":")
    getattr(importlib.import_module(module), function)(*arguments)


def checks_of(
    target: str, environment: Mapping[str, str], limit_s: float, *arguments: object, keep: Connection | None = None
) -> Iterator[Check]:
    """Run a function that gives checks in a process of its own; hand them on as they come.

    Parameters
    ----------
    target, environment, arguments
        As for `Child`.
    limit_s : float
        Until when the process must have ended.
    keep : Connection, optional
        One of the arguments, which is only the process's from then on.
    """
    ours, theirs = multiprocessing.Pipe(duplex=False)
    child = Child("llm_datadist.validate.processes:send_checks", environment, theirs, target, arguments)
    theirs.close()
    if keep is not None:
        keep.close()
    end = time.monotonic() + limit_s
    patience_s = 0.0  # whoever stops to listen, by Ctrl-C for example, does not wait for the process
    try:
        while wait([ours], max(0.0, end - time.monotonic())):
            check = ours.recv()
            if check is None:
                patience_s = _STOP_S
                return
            yield check
        text = f"did not end within {limit_s:.0f} s"
        yield Check("process", Outcome.FAILED, text, "look at its last lines, and at the driver's log")
    except EOFError:
        child.process.join(_STOP_S)
        text = f"ended too early, with exit code {child.process.exitcode}"
        yield Check("process", Outcome.FAILED, text, "look at the driver's log; a negative code is a signal")
    finally:
        ours.close()
        child.join(patience_s)


def send_checks(connection: Connection, target: str, arguments: tuple[object, ...]) -> None:
    """Run the function, in its process."""
    module, _, function = target.partition(":")
    try:
        for check in getattr(importlib.import_module(module), function)(*arguments):
            connection.send(check)
    except Exception as error:  # whatever went wrong is what was to be found out
        connection.send(Check(function, Outcome.FAILED, explained(error)))
    connection.send(None)
