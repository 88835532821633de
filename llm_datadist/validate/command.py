"""The command: which steps are run, by which processes, and what is written."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from llm_datadist._addresses import Address
from llm_datadist._version import __version__
from llm_datadist.validate.conformance import run_suite
from llm_datadist.validate.environment import of_process
from llm_datadist.validate.processes import Child, checks_of
from llm_datadist.validate.remote import connect_to, serve_at
from llm_datadist.validate.report import check_lines, summary, write_json, write_junit
from llm_datadist.validate.results import Check, Outcome, Report, Step, explained

__all__ = ["STEPS", "Request", "serve", "validate"]

STEPS: Final = ("environment", "conformance", "transfers", "words")
ENVIRONMENT_LIMIT_S: Final = 120.0
PAIR_LIMIT_S: Final = 1800.0
_MODULES: Final = "llm_datadist.validate"
_ACTING: Final = {"transfers": f"{_MODULES}.transfers:measure", "words": f"{_MODULES}.words:observe"}


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    backend: str
    #: As ``ASCEND_RT_VISIBLE_DEVICES`` counts them; one for each process.
    devices: list[str]
    #: ``llm.LocalCommRes`` of each; empty for none.
    tables: list[str]
    #: Where ``--serve`` runs; None for both processes on this host.
    peer: Address | None
    steps: list[str]
    #: Chooses tests of the suite; all when empty.
    conformance: str
    quick: bool
    json: Path | None
    junit: Path | None


def validate(request: Request) -> bool:
    """Run the steps, print and write the report, and say whether all passed."""
    # For all processes that are started. Two validations on one machine must not meet.
    os.environ["LLM_DATADIST_BACKEND"] = request.backend
    os.environ["LLM_DATADIST_NAMESPACE"] = f"validate-{os.getpid()}-{time.monotonic_ns()}"
    report = Report(__version__, request.backend, request.devices, str(request.peer or ""), [])
    for name in request.steps:
        step = Step(name)
        report.steps.append(step)
        print(f"{name}", flush=True)
        start = time.monotonic()
        for check in _checks(step, request):
            print(check_lines(check), flush=True)
        step.seconds = time.monotonic() - start
    print(summary(report), flush=True)
    if request.json is not None:
        write_json(report, request.json)
    if request.junit is not None:
        write_junit(report, request.junit)
    return report.passed


def serve(address: Address, backend: str, devices: list[str], tables: list[str]) -> None:
    """Be the peer of validations on other hosts, until Ctrl-C, or until nobody has come for a long time."""
    serve_at(address, {"LLM_DATADIST_BACKEND": backend, **of_process(devices[:1], tables[:1])})


def _checks(step: Step, request: Request) -> Iterator[Check]:
    if step.name == "conformance":
        if request.peer is not None and len(request.devices) < 2:
            step.checks.append(Check("suite", Outcome.SKIPPED, "it needs two devices on this host"))
        else:
            run_suite(step, request.backend, request.devices, request.conformance)
        yield from step.checks
        return
    try:
        for check in _environment(request) if step.name == "environment" else _pair(step.name, request):
            step.checks.append(check)
            yield check
    except Exception as error:  # the report tells it
        step.checks.append(Check(step.name, Outcome.FAILED, explained(error)))
        yield step.checks[-1]


def _environment(request: Request) -> Iterator[Check]:
    here = of_process(request.devices, request.tables)
    yield from checks_of(f"{_MODULES}.environment:look", here, ENVIRONMENT_LIMIT_S)
    if request.peer is not None:
        with _partner(request) as connection:
            target = f"{_MODULES}.environment:look_there"
            yield from checks_of(target, {}, ENVIRONMENT_LIMIT_S, connection, keep=connection)


def _pair(name: str, request: Request) -> Iterator[Check]:
    with _partner(request) as connection:
        here = of_process(request.devices[:1], request.tables[:1])
        yield from checks_of(_ACTING[name], here, PAIR_LIMIT_S, connection, request.quick, keep=connection)


@contextmanager
def _partner(request: Request) -> Iterator[Connection]:
    """Give a connection to a fresh partner, here or at the peer."""
    if request.peer is not None:
        with connect_to(request.peer) as connection:
            yield connection
        return
    ours, theirs = multiprocessing.Pipe()
    child = Child(f"{_MODULES}.partner:serve", of_process(request.devices[1:2], request.tables[1:2]), theirs, None)
    theirs.close()
    try:
        with ours:
            yield ours
    finally:
        child.join(seconds=10)
