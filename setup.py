"""Build script: the package list, the mapping of ``backends/``, and one table of Cython modules.

Everything that does not need code stands in ``pyproject.toml``.
"""

import os

from Cython.Build import cythonize
from setuptools import Extension, setup

DEBUG = os.environ.get("LLM_DATADIST_CYTHON_DEBUG") == "1"

# The one table of compiled modules. They all live in one folder, because Cython does not follow
# ``package_dir`` and so cannot cimport from ``backends/``.
KERNELS = ("runs", "hostcopy", "process", "records", "words")

DIRECTIVES = {
    "language_level": 3,
    "boundscheck": DEBUG,
    "wraparound": False,
    "initializedcheck": DEBUG,
    "cdivision": True,
    "embedsignature": True,
}

EXTENSIONS = [
    Extension(
        f"llm_datadist._kernels.{name}",
        [f"llm_datadist/_kernels/{name}.pyx"],
        depends=[f"llm_datadist/_kernels/{name}.h" for name in ("atomics", "copy", "plan", "process")],
        extra_compile_args=["-std=gnu11", "-O1" if DEBUG else "-O3", "-pthread", "-Wall", "-Wno-unused-function"],
        extra_link_args=["-pthread"],
    )
    for name in KERNELS
]

setup(
    packages=[
        "llm_datadist",
        "llm_datadist._engine",
        "llm_datadist._kernels",
        "llm_datadist.backends",
        "llm_datadist.backends.acl",
        "llm_datadist.backends.host",
        "llm_datadist.backends.simulator",
        "llm_datadist.demo",
        "llm_datadist.utils",
        "llm_datadist.v2",
        "llm_datadist.validate",
        "llm_datadist_v1",
        "llm_datadist_v1.utils",
    ],
    package_dir={"llm_datadist.backends": "backends"},
    package_data={"": ["py.typed", "*.pyi", "*.pxd", "*.h"]},
    ext_modules=cythonize(EXTENSIONS, compiler_directives=DIRECTIVES, build_dir="build/cython"),
)
