"""Tell in one line when the package was never built or installed."""

import importlib
import os.path

__all__ = ["require_built"]

_PARTS = (
    "llm_datadist.backends",
    "llm_datadist._kernels.hostcopy",
    "llm_datadist._kernels.process",
    "llm_datadist._kernels.records",
    "llm_datadist._kernels.runs",
    "llm_datadist._kernels.words",
)


def require_built() -> None:
    """Check that the compiled kernels and the mapped ``backends`` package can be imported.

    Raises
    ------
    ImportError
        One of them is missing, as in a source tree that was only unpacked; says what to do.
    """
    for name in _PARTS:
        remedy = (
            f"{name} is not installed or not built in {os.path.dirname(__file__)}: run 'pip install -e .' there, "
            "or, if the package is installed elsewhere, start Python in another folder"
        )
        try:
            part = importlib.import_module(name)
        except ImportError as error:
            raise ImportError(f"{remedy} ({error})", name=name) from error
        # A folder without __init__.py would hide the mapped package and pass as an empty one.
        if part.__file__ is None:
            raise ImportError(
                f"{remedy} (an empty folder of that name is in the way: {list(part.__path__)})", name=name
            )
