"""Say what this interpreter lacks to build the package: one line each, and the Debian packages on stdout.

Run before anything is installed, so that nobody has to read it out of a page of compiler output.
"""

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig

if sys.version_info < (3, 10):  # noqa: UP036, that is what this is for
    sys.exit(f"{sys.executable} is Python {sys.version.split()[0]}, needed is 3.10 or newer (PYTHON=... names another)")


def compiles(header: str) -> bool:
    """Say whether a C file that includes this header compiles for this interpreter."""
    include = sysconfig.get_paths()["include"]
    command = [*COMPILER, "-fsyntax-only", f"-I{include}", "-x", "c", "-"]
    return subprocess.run(command, input=f"#include <{header}>\n".encode(), stderr=subprocess.DEVNULL).returncode == 0


COMPILER = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "gcc")
HAS_COMPILER = shutil.which(COMPILER[0]) is not None

LACKS = [
    (importlib.util.find_spec("ensurepip") is None, "the module ensurepip", "python3-venv"),
    (not HAS_COMPILER, f"the C compiler {COMPILER[0]}", "build-essential"),
    (HAS_COMPILER and not compiles("limits.h"), "the C header limits.h", "build-essential"),
    (HAS_COMPILER and not compiles("Python.h"), "the C header Python.h", "python3-dev"),
]

missing = [(what, package) for lacks, what, package in LACKS if lacks]
for what, package in missing:
    print(f"{sys.executable} lacks {what}. On Debian: apt-get install {package}", file=sys.stderr)
print(*sorted({package for _, package in missing}), end="")
sys.exit(bool(missing))
