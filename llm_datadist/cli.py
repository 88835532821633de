"""The console script ``llm-datadist``."""

import argparse
import sys
from collections.abc import Sequence

from llm_datadist._built import require_built

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
    arguments = parser.parse_args(argv)

    try:
        require_built()
        # Not before: the demo needs numpy and the compiled package.
        from llm_datadist.demo.runner import MAX_TEXT_BYTES, run
    except ImportError as error:
        print(f"llm-datadist: {error}", file=sys.stderr)
        return 1
    text = arguments.text.encode("utf-8", "surrogateescape")
    if not 1 <= len(text) <= MAX_TEXT_BYTES:
        demo.error(f"text has {len(text)} bytes; allowed are 1 to {MAX_TEXT_BYTES}")
    return run(text)
