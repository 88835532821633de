"""The console script ``llm-datadist``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llm_datadist._built import require_built

if TYPE_CHECKING:
    from llm_datadist._addresses import Address

__all__ = ["main"]

_TEXT = "The prompt process reads this text once; the decoder process never sees it, only its KV cache."


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments after the program's name; by default those of the process.

    Returns
    -------
    int
        0 when all went well, 1 when something failed, 130 after Ctrl-C.
    """
    parser = argparse.ArgumentParser(prog="llm-datadist", description="KV-cache transfer between processes.")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="hand over a KV cache between two processes on this machine")
    demo.add_argument("text", nargs="?", default=_TEXT, help="the text whose KV cache is handed over")
    validate = commands.add_parser("validate", help="show what works between two devices, and how fast")
    _add_validate(validate)
    arguments = parser.parse_args(argv)

    try:
        require_built()
        return _demo(demo, arguments) if arguments.command == "demo" else _validate(validate, arguments)
    except ImportError as error:
        print(f"llm-datadist: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("llm-datadist: interrupted", file=sys.stderr)
        return 130


def _demo(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    # Not before: the demo needs numpy and the compiled package.
    from llm_datadist.demo.runner import MAX_TEXT_BYTES, run

    text = arguments.text.encode("utf-8", "surrogateescape")
    if not 1 <= len(text) <= MAX_TEXT_BYTES:
        parser.error(f"text has {len(text)} bytes; allowed are 1 to {MAX_TEXT_BYTES}")
    return run(text)


def _add_validate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", default="acl", help="the backend (default: acl)")
    parser.add_argument(
        "--devices", default="0,1", help="physical ids, one for each process on this host (default: 0,1)"
    )
    parser.add_argument(
        "--local-comm-res", metavar="FILES", help="files with llm.LocalCommRes, one for each of --devices, with commas"
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--peer", metavar="IP:PORT", help="the other process runs on that host, where --serve does")
    where.add_argument("--serve", metavar="IP:PORT", help="be that host; the port above is used too")
    parser.add_argument("--only", metavar="STEPS", help="some of environment,conformance,transfers,words")
    parser.add_argument("--conformance", metavar="PATTERN", default="", help="some tests of the suite, as pytest -k")
    parser.add_argument("--quick", action="store_true", help="few sizes and rounds: shows that it works, not how fast")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="write the report as JUnit XML")


def _validate(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    from llm_datadist.validate.command import STEPS, Request, serve, validate

    devices = arguments.devices.split(",")
    if not all(device.isascii() and device.isdigit() for device in devices):
        parser.error(f"--devices is {arguments.devices!r}; allowed are numbers with commas between them")
    tables = _tables(parser, arguments, len(devices))
    _check_backend(parser, arguments)
    if arguments.serve:
        serve(_address(parser, "--serve", arguments.serve), arguments.backend, devices, tables)
        return 0
    peer = _address(parser, "--peer", arguments.peer) if arguments.peer else None
    if peer is None and len(devices) < 2:
        parser.error(f"--devices is {arguments.devices!r}; without --peer two processes need a device each")
    steps = arguments.only.split(",") if arguments.only else list(STEPS)
    if not set(steps) <= set(STEPS):
        parser.error(f"--only is {arguments.only!r}; allowed are {', '.join(STEPS)}")
    passed = validate(
        Request(
            arguments.backend,
            devices,
            tables,
            peer,
            steps,
            arguments.conformance,
            arguments.quick,
            arguments.json,
            arguments.junit,
        )
    )
    return 0 if passed else 1


def _tables(parser: argparse.ArgumentParser, arguments: argparse.Namespace, count: int) -> list[str]:
    names = arguments.local_comm_res.split(",") if arguments.local_comm_res else []
    if names and len(names) != count:
        parser.error(f"--local-comm-res is {arguments.local_comm_res!r}; allowed is one file for each of --devices")
    try:
        return [Path(name).read_text() for name in names]
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"--local-comm-res is {arguments.local_comm_res!r}: {error}")


def _check_backend(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    from llm_datadist.backend import BackendError, make_backend

    if arguments.backend == "auto":
        parser.error("--backend is 'auto'; allowed are names of backends: what is validated must be known")
    try:
        declared = make_backend(arguments.backend).capabilities
    except BackendError as error:
        parser.error(error.text)
    if (arguments.peer or arguments.serve) and not declared.network:
        parser.error(f"--backend is {arguments.backend!r}, which links processes of one host: no --peer, no --serve")


def _address(parser: argparse.ArgumentParser, name: str, text: str) -> Address:
    from llm_datadist._addresses import parse_address
    from llm_datadist.status import LLMException

    try:
        address = parse_address(name, text)
    except LLMException as error:
        parser.error(str(error))
    if address.is_wildcard:
        parser.error(f"{name} is {text!r}; allowed are addresses of one host: the other side links to it")
    if address.port == 65535:
        parser.error(f"{name} is {text!r}; the port above is needed too, so the highest allowed is 65534")
    return address
